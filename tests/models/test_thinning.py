"""Thinning: the halves of a measurement have noise of their own, and together are the measurement."""

from __future__ import annotations

import numpy as np
import pytest
from fits import SIZES, measure, truth

from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.models.least_squares import as_marginals
from anamorph.models.thinning import spread, thinned
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.strategies import strategy
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SCHEMA = Schema.from_dict(
    {"columns": {f"c{i}": {"type": "codes", "values": size, "source": "public"} for i, size in enumerate(SIZES)}}
)
SETS = ((0,), (0, 1), (1, 2))
BLOCKS = Workload((Marginals(SIZES, SETS),))
SIGMAS = np.array([0.5, 1.0, 4.0]) / 100


def measured(limit=None):
    workload = BLOCKS if limit is None else Workload(BLOCKS.parts, limit=limit)
    return Measurement(workload, np.linspace(0, 1, BLOCKS.cells), SIGMAS, 100.0)


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_each_answer_has_the_sigma_of_its_block(limit):
    np.testing.assert_array_equal(spread(measured(limit)), np.repeat(SIGMAS, [3, 6, 8]))


def test_functions_have_a_sigma_each():
    function = custom(lambda row: row["c0"], SCHEMA).by_cell()
    item = Measurement(Workload((function,)), np.zeros(3), np.array([1.0, 2.0, 3.0]), 100.0)
    np.testing.assert_array_equal(spread(item), [1.0, 2.0, 3.0])


def test_halves_are_the_measurement_together_and_have_twice_its_variance():
    log = (measured(), measure(Workload((Marginals(SIZES, ((2,),)),)), np.full(4, 0.25)))
    halves = thinned(log, seed=1)
    for item, first, second in zip(log, *halves, strict=True):
        np.testing.assert_allclose((first.values + second.values) / 2, item.values, atol=1e-12)
        for half in (first, second):
            assert (half.workload, half.total) == (item.workload, item.total)
            np.testing.assert_allclose(half.sigma, item.sigma * np.sqrt(2))
            assert np.all(half.values != item.values)
    assert not np.allclose(halves[0][0].values[:4], halves[0][1].values[:4]), "each measurement is drawn for itself"


def test_halves_are_those_of_a_seed():
    for first, again in zip(thinned((measured(),), seed=1), thinned((measured(),), seed=1), strict=True):
        np.testing.assert_array_equal(first[0].values, again[0].values)
    other = thinned((measured(),), seed=2)
    assert not np.allclose(other[0][0].values, thinned((measured(),), seed=1)[0][0].values)


@pytest.mark.parametrize("residuals", [False, True])
def test_the_noise_of_one_half_says_nothing_of_the_other(residuals):
    """Of 400 measurements of the same rows, whatever was measured, and of the marginals that a fit is told."""
    rows = np.random.default_rng(0).integers(0, SIZES, (500, 3)).astype(np.int32)
    source = TableSource(Table(rows, SIZES), SCHEMA)
    asked = dict.fromkeys(((0, 1), (0, 2), (1, 2)), 1.0)
    queries = strategy(SIZES, asked, residuals=residuals).workload()
    exact = {features: truth_of(rows, features) for features in asked}
    noise = []
    for seed in range(400):
        curator = Curator(source, Budget(epsilon=1.0, delta=1e-6), unsafe_seed=seed)
        log = (curator.measure(queries, rho=curator.remaining),)
        told = [as_marginals(SIZES, half) for half in thinned(log, seed=seed)]
        noise.append([pairs(item) - np.concatenate([exact[f] for f in pair_sets(item)]) for item in told])
    first, second = np.array(noise).transpose(1, 2, 0)
    together = np.mean(first * second, axis=1) / np.sqrt(np.mean(first**2, axis=1) * np.mean(second**2, axis=1))
    assert np.all(np.abs(together) < 4.5 / np.sqrt(400))
    np.testing.assert_allclose(np.mean(first**2, axis=1), np.mean(second**2, axis=1), rtol=0.5)


def truth_of(rows, features):
    found = np.zeros([SIZES[feature] for feature in features])
    np.add.at(found, tuple(rows[:, feature] for feature in features), 1 / len(rows))
    return found.ravel()


def pair_sets(item):
    return [features for part in item.workload.parts for features in part.sets if len(features) == 2]


def pairs(item):
    cells = [(features, np.prod([SIZES[f] for f in features])) for p in item.workload.parts for features in p.sets]
    parts = np.split(item.values, np.cumsum([size for _, size in cells])[:-1])
    return np.concatenate([part for (features, _), part in zip(cells, parts, strict=True) if len(features) == 2])


def test_what_is_held_back_tells_how_far_a_fit_is():
    """The expected chi^2 of the second half is the number of answers and half of the squared distance in sigmas."""
    exact, sigma = truth(BLOCKS), 0.02
    guess = exact + np.linspace(-0.1, 0.1, BLOCKS.cells)
    found = []
    for seed in range(300):
        heard = measure(BLOCKS, exact + np.random.default_rng(seed).normal(0, sigma, BLOCKS.cells), sigma=sigma)
        _, (held,) = thinned((heard,), seed=seed)
        found.append(np.sum((guess - held.values) ** 2) / (2 * sigma**2))
    expected = BLOCKS.cells + np.sum((guess - exact) ** 2) / (2 * sigma**2)
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / np.sqrt(300))
