"""The same rows, wherever they live, give the same counts."""

from __future__ import annotations

import csv
import datetime
import gzip
import itertools

import duckdb
import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anamorph.columns import Categorical, Codes, Numeric
from anamorph.schema import Schema
from anamorph.sources import TableSource, encode, open_source, sql

TEXTS = {
    "colour": [
        "red",
        " red",
        "RED",
        "",
        None,
        "cafe\u0301",
        "café",
        'a"; DROP TABLE x; --',
        "back\\slash",
        "a,b",
        "a\nb",
        "\r\n",
    ],
    "size": ["7", " 7 ", "1,234", "nan", "-0.0", "1e400", "-inf", "0.5", "1", "0x10", "1_000", None],
    'a"; DROP TABLE x; --': ["0", "1", "2", "3", "3.7", "-4", "1e30", "", " ", "x", "2.0", "+1"],
}
TEXT_SCHEMA = Schema(
    (
        Categorical(
            name="colour",
            categories=["red", "café", 'a"; DROP TABLE x; --', "back\\slash", "a,b", "a\nb"],
            other=True,
            missing=True,
        ),
        Numeric(name="size", lower=0, upper=10, bins=20, missing=True),
        Codes(name='a"; DROP TABLE x; --', values=4, missing=True),
    )
)
TYPED = pa.table(
    {
        "flag": pa.array([True, False, None, True, False, True]),
        "level": pa.array([3, -1, None, 2**62, 0, 7], pa.int64()),
        "share": pa.array([0.1, float("nan"), float("inf"), None, -0.0, 0.75]),
        "day": pa.array([datetime.date(2020, 1, 31), None, datetime.date(1, 1, 1)] * 2),
        "word": pa.array(["a", "b", None, "a ", "A", ""]).dictionary_encode(),
    }
)
TYPED_SCHEMA = Schema(
    (
        Categorical(name="word", categories=["a", "b"], other=True, missing=True),
        Categorical(name="flag", categories=[True, False], missing=True),
        Categorical(name="level", categories=[0, "7", 3.0], other=True, missing=True),
        Numeric(name="share", lower=0, upper=1, bins=10, missing=True),
        Categorical(name="day", categories=["2020-01-31"], other=True, missing=True),
    )
)


def write_csv(path, columns, opened=open):
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_database(path, table, name="people"):
    with duckdb.connect(str(path)) as connection:
        connection.register("arrow", table)
        quoted = name.replace('"', '""')
        connection.execute(f'CREATE TABLE "{quoted}" AS SELECT * FROM arrow')
    return f"duckdb:///{path}#{name.replace('%', '%25').replace('#', '%23')}"


def homes(directory, table):
    """The same table everywhere."""
    pq.write_table(table, directory / "data.parquet")
    arrow = pa.table({name: table.column(name) for name in table.column_names})
    return {
        "parquet": directory / "data.parquet",
        "database": write_database(directory / "data.db", table),
        "arrow": arrow,
        "pandas": table.to_pandas(),
        "pandas arrow": table.to_pandas(types_mapper=pd.ArrowDtype),
        "polars": pl.from_arrow(table),
        "lazy": pl.from_arrow(table).lazy(),
        "narwhals": nw.from_native(pl.from_arrow(table)),
        "relation": duckdb.from_arrow(table),
    }


def counted(data, schema):
    sets = [
        each for k in range(len(schema.columns) + 1) for each in itertools.combinations(range(len(schema.columns)), k)
    ]
    with open_source(data, schema) as source:
        return source.rows(), [(cells.tolist(), counts.tolist()) for cells, counts in source.counts(sets)]


def test_text_is_read_alike_everywhere(tmp_path):
    table = pa.table({name: pa.array(values, pa.string()) for name, values in TEXTS.items()})
    expected = counted(encode(table, TEXT_SCHEMA), TEXT_SCHEMA)
    assert expected[0] == 12
    filled = {name: ["" if value is None else value for value in values] for name, values in TEXTS.items()}
    data = homes(tmp_path, table) | {
        "csv": write_csv(tmp_path / "data.csv", filled),
        "gzip": write_csv(tmp_path / "data.csv.gz", filled, gzip.open),
        "objects": pd.DataFrame(TEXTS, dtype=object),
    }
    for name, home in data.items():
        assert counted(home, TEXT_SCHEMA) == expected, name


def test_types_are_read_alike_everywhere(tmp_path):
    expected = counted(encode(TYPED, TYPED_SCHEMA), TYPED_SCHEMA)
    assert expected[1][1:3] == [([0, 1, 2, 3], [2, 1, 1, 2]), ([0, 1, 2], [3, 2, 1])]
    for name, home in homes(tmp_path, TYPED).items():
        assert counted(home, TYPED_SCHEMA) == expected, name


NAMES = [
    'a"; DROP TABLE x; --',
    "`tick`",
    "🦆",
    "x" * 10_000,
    "line\nbreak",
    "'quote'",
    "a.b",
    "%s{0}",
    "\\",
    "SELECT",
    "f0",
    "c1",
    "^.*$",
    "*",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_column_names_of_any_spelling(tmp_path, name):
    schema = Schema((Codes(name=name, values=5), Codes(name=name + " ", values=5), Codes(name=name + "!", values=5)))
    table = pa.table({name + "!": ["3"], name: ["1"], name + " ": ["2"], name.upper() + "?": ["4"]})
    data = homes(tmp_path, table) | {"csv": write_csv(tmp_path / "d.csv", table.to_pydict())}
    for home, where in data.items():
        with open_source(where, schema) as source:
            assert [cells.tolist() for cells, _ in source.counts([(0,), (1,), (2,)])] == [[1], [2], [3]], home
            assert source.ignored == (name.upper() + "?",)


def test_names_that_differ_in_case_alone(tmp_path):
    schema = Schema((Codes(name="A", values=5), Codes(name="a", values=5)))
    table = pa.table({"a": ["1"], "A": ["2"]})
    pq.write_table(table, tmp_path / "d.parquet")
    for where in (
        table,
        tmp_path / "d.parquet",
        write_csv(tmp_path / "d.csv", table.to_pydict()),
        table.to_pandas(),
    ):
        assert encode(where, schema).codes.tolist() == [[2, 1]]


def test_databases_hold_types_that_frames_do_not(tmp_path, monkeypatch):
    path = tmp_path / "d.db"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE t (text VARCHAR COLLATE NOCASE, huge HUGEINT, kind ENUM('a', 'b'), "
            "price DECIMAL(30, 2), moment TIMESTAMPTZ)"
        )
        connection.execute(
            "INSERT INTO t VALUES ('A', 1267650600228229401496703205376, 'b', 12345678901234567890.10, "
            "'2020-01-01 01:00:00+01')"
        )
        connection.execute("INSERT INTO t VALUES ('a', -1, NULL, NULL, NULL)")
        connection.execute("CREATE VIEW v AS SELECT * FROM t; CREATE SCHEMA s; CREATE TABLE s.t AS FROM t")
    schema = Schema(
        (
            Categorical(name="text", categories=["a", "A"], missing=True),
            Categorical(name="huge", categories=[2**100, 2**100 + 1, -1], missing=True),
            Categorical(name="kind", categories=["a", "b"], missing=True),
            Numeric(name="price", lower=0, upper=1e20, bins=1000, missing=True),
            Categorical(name="moment", categories=["2020-01-01T00:00:00Z"], missing=True),
        )
    )
    for table, longest in (("t", 0), ("t", 1024), ("v", 0), ("s.t", 0), ("main.t", 0)):
        monkeypatch.setattr(sql, "LONGEST_SEARCH", longest)  # joined, or searched in place
        with open_source(f"duckdb:///{path}#{table}", schema) as source:
            found = [(cells.tolist(), counts.tolist()) for cells, counts in source.counts([(i,) for i in range(5)])]
        assert [cells for cells, _ in found] == [[0, 1], [0, 2], [1, 2], [123, 1000], [0, 1]]
        assert all(counts == [1, 1] for _, counts in found)


def test_a_source_is_one_snapshot(tmp_path):
    path = write_csv(tmp_path / "d.csv", {"x": ["1", "2"]})
    with open_source(path, Schema((Codes(name="x", values=3),))) as source:
        path.write_text("x\n0\n0\n0\n")
        path.unlink()
        assert source.rows() == 2
        assert [counts.tolist() for _, counts in source.counts([(0,)])] == [[1, 1]]


def test_order_of_rows_does_not_matter(tmp_path):
    table = pa.table({name: pa.array(values, pa.string()) for name, values in TEXTS.items()})
    mixed = table.take(np.random.default_rng(1).permutation(12))
    assert counted(mixed, TEXT_SCHEMA) == counted(table, TEXT_SCHEMA)


@pytest.mark.parametrize("name", ["adult", "nltcs", "loans", "titanic"])
def test_benchmark_data(public_data, name):
    schema, path = public_data(name)
    sets = [
        *itertools.islice(itertools.combinations(range(len(schema.columns)), 2), 40),
        (2, 1, 0),
        (0, 3, 5),
    ]
    frame = pd.read_csv(path)
    table = encode(frame, schema)
    assert (table.codes == frame[list(schema.names)].to_numpy()).all()
    with open_source(path, schema) as source:
        pairs = zip(source.counts(sets), TableSource(table, schema).counts(sets), strict=True)
        for (cells, counts), (others, numbers) in pairs:
            assert (cells == others).all()
            assert (counts == numbers).all()
            assert counts.sum() == len(frame)
