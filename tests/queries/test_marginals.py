"""Marginals and their cells: pieces cover every cell once and in order; subsets are closed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.tallies import GroupBy
from anamorph.errors import WorkloadError
from anamorph.queries import marginals as module
from anamorph.queries.marginals import Cells, Marginals, all_marginals, random_marginals, subset
from anamorph.schema import Schema


def schema_of(sizes):
    return Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))


@st.composite
def marginals(draw):
    """Marginals of mixed order, their columns in any order."""
    sizes = tuple(draw(st.lists(st.integers(2, 7), min_size=1, max_size=5)))
    features = st.permutations(range(len(sizes))).flatmap(
        lambda order: st.integers(1, min(3, len(sizes))).map(lambda k: tuple(order[:k]))
    )
    return Marginals(sizes, tuple(draw(st.lists(features, min_size=1, max_size=6, unique=True))))


def listed(queries, limit):
    """Every query of the pieces as (block, features, codes), in order: brute force."""
    found = []
    for piece in queries.pieces(limit):
        tally = piece.tally
        single = piece.blocks == tally.cells
        assert single or piece.blocks == 1
        if isinstance(tally, GroupBy):
            rest = tally.features[len(tally.prefix) + 1 :]
            others = (range(tally.sizes[feature]) for feature in rest)
            codes = itertools.product(*((code,) for code in tally.prefix), range(tally.start, tally.stop), *others)
            tests = [(tally.features, code) for code in codes]
        else:
            shapes = [[tally.sizes[f] for f in features] for features in tally.sets]
            pairs = zip(tally.which.tolist(), tally.positions.tolist(), strict=True)
            tests = [(tally.sets[i], tuple(map(int, np.unravel_index(at, shapes[i])))) for i, at in pairs]
        assert len(tests) == tally.cells
        found += [(piece.first + i * single, *test) for i, test in enumerate(tests)]
    return found


def reference(queries, *, by_cell):
    cells = [
        (block, features, codes)
        for block, features in enumerate(queries.sets)
        for codes in itertools.product(*(range(queries.sizes[f]) for f in features))
    ]
    return [(i if by_cell else block, features, codes) for i, (block, features, codes) in enumerate(cells)]


@given(marginals(), st.integers(1, 400))
@settings(deadline=None)
def test_pieces_cover_all_cells_in_order(queries, limit):
    assert listed(queries, limit) == reference(queries, by_cell=False)
    assert listed(queries.by_cell(), limit) == reference(queries, by_cell=True)


@given(marginals(), st.integers(1, 400))
@settings(deadline=None)
def test_a_piece_is_at_most_the_limit_and_few_suffice(queries, limit):
    for marginal in range(queries.blocks):
        cells = [piece.tally.cells for piece in queries.take([marginal]).pieces(limit)]
        assert all(0 < number <= limit for number in cells)
        whole = queries.block_cells[marginal]
        assert len(cells) == 1 if whole <= limit else len(cells) <= 4 * whole / limit


@given(marginals(), st.integers(1, 50), st.data())
@settings(deadline=None)
def test_chosen_cells_are_those_named_in_the_order_named(queries, limit, data):
    every = reference(queries, by_cell=True)
    ids = data.draw(st.lists(st.integers(0, len(every) - 1), min_size=1, max_size=20))
    chosen = queries.by_cell().take(ids)
    assert chosen.cells == chosen.blocks == len(ids)
    assert [test[1:] for test in listed(chosen, limit)] == [every[i][1:] for i in ids]
    assert [test[0] for test in listed(chosen, limit)] == list(range(len(ids)))
    assert max(piece.tally.cells for piece in chosen.pieces(limit)) <= limit
    again = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=20))
    assert listed(chosen.take(again), limit) == listed(queries.by_cell().take([ids[i] for i in again]), limit)


@given(marginals(), st.data())
def test_take_of_take_composes(queries, data):
    ids = data.draw(st.lists(st.integers(0, queries.blocks - 1), min_size=1, max_size=9))
    again = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=9))
    assert queries.take(ids).take(again) == queries.take([ids[i] for i in again])
    assert queries.take(ids).block_cells == tuple(queries.block_cells[i] for i in ids)


def test_sizes_are_python_integers_of_any_size():
    queries = Marginals((2**31,) * 5, ((0, 1, 2, 3, 4),))
    assert queries.cells == 2**155


def test_cells_of_cells_are_themselves():
    cells = Cells(Marginals((2, 3), ((0, 1),)))
    assert cells.by_cell() is cells
    assert cells.measured() is cells
    assert (cells.blocks, cells.cells, cells.largest_block) == (6, 6, 1)


def test_more_single_cells_than_positions_are_refused():
    sizes = (2**31,) * 3
    with pytest.raises(WorkloadError, match=r"single queries \(9\.22e\+18\) must be fewer than 2\^63: take blocks"):
        Marginals(sizes, ((0, 1), (1, 2))).by_cell()
    assert Marginals(sizes, ((0, 1),)).by_cell().cells == 2**62


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (5, 1), (6, 3), (7, 7), (9, 4)])
def test_unranking_is_lexicographic(columns, k):
    every = list(itertools.combinations(range(columns), k))
    assert [subset(rank, columns, k) for rank in range(math.comb(columns, k))] == every


def test_all_marginals_are_the_combinations():
    for k in range(1, 5):
        expected = tuple(itertools.combinations(range(4), k))
        assert all_marginals(schema_of((2, 3, 4, 5)), k).sets == expected


@pytest.mark.parametrize(
    ("columns", "k", "count", "seed"), [(8, 3, 20, 0), (8, 3, 56, 1), (30, 4, 40, 7), (2, 1, 1, 3)]
)
def test_random_marginals_follow_the_written_rule(columns, k, count, seed):
    every = list(itertools.combinations(range(columns), k))
    drawn = np.random.default_rng(seed).choice(every, count, replace=False)
    made = random_marginals(schema_of((2,) * columns), k, count=count, seed=seed)
    assert made.sets == tuple(map(tuple, drawn.tolist()))
    assert len(set(made.sets)) == count


@pytest.mark.parametrize("k", [0, -1, 4])
def test_an_order_the_schema_does_not_have_is_refused(k):
    with pytest.raises(WorkloadError, match=r"k \(-?\d\) must be from 1 to 3, the number of columns"):
        all_marginals(schema_of((2, 2, 2)), k)
    with pytest.raises(WorkloadError, match=r"k \(-?\d\) must be from 1 to 3"):
        random_marginals(schema_of((2, 2, 2)), k, count=1, seed=0)


def test_more_marginals_than_there_are_is_refused():
    with pytest.raises(WorkloadError, match=r"count \(4\) must be at most 3, the number of 2-way marginals"):
        random_marginals(schema_of((2, 2, 2)), 2, count=4, seed=0)


def test_more_marginals_than_can_be_listed_is_refused_at_once(monkeypatch):
    wide = schema_of((2,) * 400)
    with pytest.raises(WorkloadError, match=r"2\.58e\+19 10-way marginals and must have at most 4194304"):
        all_marginals(wide, 10)
    with pytest.raises(WorkloadError, match="marginals to draw from"):
        random_marginals(wide, 200, count=3, seed=0)
    assert random_marginals(wide, 6, count=3, seed=0).blocks == 3
    monkeypatch.setattr(module, "MOST_MARGINALS", 10)
    with pytest.raises(WorkloadError, match="must have at most 10"):
        random_marginals(wide, 2, count=11, seed=0)
