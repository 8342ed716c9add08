"""RAP's own arithmetic: how budgets grow, which settings it takes, what it measures, and the prior of its selection."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.rap import RAP
from anamorph.queries.custom import CustomCells, custom
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (5, 3, 4)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
WORKLOAD = Workload((Marginals(SIZES, ((0, 1), (1, 2), (0, 2))),))


@given(st.integers(2, 80), st.floats(1e-6, 10), st.floats(1, 3), st.floats(0.05, 0.95))
def test_budgets_grow_and_never_exceed_the_whole(rounds, rho, growth, split):
    plan = RAP(rounds=rounds, growth=growth, split=split).plan(rho)
    budgets = [planned.rho for planned in plan]
    assert len(plan) == rounds
    assert sum(map(Fraction, budgets)) <= Fraction(rho)
    assert sum(budgets) == pytest.approx(rho)
    assert budgets == sorted(budgets)
    assert budgets[-1] / budgets[0] == pytest.approx(growth ** min(rounds - 1, 15))
    for planned in plan:
        selection, measurement = planned.shares()
        assert Fraction(selection) + Fraction(measurement) <= Fraction(planned.rho)
        assert selection == pytest.approx(split * planned.rho)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_prior_is_of_the_popular_codes_of_the_table(share):
    made = RAP(prior=share, rows=30)
    model = made.projection().init(SIZES, seed=2)
    table, prior = made.compare(WORKLOAD.by_cell(), model)
    assert prior is not None
    assert prior.share == share
    ones = Workload((Marginals(SIZES, ((0,), (1,), (2,))),))
    np.testing.assert_allclose(prior.popular, np.concatenate(list(model.answers(ones))), atol=1e-6)
    assert np.all((prior.popular >= 0) & (prior.popular <= 1))
    np.testing.assert_array_equal(table.lines, model.probabilities)
    np.testing.assert_array_equal(table.weights, model.weights)
    assert table.functions == {}


def test_equal_weights_need_no_prior():
    model = RAP(rows=5).projection().init(SIZES, seed=0)
    assert RAP(prior=0.0).compare(WORKLOAD.by_cell(), model)[1] is None


@pytest.mark.parametrize(
    ("made", "simplex", "rate"),
    [
        (RAP(), "softmax", 0.01),
        (RAP(simplex="sparsemax"), "sparsemax", 0.001),
        (RAP(blocks=True), "sparsemax", 0.03),
        (RAP(rounds=1), "sparsemax", 0.03),
        (RAP(blocks=True, simplex="softmax", rate=0.2), "softmax", 0.2),
    ],
)
def test_what_is_not_set_is_chosen_by_what_is_measured(made, simplex, rate):
    assert (made.projection().simplex, made.projection().rate) == (simplex, rate)


THRESHOLDS = Workload((Thresholds(SIZES, ((0, 1, 2),), 2), Thresholds(SIZES, ((0, 1, 2), (0, 1)), 1)))
FUNCTION = custom(lambda row: row["c1"], SCHEMA, name="mine:own")


def test_whole_blocks_of_thresholds_are_measured_as_their_marginals():
    for made in (RAP(blocks=True), RAP(rounds=1)):
        queries = made.queries(THRESHOLDS)
        assert [type(part) for part in queries.parts] == [Marginals, Marginals]
        assert [features for part in queries.parts for features in part.sets] == [(0, 1, 2), (0, 1)]
    assert [type(part) for part in RAP().queries(THRESHOLDS).parts] == [Cells, Cells]
    assert RAP().queries(THRESHOLDS).blocks == 60 + 60 + 15


def test_functions_are_measured_at_once_or_one_by_one():
    mixed = Workload((Marginals(SIZES, ((0, 1), (1, 2))), FUNCTION))
    assert RAP(rounds=1).steps_for(mixed, 1.0)[0].cells == 15 + 12 + 3
    assert RAP(rounds=2, per_round=3).steps_for(mixed, 1.0)[0].blocks == 30
    with pytest.raises(WorkloadError, match="set blocks=false, or rounds=1"):
        RAP(rounds=2, per_round=1, blocks=True).steps_for(mixed, 1.0)
    one = custom(lambda row: row["c1"][0], SCHEMA, name="mine:one")
    assert len(RAP(rounds=2, per_round=1, blocks=True).steps_for(Workload((*mixed.parts[:1], one)), 1.0)) == 4


def test_a_selection_compares_with_what_the_table_answers_to_functions():
    made = RAP(rows=30)
    model = made.projection().init(SIZES, seed=2)
    queries = made.queries(Workload((FUNCTION, *WORKLOAD.parts)))
    table, _ = made.compare(queries, model)
    (answers,) = model.answers(Workload((Marginals(SIZES, ((1,),)),)))
    np.testing.assert_allclose(table.functions[FUNCTION.function], answers, atol=1e-6)


@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_the_worst_answered_query_is_selected_whatever_its_class(prior):
    """All rows have one value of c1, which the function alone asks for; the marginal is nearly as the start has it."""
    codes = np.stack([np.arange(3000) % 5, np.zeros(3000, np.int64), np.arange(3000) % 4], axis=1).astype(np.int32)
    mixed = Workload((Marginals(SIZES, ((0, 2),)), FUNCTION))
    made = RAP(rounds=2, per_round=1, rows=30, steps=1, prior=prior)
    queries, model = made.queries(mixed), made.projection().init(SIZES, seed=0)
    selected = []
    for seed in range(10):
        curator = Curator(TableSource(Table(codes, SIZES), SCHEMA), Budget(epsilon=5.0, delta=1e-6), unsafe_seed=seed)
        estimate, lean = made.compare(queries, model)
        chosen = curator.select(queries, estimate, rho=0.0005, prior=lean)
        selected += [type(part) for part in queries.take(chosen).parts]
    assert selected.count(CustomCells) >= 9


def test_memory_is_of_the_table_of_what_is_held_and_of_what_is_measured():
    large = Workload((Thresholds((300,) * 3, ((0, 1, 2), (2, 1, 0)), 2),))
    table = 4 * 900 * RAP().rows
    assert RAP(rows=5000).memory(large) - RAP().memory(large) >= 3 * 4 * table  # the table, and Adam's two moments
    assert RAP(rounds=1).memory(large) > 8 * 27 * 10**6  # the marginal is measured whole
    for made in (RAP(), RAP(rounds=1), RAP(rounds=2, per_round=1, blocks=True)):
        needed = [made.memory(replace(large, limit=1 << power)) for power in (14, 18, 22)]
        assert needed == sorted(needed)
        assert needed[0] > table


def test_marginals_of_a_given_order_are_measured_in_place_of_larger_ones():
    made = RAP(rounds=1, order=2).queries(THRESHOLDS)
    assert [part.sets for part in made.parts] == [((0, 1), (0, 2), (1, 2))]
    assert RAP(rounds=1, order=1).queries(THRESHOLDS).parts[0].sets == ((0,), (1,), (2,))
    assert RAP(rounds=1, order=3).queries(THRESHOLDS).digest == RAP(rounds=1).queries(THRESHOLDS).digest
    assert RAP(order=2).queries(THRESHOLDS).digest == RAP().queries(THRESHOLDS).digest  # single queries are themselves


@pytest.mark.parametrize("prior", [-0.1, 0.9999, 1.0])
def test_a_prior_that_a_selection_would_refuse_is_refused_at_once(prior):
    with pytest.raises(ParameterError, match="prior"):
        RAP(prior=prior)


def test_budgets_are_planned_for_the_answers_of_least_squares():
    sizes = (2, 3, 40)
    workload = Workload((Marginals(sizes, ((0, 1), (1, 2))),))
    equal = RAP(rounds=1, blocks=True).queries(workload)
    assert (equal.blocks, equal.weights) == (2, ())
    total, most = (RAP(rounds=1, blocks=True, budgets=budgets).queries(workload) for budgets in ("total", "max"))
    for found in (total, most):
        assert {features for part in found.parts for features in part.sets} >= {(0, 1), (1, 2)}
    shares = {features: w for part, w in zip(total.parts, total.weights, strict=True) for features in part.sets}
    assert shares[1, 2] > 3 * shares[0, 1], "a marginal of twenty times the cells has more of the budget"
    even = {features: w for part, w in zip(most.parts, most.weights, strict=True) for features in part.sets}
    assert even[1, 2] < 2 * even[0, 1]


@pytest.mark.parametrize("settings", [{"budgets": "best", "rounds": 1}, {"budgets": "max"}])
def test_budgets_that_cannot_be_planned_are_refused(settings):
    with pytest.raises(ParameterError, match=r"budgets \('(best|max)'\) must be equal"):
        RAP(**settings)
