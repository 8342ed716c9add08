"""Moments and native numbers, wherever they are stored: the same codes, and no cell that raises."""

from __future__ import annotations

import csv
import datetime

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Categorical, Codes, Numeric
from anamorph.errors import DataError
from anamorph.ranges import Datetime, instant
from anamorph.schema import Schema
from anamorph.sources import encode, open_source
from anamorph.table import Table
from anamorph.tables import write_table

WHEN = Datetime(name="when", lower="1900-01-01", upper="2100-01-01", missing=True)
DAY = Datetime(name="when", lower="1900-01-01", upper="2100-01-01", date=True, missing=True)
FEW = Datetime(name="when", lower="2020-01-01", upper="2020-12-31", bins=12, date=True)
SECONDS = Datetime(name="when", lower="2020-01-01", upper="2020-01-02", missing=True)
COLUMNS = [WHEN, DAY, FEW, SECONDS]


def reference(column, value):
    """The code of a cell: None, a text, a day or a moment."""
    seconds = instant(value)
    if seconds is None:
        return column.empty_code
    unit = 86_400 if column.date else 1
    number, (lower, upper) = int(seconds // unit), column.numbers
    steps = min(upper - lower + 1, 2**20) if column.bins is None else column.bins
    return (min(max(number, lower), upper) - lower) * steps // (upper - lower + 1)


def codes_of(data, column):
    return encode(data, Schema((column,))).codes[:, 0].tolist()


def check(column, array):
    values = [value.as_py() if value.is_valid else None for value in array]
    assert codes_of(pa.table({"when": array}), column) == [reference(column, value) for value in values]


NASTY = ["", " ", "nan", "NaT", "null", "now", "today", "infinity", "-infinity", "epoch", "2020", "2020-01", "20200101"]
NASTY += [
    "2020-01-01",
    " 2020-01-01\t",
    "2020-1-1",
    "2020-02-30",
    "2020-02-29",
    "2019-02-29",
    "1900-02-29",
    "2000-02-29",
]
NASTY += ["2020-01-01T12:34:56.789", "2020-01-01 12:34", "2020-01-01T23:59:59.9999999999", "1969-12-31T23:59:59.999"]
NASTY += ["2020-01-01T24:00:00", "2020-01-01T23:59:60", "2020-01-01T12:60", "2020-01-01T12", "2020-01-01t12:00"]
NASTY += ["2020-01-01T12:00Z", "2020-01-01T00:30+02:00", "2020-12-31T23:30-0200", "2020-01-01T12:00+02", "2020-01-01Z"]
NASTY += ["2020-01-01T12:00+24:00", "2020-01-01T12:00+02:60", "2020-01-01T12:00 +02:00", "2020-01-01T12:00 UTC"]
NASTY += [
    "9999-12-31T23:59:59.999999",
    "0001-01-01",
    "10000-01-01",
    "-0001-01-01",
    "2020-01-01 (BC)",
    "0044-03-15 (BC)",
]
NASTY += [
    "1e9",
    "1577836800",
    "01/02/2020",
    "2020/01/02",
    "٢٠٢٠-01-01",
    "2020-01-01'; DROP TABLE x; --",
    "2020-01-01\0",
]
MOMENTS = st.datetimes(datetime.datetime(1850, 1, 1), datetime.datetime(2150, 1, 1))
TEXTS = st.one_of(
    st.none(), st.text(max_size=8), MOMENTS.map(str), MOMENTS.map(datetime.datetime.isoformat), st.dates().map(str)
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(COLUMNS), st.lists(TEXTS, max_size=30))
def test_texts(column, values):
    check(column, pa.array([*NASTY, None, *values], pa.string()))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(COLUMNS), st.sampled_from(["s", "ms", "us"]), st.booleans(), st.lists(MOMENTS, max_size=30))
def test_stored_moments(column, unit, zoned, values):
    array = pa.array([*values, None], pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
    check(column, array.cast(pa.timestamp(unit, "UTC")) if zoned else array)
    check(column, pa.array([value.date() for value in values], pa.date32()))
    nanoseconds = array.cast(pa.timestamp("ns"))
    assert codes_of(pa.table({"when": nanoseconds}), column) == codes_of(pa.table({"when": array}), column)


def test_parts_of_a_second_are_dropped():
    for text in ("2020-01-01 00:00:07.999999999", "1960-01-01 00:00:07.999999999"):
        column = Datetime(name="when", lower=text[:10], upper=f"{text[:10]}T01:00")
        array = pa.array([np.datetime64(text.replace(" ", "T"), "ns")])
        assert codes_of(pa.table({"when": array}), column) == [7]
        assert codes_of(pa.table({"when": [text]}), column) == [7]
        assert codes_of(pa.table({"when": array.cast(pa.timestamp("ns", "UTC"))}), column) == [7]
    last = Datetime(name="when", lower="9999-12-31", upper="9999-12-31T23:59:59")
    late = datetime.datetime(9999, 12, 31, 23, 59, 58, 999_999)
    assert codes_of(pa.table({"when": [late]}), last) == [86_398]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_extreme_moments_are_clamped(unit):
    for zone in (None, "UTC", "Asia/Tokyo"):
        array = pa.array([2**62, -(2**62), None], pa.timestamp(unit, zone))
        codes = codes_of(pa.table({"when": array}), WHEN)
        assert codes == [WHEN.regular - 1, 0, WHEN.empty_code]
    days = pa.array([2**31 - 1, -(2**31) + 2, None], pa.date32())
    assert codes_of(pa.table({"when": days}), DAY) == [DAY.regular - 1, 0, DAY.empty_code]


TEXT_ROWS = {
    "when": ["2020-02-29T12:00:00", "1900-01-01 00:00:00", "2099-12-31T23:59:59Z", "", "x", "1800-01-01", "2200-01-01"],
    "pay": ["0", "1e9", "12.5", "-3", "", "1,234", "7"],
    "age": ["17", "18", "99", "", "x", "1e30", "40"],
}
TEXT_SCHEMA = Schema(
    (
        WHEN,
        Numeric(name="pay", lower=0, upper=1e6, native=True, transform="log", missing=True),
        Numeric(name="age", lower=18, upper=99, native=True, integer=True),
    )
)
STORED = {
    "when": [datetime.datetime(2020, 2, 29, 12), datetime.datetime(1900, 1, 1), None, datetime.datetime(1800, 1, 1)],
    "pay": [0.0, 1e9, 12.5, None],
    "age": [17, 18, 99, None],
}


def test_files_frames_and_databases_agree(tmp_path):
    table = pa.table(TEXT_ROWS)
    expected = encode(table, TEXT_SCHEMA).codes.tolist()
    assert [row[0] for row in expected] == [reference(WHEN, text) for text in TEXT_ROWS["when"]]
    assert [row[2] for row in expected] == [0, 0, 81, 81, 81, 81, 22]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([TEXT_ROWS, *zip(*TEXT_ROWS.values(), strict=True)])
    pq.write_table(table, tmp_path / "rows.parquet")
    with duckdb.connect(str(tmp_path / "rows.db")) as connection:
        connection.register("rows", table)
        connection.execute("CREATE TABLE t AS SELECT * FROM rows")
    data = [str(tmp_path / "rows.csv"), str(tmp_path / "rows.parquet"), f"duckdb:///{tmp_path}/rows.db#t"]
    for each in [*data, pd.DataFrame(TEXT_ROWS), pl.DataFrame(TEXT_ROWS), pl.DataFrame(TEXT_ROWS).lazy()]:
        assert encode(each, TEXT_SCHEMA).codes.tolist() == expected
    with open_source(data[0], TEXT_SCHEMA) as source:
        assert sorted(np.concatenate(list(source.batches())).tolist()) == sorted(expected)


def test_stored_types_agree(tmp_path):
    table = pa.table(STORED)
    expected = encode(table, TEXT_SCHEMA).codes.tolist()
    texts = pa.table({name: pa.array([None if v is None else str(v) for v in STORED[name]]) for name in STORED})
    assert encode(texts, TEXT_SCHEMA).codes.tolist() == expected
    pq.write_table(table, tmp_path / "rows.parquet")
    with duckdb.connect(str(tmp_path / "rows.db")) as connection:
        connection.register("rows", table)
        for kind in ("TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS", "TIMESTAMPTZ", "DATE", "VARCHAR"):
            connection.execute(f'CREATE TABLE {kind}_ AS SELECT "when"::{kind} AS "when", pay, age FROM rows')
    objects = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in STORED.items()})
    frames = [str(tmp_path / "rows.parquet"), pl.from_arrow(table), table.to_pandas(), objects]
    databases = [
        f"duckdb:///{tmp_path}/rows.db#{kind}_"
        for kind in ("TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS", "TIMESTAMPTZ", "VARCHAR")
    ]
    for each in [*frames, *databases]:
        assert encode(each, TEXT_SCHEMA).codes.tolist() == expected
    days = [[reference(DAY, value)] for value in STORED["when"]]
    for each in [*frames, *databases, f"duckdb:///{tmp_path}/rows.db#DATE_"]:
        assert encode(each, Schema((DAY,))).codes.tolist() == days


def test_moments_beyond_the_calendar_of_a_database(tmp_path):
    with duckdb.connect(str(tmp_path / "rows.db")) as connection:
        for kind, far in (("DATE", "5881580-07-10"), ("TIMESTAMP", "290000-01-01"), ("TIMESTAMPTZ", "290000-01-01")):
            values = ["infinity", "-infinity", far, "4000-01-01 (BC)", "2020-01-01"]
            rows = ", ".join(f"('{value}'::{kind})" for value in values)
            connection.execute(f'CREATE TABLE {kind}_ AS SELECT * FROM (VALUES {rows}, (NULL)) AS t("when")')
    middle = reference(WHEN, "2020-01-01")
    for kind in ("DATE", "TIMESTAMP", "TIMESTAMPTZ"):
        last = WHEN.regular - 1
        assert codes_of(f"duckdb:///{tmp_path}/rows.db#{kind}_", WHEN) == [last, 0, last, 0, middle, last + 1]


def test_pandas_and_polars_moments():
    values = ["2020-02-29 12:00:00", None, "1950-01-01"]
    expected = [reference(WHEN, value) for value in values]
    moments = pd.to_datetime(pd.Series(values), format="ISO8601")
    series = [moments.astype(f"datetime64[{unit}]") for unit in ("s", "ms", "us", "ns")]
    series += [moments.dt.tz_localize("UTC"), moments.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")]
    series += [moments.astype(object), moments.astype("category"), pd.Series(moments.to_numpy().astype(object))]
    for each in series:
        assert codes_of(pd.DataFrame({"when": each}), WHEN) == expected
    text = pl.Series("when", values)
    for kind in (pl.Datetime("us"), pl.Datetime("ns"), pl.Datetime("ms")):
        frame = pl.DataFrame({"when": moments.to_numpy()}).with_columns(pl.col("when").cast(kind))
        assert codes_of(frame, WHEN) == expected
        assert codes_of(frame.with_columns(pl.col("when").dt.replace_time_zone("UTC")), WHEN) == expected
    assert codes_of(pl.DataFrame({"when": text}), WHEN) == expected
    mixed = [datetime.date(2020, 1, 1), "2020-01-01", pd.Timestamp("2020-01-01"), np.datetime64("2020-01-01"), pd.NaT]
    mixed += [True, 1577836800, 1.5, [1], object(), b"2020-01-01", np.datetime64("NaT"), np.datetime64(2**40, "Y")]
    codes = codes_of(pd.DataFrame({"when": pd.Series(mixed, dtype=object)}), WHEN)
    middle, empty = reference(WHEN, "2020-01-01"), WHEN.empty_code
    assert codes == [*[middle] * 4, *[empty] * 6, middle, empty, empty]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1577836800]),
        pa.array([1.5]),
        pa.array([True]),
        pa.array([datetime.time(12)]),
        pa.array([1], pa.time64("ns")),
        pa.array([[1]]),
        pa.array([1], pa.duration("s")),
    ],
    ids=lambda array: str(array.type),
)
def test_numbers_and_times_of_day_are_no_moments(array, refused):
    refused(DataError, lambda: encode(pa.table({"when": array}), Schema((WHEN,))), "'when'", "datetime")


def test_moments_are_still_no_numbers(refused):
    frame = pl.DataFrame({"x": [datetime.date(2020, 1, 1)]})
    for column in (Codes(name="x", values=3), Numeric(name="x", lower=0, upper=1, native=True)):
        refused(DataError, lambda c=column: encode(frame, Schema((c,))), "'x'", "DATE", column.kind)


def test_native_and_other_columns_stand_side_by_side():
    schema = Schema((Categorical(name="c", categories=["a", "b"]), *TEXT_SCHEMA.columns))
    frame = pa.table({"c": ["a", "b", "b", "a", "a", "b", "b"], **TEXT_ROWS})
    assert encode(frame, schema).codes[:, 1:].tolist() == encode(frame, TEXT_SCHEMA).codes.tolist()


def test_decoded_rows_are_read_back_from_files(tmp_path):
    schema = Schema(
        (
            WHEN,
            Datetime(name="day", lower="1900-01-01", upper="2100-01-01", date=True, missing=True),
            *TEXT_SCHEMA.columns[1:],
        )
    )
    codes = np.random.default_rng(0).integers(0, schema.sizes, (500, 4)).astype(np.int32)
    codes[0] = [size - 1 for size in schema.sizes]
    rows = schema.decode(Table(codes, schema.sizes), np.random.default_rng(1))
    for name in ("rows.csv", "rows.parquet"):
        write_table(rows, tmp_path / name)
        assert encode(str(tmp_path / name), schema).codes.tolist() == codes.tolist()
    assert encode(rows.to_pandas(), schema).codes.tolist() == codes.tolist()
    assert encode(pl.from_arrow(rows), schema).codes.tolist() == codes.tolist()
