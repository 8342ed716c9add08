"""Tallies count as brute force does, and no neighbour moves them by more than their sensitivity."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import tallies as kinds
from anamorph.curator.tallies import GroupBy, count, squared_sensitivity
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
SETS = tuple(subset for k in (1, 2, 3) for subset in itertools.combinations(range(3), k))

rows_of = st.lists(st.tuples(*(st.integers(0, size - 1) for size in SIZES)), min_size=1, max_size=12)


@st.composite
def workloads(draw):
    whole = Workload((Marginals(SIZES, tuple(draw(st.lists(st.sampled_from(SETS), min_size=1, unique=True)))),))
    if draw(st.booleans()):
        return whole
    cells = whole.by_cell()
    return cells.take(draw(st.lists(st.integers(0, cells.blocks - 1), min_size=1, max_size=8, unique=True)))


def source(rows) -> TableSource:
    return TableSource(Table(np.array(rows, np.int32).reshape(-1, 3), SIZES), SCHEMA)


def numbers(workload, rows):
    found = source(rows)
    return np.concatenate([count(piece.tally, found) for piece in workload.pieces(5)])


def brute(workload, rows):
    """Counts one query at a time, from the definition."""
    found = []
    for piece in workload.pieces(5):
        tally = piece.tally
        if isinstance(tally, GroupBy):
            for codes in itertools.product(range(tally.start, tally.stop), *map(range, tally.shape[1:])):
                found.append(sum(tuple(row[f] for f in tally.features) == codes for row in rows))
        else:
            for which, position in zip(tally.which, tally.positions, strict=True):
                features = tally.sets[which]
                codes = np.unravel_index(position, [SIZES[f] for f in features])
                found.append(sum(tuple(row[f] for f in features) == tuple(map(int, codes)) for row in rows))
    return np.array(found)


@given(workloads(), rows_of)
@settings(max_examples=150, deadline=None)
def test_counts_equal_brute_force(workload, rows):
    assert np.array_equal(numbers(workload, rows), brute(workload, rows))


@given(workloads(), rows_of, st.data())
@settings(max_examples=300, deadline=None)
def test_no_neighbour_moves_the_numbers_by_more_than_their_sensitivity(workload, rows, data):
    tallies = [piece.tally for piece in workload.pieces(5)]
    before = numbers(workload, rows)
    changed = data.draw(st.integers(0, len(rows) - 1))
    other = data.draw(st.tuples(*(st.integers(0, size - 1) for size in SIZES)))
    replaced = numbers(workload, [*rows[:changed], other, *rows[changed + 1 :]])
    assert np.sum((replaced - before) ** 2) <= squared_sensitivity(tallies, "replace")
    added = numbers(workload, [*rows, other])
    assert np.sum((added - before) ** 2) <= squared_sensitivity(tallies, "add-remove")


@pytest.mark.parametrize(("relation", "one"), [("replace", 2), ("add-remove", 1)])
def test_whole_marginals_reach_their_sensitivity(relation, one):
    sets = ((0, 1), (1, 2), (0, 2))
    tallies = [piece.tally for piece in Workload((Marginals(SIZES, sets),)).pieces()]
    assert squared_sensitivity(tallies, relation) == one * len(sets)
    workload = Workload((Marginals(SIZES, sets),))
    rows = [(0, 0, 0), (1, 1, 1)]
    other = [(2, 1, 3), (1, 1, 1)] if relation == "replace" else [*rows, (2, 1, 3)]
    assert np.sum((numbers(workload, rows) - numbers(workload, other)) ** 2) == one * len(sets)


def test_slabs_of_one_marginal_cost_one_marginal():
    whole = Workload((Marginals(SIZES, ((0, 1, 2),)),))
    slabs = [piece.tally for piece in whole.pieces(8)]
    assert len(slabs) == 3
    assert squared_sensitivity(slabs, "replace") == 2
    assert squared_sensitivity(slabs, "add-remove") == 1


@pytest.mark.parametrize(("relation", "expected"), [("replace", 2 + 1), ("add-remove", 1 + 1)])
def test_cells_of_one_marginal_share_its_sensitivity(relation, expected):
    tests = kinds.Tests(SIZES, ((0, 1), (2,)), np.array([0, 0, 0, 1]), np.array([0, 1, 4, 2]))
    assert squared_sensitivity([tests], relation) == expected


WHOLE = GroupBy(SIZES, (0, 1), 0, 3)
CELL = kinds.Tests(SIZES, ((0, 1),), np.array([0]), np.array([5]))


@pytest.mark.parametrize(
    "tallies",
    [
        [kinds.Tests(SIZES, ((0,),), np.array([0, 0]), np.array([1, 1]))],
        [kinds.Tests(SIZES, ((0,), (0,)), np.array([0, 1]), np.array([1, 1]))],
        [WHOLE, WHOLE],
        [WHOLE, CELL],
        [CELL, CELL],
        [GroupBy(SIZES, (0, 1), 0, 2), GroupBy(SIZES, (0, 1), 1, 3)],
    ],
)
def test_a_cell_asked_twice_is_refused(tallies):
    """The bug: 200 copies of a marginal in one measurement had the noise of one."""
    with pytest.raises(WorkloadError, match="once"):
        squared_sensitivity(tallies, "replace")


@pytest.mark.parametrize(
    "tally",
    [
        GroupBy((3, 2), (0, 1), 0, 3),
        GroupBy(SIZES, (0, 0), 0, 3),
        GroupBy(SIZES, (0, 7), 0, 3),
        GroupBy(SIZES, (), 0, 3),
        GroupBy(SIZES, (0,), 0, 4),
        GroupBy(SIZES, (0,), 2, 2),
        kinds.Tests(SIZES, ((0,),), np.array([0]), np.array([3])),
        kinds.Tests(SIZES, ((0,),), np.array([1]), np.array([0])),
        "rows",
    ],
)
def test_only_tallies_over_the_schema_are_executed(tally):
    with pytest.raises(WorkloadError, match="columns of this schema"):
        kinds.check_tally(tally, SIZES)


def test_counts_beyond_float32_are_exact():
    class Large:
        def counts(self, sets):
            yield np.array([1]), np.array([2**24 + 1])

    assert count(GroupBy((2,), (0,), 0, 2), Large()).tolist() == [0, 2**24 + 1]
    assert math.isclose(float(np.float32(2**24 + 1)), 2**24)  # what the bug would have made of it
