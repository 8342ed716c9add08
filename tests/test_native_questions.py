"""Conditions on native numbers: the answers of a table of rows are the counts of its rows in a database."""

from __future__ import annotations

import math
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph import archive
from anamorph.columns import Categorical, Codes, Numeric
from anamorph.curator.where import Where
from anamorph.errors import ParameterError
from anamorph.models.answers import Answers, Zero
from anamorph.models.least_squares import least_squares
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.numbers import limits_of
from anamorph.queries.workload import Workload
from anamorph.questions import LARGEST_GIVEN, ask, parse, sums_of
from anamorph.ranges import Datetime
from anamorph.release import Measurement, Privacy, Release, Spend
from anamorph.schema import Schema
from anamorph.table import Table

STEPS = 1 << 20
N = 400
SCHEMA = Schema(
    (
        Numeric(name="age", lower=-3, upper=16, integer=True, native=True, missing=True),
        Categorical(name="sex", categories=("F", "M"), missing=True),
        Numeric(name="share", lower=0, upper=1, native=True),
        Datetime(name="joined", lower="2020-01-01", upper="2020-03-31", date=True, missing=True),
        Numeric(name="pay", lower=0, upper=8, bins=4),
        Numeric(name="sales", lower=0, upper=300, integer=True, native=True, transform="log"),
        Numeric(
            name="debt", lower=-9, upper=99, integer=True, native=True, transform="quantile", knots=(-9, 0, 0.5, 7, 99)
        ),
    )
)
PRIVACY = Privacy("replace", 1.0, 1e-6, 0.1, ())
Z = 1.959963984540054


def columns_of(schema):
    return Columns(schema.sizes, schema.numbers, limits_of(schema, schema.numbers))


def table_of_rows(schema, codes, weights=None):
    """A model of these rows, with no doubt about any of them."""
    columns, rows = columns_of(schema), len(codes)
    flags = {number: codes[:, number] >= schema.columns[number].regular for number in columns.flagged}
    inner = [codes[:, column] for column in columns.coded] + [flags[number] for number in columns.flagged]
    table = np.zeros((sum(columns.relaxed), rows), np.float32)
    for first, code in zip(np.cumsum((0, *columns.relaxed[:-1])), inner or [np.zeros(rows, int)], strict=True):
        table[first + code.astype(int), np.arange(rows)] = 1
    reals = [
        (np.minimum(codes[:, n], limit - 1) + 0.5) / limit
        for n, limit in zip(columns.numbers, columns.limits, strict=True)
    ]
    each = np.full(rows, 1 / rows) if weights is None else weights
    coded = RelaxedRows(columns.relaxed, table, each.astype(np.float32))
    return MixedRows(columns, coded, np.array(reals, np.float32).reshape(len(columns.numbers), rows))


def release(model, schema=SCHEMA, **more):
    return Release(schema, model, **{"measurements": (), "privacy": PRIVACY, "total": 200.0} | more)


def some_rows():
    """Numbers of all codes, those of `share` never in the steps of eighths: so every decoded row is told apart."""
    generator = np.random.default_rng(0)
    codes = np.stack([generator.integers(0, size, N) for size in SCHEMA.sizes], axis=1)
    codes[:, 2] |= 1
    codes[: N // 2, 6] = generator.integers(0, 3 * STEPS // 4, N // 2)
    return codes


CODES = some_rows()
WEIGHTS = np.random.default_rng(1).dirichlet(np.ones(N)).astype(np.float32)
ROWS = release(table_of_rows(SCHEMA, CODES, WEIGHTS))


@pytest.fixture(scope="module")
def database():
    rows = SCHEMA.decode(Table(CODES.astype(np.int32), SCHEMA.sizes), np.random.default_rng(2))
    moments = rows["joined"].cast(pa.timestamp("us"))
    rows = rows.set_column(3, "joined", moments).append_column("weight", pa.array(WEIGHTS.astype(np.float64)))
    connection = duckdb.connect()
    connection.register("decoded", rows)
    connection.execute("create table t as select * from decoded")
    yield connection
    connection.close()


def halves(low, high):
    return st.integers(2 * low, 2 * high).map(lambda n: str(n // 2) if n % 2 == 0 else str(n / 2))


DAYS = st.integers(-5, 95).map(lambda n: f"'{np.datetime64('2020-01-01') + n}'")
HOURS = st.integers(-100, 2000).map(lambda n: f"'{np.datetime64('2020-01-01T00:00') + np.timedelta64(n, 'h')}'")
COLUMNS = {
    "age": halves(-5, 18),
    "share": st.integers(-2, 10).map(lambda n: str(n / 8)),
    "joined": DAYS | HOURS,
    "sales": halves(-2, 12) | halves(250, 302),
    "debt": halves(-11, 9) | halves(90, 101),
    "sex": st.sampled_from(["'F'", "'M'"]),
}


@st.composite
def simple(draw):
    name = draw(st.sampled_from([*COLUMNS]))
    negated, values = draw(st.sampled_from(["", "not "])), COLUMNS[name]
    kind = draw(st.sampled_from(["compare", "compare", "in", "between", "null"]))
    if kind == "null":
        return f"{name} is {negated}null"
    if kind == "in":
        return f"{name} {negated}in ({', '.join(draw(st.lists(values, min_size=1, max_size=3)))})"
    if kind == "between" and name != "sex":
        return f"{name} {negated}between {draw(values)} and {draw(values)}"
    order = draw(st.sampled_from(["=", "<>"] if name == "sex" else ["<", "<=", ">", ">=", "=", "<>"]))
    return f"{name} {order} {draw(values)}"


CONDITIONS = st.recursive(
    simple(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda part: f"not ({part})"),
    ),
    max_leaves=5,
)


@given(condition=CONDITIONS)
@settings(deadline=None, max_examples=250)
def test_answers_are_those_of_the_database(database, condition):
    expected = database.execute(f"select coalesce(sum(weight), 0) from t where {condition}").fetchone()[0]
    found = ask(ROWS, condition)
    assert found.fraction == pytest.approx(expected, abs=2e-6)
    assert found.count == pytest.approx(200 * found.fraction)


@pytest.mark.parametrize("name", ["age", "share", "joined", "sales", "debt"])
def test_below_at_above_and_missing_are_everything(name):
    for value in ("0.25", "0", "3", "-2.5", "16", "1") if name != "joined" else ("'2020-02-03'", "'2021-01-01'"):
        parts = [ask(ROWS, f"{name} {rest}").fraction for rest in (f"< {value}", f"= {value}", f"> {value}", "is null")]
        assert sum(parts) == pytest.approx(1, abs=1e-6)
        assert min(parts) > -1e-9


def test_a_step_that_a_bound_cuts_goes_with_the_code_of_the_bound():
    """A row is compared as its code, and a number has the code that a cell of that value would have."""
    code = 123_457
    model = table_of_rows(SCHEMA, np.where(np.arange(7) == 2, code, CODES[:1]))
    for offset in (0.0, 0.2, 0.5, 0.9):
        value = (code + offset) / STEPS
        for order, holds in {"<": 0, "<=": 1, "=": 1, ">=": 1, ">": 0, "<>": 0}.items():
            assert ask(release(model), f"share {order} {value!r}").fraction == pytest.approx(holds), (order, offset)
    assert ask(release(model), f"share < {(code + 1) / STEPS!r}").fraction == pytest.approx(1)
    assert ask(release(model), f"share > {(code - 1e-3) / STEPS!r}").fraction == pytest.approx(1)
    both = f"share > {(code + 0.2) / STEPS!r} and share < {(code + 0.7) / STEPS!r}"
    assert ask(release(model), both).fraction == 0


def test_moments_finer_than_a_step():
    column = Datetime(name="x", lower="1990-01-01", upper="2030-01-01", missing=True)
    model = table_of_rows(Schema((column,)), np.array([[0], [500_000], [column.regular - 1], [column.size - 1]]))
    made = release(model, Schema((column,)))
    expected = {
        "x >= '1990-01-01'": 0.75,
        "x < '1990-01-01'": 0,
        "x = '1990-01-01T00:00:01'": 0.25,
        "x < '2020-01-01'": 0.5,
        "x between '1995-01-01' and timestamp '2020-01-01 00:00:00'": 0.25,
        "x <= '2030-01-01'": 0.75,
        "x > '2030-01-01'": 0,
        "x > '2077-01-01' or x is null": 0.25,
    }
    for question, fraction in expected.items():
        assert ask(made, question).fraction == pytest.approx(fraction), question
    with pytest.raises(ParameterError, match="must be a moment such as"):
        ask(made, "x < 5")


def test_bounds_of_any_size_are_numbers():
    for name in ("age", "share", "sales", "debt"):
        for bound, least in (("-1e400", 0), ("-" + "9" * 400, 0), ("1e400", 1), ("9" * 5000, 1)):
            known = ask(ROWS, f"{name} is not null").fraction
            assert ask(ROWS, f"{name} < {bound}").fraction == pytest.approx(least * known, abs=1e-6)


def test_few_prefixes_are_asked_for():
    """An interval of one number is two prefixes at most; what a condition does not need is not asked."""

    def asked(question):
        names = {name for name in SCHEMA.names if name in question}
        sums = sums_of(parse(question), SCHEMA, tuple(sorted(SCHEMA.index(name) for name in names)))
        return sums, sum(tally.tests for tally, _ in sums.tests)

    for question, tests, whole in (
        ("age <= 5", 1, 0),
        ("age > 5", 2, 0),
        ("age between 2 and 5", 2, 0),
        ("share > 0.5", 1, 1),
        ("share between 0.2 and 0.3", 2, 0),
        ("age is null", 1, 1),
        ("age <= 5 and share <= 0.5", 1, 0),
        ("age between 2 and 5 and share between 0.2 and 0.3", 4, 0),
        ("share < 7", 0, 1),
        ("share < -7", 0, 0),
    ):
        sums, found = asked(question)
        assert (found, float(sums.cells)) == (tests, whole), question
    sums, found = asked("sex = 'F' and not age > 5")
    assert found == 1
    assert sums.cells.tolist() == [0, 0, 0]


def test_a_saved_release_answers_alike(tmp_path):
    archive.save(replace(ROWS, measurements=()), tmp_path / "release")
    loaded = archive.load(tmp_path / "release")
    for question in ("age < 5 and share > 0.25", "sales > 10 or sex = 'F'", "joined >= '2020-02-01' and debt <= 0"):
        assert ask(loaded, question) == ask(ROWS, question)


@pytest.mark.parametrize(
    "model",
    [
        Answers(SCHEMA.sizes, {(1,): np.full(3, 1 / 3), (4,): np.full(4, 0.25)}, {(1,): 0.1, (4,): 0.1}),
        least_squares(SCHEMA.sizes, ()),
        RelaxedRows((2, 3), np.ones((5, 1), np.float32), np.ones(1, np.float32)),
    ],
    ids=["gaussian", "hdmm", "rap"],
)
def test_a_model_without_numbers_refuses_in_words(model):
    for question in ("age < 5", "age > 5 and sex = 'F'", "share > 0.5"):
        name = question.split()[0]
        with pytest.raises(
            ParameterError, match=f"columns '{name}' must have bins .* holds no native numbers: .* auto"
        ):
            ask(release(model), question)


def test_all_zero_answers_zero():
    for question in ("age < 5", "not age < 5", "age is null", "share >= 0", "share > 0.5 and sex = 'F'"):
        assert ask(release(Zero(SCHEMA.sizes)), question).fraction == 0


def test_too_many_cells_are_refused_before_they_are_made():
    schema = Schema((Numeric(name="x", lower=0, upper=1, native=True), Codes(name="c", values=LARGEST_GIVEN + 1)))
    with pytest.raises(ParameterError, match="columns beside native numbers must have at most 65536 cells together"):
        ask(release(Zero(schema.sizes), schema), "x < 0.5 and c = 1")
    wide = release(Zero((STEPS,) * 3), Schema(tuple(Numeric(name=n, lower=0, upper=1, native=True) for n in "abc")))
    listed = ", ".join(f"0.{i:03}" for i in range(1, 200))
    assert ask(wide, f"a in ({listed}) and b in ({listed})").fraction == 0
    with pytest.raises(ParameterError, match="columns must have at most 1048576 cells together"):
        ask(wide, " and ".join(f"{name} in ({listed})" for name in "abc"))


def test_a_question_may_name_many_numbers():
    names = [f"x{i}" for i in range(12)]
    schema = Schema(
        tuple(Numeric(name=name, lower=0, upper=1, native=True, missing=i == 3) for i, name in enumerate(names))
    )
    codes = np.random.default_rng(4).integers(0, STEPS, (50, 12))
    codes[::2, 3] = STEPS
    made = release(table_of_rows(schema, codes), schema)
    few = np.all((codes < STEPS // 8 * 7) | (np.arange(12) >= 9), axis=1)
    assert ask(made, " and ".join(f"{name} < 0.875" for name in names[:9])).fraction == pytest.approx(few.mean())
    none = np.all(np.where(np.arange(12) == 3, True, codes >= STEPS // 32), axis=1)
    either = " or ".join(f"{name} < 0.03125" for name in names if name != "x3")
    assert ask(made, either).fraction == pytest.approx(1 - none.mean(), abs=1e-6)
    trivial = " and ".join(f"{name} < 2" for name in names)
    assert ask(made, trivial).fraction == pytest.approx(0.5)


def measured(*parts, sigma=0.01, spends=(), value=0.3):
    """A release in which some tests were measured, all cells with the same answer."""
    workload = Workload(tuple(NumberTests(part) if isinstance(part, Where) else part for part in parts))
    values = np.full(workload.cells, value)
    log = Measurement(workload, values, np.full(workload.blocks, sigma), 200.0)
    privacy = replace(PRIVACY, spends=spends)
    return release(ROWS.model, measurements=(log,), privacy=privacy)


def where(given, numbers, *bounds):
    return Where(SCHEMA.sizes, given, numbers, limits_of(SCHEMA, numbers), np.array(bounds, np.int64))


def test_an_answer_whose_prefixes_were_measured_has_an_interval():
    made = measured(where((1,), (0,), [7], [8], [11]), where((), (2,), [STEPS // 2 - 1]), where((1,), (0, 2), [8, 99]))
    expected = {
        "age <= 5 and sex = 'F'": (0.3, 1),  # code 8
        "age < 6 and sex in ('F', 'M')": (0.6, 2),
        "age = 5 and sex = 'M'": (0.0, 2),
        "age > 4 and age <= 8 and sex = 'M'": (0.0, 2),
        "share < 0.5": (0.3, 1),
        "share >= 0.5": (0.7, 1),
        f"age <= 5 and share <= {99.5 / STEPS!r} and sex is null": (0.3, 1),
    }
    for question, (middle, cells) in expected.items():
        found = ask(made, question)
        sigma = 0.01 * math.sqrt(cells)
        assert found.sigma == pytest.approx(sigma), question
        assert (found.low, found.high) == pytest.approx((max(middle - Z * sigma, 0), middle + Z * sigma)), question
        assert found.fraction == ask(ROWS, question).fraction
    for question in ("age <= 4 and share < 0.5", "age <= 6 and sex = 'F'", "age <= 5", "share > 0.5", "age > 5"):
        unknown = ask(made, question)
        assert (unknown.sigma, unknown.low, unknown.high) == (None, None, None), question


def test_a_private_number_of_rows_moves_all_but_what_is_known():
    made = measured(where((), (2,), [STEPS // 2 - 1]), spends=(Spend("total", 0.005, "rows"),))
    tau = 10 / 200
    assert ask(made, "share < 0.5").sigma == pytest.approx(math.hypot(0.01, tau * 0.3))
    assert ask(made, "share >= 0.5").sigma == pytest.approx(math.hypot(0.01, tau * 0.3))
    sure = ask(made, "share >= 0")
    assert (sure.fraction, sure.sigma, sure.low, sure.high) == pytest.approx((1, 0, 1, 1), abs=1e-9)


def test_marginals_and_tests_are_added_up():
    """Of the women, those whose age is missing: the marginal less the prefix of all ages."""
    marginal = Marginals(SCHEMA.sizes, ((1,),))
    made = measured(where((1,), (0,), [19]), marginal, value=0.4)
    found = ask(made, "sex = 'F' and age is null")
    # The marginal is known up to the sum of its cells, which is 1: a cell of 3 has 2/3 of the variance of its noise.
    assert found.sigma == pytest.approx(0.01 * math.sqrt(1 + 2 / 3))
    assert ask(made, "sex = 'F' and age is not null").sigma == pytest.approx(0.01)


@given(condition=CONDITIONS)
@settings(deadline=None, max_examples=60)
def test_intervals_that_are_given_hold_exact_answers(condition):
    """Whatever is asked for is measured without noise: every interval is a point, at the model's answer."""
    names = [name for name in COLUMNS if f"{name} " in condition]
    sums = sums_of(parse(condition), SCHEMA, tuple(sorted(SCHEMA.index(name) for name in names)))
    parts = [NumberTests(tally) for tally, _ in sums.tests]
    parts += [Marginals(SCHEMA.sizes, (sums.given,))] if sums.given else []
    if not parts:
        return
    workload = Workload(tuple(parts))
    values = np.concatenate(list(ROWS.model.answers(workload))).astype(np.float64)
    log = Measurement(workload, values, np.full(workload.blocks, 1e-9), 200.0)
    found = ask(replace(ROWS, measurements=(log,)), condition)
    assert found.sigma is not None
    assert (found.low, found.high) == pytest.approx((found.fraction, found.fraction), abs=3e-6)
