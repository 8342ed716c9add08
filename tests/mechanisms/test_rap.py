"""RAP's own arithmetic: how budgets grow, which settings it takes, and the prior of its selection."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anamorph.mechanisms.rap import RAP
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload

SIZES = (5, 3, 4)
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
def test_the_prior_is_a_distribution_that_leans_to_popular_cells(share):
    made = RAP(prior=share, rows=30)
    model = made.projection().init(SIZES, seed=2)
    lean = made.lean(WORKLOAD, model)
    assert lean is not None
    weights = np.exp(np.concatenate(list(lean)))
    assert weights.mean() == pytest.approx(1, abs=1e-5)
    popular = np.concatenate(list(model.popularity(WORKLOAD)))
    assert np.argmax(weights) == np.argmax(popular)
    assert weights.min() >= 1 - share - 1e-6


def test_equal_weights_need_no_prior():
    model = RAP(rows=5).projection().init(SIZES, seed=0)
    assert RAP(prior=0.0).lean(WORKLOAD, model) is None
    assert RAP(blocks=True).lean(WORKLOAD, model) is None


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
