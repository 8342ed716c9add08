"""Strata: no score is above the level of its ticket, and every query has the tickets it should, whatever the rows."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selections import KINDS, Rows, cells_of, scores_of, some_rows, some_table, tickets_of

from anamorph.curator import coarse
from anamorph.curator.candidates import TICKETS, Prior, Tickets, listed
from anamorph.curator.contest import Comparison, Pool
from anamorph.curator.estimates import RowTable
from anamorph.curator.lottery import level
from anamorph.curator.scores import GRID
from anamorph.errors import ParameterError
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import WHOLE, Workload

seeds = st.integers(0, 2**32)


class FewTickets:
    """A prior whose tickets are few enough to look at each."""

    def __init__(self, lines):
        self.lines = lines

    def tickets(self, sizes, features, mean):
        return Tickets(2, 3, [self.lines[feature] for feature in features])

    def each(self, features):
        """How many tickets each cell should have."""
        lines = [self.lines[feature] for feature in features]
        codes = cells_of([line.size for line in lines])
        return 2 + 3 * math.prod(line[code] for line, code in zip(lines, codes.T, strict=True))


class Block:
    """One block of single queries, the rows and the estimate it is compared by, and what its strata should be."""

    def __init__(self, rows, table, features, least, *, scale, prior=None, share=1, excluded=()):
        self.rows, self.table, self.features, self.least = rows, table, features, least
        self.scale, self.prior, self.share = scale, prior, share
        self.excluded = np.unique(np.array(excluded, np.int64))
        self.workload = Workload((Thresholds(rows.sizes, (features,), least),)).by_cell()
        self.total = float(max(rows.total, 1))
        compared = Comparison(rows, table, self.total, scale, prior)
        self.pool = Pool(list(compared.contests(list(self.workload.pieces(WHOLE)), [share])), self.excluded)

    @property
    def cells(self):
        return self.workload.cells

    def scores(self):
        """The score of each query, slowly."""
        return scores_of(self.rows, self.table, self.features, self.least, total=self.total) * self.share

    def every_ticket(self):
        """The stratum of every ticket, whose it is, its score and whether it is valid."""
        strata = np.repeat(np.arange(len(self.pool.weights)), self.pool.weights)
        ranks = [rank for weight in self.pool.weights for rank in range(weight)]
        return strata, *self.pool.errors(strata, ranks)

    def held(self):
        """How many valid tickets each query has."""
        _, ids, _, valid = self.every_ticket()
        return np.bincount(ids[valid], minlength=self.cells)

    def check(self):
        """Every ticket of every stratum is as it should be."""
        strata, ids, scores, valid = self.every_ticket()
        assert ids.min() >= 0
        assert ids.max() < self.cells
        off = np.abs(scores[valid] - self.scores()[ids[valid]])
        assert np.all(off <= self.share * (1 + 1e-11 * self.total))  # a unit of the grid, or what floats are off by
        heights = np.array(self.pool.levels)[strata]
        assert np.all(level(scores[valid], self.scale) <= heights[valid])
        expected = np.ones(self.cells, np.int64) if self.prior is None else self.prior.each(self.features)
        expected[self.excluded] = 0
        assert np.bincount(ids[valid], minlength=self.cells).tolist() == expected.tolist()


@st.composite
def blocks(draw):
    """Small blocks of every kind: rows many times, relaxed rows or rows, any scale from a fraction of a row on."""
    sizes = tuple(draw(st.lists(st.integers(2, 6), min_size=3, max_size=4)))
    features = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.sampled_from([3, 2, 3, 1]))])
    seed, steep = draw(seeds), draw(st.sampled_from([0.9, 0.4, 0.1]))
    rows = some_rows(sizes, draw(st.integers(1, 40)), seed, steep=steep, most=draw(st.sampled_from([1, 10, 10**6])))
    if draw(st.booleans()):
        table = some_table(sizes, draw(st.integers(1, 20)), seed + 1, kind=draw(st.sampled_from(KINDS)))
    else:
        other = some_rows(sizes, draw(st.integers(0, 30)), seed + 1, steep=steep, most=3)
        table = RowTable(other, other.total)
    scale = max(2.0, rows.total * (1 << GRID) * 2.0 ** draw(st.integers(-9, 0) | st.integers(-30, 1)))
    lines = [np.random.default_rng(seed + i).integers(0, 3, size) for i, size in enumerate(sizes)]
    cells = math.prod(sizes[feature] for feature in features)
    return Block(
        rows,
        table,
        features,
        draw(st.sampled_from([1, 2, 3]).map(lambda least: min(least, len(features)))),
        scale=scale,
        prior=FewTickets(lines) if draw(st.booleans()) else None,
        share=draw(st.sampled_from([1, 1, 7, 1024])),
        excluded=draw(st.lists(st.integers(0, cells - 1), max_size=4)),
    )


@given(blocks(), st.integers(0, 3))
@settings(max_examples=250, deadline=None)
def test_no_score_is_above_its_level_and_every_query_has_its_tickets(block, times):
    """Also after bounds were tightened, some times."""
    for _ in range(times):
        block.pool.refine()
    block.check()


@given(blocks(), st.sampled_from([1, 3, 10]), st.sampled_from([1, 8, 30]))
@settings(max_examples=60, deadline=None)
def test_large_blocks_are_formed_in_chunks_and_coarser(block, chunk, cells):
    with mock.patch.object(coarse, "CHUNK", chunk), mock.patch.object(coarse, "COARSE_CELLS", cells):
        made = Block(
            block.rows,
            block.table,
            block.features,
            block.least,
            scale=block.scale,
            prior=block.prior,
            share=block.share,
            excluded=block.excluded,
        )
    made.check()


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_though_probabilities_sum_to_1_only_nearly(seed):
    """The bug: a smaller marginal was taken as a sum of the whole one, and was off by more than the safety allows."""
    sizes = (3, 2, 4)
    rows, table = some_rows(sizes, 30, seed, steep=0.9, most=10**6), some_table(sizes, 2, seed, kind="rough")
    for least in (1, 2, 3):
        Block(rows, table, (0, 1, 2), least, scale=40.0).check()


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_where_floats_are_off_by_more_than_the_grid(seed):
    """10^13 rows: answers that are computed in two ways differ by units of 2^-12 rows."""
    sizes = (3, 2, 4)
    rows, table = some_rows(sizes, 30, seed, steep=0.9, most=10**12), some_table(sizes, 200, seed)
    for least in (1, 2, 3):
        Block(rows, table, (0, 1, 2), least, scale=4.0).check()


@pytest.mark.parametrize("rough", [2, 3, 5, 8, 9, 12, 20, 40])
def test_a_light_code_may_be_off_by_all_its_rows(rough):
    """Codes 5 and 6 are of no row of the table, and of 4 and 3 of the data's; code 1 of the other feature is off by 2.

    The error of (5, 1), and of no other query of its class, is the sum: 6 rows.
    """
    rows = Rows([[5, 0]] * 4 + [[6, 0]] * 3 + [[0, 1]] * 52 + [[0, 0]] * 41, (8, 3))
    table = RowTable(Rows([[0, 1]] * 50 + [[0, 0]] * 50, (8, 3)), 100)
    block = Block(rows, table, (0, 1), 1, scale=float(rough << GRID))
    assert block.scores()[5 * 3 + 1] == 6 << GRID
    block.check()


@pytest.mark.parametrize("least", [1, 2, 3])
def test_strata_do_not_depend_on_the_chunks_that_they_are_formed_in(least):
    sizes = (9, 5, 4)
    for seed, rough in itertools.product(range(5), (1, 6, 20)):
        rows, table = some_rows(sizes, 90, seed), some_table(sizes, 9, seed, spread=1.0)
        found = []
        for chunk in (1 << 22, 50, 1):
            with mock.patch.object(coarse, "CHUNK", chunk):
                pool = Block(rows, table, (0, 2, 1), least, scale=float(rough << GRID)).pool
            found.append((list(pool.levels), list(pool.weights)))
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_which_tickets_are_valid_does_not_depend_on_the_rows(least, kind):
    """Rows elsewhere, rows a million times as many, and none: the same tickets."""
    sizes, table = (4, 3, 3), some_table((4, 3, 3), 9, 3, kind=kind)
    prior = FewTickets([np.array([0, 1, 2, 1]), np.array([2, 0, 1]), np.array([1, 1, 3])])
    found = []
    for rows in (
        some_rows(sizes, 30, 1),
        some_rows(sizes, 7, 2, steep=2.0),
        some_rows(sizes, 30, 3, most=10**6),
        Rows(np.zeros((0, 3)), sizes),
    ):
        for scale in (20.0, float(1 << GRID), 40.0 * (1 << GRID)):
            block = Block(rows, table, (2, 0, 1), least, scale=scale, prior=prior, excluded=[5, 8])
            found.append(block.held().tolist())
    assert all(held == found[0] for held in found)
    assert found[0][5] == found[0][8] == 0 < max(found[0])


def light(block):
    """Whether light codes share coarse cells."""
    ballot, _ = block.pool._ballot(0)
    return math.prod(ballot.shape) < block.cells


def test_blocks_of_thresholds_are_coarse_and_marginals_list_few_cells():
    """What the tests above look at is not only blocks in which every cell has a stratum of its own."""
    sizes = (8, 8, 8)
    rows, table = some_rows(sizes, 200, 4), some_table(sizes, 20, 5)
    for least, rough in itertools.product((1, 2), (10, 30)):
        assert light(Block(rows, table, (0, 1, 2), least, scale=float(rough << GRID)))
    for rough in (1, 3, 6):
        ballot, _ = Block(rows, table, (0, 1, 2), 3, scale=float(rough << GRID)).pool._ballot(0)
        assert 0 < ballot.known.size < 512 / 4
        assert len(ballot.levels) == 1 + len(set(ballot.above.levels))


@pytest.mark.parametrize("least", [1, 2])
def test_queries_that_are_taken_no_longer_raise_their_strata(least):
    """All queries with a large error are excluded: no stratum is as high as theirs."""
    sizes = (4, 4)
    rows = Rows([[0, 0]] * 90 + [[i, j] for i in range(4) for j in range(4)], sizes)
    table = RowTable(Rows([[i, j] for i in range(4) for j in range(4)], sizes), 16)
    whole = Block(rows, table, (0, 1), least, scale=4096.0)
    taken = np.flatnonzero(whole.scores() > 0.9 * whole.scores().max())
    rest = Block(rows, table, (0, 1), least, scale=4096.0, excluded=taken)
    assert 0 < taken.size < 16
    assert max(rest.pool.levels) < max(whole.pool.levels)


def test_listed_queries_have_a_stratum_for_each_level():
    scores = np.array([5, 900, 5, 0, 907, 5])
    found = listed(np.array([3, 4, 7, 8, 9, 11]), scores, 10.0)
    assert (found.levels, found.weights) == ([0, 1, 130, 131], [1, 3, 1, 1])
    cells, valid = found.find(1, [0, 1, 2])
    assert sorted(cells.tolist()) == [3, 7, 11]
    assert valid.all()
    nothing = listed(np.zeros(0, np.int64), np.zeros(0, np.int64), 10.0)
    assert (list(nothing.levels), list(nothing.weights)) == ([], [])


# Priors


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.floats(0, 0.999), seeds)
@settings(max_examples=60, deadline=None)
def test_a_prior_gives_tickets_in_proportion_to_its_weights(sizes, share, seed):
    generator, features = np.random.default_rng(seed), tuple(range(len(sizes)))
    shares = [generator.dirichlet(np.full(size, 0.5)) for size in sizes]
    prior = Prior(share, np.concatenate(shares))
    prior.check(tuple(sizes))
    tickets = prior.tickets(tuple(sizes), features, 77)
    found = [tickets.equal + tickets.popular * number for number in tickets.products(cells_of(sizes)).tolist()]
    expected = tickets_of(prior, sizes, features, 77)
    rounding = 77 * len(sizes) * 2.0 ** -(TICKETS // len(sizes)) + 1e-7
    assert np.allclose(np.array([number / 2 ** (30 + TICKETS) for number in found]), expected, rtol=0, atol=rounding)
    assert tickets.equal > 0


def test_a_prior_over_chosen_features_takes_their_codes():
    popular = np.array([0.5, 0.5, 1.0, 0.0, 0.0, 0.25, 0.75])
    tickets = Prior(0.5, popular).tickets((2, 3, 2), (2, 0), 10)
    assert [line.tolist() for line in tickets.lines] == [[1 << 28, 3 << 28], [1 << 29, 1 << 29]]


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, math.nan])
def test_a_share_outside_of_0_to_1_is_refused(share):
    with pytest.raises(ParameterError, match=r"^share \(.*\) must be from 0 to 0.999$"):
        Prior(share, np.array([0.5, 0.5]))


@pytest.mark.parametrize("popular", [[-0.1, 1.0], [1.1, 0.0], [math.nan, 0.5]])
def test_popular_numbers_outside_of_0_to_1_are_refused(popular):
    with pytest.raises(ParameterError, match="popular must be"):
        Prior(0.5, np.array(popular))


@pytest.mark.parametrize("popular", [[0.5, 0.5], [1.0, 0.0, 0.6, 0.5], [[0.5, 0.5, 0.5, 0.5]]])
def test_popular_numbers_of_other_columns_are_refused(popular):
    """The bug: numbers that sum to more than 1 made products that 64 bits do not hold."""
    with pytest.raises(ParameterError, match="popular must be a number for each code"):
        Prior(0.5, np.array(popular)).check((2, 2))
    Prior(0.5, np.array([1.0, 0.0, 0.5, 0.5])).check((2, 2))


def test_every_query_keeps_a_ticket_however_large_the_share():
    """The bug: a share that rounds to 1 left no tickets to cells that are not popular, and a lottery without end."""
    tickets = Prior(0.999, np.array([1.0, 0.0])).tickets((2,), (0,), 2)
    assert tickets.equal > 0
    with pytest.raises(ParameterError):
        Prior(1 - 1e-9, np.array([1.0, 0.0]))


def test_a_prior_keeps_numbers_of_its_own():
    popular = np.array([0.5, 0.5])
    prior = Prior(0.5, popular)
    popular[0] = 7.0
    assert prior.popular.tolist() == [0.5, 0.5]


def test_marginals_and_thresholds_of_all_features_are_the_same_block():
    sizes = (3, 4)
    rows, table = some_rows(sizes, 50, 6), some_table(sizes, 5, 7)
    compared = Comparison(rows, table, 50.0, 9000.0)
    pools = [
        Pool(list(compared.contests(list(Workload((part,)).by_cell().pieces(WHOLE)), [1])), np.zeros(0, np.int64))
        for part in (Marginals(sizes, ((0, 1),)), Thresholds(sizes, ((0, 1),), 2))
    ]
    assert pools[0].levels == pools[1].levels
    assert pools[0].weights == pools[1].weights
