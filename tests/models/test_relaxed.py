"""The relaxed projection: it recovers what can be recovered, keeps the best, stops, and compiles once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import PAIRS, SIZES, answers, chi_squared, compilations, measure, truth

from anamorph import progress
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models import goals
from anamorph.models.relaxed import RelaxedProjection, RelaxedRows, information, objective, points
from anamorph.models.simplex import Layout
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement

VARIANTS = [
    {"simplex": simplex, "row_weights": row_weights, "rate": rate}
    for (simplex, rate), row_weights in itertools.product((("sparsemax", 0.01), ("softmax", 0.05)), (False, True))
]
ESTIMATORS = [RelaxedProjection(rows=30, steps=1500, tolerance=0, **variant) for variant in VARIANTS]
"""The fits that most tests share, so that each is compiled once."""
SPARSE, SOFT = ESTIMATORS[0], ESTIMATORS[2]


def check_model(model):
    firsts = np.cumsum((0, *model.sizes[:-1]))
    np.testing.assert_allclose(np.add.reduceat(model.probabilities, firsts, axis=0), 1, atol=1e-4)
    assert model.probabilities.min() >= 0
    assert model.weights.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_exact_answers_are_recovered(estimator):
    measurements = [measure(PAIRS, truth(PAIRS))]
    start = estimator.init(SIZES, seed=1)
    check_model(start)
    fitted = estimator.fit(start, measurements)
    check_model(fitted)
    assert chi_squared(fitted, measurements) < 1e-3 * chi_squared(start, measurements)
    np.testing.assert_allclose(answers(fitted, PAIRS), truth(PAIRS), atol=4e-3)
    if not estimator.row_weights:
        np.testing.assert_allclose(fitted.weights, 1 / 30, rtol=1e-5)
    else:
        assert np.ptp(fitted.weights) > 1e-4


@pytest.mark.parametrize("by_cell", [False, True])
def test_cells_and_marginals_of_all_shapes_are_fitted(by_cell):
    sizes = (40, 30, 3)
    workload = Workload((Marginals(sizes, ((0, 1), (2, 0), (1, 2))),))
    taken = workload.by_cell() if by_cell else workload
    values = truth(workload, sizes=sizes)
    estimator = RelaxedProjection(rows=60, steps=200, rate=0.05, simplex="softmax", tolerance=0)
    start = estimator.init(sizes, seed=0)
    fitted = estimator.fit(start, [measure(taken, values)])
    check_model(fitted)
    assert chi_squared(fitted, [measure(taken, values)]) < 0.05 * chi_squared(start, [measure(taken, values)])


@pytest.mark.parametrize(("simplex", "rate"), [("sparsemax", 50.0), ("softmax", 50.0), ("sparsemax", 0.5)])
def test_the_best_table_is_kept(simplex, rate):
    estimator = RelaxedProjection(rows=20, steps=37, rate=rate, simplex=simplex)
    measurements = [measure(PAIRS, truth(PAIRS))]
    start = estimator.init(SIZES, seed=3)
    fitted = estimator.fit(start, measurements)
    check_model(fitted)
    assert chi_squared(fitted, measurements) <= chi_squared(start, measurements) * (1 + 1e-5)


def steps_taken(estimator, start, measurements):
    reports = []
    with progress.listening(lambda stage, done, total: reports.append((stage, done, total))):
        fitted = estimator.fit(start, measurements)
    assert all(stage == "project" and done <= total == estimator.steps for stage, done, total in reports)
    assert reports[-1][1] == estimator.steps
    return fitted, reports


def test_a_fit_stops_by_its_tolerance():
    eager, patient = replace(SPARSE, tolerance=0.5), SPARSE
    measurements = [measure(PAIRS, truth(PAIRS))]
    start = eager.init(SIZES, seed=0)
    stopped, few = steps_taken(eager, start, measurements)
    ran, many = steps_taken(patient, start, measurements)
    assert [done for _, done, _ in few] == [50, 100, 150, 1500], "with the first steps after the warm ones"
    assert len(many) > 4
    assert chi_squared(ran, measurements) < chi_squared(stopped, measurements)


@pytest.mark.parametrize("estimator", [SPARSE, SOFT])
def test_a_loss_that_is_no_number_degrades_and_keeps_a_finite_table(estimator):
    good = measure(PAIRS, truth(PAIRS))
    start = estimator.fit(estimator.init(SIZES, seed=0), [good])
    assert not start.degraded
    bad = measure(PAIRS, np.where(np.arange(PAIRS.cells) == 3, np.nan, truth(PAIRS)))
    fitted = estimator.fit(start, [good, bad])
    assert fitted.degraded
    check_model(fitted)
    np.testing.assert_allclose(fitted.probabilities, start.probabilities, atol=1e-5)
    assert estimator.fit(fitted, [good]).degraded


def test_a_fit_continues_where_the_last_one_ended():
    estimator = RelaxedProjection(rows=20, steps=150, rate=0.01, tolerance=0)
    measurements = [measure(PAIRS, truth(PAIRS))]
    once = estimator.fit(estimator.init(SIZES, seed=0), measurements)
    twice = estimator.fit(once, measurements)
    assert chi_squared(twice, measurements) < 0.7 * chi_squared(once, measurements)
    again = estimator.fit(estimator.init(SIZES, seed=0), measurements)
    np.testing.assert_array_equal(again.probabilities, once.probabilities)
    other = estimator.init(SIZES, seed=1)
    assert not np.array_equal(other.probabilities, estimator.init(SIZES, seed=0).probabilities)


def test_a_loaded_release_cannot_be_continued():
    estimator = RelaxedProjection(rows=20, steps=10)
    model = estimator.init(SIZES, seed=0)
    loaded = RelaxedRows.from_arrays(SIZES, model.arrays())
    with pytest.raises(ParameterError, match="must come from init or fit"):
        estimator.fit(loaded, [measure(PAIRS, truth(PAIRS))])
    np.testing.assert_allclose(answers(loaded, PAIRS), answers(model, PAIRS), atol=1e-6)


def numpy_information(probabilities, weights, sizes):
    """I by its definition, row by row."""
    total = sum(w * math.log(w * weights.size) for w in weights if w > 0)
    for first, size in zip(np.cumsum((0, *sizes[:-1])), sizes, strict=True):
        block = probabilities[first : first + size]
        mean = block @ weights
        for row, weight in enumerate(weights):
            total += sum(weight * p * math.log(p / q) for p, q in zip(block[:, row], mean, strict=True) if p > 0)
    return total


@pytest.mark.parametrize("sizes", [(3, 2, 4), (9, 17, 2, 33)])
def test_information_is_that_of_its_definition(sizes):
    generator = np.random.default_rng(0)
    matrix = np.concatenate([generator.dirichlet(np.full(size, 0.2), 7).T for size in sizes])
    matrix[:2] = [[1] * 7, [0] * 7] if sizes[0] == 2 else matrix[:2]
    weights = generator.dirichlet(np.ones(7))
    stacks = Layout(sizes).stack(jnp.asarray(matrix, jnp.float32), 0.0)
    found = float(jax.jit(information)(stacks, jnp.asarray(weights, jnp.float32)))
    assert found == pytest.approx(numpy_information(matrix, weights, sizes), rel=1e-4)
    equal = Layout(sizes).stack(jnp.asarray(np.repeat(matrix[:, :1], 7, axis=1), jnp.float32), 0.0)
    assert float(jax.jit(information)(equal, jnp.full(7, 1 / 7))) == pytest.approx(0, abs=1e-5)
    assert float(jax.jit(information)(equal, jnp.asarray(weights, jnp.float32))) > 0.01


def test_the_gradient_of_information_is_finite_at_corners():
    stacks = (jnp.asarray(np.eye(3, dtype=np.float32)[None]),)
    slope = jax.grad(lambda stack: information((stack,), jnp.full(3, 1 / 3)))(stacks[0])
    assert np.all(np.isfinite(slope))


def test_the_penalty_pulls_to_independence():
    ones = Workload((Marginals(SIZES, ((0,), (1,), (2,))),))
    measurements = [measure(ones, truth(ones))]
    plain = RelaxedProjection(rows=20, steps=600, rate=0.05, simplex="softmax", start=2.0, tolerance=0)
    drawn = replace(plain, penalty=0.1)
    found = {}
    for estimator in (plain, drawn):
        model = estimator.fit(estimator.init(SIZES, seed=0), measurements)
        np.testing.assert_allclose(answers(model, ones), truth(ones), atol=0.02)
        found[estimator.penalty] = numpy_information(model.probabilities, model.weights, SIZES)
    assert found[0.1] < 0.1 * found[0.0]
    model = drawn.fit(drawn.init(SIZES, seed=0), measurements)
    independent = np.outer(truth(ones)[:3], truth(ones)[3:5]).ravel()
    joint = answers(model, Workload((Marginals(SIZES, ((0, 1),)),)))
    np.testing.assert_allclose(joint, independent, atol=0.01)


@pytest.mark.parametrize("estimator", [SPARSE, SOFT])
def test_conflicting_measurements_meet_at_their_weighted_mean(estimator):
    cell = PAIRS.by_cell().take([5])
    measurements = [measure(cell, [0.2], sigma=0.01), measure(cell, [0.5], sigma=0.02)]
    fitted = estimator.fit(estimator.init(SIZES, seed=0), measurements)
    assert answers(fitted, cell)[0] == pytest.approx((0.2 * 4 + 0.5) / 5, abs=2e-3)
    turned = [measure(cell, [0.2], sigma=0.02), measure(cell, [0.5], sigma=0.01)]
    fitted = estimator.fit(estimator.init(SIZES, seed=0), turned)
    assert answers(fitted, cell)[0] == pytest.approx((0.2 + 0.5 * 4) / 5, abs=2e-3)


def test_the_objective_is_chi_squared():
    estimator = RelaxedProjection(rows=20, simplex="softmax", row_weights=True)
    model = estimator.init(SIZES, seed=0)
    measurements = [
        measure(PAIRS, truth(PAIRS), sigma=0.03),
        measure(PAIRS.by_cell().take([3, 1]), [0.3, 0.1], sigma=0.1),
    ]
    layout = Layout(SIZES)
    value = objective(estimator, layout, model.parameters, goals.build(layout, measurements))
    assert float(value) == pytest.approx(chi_squared(model, measurements), rel=1e-4)
    found = layout.flatten(points(estimator, model.parameters.free))[layout.lines]
    np.testing.assert_allclose(found, model.probabilities, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rows", 0, "rows (0) must be a whole number of at least 1"),
        ("rows", 1.5, "rows (1.5) must be a whole number"),
        ("steps", -1, "steps (-1) must be a whole number of at least 1"),
        ("steps", True, "steps (True) must be a whole number"),
        ("rate", 0, "rate (0) must be a finite number"),
        ("rate", -1.0, "rate (-1.0) must be a finite number"),
        ("rate", math.nan, "rate (nan) must be a finite number"),
        ("rate", math.inf, "rate (inf) must be a finite number"),
        ("rate", "0.1", "rate ('0.1') must be a finite number"),
        ("tolerance", -1e-9, "tolerance (-1e-09) must be a finite number of at least 0"),
        ("start", math.nan, "start (nan) must be a finite number"),
        ("penalty", -0.1, "penalty (-0.1) must be a finite number of at least 0"),
        ("simplex", "sparse", "simplex ('sparse') must be sparsemax or softmax"),
    ],
)
def test_parameters_are_checked_in_house_words(name, value, words):
    with pytest.raises(ParameterError) as caught:
        RelaxedProjection(**{name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays | {"probabilities": arrays["probabilities"][:-1]},
        lambda arrays: arrays | {"probabilities": arrays["probabilities"] * 1.1},
        lambda arrays: arrays | {"probabilities": -arrays["probabilities"]},
        lambda arrays: arrays | {"probabilities": np.full_like(arrays["probabilities"], np.nan)},
        lambda arrays: arrays | {"weights": arrays["weights"][:-1]},
        lambda arrays: arrays | {"weights": arrays["weights"] * 2},
        lambda arrays: arrays | {"weights": arrays["weights"] * np.nan},
        lambda arrays: arrays | {"weights": arrays["weights"][None]},
    ],
)
def test_arrays_that_are_no_probabilities_are_refused(change):
    arrays = RelaxedProjection(rows=5).init(SIZES, seed=0).arrays()
    RelaxedRows.from_arrays(SIZES, arrays)
    with pytest.raises(CorruptionError):
        RelaxedRows.from_arrays(SIZES, change(arrays))


def test_rounds_over_cells_compile_nothing_after_the_first():
    workload = Workload((Marginals(SIZES, ((0, 1), (0, 2), (1, 2), (0, 1, 2))),)).by_cell()
    estimator = RelaxedProjection(rows=13, steps=7)
    order = np.random.default_rng(0).permutation(workload.blocks)
    new = compilations(estimator, SIZES, workload, [order[4 * i : 4 * i + 4] for i in range(10)])
    assert new[0] > 0
    assert new[1:] == [0] * 9


def test_rounds_over_marginals_compile_only_where_a_power_of_two_is_passed():
    sizes = (60, 70, 65, 90)
    workload = Workload((Marginals(sizes, tuple(itertools.combinations(range(4), 2))),))
    estimator = RelaxedProjection(rows=6, steps=2)
    new = compilations(estimator, sizes, workload, [[i] for i in range(6)])
    shapes, tiles = [], []
    for rounds in range(1, 7):
        part = workload.take(np.arange(rounds))
        (tiled,) = goals.build(Layout(sizes), [measure(part, np.zeros(part.cells))]).tiled
        shapes.append(tiled.targets.shape)
        tiles.append(int(tiled.used))
    assert tiles == sorted(set(tiles))
    grown = [len(set(shapes[:i])) < len(set(shapes[: i + 1])) for i in range(6)]
    assert [compiled > 0 for compiled in new] == grown
    assert sum(grown) <= 1 + math.ceil(math.log2(tiles[-1]))
    assert not all(grown)


@pytest.mark.parametrize("row_weights", [False, True])
def test_popular_are_the_one_way_answers(row_weights):
    sizes = (3, 2, 40, 4)
    estimator = RelaxedProjection(rows=9, row_weights=row_weights, steps=3)
    model = estimator.init(sizes, seed=1)
    ones = Workload((Marginals(sizes, tuple((feature,) for feature in range(4))),))
    model = estimator.fit(model, [measure(ones, np.full(sum(sizes), 0.1))])
    found = model.popular()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, answers(model, ones), atol=1e-6)
    np.testing.assert_allclose(np.add.reduceat(found, np.cumsum((0, *sizes[:-1]))), 1, atol=1e-5)


TRIPLE = Workload((Thresholds(SIZES, ((0, 1, 2),), least=2), Thresholds(SIZES, ((0, 2), (1, 2)), least=1)))


@pytest.mark.parametrize("estimator", [SPARSE, SOFT])
@pytest.mark.parametrize("by_cell", [False, True])
def test_thresholds_are_fitted(estimator, by_cell):
    workload = TRIPLE.by_cell().take(np.arange(TRIPLE.cells)) if by_cell else TRIPLE
    values = truth(workload)
    np.testing.assert_allclose(values, truth(TRIPLE))
    start = estimator.init(SIZES, seed=1)
    fitted = estimator.fit(start, [measure(workload, values)])
    check_model(fitted)
    assert np.abs(answers(start, workload) - values).max() > 0.1
    np.testing.assert_allclose(answers(fitted, workload), values, atol=5e-3)


def test_the_objective_of_thresholds_is_chi_squared():
    estimator = RelaxedProjection(rows=20, simplex="softmax", row_weights=True)
    model = estimator.init(SIZES, seed=0)
    singles = Workload((*TRIPLE.parts, *PAIRS.parts)).by_cell().take([3, 1, 25, 40, 50])
    measurements = [
        measure(PAIRS, truth(PAIRS), sigma=0.03),
        measure(TRIPLE, truth(TRIPLE), sigma=0.02),
        measure(singles, [0.3, 0.1, 0.5, 0.6, 0.2], sigma=0.1),
    ]
    layout = Layout(SIZES)
    value = objective(estimator, layout, model.parameters, goals.build(layout, measurements))
    assert float(value) == pytest.approx(chi_squared(model, measurements), rel=1e-4)


def test_rounds_over_thresholds_compile_only_where_a_kind_is_new():
    kinds = (
        Thresholds(SIZES, ((0, 1), (0, 2), (1, 2)), least=1),
        Thresholds(SIZES, ((0, 1, 2),), least=2),
        Marginals(SIZES, ((0, 1), (0, 1, 2))),
    )
    workload = Workload(kinds).by_cell()
    estimator = RelaxedProjection(rows=11, steps=7)
    stops = np.cumsum([0, *(kind.cells for kind in kinds)])
    spans = [np.arange(first, last) for first, last in itertools.pairwise(stops.tolist())]
    rounds = [spans[0][:3], spans[0][5:9], spans[2][-3:], np.r_[spans[0][10], spans[2][1]], spans[1][:2]]
    rest = np.setdiff1d(np.arange(workload.blocks), np.concatenate(rounds))
    rounds += np.array_split(np.random.default_rng(0).permutation(rest), 6)
    new = compilations(estimator, SIZES, workload, rounds)
    assert [count > 0 for count in new] == [True, False, True, False, True] + [False] * 6


@pytest.mark.parametrize("limit", [7, 1 << 22])
def test_pieces_of_any_size_have_the_same_answers(limit):
    model = RelaxedProjection(rows=9).init(SIZES, seed=1)
    workload = Workload((*PAIRS.parts, *TRIPLE.parts, Marginals(SIZES, ((2, 1, 0),))), limit=limit)
    found = [len(part) for part in model.answers(workload)]
    assert max(found) <= limit
    np.testing.assert_allclose(answers(model, workload), answers(model, replace(workload, limit=24)), atol=1e-6)


def test_no_measurements_are_refused():
    with pytest.raises(ParameterError, match="measurements must be at least one"):
        SPARSE.fit(SPARSE.init(SIZES, seed=0), [])


def test_a_cell_of_many_wide_columns_is_found():
    """The bug: its answer, and so the loss, stayed the same to the last digit at the start: the fit stopped there."""
    sizes = (200,) * 5
    wanted = Workload((Marginals(sizes, ((0, 1, 2, 3, 4),)),)).by_cell().take([7])
    noisy = Measurement(wanted, np.array([0.6]), np.array([0.01]), 1000.0)
    estimator = RelaxedProjection(rows=20, steps=500, rate=0.05, simplex="softmax")
    found = estimator.fit(estimator.init(sizes, seed=0), (noisy,))
    (answer,) = found.answers(wanted)
    assert answer == pytest.approx([0.6], abs=0.05)
