"""The generator: its rows are those of the formula, it recovers what can be recovered, and it compiles once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import PAIRS, SIZES, answers, chi_squared, compilations, measure, truth
from jax.test_util import check_grads

from anamorph.errors import CorruptionError, ParameterError
from anamorph.models import goals
from anamorph.models.generator import Aims, Generator, GeneratorProjection, objective
from anamorph.models.relaxed import information
from anamorph.models.simplex import Layout
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload

TINY = GeneratorProjection(rows=40, latent=4, hidden=16, layers=2, steps=600, rate=0.01, tolerance=0, penalty=0.0)
"""The fit that most tests share, so that it is compiled once."""


def relaxed_rows(model, latents):
    """The rows of the formula, in double precision, one latent vector at a time."""
    *hidden, last = [(np.asarray(layer.matrix, float), np.asarray(layer.bias, float)) for layer in model.network]
    columns = []
    for latent in latents.T.astype(float):
        x = latent
        for matrix, bias in hidden:
            x = np.concatenate([np.maximum(matrix @ x + bias, 0), x])
        free = np.split(last[0] @ x + last[1], np.cumsum(model.sizes)[:-1])
        columns.append(np.concatenate([np.exp(part) / np.exp(part).sum() for part in free]))
    return np.stack(columns, axis=1)


def check_rows(rows):
    firsts = np.cumsum((0, *rows.sizes[:-1]))
    np.testing.assert_allclose(np.add.reduceat(rows.probabilities, firsts, axis=0), 1, atol=1e-4)
    assert rows.probabilities.min() >= 0
    np.testing.assert_allclose(rows.weights, 1 / rows.weights.size)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("sizes", [(3, 2, 4), (9, 1, 33)])
def test_rows_are_those_of_the_formula(layers, sizes):
    model = GeneratorProjection(rows=11, latent=3, hidden=7, layers=layers, start=1.0).init(sizes, seed=1)
    assert len(model.network) == layers + 1
    check_rows(model.rows)
    np.testing.assert_allclose(model.rows.probabilities, relaxed_rows(model, model.latents), atol=1e-5)


def test_the_first_rows_are_as_far_from_uniform_as_asked():
    estimator = GeneratorProjection(rows=500, start=0.0)
    np.testing.assert_allclose(estimator.init(SIZES, seed=0).rows.probabilities[:3], 1 / 3, atol=1e-6)
    spread = [np.ptp(replace(estimator, start=start).init(SIZES, seed=0).rows.probabilities[:3]) for start in (0.1, 1)]
    assert 0.01 < spread[0] < spread[1]


def test_exact_answers_are_recovered():
    measurements = [measure(PAIRS, truth(PAIRS))]
    start = TINY.init(SIZES, seed=1)
    fitted = TINY.fit(start, measurements)
    check_rows(fitted.rows)
    assert not fitted.degraded
    assert chi_squared(fitted, measurements) < 1e-3 * chi_squared(start, measurements)
    np.testing.assert_allclose(answers(fitted, PAIRS), truth(PAIRS), atol=6e-3)
    np.testing.assert_array_equal(fitted.latents, start.latents)


@pytest.mark.parametrize("by_cell", [False, True])
def test_cells_and_marginals_of_all_shapes_are_fitted(by_cell):
    sizes = (40, 30, 3)
    workload = Workload((Marginals(sizes, ((0, 1), (2, 0), (1, 2))),))
    measurements = [measure(workload.by_cell() if by_cell else workload, truth(workload, sizes=sizes))]
    estimator = replace(TINY, steps=200)
    start = estimator.init(sizes, seed=0)
    assert chi_squared(estimator.fit(start, measurements), measurements) < 0.1 * chi_squared(start, measurements)


def test_the_objective_is_chi_squared_and_the_penalty():
    model, layout = TINY.init(SIZES, seed=2), Layout(SIZES)
    measurements = [
        measure(PAIRS, truth(PAIRS), sigma=0.03),
        measure(PAIRS.by_cell().take([3, 1]), [0.3, 0.1], sigma=0.1),
    ]
    aims = Aims(jnp.asarray(model.latents), goals.build(layout, measurements))
    plain = chi_squared(model, measurements)
    assert float(objective(TINY, layout, model.network, aims)) == pytest.approx(plain, rel=1e-4)
    penalised = objective(replace(TINY, penalty=2.0), layout, model.network, aims)
    stacks = layout.stack(jnp.asarray(model.rows.probabilities), 0.0)
    extra = 2 * float(information(stacks, jnp.asarray(model.rows.weights)))
    assert float(penalised) == pytest.approx(plain + extra, rel=1e-4)


def test_the_gradient_is_that_of_small_differences():
    model, layout = replace(TINY, start=1.0).init(SIZES, seed=2), Layout(SIZES)
    aims = Aims(jnp.asarray(model.latents), goals.build(layout, [measure(PAIRS, truth(PAIRS), sigma=0.02)]))
    loss = jax.jit(lambda network: objective(replace(TINY, penalty=0.1), layout, network, aims))
    check_grads(loss, (model.network,), order=1, modes="rev", eps=2e-3, atol=0.02, rtol=0.02)


def test_the_best_network_is_kept():
    estimator = replace(TINY, steps=37, rate=5.0)
    measurements = [measure(PAIRS, truth(PAIRS))]
    start = estimator.init(SIZES, seed=3)
    fitted = estimator.fit(start, measurements)
    assert chi_squared(fitted, measurements) <= chi_squared(start, measurements) * (1 + 1e-5)


def test_a_loss_that_is_no_number_degrades_and_keeps_a_finite_network():
    good = measure(PAIRS, truth(PAIRS))
    start = TINY.fit(TINY.init(SIZES, seed=0), [good])
    bad = measure(PAIRS, np.where(np.arange(PAIRS.cells) == 3, np.nan, truth(PAIRS)))
    fitted = TINY.fit(start, [good, bad])
    assert fitted.degraded
    np.testing.assert_array_equal(fitted.rows.probabilities, start.rows.probabilities)
    assert TINY.fit(fitted, [good]).degraded


def test_a_fit_goes_on_where_the_last_one_ended_also_after_saving():
    estimator = replace(TINY, steps=60)
    measurements = [measure(PAIRS, truth(PAIRS))]
    once = estimator.fit(estimator.init(SIZES, seed=0), measurements)
    twice = estimator.fit(once, measurements)
    assert chi_squared(twice, measurements) < 0.7 * chi_squared(once, measurements)
    loaded = Generator.from_arrays(SIZES, once.arrays())
    np.testing.assert_array_equal(answers(loaded, PAIRS), answers(once, PAIRS))
    np.testing.assert_array_equal(answers(estimator.fit(loaded, measurements), PAIRS), answers(twice, PAIRS))


def test_seeds_repeat_and_differ():
    one, same, other = (TINY.init(SIZES, seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one.rows.probabilities, same.rows.probabilities)
    assert not np.array_equal(one.latents, other.latents)
    assert not np.array_equal(one.network[0].matrix, other.network[0].matrix)


@pytest.mark.parametrize("rows", [1, 1024, 2500])
def test_fresh_rows_are_those_of_latent_vectors_drawn_anew(rows):
    model = TINY.init(SIZES, seed=0)
    fresh = model.fresh(rows, seed=1)
    check_rows(fresh)
    assert fresh.weights.size == rows
    latents = np.random.default_rng(1).standard_normal((4, rows), np.float32)
    np.testing.assert_allclose(fresh.probabilities[:, -3:], relaxed_rows(model, latents)[:, -3:], atol=1e-5)
    assert not np.array_equal(fresh.probabilities, model.fresh(rows, seed=2).probabilities)
    with pytest.raises(ParameterError, match=r"rows \(0\) must be"):
        model.fresh(0, seed=1)


def test_fresh_rows_answer_nearly_as_the_fitted_ones():
    estimator = replace(TINY, rows=500, latent=2, steps=300)
    fitted = estimator.fit(estimator.init(SIZES, seed=0), [measure(PAIRS, truth(PAIRS))])
    found = [answers(model, PAIRS) for model in (fitted.fresh(20000, seed=9), estimator.init(SIZES, seed=0))]
    near, far = (np.abs(answered - truth(PAIRS)).mean() for answered in found)
    assert near < 0.3 * far


def test_sampled_rows_answer_as_the_relaxed_ones():
    model = TINY.fit(TINY.init(SIZES, seed=0), [measure(PAIRS, truth(PAIRS))])
    table = model.sample(20000, seed=1)
    found = np.bincount(table.cells((0, 1)), minlength=6) / table.rows
    np.testing.assert_allclose(found, answers(model, PAIRS)[:6], atol=0.01)
    np.testing.assert_allclose(model.popular()[:3], answers(model, Workload((Marginals(SIZES, ((0,),)),))), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rows", 0, "rows (0) must be a whole number of at least 1"),
        ("latent", 1.5, "latent (1.5) must be a whole number"),
        ("hidden", -1, "hidden (-1) must be a whole number of at least 1"),
        ("layers", 0, "layers (0) must be a whole number of at least 1"),
        ("steps", True, "steps (True) must be a whole number"),
        ("rate", 0, "rate (0) must be a number from 1e-12 to 100"),
        ("rate", math.nan, "rate (nan) must be a number"),
        ("rate", "0.1", "rate ('0.1') must be a number"),
        ("tolerance", -1e-9, "tolerance (-1e-09) must be a number from 0 to 1"),
        ("start", math.inf, "start (inf) must be a number"),
        ("penalty", -0.1, "penalty (-0.1) must be a number"),
    ],
)
def test_parameters_are_checked_in_house_words(name, value, words):
    with pytest.raises(ParameterError) as caught:
        GeneratorProjection(**{name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: {},
        lambda arrays: {"latents": arrays["latents"]},
        lambda arrays: {name: array for name, array in arrays.items() if name != "bias.1"},
        lambda arrays: {name: array for name, array in arrays.items() if not name.endswith(".1")},
        lambda arrays: arrays | {"matrix.3": arrays["matrix.2"], "bias.3": arrays["bias.2"]},
        lambda arrays: arrays | {"extra": arrays["latents"]},
        lambda arrays: arrays | {"latents": arrays["latents"][:-1]},
        lambda arrays: arrays | {"latents": arrays["latents"][:, :0]},
        lambda arrays: arrays | {"latents": arrays["latents"][0]},
        lambda arrays: arrays | {"latents": arrays["latents"].astype(np.float64)},
        lambda arrays: arrays | {"latents": np.full_like(arrays["latents"], np.nan)},
        lambda arrays: arrays | {"matrix.0": arrays["matrix.0"][:, :-1]},
        lambda arrays: arrays | {"matrix.1": arrays["matrix.1"] * np.inf},
        lambda arrays: arrays | {"matrix.2": arrays["matrix.2"][:-1], "bias.2": arrays["bias.2"][:-1]},
        lambda arrays: arrays | {"bias.0": arrays["bias.0"][None]},
        lambda arrays: arrays | {"bias.1": arrays["bias.1"].astype(np.int32)},
    ],
)
def test_arrays_that_are_no_network_are_refused(change):
    arrays = TINY.init(SIZES, seed=0).arrays()
    Generator.from_arrays(SIZES, arrays)
    with np.errstate(invalid="ignore"), pytest.raises(CorruptionError):
        Generator.from_arrays(SIZES, change(arrays))


def test_no_measurements_are_refused():
    with pytest.raises(ParameterError, match="measurements must be at least one"):
        TINY.fit(TINY.init(SIZES, seed=0), [])


def test_rounds_over_cells_compile_nothing_after_the_first():
    workload = Workload((Marginals(SIZES, ((0, 1), (0, 2), (1, 2), (0, 1, 2))),)).by_cell()
    order = np.random.default_rng(0).permutation(workload.blocks)
    estimator = replace(TINY, rows=13, steps=7)
    new = compilations(estimator, SIZES, workload, [order[4 * i : 4 * i + 4] for i in range(10)])
    assert new[0] > 0
    assert new[1:] == [0] * 9


def test_rounds_over_marginals_compile_only_where_a_power_of_two_is_passed():
    sizes = (40, 33, 35, 38)
    workload = Workload((Marginals(sizes, tuple(itertools.combinations(range(4), 2))),))
    new = compilations(replace(TINY, rows=6, steps=2), sizes, workload, [[i] for i in range(6)])
    shapes = []
    for rounds in range(1, 7):
        part = workload.take(np.arange(rounds))
        tiled = goals.build(Layout(sizes), [measure(part, np.zeros(part.cells))]).tiled
        shapes.append(tuple(item.left.shape for item in tiled))
    grown = [len(set(shapes[:i])) < len(set(shapes[: i + 1])) for i in range(6)]
    assert [compiled > 0 for compiled in new] == grown
    assert not all(grown)
