"""Encoding against a slow reference of the schema's rules, written apart, value by value."""

from __future__ import annotations

import datetime
import decimal
import math
import re
import unicodedata

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Categorical, Codes, Numeric, Ordinal
from anamorph.errors import DataError, ParameterError
from anamorph.schema import Schema
from anamorph.sources import encode

NESTED = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?inf(?:inity)?"


def as_number(value):
    """The number of a cell, or None."""
    if isinstance(value, str):
        text = value.strip(" \t\r\n")
        return float(text) if re.fullmatch(NESTED, text, re.IGNORECASE | re.ASCII) else None
    number = None if value is None else float(value)
    return None if number is None or math.isnan(number) else number


def reference_number(column, value):
    number, last = as_number(value), column.size - 1
    if number is None:
        return last
    if isinstance(column, Codes):
        if math.isfinite(number) and number != math.floor(number):
            return last
        return int(min(max(number, 0), column.values - 1))
    clipped = min(max(number, float(column.lower)), float(column.upper))
    width = float(column.upper) - float(column.lower) + (1.0 if column.integer else 0.0)
    return int(min(math.floor((clipped - float(column.lower)) * column.bins / width), column.bins - 1))


def written(category):
    """The texts of a category."""
    if isinstance(category, bool):
        return {"true", "True", "TRUE"} if category else {"false", "False", "FALSE"}
    if isinstance(category, str):
        return {unicodedata.normalize("NFC", category.strip(" \t\r\n"))}
    if category == int(category) and abs(category) < 2**53:
        return {str(int(category)), f"{int(category)}.0"}
    return {str(category)}


def reference_category(column, value):
    categories = list(column.categories)
    last = len(categories) + column.other + column.missing - 1
    unseen = len(categories) if column.other or column.missing else last
    if value is None or value != value:  # noqa: PLR0124
        return last
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, str):
        text = unicodedata.normalize("NFC", value.strip(" \t\r\n").replace("\0", "\ufffd"))
        found = [code for code, category in enumerate(categories) if text in written(category)]
        return (found or [unseen])[0] if text else last
    if isinstance(value, decimal.Decimal):
        value = int(value) if value.as_tuple().exponent == 0 else float(value)
    found = [code for code, each in enumerate(categories) if not isinstance(each, str | bool) and each == value]
    return (found or [unseen])[0]


def reference(column, value):
    rule = reference_category if isinstance(column, Categorical) else reference_number
    return rule(column, value)


def check(column, array):
    codes = encode(pa.table({column.name: array}), Schema((column,))).codes[:, 0]
    assert codes.tolist() == [reference(column, value) for value in array.to_pylist()]


NASTY = [
    "",
    " ",
    "7",
    " 7 ",
    "\t7.0\r\n",
    "07",
    "7.",
    ".5",
    "+7",
    "-0",
    "-0.0",
    "1e400",
    "-1e400",
    "1e-400",
    "1,234",
]
NASTY += [
    "nan",
    "NaN",
    "inf",
    "-Infinity",
    "+INF",
    "0x10",
    "1_000",
    "1e",
    "e5",
    "--1",
    "1e30",
    "9" * 400,
    "1 2",
    "٣",
]
NASTY += [
    "café",
    "cafe\u0301",
    "\u212b",
    "A\u030a",
    "red",
    "RED",
    " red",
    "re\0d",
    "red\0",
    "A\u030a\0x",
    "true",
    "'",
]
NASTY += [
    '"; DROP TABLE x; --',
    "\\",
    "\\n",
    "a\nb",
    "\u00a0red",
    "🦆",
    "3.7",
    "null",
    "None",
    "4.999999999999999999999",
]
CATEGORIES = [
    "red",
    "café",
    "\u212b",
    "A\u030ax",
    7,
    3.5,
    -2,
    0,
    2**60 + 1,
    1e300,
    '"; DROP TABLE x; --',
    "\\",
    "'",
    "🦆",
]

texts = st.one_of(st.none(), st.sampled_from(NASTY), st.text(max_size=6), st.floats().map(repr), st.integers().map(str))
flags = st.fixed_dictionaries({"missing": st.booleans()})
bounds = st.floats(-1e6, 1e6) | st.integers(-1000, 1000).map(float)
numerics = st.tuples(bounds, bounds, st.integers(2, 300), st.booleans()).filter(lambda b: b[0] < b[1])
numeric_columns = numerics.map(lambda b: Numeric(name="x", lower=b[0], upper=b[1], bins=b[2], missing=b[3]))
code_columns = st.builds(Codes, name=st.just("x"), values=st.integers(2, 70_000), missing=st.booleans())
lists = st.lists(st.sampled_from(CATEGORIES), min_size=2, unique=True).filter(lambda each: len(each) > 1)
category_columns = st.builds(
    Categorical, name=st.just("x"), categories=lists, other=st.booleans(), missing=st.booleans()
)
columns = numeric_columns | code_columns | category_columns
quick = settings(max_examples=40, deadline=None)


@quick
@given(columns, st.lists(texts, max_size=30))
def test_texts(column, values):
    check(column, pa.array([*NASTY, None, *values], pa.string()))


@quick
@given(columns, st.lists(st.floats() | st.sampled_from([7.0, 3.5, -2.0, 1e300, 2.0**60, -0.0]), max_size=40))
def test_doubles(column, values):
    edges = (
        [column.lower + (column.upper - column.lower) * k / column.bins for k in range(column.bins)]
        if isinstance(column, Numeric)
        else []
    )
    check(column, pa.array([*values, *edges, None], pa.float64()))


@quick
@given(columns, st.sampled_from([pa.int8(), pa.int64(), pa.uint64()]), st.data())
def test_integers(column, kind, data):
    bits = kind.bit_width
    low, high = (0, 2**bits - 1) if pa.types.is_unsigned_integer(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    some = st.integers(low, high) | st.sampled_from([7, 0, 2**60, 2**60 + 1]).filter(lambda n: low <= n <= high)
    check(column, pa.array([*data.draw(st.lists(some, max_size=40)), low, high, None], kind))


@quick
@given(columns, st.lists(st.decimals(-(10**9), 10**9, places=3), max_size=20))
def test_decimals(column, values):
    with decimal.localcontext() as context:
        context.prec = 60
        check(column, pa.array([*values, decimal.Decimal("3.500"), None], pa.decimal128(38, 3)))
        check(column, pa.array([decimal.Decimal(2**60 + 1), decimal.Decimal(7), None], pa.decimal128(38, 0)))


@quick
@given(columns, st.lists(st.booleans() | st.none(), max_size=5))
def test_truth_values(column, values):
    check(column, pa.array(values, pa.bool_()))


def test_truth_values_match_any_spelling_of_a_category():
    for categories in ([False, True], ["false", "true"], ["False", "True"]):
        schema = Schema((Categorical(name="x", categories=categories, missing=True),))
        assert encode(pa.table({"x": [True, False, None]}), schema).codes[:, 0].tolist() == [1, 0, 2]


def test_an_exact_spelling_wins():
    schema = Schema((Categorical(name="x", categories=[7, "7.0", "07", 8], other=True),))
    assert encode(pa.table({"x": ["7", "7.0", "07", "8.0"]}), schema).codes[:, 0].tolist() == [0, 1, 2, 3]
    assert encode(pa.table({"x": [7, 8, 9]}), schema).codes[:, 0].tolist() == [0, 3, 4]
    zipped = Schema((Categorical(name="x", categories=["00501", "10001"], other=True),))
    assert encode(pa.table({"x": [501, 10001, 1]}), zipped).codes[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32()])
def test_narrow_floats_are_their_exact_values(kind):
    check(
        Numeric(name="x", lower=0, upper=1, bins=10),
        pa.array(np.array([0.1, 0.5, np.nan, np.inf]).astype(kind.to_pandas_dtype())),
    )


def test_whole_number_bins_include_both_bounds():
    column = Numeric(name="x", lower=0, upper=99, bins=10, integer=True)
    codes = encode(pa.table({"x": [-1, 0, 9, 10, 98, 99, 100]}), Schema((column,))).codes[:, 0]
    assert codes.tolist() == [0, 0, 0, 1, 9, 9, 9]


MOMENTS = ["2020-01-31", "2020-01-31T12:00:00", "2020-01-31T12:00:00.5", "2020-01-31T11:00:00Z", "12:00:00"]


def test_moments_are_iso_text():
    schema = Schema((Ordinal(name="x", categories=MOMENTS, other=True, missing=True),))
    day, noon = datetime.date(2020, 1, 31), datetime.datetime(2020, 1, 31, 12)
    paris = noon.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=1)))
    for value, code in [
        (day, 0),
        (noon, 1),
        (noon.replace(microsecond=500_000), 2),
        (paris, 3),
        (noon.time(), 4),
    ]:
        for unit in (
            ("s", "ms", "us", "ns") if isinstance(value, datetime.datetime) and not value.microsecond else (None,)
        ):
            kind = pa.timestamp(unit, "UTC" if value.tzinfo else None) if unit else None
            typed = pa.array([value, None], kind)
            assert encode(pa.table({"x": typed}), schema).codes[:, 0].tolist() == [code, 6]
        mixed = pd.DataFrame({"x": pd.Series([value, None, "2020"], dtype=object)})
        assert encode(mixed, schema).codes[:, 0].tolist() == [code, 6, 5]


@pytest.mark.parametrize(
    "array",
    [
        *(
            pa.array([2**62, -(2**62), None], pa.timestamp(unit, zone))
            for unit in ["s", "ms", "us", "ns"]
            for zone in (None, "UTC")
        ),
        pa.array([2**31 - 1, -(2**31) + 2, None], pa.date32()),
        pa.array([86_400_000 * 2**33, -(2**62), None], pa.date64()),
        pa.array([10**18, -1, None], pa.time64("ns")),
    ],
    ids=lambda array: str(array.type),
)
def test_extreme_moments_do_not_raise(array):
    schema = Schema((Categorical(name="x", categories=["1970-01-01"], other=True, missing=True),))
    assert encode(pa.table({"x": array}), schema).codes[:, 0].tolist() == [1, 1, 2]


class Awkward:
    def __str__(self):
        raise RuntimeError("no")


def test_objects_of_any_mixture_become_text():
    values = [
        "red",
        " red ",
        7,
        7.0,
        True,
        None,
        float("nan"),
        np.int8(7),
        np.float32(3.5),
        b"red",
        pd.NA,
        pd.NaT,
    ]
    values += [
        Awkward(),
        [1],
        {"a": 1},
        "\ud800",
        decimal.Decimal("3.5"),
        10**30,
        decimal.Decimal("sNaN"),
        10**5000,
    ]
    frame = pd.DataFrame({"x": pd.Series(values, dtype=object)})
    category = Categorical(name="x", categories=["red", 7, 3.5, True], other=True, missing=True)
    expected = [0, 0, 1, 1, 3, 5, 5, 1, 2, 0, 5, 5, 4, 4, 4, 4, 2, 4, 4, 4]
    assert encode(frame, Schema((category,))).codes[:, 0].tolist() == expected
    codes = Codes(name="x", values=9, missing=True)
    expected = [9, 9, 7, 7, 1, 9, 9, 7, 9, 9, 9, 9, 9, 9, 9, 9, 9, 8, 9, 9]
    assert encode(frame, Schema((codes,))).codes[:, 0].tolist() == expected
    objects = pl.DataFrame({"x": pl.Series(values[:9], dtype=pl.Object)})
    assert encode(objects, Schema((category,))).codes[:, 0].tolist() == [0, 0, 1, 1, 3, 5, 5, 1, 2]


@pytest.mark.parametrize(
    "series",
    [
        pd.Series([7, None, 3], dtype="Int64"),
        pd.Series([7, None, 3], dtype="float64"),
        pd.Series([7, None, 3], dtype="category"),
        pd.Series([7, None, 3], dtype=object),
        pd.Series(["7", None, "3"]),
        pd.Series(["7", None, "3"], dtype="category"),
        pd.Series(["7", None, "3"], dtype="string[pyarrow]"),
        pd.Series(["7", None, 3], dtype="category"),
        pd.Series([7, None, 3], dtype=pd.ArrowDtype(pa.uint8())),
        pd.Series(pd.arrays.SparseArray([7.0, np.nan, 3.0])),
        pl.Series([7, None, 3], dtype=pl.Int128),
        pl.Series(["7", None, "3"], dtype=pl.Categorical),
        pl.Series(["7", None, "3"], dtype=pl.Enum(["3", "7"])),
        pl.Series(["7", None, "3"]),
    ],
    ids=lambda series: str(series.dtype),
)
@pytest.mark.parametrize(
    "column",
    [Categorical(name="x", categories=[3, 7], missing=True), Codes(name="x", values=9, missing=True)],
)
def test_every_dtype_of_a_frame(series, column):
    frame = pd.DataFrame({"x": series}) if isinstance(series, pd.Series) else pl.DataFrame({"x": series})
    expected = [1, 2, 0] if isinstance(column, Categorical) else [7, 9, 3]
    assert encode(frame, Schema((column,))).codes[:, 0].tolist() == expected
    if isinstance(series, pl.Series):
        assert encode(frame.lazy(), Schema((column,))).codes[:, 0].tolist() == expected


NESTED_TYPES = {
    "list": pa.array([[1]]),
    "struct": pa.array([{"a": 1}]),
    "binary": pa.array([b"a"]),
    "duration": pa.array([1], pa.duration("s")),
    "extension": pa.array([b"0" * 16], pa.uuid()),
}


@pytest.mark.parametrize("name", NESTED_TYPES)
def test_nested_types_are_refused(name, refused):
    for column in (Categorical(name="x", categories=["a", "b"]), Codes(name="x", values=3)):
        refused(DataError, lambda c=column: encode(pa.table({"x": NESTED_TYPES[name]}), Schema((c,))), "'x'", name)


def test_dates_are_no_numbers(refused):
    frame = pl.DataFrame({"x": [datetime.date(2020, 1, 1)]})
    for column in (Codes(name="x", values=3), Numeric(name="x", lower=0, upper=1)):
        refused(DataError, lambda c=column: encode(frame, Schema((c,))), "'x'", "DATE", column.kind)


def test_text_that_is_not_utf8_is_refused(refused, secret):
    raw = pa.array([secret.encode() + b"\xff"], pa.binary()).view(pa.string())
    refused(DataError, lambda: encode(pa.table({"x": raw}), Schema((Codes(name="x", values=3),))), "'x'", "UTF-8")


def test_the_order_of_rows_is_kept():
    many = np.random.default_rng(0).integers(0, 1000, 300_000)
    schema = Schema((Categorical(name="x", categories=tuple(range(1000))),))
    for values in (many, many[:5]):
        table = encode(pd.DataFrame({"x": values.astype(str)}), schema)
        assert table.codes.dtype == np.int32
        assert (table.codes[:, 0] == values).all()


def test_large_lists_are_fast():
    categories = [f"category {i}" for i in range(5000)]
    frame = pa.table({"x": [f" category {i % 6000} " for i in range(100_000)]})
    codes = encode(frame, Schema((Categorical(name="x", categories=categories, other=True),))).codes[:, 0]
    assert (codes == np.minimum(np.arange(100_000) % 6000, 5000)).all()


def test_columns_are_matched_by_name(refused):
    schema = Schema((Codes(name="age", values=3), Codes(name="sex", values=2)))
    assert encode(pl.DataFrame({"sex": [1], "more": [object()], "age": [2]}), schema).codes.tolist() == [[2, 1]]
    assert encode(pd.DataFrame({"Age": [0], "sex": [1], "age": [2]}), schema).codes.tolist() == [[2, 1]]
    refused(DataError, lambda: encode(pd.DataFrame({"Age ": [0], "sex": [1]}), schema), "'age'", "'Age '")
    refused(
        DataError,
        lambda: encode(pd.DataFrame([[1, 2, 3]], columns=["sex", "age", "age"]), schema),
        "'age'",
        "once",
    )
    numbered = Schema((Codes(name="0", values=3),))
    assert encode(pd.DataFrame([[2]]), numbered).codes.tolist() == [[2]]


def test_what_is_no_frame_is_refused(refused):
    schema = Schema((Codes(name="x", values=3),))
    for thing in (None, 3, [1, 2], {"x": [1]}, np.zeros(3), object()):
        refused(ParameterError, lambda t=thing: encode(t, schema), "frame")


def test_a_frame_that_cannot_be_computed(refused, secret):
    lazy = pl.LazyFrame({"x": [secret]}).with_columns(pl.col("x").cast(pl.Int64))
    refused(DataError, lambda: encode(lazy, Schema((Codes(name="x", values=3),))), "frame")


def test_categories_that_no_statement_can_hold():
    schema = Schema((Categorical(name="x", categories=["a\0b", "\ud800", "a"], other=True),))
    assert encode(pa.table({"x": ["a\0b", "a", "\ufffd"]}), schema).codes[:, 0].tolist() == [3, 2, 3]
