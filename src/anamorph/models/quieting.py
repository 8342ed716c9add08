"""Quieting: what noise explains of how columns depend on each other is told as plainly as can be.

A marginal is the sum of the residuals of all sets of its features (least_squares.py). That of a set of two or more is
their *interaction*: what no smaller marginal tells, of d = (a - 1)(b - 1)... dimensions. The plainest marginal that has
the smaller ones inside it, that of largest entropy, has an interaction too; of a pair it is the product of the two
single columns. If there is nothing more to tell, the measured interaction is that one but for noise: their squared
distance in sigmas is chi^2 of d, and hardly any cell is off by more than sqrt(2 ln d). A set is *quiet* if

    chi^2 < d + loudness * sqrt(2 d)   and   every cell is off by less than sqrt(2 ln d) + loudness / 2  sigmas:

its interaction is replaced by the plainest. Smaller sets go first, so that what is quiet in pairs does not make triples
loud. What remains has no noise of sets that have nothing to tell; the penalty of a fit need not be so strong as to
throw it away, and leaves more of those that do. Both tests are needed: in large marginals a few strong cells hide in
chi^2.

The plainest marginal is found by fitting it to each of the smaller ones in turn (iterative proportional fitting), which
for pairs ends at once. The noise of the smaller ones is in it too, but they have fewer cells, and less of it.

Where most sets tell a little, many of these are quiet and lost. Whether quieting helps is therefore tried on held-back
noise (trials.py). Only whole marginals are changed; of single cells, thresholds and functions nothing is quieted.

Reference: Deming & Stephan 1940 (proportional fitting).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import marginal_cells
from anamorph.models.least_squares import LeastSquares, Part, centred, least_squares, measured
from anamorph.queries.residuals import subsets
from anamorph.release import Measurement

Features = tuple[int, ...]
Reals = NDArray[np.float64]

SWEEPS = 10
"""How many times the plainest marginal of three or more features is fitted to those inside it."""


def quieted(measurements: Sequence[Measurement], loudness: float) -> Sequence[Measurement]:
    """Returns measurements in which what is quiet is as plain as it can be; the same where nothing is."""
    sizes = measurements[-1].workload.sizes
    found = surpluses(least_squares(sizes, measurements), loudness)
    if not found:
        return measurements
    changed = tuple(replace(measurement, values=measurement.values.copy()) for measurement in measurements)
    for features, values, _, residual in measured(sizes, changed):
        for subset in [features] if residual else subsets(sizes, features):
            if subset in found:
                outside = marginal_cells(sizes, features) // marginal_cells(sizes, subset)
                shape = [sizes[feature] if feature in subset else 1 for feature in features]
                values[...] -= found[subset].reshape(shape) / outside
    return changed


def quiet_share(measurements: Sequence[Measurement], loudness: float) -> float:
    """Returns the share of the dimensions of all interactions that is quiet."""
    known = least_squares(measurements[-1].workload.sizes, measurements)
    quiet_ones = sum(map(dimensions, surpluses(known, loudness).values()))
    return quiet_ones / max(sum(dimensions(part.values) for part in known.parts.values() if part.values.ndim > 1), 1)


def surpluses(known: LeastSquares, loudness: float) -> dict[Features, Reals]:
    """Returns by how much the interactions of quiet sets differ from the plainest."""
    found: dict[Features, Reals] = {}
    parts = dict(known.parts)
    plainer = LeastSquares(known.sizes, parts)  # has what is quieted here
    for features in sorted(known.parts, key=len):
        if len(features) > 1 and known.knows(features):
            part, more = known.parts[features], surplus(plainer, features)
            if quiet(more / math.sqrt(part.variance), loudness):
                found[features], parts[features] = more, Part(part.values - more, part.variance)
    return found


def surplus(known: LeastSquares, features: Features) -> Reals:
    """Returns by how much an interaction differs from the plainest."""
    return known.parts[features].values - centred(plainest(known, features))


def plainest(model: LeastSquares, features: Features) -> Reals:
    """Returns about the marginal of largest entropy among those that have the marginals inside it."""
    shape = [model.sizes[feature] for feature in features]
    inside = [distribution(model, features[:axis] + features[axis + 1 :]) for axis in range(len(features))]
    found = np.ones(shape)
    for _ in range(1 if len(features) == 2 else SWEEPS):
        for axis, wanted in enumerate(inside):
            now = found.sum(axis=axis)
            found *= np.expand_dims(np.divide(wanted, now, out=np.zeros_like(now), where=now > 0), axis)
    return found


def distribution(model: LeastSquares, features: Features) -> Reals:
    """Returns the distribution that is nearest to a marginal: less a number that leaves 1, and nowhere below 0."""
    values = model.marginal(features)
    falling = -np.sort(-values)
    surplus = (np.cumsum(falling) - 1) / np.arange(1, values.size + 1)
    least = surplus[np.flatnonzero(falling >= surplus)[-1]]
    return np.maximum(values - least, 0).reshape([model.sizes[feature] for feature in features])


def quiet(more: Reals, loudness: float) -> bool:
    """Returns whether noise explains what an interaction has beyond the plainest, in sigmas."""
    free = dimensions(more)
    most = math.sqrt(2 * math.log(max(free, 2))) + loudness / 2
    return float(np.sum(more**2)) < free + loudness * math.sqrt(2 * free) and float(np.abs(more).max()) < most


def dimensions(interaction: Reals) -> int:
    """Returns in how many dimensions an interaction is free."""
    return math.prod(size - 1 for size in interaction.shape)
