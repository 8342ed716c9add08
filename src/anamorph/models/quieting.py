"""Quieting: pairs of columns whose dependence noise explains are told as independent.

A noisy marginal of two columns is the sum of what its single columns tell and of their *interaction*, the part whose
rows and columns sum to 0, of (a - 1)(b - 1) dimensions. If the columns are independent, the interaction is that of the
product of the two single columns, but for noise: with d dimensions, the squared distance from it in sigmas is chi^2 of
d, and hardly any cell is off by more than sqrt(2 ln d). A pair is *quiet* if

    chi^2 < d + loudness * sqrt(2 d)   and   every cell is off by less than sqrt(2 ln d) + loudness / 2  sigmas:

its interaction is replaced by that of the product. What remains has no noise of pairs that have nothing to tell; the
penalty of a fit need not be so strong as to throw it away, and leaves more of those that do. Both tests are needed: in
large marginals a few strong cells hide in chi^2.

Where most pairs depend on each other a little, many of these are quiet and lost. Whether quieting helps is therefore
tried on held-back noise (shrinking.py). Pairs inside larger marginals that were measured are left as they are: the
larger would go on telling of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import AtLeast, GroupBy, marginal_cells
from anamorph.release import Measurement

Reals = NDArray[np.float64]


class Told(NamedTuple):
    """A whole marginal that was measured: by which measurement, where in its answers, and its sigma."""

    measurement: int
    span: slice
    sigma: float


def quieted(measurements: Sequence[Measurement], loudness: float) -> Sequence[Measurement]:
    """Returns measurements in which quiet pairs are independent; the same where none are."""
    told, changed = told_whole(measurements), dict[int, Reals]()
    inside = {pair for features in marginals(measurements) for pair in pairs(features) if len(features) > 2}
    for features, (number, span, sigma) in told.items():
        known = len(features) == 2 and all((feature,) in told for feature in features)
        if not known or frozenset(features) in inside:
            continue
        product = np.outer(*(distribution(measurements, told[(feature,)]) for feature in features))
        values = measurements[number].values[span].reshape(product.shape)
        surplus = interaction(values) - interaction(product)
        if quiet(surplus / sigma, loudness):
            answers = changed.setdefault(number, measurements[number].values.copy())
            answers[span] = (values - surplus).ravel()
    if not changed:
        return measurements
    return tuple(
        replace(measurement, values=changed.get(number, measurement.values))
        for number, measurement in enumerate(measurements)
    )


def marginals(measurements: Sequence[Measurement]) -> Iterator[tuple[int, ...]]:
    """Yields the features of all marginals of which something was measured."""
    for measurement in measurements:
        for piece in measurement.workload.pieces():
            if isinstance(piece.tally, GroupBy | AtLeast):
                yield from piece.tally.sets


def pairs(features: tuple[int, ...]) -> Iterator[frozenset[int]]:
    """Yields the pairs inside a marginal."""
    return map(frozenset, itertools.combinations(features, 2))


def told_whole(measurements: Sequence[Measurement]) -> dict[tuple[int, ...], Told]:
    """Returns where each marginal was measured whole, the last time that it was."""
    found = {}
    for number, measurement in enumerate(measurements):
        first = 0
        for piece in measurement.workload.pieces():
            span = slice(first, first + piece.tally.cells)
            first = span.stop
            tally = piece.tally
            if not isinstance(tally, GroupBy) or piece.blocks > 1:
                continue
            if tally.cells == marginal_cells(tally.sizes, tally.features):
                found[tally.features] = Told(number, span, float(measurement.sigma[piece.first]))
    return found


def distribution(measurements: Sequence[Measurement], told: Told) -> Reals:
    """Returns what was measured of a single column, without what no distribution has."""
    values = np.maximum(measurements[told.measurement].values[told.span], 0)
    return values / values.sum() if values.any() else np.full(values.size, 1 / values.size)


def interaction(values: Reals) -> Reals:
    """Returns the part of a table that its rows and columns do not tell."""
    return values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()


def quiet(surplus: Reals, loudness: float) -> bool:
    """Returns whether noise explains an interaction, in sigmas."""
    dimensions = math.prod(size - 1 for size in surplus.shape)
    most = math.sqrt(2 * math.log(max(dimensions, 2))) + loudness / 2
    chi_squared = float(np.sum(surplus**2))
    return chi_squared < dimensions + loudness * math.sqrt(2 * dimensions) and float(np.abs(surplus).max()) < most
