"""Workloads: ids are always ids into this workload, and streams of answers follow the same cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.tallies import count
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4, 5)
SETS = ((0,), (1, 2), (3, 0), (0, 1, 2), (2, 3), (1,))


def source(rows=200):
    generator = np.random.default_rng(5)
    codes = np.stack(
        [np.minimum(generator.integers(0, s, rows), generator.integers(0, s, rows)) for s in SIZES], axis=1
    )
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    return TableSource(Table(codes.astype(np.int32), SIZES), schema)


ROWS = source()


def answers(workload, limit=37):
    """Exact counts, block by block: a list of arrays."""
    blocks: list[list[np.ndarray]] = [[] for _ in range(workload.blocks)]
    for piece in workload.pieces(limit):
        numbers = count(piece.tally, ROWS)
        if piece.blocks == 1:
            blocks[piece.first].append(numbers)
        else:
            assert piece.blocks == numbers.size
            for i, value in enumerate(numbers):
                blocks[piece.first + i].append(np.array([value]))
    return [np.concatenate(found).tolist() for found in blocks]


@st.composite
def parts(draw):
    sets = tuple(draw(st.lists(st.sampled_from(SETS), min_size=1, max_size=4, unique=True)))
    queries = Marginals(SIZES, sets)
    kind = draw(st.sampled_from(["whole", "cells", "chosen"]))
    if kind == "whole":
        return queries
    cells = Cells(queries)
    return (
        cells
        if kind == "cells"
        else cells.take(draw(st.lists(st.integers(0, cells.cells - 1), min_size=1, max_size=8)))
    )


WORKLOADS = st.lists(parts(), min_size=1, max_size=4).map(lambda found: Workload(tuple(found)))


@given(WORKLOADS, st.data())
@settings(deadline=None)
def test_a_subset_answers_as_the_whole_does_at_its_ids(workload, data):
    every = answers(workload)
    ids = data.draw(st.lists(st.integers(0, workload.blocks - 1), min_size=1, max_size=10))
    taken = workload.take(ids)
    assert answers(taken) == [every[i] for i in ids]
    assert taken.blocks == len(ids)
    assert taken.block_cells.tolist() == workload.block_cells[ids].tolist()
    again = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10))
    assert answers(taken.take(again)) == [every[ids[i]] for i in again]
    cells = data.draw(st.lists(st.integers(0, taken.cells - 1), min_size=1, max_size=10))
    flat = [number for block in answers(taken) for number in block]
    assert answers(taken.by_cell().take(cells)) == [[flat[i]] for i in cells]


@given(WORKLOADS, st.integers(1, 200))
@settings(deadline=None)
def test_any_cut_gives_the_same_answers(workload, limit):
    assert answers(workload, limit) == answers(workload, 10**6)
    flat = [[number] for block in answers(workload) for number in block]
    assert answers(workload.by_cell(), limit) == flat
    assert workload.cells == len(flat) == sum(workload.block_cells)
    assert workload.by_cell().blocks == len(flat)


def test_answers_are_those_of_the_rows():
    workload = Workload((Marginals(SIZES, ((3, 0),)),))
    codes = ROWS._table.codes
    expected = [int(np.sum((codes[:, 3] == a) & (codes[:, 0] == b))) for a in range(5) for b in range(3)]
    assert answers(workload) == [expected]


@pytest.mark.parametrize("ids", [[-1], [0, 3], [10**9]])
def test_ids_of_another_workload_are_refused(ids):
    workload = Workload((Marginals(SIZES, SETS[:2]), Marginals(SIZES, SETS[2:3])))
    with pytest.raises(WorkloadError, match="ids must be from 0 to 2: they are ids into this workload"):
        workload.take(ids)


def test_an_empty_workload_is_refused():
    with pytest.raises(WorkloadError, match="at least one query"):
        Workload(())
    with pytest.raises(WorkloadError, match="at least one query"):
        Workload((Marginals(SIZES, ()),))
    with pytest.raises(WorkloadError, match="at least one query"):
        Workload((Marginals(SIZES, SETS),)).take([])


def test_empty_parts_take_no_ids():
    empty, some = Marginals(SIZES, ()), Marginals(SIZES, SETS[:2])
    for order in ((empty, some), (some, empty), (empty, some, empty, some)):
        workload = Workload(order)
        every = answers(workload)
        assert [answers(workload.take([i]))[0] for i in range(workload.blocks)] == every


def test_the_digest_is_of_queries_and_their_order():
    whole = Marginals(SIZES, SETS)
    reversed_sets = Marginals(SIZES, SETS[::-1])
    made = [
        Workload((whole,)),
        Workload((reversed_sets,)),
        Workload((whole,)).by_cell(),
        Workload((whole,)).take([0, 1]),
        Workload((whole,)).take([1, 0]),
        Workload((whole,)).by_cell().take([0, 5]),
        Workload((whole,)).by_cell().take([5, 0]),
        Workload((whole,)).by_cell().take([0, 6]),
        Workload((Marginals((3, 2, 4, 6), SETS),)),
        Workload((Marginals(SIZES, ((2, 1),)),)),
        Workload((Marginals(SIZES, ((1, 2),)),)),
        Workload((whole, whole)),
    ]
    assert len({workload.digest for workload in made}) == len(made)
    assert Workload((whole,)).digest == Workload((Marginals(SIZES, SETS),), spec="another text").digest
    cut = Workload((Marginals(SIZES, SETS[:2]), Marginals(SIZES, SETS[2:])))
    assert cut.digest == Workload((whole,)).digest
