"""Strategies: predicted variances are those of dense least squares, and no other strategy of the kind does better."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import marginal_cells, squared_sensitivity
from anamorph.errors import WorkloadError
from anamorph.models.least_squares import least_squares
from anamorph.queries import strategies as module
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.strategies import RESOLUTION, Design, Strategy, marginals_telling, maximal, strategy
from anamorph.queries.workload import WHOLE, Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SIZES = (3, 2, 4)


@st.composite
def designs(draw, smallest=1):
    sizes = tuple(draw(st.lists(st.integers(smallest, 4), min_size=2, max_size=4).filter(lambda s: max(s) > 1)))
    every = [f for order in (1, 2, 3) for f in itertools.combinations(range(len(sizes)), order)]
    free = [features for features in every if max(sizes[f] for f in features) > 1]
    sets = draw(st.lists(st.sampled_from(free), min_size=1, max_size=4, unique=True))
    return Design(sizes, {features: draw(st.floats(0.2, 5)) for features in sets})


def summing(sizes, features):
    """The matrix that takes the cells of the whole table to those of a marginal."""
    codes = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    places = np.ravel_multi_index([codes[f] for f in features], [sizes[f] for f in features])
    matrix = np.zeros((marginal_cells(sizes, features), math.prod(sizes)))
    matrix[places, np.arange(math.prod(sizes))] = 1
    return matrix


def centring(cells):
    return np.eye(cells) - 1 / cells


def dense_variances(design, precisions, *, residuals):
    """Of a cell of each marginal asked: W (C A^T T A C)^+ W^T, C since the cells of the table sum to 1."""
    information = np.zeros((math.prod(design.sizes),) * 2)
    for features, precision in zip(design.sets, precisions, strict=True):
        matrix = summing(design.sizes, features)
        if residuals:
            for axis, feature in enumerate(features):
                shaped = matrix.reshape([design.sizes[f] for f in features] + [-1])
                matrix = (shaped - shaped.mean(axis=axis, keepdims=True)).reshape(matrix.shape)
                assert design.sizes[feature] > 1
        information += precision * matrix.T @ matrix
    centre = centring(len(information))
    covariance = np.linalg.pinv(centre @ information @ centre, rcond=1e-10, hermitian=True)
    found = []
    for features in design.asked:
        asked = summing(design.sizes, features) @ centre
        variances = np.diag(asked @ covariance @ asked.T)
        assert variances == pytest.approx(variances[0], abs=1e-9)
        found.append(variances[0])
    return np.array(found)


@given(designs(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_predicted_variances_are_those_of_dense_least_squares(design, seed):
    precisions = np.random.default_rng(seed).uniform(0.2, 2, len(design.sets))
    found = design.variances(precisions)
    assert found == pytest.approx(dense_variances(design, precisions, residuals=True), rel=1e-6)
    found = design.variances(precisions @ design.reach)
    assert found == pytest.approx(dense_variances(design, precisions, residuals=False), rel=1e-6)


def residual_loss(design, weights, precisions):
    return float(weights @ design.variances(precisions))


def marginal_loss(design, weights, precisions):
    return float(weights @ design.variances(precisions @ design.reach))


@given(designs(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_no_precisions_of_residuals_at_the_same_cost_do_better(design, seed):
    """Far away and near by; the cost of a residual is what one row added moves."""
    generator = np.random.default_rng(seed)
    weights = design.weights()
    cost = np.array([float(Residual(design.sizes, f).kappa) for f in design.sets])
    assert design.kappa == pytest.approx(cost)
    best = design.residual_precisions(weights)
    assert best @ cost == pytest.approx(1)
    least = residual_loss(design, weights, best)
    for spread in (1e-3, 0.1, 2.0):
        for _ in range(5):
            other = best * np.exp(spread * generator.normal(size=best.size))
            assert residual_loss(design, weights, other / (other @ cost)) >= least * (1 - 1e-12)


@given(designs(smallest=2))
@settings(max_examples=30, deadline=None)
def test_residuals_reach_the_least_loss_of_any_linear_strategy(design):
    """The bound of Li & Miklau 2013: the squared sum of the singular values of all queries, over the cells."""
    weights = design.weights()
    queries = [math.sqrt(weight) * summing(design.sizes, features) for features, weight in design.asked.items()]
    centre = centring(math.prod(design.sizes))
    values = np.linalg.svd(np.concatenate(queries) @ centre, compute_uv=False)
    bound = values.sum() ** 2 / len(centre)
    assert residual_loss(design, weights, design.residual_precisions(weights)) == pytest.approx(bound, rel=1e-6)


@given(designs())
@settings(max_examples=25, deadline=None)
def test_every_step_lowers_the_loss_of_marginals(design):
    weights = design.weights()
    found = design.marginal_precisions(weights, steps=0)
    before = marginal_loss(design, weights, found)
    bound = residual_loss(design, weights, design.residual_precisions(weights))
    for steps in (1, 1, 1, 5, 20, 100):
        found = design.marginal_precisions(weights, found, steps)
        assert found.sum() == pytest.approx(1)
        assert found.min() >= 0
        after = marginal_loss(design, weights, found)
        assert bound * (1 - 1e-9) <= after <= before * (1 + 1e-12)
        before = after


@given(designs())
@settings(max_examples=15, deadline=None)
def test_the_last_step_is_nearly_optimal(design):
    """The loss f is convex, and sum t g = f: at most max g - f can be gained, g its gradient less its sign."""
    weights = design.weights()
    found = design.marginal_precisions(weights)
    known = found @ design.reach
    matter = weights @ design.spread
    slopes = design.reach @ (matter / known**2)
    loss = marginal_loss(design, weights, found)
    assert found @ slopes == pytest.approx(loss)
    assert slopes.max() <= loss * 1.01
    numeric = [
        (marginal_loss(design, weights, found) - marginal_loss(design, weights, found + 1e-7 * unit)) / 1e-7
        for unit in np.eye(len(found))
    ]
    assert numeric == pytest.approx(slopes, rel=1e-2, abs=1e-3 * loss)


def test_marginals_by_hand():
    """One marginal of one column: measured itself. Two columns asked one by one: half of the budget each."""
    assert strategy((4,), {(0,): 1.0}, residuals=False).precisions == {(0,): 1.0}
    found = strategy((4, 4, 3), {(0,): 1.0, (1,): 1.0}, residuals=False).precisions
    assert found == pytest.approx({(0,): 0.5, (1,): 0.5})
    heavy = strategy((4, 4), {(0,): 4.0, (1,): 1.0}, residuals=False).precisions
    assert heavy == pytest.approx({(0,): 2 / 3, (1,): 1 / 3})
    of_residuals = strategy((4, 4), {(0,): 4.0, (1,): 1.0}, residuals=True).precisions
    assert of_residuals[(0,)] == pytest.approx(2 * of_residuals[(1,)])
    assert sum(of_residuals.values()) * 3 / 4 == pytest.approx(1)


ASKED = {
    "pairs": ((3, 2, 5), {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}),
    "weights": ((3, 2, 5), {(0, 1): 1.0, (0, 2): 4.0, (1, 2): 0.5}),
    "orders": ((2, 10, 4, 3), {(0, 1, 2): 1.0, (3,): 1.0, (1, 3): 1.0}),
    "one value": ((3, 1, 4), {(0, 1): 1.0, (1, 2): 1.0}),
}


@pytest.mark.parametrize("residuals", [True, False])
@pytest.mark.parametrize("name", ASKED)
def test_the_largest_variance_is_smaller_where_it_is_what_is_minimised(name, residuals):
    sizes, asked = ASKED[name]
    design = Design(sizes, asked)
    importance = np.array(list(asked.values()))
    found = {}
    for objective in ("total", "max"):
        made = strategy(sizes, asked, residuals=residuals, objective=objective)
        precisions = np.array([made.precisions.get(features, 0.0) for features in design.sets])
        cost = precisions @ design.kappa if residuals else precisions.sum()
        assert cost == pytest.approx(1, rel=1e-4)
        variances = importance * design.variances(precisions if residuals else precisions @ design.reach)
        total = float(variances @ [marginal_cells(sizes, features) for features in asked])
        found[objective] = variances, total
    (by_total, least), (evened, more) = found["total"], found["max"]
    assert evened.max() <= by_total.max() * (1 + 1e-9)
    assert least <= more * (1 + 1e-6)
    if by_total.max() > 1.05 * by_total.min():
        assert evened.max() < 0.99 * by_total.max()
        matter = evened > 0.5 * evened.max()  # what a larger marginal tells anyway may be better known
        assert matter.sum() >= 2
        assert evened[matter].min() > 0.9 * evened.max()


def test_even_weights_certify_the_least_largest_variance():
    """With weights w that sum to 1, the least of sum w Var is a bound on the largest: it is nearly reached."""
    sizes, asked = ASKED["orders"]
    design = Design(sizes, asked)
    made = strategy(sizes, asked, residuals=True, objective="max")
    precisions = np.array([made.precisions[features] for features in design.sets])
    worst = design.variances(precisions).max()
    weights = np.ones(len(asked))
    bound = 0.0
    for _ in range(400):
        best = design.residual_precisions(weights)
        bound = max(bound, residual_loss(design, weights, best) / weights.sum())
        weights = weights * design.variances(best)
        weights /= weights.sum()
    assert bound * (1 - 1e-9) <= worst <= bound * 1.02


@pytest.mark.parametrize("residuals", [True, False])
@pytest.mark.parametrize("objective", ["total", "max"])
def test_the_weights_of_the_workload_are_the_precisions(residuals, objective):
    sizes, asked = ASKED["orders"]
    made = strategy(sizes, asked, residuals=residuals, objective=objective)
    workload = made.workload()
    assert {type(part) for part in workload.parts} == {Residuals if residuals else Marginals}
    found = {piece.tally.features: piece.weight for piece in workload.pieces(WHOLE)}
    assert found.keys() == made.precisions.keys()
    assert len(set(workload.weights)) == len(workload.weights), "one part for each weight"
    largest = max(made.precisions.values())
    for features, precision in made.precisions.items():
        assert isinstance(found[features], Fraction)
        assert abs(found[features] - Fraction(precision / largest)) <= Fraction(1, RESOLUTION)
        assert found[features] > 0
    assert max(found.values()) == 1


def test_a_precision_next_to_nothing_is_measured_all_the_same():
    made = Strategy(SIZES, {(0,): 1.0, (1,): 1e-30, (2,): 1.0}, residuals=True)
    workload = made.workload()
    assert workload.weights == (1, Fraction(1, RESOLUTION))
    assert [part.sets for part in workload.parts] == [((0,), (2,)), ((1,),)]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("residuals", [True, False])
@pytest.mark.parametrize("name", ["pairs", "weights", "orders"])
def test_predicted_variances_are_those_of_a_real_measurement(name, residuals, relation):
    """Precisions t at a cost of s are those of rho = 1/2: for another rho, times 2 rho / s."""
    sizes, asked = ASKED[name]
    design, made = Design(sizes, asked), strategy(sizes, asked, residuals=residuals)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    rows = np.stack([np.random.default_rng(i).integers(0, size, 1000) for i, size in enumerate(sizes)], 1)
    source = TableSource(Table(rows.astype(np.int32), sizes), schema)
    curator = Curator(source, Budget(epsilon=1.0, delta=1e-6), neighbours=relation, unsafe_seed=1)
    total, rho = curator.total, 0.01
    workload = made.workload()
    found = least_squares(sizes, (curator.measure(workload, rho=rho),))
    pieces = list(workload.pieces(WHOLE))
    precisions = np.array([made.precisions.get(features, 0.0) for features in design.sets])
    weights = [Fraction(made.precisions[piece.tally.features]) for piece in pieces]
    cost = float(squared_sensitivity([piece.tally for piece in pieces], relation, weights))
    if relation == "add-remove" or not residuals:
        assert cost == pytest.approx(1 if relation == "add-remove" else 2, rel=1e-4)
    else:
        assert 2 <= cost < 2.5
    predicted = design.variances(precisions if residuals else precisions @ design.reach) * cost / (2 * rho)
    for features, variance in zip(asked, predicted, strict=True):
        cell = np.zeros([sizes[feature] for feature in features])
        cell.flat[1] = 1
        assert (found.weighted(features, cell).sigma * total) ** 2 == pytest.approx(variance, rel=1e-4)


def test_marginals_that_say_next_to_nothing_are_left_out_if_others_tell_of_them():
    sizes, asked = (10, 10), {(0, 1): 1.0}
    made = strategy(sizes, asked, residuals=False)
    assert (0, 1) in made.precisions
    assert set(made.precisions) <= {(0,), (1,), (0, 1)}
    tiny = {(0, 1): 1e-30, (0,): 1.0, (1,): 1.0}
    assert (0, 1) in strategy(sizes, tiny, residuals=False).precisions, "nothing else tells of the pair"
    for name, (sizes_of, wanted) in ASKED.items():
        found = strategy(sizes_of, wanted, residuals=False)
        tops = maximal(Design(sizes_of, wanted).sets)
        assert tops <= set(found.precisions), name
        least = module.NEGLIGIBLE * max(found.precisions.values())
        assert all(t > least for features, t in found.precisions.items() if features not in tops)


def test_what_no_strategy_is_found_for_is_refused(monkeypatch):
    with pytest.raises(WorkloadError, match="must have a column with more than one value"):
        strategy((1, 1), {(0, 1): 1.0}, residuals=True)
    with pytest.raises(WorkloadError, match="fewer or smaller marginals"):
        strategy((2,) * 20, {tuple(range(20)): 1.0}, residuals=False)
    with pytest.raises(WorkloadError, match="take strategy=marginals"):
        strategy((4096, 2048, 2), {(0, 1, 2): 1.0}, residuals=True)
    assert len(strategy((4096, 2048, 2), {(0, 1, 2): 1.0}, residuals=False).precisions) >= 1
    assert len(strategy((4096, 2048), {(0, 1): 1.0}, residuals=True).precisions) == 3


def test_columns_of_one_value_are_no_part_of_a_strategy():
    sizes, asked = ASKED["one value"]
    assert Design(sizes, asked).sets == [(0,), (2,)]
    for residuals in (True, False):
        plain = strategy((3, 4), {(0,): 1.0, (1,): 1.0}, residuals=residuals).precisions
        found = strategy(sizes, asked, residuals=residuals).precisions
        assert list(found.values()) == pytest.approx(list(plain.values()))


def test_sets_inside_no_other():
    assert maximal([(0,), (0, 1), (1,), (2,), (0, 1, 3), (1, 2)]) == {(0, 1, 3), (1, 2)}


QUERIES = Residuals(SIZES, ((0, 1), (2,), (2, 0)))


def test_residuals_are_whole_blocks_whatever_the_limit():
    assert (QUERIES.blocks, QUERIES.cells, QUERIES.largest_block) == (3, 6 + 4 + 12, 12)
    for limit in (1, 5, WHOLE):
        pieces = list(QUERIES.pieces(limit))
        assert [piece.tally for piece in pieces] == [Residual(SIZES, features) for features in QUERIES.sets]
        assert [(piece.first, piece.blocks) for piece in pieces] == [(0, 1), (1, 1), (2, 1)]
    assert QUERIES.take([2, 0]) == Residuals(SIZES, ((2, 0), (0, 1)))
    assert Workload((QUERIES,)).take([1]).parts == (Residuals(SIZES, ((2,),)),)
    assert QUERIES.measured() is QUERIES
    with pytest.raises(WorkloadError, match="measured whole"):
        QUERIES.by_cell()


@pytest.mark.parametrize("sets", [((),), ((0, 0),), ((3,),), ((-1,),), ((0,), (1, 1))])
def test_sets_that_are_none_are_refused(sets):
    with pytest.raises(WorkloadError, match="one or more distinct columns"):
        Residuals(SIZES, sets)


@given(designs(), st.integers(0, 10**6))
@settings(deadline=None)
def test_marginals_tell_what_they_told(design, seed):
    precisions = np.random.default_rng(seed).uniform(0.1, 3, len(design.sets))
    known = dict(zip(design.sets, (precisions @ design.reach).tolist(), strict=True))
    found = marginals_telling(design.sizes, known)
    assert [found[features] for features in design.sets] == pytest.approx(precisions.tolist(), abs=1e-9)


def test_marginals_of_what_larger_ones_tell_better_are_told_nothing():
    known = {(0,): 0.1, (1,): 5.0, (0, 1): 3.0}
    assert marginals_telling((2, 3), known) == {(0, 1): 3.0, (0,): 0.0, (1,): pytest.approx(5.0 - 3.0 / 2)}
