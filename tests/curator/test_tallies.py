"""Tallies count as brute force does, and no neighbour moves them by more than their sensitivity."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import tallies as kinds
from anamorph.curator.rowwise import RowFunction, trace
from anamorph.curator.scores import GRID
from anamorph.curator.tallies import AtLeast, GroupBy, count, grid, held, numbers_asked, squared_sensitivity
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals, slabs
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4)
SETS = tuple(subset for k in (1, 2, 3) for subset in itertools.combinations(range(3), k))
ONE = Fraction(1)


def rows_over(sizes, least=1):
    return st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), min_size=least, max_size=12)


@st.composite
def workloads(draw):
    """Marginals and thresholds, whole or some of their cells; no query twice."""
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        sets = tuple(draw(st.lists(st.sampled_from(SETS), min_size=1, max_size=4, unique=True)))
        least = draw(st.integers(1, min(map(len, sets))))
        parts.append(Thresholds(SIZES, sets, least) if draw(st.booleans()) else Marginals(SIZES, sets))
    kept = parts if not clash(parts) else parts[:1]
    whole = Workload(tuple(kept), limit=draw(st.integers(1, 30)))
    if draw(st.booleans()):
        return whole
    cells = whole.by_cell()
    return cells.take(draw(st.lists(st.integers(0, cells.blocks - 1), min_size=1, max_size=8, unique=True)))


def clash(parts):
    blocks = [(f, part.least if isinstance(part, Thresholds) else len(f)) for part in parts for f in part.sets]
    return len(set(blocks)) < len(blocks)


@st.composite
def slabs_of(draw, most=4):
    """A slab of a marginal over some columns, in any order of them."""
    sizes = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=5)))
    features = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, min(most, len(sizes))))])
    return draw(st.sampled_from(list(slabs(sizes, features, draw(st.integers(1, 40))))))


def source(rows, sizes=SIZES) -> TableSource:
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    return TableSource(Table(np.array(rows, np.int32).reshape(-1, len(sizes)), sizes), schema)


def numbers(workload, rows):
    found = source(rows)
    return np.concatenate([count(piece.tally, found) for piece in workload.pieces()])


def queries(tally):
    """Yields the features, the codes and how many must agree, of each number of a tally."""
    if isinstance(tally, kinds.Tests):
        for which, position in zip(tally.which, tally.positions, strict=True):
            features = tally.sets[which]
            codes = np.unravel_index(position, [tally.sizes[f] for f in features])
            yield features, codes, len(features) if tally.least is None else tally.least[which]
    else:
        slab, least = (tally.slab, tally.least) if isinstance(tally, AtLeast) else (tally, len(tally.features))
        ranges = [[code] for code in slab.prefix] + [range(slab.start, slab.stop)]
        ranges += [range(slab.sizes[f]) for f in slab.features[len(ranges) :]]
        for codes in itertools.product(*ranges):
            yield slab.features, codes, least


def brute(tally, rows):
    """Counts one query at a time, from the definition."""
    return np.array(
        [
            sum(sum(row[f] == code for f, code in zip(features, codes, strict=True)) >= least for row in rows)
            for features, codes, least in queries(tally)
        ]
    )


@given(workloads(), rows_over(SIZES))
@settings(max_examples=100, deadline=None)
def test_counts_equal_brute_force(workload, rows):
    expected = np.concatenate([brute(piece.tally, rows) for piece in workload.pieces()])
    assert np.array_equal(numbers(workload, rows), expected)
    assert np.array_equal(numbers(replace(workload, limit=1 << 40), rows), expected)


@given(slabs_of(), st.data())
@settings(max_examples=100, deadline=None)
def test_thresholds_of_any_slab_equal_brute_force(slab, data):
    least = data.draw(st.integers(1, len(slab.features)))
    rows = data.draw(rows_over(slab.sizes, least=0))
    tally, found = AtLeast(slab, least), source(rows, slab.sizes)
    kinds.check_tally(tally, slab.sizes)
    assert tally.cells == slab.cells == len(list(queries(tally)))
    assert np.array_equal(count(tally, found), brute(tally, rows))
    assert np.array_equal(count(slab, found), brute(slab, rows))
    assert np.array_equal(count(AtLeast(slab, len(slab.features)), found), count(slab, found))


@given(slabs_of(), st.data())
@settings(max_examples=50, deadline=None)
def test_at_least_one_is_all_but_none(slab, data):
    rows = data.draw(rows_over(slab.sizes, least=0))
    none = [
        sum(all(row[f] != code for f, code in zip(slab.features, codes, strict=True)) for row in rows)
        for _, codes, _ in queries(slab)
    ]
    assert count(AtLeast(slab, 1), source(rows, slab.sizes)).tolist() == [len(rows) - number for number in none]


@given(slabs_of(), st.data())
@settings(max_examples=100, deadline=None)
def test_single_thresholds_equal_the_cells_of_their_block(slab, data):
    """Tests of several sets, with a number of features for each, in any order of the cells."""
    sets = (slab.features, slab.features[::-1], slab.features[:1])
    least = tuple(data.draw(st.integers(1, len(features))) for features in sets)
    cells = [kinds.marginal_cells(slab.sizes, features) for features in sets]
    asked = [(which, data.draw(st.integers(0, cells[which] - 1))) for which in data.draw(st.permutations([0, 1, 2, 1]))]
    which, positions = np.array(asked).T
    tally = kinds.Tests(slab.sizes, sets, which, positions, data.draw(st.sampled_from([None, least])))
    kinds.check_tally(tally, slab.sizes)
    rows = data.draw(rows_over(slab.sizes, least=0))
    found = count(tally, source(rows, slab.sizes))
    assert np.array_equal(found, brute(tally, rows))
    whole = GroupBy(slab.sizes, slab.features, 0, slab.sizes[slab.features[0]])
    block = count(AtLeast(whole, tally.needed(0)), source(rows, slab.sizes))
    assert np.array_equal(found[which == 0], block[positions[which == 0]])


@given(workloads(), rows_over(SIZES), st.data())
@settings(max_examples=200, deadline=None)
def test_no_neighbour_moves_the_numbers_by_more_than_their_sensitivity(workload, rows, data):
    tallies = [piece.tally for piece in workload.pieces()]
    before = numbers(workload, rows)
    changed = data.draw(st.integers(0, len(rows) - 1))
    other = data.draw(st.tuples(*(st.integers(0, size - 1) for size in SIZES)))
    replaced = numbers(workload, [*rows[:changed], other, *rows[changed + 1 :]])
    assert np.sum((replaced - before) ** 2) <= squared_sensitivity(tallies, "replace")
    added = numbers(workload, [*rows, other])
    assert np.sum((added - before) ** 2) <= squared_sensitivity(tallies, "add-remove")


def entered(tallies, sizes):
    """For every row there can be, the numbers that it adds to."""
    every = itertools.product(*map(range, sizes))
    return [np.concatenate([brute(tally, [row]) for tally in tallies]) for row in every]


@given(slabs_of(most=3), st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_adds_to_as_many_numbers_of_a_block_as_are_held(slab, data):
    """Every row there can be: each adds to `held` numbers of the whole block, so that the bound is reached."""
    least = data.draw(st.integers(1, len(slab.features)))
    whole = AtLeast(GroupBy(slab.sizes, slab.features, 0, slab.sizes[slab.features[0]]), least)
    sizes = [slab.sizes[feature] for feature in slab.features]
    found = entered([AtLeast(GroupBy(tuple(sizes), tuple(range(len(sizes))), 0, sizes[0]), least)], sizes)
    most = held((slab.sizes, slab.features, least))
    assert {int(row.sum()) for row in found} == {most}
    assert squared_sensitivity([whole], "add-remove") == most
    changes = max(int(np.sum((one - other) ** 2)) for one, other in itertools.product(found, found))
    assert changes <= squared_sensitivity([whole], "replace") == min(whole.cells, 2 * most)
    if 2 * least > len(sizes) and min(sizes) > 1:
        assert changes == 2 * most
    part = AtLeast(slab, least)
    assert squared_sensitivity([part], "replace") == min(part.cells, 2 * most)
    assert squared_sensitivity([part], "add-remove") == min(part.cells, most)


def test_the_numbers_held_by_hand():
    """1-of-2 over 3 and 4 codes: a row's line and column. 2-of-3: itself, and those that differ in one feature."""
    assert held(((3, 4), (0, 1), 1)) == 3 + 4 - 1
    assert held(((3, 4), (0, 1), 2)) == 1
    assert held(((3, 4, 5), (0, 1, 2), 2)) == 1 + 2 + 3 + 4
    assert held(((9, 4, 7, 5), (3, 1), 1)) == 5 + 4 - 1
    assert held(((10**9,) * 5, tuple(range(5)), 1)) == 10**45 - (10**9 - 1) ** 5


@pytest.mark.parametrize(("relation", "one"), [("replace", 2), ("add-remove", 1)])
def test_whole_marginals_reach_their_sensitivity(relation, one):
    sets = ((0, 1), (1, 2), (0, 2))
    tallies = [piece.tally for piece in Workload((Marginals(SIZES, sets),)).pieces()]
    assert squared_sensitivity(tallies, relation) == one * len(sets)
    workload = Workload((Marginals(SIZES, sets),))
    rows = [(0, 0, 0), (1, 1, 1)]
    other = [(2, 1, 3), (1, 1, 1)] if relation == "replace" else [*rows, (2, 1, 3)]
    assert np.sum((numbers(workload, rows) - numbers(workload, other)) ** 2) == one * len(sets)


@given(st.lists(st.fractions(Fraction(1, 9), 9), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_weights_scale_the_numbers_of_their_tallies(weights):
    """No neighbour moves the numbers, each times the root of its weight, by more; whole marginals reach it."""
    blocks = [
        GroupBy(SIZES, (0, 1), 0, 3),
        AtLeast(GroupBy(SIZES, (0, 2), 0, 3), 1),
        kinds.Tests(SIZES, ((2,),), np.array([0]), np.array([3])),
    ]
    scaled = np.repeat(list(map(float, weights)), [tally.cells for tally in blocks])
    found = entered(blocks, SIZES)
    added = max(row @ scaled for row in found)
    replaced = max((one - other) ** 2 @ scaled for one, other in itertools.product(found, found))
    bounds = [squared_sensitivity(blocks, relation, weights) for relation in ("add-remove", "replace")]
    assert all(isinstance(bound, Fraction) for bound in bounds)
    assert bounds[0] == weights[0] + (3 + 4 - 1) * weights[1] + weights[2] == pytest.approx(added)
    assert bounds[1] == 2 * weights[0] + min(12, 2 * (3 + 4 - 1)) * weights[1] + weights[2]
    assert replaced <= float(bounds[1]) * (1 + 1e-12)
    assert bounds == [
        squared_sensitivity(blocks, relation, [9 * weight for weight in weights]) / 9
        for relation in ("add-remove", "replace")
    ]


def test_slabs_of_one_block_cost_one_block():
    for part, most in ((Marginals(SIZES, ((0, 1, 2),)), 1), (Thresholds(SIZES, ((0, 1, 2),), 2), 1 + 2 + 1 + 3)):
        for limit, pieces in ((8, 3), (4, 6), (3, 12), (1, 24)):
            parts = [piece.tally for piece in Workload((part,)).pieces(limit)]
            assert len(parts) == pieces
            assert squared_sensitivity(parts, "replace") == 2 * most
            assert squared_sensitivity(parts, "add-remove") == most


@pytest.mark.parametrize(("relation", "expected"), [("replace", 2 + 1), ("add-remove", 1 + 1)])
def test_cells_of_one_marginal_share_its_sensitivity(relation, expected):
    tests = kinds.Tests(SIZES, ((0, 1), (2,)), np.array([0, 0, 0, 1]), np.array([0, 1, 4, 2]))
    assert squared_sensitivity([tests], relation) == expected


FUNCTION = trace(lambda row: jnp.outer(row["c0"], row["c2"]).ravel(), ("c0", "c1", "c2"), SIZES, name="tests:function")


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
def test_every_value_of_a_function_may_move_by_one(relation):
    whole, some = RowFunction(SIZES, FUNCTION), RowFunction(SIZES, FUNCTION, np.array([4, 0]))
    assert squared_sensitivity([whole], relation) == held(FUNCTION) == 12
    assert squared_sensitivity([some], relation) == 2
    assert squared_sensitivity([some, GroupBy(SIZES, (1,), 0, 2)], "replace", [Fraction(3), ONE]) == 3 * 2 + 2


def test_functions_are_counted_on_a_grid_of_their_own():
    rows = [(0, 0, 0), (2, 1, 3), (2, 0, 3), (1, 1, 2)]
    marginal = GroupBy(SIZES, (0, 2), 0, 3)
    whole, some = RowFunction(SIZES, FUNCTION), RowFunction(SIZES, FUNCTION, np.array([11, 0, 1]))
    assert np.array_equal(count(whole, source(rows)), count(marginal, source(rows)) << GRID)
    assert count(some, source(rows)).tolist() == [2 << GRID, 1 << GRID, 0]
    assert (grid(whole), grid(some), grid(marginal), grid(AtLeast(marginal, 1))) == (GRID, GRID, 0, 0)


WHOLE = GroupBy(SIZES, (0, 1), 0, 3)
CELL = kinds.Tests(SIZES, ((0, 1),), np.array([0]), np.array([5]))
SLAB = GroupBy(SIZES, (0, 1), 1, 2, (2,))


@pytest.mark.parametrize(
    "tallies",
    [
        [kinds.Tests(SIZES, ((0,),), np.array([0, 0]), np.array([1, 1]))],
        [kinds.Tests(SIZES, ((0,), (0,)), np.array([0, 1]), np.array([1, 1]))],
        [WHOLE, WHOLE],
        [WHOLE, CELL],
        [CELL, CELL],
        [CELL, SLAB],
        [WHOLE, SLAB],
        [AtLeast(WHOLE, 1), AtLeast(SLAB, 1)],
        [AtLeast(WHOLE, 2), SLAB],
        [AtLeast(WHOLE, 2), CELL],
        [AtLeast(WHOLE, 1), replace(CELL, least=(1,))],
        [GroupBy(SIZES, (0, 1), 0, 2), GroupBy(SIZES, (0, 1), 1, 3)],
        [RowFunction(SIZES, FUNCTION), RowFunction(SIZES, FUNCTION, np.array([7]))],
        [RowFunction(SIZES, FUNCTION, np.array([7, 7]))],
    ],
)
def test_a_number_asked_twice_is_refused(tallies):
    """The bug: 200 copies of a marginal in one measurement had the noise of one."""
    with pytest.raises(WorkloadError, match="once"):
        squared_sensitivity(tallies, "replace")


def test_numbers_are_counted_by_block_and_weight():
    """One marginal in two weights, or in two orders, or with two thresholds, pays for each in full."""
    assert squared_sensitivity([WHOLE, WHOLE], "replace", [ONE, Fraction(1, 2)]) == 3
    assert squared_sensitivity([AtLeast(WHOLE, 1), AtLeast(WHOLE, 2)], "add-remove") == 4 + 1
    assert squared_sensitivity([WHOLE, GroupBy(SIZES, (1, 0), 0, 2)], "replace") == 4
    cells = kinds.Tests(SIZES, ((0, 1), (2,)), np.array([0, 1, 0]), np.array([5, 1, 2]), (1, 1))
    assert numbers_asked([cells, AtLeast(SLAB, 2)], [Fraction(2), Fraction(2)]) == {
        ((SIZES, (0, 1), 1), Fraction(2)): 2,
        ((SIZES, (2,), 1), Fraction(2)): 1,
        ((SIZES, (0, 1), 2), Fraction(2)): 1,
    }


class Slab(GroupBy):
    """Another type of tally."""


@pytest.mark.parametrize(
    "tally",
    [
        GroupBy((3, 2), (0, 1), 0, 3),
        GroupBy(SIZES, (0, 0), 0, 3),
        GroupBy(SIZES, (0, 7), 0, 3),
        GroupBy(SIZES, (), 0, 3),
        GroupBy(SIZES, (0,), 0, 4),
        GroupBy(SIZES, (0,), -1, 2),
        GroupBy(SIZES, (0,), 2, 2),
        GroupBy(SIZES, (0,), 0, 1, (1,)),
        GroupBy(SIZES, (0, 1), 0, 2, (3,)),
        GroupBy(SIZES, (0, 1), 0, 2, (-1,)),
        GroupBy(SIZES, (0, 1), 0, 3, (1,)),
        Slab(SIZES, (0,), 0, 3),
        AtLeast(WHOLE, 0),
        AtLeast(WHOLE, 3),
        AtLeast(GroupBy(SIZES, (0, 1), 0, 4), 1),
        AtLeast(GroupBy((3, 2), (0, 1), 0, 3), 1),
        AtLeast(Slab(SIZES, (0,), 0, 3), 1),
        kinds.Tests(SIZES, ((0,),), np.array([0]), np.array([3])),
        kinds.Tests(SIZES, ((0,),), np.array([1]), np.array([0])),
        kinds.Tests(SIZES, ((0,),), np.array([0]), np.array([-1])),
        kinds.Tests(SIZES, ((0,),), np.array([0, 0]), np.array([1])),
        kinds.Tests(SIZES, ((0,),), np.zeros(0, np.int64), np.zeros(0, np.int64)),
        kinds.Tests((3, 2), ((0,),), np.array([0]), np.array([0])),
        kinds.Tests(SIZES, ((0, 1),), np.array([0]), np.array([0]), (0,)),
        kinds.Tests(SIZES, ((0, 1),), np.array([0]), np.array([0]), (3,)),
        kinds.Tests(SIZES, ((0, 1),), np.array([0]), np.array([0]), (1, 1)),
        RowFunction((3, 2), FUNCTION),
        RowFunction(SIZES, "rows"),
        RowFunction(SIZES, FUNCTION, np.array([12])),
        RowFunction(SIZES, FUNCTION, np.array([-1])),
        RowFunction(SIZES, FUNCTION, np.zeros(0, np.int64)),
        RowFunction(SIZES, FUNCTION, np.array([1.0])),
        "rows",
    ],
)
def test_only_tallies_over_the_schema_are_executed(tally):
    with pytest.raises(WorkloadError, match="columns of this schema"):
        kinds.check_tally(tally, SIZES)


def test_tallies_over_the_schema_pass():
    for tally in (WHOLE, CELL, SLAB, AtLeast(SLAB, 1), replace(CELL, least=(1,)), RowFunction(SIZES, FUNCTION)):
        kinds.check_tally(tally, SIZES)


def test_counts_beyond_float32_are_exact():
    class Large:
        def counts(self, sets):
            for _ in sets:
                yield np.array([1]), np.array([2**24 + 1])

    assert count(GroupBy((2,), (0,), 0, 2), Large()).tolist() == [0, 2**24 + 1]
    assert count(AtLeast(GroupBy((2,), (0,), 0, 2), 1), Large()).tolist() == [0, 2**24 + 1]
    assert math.isclose(float(np.float32(2**24 + 1)), 2**24)  # what the bug would have made of it
