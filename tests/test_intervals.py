"""Intervals: the formulas by hand, and how often they hold the truth over many runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import AtLeast, GroupBy, RowFunction
from anamorph.curator.where import Where
from anamorph.errors import ParameterError
from anamorph.intervals import intervals, threshold_weights
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.hdmm import HDMM
from anamorph.mechanisms.rap import RAP
from anamorph.models.answers import Answers, Noisy, Zero
from anamorph.queries.bands import Banded
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Privacy, Release, Spend
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SIZES = (3, 2, 4)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
Z = 1.959963984540054


def release(model, measurements=(), total=100.0, spends=(), relation="replace"):
    return Release(SCHEMA, model, measurements, Privacy(relation, 1.0, 1e-6, 0.1, spends), total)


def whole(*features, prefix=()):
    return GroupBy(SIZES, features, 0, SIZES[features[len(prefix)]], prefix)


def widths(found, tally):
    low, high = found.tally(tally)
    return (high - low) / 2 / Z


THREE = np.random.default_rng(0).uniform(0.3, 0.6, 24)
ANSWERS = Answers(
    SIZES,
    {(0, 1, 2): THREE, (0,): np.array([0.4, 0.35, 0.3])},
    {(0, 1, 2): 0.01, (0,): 0.02},
    {((0, 1), 1): Noisy(np.linspace(0.3, 0.5, 6), 0.015)},
)


def test_noisy_answers_are_their_own_estimates():
    """A sum of c cells of one marginal has sqrt(c) times the noise of one."""
    found = intervals(release(ANSWERS))
    low, high = found.tally(whole(0, 1, 2))
    np.testing.assert_allclose(low, THREE - Z * 0.01)
    np.testing.assert_allclose(high, THREE + Z * 0.01)
    low, high = found.tally(GroupBy(SIZES, (0, 1, 2), 1, 2, (2,)))
    np.testing.assert_allclose(low, (THREE - Z * 0.01).reshape(SIZES)[2, 1])
    np.testing.assert_allclose(high, (THREE + Z * 0.01).reshape(SIZES)[2, 1])
    np.testing.assert_allclose(widths(found, whole(0)), 0.02)
    loose = Answers(SIZES, {(0, 1, 2): THREE / 24}, {(0, 1, 2): 1e-4})
    found = intervals(release(loose))
    np.testing.assert_allclose(widths(found, whole(1)), 1e-4 * math.sqrt(12))
    np.testing.assert_allclose(widths(found, whole(2, 0)), 1e-4 * math.sqrt(2))
    np.testing.assert_allclose(widths(found, AtLeast(whole(2, 0), 2)), 1e-4 * math.sqrt(2))
    low, high = found.tally(whole(2, 0))
    np.testing.assert_allclose((low + high) / 2, THREE.reshape(SIZES).sum(axis=1).T.ravel() / 24)


def test_noisy_thresholds_are_as_measured_or_sums_of_cells():
    """Of 1 of (c0, c2) there are 3 + 4 - 1 cells, each the sum of 2; of 1 of (c0, c1) the noise was measured itself."""
    model = replace(ANSWERS, marginals={(0, 1, 2): THREE / 24})
    found = intervals(release(model))
    np.testing.assert_allclose(widths(found, AtLeast(whole(0, 1), 1)), 0.015)
    small = replace(model, sigma={(0, 1, 2): 1e-3})
    found = intervals(release(small))
    np.testing.assert_allclose(widths(found, AtLeast(whole(0, 2), 1)), 1e-3 * math.sqrt(2 * 6))
    np.testing.assert_allclose(widths(found, AtLeast(whole(0, 1, 2), 2)), 1e-3 * math.sqrt(1 + 2 + 1 + 3))


def test_weighted_sums_of_noisy_answers():
    weights = np.zeros((3, 4))
    weights[0, :2] = 0.5, 1.0
    sigma, low, high = intervals(release(ANSWERS)).weighted((0, 2), weights)
    value = float(np.sum(weights * THREE.reshape(SIZES).sum(axis=1)))
    assert sigma == pytest.approx(0.01 * math.sqrt(2 * 1.25))
    assert (low, high) == pytest.approx((min(1, value - Z * sigma), 1.0))
    with pytest.raises(ParameterError, match="must be one that was measured"):
        intervals(release(Answers(SIZES, {(0,): np.ones(3) / 3}, {(0,): 0.1}))).weighted((1,), np.ones(2))


def test_the_noise_of_a_private_number_of_rows_is_added():
    """Sigma of the total is 1 / sqrt(2 rho) = 5 rows, of 100: tau = 0.05; noisy answers move with all of it."""
    spends = (Spend("total", 0.02, "rows"), Spend("measure", 0.5, "more"))
    found = intervals(release(ANSWERS, spends=spends, relation="add-remove"))
    assert found.tau == pytest.approx(0.05)
    low, high = found.tally(whole(0, 1, 2))
    reach = Z * np.hypot(0.01, 0.05 * THREE)
    np.testing.assert_allclose(low, THREE - reach)
    np.testing.assert_allclose(high, THREE + reach)
    assert found.weighted((0,), np.array([1.0, 0, 0]))[0] == pytest.approx(math.hypot(0.02, 0.05 * 0.4))
    assert intervals(release(ANSWERS, spends=spends[1:])).tau == 0


def measured(workload, sigma, seed=0, total=100.0):
    values = np.random.default_rng(seed).uniform(0.2, 0.4, workload.cells)
    return Measurement(workload, values, np.broadcast_to(np.array(sigma, float), workload.blocks).copy(), total)


PAIR = measured(Workload((Marginals(SIZES, ((2, 0),)),)), 0.03)


@pytest.mark.parametrize("tau", [0.0, 0.05])
def test_one_marginal_by_hand(tau):
    """All 12 cells sum to 1, so a cell has 1 - 1/12 of its variance, and of the rows only what is beyond 1/12 moves.

    A threshold of 1 is the sum of 6 cells: 6 - 36/12 of the variance of one.
    """
    spends = (Spend("total", 0.02, "rows"),) if tau else ()
    found = intervals(release(Zero(SIZES), (PAIR,), spends=spends))
    assert found.tau == pytest.approx(tau)
    cells = PAIR.values + (1 - PAIR.values.sum()) / 12
    reach = Z * np.hypot(0.03 * math.sqrt(1 - 1 / 12), tau * (cells - 1 / 12))
    low, high = found.tally(whole(2, 0))
    np.testing.assert_allclose(low, np.clip(cells - reach, 0, 1))
    np.testing.assert_allclose(high, np.clip(cells + reach, 0, 1))
    shaped = [ends.reshape(4, 3).T.ravel() for ends in (low, high)]
    np.testing.assert_allclose(found.tally(whole(0, 2)), shaped)
    np.testing.assert_allclose(found.tally(GroupBy(SIZES, (0, 2), 1, 3)), [ends[4:12] for ends in shaped])
    table = cells.reshape(4, 3)
    either = table.sum(axis=1, keepdims=True) + table.sum(axis=0) - table
    reach = Z * np.hypot(0.03 * math.sqrt(6 - 3), tau * (either - 1 / 2))
    low, high = found.tally(AtLeast(whole(2, 0), 1))
    np.testing.assert_allclose(low, np.clip((either - reach).ravel(), 0, 1))
    np.testing.assert_allclose(high, np.clip((either + reach).ravel(), 0, 1))
    weights = np.zeros((3, 4))
    weights[1, 1:3] = 1.0
    value = table[1:3, 1].sum()
    spread = math.hypot(0.03 * math.sqrt(2 - 4 / 12), tau * (value - 2 / 12))
    expected = (spread, max(0, value - Z * spread), value + Z * spread)
    assert found.weighted((0, 2), weights) == pytest.approx(expected)


def test_residuals_by_hand():
    """Var of a cell: the sum over B of kappa_B sigma_B^2 / (cells outside of B)^2."""
    workload = Workload((Residuals(SIZES, ((0,), (2,), (2, 0))),))
    log = Measurement(workload, np.zeros(workload.cells), np.array([0.003, 0.004, 0.005]), 100.0)
    found = intervals(release(Zero(SIZES), (log,)))
    variance = 2 / 3 * 0.003**2 / 4**2 + 3 / 4 * 0.004**2 / 3**2 + 2 / 3 * 3 / 4 * 0.005**2
    np.testing.assert_allclose(widths(found, whole(0, 2)), math.sqrt(variance))
    np.testing.assert_allclose(widths(found, whole(2)), 0.004 * math.sqrt(3 / 4))
    assert np.isnan(found.tally(whole(1))).all()


CHOSEN = Workload((Marginals(SIZES, ((2, 0), (1,))),)).by_cell().take([5, 0, 12])
"""Cells (c2, c0) = (1, 2) and (0, 0), and c1 = 0: of (c0, c2) those at 2 * 4 + 1 and 0."""


def test_single_cells_by_hand():
    log = Measurement(CHOSEN, np.array([0.2, 0.3, 0.6]), np.array([0.01, 0.01, 0.01]), 100.0)
    later = Measurement(
        Workload((Marginals(SIZES, ((0, 1),)),)).by_cell().take([3]), np.array([0.25]), np.array([0.02]), 100.0
    )
    found = intervals(release(Zero(SIZES), (log, later)))
    low, high = found.tally(whole(0, 2))
    assert np.flatnonzero(~np.isnan(low)).tolist() == np.flatnonzero(~np.isnan(high)).tolist() == [0, 9]
    assert low[[9, 0]] == pytest.approx([0.2 - Z * 0.01, 0.3 - Z * 0.01])
    assert high[[9, 0]] == pytest.approx([0.2 + Z * 0.01, 0.3 + Z * 0.01])
    low, _ = found.tally(whole(2, 0))
    assert np.flatnonzero(~np.isnan(low)).tolist() == [0, 5]
    low, _ = found.tally(GroupBy(SIZES, (0, 2), 1, 3, (2,)))
    assert low == pytest.approx([0.2 - Z * 0.01, np.nan], nan_ok=True)
    low, high = found.tally(whole(1, 0))
    assert low == pytest.approx([np.nan, np.nan, np.nan, np.nan, 0.25 - Z * 0.02, np.nan], nan_ok=True)
    weights = np.zeros((3, 4))
    weights.flat[[0, 9]] = 0.5, 1.0
    sigma = 0.01 * math.sqrt(1.25)
    assert found.weighted((0, 2), weights) == pytest.approx((sigma, 0.35 - Z * sigma, 0.35 + Z * sigma))
    weights.flat[1] = 1e-3
    assert found.weighted((0, 2), weights) is None, "of one cell nothing is known"
    assert found.weighted((0, 2), np.zeros((3, 4))) is None
    assert found.weighted((0,), np.ones(3)) is None
    assert np.isnan(found.tally(AtLeast(whole(0, 2), 1))).all()


def test_single_cells_with_a_private_number_of_rows():
    log = Measurement(CHOSEN, np.array([0.2, 0.3, 0.6]), np.full(3, 0.01), 100.0)
    found = intervals(release(Zero(SIZES), (log,), spends=(Spend("total", 0.02, "rows"),)))
    weights = np.zeros((3, 4))
    weights.flat[9] = 1.0
    assert found.weighted((0, 2), weights)[0] == pytest.approx(math.hypot(0.01, 0.05 * 0.2))
    assert widths(found, whole(1)) == pytest.approx([math.hypot(0.01, 0.05 * 0.6), np.nan], nan_ok=True)


def test_whole_marginals_are_preferred_to_single_cells():
    cell = Measurement(CHOSEN, np.array([0.9, 0.9, 0.6]), np.full(3, 1e-5), 100.0)
    alone = intervals(release(Zero(SIZES), (PAIR,)))
    both = intervals(release(Zero(SIZES), (cell, PAIR)))
    np.testing.assert_array_equal(both.tally(whole(0, 2)), alone.tally(whole(0, 2)))
    assert both.tally(whole(1))[0][0] == pytest.approx(0.6, abs=1e-4)


def test_single_thresholds_tell_nothing_of_cells():
    """They are of the same positions, and other numbers."""
    log = measured(Workload((Thresholds(SIZES, ((0, 2),), 1),)).by_cell().take([0, 5]), 0.01)
    found = intervals(release(Zero(SIZES), (log,)))
    assert np.isnan(found.tally(whole(0, 2))).all()


def test_what_was_not_measured_has_no_interval():
    function = custom(lambda row: row["c0"] / 2, SCHEMA, name="tests:half")
    found = intervals(release(Zero(SIZES), (PAIR, measured(Workload((function,)), 0.01))))
    (piece,) = CHOSEN.pieces(1 << 40)
    (value,) = Workload((function,)).pieces()
    assert isinstance(value.tally, RowFunction)
    for tally in (whole(1), whole(0, 1), AtLeast(whole(0, 1), 1), Residual(SIZES, (0, 2)), piece.tally, value.tally):
        low, high = found.tally(tally)
        assert low.shape == high.shape == (tally.cells,)
        assert np.isnan(low).all()
        assert np.isnan(high).all()
    assert found.weighted((0, 1), np.ones((3, 2))) is None
    nothing = intervals(release(Zero(SIZES)))
    assert np.isnan(nothing.tally(whole(0))).all()
    assert nothing.weighted((0,), np.ones(3)) is None


def test_tests_and_bands_of_numbers_have_what_was_measured_of_them():
    """The least noisy of several; what was not measured has nothing, nor have the same columns cut elsewhere."""
    bands = Banded(SIZES, ((0, 2), (2,)), ((), (), (1, 3)))
    tests = NumberTests(Where(SIZES, (1,), (2,), (4,), np.array([[0], [2], [1]])))
    log = [
        Measurement(
            Workload((bands, tests)), np.linspace(0.3, 0.6, 12 + 6), np.array([0.01, 0.02, *[0.03] * 3]), 100.0
        ),
        Measurement(Workload((bands.take([0]), tests.take([1]))), np.full(9 + 2, 0.45), np.array([0.04, 0.005]), 100.0),
    ]
    found = intervals(release(Zero(SIZES), tuple(log)))
    values = log[0].values
    for block, (span, sigma) in enumerate([(slice(0, 9), 0.01), (slice(9, 12), 0.02)]):
        low, high = found.tally(bands.tally(block))
        assert low == pytest.approx(values[span] - Z * sigma)
        assert high == pytest.approx(values[span] + Z * sigma)
    asked = Where(SIZES, (1,), (2,), (4,), np.array([[2], [3], [0]]))
    low, high = found.tally(asked)
    assert (low + high) / 2 == pytest.approx([0.45, 0.45, np.nan, np.nan, *values[12:14]], nan_ok=True)
    assert widths(found, asked) == pytest.approx([0.005, 0.005, np.nan, np.nan, 0.03, 0.03], nan_ok=True)
    for cuts in (((), (), (2,)), ((), (), (1, 2)), ((), (), ())):
        assert np.isnan(found.tally(Banded(SIZES, ((2,),), cuts).tally(0))).all()
    private = intervals(release(Zero(SIZES), tuple(log), spends=(Spend("total", 0.02, "rows"),)))
    assert widths(private, bands.tally(1)) == pytest.approx(np.hypot(0.02, 0.05 * values[9:12]))
    assert np.isnan(intervals(release(ANSWERS)).tally(bands.tally(0))).all()


def test_ends_are_fractions():
    model = Answers(SIZES, {(0,): np.array([-0.5, 0.001, 1.2])}, {(0,): 0.1})
    low, high = intervals(release(model)).tally(whole(0))
    assert low == pytest.approx([0, 0, 1])
    assert high == pytest.approx([0, 0.001 + Z * 0.1, 1])
    sigma, low, high = intervals(release(model)).weighted((0,), np.array([0.0, 1, 0]))
    assert (sigma, low, high) == pytest.approx((0.1, 0, 0.001 + Z * 0.1))


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.999])
def test_the_confidence_widens_the_interval(confidence):
    low, high = intervals(release(ANSWERS), confidence).tally(whole(0))
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)
    np.testing.assert_allclose((high - low) / 2, quantile * 0.02)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 95, math.nan, math.inf])
def test_what_is_no_confidence_is_refused(confidence):
    with pytest.raises(ParameterError, match=r"confidence \(.*\) must be in \(0, 1\)"):
        intervals(release(ANSWERS), confidence)


def test_the_cells_of_a_threshold():
    weights = threshold_weights(SIZES, (0, 2), 1)
    assert weights.shape == (3, 4)
    assert weights.sum() == 3 + 4 - 1
    assert weights[0, 3] == weights[2, 0] == 1
    assert weights[1, 1] == 0
    assert threshold_weights(SIZES, (0, 1, 2), 3).sum() == 1


# How often the truth is inside: over runs of the mechanism on one table.

_RANDOM = np.random.default_rng(0)
CODES = np.stack(
    [_RANDOM.choice(3, 2000, p=[0.85, 0.1, 0.05]), _RANDOM.integers(0, 2, 2000), _RANDOM.integers(0, 4, 2000)], axis=1
).astype(np.int32)
PAIRS = Workload((Marginals(SIZES, tuple(itertools.combinations(range(3), 2))),))
ASKED = Workload((*PAIRS.parts, Marginals(SIZES, ((0,), (2,))), Thresholds(SIZES, ((0, 1),), 1)))
RUNS = 200
MECHANISMS = {
    "gaussian": Gaussian(),
    "hdmm": HDMM(),
    "hdmm residuals": HDMM(strategy="residuals"),
    "rap": RAP(rounds=2, per_round=6, rows=10, steps=3, rate=0.02),
    "aim": AIM(rounds=2, iterations=10),
}


def truth():
    found = []
    for piece in ASKED.pieces():
        slab, least = (piece.tally.slab, piece.tally.least) if isinstance(piece.tally, AtLeast) else (piece.tally, 0)
        cells = np.indices([SIZES[f] for f in slab.features]).reshape(len(slab.features), -1).T
        alike = (CODES[:, None, slab.features] == cells).sum(axis=2)
        found.append(np.mean(alike >= (least or len(slab.features)), axis=0))
    return np.concatenate(found)


def scores(name, relation):
    """For every run and query, how many of its standard deviations the truth is away from the middle; NaN: none."""
    exact, found = truth(), []
    source = TableSource(Table(CODES, SIZES), SCHEMA)
    for seed in range(RUNS):
        curator = Curator(source, Budget(epsilon=1.0, delta=1e-6), neighbours=relation, unsafe_seed=seed)
        known = intervals(MECHANISMS[name](curator, PAIRS, seed=seed))
        estimates = [known.known.tally(piece.tally) for piece in ASKED.pieces()]
        values = np.concatenate([estimate.value for estimate in estimates])
        found.append((values - exact) / np.concatenate([known.spread(estimate) for estimate in estimates]))
    return np.array(found)


def coverage(found, stretch=1.0):
    """The share of the intervals that hold the truth, and its standard error.

    Intervals of one run are correlated, and runs may have different numbers of them; but runs are independent. So the
    error is that of a ratio of sums over runs: its variance that of (hits - share * intervals), over all intervals.
    """
    inside = np.sum(np.abs(found) <= stretch * Z, axis=1)
    known = np.sum(~np.isnan(found), axis=1)
    share = inside.sum() / known.sum()
    return share, math.sqrt(np.sum((inside - share * known) ** 2)) / known.sum()


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_intervals_hold_the_truth_as_often_as_they_say(name, relation, monkeypatch):
    """Within 4 standard errors, which no sigma that is wrong by a factor of 1.3, either way, would be.

    The runs are seeded: what passes once passes always.
    """
    if name == "hdmm":  # its strategy is the same in every run, and takes longer to find than the rest
        queries = MECHANISMS[name].queries(PAIRS)
        monkeypatch.setattr(HDMM, "queries", lambda *_: queries)
    found = scores(name, relation)
    assert np.mean(~np.isnan(found)) > 0.05
    share, error = coverage(found)
    assert error < 0.012
    assert abs(share - 0.95) < 4 * error
    for stretch in (1 / 1.3, 1.3):
        wrong, error = coverage(found, stretch)
        assert abs(wrong - 0.95) > 4 * error
