"""Quieting: what noise explains of how columns depend on each other, and what is left of it."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
from fits import measure

from anamorph.models.least_squares import centred, least_squares
from anamorph.models.quieting import distribution, plainest, quiet, quiet_share, quieted
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload

SIZES = (6, 9, 4)
SINGLES = Marginals(SIZES, ((0,), (1,), (2,)))
PAIRS = Marginals(SIZES, ((1, 0), (2, 1)))
INNER = Marginals(SIZES, ((0, 1), (0, 2), (1, 2)))
TRIPLE = Marginals(SIZES, ((2, 0, 1),))
SIGMA = 1e-3


def columns():
    generator = np.random.default_rng(1)
    return [generator.dirichlet(np.full(size, 2.0)) for size in SIZES]


def independent():
    """Columns that have nothing to do with each other."""
    return reduce(np.multiply.outer, columns())


def chain():
    """Columns of which the second depends on the first, and the third on the second alone."""
    first, generator = columns()[0], np.random.default_rng(2)
    second, third = (generator.dirichlet(np.full(SIZES[after], 0.5), SIZES[after - 1]) for after in (1, 2))
    return np.einsum("a,ab,bc->abc", first, second, third)


def answers(joint, features):
    """Returns a marginal of a joint distribution, in the order of its features."""
    return joint.sum(axis=tuple(set(range(3)) - set(features))).transpose(np.argsort(np.argsort(features)))


def log(*parts, joint=None, shift=None, sigma=SIGMA, seed=0, **more):
    """Noisy marginals, of independent columns unless another joint distribution is given; the first pair is shifted."""
    workload = Workload(parts, **more)
    sets = [features for part in parts for features in part.sets]
    blocks = [answers(independent() if joint is None else joint, features) for features in sets]
    values = np.concatenate([block.ravel() for block in blocks])
    if shift is not None:
        values[sum(SIZES) : sum(SIZES) + shift.size] += shift.ravel()
    noise = sigma * np.random.default_rng(seed).standard_normal(values.size)
    return (measure(workload, values + noise, sigma=sigma, total=1e4),)


def pair(measurements, first=True):
    begin = sum(SIZES) if first else sum(SIZES) + 54
    size, shape = (54, (9, 6)) if first else (36, (4, 9))
    return measurements[0].values[begin : begin + size].reshape(shape)


def distances(found, features):
    """Returns by how much an interaction differs from the plainest."""
    model = least_squares(SIZES, found)
    return np.abs(model.parts[features].values - centred(plainest(model, features))).max()


def test_answers_are_in_the_order_of_the_features():
    joint = np.random.default_rng(3).random(SIZES)
    np.testing.assert_array_equal(answers(joint, (2, 0, 1)), joint.transpose(2, 0, 1))
    np.testing.assert_allclose(answers(joint, (1, 0)), joint.sum(axis=2).T)


def test_a_quiet_pair_has_the_interaction_of_the_product_and_keeps_its_margins():
    given = log(SINGLES, PAIRS)
    found = quieted(given, 2.0)
    assert found is not given
    for first in (True, False):
        before, after = pair(given, first), pair(found, first)
        assert np.abs(after - before).max() > SIGMA
        np.testing.assert_allclose(after.sum(axis=0), before.sum(axis=0), atol=1e-12)
        np.testing.assert_allclose(after.sum(axis=1), before.sum(axis=1), atol=1e-12)
    known = least_squares(SIZES, given)
    for features in ((0, 1), (1, 2)):
        product = np.outer(*(known.marginal((feature,)) for feature in features))
        np.testing.assert_allclose(least_squares(SIZES, found).parts[features].values, centred(product), atol=1e-12)
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
        return np.mean([quiet_share(log(SINGLES, PAIRS, seed=seed), loudness) for seed in range(60)])

    assert 0.5 < share(1.0) < share(2.0)
    assert share(2.0) > 0.85


def test_the_share_counts_dimensions():
    shift = 20 * SIGMA * np.outer([1, -1, *[0] * 7], [1, -1, 0, 0, 0, 0])
    assert quiet_share(log(SINGLES, PAIRS, shift=shift), 2.0) == pytest.approx(24 / (24 + 40))
    assert quiet_share(log(SINGLES), 2.0) == 0
    assert quiet_share(log(SINGLES, PAIRS, joint=chain()), 2.0) == 0


@pytest.mark.parametrize("parts", [(SINGLES, INNER, TRIPLE), (TRIPLE,)])
def test_a_triple_of_independent_columns_is_quiet_with_the_pairs_inside_it(parts):
    given = log(*parts, sigma=1e-4)
    found = quieted(given, 3.0)
    assert all(distances(given, features) > 1e-5 for features in (*INNER.sets, (0, 1, 2)))
    assert all(distances(found, features) < 1e-9 for features in INNER.sets)
    # What is inside a marginal that no distribution has cannot be had by one: up to cells below 0.
    assert distances(found, (0, 1, 2)) < 0.1 * distances(given, (0, 1, 2))


def test_a_triple_whose_pairs_tell_all_is_quiet_though_they_are_loud():
    given = log(SINGLES, INNER, TRIPLE, joint=chain(), sigma=1e-4)
    found = quieted(given, 3.0)
    before, after = (least_squares(SIZES, each) for each in (given, found))
    for features in ((0, 1), (1, 2)):
        np.testing.assert_allclose(after.parts[features].values, before.parts[features].values, atol=1e-12)
    truth = centred(chain())
    far = [np.sqrt(np.mean((each.parts[0, 1, 2].values - truth) ** 2)) for each in (before, after)]
    assert far[1] < 0.5 * far[0]


def test_a_triple_that_tells_more_than_its_pairs_is_left():
    joint = independent()
    cross = reduce(np.multiply.outer, ([1, -1, 0, 0, 0, 0], [1, -1, *[0] * 7], [1, -1, 0, 0]))
    given = log(SINGLES, INNER, TRIPLE, joint=joint + 20 * SIGMA * cross)
    before, after = (least_squares(SIZES, each).parts[0, 1, 2].values for each in (given, quieted(given, 2.0)))
    np.testing.assert_allclose(after, before, atol=1e-12)


def test_the_plainest_marginal_has_those_inside_it():
    known = least_squares(SIZES, log(SINGLES, INNER, joint=chain(), sigma=1e-12))
    np.testing.assert_allclose(plainest(known, (0, 1, 2)), chain(), atol=1e-4)
    assert np.abs(independent() - chain()).max() > 1e-2
    np.testing.assert_allclose(plainest(known, (0, 1)), np.outer(*(known.marginal((f,)) for f in (0, 1))), atol=1e-12)


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


def test_where_nothing_is_quiet_measurements_are_the_same():
    for given in (log(SINGLES), log(SINGLES, PAIRS, joint=chain())):
        assert quieted(given, 2.0) is given


def test_marginals_that_are_cut_are_quieted_whole():
    whole, cut = log(SINGLES, PAIRS), log(SINGLES, PAIRS, limit=16)
    assert any(piece.tally.cells < 36 for piece in cut[0].workload.pieces() if len(piece.tally.features) == 2)
    np.testing.assert_array_equal(quieted(cut, 2.0)[0].values, quieted(whole, 2.0)[0].values)


def test_thresholds_and_single_cells_are_left():
    for part in (Thresholds(SIZES, ((0, 1, 2),), least=2), Cells(PAIRS).take(range(60))):
        more = Workload((part,))
        other = measure(more, np.full(more.cells, 0.1))
        given = (*log(SINGLES, PAIRS), other)
        first, second = quieted(given, 2.0)
        assert np.any(first.values != given[0].values)
        np.testing.assert_array_equal(second.values, other.values)
        assert quieted((other,), 2.0) == (other,)


def test_residuals_are_quieted_as_the_marginals_that_follow_from_them():
    sets = ((0,), (1,), (0, 1))
    joint = independent()
    blocks = [centred(answers(joint, features)) for features in sets]
    noise = np.random.default_rng(5).standard_normal(sum(block.size for block in blocks))
    values = np.concatenate([block.ravel() for block in blocks]) + SIGMA * noise
    given = (measure(Workload((Residuals(SIZES, sets),)), values, sigma=SIGMA, total=1e4),)
    assert distances(given, (0, 1)) > SIGMA
    assert distances(quieted(given, 2.0), (0, 1)) < 1e-12


@pytest.mark.parametrize("sigma", [0.5, 1e17])
def test_marginals_that_are_all_noise_leave_numbers(sigma):
    """Also where 1 is nothing beside them, and where nothing is above 0."""
    given = log(SINGLES, INNER, TRIPLE, sigma=sigma)
    given[0].values[:6] = -sigma
    found = quieted(given, 10.0)
    assert found is not given
    assert np.all(np.isfinite(found[0].values))


def test_the_nearest_distribution_is_less_a_number_and_nowhere_below_zero():
    known = least_squares(SIZES, (measure(Workload((SINGLES,)), np.linspace(-1, 5, sum(SIZES)), sigma=SIGMA),))
    found, before = distribution(known, (0,)), known.marginal((0,))
    assert found.sum() == pytest.approx(1)
    assert np.any(before < 0)
    kept = found > 0
    np.testing.assert_allclose(np.ptp((before - found)[kept]), 0, atol=1e-12)
    assert np.all(before[~kept] <= (before - found)[kept].min() + 1e-12)
