"""Least squares against dense linear algebra: estimates, variances, what is known at all, and no cell below 0."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from anamorph.columns import Codes
from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import AtLeast, GroupBy, marginal_cells
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models.graphical import GraphicalModel
from anamorph.models.least_squares import LeastSquares, Part, as_marginals, centred, least_squares, nonnegative, subsets
from anamorph.models.relaxed import RelaxedProjection
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema


def summing(sizes, features):
    """The matrix that takes the cells of the whole table to those of a marginal, in C order of the features."""
    cells = np.arange(math.prod(sizes))
    codes = np.unravel_index(cells, sizes)
    places = np.ravel_multi_index([codes[f] for f in features], [sizes[f] for f in features])
    matrix = np.zeros((marginal_cells(sizes, features), cells.size))
    matrix[places, cells] = 1
    return matrix


def projection(shape):
    matrix = np.ones((1, 1))
    for size in shape:
        matrix = np.kron(matrix, np.eye(size) - 1 / size)
    return matrix


def matrix_of(tally):
    """What a marginal or a residual asks of the cells of the whole table."""
    summed = summing(tally.sizes, tally.features)
    return projection(tally.shape) @ summed if isinstance(tally, Residual) else summed


class Dense:
    """Generalised least squares for the cells of a whole table, which sum to 1, of any sign.

    p = 1/N + Z q, Z a basis of what sums to 0: the rows [A Z / sigma] q = (y - A 1/N) / sigma are solved as they are.
    """

    def __init__(self, sizes, measurements):
        cells = math.prod(sizes)
        self.sizes, self.start = sizes, np.full(cells, 1 / cells)
        self.basis = np.linalg.svd(np.ones((1, cells)))[2][1:].T
        rows, wanted = [np.zeros((0, cells))], [np.zeros(0)]
        for measurement in measurements:
            first = 0
            for piece, sigma in zip(measurement.workload.pieces(), measurement.sigma, strict=True):
                values = measurement.values[first : first + piece.tally.cells]
                rows.append(matrix_of(piece.tally) / sigma)
                wanted.append(values / sigma)
                first += piece.tally.cells
        self.rows, self.wanted = np.concatenate(rows), np.concatenate(wanted)
        design = np.round(self.rows @ self.basis, 13)  # what is 0 is 0, whatever the rest is
        solved = np.linalg.lstsq(design, self.wanted - self.rows @ self.start, rcond=1e-10)[0]
        self.cells = self.start + self.basis @ solved
        self.inverse = np.linalg.pinv(design.T @ design, rcond=1e-10, hermitian=True)
        self.seen = np.linalg.pinv(design, rcond=1e-10) @ design

    def knows(self, queries):
        """Whether queries are combinations of what was measured."""
        asked = queries @ self.basis
        return np.allclose(asked @ self.seen, asked, atol=1e-7)

    def covariance(self, queries):
        asked = queries @ self.basis
        return asked @ self.inverse @ asked.T


def noisy(workload, seed, sigmas=None):
    generator = np.random.default_rng(seed)
    sigma = generator.uniform(0.5, 2, workload.blocks) if sigmas is None else np.array(sigmas)
    return Measurement(workload, generator.normal(0.2, 1, workload.cells), sigma, 100.0)


@st.composite
def measured(draw, smallest=1):
    """Sizes, and one or two measurements of marginals in any order of columns, some twice, and of residuals."""
    sizes = tuple(draw(st.lists(st.integers(smallest, 3), min_size=2, max_size=4).filter(lambda s: max(s) > 1)))
    every = [f for order in (1, 2, 3) for f in itertools.permutations(range(len(sizes)), order)]
    free = [features for features in every if min(sizes[f] for f in features) > 1]
    measurements = []
    for _ in range(draw(st.integers(1, 2))):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            kind, among = draw(st.sampled_from([(Marginals, every), (Marginals, every), (Residuals, free)]))
            parts.append(kind(sizes, tuple(draw(st.lists(st.sampled_from(among), min_size=1, max_size=2)))))
        measurements.append(noisy(Workload(tuple(parts)), draw(st.integers(0, 999))))
    return sizes, measurements


@given(measured())
@settings(max_examples=150, deadline=None)
def test_estimates_and_variances_are_those_of_dense_least_squares(made):
    sizes, measurements = made
    found, dense = least_squares(sizes, measurements), Dense(sizes, measurements)
    generator = np.random.default_rng(0)
    for order in range(1, len(sizes) + 1):
        for features in itertools.permutations(range(len(sizes)), order):
            queries = summing(sizes, features)
            if not found.knows(features):
                assert not dense.knows(queries)
                with pytest.raises(ParameterError, match="must be one that was measured"):
                    found.marginal(features)
                continue
            assert dense.knows(queries)
            np.testing.assert_allclose(found.marginal(features), queries @ dense.cells, atol=1e-8)
            if features != tuple(sorted(features)):
                continue
            weights = generator.normal(size=[sizes[feature] for feature in features])
            value, sigma = found.weighted(features, weights)
            assert value == pytest.approx(weights.ravel() @ queries @ dense.cells, abs=1e-8)
            covariance = dense.covariance(queries)
            assert sigma**2 == pytest.approx(weights.ravel() @ covariance @ weights.ravel(), abs=1e-8)
            first = np.zeros_like(weights)
            first.flat[-1] = 1
            assert found.weighted(features, first).sigma ** 2 == pytest.approx(covariance[0, 0], abs=1e-8)


@given(measured(smallest=2), st.data())
@settings(max_examples=30, deadline=None)
def test_thresholds_slabs_and_single_cells_are_sums_of_the_same_marginal(made, data):
    sizes, measurements = made
    features = data.draw(st.permutations(range(len(sizes)))).copy()[: data.draw(st.integers(1, 3))]
    features = tuple(features)
    log = [*measurements, noisy(Workload((Marginals(sizes, (features,)),)), 1)]
    found, dense = least_squares(sizes, log), Dense(sizes, log)
    codes = np.stack(np.unravel_index(np.arange(marginal_cells(sizes, features)), [sizes[f] for f in features]), 1)
    for least in range(1, len(features) + 1):
        alike = (codes[:, None] == codes).sum(axis=2) >= least
        expected = alike @ summing(sizes, features) @ dense.cells
        workload = Workload((Thresholds(sizes, (features,), least),))
        for limit in (1, 2, 1 << 40):
            pieces = [found.answer(piece.tally) for piece in workload.pieces(limit)]
            np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-8)
        chosen = [codes.shape[0] - 1, 0]
        picked = workload.by_cell().take(chosen)
        np.testing.assert_allclose(np.concatenate(list(found.answers(picked))), expected[chosen], atol=1e-8)


SIZES = (3, 2, 4)
PAIR = noisy(Workload((Marginals(SIZES, ((2, 0),)),)), 3)


def test_one_marginal_alone_is_made_to_sum_to_one():
    """By hand: the same is added to every cell."""
    found = least_squares(SIZES, (PAIR,))
    shaped = PAIR.values.reshape(4, 3)
    expected = shaped + (1 - shaped.sum()) / 12
    np.testing.assert_allclose(found.marginal((2, 0)), expected.ravel())
    np.testing.assert_allclose(found.marginal((0, 2)), expected.T.ravel())
    np.testing.assert_allclose(found.marginal((0,)), expected.sum(axis=0))
    cell = np.zeros((3, 4))
    cell[1, 2] = 1
    assert found.weighted((0, 2), cell).sigma == pytest.approx(PAIR.sigma[0] * math.sqrt(1 - 1 / 12))
    assert found.weighted((0, 2), np.ones((3, 4))) == pytest.approx((1, 0), abs=1e-7)


def test_two_measurements_of_one_marginal_are_weighed_by_their_precision():
    """0.5 with a sigma of 1 and 0.9 with one of 2: (0.5 + 0.9 / 4) / (1 + 1/4); variance (1 / 1.25) (1 - 1/2)."""
    workload = Workload((Marginals((2,), ((0,),)),))
    log = [
        Measurement(workload, np.array([0.5, 0.5]), np.array([1.0]), 10.0),
        Measurement(workload, np.array([0.9, 0.1]), np.array([2.0]), 10.0),
    ]
    found = least_squares((2,), log)
    assert found.marginal((0,)) == pytest.approx([0.725 / 1.25, 0.525 / 1.25])
    assert found.weighted((0,), np.array([1.0, 0])).sigma ** 2 == pytest.approx(0.4)
    assert found.parts[(0,)].variance == pytest.approx(0.8)


def test_only_what_was_measured_whole_is_looked_at():
    """Between thresholds, single cells and functions, each with numbers of its own, nothing shifts."""
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    function = custom(lambda row: row["c0"] / 2, schema, name="tests:half")
    other = Workload((Marginals(SIZES, ((0, 1), (1, 2))),)).by_cell().take([4, 9, 1]).parts
    whole = Marginals(SIZES, ((1, 0), (2,)))
    crowd = (function, Thresholds(SIZES, ((0, 1),), 1), whole, *other, Residuals(SIZES, ((0, 2),)), function.by_cell())
    workload = Workload(crowd, weights=tuple(Fraction(i + 1) for i in range(len(crowd))))
    log = noisy(workload, 4)
    first = function.cells + 6
    kept = np.concatenate([log.values[first : first + 10], log.values[first + 10 + 3 : first + 10 + 3 + 12]])
    sigmas = [*log.sigma[2:4], log.sigma[4 + 3]]
    plain = Measurement(Workload((whole, Residuals(SIZES, ((0, 2),)))), kept, np.array(sigmas), 100.0)
    found, expected = least_squares(SIZES, (log,)), least_squares(SIZES, (plain,))
    assert set(found.parts) == {(0,), (1,), (0, 1), (2,), (0, 2)}
    for features, part in expected.parts.items():
        np.testing.assert_allclose(found.parts[features].values, part.values)
        assert found.parts[features].variance == pytest.approx(part.variance)


def test_all_cells_one_by_one_are_a_whole_marginal():
    log = noisy(Workload((Marginals(SIZES, ((2, 0),)),)).by_cell(), 5, np.full(12, 0.7))
    found = least_squares(SIZES, (log,))
    expected = least_squares(SIZES, (Measurement(PAIR.workload, log.values, np.array([0.7]), 100.0),))
    np.testing.assert_allclose(found.marginal((0, 2)), expected.marginal((0, 2)))


def test_what_does_not_follow_is_refused():
    found = least_squares(SIZES, (PAIR,))
    function = custom(
        lambda row: row["c0"] / 2, Schema(tuple(Codes(name=f"c{i}", values=s) for i, s in enumerate(SIZES)))
    )
    for part in (
        Marginals(SIZES, ((0, 1),)),
        Thresholds(SIZES, ((0, 1, 2),), 1),
        Residuals(SIZES, ((0, 2),)),
        function,
    ):
        with pytest.raises(ParameterError, match="must be one that was measured"):
            list(found.answers(Workload((part,))))
    with pytest.raises(ParameterError, match="not rows"):
        found.sample(5, seed=0)
    residual = least_squares(SIZES, (noisy(Workload((Residuals(SIZES, ((0, 2),)),)), 1),))
    assert not residual.knows((0, 2)), "its one-way residuals were not measured"
    assert not residual.knows((0,))


def test_models_of_rows_have_no_residuals():
    workload = Workload((Residuals(SIZES, ((0, 2),)),))
    projection = RelaxedProjection(rows=4, steps=2)
    start = projection.init(SIZES, seed=0)
    for model in (start, GraphicalModel(SIZES)):
        with pytest.raises(ParameterError, match="this model has no residuals"):
            list(model.answers(workload))
    with pytest.raises(ParameterError, match="this model has no residuals"):
        projection.fit(start, (noisy(workload, 0),))


def test_a_column_of_one_value_says_nothing():
    sizes = (1, 3)
    log = noisy(Workload((Marginals(sizes, ((0, 1),)),)), 2)
    found = least_squares(sizes, (log,))
    assert set(found.parts) == {(1,)}
    assert found.knows((0,))
    assert found.marginal((0,)).tolist() == [1.0]
    np.testing.assert_allclose(found.marginal((1, 0)), log.values + (1 - log.values.sum()) / 3)
    assert found.weighted((0,), np.ones(1)) == (1.0, 0.0)


@given(measured(smallest=2))
@settings(max_examples=30, deadline=None)
def test_arrays_make_the_model_again(made):
    sizes, measurements = made
    found = least_squares(sizes, measurements)
    again = LeastSquares.from_arrays(sizes, found.arrays())
    assert again.parts.keys() == found.parts.keys()
    for features, part in found.parts.items():
        np.testing.assert_array_equal(again.parts[features].values, part.values)
        assert again.parts[features].variance == part.variance


MODEL = least_squares(SIZES, (PAIR,))
"""Parts: (0,), (2,), (0, 2)."""


@pytest.mark.parametrize(
    "change",
    [
        {"features.2": np.array([2, 0])},
        {"features.2": np.array([0, 0])},
        {"features.2": np.array([0, 3])},
        {"features.2": np.array([-1, 0])},
        {"features.0": np.array([1])},
        {"features.0": np.array([], np.int64), "values.0": np.array([1.0])},
        {"features.1": np.array([0]), "values.1": np.zeros(3)},
        {"features.1": np.arange(60)},
        {"values.0": np.zeros(2)},
        {"values.0": np.zeros((3, 1))},
        {"values.0": np.array([0.1, np.nan, 0.1])},
        {"values.0": np.array([0.1, np.inf, 0.1])},
        {"variance.1": np.array([-1e-9])},
        {"variance.1": np.array([np.nan])},
        {"variance.1": np.array([np.inf])},
        {"other": np.zeros(1)},
        {"other": np.zeros(1), "another": np.zeros(1)},
    ],
    ids=str,
)
def test_arrays_that_are_no_residuals_are_refused(change):
    arrays = MODEL.arrays()
    LeastSquares.from_arrays(SIZES, arrays)
    with pytest.raises(CorruptionError, match="residuals must be of marginals of its schema"):
        LeastSquares.from_arrays(SIZES, arrays | change)


def test_features_of_a_wide_schema_are_not_listed_in_all_subsets():
    """A forged release names 60 columns, and is refused at once."""
    sizes = (2,) * 60
    arrays = {"features.0": np.arange(60), "values.0": np.zeros(4), "variance.0": np.ones(1)}
    with pytest.raises(CorruptionError, match="residuals must be of marginals of its schema"):
        LeastSquares.from_arrays(sizes, arrays)


def test_subsets_and_centring_by_hand():
    assert subsets((2, 1, 3, 4), (3, 1, 0)) == [(0,), (3,), (0, 3)]
    assert subsets((2, 2), ()) == []
    values = np.random.default_rng(0).normal(size=(2, 3, 4))
    np.testing.assert_allclose(centred(values).ravel(), projection((2, 3, 4)) @ values.ravel())


PAIRS = ((0, 1), (0, 2), (1, 2))
TINY = (2, 3, 2)


def rough(seed, sizes=TINY, sets=PAIRS):
    """Few rows, and noise as large as the cells: some estimates are below 0."""
    generator = np.random.default_rng(seed)
    cells = generator.dirichlet(np.full(math.prod(sizes), 0.15))
    workload = Workload((Marginals(sizes, sets), Residuals(sizes, ((0, 1),))))
    sigma = generator.uniform(0.05, 0.15, workload.blocks)
    values = [
        matrix_of(piece.tally) @ cells + s * generator.normal(size=piece.tally.cells)
        for piece, s in zip(workload.pieces(), sigma, strict=True)
    ]
    return Measurement(workload, np.concatenate(values), sigma, 100.0)


@pytest.mark.parametrize("seed", range(6))
def test_no_cell_is_below_zero_and_no_other_solution_is_nearer(seed):
    """Against a general solver of the same problem, over the cells of the whole table."""
    log = (rough(seed),)
    plain, dense = least_squares(TINY, log), Dense(TINY, log)
    queries = np.concatenate([summing(TINY, features) for features in PAIRS])
    assert (queries @ dense.cells).min() < -0.01
    design, constant = dense.rows @ dense.basis, dense.rows @ dense.start - dense.wanted
    solved = minimize(
        lambda q: 0.5 * np.sum((design @ q + constant) ** 2),
        np.zeros(design.shape[1]),
        jac=lambda q: design.T @ (design @ q + constant),
        constraints={
            "type": "ineq",
            "fun": lambda q: queries @ (dense.start + dense.basis @ q),
            "jac": lambda q: queries @ dense.basis,
        },
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-10},
    )
    assert solved.success
    expected = queries @ (dense.start + dense.basis @ solved.x)
    found = nonnegative(plain, PAIRS, steps=5000, tolerance=1e-8)
    answers = np.concatenate([found.marginal(features) for features in PAIRS])
    assert answers.min() > -1e-6
    np.testing.assert_allclose(answers, expected, atol=1e-4)
    assert found.marginal((0, 1)).sum() == pytest.approx(1)
    for inner in range(3):
        ones = [summed_to(found, features, inner) for features in PAIRS if inner in features]
        np.testing.assert_allclose(ones[0], ones[1], atol=1e-12)
    assert [part.variance for part in found.parts.values()] == [part.variance for part in plain.parts.values()]


def summed_to(model, features, feature):
    shaped = model.marginal(features).reshape([model.sizes[f] for f in features])
    return shaped.sum(axis=1 - features.index(feature))


def test_it_stops_when_it_is_near_enough(monkeypatch):
    from anamorph.models import least_squares as module

    seen = []
    monkeypatch.setattr(module.progress, "report", lambda *given: seen.append(given))
    plain = least_squares(TINY, (rough(1),))
    for tolerance in (1e-2, 1e-5):
        seen.clear()
        found = nonnegative(plain, PAIRS, steps=4000, tolerance=tolerance)
        assert 2 < len(seen) < 4000
        assert seen[-1] == ("consistency", 4000, 4000)
        noise = max(math.sqrt(part.variance) for part in found.parts.values())
        assert min(found.marginal(features).min() for features in PAIRS) > -3 * tolerance * noise
    seen.clear()
    nonnegative(plain, PAIRS, steps=3, tolerance=1e-9)
    assert len(seen) == 4


def test_what_is_nowhere_below_zero_stays_as_it_is():
    sizes = (3, 2, 1)
    cells = np.random.default_rng(0).dirichlet(np.full(6, 5.0))
    workload = Workload((Marginals(sizes, ((0, 1, 2), (1,))),))
    values = np.concatenate([cells, cells.reshape(3, 2).sum(axis=0)])
    plain = least_squares(sizes, (Measurement(workload, values, np.array([0.1, 0.2]), 10.0),))
    found = nonnegative(plain, ((0, 1, 2), (2,)), steps=50, tolerance=1e-6)
    np.testing.assert_allclose(found.marginal((0, 1)), cells, atol=1e-12)


def test_sets_that_are_not_asked_for_may_be_below_zero():
    log = (rough(2),)
    plain = least_squares(TINY, log)
    lowest = min(PAIRS, key=lambda features: plain.marginal(features).min())
    others = [features for features in PAIRS if features != lowest]
    found = nonnegative(plain, others, steps=2000, tolerance=1e-8)
    assert min(found.marginal(features).min() for features in others) > -1e-6
    assert isinstance(found.parts[lowest], Part)
    assert found.answer(AtLeast(GroupBy(TINY, lowest, 0, TINY[lowest[0]]), 1)).size == plain.marginal(lowest).size


def drawn(sizes, sets, kind, sigmas, seed=0):
    part = kind(sizes, sets)
    values = np.random.default_rng(seed).normal(0.1, 0.02, part.cells)
    return Measurement(Workload((part,)), values, np.array(sigmas), 500.0)


def test_marginals_of_residuals_are_the_least_squares_estimates_with_their_precision():
    sizes = (2, 3, 2)
    log = (drawn(sizes, ((0,), (1,), (2,), (0, 1), (1, 2)), Residuals, [0.1, 0.3, 0.004, 0.02, 0.05]),)
    found, model = as_marginals(sizes, log), least_squares(sizes, log)
    assert found.total == 500.0
    (part,) = found.workload.parts
    assert set(part.sets) == {(0, 1), (1, 2), (0,), (1,), (2,)}
    np.testing.assert_allclose(found.values, np.concatenate([model.marginal(features) for features in part.sets]))
    precision = dict(zip(part.sets, found.sigma**-2.0, strict=True))
    assert precision[0, 1] == pytest.approx(0.02**-2)
    assert precision[2,] == pytest.approx(0.004**-2 - 0.05**-2 / 3), "the pair tells a third of its own"
    assert precision[0,] == pytest.approx(0.01 * 0.1**-2), "the pair tells more than is known: a hundredth, to begin at"
    again = least_squares(sizes, (found,))
    for features in ((0, 1), (1, 2), (2,)):
        np.testing.assert_allclose(again.marginal(features), model.marginal(features), atol=1e-9)


def test_pairs_that_triples_tell_all_of_are_left_out():
    sizes = (2, 2, 2)
    sets = tuple(s for k in (1, 2, 3) for s in itertools.combinations(range(3), k))
    found = as_marginals(sizes, (drawn(sizes, sets, Residuals, [1.0, 1.0, 1.0, 0.1, 1.0, 1.0, 0.2]),))
    assert set(found.workload.parts[0].sets) == {(0, 1, 2), (0, 1), (0,), (1,), (2,)}


def test_marginals_stay_as_they_were_measured():
    sizes = (2, 3)
    log = (drawn(sizes, ((0, 1), (0,), (1,)), Marginals, [0.1, 0.2, 0.05]),)
    found = as_marginals(sizes, log)
    assert found.workload.parts[0].sets == ((0, 1), (0,), (1,))
    assert found.sigma == pytest.approx([0.1, 0.2, 0.05])
