"""Numbers and moments on their grids: native columns, transforms, datetimes, and what encoding and decoding keep."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anamorph.columns import Categorical, Codes, Numeric, Ordinal
from anamorph.errors import SchemaError
from anamorph.ranges import MOST_BINS, Datetime, instant
from anamorph.schema import Schema, parse
from anamorph.sources import encode
from anamorph.table import Table

STEPS = 2**20
OLD = Schema(
    (
        Categorical(name="sex", categories=("F", "M"), other=True),
        Ordinal(name="school", categories=("none", "degree"), missing=True, source="public"),
        Numeric(name="age", lower=16, upper=95, bins=16, integer=True),
        Numeric(name="pay", lower=0, upper=1e5),
        Codes(name="code", values=3),
    ),
    dataset="survey",
)


def decoded(column, codes, seed=0):
    schema = Schema((column,))
    table = Table(np.asarray(codes, np.int32)[:, None], schema.sizes)
    return schema.decode(table, np.random.default_rng(seed))["x"].combine_chunks()


def encoded(column, values):
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return encode(pa.table({"x": array}), Schema((column,))).codes[:, 0]


def some_codes(column, seed=0, count=3000):
    """Both ends, and others at random."""
    drawn = np.random.default_rng(seed).integers(0, column.size, count)
    return np.concatenate([np.arange(min(40, column.size)), column.size - 1 - np.arange(min(40, column.size)), drawn])


TRANSFORMS = st.sampled_from(["none", "log", "signed-log", "quantile"])
SHARES = st.sets(st.integers(1, 63).map(lambda n: n / 64), max_size=6)
REALS = st.floats(-1e9, 1e9) | st.integers(-1000, 1000).map(float)


def numeric_or(width, shares, **fields):
    """The column; or with other bounds, where doubles cannot tell its steps apart. Knots are at shares of the range."""
    for lower in (fields["lower"], 0):
        bounds = {"lower": lower, "upper": lower + width}
        inner = [float(lower + width * share) for share in sorted(shares)]
        knots = {"knots": (lower, *inner, lower + width)} if fields["transform"] == "quantile" else {}
        try:
            return Numeric(name="x", **fields | bounds | knots)
        except SchemaError:
            if lower == 0:
                raise
    return None


@st.composite
def real_columns(draw):
    lower = draw(REALS)
    width = draw(st.floats(1, 1e12) | st.integers(1, 5000).map(float))
    kind = {"transform": draw(TRANSFORMS), "missing": draw(st.booleans())}
    bins = draw(st.sampled_from([{"native": True}, {"bins": 7}, {"bins": 300}]))
    return numeric_or(width, draw(SHARES), lower=lower, **kind, **bins)


@st.composite
def whole_columns(draw, transforms=TRANSFORMS):
    lower = draw(st.integers(-(10**6), 10**6) | st.integers(-(2**52), 2**52))
    width = draw(st.integers(1, 300) | st.integers(1, 10**7) | st.integers(1, 2**52))
    kind = {"transform": draw(transforms), "missing": draw(st.booleans()), "native": True, "integer": True}
    return numeric_or(min(width, 2**53 - 1 - lower), draw(SHARES), lower=lower, **kind)


def test_a_native_number_has_as_many_steps_as_it_needs():
    real = Numeric(name="x", lower=-1.5, upper=3, native=True, missing=True)
    assert (real.bins, real.regular, real.size, real.empty_code) == (STEPS, STEPS, STEPS + 1, STEPS)
    whole = Numeric(name="x", lower=-5, upper=99, native=True, integer=True)
    assert (whole.bins, whole.size) == (105, 105)
    assert encoded(whole, np.arange(-5, 100)).tolist() == list(range(105))
    assert decoded(whole, np.arange(105)).to_pylist() == list(range(-5, 100))
    assert Numeric(name="x", lower=0, upper=STEPS - 1, native=True, integer=True).bins == STEPS
    assert Numeric(name="x", lower=0, upper=STEPS, native=True, integer=True).bins == STEPS
    assert Numeric(name="x", lower=0, upper=9, native=True, integer=True, transform="log").bins == STEPS
    assert MOST_BINS == STEPS


def test_native_columns_are_told_from_coded_ones():
    schema = Schema(
        (
            Codes(name="a", values=2),
            Numeric(name="b", lower=0, upper=1, native=True),
            Numeric(name="c", lower=0, upper=1),
            Datetime(name="d", lower="2020-01-01", upper="2021-01-01"),
            Datetime(name="e", lower="2020-01-01", upper="2021-01-01", bins=4),
        )
    )
    assert [column.native for column in schema.columns] == [False, True, False, True, False]
    assert (schema.numbers, schema.coded) == ((1, 3), (0, 2, 4))
    assert (OLD.numbers, OLD.coded) == ((), (0, 1, 2, 3, 4))
    assert [column.grid is not None for column in schema.columns] == [False, True, True, True, True]


@given(real_columns(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_encoding_undoes_decoding_of_reals(column, seed):
    codes = some_codes(column, seed)
    values = decoded(column, codes, seed)
    assert np.array_equal(encoded(column, values), codes)
    known = np.asarray(values.drop_null())
    assert (known >= column.lower).all()
    assert (known <= column.upper).all()
    assert values.null_count == (codes == column.size - 1).sum() * column.missing


@given(whole_columns(transforms=st.just("none")), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_encoding_undoes_decoding_of_whole_numbers(column, seed):
    codes = some_codes(column, seed)
    values = decoded(column, codes, seed)
    assert values.type == pa.int64()
    assert np.array_equal(encoded(column, values), codes)
    known = np.asarray(values.drop_null())
    assert (known >= column.lower).all()
    assert (known <= column.upper).all()


@given(whole_columns(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_decoding_a_whole_number_errs_by_less_than_its_step(column, seed):
    generator = np.random.default_rng(seed)
    values = generator.integers(int(column.lower), int(column.upper) + 1, 2000)
    values[:2] = int(column.lower), int(column.upper)
    codes = encoded(column, values)
    again = np.asarray(decoded(column, codes, seed))
    assert np.array_equal(encoded(column, again), codes)  # the codes of whole numbers are restored
    low, high = column.at(codes), column.at(codes + 1.0)
    slack = 1e-9 * (1 + np.abs(values)) + (high - low) * 2e-6
    assert (np.abs(again - values) <= high - low + slack).all()
    alone = high - low < 0.5
    assert np.array_equal(again[alone], values[alone])


@given(whole_columns(transforms=st.sampled_from(["log", "signed-log", "quantile"])), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_a_step_without_a_whole_number_gives_the_nearest(column, seed):
    codes = np.random.default_rng(seed).integers(0, column.bins, 2000)
    values = np.asarray(decoded(column, codes, seed))
    assert (values >= column.lower).all()
    assert (values <= column.upper).all()
    moved = encoded(column, values) != codes
    middle = column.at(codes + 0.5)
    assert (np.abs(values - middle)[moved] <= 0.5 + 1e-9 * np.abs(middle)[moved]).all()


@given(real_columns(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_a_real_is_decoded_to_its_own_step(column, seed):
    generator = np.random.default_rng(seed)
    values = generator.uniform(column.lower, column.upper, 2000)
    codes = encoded(column, values)
    again = np.asarray(decoded(column, codes, seed))
    low, high = column.at(codes), column.at(codes + 1.0)
    assert (np.abs(again - values) <= (high - low) * (1 + 1e-5) + 1e-9 * np.spacing(np.abs(values))).all()


@given(real_columns() | whole_columns(), st.lists(st.floats(), max_size=30))
@settings(deadline=None, max_examples=40)
def test_the_engine_and_numpy_agree(column, extra):
    generator = np.random.default_rng(len(extra))
    inside = generator.uniform(float(column.lower), float(column.upper), 500)
    ends = [float(column.lower), float(column.upper), 0.0, -0.0, math.inf, -math.inf, 1e308, -1e308, 5e-324]
    values = np.array([*inside, *ends, *(value for value in extra if not math.isnan(value))])
    places = column.at(generator.integers(0, column.bins + 1, 500))
    assert np.array_equal(encoded(column, values), column.bin(values))
    found, expected = encoded(column, places), column.bin(places)
    assert (np.abs(found - expected) <= (1 if column.transform in ("log", "signed-log") else 0)).all()


@pytest.mark.parametrize("transform", ["none", "log", "signed-log", "quantile"])
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_bounds_and_bad_cells(transform, integer, native):
    kind = {"transform": transform, "integer": integer, "native": native}
    kind |= {"knots": (-7, -1, 0, 0.5, 30, 1000)} if transform == "quantile" else {}
    column = Numeric(name="x", lower=-7, upper=1000, missing=True, **kind)
    last = column.bins - 1
    cells = ["-7", "1000", "-8", "1e30", "-inf", "inf", "1e400", "", "nan", "1,000", "x", "2020-01-01", None, " 1000 "]
    expected = [0, last, 0, last, 0, last, last, *[last + 1] * 6, last]
    assert encoded(column, pa.array(cells, pa.string())).tolist() == expected
    reals = [-7.0, 1000.0, -math.inf, math.inf, math.nan, None]
    assert encoded(column, pa.array(reals, pa.float64())).tolist() == [0, last, 0, last, last + 1, last + 1]
    bare = replace(column, missing=False)
    assert encoded(bare, pa.array(["x", None, "-7"])).tolist() == [last, last, 0]


def test_transforms_are_the_declared_functions():
    log = Numeric(name="x", lower=10, upper=10 + math.e**4 - 1, bins=4, transform="log")
    assert log.width == pytest.approx(4)
    assert log.at([0, 1, 2, 4]) == pytest.approx([10, 9 + math.e, 9 + math.e**2, 9 + math.e**4])
    values = [10, 9.99 + math.e, 9.01 + math.e, 9 + math.e**3.5]
    assert encoded(log, pa.array(values)).tolist() == [0, 1, 1, 3]
    signed = Numeric(name="x", lower=1 - math.e**2, upper=math.e**2 - 1, bins=4, transform="signed-log")
    assert signed.at([0, 1, 2, 3, 4]) == pytest.approx([1 - math.e**2, 1 - math.e, 0, math.e - 1, math.e**2 - 1])
    assert encoded(signed, pa.array([-3.0, -1.0, -1e-3, 0.0, 1.0, 3.0])).tolist() == [0, 1, 1, 2, 2, 3]


def test_a_number_on_an_edge_belongs_to_the_step_above_in_every_engine():
    column = Numeric(name="x", lower=0, upper=2**24 - 1, bins=24, integer=True, transform="log")
    edges = 2 ** np.arange(24) - 1  # ln(1 + x) is a whole number of steps, but for the last bit
    assert encoded(column, edges).tolist() == list(range(24))
    assert column.bin(edges.astype(np.float64)).tolist() == list(range(24))
    assert column.firsts.tolist() == [*edges.tolist(), 2**24]


def test_heavy_tails_keep_their_small_numbers_apart():
    plain = Numeric(name="x", lower=0, upper=1e9, native=True)
    log = replace(plain, transform="log")
    small = np.array([0.0, 0.01, 0.5, 1.0, 3.0])
    assert len(set(encoded(plain, small).tolist())) == 1
    assert len(set(encoded(log, small).tolist())) == 5


def test_numbers_are_drawn_uniformly_in_the_transform():
    column = Numeric(name="x", lower=0, upper=math.e**4 - 1, bins=2, transform="log")
    drawn = column.forward(np.asarray(decoded(column, np.ones(4000, np.int64))))
    assert 2 < drawn.min() < 2.02 + 2 / 128
    assert 4 - 2 / 128 - 0.02 < drawn.max() < 4
    assert abs(drawn.mean() - 3) < 5 * 2 / math.sqrt(12 * 4000)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"native": 1}, "native (1) must be true or false"),
        ({"native": True, "bins": 5}, "bins (5) must be left out: a native number has none"),
        ({"native": True, "bins": None}, "bins (None) must be left out"),
        ({"transform": "ln"}, "transform ('ln') must be none, log, signed-log or quantile"),
        ({"transform": None}, "transform (None) must be none, log, signed-log or quantile"),
        ({"transform": ["log"]}, "must be none, log, signed-log or quantile"),
        ({"native": True, "lower": 1, "upper": 1 + 1e-12}, "that doubles can tell apart"),
        ({"native": True, "lower": 1e15, "upper": 1e15 + 10}, "that doubles can tell apart"),
        ({"transform": "log", "lower": 0, "upper": 1e-20}, "that doubles can tell apart"),
        ({"transform": "log", "lower": 1e15, "upper": 2e15}, "that doubles can tell apart"),
        ({"transform": "signed-log", "integer": True, "lower": 2**52, "upper": 2**52 + 100}, "tell apart"),
        ({"transform": "log", "integer": True, "lower": 0, "upper": 9, "bins": 11}, "from 1 to 10"),
        ({"transform": "quantile", "lower": 1e6, "upper": 1e6 + 1e-6, "native": True}, "that doubles can tell apart"),
        ({"transform": "quantile", "knots": (0, 1e-300, 9), "bins": 7}, None),
        ({"transform": "quantile", "knots": (0, 8.999999999999, 9)}, "tell apart, between knots too"),
        ({"transform": "quantile", "knots": (0, 9), "integer": True, "bins": 11}, "from 1 to 10"),
        ({"knots": (0, 9)}, "transform ('none') must be quantile where there are knots"),
        *(
            ({"transform": "quantile", "knots": knots}, "knots must be 2 to 1024 increasing numbers, the first of them")
            for knots in ((), (0,), (0, 3), (1, 9), (0, 5, 5, 9), (0, 6, 5, 9), (0, math.nan, 9), (0, math.inf, 9))
        ),
        *(
            ({"transform": "quantile", "knots": knots}, "the first of them lower (0) and the last upper (9)")
            for knots in (
                (0, True, 9),
                (0, "5", 9),
                "09",
                9,
                {0: 1, 9: 2},
                tuple(np.linspace(0, 9, 1025)),
                (0, 2**53, 9),
            )
        ),
        ({"native": True, "lower": 0, "upper": 1e308}, "times the range it overflows"),
        ({"transform": "log", "lower": -1e308, "upper": 1e308}, "the range overflows"),
    ],
)
def test_faulty_grids_are_refused(fields, words):
    if words is None:
        assert Numeric(**{"name": "x", "lower": 0, "upper": 9} | fields).bins == 7
        return
    with pytest.raises(SchemaError) as caught:
        Numeric(**{"name": "x", "lower": 0, "upper": 9} | fields)
    assert words in str(caught.value)


def test_huge_ranges_have_transforms():
    column = Numeric(name="x", lower=0, upper=1e300, native=True, transform="log")
    codes = some_codes(column)
    assert np.array_equal(encoded(column, decoded(column, codes)), codes)


YAML = """
columns:
  a: {type: numeric, lower: 0, upper: 9, native: true}
  b: {type: numeric, lower: 0, upper: 9, integer: true, native: true, transform: signed-log, missing: true}
  c: {type: numeric, lower: 0, upper: 9, bins: 4, transform: log}
  d: {type: datetime, lower: 2020-01-01, upper: 2021-12-31, date: true, source: public}
  e: {type: datetime, lower: 2020-01-01, upper: 2021-12-31 23:59:59, missing: true}
  f: {type: datetime, lower: 2020-01-01T00:00:00+01:00, upper: 2021-12-31, bins: 12}
  g: {type: numeric, lower: 0, upper: 9, bins: 3, transform: quantile, knots: [0, 0.5, 2, 9], source: dp}
  h: {type: numeric, lower: 0, upper: 9, integer: true, native: true, transform: quantile}
"""


def test_new_fields_survive_yaml_and_json():
    schema = Schema.from_dict(parse(YAML, "here"))
    for text in (schema.to_yaml(), json.dumps(schema.to_dict())):
        again = Schema.from_dict(parse(text, "here"))
        assert again == schema
        assert again.fingerprint == schema.fingerprint
    a, b, c, d, e, f, g, h = schema.columns
    assert (a.native, b.transform, c.transform, c.bins) == (True, "signed-log", "log", 4)
    assert (d.lower, e.upper, f.lower) == ("2020-01-01", "2021-12-31T23:59:59", "2019-12-31T23:00:00")
    assert (d.grid.lower, d.size, e.size, f.size) == (18262, 731, STEPS + 1, 12)
    assert schema.numbers == (0, 1, 3, 4, 7)
    assert (g.knots, g.bins, h.knots, h.size) == ((0, 0.5, 2, 9), 3, None, 10)
    assert (schema.pending, schema.knots) == (("h",), {"g": (0, 0.5, 2, 9)})
    assert "bins" not in a.to_dict()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{type: numeric, lower: 0, upper: 1, native: true, bins: 32}", "column 'a': bins must be left out"),
        ("{type: numeric, lower: 0, upper: 1, nativ: true}", "Did you mean 'native'?"),
        ("{type: datetime, lower: 2020-01-01}", "a datetime column must declare lower and upper"),
        ("{type: datetime, lower: 2020-01-01, upper: 2019-01-01}", "must be before upper ('2019-01-01T00:00:00')"),
        ("{type: datetime, lower: 2020-01-01, upper: 2020-01-01}", "must be before upper"),
        ("{type: datetime, lower: 2019-02-29, upper: 2020-01-01}", "lower ('2019-02-29') must be a moment such as"),
        ("{type: datetime, lower: 1900-02-29, upper: 2020-01-01}", "must be a moment"),
        ("{type: datetime, lower: 0000-01-01, upper: 2020-01-01}", "must be a moment"),
        ("{type: datetime, lower: 2019, upper: 2020-01-01}", "lower (2019) must be a moment"),
        ("{type: datetime, lower: 01/02/2019, upper: 2020-01-01}", "must be a moment"),
        ("{type: datetime, lower: 2019-01-01T24:00, upper: 2020-01-01}", "must be a moment"),
        ("{type: datetime, lower: 2019-01-01T10:00, upper: 2020-01-01, date: true}", "must be a day such as"),
        ("{type: datetime, lower: 2019-01-01, upper: 2020-01-01, date: 1}", "date (1) must be true or false"),
        ("{type: datetime, lower: 2020-01-01, upper: 2020-01-05, date: true, bins: 6}", "whole number from 1 to 5"),
        ("{type: datetime, lower: 2020-01-01, upper: 2020-01-05, bins: 0}", "bins (0) must be a whole number"),
        ("{type: datetime, lower: 2020-01-01, upper: 2020-01-05, bins: 1}", "at least 2 values"),
        ("{type: datetime, lower: 2020-01-01, upper: }", "upper must be filled in"),
        ("{type: datetime, lower: 0001-01-01T00:00+10:00, upper: 2020-01-01}", "must be a moment"),
    ],
)
def test_faulty_files_are_refused(spec, words):
    with pytest.raises(SchemaError) as caught:
        Schema.from_dict(parse(f"columns: {{a: {spec}}}", "here"))
    assert words in str(caught.value)


def test_the_fingerprint_of_an_older_schema_stays():
    assert OLD.fingerprint == "0e704c5d3e22856e7c9f09696fd7d58d9d44fa9fcbd7096ce992c38a427dba04"
    assert list(OLD.columns[3].to_dict()) == ["type", "missing", "source", "lower", "upper", "bins", "integer"]


def test_the_fingerprint_changes_with_the_new_fields():
    plain = Numeric(name="x", lower=0, upper=9)
    moments = Datetime(name="x", lower="2020-01-01", upper="2021-01-01")
    made = [
        plain,
        replace(plain, native=True),
        replace(plain, transform="log"),
        replace(plain, transform="signed-log"),
        replace(plain, native=True, transform="log"),
        moments,
        replace(moments, bins=4),
        replace(moments, date=True),
        replace(moments, upper="2021-01-02"),
        replace(moments, missing=True),
    ]
    assert len({Schema((column,)).fingerprint for column in made}) == len(made)
    assert replace(replace(plain, native=True), missing=True).bins == STEPS


def test_a_schema_that_gains_knots_keeps_its_fingerprint():
    """And where they came from; nothing else."""
    pending = Numeric(name="x", lower=0, upper=9, native=True, transform="quantile")
    plain = Schema((pending, Codes(name="c", values=3)))
    known = [replace(pending, knots=knots) for knots in ((0, 9), (0, 1, 9), (0, 1.5, 2, 9))]
    same = [plain, *(Schema((column, plain.columns[1])) for column in (*known, replace(known[0], source="dp")))]
    assert len({schema.fingerprint for schema in same}) == 1
    assert len({json.dumps(schema.knots) for schema in same}) == 4
    others = [replace(pending, upper=10), replace(pending, native=False), replace(pending, missing=True)]
    others += [replace(pending, transform="log"), replace(pending, integer=True), replace(pending, name="y")]
    made = [plain, *(Schema((column, plain.columns[1])) for column in others)]
    made += [Schema((pending, replace(plain.columns[1], source="dp")))]
    assert len({schema.fingerprint for schema in made}) == len(made)


def test_until_its_knots_come_a_column_is_counted_on_the_plain_native_grid():
    for integer, native in ((False, False), (False, True), (True, False), (True, True)):
        pending = Numeric(
            name="x", lower=0, upper=999, integer=integer, native=native, transform="quantile", missing=True
        )
        plain = Numeric(name="x", lower=0, upper=999, integer=integer, native=True, missing=True)
        assert (pending.pending, plain.pending, pending.size) == (True, False, plain.size)
        values = pa.array([0, 1, 499, 999, 1e9, None])
        assert encoded(pending, values).tolist() == encoded(plain, values).tolist()
        codes = some_codes(plain, count=50)
        assert decoded(pending, codes).equals(decoded(plain, codes))
        known = replace(pending, knots=(0, 3, 999))
        assert (known.pending, known.regular) == (False, known.bins)
        with pytest.raises(
            SchemaError, match=r"'x': knots must be declared .* estimated first: `anamorph schema quantiles"
        ):
            Schema((pending,)).require_knots()
        Schema((known,)).require_knots()


def test_each_pair_of_knots_has_as_many_steps_as_any_other():
    column = Numeric(name="x", lower=-10, upper=1000, bins=12, transform="quantile", knots=(-10, 0, 1, 1000))
    assert column.at(range(0, 13, 4)) == pytest.approx([-10, 0, 1, 1000])
    assert column.at([2, 6, 10]) == pytest.approx([-5, 0.5, 500.5])
    values = np.array([-10, -5.01, -5, -1e-4, 0, 0.49, 0.5, 1, 500, 501, 1000])
    assert encoded(column, values).tolist() == column.bin(values).tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert column.forward(np.array([-10.0, 0, 1, 1000])).tolist() == [0, 1 / 3, 2 / 3, 1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40, unique=True).map(sorted), st.booleans(), st.data())
@settings(deadline=None, max_examples=60)
def test_knots_are_where_every_engine_puts_them(knots, native, data):
    """Values on knots, one unit in the last place beside them, and between: the same code; the order is kept."""
    try:
        column = Numeric(name="x", lower=knots[0], upper=knots[-1], native=native, transform="quantile", knots=knots)
    except SchemaError:  # knots so near that doubles cannot tell the steps between them apart
        return
    points = np.array(knots)
    shares = np.array(data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=20)))
    between = (points[:-1, None] + np.diff(points)[:, None] * shares).ravel()
    values = np.sort(np.concatenate([points, np.nextafter(points, -np.inf), np.nextafter(points, np.inf), between]))
    codes = encoded(column, values)
    assert codes.tolist() == column.bin(values).tolist()
    assert (np.diff(codes) >= 0).all()
    again = some_codes(column, count=300)
    assert encoded(column, decoded(column, again)).tolist() == again.tolist()


@given(whole_columns(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_a_code_settles_where_it_is_decoded_to(column, seed):
    assume(column.bins > 1)
    codes = some_codes(replace(column, missing=False), seed, 500)
    assert np.array_equal(encoded(column, decoded(column, codes, seed)), column.settled[codes])
    assert (np.diff(column.settled) >= 0).all()


def test_the_texts_that_are_moments():
    day = 1_577_836_800
    same = ["2020-01-01", " 2020-01-01\n", "2020-01-01T00:00", "2020-01-01 00:00:00", "2020-01-01T00:00:00.000Z"]
    same += ["2020-01-01T02:00+02:00", "2020-01-01T02:00+0200", "2019-12-31T22:00:00-02"]
    assert {instant(text) for text in same} == {day}
    assert instant(datetime.date(2020, 1, 1)) == instant(datetime.datetime(2020, 1, 1)) == day
    assert instant("2020-01-01T00:00:00.5") == day + 0.5
    none = [
        "",
        "2020",
        "2020-1-1",
        "20200101",
        "2020-01-01T",
        "2020-01-01Z",
        "2020-01-01T24:00",
        "2020-01-01T10",
        "now",
    ]
    none += ["2020-01-01T00:00:60", "2020-13-01", "2100-02-29", "0000-01-01", 1.0, None, True, "2020-01-01T00:00+24:00"]
    assert [instant(text) for text in none] == [None] * len(none)


@given(
    st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9990, 1, 1)),
    st.integers(1, 10**5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_encoding_undoes_decoding_of_moments(start, length, date, missing, seed):
    unit = "days" if date else "seconds"
    first = start.date() if date else start
    length = min(length, 3000) if date else length**2
    column = Datetime(
        name="x", lower=first, upper=first + datetime.timedelta(**{unit: length}), date=date, missing=missing
    )
    codes = some_codes(column, seed, 300)
    values = decoded(column, codes, seed)
    assert values.type == (pa.date32() if date else pa.timestamp("s"))
    assert np.array_equal(encoded(column, values), codes)
    texts = pa.array([None if value is None else str(value) for value in values.to_pylist()], pa.string())
    assert np.array_equal(encoded(column, texts), codes)


def test_days_are_those_of_the_calendar():
    column = Datetime(name="x", lower="1900-01-01", upper="2100-12-31", date=True, missing=True)
    first = datetime.date(1900, 1, 1)
    days = [first + datetime.timedelta(days=i) for i in range(column.regular)]
    assert days[-1] == datetime.date(2100, 12, 31)
    assert encoded(column, pa.array(days)).tolist() == list(range(len(days)))
    assert encoded(column, pa.array([day.isoformat() for day in days])).tolist() == list(range(len(days)))
    assert decoded(column, [*range(len(days)), len(days)]).to_pylist() == [*days, None]
    odd = ["1900-02-29", "2000-02-29", "2100-02-29", "2020-02-29", "1899-12-31", "2101-01-01"]
    found = encoded(column, pa.array(odd)).tolist()
    assert found[0] == found[2] == column.empty_code
    assert [days[code] for code in (found[1], found[3])] == [datetime.date(2000, 2, 29), datetime.date(2020, 2, 29)]
    assert found[4:] == [0, len(days) - 1]
