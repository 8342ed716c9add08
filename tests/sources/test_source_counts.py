"""Counts against brute force, their limits, and what a source leaves behind."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Categorical, Codes
from anamorph.curator import where as where_module
from anamorph.curator.where import Where, where_counts
from anamorph.errors import DataError, ParameterError, ResourceError, WorkloadError
from anamorph.schema import Schema
from anamorph.sources import Source, TableSource, encode, open_source, sql
from anamorph.sources import engine as engine_module
from anamorph.table import Table


def schema_of(*sizes):
    return Schema(tuple(Codes(name=f"x{i}", values=size) for i, size in enumerate(sizes)))


def frame_of(codes):
    return pa.table({f"x{i}": codes[:, i] for i in range(codes.shape[1])})


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_brute_force(data):
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 256, 257, 70_000]), min_size=1, max_size=4))
    rows = data.draw(st.integers(0, 60))
    codes = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, np.minimum(sizes, 5), (rows, len(sizes)))
    codes[rows // 2 :] = np.asarray(sizes) - 1
    sets = data.draw(
        st.lists(
            st.permutations(range(len(sizes))).flatmap(
                lambda p: st.sampled_from([tuple(p[:k]) for k in range(len(p) + 1)])
            ),
            max_size=5,
        )
    )
    schema = schema_of(*sizes)
    table = Table(codes.astype(np.int32), schema.sizes)
    with open_source(frame_of(codes), schema) as source, TableSource(table, schema) as other:
        assert source.rows() == other.rows() == rows
        for columns, found, same in zip(sets, source.counts(sets), other.counts(sets), strict=True):
            brute: dict[int, int] = {}
            for row in codes:
                position = 0
                for i in columns:
                    position = position * sizes[i] + int(row[i])
                brute[position] = brute.get(position, 0) + 1
            for cells, counts in (found, same):
                assert cells.dtype == counts.dtype == np.int64
                assert cells.tolist() == sorted(brute)
                assert counts.tolist() == [brute[cell] for cell in sorted(brute)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_marginals_over_ranks_by_brute_force(data):
    """Also with cuts that no code or every code exceeds, and with no rows; by halves, by joins, or by both."""
    sizes = data.draw(st.lists(st.sampled_from([2, 7, 256, 257, 70_000]), min_size=2, max_size=4))
    rows = data.draw(st.integers(0, 40))
    codes = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, np.minimum(sizes, 9), (rows, len(sizes)))
    codes[: rows // 4] = np.asarray(sizes) - 1
    order = data.draw(st.permutations(range(len(sizes))))
    split = data.draw(st.integers(1, len(sizes)))
    numbers, columns = order[:split], tuple(order[split:])
    cuts = {i: np.array(sorted(data.draw(st.sets(st.integers(-1, 10), min_size=1)))) for i in numbers}
    brute: dict[int, int] = {}
    for row in codes.tolist():
        position = 0
        for i in columns:
            position = position * sizes[i] + row[i]
        ranks = [sum(int(cut < row[i]) for cut in each) for i, each in cuts.items()]
        for rank, each in zip(ranks, cuts.values(), strict=True):
            position = position * len(each) + rank
        if all(rank < len(each) for rank, each in zip(ranks, cuts.values(), strict=True)):
            brute[position] = brute.get(position, 0) + 1
    with pytest.MonkeyPatch.context() as patch, open_source(frame_of(codes), schema_of(*sizes)) as source:
        patch.setattr(sql, "FEW_CUTS", data.draw(st.sampled_from([0, 3, 128])))
        cells, counts = source.grouped(columns, cuts)
    assert cells.dtype == counts.dtype == np.int64
    assert cells.tolist() == sorted(brute)
    assert counts.tolist() == [brute[cell] for cell in sorted(brute)]


@pytest.mark.parametrize(("given_", "numbers"), [((0,), (1, 3)), ((), (3,)), ((2, 0), (1,)), ((0,), (3, 1, 2))])
def test_prefixes_are_counted_inside_the_engine(given_, numbers, monkeypatch):
    """As many as several statements need; and no row comes out."""
    sizes, limits = (3, 5000, 2, 300), (3, 4999, 2, 250)
    random = np.random.default_rng(len(numbers))
    codes = np.stack([random.integers(0, size, 700) for size in sizes], axis=1)
    bounds = np.stack([random.integers(-1, limits[i] + 9, 90) for i in numbers], axis=1)
    tally = Where(sizes, given_, numbers, tuple(limits[i] for i in numbers), bounds)
    expected = where_counts(tally, Table(codes.astype(np.int32), sizes))
    assert expected.any()
    monkeypatch.setattr(engine_module.EngineSource, "batches", None)
    monkeypatch.setattr(where_module, "LEAST_TESTS", 1)
    for most in (7, 1 << 14):
        monkeypatch.setattr(where_module, "MOST_CUTS", most)
        with open_source(frame_of(codes), schema_of(*sizes)) as source:
            assert where_counts(tally, source).tolist() == expected.tolist()


def test_marginals_over_ranks_of_absent_columns_are_refused(refused):
    with open_source(frame_of(np.zeros((3, 2), int)), schema_of(2, 9)) as source:
        for columns, number in (((2,), 0), ((0,), 2), ((0,), -1)):
            cuts = {number: np.array([0])}
            refused(WorkloadError, lambda c=columns, n=cuts: source.grouped(c, n), "must name distinct columns")


def test_many_marginals_in_small_statements(monkeypatch):
    codes = np.random.default_rng(0).integers(0, 3, (500, 4)).astype(np.int32)
    schema = schema_of(3, 3, 3, 3)
    sets = [(i, j) for i in range(4) for j in range(4) if i != j] * 9
    expected = list(TableSource(Table(codes, schema.sizes), schema).counts(sets))
    for most in (1, 20, 1 << 22):
        monkeypatch.setattr(engine_module, "MOST_COUNTED", most)
        with open_source(frame_of(codes), schema) as source:
            for (cells, counts), (others, numbers) in zip(source.counts(sets), expected, strict=True):
                assert (cells == others).all()
                assert (counts == numbers).all()


def test_too_many_cells_are_refused_before_counting(refused):
    schema = schema_of(*[1000] * 10)
    table = Table(np.zeros((3, 10), np.int32), schema.sizes)
    with open_source(frame_of(table.codes), schema) as source:
        for each in (source, TableSource(table, schema)):
            message = refused(WorkloadError, lambda e=each: e.counts([(0,), tuple(range(10))]), "'x0'", "2^63")
            assert str(10**30) in message
            for wrong in ((0, 0), (10,), (-1,)):
                refused(WorkloadError, lambda e=each, w=wrong: e.counts([w]), "distinct")


def test_cells_up_to_the_limit():
    sizes = (2**31 - 2, 2**31 - 2, 2)
    codes = np.array([[size - 1 for size in sizes], [0, 0, 1]])
    with open_source(frame_of(codes), schema_of(*sizes)) as source:
        ((cells, counts),) = source.counts([(0, 1, 2)])
    assert cells.tolist() == [1, (2**31 - 2) ** 2 * 2 - 1]
    assert counts.tolist() == [1, 1]


def test_counts_beyond_float_precision(tmp_path):
    rows = 2**24 + 3
    with duckdb.connect(str(tmp_path / "d.db")) as connection:
        connection.execute(f"CREATE TABLE t AS SELECT 1::UTINYINT AS x0 FROM range({rows})")
    with open_source(f"duckdb:///{tmp_path}/d.db#t", schema_of(2)) as source:
        ((cells, counts),) = source.counts([(0,)])
        assert (cells.tolist(), counts.tolist(), source.rows()) == ([1], [rows], rows)


def test_more_rows_than_memory(tmp_path):
    with duckdb.connect(str(tmp_path / "d.db")) as connection:
        columns = ", ".join(f"(hash(range + {i}) % 60000)::INTEGER AS x{i}" for i in range(20))
        connection.execute(f"CREATE TABLE t AS SELECT {columns} FROM range(1000000)")
    with open_source(f"duckdb:///{tmp_path}/d.db#t", schema_of(*[60_000] * 20), memory_limit="40MB") as source:
        assert source.rows() == 1_000_000
        ((_, counts),) = source.counts([(3,)])
        assert counts.sum() == 1_000_000


def test_wide_tables_need_little_memory():
    columns = [Categorical(name=f"x{i}", categories=list("abcdefgh"), missing=True) for i in range(200)]
    frame = pa.table({column.name: ["a", "b ", None] for column in columns})
    with open_source(frame, Schema(tuple(columns)), memory_limit="500MB") as source:
        ((cells, counts),) = source.counts([(0, 199)])
    assert (cells.tolist(), counts.tolist()) == ([0, 10, 80], [1, 1, 1])


def test_long_lists_are_joined_and_searched(monkeypatch):
    names = [f"x{i}" for i in range(4)]
    columns = [Categorical(name=name, categories=list(range(9)), other=True) for name in names]
    frame = pa.table({name: [i, 3, 99] for i, name in enumerate(names)})
    for longest, most in ((0, 16), (0, 2), (1000, 16)):
        monkeypatch.setattr(sql, "LONGEST_SEARCH", longest)
        monkeypatch.setattr(sql, "MOST_JOINS", most)
        assert encode(frame, Schema(tuple(columns))).codes.T.tolist() == [[i, 3, 9] for i in range(4)]


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    codes = np.zeros((3, 1), int)
    source = open_source(frame_of(codes), schema_of(2))
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    source.close()
    source.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError):
        source.rows()
    with pytest.raises(DataError):
        open_source(frame_of(codes), Schema((Codes(name="y", values=2),)))
    source = open_source(frame_of(codes), schema_of(2))
    del source
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_engine_is_locked_in(tmp_path, refused):
    path = tmp_path / "secret.csv"
    path.write_text("x\n1\n")
    with open_source(frame_of(np.zeros((3, 1), int)), schema_of(2)) as source:
        engine = source._engine
        for statement in (
            f"SELECT * FROM '{path}'",
            f"COPY encoded TO '{tmp_path}/out.csv'",
            f"ATTACH '{tmp_path}/new.db'",
            "SET enable_external_access = true",
            "SET memory_limit = '1TB'",
            "INSTALL httpfs",
            "LOAD httpfs",
        ):
            refused(ResourceError, lambda s=statement: engine.execute(s))
    assert [each.name for each in tmp_path.iterdir()] == ["secret.csv"]


def test_an_interrupt_is_an_interrupt():
    with open_source(frame_of(np.zeros((3, 1), int)), schema_of(2)) as source:
        engine = source._engine

        def later():
            time.sleep(0.2)
            engine._connection.interrupt()

        thread = threading.Thread(target=later)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.execute("SELECT COUNT(*) FROM range(100000000000) AS a")
        thread.join()


def test_tables_are_checked(refused):
    schema = schema_of(3, 4)
    assert open_source(Table(np.zeros((0, 2), np.int32), (3, 4)), schema).rows() == 0
    refused(ParameterError, lambda: TableSource(Table(np.zeros((1, 2), np.int32), (3, 5)), schema))
    for bad in ([[3, 0]], [[0, -1]]):
        refused(DataError, lambda b=bad: TableSource(Table(np.array(b, np.int32), (3, 4)), schema), "column")


def test_sources_are_sources():
    schema = schema_of(2)
    sources: list[Source] = [
        open_source(frame_of(np.zeros((3, 1), int)), schema),
        TableSource(Table(np.zeros((3, 1), np.int32), (2,)), schema),
    ]
    for source in sources:
        with source:
            assert source.schema is schema
            assert source.ignored == ()
            assert list(source.counts([])) == []
            assert source.rows() == 3


@pytest.mark.parametrize("limit", ["", "lots", "0", "-1", "1e9", "4 GB; DROP", "101%"])
def test_memory_limits(limit, refused):
    refused(
        ParameterError,
        lambda: open_source(frame_of(np.zeros((1, 1), int)), schema_of(2), memory_limit=limit),
        "memory_limit",
    )


def test_a_full_disk_is_a_resource(monkeypatch, refused):
    monkeypatch.setattr(tempfile, "tempdir", str(Path("/nonexistent/place")))
    refused(ResourceError, lambda: open_source(frame_of(np.zeros((1, 1), int)), schema_of(2)), "temporary")
