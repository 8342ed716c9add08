"""The model of measured answers: what follows from them by summation, with the least noise, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from anamorph.errors import CorruptionError, ParameterError
from anamorph.models.answers import Answers, Zero, from_measurements
from anamorph.queries.marginals import Marginals
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
        ("values.1", np.zeros(7)),
        ("values.1", np.zeros((2, 4))),
        ("values.1", np.full(8, np.nan)),
        ("values.1", np.full(8, np.inf)),
    ],
)
def test_foreign_arrays_are_refused(name, value):
    with pytest.raises(CorruptionError, match="must be marginals of its schema"):
        Answers.from_arrays(SIZES, model().arrays() | {name: value})
