"""Quieting: which pairs noise explains, and what is left of these."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
from fits import measure

from anamorph.models.quieting import interaction, quiet, quieted
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload

SIZES = (6, 9, 4)
SINGLES = Marginals(SIZES, ((0,), (1,), (2,)))
PAIRS = Marginals(SIZES, ((1, 0), (2, 1)))
SIGMA = 1e-3


def columns():
    generator = np.random.default_rng(1)
    return [generator.dirichlet(np.full(size, 2.0)) for size in SIZES]


def log(*parts, shift=None, sigma=SIGMA, seed=0, **more):
    """Noisy answers of independent columns; `shift` is added to the first pair."""
    workload, single = Workload(parts, **more), columns()
    sets = [features for part in parts for features in part.sets]
    blocks = [reduce(np.multiply.outer, (single[f] for f in features)) for features in sets]
    values = np.concatenate([block.ravel() for block in blocks])
    if shift is not None:
        values[sum(SIZES) : sum(SIZES) + shift.size] += shift.ravel()
    noise = sigma * np.random.default_rng(seed).standard_normal(values.size)
    return (measure(workload, values + noise, sigma=sigma, total=1e4),)


def pair(measurements, first=True):
    begin = sum(SIZES) if first else sum(SIZES) + 54
    size, shape = (54, (9, 6)) if first else (36, (4, 9))
    return measurements[0].values[begin : begin + size].reshape(shape)


def test_the_interaction_is_what_rows_and_columns_do_not_tell():
    values = np.random.default_rng(2).normal(size=(5, 7))
    found = interaction(values)
    np.testing.assert_allclose([*found.sum(axis=0), *found.sum(axis=1)], 0, atol=1e-12)
    rest = values - found
    np.testing.assert_allclose(rest - rest[:1] - rest[:, :1] + rest[0, 0], 0, atol=1e-12)
    np.testing.assert_allclose(interaction(rest), 0, atol=1e-12)


def test_a_quiet_pair_has_the_interaction_of_the_product_and_keeps_its_margins():
    given = log(SINGLES, PAIRS)
    found = quieted(given, 2.0)
    assert found is not given
    for first, (left, right) in ((True, (1, 0)), (False, (2, 1))):
        before, after = pair(given, first), pair(found, first)
        np.testing.assert_allclose(after.sum(axis=0), before.sum(axis=0), atol=1e-12)
        np.testing.assert_allclose(after.sum(axis=1), before.sum(axis=1), atol=1e-12)
        ends = np.cumsum((0, *SIZES))
        single = [np.maximum(given[0].values[ends[f] : ends[f + 1]], 0) for f in (left, right)]
        product = np.outer(*(values / values.sum() for values in single))
        np.testing.assert_allclose(interaction(after), interaction(product), atol=1e-12)
    np.testing.assert_array_equal(found[0].values[: sum(SIZES)], given[0].values[: sum(SIZES)])
    np.testing.assert_array_equal(found[0].sigma, given[0].sigma)


@pytest.mark.parametrize(
    "shift", [20 * SIGMA * np.outer([1, -1, *[0] * 7], [1, -1, 0, 0, 0, 0]), 2 * SIGMA * np.sign(np.sin(np.arange(54)))]
)
def test_a_pair_that_stands_out_is_left(shift):
    """By few cells, or by many a little; the other pair is quiet."""
    given = log(SINGLES, PAIRS, shift=np.reshape(shift, (9, 6)))
    found = quieted(given, 2.0)
    np.testing.assert_array_equal(pair(found), pair(given))
    assert np.any(pair(found, first=False) != pair(given, first=False))


def test_most_pairs_of_independent_columns_are_quiet_the_more_the_louder_others_must_be():
    def share(loudness):
        changed = [
            [np.any(pair(quieted(given, loudness), first) != pair(given, first)) for first in (True, False)]
            for given in (log(SINGLES, PAIRS, seed=seed) for seed in range(60))
        ]
        return np.mean(changed)

    assert 0.5 < share(1.0) < share(2.0)
    assert share(2.0) > 0.85


@pytest.mark.parametrize(
    ("cells", "chi_squared", "loudness", "expected"),
    [
        (np.zeros((3, 4)), 0, 0.0, True),
        (np.full((3, 4), math.sqrt(0.49)), 5.88, 0.0, True),
        (np.full((3, 4), math.sqrt(0.51)), 6.12, 0.0, False),
        (np.full((3, 4), math.sqrt(0.51)), 6.12, 1.0, True),
        (np.pad([[1.90]], ((0, 2), (0, 3))), 3.61, 0.0, False),
        (np.pad([[1.90]], ((0, 2), (0, 3))), 3.61, 0.1, True),
    ],
)
def test_noise_explains_by_chi_squared_and_by_the_largest_cell(cells, chi_squared, loudness, expected):
    """Of six dimensions: sqrt(2 ln 6) is 1.893."""
    assert np.sum(cells**2) == pytest.approx(chi_squared)
    assert quiet(cells, loudness) is expected


@pytest.mark.parametrize(
    "parts",
    [
        (SINGLES,),
        (Marginals(SIZES, ((0,), (2,))), Marginals(SIZES, ((0, 1),))),
        (SINGLES, Marginals(SIZES, ((0, 1), (0, 1, 2)))),
    ],
)
def test_pairs_inside_others_or_without_their_columns_are_left(parts):
    given = log(*parts)
    assert quieted(given, 2.0) is given


def test_pairs_inside_thresholds_are_left():
    more = Workload((Thresholds(SIZES, ((0, 1, 2),), least=2),))
    given = (*log(SINGLES, PAIRS), measure(more, np.zeros(more.cells)))
    assert quieted(given, 2.0) is given


def test_pairs_that_are_cut_are_left():
    given = log(SINGLES, PAIRS, limit=16)
    assert any(piece.tally.cells < 36 for piece in given[0].workload.pieces() if len(piece.tally.features) == 2)
    assert quieted(given, 2.0) is given


def test_single_cells_are_no_marginals():
    cells = Cells(PAIRS)
    workload = Workload((SINGLES, cells))
    given = (measure(workload, np.full(workload.cells, 0.1)),)
    assert quieted(given, 2.0) is given


def test_columns_without_anything_above_zero_are_taken_as_level():
    given = log(SINGLES, PAIRS, sigma=0.5)
    given[0].values[:6] = -1.0
    found = quieted(given, 10.0)
    assert found is not given
    assert np.all(np.isfinite(found[0].values))
