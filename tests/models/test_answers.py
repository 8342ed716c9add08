"""The model of measured answers: what follows from them by summation, with the least noise, and nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from anamorph.errors import CorruptionError, ParameterError
from anamorph.models.answers import Answers, Noisy, Zero, from_measurements
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement

SIZES = (3, 2, 4, 5)
GENERATOR = np.random.default_rng(0)
THREE, PAIR, TURNED = GENERATOR.random((3, 2, 4)), GENERATOR.random((2, 4)), GENERATOR.random((5, 3))


def model(sigma_three=0.1, sigma_pair=0.1):
    marginals = {(0, 1, 2): THREE.ravel(), (1, 2): PAIR.ravel(), (3, 0): TURNED.ravel()}
    return Answers(SIZES, marginals, {(0, 1, 2): sigma_three, (1, 2): sigma_pair, (3, 0): 0.2})


def answers(found, sets, ids=None):
    workload = Workload((Marginals(SIZES, sets),))
    workload = workload if ids is None else workload.by_cell().take(ids)
    return np.concatenate(list(found.answers(workload)))


def test_what_was_measured_is_answered_as_it_was():
    np.testing.assert_array_equal(answers(model(), ((0, 1, 2), (1, 2))), np.concatenate([THREE.ravel(), PAIR.ravel()]))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((0, 1), THREE.sum(axis=2)),
        ((1, 0), THREE.sum(axis=2).T),
        ((2, 0), THREE.sum(axis=1).T),
        ((2, 1, 0), THREE.transpose(2, 1, 0)),
        ((1, 2, 0), THREE.transpose(1, 2, 0)),
        ((0, 3), TURNED.T),
        ((3,), TURNED.sum(axis=1)),
        ((2, 1), PAIR.T),
    ],
)
def test_a_subset_is_summed_and_turned(features, expected):
    np.testing.assert_allclose(answers(model(), (features,)), expected.ravel())
    ids = GENERATOR.permutation(expected.size)
    np.testing.assert_allclose(answers(model(), (features,), ids), expected.ravel()[ids])


def test_the_least_variance_is_chosen():
    assert model().best((1,)) == (1, 2)
    assert model(sigma_three=0.057).best((1,)) == (0, 1, 2)
    assert model(sigma_three=0.059).best((1,)) == (1, 2)
    assert model(sigma_three=0.01).best((1, 2)) == (0, 1, 2)
    np.testing.assert_allclose(answers(model(sigma_three=0.01), ((1, 2),)), THREE.sum(axis=0).ravel())
    assert model().best((0,)) in ((0, 1, 2), (3, 0))


@pytest.mark.parametrize("features", [(0, 1, 2, 3), (1, 3), (2, 3)])
def test_what_does_not_follow_is_refused(features):
    with pytest.raises(ParameterError, match="must be one that was measured"):
        answers(model(), (features,))


def test_slabs_are_answered_in_order():
    workload = Workload((Marginals(SIZES, ((0, 1, 2), (2, 0))),))
    found = [model().answer(piece.tally) for piece in workload.pieces(5)]
    assert len(found) > 4
    np.testing.assert_allclose(np.concatenate(found), np.concatenate([THREE.ravel(), THREE.sum(axis=1).T.ravel()]))


@pytest.mark.parametrize("by_cell", [False, True])
def test_measurements_become_the_model(by_cell):
    workload = Workload((Marginals(SIZES, ((0, 1, 2),)), Marginals(SIZES, ((1, 2),))))
    workload = workload.by_cell() if by_cell else workload
    values = np.concatenate([THREE.ravel(), PAIR.ravel()])
    sigma = np.where(np.arange(workload.blocks) < (24 if by_cell else 1), 0.5, 0.25)
    made = from_measurements(SIZES, [Measurement(workload, values, sigma, 10.0)])
    np.testing.assert_array_equal(made.marginals[0, 1, 2], THREE.ravel())
    np.testing.assert_array_equal(made.marginals[1, 2], PAIR.ravel())
    assert made.sigma == {(0, 1, 2): 0.5, (1, 2): 0.25}


def test_measurements_of_single_cells_are_refused():
    workload = Workload((Marginals(SIZES, ((0, 1),)),)).by_cell().take([1, 2])
    with pytest.raises(ParameterError, match="must be of whole marginals"):
        from_measurements(SIZES, [Measurement(workload, np.zeros(2), np.ones(2), 1.0)])


@pytest.mark.parametrize("kind", [Zero(SIZES), model()])
def test_a_model_without_rows_has_none(kind):
    with pytest.raises(ParameterError, match="holds answers, not rows"):
        kind.sample(5, seed=0)


def test_zero_answers_zero():
    assert not np.any(answers(Zero(SIZES), ((0, 1), (2,))))
    assert answers(Zero(SIZES), ((0, 1), (2,))).size == 10


def test_arrays_are_the_model():
    again = Answers.from_arrays(SIZES, model().arrays())
    assert again.sigma == model().sigma
    for features, values in model().marginals.items():
        np.testing.assert_array_equal(again.marginals[features], values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("features.0", np.array([0, 1])),
        ("features.0", np.array([0, 1, 4])),
        ("features.0", np.array([0, 1, -2])),
        ("features.1", np.array([1, 1])),
        ("sigma.0", np.array([np.nan])),
        ("sigma.0", np.array([np.inf])),
        ("sigma.0", np.array([-0.1])),
        ("sigma.0", np.array([0.0])),
        ("values.1", np.zeros(7)),
        ("values.1", np.zeros((2, 4))),
        ("values.1", np.full(8, np.nan)),
        ("values.1", np.full(8, np.inf)),
    ],
)
def test_foreign_arrays_are_refused(name, value):
    with pytest.raises(CorruptionError, match="must be marginals of its schema"):
        Answers.from_arrays(SIZES, model().arrays() | {name: value})


def by_definition(shaped, least):
    """Thresholds of every cell of a marginal: the sum of all cells that agree in enough positions."""
    found = np.zeros(shaped.shape)
    for cell, other in itertools.product(np.ndindex(shaped.shape), repeat=2):
        if sum(a == b for a, b in zip(cell, other, strict=True)) >= least:
            found[cell] += shaped[other]
    return found.ravel()


@pytest.mark.parametrize(
    ("features", "least", "source"),
    [
        ((0, 1, 2), 1, THREE),
        ((0, 1, 2), 2, THREE),
        ((1, 2), 1, PAIR),
        ((2, 1), 1, PAIR.T),
        ((0, 2), 1, THREE.sum(axis=1)),
        ((2, 0, 1), 2, THREE.transpose(2, 0, 1)),
        ((0, 3), 1, TURNED.T),
    ],
)
def test_thresholds_are_sums_of_a_measured_marginal(features, least, source):
    expected = by_definition(source, least)
    whole = Workload((Thresholds(SIZES, (features,), least=least),))
    np.testing.assert_allclose(np.concatenate(list(model().answers(whole))), expected)
    cut = [model().answer(piece.tally) for piece in whole.pieces(3)]
    assert len(cut) > 2
    np.testing.assert_allclose(np.concatenate(cut), expected)
    ids = GENERATOR.permutation(expected.size)
    np.testing.assert_allclose(np.concatenate(list(model().answers(whole.by_cell().take(ids)))), expected[ids])


def test_the_noise_of_a_threshold_is_that_of_the_cells_it_sums():
    """Sub-marginals are taken from one marginal, even where another would give some of them with less noise."""
    noisy = model(sigma_three=1.0, sigma_pair=1e-6)
    workload = Workload((Thresholds(SIZES, ((0, 1, 2),), least=1),))
    np.testing.assert_allclose(np.concatenate(list(noisy.answers(workload))), by_definition(THREE, 1))


def test_thresholds_of_what_was_not_measured_are_refused():
    with pytest.raises(ParameterError, match="must be one that was measured"):
        list(model().answers(Workload((Thresholds(SIZES, ((1, 3),), least=1),))))


@pytest.mark.parametrize("by_cell", [False, True])
@pytest.mark.parametrize("limit", [5, 1 << 22])
def test_measured_thresholds_are_answered_as_they_were(by_cell, limit):
    workload = Workload((Thresholds(SIZES, ((0, 1, 2),), least=2), Thresholds(SIZES, ((1, 2),), least=2)), limit=limit)
    workload = workload.by_cell() if by_cell else workload
    values = np.concatenate([-THREE.ravel(), PAIR.ravel()])
    sigma = np.where(np.arange(workload.blocks) < (24 if by_cell else 1), 0.5, 0.25)
    made = from_measurements(SIZES, [Measurement(workload, values, sigma, 10.0)])
    assert list(made.marginals) == [(1, 2)]
    assert made.sigma == {(1, 2): 0.25}
    assert list(made.thresholds) == [((0, 1, 2), 2)]
    assert made.thresholds[(0, 1, 2), 2].sigma == 0.5
    for found in (made, Answers.from_arrays(SIZES, made.arrays())):
        np.testing.assert_array_equal(np.concatenate(list(found.answers(workload))), values)
        np.testing.assert_array_equal(answers(found, ((1, 2),)), PAIR.ravel())
        assert found.best((1,)) == (1, 2)
        with pytest.raises(ParameterError, match="must be one that was measured"):
            answers(found, ((0, 1),))
        with pytest.raises(ParameterError, match="must be one that was measured"):
            list(found.answers(Workload((Thresholds(SIZES, ((0, 1, 2),), least=1),))))


def test_a_measured_threshold_is_preferred_to_a_sum():
    direct = GENERATOR.random(24)
    both = replace(model(), thresholds={((0, 1, 2), 2): Noisy(direct, 0.3)})
    again = Answers.from_arrays(SIZES, both.arrays())
    assert again.thresholds[(0, 1, 2), 2].sigma == 0.3
    for found in (both, again):
        for least, expected in ((1, by_definition(THREE, 1)), (2, direct), (3, THREE.ravel())):
            workload = Workload((Thresholds(SIZES, ((0, 1, 2),), least=least),))
            np.testing.assert_allclose(np.concatenate(list(found.answers(workload))), expected)
            picked = workload.by_cell().take([5, 0, 23])
            np.testing.assert_allclose(np.concatenate(list(found.answers(picked))), expected[[5, 0, 23]])


@pytest.mark.parametrize("value", [0, -1, 4])
def test_thresholds_that_cannot_be_are_refused(value):
    arrays = replace(model(), thresholds={((0, 1, 2), 2): Noisy(THREE.ravel(), 0.3)}).arrays()
    assert arrays["least.3"].tolist() == [2]
    with pytest.raises(CorruptionError, match="must be marginals of its schema"):
        Answers.from_arrays(SIZES, arrays | {"least.3": np.array([value])})


@pytest.mark.parametrize("name", ["least.7", "other"])
def test_arrays_too_many_are_refused(name):
    with pytest.raises((CorruptionError, KeyError)):
        Answers.from_arrays(SIZES, model().arrays() | {name: np.array([1])})
