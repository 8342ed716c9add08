"""The query release game: FEM, sepFEM, DualQuery and DQRS against brute force, their own arithmetic, and theorems."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from anamorph.columns import Codes
from anamorph.curator import contest
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.keeping import keeping_rho
from anamorph.curator.ledger import Ledger
from anamorph.curator.scores import GRID
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms import dqrs
from anamorph.mechanisms.dqrs import DQRS, affordable, gathered
from anamorph.mechanisms.dual_query import DualQuery
from anamorph.mechanisms.fem import FEM
from anamorph.mechanisms.game import MOST_ROUNDS, Game, Player, checked
from anamorph.mechanisms.mechanism import mechanism
from anamorph.mechanisms.sep_fem import SepFEM
from anamorph.queries.bands import Banded
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

FLOOR = 1e-6  # a right draw fails by chance once in a million seeds; seeds are fixed
SIZES = (3, 2, 4)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
EVERY = np.array(list(itertools.product(*map(range, SIZES))), np.int32)
"""Every row that there is."""
PAIRS = Workload((Marginals(SIZES, ((0, 1), (2, 1), (0, 2))),))
_RANDOM = np.random.default_rng(5)
PRODUCT = np.stack([_RANDOM.choice(s, 500, p=2.0 ** -np.arange(s) / sum(2.0 ** -np.arange(s))) for s in SIZES], axis=1)
CORRELATED = np.stack([PRODUCT[:, 0], PRODUCT[:, 0] // 2, PRODUCT[:, 0] + (PRODUCT[:, 1] == 1)], axis=1)
DATA = {"product": PRODUCT.astype(np.int32), "correlated": CORRELATED.astype(np.int32)}
ROWS = DATA["correlated"]
BUDGET = Budget(epsilon=1.0, delta=1e-6)


@dataclass(frozen=True)
class Given:
    """A budget by its rho."""

    rho: float
    epsilon: float = 1.0
    delta: float = 1e-6


class Watched(TableSource):
    """A source that remembers how often it was asked."""

    asked = 0

    def counts(self, sets):
        self.asked += 1
        return super().counts(sets)


def source(rows=ROWS):
    return Watched(Table(rows, SIZES), SCHEMA)


def curator(rho=0.02, rows=ROWS, seed=1):
    return Curator(source(rows), Given(rho), unsafe_seed=seed)


def rows_of(found):
    return found.model.table.codes


def agreeing(rows, features, codes):
    return np.sum(rows[:, list(features)] == np.array(codes), axis=1)


def by_hand(workload, rows):
    """The value of every query, in order, at every row: queries by rows."""
    values = []
    for part in workload.by_cell().parts:
        owner, found = part.marginals, []
        for features in owner.sets:
            least = owner.least if isinstance(owner, Thresholds) else len(features)
            for codes in itertools.product(*(range(SIZES[f]) for f in features)):
                found.append(agreeing(rows, features, codes) >= least)
        values += found if part.chosen is None else [found[i] for i in part.chosen.tolist()]
    return np.array(values, float)


def signed(workload, rows):
    """The value of every query, and of its negation after it, at every row."""
    values = by_hand(workload, rows)
    return np.stack([values, 1 - values], axis=1).reshape(-1, len(rows))


def largest_error(found, rows, workload=PAIRS):
    return np.abs(by_hand(workload, rows_of(found)).mean(axis=1) - by_hand(workload, rows).mean(axis=1)).max()


# --- the queries as conjunctions

WORKLOADS = {
    "marginals": Workload((Marginals(SIZES, ((0, 1), (2, 0), (1,), (1, 2, 0))),)),
    "1 of 3": Workload((Thresholds(SIZES, ((0, 1, 2), (2, 0, 1)), 1),)),
    "2 of 3": Workload((Thresholds(SIZES, ((0, 1, 2), (2, 0, 1)), 2),)),
    "3 of 3": Workload((Thresholds(SIZES, ((0, 1, 2),), 3),)),
    "chosen cells": Workload((Cells(Marginals(SIZES, ((0, 1), (2, 0), (2,))), np.array([21, 0, 7, 7, 17])),)),
    "chosen thresholds": Workload((Cells(Thresholds(SIZES, ((2, 1), (1, 0)), 1), np.array([13, 3, 8])),)),
    "several": Workload(
        (
            Marginals(SIZES, ((2, 1),)),
            Thresholds(SIZES, ((0, 1, 2),), 2),
            Cells(Marginals(SIZES, ((0,), (1, 2))), np.array([10, 2])),
            Marginals(SIZES, ((0, 2),)),
        )
    ),
}
NOTHING = np.zeros(sum(SIZES))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_drawn_number_agrees_with_the_rows_that_its_query_holds_for(name):
    """A negation does up to the constant 1; and no number is left out."""
    game, expected = Game(checked(WORKLOADS[name])), signed(WORKLOADS[name], EVERY)
    assert len(expected) == 2 * game.workload.blocks
    for number, wanted in enumerate(expected):
        found = game.conjunctions([number]).values(EVERY, NOTHING)
        assert found == pytest.approx(wanted - (number & 1)), number


@given(st.sampled_from(sorted(WORKLOADS)), st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 30))
@settings(deadline=None, max_examples=40)
def test_several_numbers_add_up_whenever_they_are_named(name, seed, first, later):
    game, expected = Game(checked(WORKLOADS[name])), signed(WORKLOADS[name], EVERY)
    drawn = np.random.default_rng(seed).integers(0, len(expected), first + later).tolist()
    found = game.agreed(game.conjunctions(drawn[:first]), drawn[first:]).values(EVERY, NOTHING)
    assert found == pytest.approx(expected[drawn].sum(axis=0) - sum(number & 1 for number in drawn))


def test_the_terms_of_a_threshold_are_those_of_inclusion_and_exclusion():
    game = Game(checked(Workload((Thresholds(SIZES, ((2, 0, 1),), 2),))))
    terms = {features: (codes.tolist(), weight) for features, codes, weight in game.terms(23)}
    assert terms == {(2, 0): ([3, 2], 1), (2, 1): ([3, 1], 1), (0, 1): ([2, 1], 1), (2, 0, 1): ([3, 2, 1], -2)}


def test_both_players_count_a_query_by_its_weight():
    """The curator draws by weighted scores; rows that answer what is drawn weigh it alike."""
    weighed = Workload((Marginals(SIZES, ((0,),)), Marginals(SIZES, ((1,),))), weights=(Fraction(1, 2), Fraction(2)))
    game, expected = Game(checked(weighed)), by_hand(weighed, EVERY)
    assert game.shares == (0.25, 1.0)
    assert game.conjunctions([2]).values(EVERY, NOTHING) == pytest.approx(expected[1] / 4)
    assert game.conjunctions([9]).values(EVERY, NOTHING) == pytest.approx(-expected[4])


def test_anything_is_uniform_over_queries_and_negations():
    game = Game(checked(PAIRS))
    drawn = game.anything(30_000, np.random.default_rng(2))
    assert game.workload.blocks == 26
    assert stats.chisquare(np.bincount(drawn, minlength=52)).pvalue > FLOOR
    assert drawn.max() < 52


FUNCTION = custom(lambda row: row["c0"][0] * row["c1"], SCHEMA, name="tests:game")


@pytest.mark.parametrize(
    "part", [FUNCTION, FUNCTION.by_cell(), Banded(SIZES, ((0, 2),), ((), (), (2,))), Residuals(SIZES, ((0, 1),))]
)
@pytest.mark.parametrize("made", [FEM(), SepFEM(), DualQuery(), DQRS()], ids=lambda made: made.name)
def test_what_an_oracle_does_not_know_is_refused(part, made):
    mixed, told = Workload((Marginals(SIZES, ((0, 1),)), part)), curator()
    for refused in (lambda: made.steps_for(mixed, 0.1), lambda: made(told, mixed, seed=0)):
        with pytest.raises(
            WorkloadError, match=r"must be of marginals and thresholds: take auto for functions or for numbers"
        ):
            refused()
    assert told.privacy().spends == ()


# --- the budget of FEM


@given(st.floats(1e-6, 10), st.integers(1, 400), st.floats(0.01, 0.99))
@settings(max_examples=40)
def test_tight_rounds_share_all_of_the_budget(rho, rounds, more):
    budgets = FEM(eps0=math.sqrt(8 * rho / (rounds + more))).budgets(rho)
    assert len(budgets) == rounds
    assert set(budgets) == {budgets[0]}
    assert sum(map(Fraction, budgets)) <= Fraction(rho)
    assert sum(budgets) == pytest.approx(rho)


@given(st.floats(1e-6, 10), st.integers(1, 400), st.floats(0.01, 0.99))
@settings(max_examples=40)
def test_rounds_of_the_paper_are_a_quarter_and_cost_what_they_cost(rho, rounds, more):
    eps0 = math.sqrt(2 * rho / (rounds + more))
    budgets = FEM(eps0=eps0, accounting="paper").budgets(rho)
    assert len(budgets) == rounds
    assert len(FEM(eps0=eps0).budgets(rho)) // 4 == rounds
    assert set(budgets) == {eps0**2 / 8}
    assert sum(map(Fraction, budgets)) <= Fraction(rho) / 4 * Fraction(1 + 1e-9)


@pytest.mark.parametrize("rho", [1e-9, 0.0143, 3.0, 1e9])
@pytest.mark.parametrize("accounting", ["tight", "paper"])
def test_without_eps0_there_are_a_hundred_rounds(rho, accounting):
    budgets = FEM(accounting=accounting).budgets(rho)
    assert len(budgets) == 100
    assert sum(budgets) == pytest.approx(rho if accounting == "tight" else rho / 4)


def test_as_many_rounds_as_fit_exactly_are_made():
    """Rounding loses none of them."""
    for rounds in (*range(1, 60), 99, 100, 101, 1000, 4096):
        assert len(FEM(eps0=math.sqrt(8 * 0.0143 / rounds)).budgets(0.0143)) == rounds


@pytest.mark.parametrize(
    ("eps0", "found"),
    [(0.9, "none"), (1e200, "none"), (1e-3, "more"), (1e-9, "more"), (1e-170, "more"), (5e-324, "more")],
)
def test_too_few_and_too_many_rounds_are_refused(eps0, found):
    with pytest.raises(ParameterError, match=rf"eps0 \(.*\) must leave from 1 to {MOST_ROUNDS} rounds, and .* {found}"):
        FEM(eps0=eps0).budgets(0.1)


def test_the_most_rounds_are_not_refused():
    assert len(FEM(eps0=math.sqrt(0.2 / MOST_ROUNDS), accounting="paper").budgets(0.1)) == MOST_ROUNDS


def test_a_round_is_one_draw_with_weights_of_eps0(monkeypatch):
    """exp(eps0 score / 2), as the paper's exponential mechanism for scores in counts."""
    scales = watched_scales(monkeypatch)
    eps0 = 0.05
    for accounting, rounds in (("tight", 64), ("paper", 16)):
        scales.clear()
        made = FEM(eps0=eps0, samples=1, accounting=accounting)
        found = made(curator(rho=8 * eps0**2), PAIRS, seed=0)
        assert [draws for draws, _ in scales] == [1] * rounds
        assert [scale for _, scale in scales] == pytest.approx([2 / eps0] * rounds)
        assert [spend.rho for spend in found.privacy.spends] == pytest.approx([eps0**2 / 8] * rounds)


def watched_scales(monkeypatch):
    """The number of draws and the scale, in counts, of every call of `Curator.draw`; they are made all the same."""
    seen, draw = [], contest.Pool.draw_signed

    def watched(pool, draws, scale, bits):
        seen.append((draws, scale / (1 << GRID)))
        return draw(pool, draws, scale, bits)

    monkeypatch.setattr(contest.Pool, "draw_signed", watched)
    return seen


# --- perturbations


def noises(monkeypatch, made):
    """What a run adds to the worth of each code."""
    seen, best = [], Player.best

    def watched(self, wanted, linear, seed):
        seen.append(linear)
        return best(self, wanted, linear, seed)

    monkeypatch.setattr(Player, "best", watched)
    made(curator(), PAIRS, seed=4)
    return np.concatenate(seen)


@pytest.mark.parametrize("eta", [0.5, 3.0])
@pytest.mark.parametrize(("kind", "law", "sign"), [(FEM, stats.expon, -1), (SepFEM, stats.laplace, 1)])
def test_noise_has_the_scale_eta_and_the_sign_of_the_paper(monkeypatch, eta, kind, law, sign):
    noise = noises(monkeypatch, kind(eta=eta, samples=12))
    assert noise.shape == (1200, sum(SIZES))
    assert stats.kstest(sign * noise.ravel(), law(scale=eta).cdf).pvalue > FLOOR
    for factor in (0.8, 1.25):
        assert stats.kstest(sign * noise.ravel(), law(scale=factor * eta).cdf).pvalue < FLOOR
    assert (noise.max() <= 0) == (kind is FEM)
    assert np.unique(noise).size == noise.size, "each row of each round has noise of its own"


def test_exponential_noise_is_subtracted_from_what_a_row_is_worth():
    """Where no query is named, each column takes the code with the least noise."""
    made = FEM(samples=200)
    noise = made.perturbation(np.random.default_rng(1), (200, sum(SIZES)))
    rows = made.best(Game(checked(PAIRS)).conjunctions([]), noise, 0)
    starts = np.cumsum((0, *SIZES))
    for column, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        assert np.array_equal(rows[:, column], np.abs(noise[:, first:last]).argmin(axis=1))


# --- convergence, without noise to speak of


def played(monkeypatch):
    """The numbers drawn, round by round."""
    seen, draw = [], Curator.draw

    def watched(self, workload, estimate, **more):
        seen.append(draw(self, workload, estimate, **more))
        return seen[-1]

    monkeypatch.setattr(Curator, "draw", watched)
    return seen


@pytest.mark.parametrize("kind", [FEM, SepFEM])
@pytest.mark.parametrize("name", DATA)
def test_fem_is_as_good_as_its_regret_says_and_better_with_more_rounds(monkeypatch, kind, name):
    """Where the query named is the worst, max error <= (the best row's payoff - what was played) / T: no luck in it.

    With D_t the rows of round t, max_q of the mean of q(D) - q(D_t) is at most the mean of q_t(D) - q_t(D_t), and the
    private rows are worth no more than the best row.
    """
    data, errors = DATA[name], []
    for rounds in (4, 32, 128):
        drawn = played(monkeypatch)
        told = curator(rho=1e9, rows=data)
        found = kind(eps0=math.sqrt(8e9 / (rounds + 0.5)), eta=math.sqrt(rounds) / 4, samples=20)(told, PAIRS, seed=1)
        named = np.concatenate(drawn)
        assert named.size == rounds
        plays = signed(PAIRS, rows_of(found))[named].reshape(rounds, rounds, 20).mean(axis=2).diagonal()
        regret = (signed(PAIRS, EVERY)[named].sum(axis=0).max() - plays.sum()) / rounds
        errors.append(largest_error(found, data))
        assert errors[-1] <= regret + 1e-3
        monkeypatch.undo()
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.05


def budget_for(made, eta, rows):
    """The rho with which DualQuery has this eta."""
    return made.samples * sum(t * t for t in range(1, made.rounds)) * (eta / rows) ** 2 / 2


@pytest.mark.parametrize("name", DATA)
def test_dual_query_keeps_its_promise_and_is_better_with_more_rounds(name):
    """The largest error is at most ln(2 m) / (eta T) + eta + sqrt(2 ln |rows| / s).

    The first two are the regret of multiplicative weights; the last bounds the mean, over samples, of the most by which
    s queries are off at any row.
    """
    data, errors = DATA[name], []
    for rounds in (4, 20, 100):
        eta = math.sqrt(math.log(52) / rounds)
        made = DualQuery(rounds=rounds, samples=40)
        found = made(curator(rho=budget_for(made, eta, len(data)), rows=data), PAIRS, seed=1)
        errors.append(largest_error(found, data))
        assert errors[-1] <= 2 * eta + math.sqrt(2 * math.log(len(EVERY)) / 40)
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < errors[0] / 3


@pytest.mark.parametrize("name", DATA)
def test_dqrs_is_better_with_more_rounds(name):
    """As DualQuery; its eta is planned to be `rate`."""
    data, errors = DATA[name], []
    for rounds in (4, 20, 100):
        eta = math.sqrt(math.log(52) / rounds)
        made = DQRS(rounds=rounds, samples=40, rate=min(eta, 1.0))
        found = made(curator(rho=budget_of_rate(made, eta, len(data)), rows=data), PAIRS, seed=1)
        errors.append(largest_error(found, data))
        assert errors[-1] <= 2 * eta + math.sqrt(2 * math.log(len(EVERY)) / 40)
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < errors[0] / 3


def budget_of_rate(made, eta, rows):
    """The rho with which DQRS has this eta: what it costs is in proportion to eta^2."""
    (turn, *_) = made.turns(1.0)
    return (eta / affordable(turn, made.samples, rows)) ** 2


# --- the draws of DualQuery


@given(st.integers(2, 100), st.integers(1, 100), st.floats(1e-6, 10))
@settings(deadline=None, max_examples=40)
def test_budgets_of_dual_query_grow_as_the_square_of_the_round(rounds, samples, rho):
    budgets = DualQuery(rounds=rounds, samples=samples).budgets(rho)
    assert len(budgets) == rounds - 1
    assert [each / budgets[0] for each in budgets] == pytest.approx([t * t for t in range(1, rounds)])
    assert sum(map(Fraction, budgets)) <= Fraction(rho)
    assert sum(budgets) == pytest.approx(rho)


def test_the_scale_of_each_round_of_dual_query_is_that_of_one_eta(monkeypatch):
    """It is n / (eta t) after t rows, eta = n sqrt(2 rho / (s sum of t^2))."""
    scales, made = watched_scales(monkeypatch), DualQuery(rounds=30, samples=7)
    made(curator(rho=0.3), PAIRS, seed=0)
    eta = 500 * math.sqrt(2 * 0.3 / (7 * sum(t * t for t in range(1, 30))))
    assert [draws for draws, _ in scales] == [7] * 29
    assert [scale for _, scale in scales] == pytest.approx([500 / (eta * t) for t in range(1, 30)])


def compared(monkeypatch, made):
    """The rows of a run, and those that each draw compares with."""
    seen, draw = [], Curator.draw

    def watched(self, workload, estimate, **more):
        seen.append(estimate.source.codes)
        return draw(self, workload, estimate, **more)

    monkeypatch.setattr(Curator, "draw", watched)
    return rows_of(made(curator(), PAIRS, seed=0)), seen


def test_fem_compares_with_the_rows_of_its_round(monkeypatch):
    rows, seen = compared(monkeypatch, FEM(eps0=0.15, samples=3))
    assert len(seen) == 7
    assert np.array_equal(rows.reshape(7, 3, 3), seen)


@pytest.mark.parametrize("made", [DualQuery(rounds=6, samples=5), DQRS(rounds=6, samples=5)])
def test_dual_query_compares_with_all_rows_so_far(monkeypatch, made):
    rows, seen = compared(monkeypatch, made)
    assert len(seen) == 5
    assert all(np.array_equal(codes, rows[: t + 1]) for t, codes in enumerate(seen))


def test_the_answer_is_the_row_that_agrees_with_most_queries():
    game, expected = Game(checked(PAIRS)), signed(PAIRS, EVERY)
    for seed in range(40):
        named = game.anything(9, np.random.default_rng(seed))
        (row,) = DualQuery().answer(game, named, seed)
        worth = expected[named].sum(axis=0)
        assert worth[np.flatnonzero((row == EVERY).all(axis=1))] == worth.max()


def test_ties_are_broken_at_random():
    game = Game(checked(PAIRS))
    found = {tuple(DualQuery().answer(game, np.array([0]), seed)[0].tolist()) for seed in range(60)}
    assert found == {(0, 0, code) for code in range(4)}


# --- the turns of DQRS


@given(st.integers(2, 60), st.integers(1, 100), st.floats(1e-6, 10), st.floats(1e-3, 1))
@settings(deadline=None, max_examples=40)
def test_turns_are_those_of_algorithm_4(rounds, samples, rho, rate):
    made = DQRS(rounds=rounds, samples=samples, rate=rate)
    turns = made.turns(rho)
    assert len(turns) == rounds - 1
    for t, turn in enumerate(turns, start=1):
        assert turn.margin == pytest.approx(1 / (2 * t ** (2 / 3)))
        assert turn.fresh == min(samples, math.ceil((2 * turn.margin + 4 * rate) * samples))
    spent = [Fraction(part) for turn in turns for part in (turn.keep_rho, turn.draw_rho)]
    assert sum(spent) <= Fraction(rho)
    assert float(sum(spent)) == pytest.approx(rho)
    steps = made.steps_for(PAIRS, rho)
    assert [(step.kind, step.rho) for step in steps[:2]] == [("keep", turns[0].keep_rho), ("draw", turns[0].draw_rho)]
    assert [step.selected for step in steps[1::2]] == [turn.fresh for turn in turns]


@given(st.integers(2, 60), st.integers(1, 100), st.floats(1e-6, 10), st.floats(1e-3, 1), st.integers(1, 10**5))
@settings(deadline=None, max_examples=40)
def test_keeping_and_drawing_have_one_eta_in_all_rounds(rounds, samples, rho, rate, rows):
    """That of a draw: beta = n / (eta t), and beta = sqrt(fresh / (2 rho))."""
    turns = DQRS(rounds=rounds, samples=samples, rate=rate).turns(rho)
    kept = [affordable(turn, samples, float(rows)) / rows for turn in turns]
    drawn = [1 / (t * math.sqrt(turn.fresh / (2 * turn.draw_rho))) for t, turn in enumerate(turns, start=1)]
    assert kept == pytest.approx(drawn)
    assert kept == pytest.approx([kept[0]] * len(kept))
    for turn, share in zip(turns, kept, strict=True):
        cost = keeping_rho(samples, share * rows, turn.margin, float(rows))
        assert cost <= turn.keep_rho * (1 + 1e-9)
        assert cost == pytest.approx(turn.keep_rho)


def test_a_budget_beyond_all_measure_is_not_refused():
    """The curator keeps nothing with a rate above 1e6."""
    (turn,) = DQRS(rounds=2).turns(1e9)
    assert affordable(turn, 50, 1e6) == 1e6
    assert len(rows_of(DQRS(rounds=3, samples=4)(curator(rho=1e12), PAIRS, seed=0))) == 3


def test_a_run_of_dqrs_spends_its_budget_on_every_query_at_hand(monkeypatch):
    scales, kept, keep = watched_scales(monkeypatch), [], Curator.keep

    def watched(self, workload, estimate, drawn, *, rate, margin):
        kept.append((estimate.source.codes, len(drawn), rate, margin))
        return keep(self, workload, estimate, drawn, rate=rate, margin=margin)

    monkeypatch.setattr(Curator, "keep", watched)
    made = DQRS(rounds=25, samples=12, rate=0.1)
    found = made(curator(rho=0.4), PAIRS, seed=0)
    turns = made.turns(0.4)
    assert sum(spend.rho for spend in found.privacy.spends) == pytest.approx(0.4)
    assert sum(Fraction(spend.rho) for spend in found.privacy.spends) <= Fraction(0.4)
    assert [count for _, count, *_ in kept] == [12] * 24
    assert [margin for *_, margin in kept] == [turn.margin for turn in turns]
    etas = [rate for *_, rate, _ in kept]
    assert etas == pytest.approx([etas[0]] * 24)
    assert [draws for draws, _ in scales] == [turn.fresh for turn in turns]
    assert [500 / (scale * t) for t, (_, scale) in enumerate(scales, start=1)] == pytest.approx(etas)
    for t, (codes, *_) in enumerate(kept):
        assert np.array_equal(codes, rows_of(found)[t : t + 1]), "the newest row alone decides what is kept"


def test_dqrs_draws_and_keeps_by_one_distribution_whatever_the_weights(monkeypatch):
    weighed = Workload((Marginals(SIZES, ((0, 1),)), Marginals(SIZES, ((1, 2),))), weights=(Fraction(1), Fraction(50)))
    asked, draw = [], Curator.draw

    def watched(self, workload, estimate, **more):
        asked.extend(piece.weight for piece in workload.pieces())
        return draw(self, workload, estimate, **more)

    monkeypatch.setattr(Curator, "draw", watched)
    DQRS(rounds=4, samples=5)(curator(), weighed, seed=0)
    assert asked
    assert set(asked) == {1}
    asked.clear()
    DualQuery(rounds=4, samples=5)(curator(), weighed, seed=0)
    assert set(asked) == {1, 50}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 10**6))
def test_as_many_queries_as_there_should_be_are_gathered(samples, fresh, stay, seed):
    fresh, stay = min(fresh, samples), min(stay, samples)
    new, kept = np.arange(100, 100 + fresh), np.arange(stay)
    found = gathered(kept, new, samples, np.random.default_rng(seed))
    assert found.size == samples
    assert set(new.tolist()) <= set(found.tolist())
    assert set(found.tolist()) <= set(new.tolist()) | set(kept.tolist())
    distinct = np.unique(found).size
    assert distinct == min(samples, fresh + stay), "some are taken twice only where all are taken"


def test_those_that_are_dropped_are_chosen_at_random():
    generator = np.random.default_rng(1)
    found = [gathered(np.arange(10), np.array([20]), 4, generator) for _ in range(3000)]
    assert all(20 in drawn for drawn in found)
    assert stats.chisquare(np.bincount(np.concatenate(found), minlength=21)[:10]).pvalue > FLOOR
    more = [gathered(np.array([0]), np.array([1, 2]), 9, generator) for _ in range(500)]
    assert stats.chisquare(np.bincount(np.concatenate(more), minlength=3)).pvalue > FLOOR


def test_what_is_kept_and_drawn_has_the_distribution_of_the_next_round(monkeypatch):
    """Lemma 8, for rows that do not depend on what was drawn: and not the distribution of the round before."""
    rounds, eta = 8, 0.6
    answers = iter(EVERY[np.random.default_rng(3).integers(0, len(EVERY), rounds)])
    made, at_hand, kept = DQRS(rounds=rounds, samples=6000, rate=0.15), [], []

    def fixed(_, game, named, seed):
        at_hand.append(named)
        return next(answers)[None]

    def watched(stay, new, samples, generator):
        kept.append(stay)
        assert stay.size + new.size >= samples, "none is taken twice, so all are independent"
        return gathered(stay, new, samples, generator)

    monkeypatch.setattr(DualQuery, "answer", fixed)
    monkeypatch.setattr(dqrs, "gathered", watched)
    found = made(curator(rho=budget_of_rate(made, eta, 500)), PAIRS, seed=2)
    payoff = signed(PAIRS, ROWS).mean(axis=1)[:, None] - signed(PAIRS, rows_of(found))
    laws = [np.exp(eta * payoff[:, :t].sum(axis=1)) for t in range(rounds + 1)]
    for t in range(3, rounds):
        for drawn, least in ((at_hand[t], 6000), (kept[t - 1], 1500)):
            assert drawn.size >= least
            assert likelihood(drawn, laws[t]) > FLOOR
    for t in (5, 6, 7):
        assert likelihood(at_hand[t], laws[t - 1]) < FLOOR
        assert likelihood(kept[t - 1], laws[t - 1]) < FLOOR


def likelihood(drawn, weights):
    """The p-value of draws from these weights."""
    expected = weights / weights.sum() * drawn.size
    return stats.chisquare(np.bincount(drawn, minlength=weights.size), expected).pvalue


# --- runs

SMALL = {
    "fem": FEM(eps0=0.14, samples=3),
    "sepfem": SepFEM(eps0=0.14, samples=3),
    "dualquery": DualQuery(rounds=8, samples=6),
    "dqrs": DQRS(rounds=8, samples=6),
}


class StoppedError(RuntimeError):
    """What stops a run."""


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
@pytest.mark.parametrize("name", SMALL)
def test_a_resumed_run_repeats_and_reads_no_rows(tmp_path, name, relation):
    def run(rows, **more):
        told = Curator(rows, BUDGET, neighbours=relation, ledger=Ledger(tmp_path / "ledger"), **more)
        return SMALL[name](told, PAIRS, seed=3)

    first, rows = run(source()), source()
    again = run(rows, resume=True)
    assert np.array_equal(rows_of(first), rows_of(again))
    assert again.privacy == first.privacy
    assert rows.asked == 0


@pytest.mark.parametrize("name", SMALL)
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch, name):
    ledger, made, best, calls = Ledger(tmp_path / "ledger"), SMALL[name], Player.best, []

    def failing(self, wanted, linear, seed):
        calls.append(seed)
        if len(calls) == 5:
            raise StoppedError
        return best(self, wanted, linear, seed)

    monkeypatch.setattr(Player, "best", failing)
    with pytest.raises(StoppedError):
        made(Curator(source(), BUDGET, ledger=ledger), PAIRS, seed=3)
    before = len(ledger.entries("rows"))
    found = made(Curator(source(), BUDGET, ledger=ledger, resume=True), PAIRS, seed=3)
    assert 0 < before < len(ledger.entries("rows"))
    planned = [(step.kind, pytest.approx(step.rho)) for step in made.steps_for(PAIRS, BUDGET.rho)]
    assert [(entry.kind, entry.rho) for entry in ledger.entries("rows")] == planned
    assert [(spend.kind, spend.rho) for spend in found.privacy.spends] == planned


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
@pytest.mark.parametrize("name", SMALL)
def test_rows_are_in_the_schema_and_as_many_as_planned(name, relation):
    made = SMALL[name]
    for workload in (PAIRS, WORKLOADS["several"]):
        told = Curator(source(), BUDGET, neighbours=relation, unsafe_seed=1)
        rows = rows_of(made(told, workload, seed=2))
        count = made.rounds if isinstance(made, DualQuery) else 3 * len(made.budgets(told.budget.rho))
        assert rows.dtype == np.int32
        assert abs(len(rows) - count) <= (3 if relation == "add-remove" else 0)  # the total costs a little
        assert np.all((rows >= 0) & (rows < SIZES))


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_decides_all_but_what_the_curator_draws(name):
    runs = [rows_of(SMALL[name](curator(), PAIRS, seed=seed)) for seed in (1, 1, 2)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


# --- solvers

WIDE = (4, 3, 5, 2, 6, 3, 4)


def hard_case(solver):
    """A problem whose rows a solver finds, and what each is worth; and the rows of a run."""
    triples = tuple(itertools.combinations(range(len(WIDE)), 3))
    game = Game(checked(Workload((Marginals(WIDE, triples),))))
    generator = np.random.default_rng(7)
    wanted = game.conjunctions(game.anything(120, generator))
    noise = -generator.exponential(1.0, (3, sum(WIDE)))
    rows = Player(solver=solver, seconds=60.0).best(wanted, noise, 0)
    run = FEM(eps0=0.2, samples=1, solver=solver)(curator(), PAIRS, seed=0)
    return rows, wanted.values(rows, noise), rows_of(run)


@pytest.mark.parametrize(("solver", "package"), [("cp-sat", "ortools"), ("highs", "highspy")])
def test_rows_of_a_solver_are_at_least_as_good(solver, package):
    """HiGHS in a process of its own: the two packages cannot be loaded into one."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    _, local, plain = hard_case("local")
    if solver == "cp-sat":
        rows, values, run = hard_case(solver)
    else:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows, values, run = pool.submit(hard_case, solver).result()
    assert rows.dtype == np.int32
    assert np.all((rows >= 0) & (rows < WIDE))
    assert np.all(values >= local - 1e-9)
    assert run.shape == plain.shape
    assert np.all((run >= 0) & (run < SIZES))


# --- parameters


@pytest.mark.parametrize(
    ("name", "settings_", "message"),
    [
        ("fem", {"eps0": "-1"}, r"eps0 \(-1.0\) must be a finite number of at least 0"),
        ("fem", {"eps0": "nan"}, r"eps0 \(nan\) must be a finite number"),
        ("fem", {"eps0": "inf"}, r"eps0 \(inf\) must be a finite number"),
        ("fem", {"eta": "0"}, r"eta \(0.0\) must be a finite number above 0"),
        ("fem", {"eta": "nan"}, r"eta \(nan\) must be a finite number above 0"),
        ("sepfem", {"eta": "inf"}, r"eta \(inf\) must be a finite number above 0"),
        ("fem", {"samples": "0"}, r"samples \(0\) must be"),
        ("fem", {"samples": "2.5"}, r"samples \('2.5'\) must be a whole number"),
        ("sepfem", {"accounting": "loose"}, r"accounting \('loose'\) must be one of tight, paper"),
        ("fem", {"solver": "gurobi"}, r"solver \('gurobi'\) must be one of local, cp-sat, highs"),
        ("dqrs", {"solver": ""}, r"solver \(''\) must be one of local, cp-sat, highs"),
        ("dualquery", {"seconds": "0"}, r"seconds \(0.0\) must be a finite number above 0"),
        ("dualquery", {"seconds": "inf"}, r"seconds \(inf\) must be a finite number above 0"),
        ("dualquery", {"rounds": "1"}, r"rounds \(1\) must be from 2 to 100000: the first looks at nothing"),
        ("dqrs", {"rounds": "100001"}, r"rounds \(100001\) must be from 2 to 100000"),
        ("dualquery", {"samples": "-2"}, r"samples \(-2\) must be"),
        ("dqrs", {"rate": "0"}, r"rate \(0.0\) must be above 0 and at most 1"),
        ("dqrs", {"rate": "1.5"}, r"rate \(1.5\) must be above 0 and at most 1"),
        ("dqrs", {"rate": "nan"}, r"rate \(nan\) must be above 0 and at most 1"),
        ("dualquery", {"rate": "0.1"}, r"setting \('rate'\) must be one of"),
        ("fem", {"rounds": "10"}, r"setting \('rounds'\) must be one of"),
    ],
)
def test_bad_parameters_are_refused(name, settings_, message):
    with pytest.raises(ParameterError, match=message):
        mechanism(name, settings_)
