"""Drawing queries and negations, and keeping some of them: distributions, privacy over neighbours, the charge."""

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
from scipy import stats

from anamorph.columns import Codes
from anamorph.curator import contest
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable, RowTable
from anamorph.curator.keeping import keeping_rho, kept
from anamorph.curator.ledger import Ledger
from anamorph.curator.noise import SeededBits
from anamorph.curator.scores import GRID, differences, errors, times
from anamorph.errors import BudgetError, ParameterError, WorkloadError
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

FLOOR = 1e-6  # a right draw fails by chance once in a million seeds; seeds are fixed
SIZES = (4, 3, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
FUNCTION = custom(lambda row: jnp.outer(row["c0"], row["c1"]).ravel() * 0.75, SCHEMA, name="tests:function")
CELLS = Workload((Marginals(SIZES, ((0, 1), (2, 0))),)).by_cell()
MIXED = Workload((Marginals(SIZES, ((0, 2),)), Thresholds(SIZES, ((0, 1, 2),), 2), FUNCTION)).by_cell()
BUDGET = Budget(epsilon=1.0, delta=1e-6)
HUGE = Budget(epsilon=1e9, delta=1e-6)


def some_rows(count, seed, steep):
    generator = np.random.default_rng(seed)
    shares = [steep ** np.arange(size) for size in SIZES]
    columns = [generator.choice(len(share), count, p=share / share.sum()) for share in shares]
    return np.stack(columns, axis=1).astype(np.int32)


ROWS = some_rows(300, 1, 0.5)
COUNTED = RowTable(Table(some_rows(40, 2, 0.9), SIZES), 40)
LINES = np.concatenate([np.random.default_rng(3).dirichlet(np.ones(size), 5).T for size in SIZES]).astype(np.float32)
RELAXED = RelaxedTable(SIZES, LINES, np.full(5, 0.2, np.float32), {FUNCTION.function: np.linspace(0, 0.3, 12)})


class Watched(TableSource):
    """A source that remembers how often it was asked."""

    asked = 0

    def counts(self, sets):
        self.asked += 1
        return super().counts(sets)


def source(rows=ROWS):
    return Watched(Table(rows, SIZES), SCHEMA)


def curator(budget=HUGE, relation="replace", seed=1, rows=ROWS, **more):
    return Curator(source(rows), budget, neighbours=relation, unsafe_seed=seed, **more)


def answers(table, workload):
    """The answer of every query, of rows or of relaxed rows, slowly."""
    if isinstance(table, RelaxedTable):
        blocks, weights = table.blocks, table.weights.astype(float)
    else:
        codes = table.source.codes
        blocks = [np.equal.outer(np.arange(size), codes[:, f]).astype(float) for f, size in enumerate(SIZES)]
        weights = np.full(len(codes), 1 / len(codes))
    found = []
    for part in workload.parts:
        owner = getattr(part, "marginals", None)
        if owner is None:
            known = table.functions[part.function] if isinstance(table, RelaxedTable) else None
            joint = np.einsum("ir,jr,r->ij", blocks[0], blocks[1], weights).ravel() * 0.75
            found.append(joint if known is None else known)
            continue
        for features in owner.sets:
            least = owner.least if isinstance(owner, Thresholds) else len(features)
            for codes in itertools.product(*(range(SIZES[f]) for f in features)):
                chances = [blocks[f][code] for f, code in zip(features, codes, strict=True)]
                total = 0.0
                for held in itertools.product((0, 1), repeat=len(features)):
                    if sum(held) >= least:
                        parts = [c if h else 1 - c for c, h in zip(chances, held, strict=True)]
                        total += float(np.prod(parts, axis=0) @ weights)
                found.append(np.array([total]))
    return np.concatenate(found)


def excess(rows, table, workload, total=None):
    """How many rows more than the table has every query, and its negation after it."""
    total = len(rows) if total is None else total
    exact = answers(RowTable(Table(rows, SIZES), len(rows)), workload) * len(rows)
    difference = exact - total * answers(table, workload)
    return np.stack([difference, -difference], axis=1).ravel()


def law(scores, beta):
    weights = np.exp((scores - scores.max()) / beta)
    return weights / weights.sum()


def p_value(drawn, expected):
    observed = np.bincount(drawn, minlength=expected.size)
    rare = expected * drawn.size < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * drawn.size
    return stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue


# --- draw


@pytest.mark.parametrize(("workload", "table"), [(CELLS, COUNTED), (CELLS, RELAXED), (MIXED, RELAXED)])
@pytest.mark.parametrize("beta", [4.0, 25.0])
def test_draws_are_those_of_an_exponential_mechanism_over_queries_and_negations(workload, table, beta):
    draws = 6000
    drawn = curator().draw(workload, table, rho=draws / (2 * beta**2), draws=draws)
    scores = excess(ROWS, table, workload)
    assert p_value(drawn, law(scores, beta)) > FLOOR
    for factor in (0.8, 1.25):
        assert p_value(drawn, law(scores, factor * beta)) < FLOOR
    assert p_value(drawn, law(np.abs(scores), beta)) < FLOOR, "signs are drawn too"


def test_draws_are_independent_and_with_replacement():
    beta = 20.0
    drawn = curator().draw(CELLS, COUNTED, rho=20_000 / (2 * beta**2), draws=20_000)
    expected = law(excess(ROWS, COUNTED, CELLS), beta)
    pairs = drawn[::2] * expected.size + drawn[1::2]
    assert p_value(pairs, np.outer(expected, expected).ravel()) > FLOOR
    assert np.mean(drawn[::2] == drawn[1::2]) > 0.5 * np.sum(expected**2)


def test_patience_and_tighter_bounds_change_nothing(monkeypatch):
    monkeypatch.setattr(contest, "PATIENCE", 2)
    beta = 8.0
    drawn = np.concatenate([curator(seed=s).draw(MIXED, RELAXED, rho=30 / (2 * beta**2), draws=30) for s in range(60)])
    assert p_value(drawn, law(excess(ROWS, RELAXED, MIXED), beta)) > FLOOR


def test_heavier_queries_are_drawn_more():
    parts = (Marginals(SIZES, ((0, 1),)), Marginals(SIZES, ((2, 0),)))
    weighed = Workload(parts, weights=(Fraction(1), Fraction(2))).by_cell()
    beta, draws = 10.0, 6000
    drawn = curator().draw(weighed, COUNTED, rho=draws / (2 * beta**2), draws=draws)
    factors = np.repeat([0.5, 1.0], [24, 16])
    assert p_value(drawn, law(excess(ROWS, COUNTED, weighed) * factors, beta)) > FLOOR
    assert p_value(drawn, law(excess(ROWS, COUNTED, weighed), beta)) < FLOOR


@given(st.integers(0, 10**6), st.floats(0.5, 30), st.sampled_from(["replace", "add-remove"]))
@settings(deadline=None, max_examples=30)
def test_no_neighbour_moves_a_draw_by_more_than_it_costs(seed, beta, relation):
    """The Rényi divergence of the exact laws of neighbours is at most alpha rho, for all orders looked at."""
    generator = np.random.default_rng(seed)
    rows = some_rows(20, seed, 0.5)
    other = rows.copy()
    place = generator.integers(20)
    if relation == "replace":
        other[place] = [generator.integers(size) for size in SIZES]
    else:
        other = np.delete(rows, place, axis=0)
    laws = [law(excess(which, COUNTED, CELLS, total=20.0), beta) for which in (rows, other)]
    rho = 1 / (2 * beta**2)
    for first, second in (laws, laws[::-1]):
        for order in (1.01, 2.0, 5.0, 50.0):
            divergence = math.log(np.sum(second * (first / second) ** order)) / (order - 1)
            assert divergence <= order * rho * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(("draws", "rho"), [(1, 0.01), (7, 0.3)])
def test_the_scale_is_that_of_all_draws(monkeypatch, draws, rho):
    seen = []
    monkeypatch.setattr(
        contest.Pool, "draw_signed", lambda _, k, scale, bits: seen.append((k, scale)) or np.zeros(k, int)
    )
    curator().draw(CELLS, COUNTED, rho=rho, draws=draws)
    assert seen == [(draws, pytest.approx(math.sqrt(draws / (2 * rho)) * (1 << GRID)))]


# --- keep


@pytest.mark.parametrize(("rate", "margin"), [(3.0, 0.2), (2.0, 0.05), (0.1, 1.0)])
@pytest.mark.parametrize(("workload", "table"), [(CELLS, COUNTED), (MIXED, RELAXED)])
def test_queries_are_kept_by_their_excess(rate, margin, workload, table):
    each = 400
    drawn = np.repeat(np.arange(2 * workload.blocks), each)
    found = curator().keep(workload, table, drawn, rate=rate, margin=margin).reshape(-1, each).sum(axis=1)
    chances = np.exp(rate * (np.minimum(excess(ROWS, table, workload) / 300, 1) - 1) - margin)
    deviations = (found - each * chances) / np.sqrt(each * chances * (1 - chances))
    assert stats.chi2.sf(np.sum(deviations**2), deviations.size) > FLOOR
    flat = np.full(chances.size, chances.mean())
    ignorant = (found - each * flat) / np.sqrt(each * flat * (1 - flat))
    if rate > 0.2:
        assert stats.chi2.sf(np.sum(ignorant**2), ignorant.size) < FLOOR


def test_what_was_drawn_is_kept_in_its_order():
    """With a rate that leaves no doubt: a query that only the rows have stays, its negation goes."""
    rows = np.zeros((300, 3), np.int32)
    table = RowTable(Table(np.array([[3, 2, 1]], np.int32), SIZES), 1)
    found = curator(rows=rows).keep(CELLS, table, [1, 0, 0, 1, 22], rate=200.0, margin=1e-3)
    assert found.tolist() == [False, True, True, False, False]


def test_scores_are_cut_at_the_total():
    """Where rows are added or removed the public total may be below a count."""
    scores = np.full(4000, 3 * 100 << GRID)
    assert kept(scores, 100.0, 5.0, 0.7, SeededBits(1)).mean() == pytest.approx(math.exp(-0.7), abs=0.04)


@given(st.floats(-1, 1), st.floats(1e-3, 3), st.floats(1e-3, 2), st.integers(2, 100))
@settings(deadline=None)
def test_no_neighbour_moves_a_bit_by_more_than_it_costs(share, rate, margin, total):
    first, second = (math.exp(rate * (min(a, 1.0) - 1) - margin) for a in (share, share + 1 / total))
    rho = keeping_rho(1, rate, margin, float(total))
    for p, q in ((first, second), (second, first)):
        for order in (1.01, 2.0, 8.0, 60.0):
            logs = [order * math.log(p) + (1 - order) * math.log(q)]
            logs.append(order * math.log1p(-p) + (1 - order) * math.log1p(-q))
            divergence = np.logaddexp(*logs) / (order - 1)
            assert divergence <= order * rho * (1 + 1e-9) + 1e-11
    paper = max(rate, rate / margin) / total
    assert abs(math.log(first / second)) <= paper * (1 + 1e-9)
    assert abs(math.log1p(-first) - math.log1p(-second)) <= paper * (1 + 1e-9)


def test_the_cost_of_keeping_is_that_of_every_query():
    width = 0.3 / (50 * (1 - math.exp(-0.1)))
    assert keeping_rho(12, 0.3, 0.1, 50.0) == pytest.approx(12 * width**2 / 8)
    assert keeping_rho(12, 0.3, 0.1, 50.0) > 12 * width**2 / 8
    told = curator()
    told.keep(CELLS, COUNTED, [3, 3, 4], rate=0.3, margin=0.1)
    (spend,) = told.privacy().spends
    assert (spend.kind, spend.rho) == ("keep", keeping_rho(3, 0.3, 0.1, 300.0))


def test_the_cost_of_keeping_is_that_of_exact_numbers_whatever_they_come_as():
    """The bug: with numbers of single precision the cost was computed in single precision, and rounded down."""
    told = curator()
    told.keep(CELLS, COUNTED, [3, 3, 4], rate=np.float32(0.3), margin=np.float32(0.1))
    (spend,) = told.privacy().spends
    assert spend.rho == keeping_rho(3, float(np.float32(0.3)), float(np.float32(0.1)), 300.0)


# --- both


def test_differences_are_errors_with_a_sign():
    counts, estimate = np.array([5, 0, 7]), np.array([0.2, 0.3, 0.7])
    found = differences(counts, estimate, 10.0)
    assert (found / (1 << GRID)).tolist() == pytest.approx([3, -3, 0], abs=2 / (1 << GRID))
    assert np.abs(found).tolist() == errors(counts, estimate, 10.0).tolist()
    huge = np.array([1 << 61, -(1 << 61), 4])
    assert times(huge, 8).tolist() == [1 << 61, -(1 << 61), 32]


STEPS = {
    "draw": lambda told: told.draw(CELLS, COUNTED, rho=told.remaining / 4, draws=5).tolist(),
    "keep": lambda told: told.keep(CELLS, COUNTED, [1, 2, 3, 3, 39], rate=0.5, margin=0.3).tolist(),
}


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
@pytest.mark.parametrize("kind", STEPS)
def test_steps_are_charged_stored_and_resumed(tmp_path, relation, kind):
    def step(rows, **more):
        ledger = Ledger(tmp_path / "ledger")
        return STEPS[kind](Curator(rows, BUDGET, neighbours=relation, ledger=ledger, **more))

    first, rows = step(source()), source()
    assert step(rows, resume=True) == first
    assert rows.asked == 0
    assert [entry.kind for entry in Ledger(tmp_path / "ledger").entries("rows")][-1] == kind


@pytest.mark.parametrize("kind", STEPS)
def test_steps_are_charged_before_rows_are_counted(kind):
    class Broken(Watched):
        def counts(self, sets):
            raise RuntimeError("the engine broke")

    told = Curator(Broken(Table(ROWS, SIZES), SCHEMA), BUDGET)
    with pytest.raises(RuntimeError):
        STEPS[kind](told)
    assert [spend.kind for spend in told.privacy().spends] == [kind]


def test_a_step_beyond_the_budget_is_refused_before_anything_is_counted():
    rows = source()
    told = Curator(rows, BUDGET)
    with pytest.raises(BudgetError):
        told.draw(CELLS, COUNTED, rho=2 * BUDGET.rho)
    with pytest.raises(BudgetError):
        told.keep(CELLS, COUNTED, np.zeros(10**4, int), rate=1e4, margin=1e-3)
    assert rows.asked == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda told: told.draw(Workload(CELLS.parts[:1]), COUNTED, rho=0.001, draws=0), "draws"),
        (lambda told: told.draw(CELLS, COUNTED, rho=0.001, draws=1.5), "draws"),
        (lambda told: told.draw(Workload((Marginals(SIZES, ((0, 1),)),)), COUNTED, rho=0.001), "single"),
        (lambda told: told.draw(Workload((Residuals(SIZES, ((0,),)),)), COUNTED, rho=0.001), "single"),
        (lambda told: told.draw(CELLS, iter([np.zeros(12), np.zeros(8)]), rho=0.001), "estimate"),
        (lambda told: told.draw(CELLS, replace(RELAXED, sizes=(3, 4, 2)), rho=0.001), "estimate"),
        (lambda told: told.draw(CELLS, RowTable(source(), 300), rho=0.001), "estimate"),
        (lambda told: told.draw(CELLS, COUNTED, rho=0.0), "rho"),
        (lambda told: told.draw(CELLS, COUNTED, rho=1e-60), "rho"),
        (lambda told: told.draw(MIXED, replace(RELAXED, functions={}), rho=0.001), "functions"),
        (lambda told: told.keep(CELLS, COUNTED, [40], rate=0.1, margin=0.1), "0 to 39"),
        (lambda told: told.keep(CELLS, COUNTED, [-1], rate=0.1, margin=0.1), "0 to 39"),
        (lambda told: told.keep(CELLS, COUNTED, [[1]], rate=0.1, margin=0.1), "0 to 39"),
        (lambda told: told.keep(CELLS, COUNTED, [], rate=0.1, margin=0.1), "0 to 39"),
        (lambda told: told.keep(CELLS, COUNTED, [1], rate=0.0, margin=0.1), "rate"),
        (lambda told: told.keep(CELLS, COUNTED, [1], rate=math.nan, margin=0.1), "rate"),
        (lambda told: told.keep(CELLS, COUNTED, [1], rate=0.1, margin=0.0), "margin"),
        (lambda told: told.keep(CELLS, COUNTED, [1], rate=0.1, margin=math.inf), "margin"),
    ],
)
def test_what_is_wrong_is_refused_before_the_charge(call, message):
    told = Curator(source(), BUDGET)
    with pytest.raises((WorkloadError, ParameterError), match=message):
        call(told)
    assert told.privacy().spends == ()
