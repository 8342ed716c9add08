"""Selection by a table has the distribution of selection by scores that are listed one by one, and no other."""

from __future__ import annotations

import copy
import math
from collections import Counter
from fractions import Fraction
from functools import cached_property

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from selections import Rows, p_value, peeling, scores_of, some_rows, some_table, tickets_of

from anamorph.columns import Codes
from anamorph.curator import contest as module
from anamorph.curator import lottery
from anamorph.curator.budget import Budget
from anamorph.curator.candidates import Prior
from anamorph.curator.contest import Comparison, Pool
from anamorph.curator.curator import FINEST, Curator
from anamorph.curator.estimates import RelaxedTable, RowTable
from anamorph.curator.noise import EXCLUDED, SeededBits, top_k
from anamorph.curator.rowwise import trace
from anamorph.curator.scores import GRID
from anamorph.queries.custom import Custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import WHOLE, Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

FLOOR = 1e-6  # a right selection fails by chance once in a million seeds; seeds are fixed
HUGE = Budget(epsilon=1e9, delta=1e-6)
SIZES, TRIPLE = (8, 4, 3), (0, 1, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = some_rows(SIZES, 150, 1, steep=0.45)
NONE = np.zeros(0, np.int64)
SCALE = 5.0 * (1 << GRID)


def answered(row):
    """Twelve values of a row, as a function."""
    return jnp.outer(row["c1"], row["c2"]).ravel() * 0.75


FUNCTION = trace(answered, SCHEMA.names, SIZES, name="tests:function")
RELAXED = some_table(SIZES, 15, 2, spread=1.0)
RELAXED = RelaxedTable(SIZES, RELAXED.lines, RELAXED.weights, {FUNCTION: np.linspace(0, 0.2, 12)})
COUNTED = RowTable(Table(some_rows(SIZES, 60, 3, steep=0.6).codes.astype(np.int32), SIZES), 60)
PRIOR = Prior(0.6, np.concatenate([np.random.default_rng(4).dirichlet(np.full(size, 0.7)) for size in SIZES]))
MARGINALS = Marginals(SIZES, ((0, 1), (2, 1)))
TWO_OF_THREE = Thresholds(SIZES, (TRIPLE,), 2)
ONE_OF_TWO = Thresholds(SIZES, ((0, 1), (0, 2)), 1)


class Selection:
    """A workload of single queries, and what it is selected by."""

    def __init__(self, parts, table, prior=None, excluded=(), weights=()):
        self.workload = Workload(parts, weights=weights).by_cell()
        self.table, self.prior, self.excluded = table, prior, np.array(excluded, np.int64)
        self.pieces = list(self.workload.pieces(WHOLE))
        largest = max(weights, default=1)
        self.shares = [round(piece.weight / largest * FINEST) if weights else 1 for piece in self.pieces]
        self.scale = SCALE * max(self.shares)

    @cached_property
    def full(self):
        compared = Comparison(ROWS, self.table, float(ROWS.total), self.scale, self.prior)
        return Pool(list(compared.contests(self.pieces, self.shares)), self.excluded)

    def pool(self):
        """A pool of which nothing was taken; its strata are formed once."""
        fresh = copy.copy(self.full)
        vars(fresh).update({name: copy.copy(value) for name, value in vars(self.full).items()})
        return fresh

    def scores(self):
        """The exact score of each query."""
        found, place = [], 0
        for part in self.workload.parts:
            owner = part.function if hasattr(part, "function") else part.marginals
            for features in getattr(owner, "sets", [None]):
                if features is None:
                    table = np.rint(self.table.functions[owner] * ROWS.total * (1 << GRID))
                    scores = np.abs(table - ROWS.every((1, 2), 2) * 3072).astype(np.int64)
                else:
                    least = owner.least if isinstance(owner, Thresholds) else len(features)
                    scores = scores_of(ROWS, self.table, features, least)
                found.append(scores * self.shares[place])
                place += 1
        return np.concatenate(found)

    def tickets(self):
        """The weight of each query: 0 for those excluded, and 1 for those that no prior weighs."""
        sets = [features for part in self.workload.parts for features in getattr(block(part), "sets", [None])]
        cells = [math.prod(SIZES[f] for f in features) for features in sets if features]
        mean = sum(cells) // len(cells)
        found = [
            np.ones(12) if features is None else tickets_of(self.prior, SIZES, features, mean) for features in sets
        ]
        weights = np.concatenate(found)
        weights[self.excluded] = 0
        return weights

    def law(self, k=1, factor=1.0):
        return peeling(self.scores(), self.tickets(), self.scale * factor, k)


def block(part):
    return getattr(part, "marginals", None)


def winners(selection, draws, seed):
    """The owners of tickets that win, each drawn among all tickets: independent outcomes of a selection of one."""
    pool, bits = selection.pool(), SeededBits(seed)
    urn = lottery._Urn(pool.levels, pool.weights)
    strata, ranks = urn.draw(draws, bits)
    ids, scores, valid = pool.errors(strata, ranks)
    won = lottery._wins(urn.raised[strata].tolist(), scores, selection.scale, bits) & valid
    return [(owner,) for owner in ids[won].tolist()]


KINDS = {
    "marginals": (MARGINALS,),
    "thresholds": (TWO_OF_THREE, ONE_OF_TWO),
    "both": (MARGINALS, TWO_OF_THREE),
}


@pytest.mark.parametrize("prior", [None, PRIOR])
@pytest.mark.parametrize("table", [RELAXED, COUNTED])
@pytest.mark.parametrize("kind", KINDS)
def test_winners_are_drawn_by_their_scores_and_weights(kind, table, prior):
    plain = Selection(KINDS[kind], table, prior)
    likely = np.argsort(-plain.scores())[[0, 3, 4]]
    for excluded in ((), likely):
        selection = Selection(KINDS[kind], table, prior, excluded)
        outcomes = winners(selection, 20_000, 5)
        assert len(outcomes) > 1000
        assert p_value(outcomes, selection.law()) > FLOOR
        assert p_value(outcomes, selection.law(factor=1.3)) < FLOOR
        assert p_value(outcomes, selection.law(factor=1 / 1.3)) < FLOOR
        if prior is not None:
            assert p_value(outcomes, Selection(KINDS[kind], table, None, excluded).law()) < FLOOR
        assert not {owner for (owner,) in outcomes} & set(np.asarray(excluded).tolist())


def test_the_blocks_of_these_tests_have_light_codes_and_cells_that_are_not_listed():
    for table in (RELAXED, COUNTED):
        for part in (TWO_OF_THREE, ONE_OF_TWO):
            ballot, _ = Selection((part,), table).pool()._ballot(0)
            assert math.prod(ballot.shape) < math.prod(ballot.sizes)
        ballot, _ = Selection((MARGINALS,), table).pool()._ballot(0)
        assert 3 < ballot.known.size < math.prod(ballot.shape) / 2
        selection = Selection(KINDS["both"], table)
        unlisted = set(range(32)) - set(ballot.known.tolist())
        assert sum(owner in unlisted for (owner,) in winners(selection, 20_000, 5)) > 30


MIXED = (MARGINALS, TWO_OF_THREE, Custom(FUNCTION))


@pytest.mark.parametrize("prior", [None, PRIOR])
@pytest.mark.parametrize("weights", [(), (Fraction(1, 2), Fraction(1), Fraction(4, 5))])
def test_marginals_thresholds_and_functions_in_one_selection(prior, weights):
    """The bug: with a prior, a query of a function had one ticket where others have 2^90."""
    selection = Selection(MIXED, RELAXED, prior, [45, 100, 143], weights)
    outcomes = winners(selection, 30_000, 6)
    assert sum(owner >= 140 for (owner,) in outcomes) > 30
    assert p_value(outcomes, selection.law()) > FLOOR
    assert p_value(outcomes, selection.law(factor=1.3)) < FLOOR
    if weights:
        assert p_value(outcomes, Selection(MIXED, RELAXED, prior, [45, 100, 143]).law()) < FLOOR


@pytest.mark.parametrize("prior", [None, PRIOR])
@pytest.mark.parametrize("kind", ["marginals", "thresholds"])
def test_ordered_pairs_are_those_of_peeling(kind, prior):
    selection, bits = Selection(KINDS[kind], RELAXED, prior, [1]), SeededBits(7)
    outcomes = [tuple(selection.pool().draw(2, selection.scale, bits).tolist()) for _ in range(1000)]
    assert p_value(outcomes, selection.law(2)) > FLOOR
    assert p_value(outcomes, selection.law(2, 1.4)) < FLOOR
    assert p_value([outcome[:1] for outcome in outcomes], selection.law()) > FLOOR


@pytest.mark.parametrize("kind", ["marginals", "thresholds"])
def test_bounds_that_are_tightened_change_nothing(kind, monkeypatch):
    """Without any patience every lottery is of one batch, and where it chooses none all bounds are tightened."""
    monkeypatch.setattr(module, "PATIENCE", 1)
    monkeypatch.setattr(lottery, "BATCH", 1)
    selection, bits, refined = Selection(KINDS[kind], RELAXED, PRIOR, [1]), SeededBits(14), []
    plain = Pool.refine
    monkeypatch.setattr(Pool, "refine", lambda self: refined.append(plain(self)))
    outcomes = [tuple(selection.pool().draw(2, selection.scale, bits).tolist()) for _ in range(500)]
    assert len(refined) > 20
    assert p_value(outcomes, selection.law(2)) > FLOOR
    assert p_value(outcomes, selection.law(2, 2.0)) < FLOOR


def test_the_same_distribution_as_top_k_of_all_scores():
    selection, bits = Selection(KINDS["both"], RELAXED, None, [0, 40]), SeededBits(8)
    scores = selection.scores()
    scores[selection.excluded] = EXCLUDED
    ours = Counter(tuple(selection.pool().draw(2, selection.scale, bits).tolist()) for _ in range(1000))
    theirs = Counter(tuple(top_k([scores], 2, selection.scale, bits).tolist()) for _ in range(1000))
    frequent = [outcome for outcome in ours + theirs if ours[outcome] + theirs[outcome] >= 20]
    table = [[counts[outcome] for outcome in frequent] for counts in (ours, theirs)]
    rest = [1000 - sum(row) for row in table]
    assert stats.chi2_contingency([[*row, other] for row, other in zip(table, rest, strict=True)]).pvalue > FLOOR


def curator(seed):
    codes = np.repeat(ROWS.codes, ROWS.times, axis=0).astype(np.int32)
    return Curator(TableSource(Table(codes, SIZES), SCHEMA), HUGE, unsafe_seed=seed)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(KINDS["thresholds"], RELAXED, PRIOR, [2, 5]),
        Selection(KINDS["both"], COUNTED, None, [1]),
        Selection(MIXED, RELAXED, PRIOR, [141], (Fraction(2), Fraction(1), Fraction(1, 3))),
    ],
    ids=["thresholds", "rows", "mixed"],
)
def test_a_curator_selects_by_the_exponential_mechanism(selection):
    """With half the noise of the tests above, so that fewer selections tell."""
    holder, k = curator(9), 2
    rho = k / (2 * (0.5 * SCALE / (1 << GRID)) ** 2)
    outcomes = [
        tuple(
            holder.select(
                selection.workload, selection.table, rho=rho, k=k, exclude=selection.excluded, prior=selection.prior
            ).tolist()
        )
        for _ in range(400)
    ]
    assert p_value(outcomes, selection.law(2, 0.5)) > FLOOR
    assert p_value(outcomes, selection.law(2, 0.8)) < FLOOR


def test_a_curator_selects_by_a_table_as_by_its_answers():
    """Two curators of large budgets: the ids of the largest errors, in order, on both paths."""
    selection = Selection(MIXED, RELAXED)
    scores = selection.scores()
    cuts = np.cumsum([piece.tally.cells for piece in selection.pieces])[:-1]
    compared = Comparison(ROWS, RELAXED, float(ROWS.total), 2.0)
    answers = [compared.answers(piece.tally) for piece in selection.pieces]
    assert [answer.size for answer in answers] == [part.size for part in np.split(scores, cuts)]
    largest = np.argsort(-scores, kind="stable")[:9]
    assert np.all(np.diff(scores[largest]) < 0)
    for estimate in (RELAXED, answers):
        assert curator(10).select(selection.workload, estimate, rho=1e6, k=9).tolist() == largest.tolist()


def test_strata_that_are_not_kept_are_formed_again(monkeypatch):
    selection = Selection(MIXED, RELAXED, PRIOR, [3])
    kept = [selection.pool().draw(5, SCALE, SeededBits(seed)).tolist() for seed in range(5)]
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    selection = Selection(MIXED, RELAXED, PRIOR, [3])
    assert not selection.pool()._kept
    assert [selection.pool().draw(5, SCALE, SeededBits(seed)).tolist() for seed in range(5)] == kept


def test_strata_that_are_formed_anew_do_not_fill_the_memory(monkeypatch):
    """The bug: the memory of strata that were dropped was never given back, and after a while none were kept."""
    selection = Selection((TWO_OF_THREE,), RELAXED)
    pool = selection.pool()
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * pool._bytes)
    for query in range(9):
        pool.exclude(np.array([query]))
    assert set(pool._kept) == {0}


def test_all_queries_can_be_drawn():
    """Also where every other one is excluded, those without any tickets of the prior included."""
    small = (Marginals(SIZES, ((1, 2),)), Thresholds(SIZES, ((1, 2),), 1), Custom(FUNCTION))
    for prior in (None, Prior(0.9, np.concatenate([np.eye(size)[0] for size in SIZES]))):
        selection = Selection(small, RELAXED, prior, np.arange(0, 36, 2))
        drawn = selection.pool().draw(18, SCALE, SeededBits(11))
        assert sorted(drawn.tolist()) == list(range(1, 36, 2))


def test_chosen_cells_are_selected_by_their_own_scores():
    """Single cells that are not a whole block are listed."""
    taken = Selection(KINDS["both"], RELAXED).workload.take([5, 60, 0, 100, 33])
    whole = Selection(KINDS["both"], RELAXED)
    compared = Comparison(ROWS, RELAXED, float(ROWS.total), SCALE)
    pieces = list(taken.pieces(WHOLE))
    pool = Pool(list(compared.contests(pieces, [1] * len(pieces))), NONE)
    bits = SeededBits(12)
    outcomes = [tuple(lottery.lottery(pool.levels, pool.weights, 1, SCALE, pool.errors, bits)) for _ in range(1500)]
    assert p_value(outcomes, peeling(whole.scores()[[5, 60, 0, 100, 33]], np.ones(5), SCALE)) > FLOOR


def test_no_rows_at_all_can_be_compared():
    empty = Rows(np.zeros((0, 3)), SIZES)
    for table in (RELAXED, RowTable(empty, 0)):
        compared = Comparison(empty, table, 1.0, 4096.0)
        pieces = list(Selection(KINDS["both"], RELAXED).workload.pieces(WHOLE))
        pool = Pool(list(compared.contests(pieces, [1] * len(pieces))), NONE)
        assert len(set(pool.draw(3, 4096.0, SeededBits(13)).tolist())) == 3


def test_a_coarse_cell_whose_queries_are_all_chosen_is_left():
    """The bug: codes that occur in neither table share a coarse cell, which kept its level when all of it was taken."""
    codes = np.stack([np.zeros(3000, int), np.repeat([0, 1, 2], [2000, 500, 500])], axis=1)
    lines = np.array([[1], [0], [0], [1 / 3], [1 / 3], [1 / 3]], np.float32)
    table = RelaxedTable((3, 3), lines, np.ones(1, np.float32))
    queries = Workload((Thresholds((3, 3), ((0, 1),), 1),)).by_cell()
    compared = Comparison(Rows(codes, (3, 3)), table, 3000.0, 2000.0)
    pool = Pool(list(compared.contests(list(queries.pieces(WHOLE)), [1])), NONE)
    assert sorted(pool.draw(9, 2000.0, SeededBits(13)).tolist()) == list(range(9))
