"""Intervals: where the true answer of a query lies, by what was measured, with a given confidence.

The noise of every measurement is known, so what follows from measurements by sums has an interval,

    estimate +- z sqrt(sigma^2 + (tau (estimate - e))^2),      z = the normal quantile of the confidence,

with sigma the standard deviation of the estimate's noise. Where the number of rows n is private, fractions are of a
noisy total with a standard deviation of tau n: that moves all of a fraction but the part e that is known without it.

Which estimate: the answers of `gaussian` are their own, as measured. Otherwise it is the least squares estimate from
all marginals that were measured whole (models/least_squares.py), or, of single queries, what was measured of them; of
tests and bands of native numbers likewise what was measured, whose noise is independent of all other. A query that
follows from no measurement has no interval, however well a model may answer it.

A model's answer, which weighs all measurements and knows that rows are never negative, is as a rule nearer to the truth
than the middle of the interval, and seldom outside of it. Confidence is about the noise alone, over runs of the
mechanism on the same table: not about a population of which the table is a sample. Where rounds choose what to measure
by earlier noise, the noise of each measurement is new all the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.bands import Bands
from anamorph.curator.budget import gaussian_sigma
from anamorph.curator.tallies import AtLeast, GroupBy, Tally, Tests, codes_of, held, marginal_cells
from anamorph.curator.where import Where
from anamorph.errors import ParameterError
from anamorph.models.answers import Answers
from anamorph.models.least_squares import LeastSquares, least_squares, readings
from anamorph.release import Measurement, Release

Features = tuple[int, ...]
Reals = NDArray[np.float64]
Weighed = tuple[Where, Reals]
"""Prefixes of native numbers, and the weight of each of their cells: tests by cells."""


class Estimate(NamedTuple):
    """Estimates and their noise, NaN where there are none; the part of each that needs no number of rows."""

    value: Reals
    sigma: Reals
    base: float


class Known(Protocol):
    """What measurements say of queries."""

    def tally(self, tally: GroupBy | AtLeast) -> Estimate:
        """Returns the estimates of all queries of a tally."""
        ...

    def numbers(self, tally: Where | Bands) -> Estimate:
        """Returns the estimates of all queries of a tally of native numbers."""
        ...

    def weighted(self, features: Features, weights: Reals, tests: Sequence[Weighed] = ()) -> Estimate:
        """Returns the estimate of a weighted sum of the cells of a marginal, features sorted, an axis for each.

        Added to it are weighted cells of tests; of no features, the weight itself.
        """
        ...


@dataclass(frozen=True, eq=False)
class Intervals:
    """The intervals of a release."""

    known: Known
    tau: float
    """The standard deviation of the number of rows, as a fraction of it."""
    quantile: float

    def tally(self, tally: Tally) -> tuple[Reals, Reals]:
        """Returns the lower and the upper ends for all queries of a tally, NaN where there is no interval."""
        if isinstance(tally, GroupBy | AtLeast):
            return self.ends(self.known.tally(tally))
        if isinstance(tally, Where | Bands):
            return self.ends(self.known.numbers(tally))
        nothing = np.full(tally.cells, np.nan)
        return nothing, nothing

    def weighted(
        self, features: Features, weights: Reals, tests: Sequence[Weighed] = ()
    ) -> tuple[float, float, float] | None:
        """Returns the standard deviation and the ends for a weighted sum of cells, or None."""
        found = self.known.weighted(features, weights, tests)
        if np.isnan(found.value):
            return None
        low, high = self.ends(found)
        return float(self.spread(found)), float(low), float(high)

    def spread(self, found: Estimate) -> Reals:
        """Returns the standard deviations of fractions."""
        return np.hypot(found.sigma, self.tau * (found.value - found.base))

    def ends(self, found: Estimate) -> tuple[Reals, Reals]:
        """Returns both ends; neither is below 0 or above 1."""
        reach = self.quantile * self.spread(found)
        return np.clip(found.value - reach, 0, 1), np.clip(found.value + reach, 0, 1)


def intervals(release: Release, confidence: float = 0.95) -> Intervals:
    """Returns the intervals of a release."""
    if not 0 < confidence < 1:
        raise ParameterError(f"confidence ({confidence!r}) must be in (0, 1)")
    model, sizes = release.model, release.schema.sizes
    if isinstance(model, Answers):
        known: Known = AsMeasured(model)
    else:
        logged = release.measurements
        known = Derived(least_squares(sizes, logged), single_cells(sizes, logged), measured_tests(logged))
    spent = [spend.rho for spend in release.privacy.spends if spend.kind == "total"]
    tau = gaussian_sigma(1, spent[0]) / release.total if spent else 0.0
    return Intervals(known, tau, NormalDist().inv_cdf((1 + confidence) / 2))


@dataclass(frozen=True, eq=False)
class AsMeasured:
    """Noisy answers are their own estimates."""

    model: Answers

    def tally(self, tally: GroupBy | AtLeast) -> Estimate:
        """Returns the noisy answers; a threshold that was not measured itself is a sum of cells."""
        value = self.model.answer(tally)
        slab = tally.slab if isinstance(tally, AtLeast) else tally
        least = tally.least if isinstance(tally, AtLeast) else len(slab.features)
        if (noisy := self.model.thresholds.get((slab.features, least))) is not None:
            return Estimate(value, np.full(value.size, noisy.sigma), 0.0)
        sigma = self.deviation(slab.features, held((slab.sizes, slab.features, least)))
        return Estimate(value, np.full(value.size, sigma), 0.0)

    def numbers(self, tally: Where | Bands) -> Estimate:
        """Returns nothing: no noisy answer is of native numbers."""
        nothing = np.full(tally.cells, np.nan)
        return Estimate(nothing, nothing, 0.0)

    def weighted(self, features: Features, weights: Reals, tests: Sequence[Weighed] = ()) -> Estimate:
        """Returns the weighted sum of noisy answers; none of them is of a test."""
        if tests or not features:
            return Estimate(np.array(np.nan), np.array(np.nan), 0.0)
        value = float(weights.ravel() @ self.model.marginal(features))
        return Estimate(np.array(value), np.array(self.deviation(features, float(np.sum(weights**2)))), 0.0)

    def deviation(self, features: Features, squares: float) -> float:
        """Returns the standard deviation of a sum of cells, given the sum of its squared weights."""
        over = self.model.best(features)
        folded = marginal_cells(self.model.sizes, over) / marginal_cells(self.model.sizes, features)
        return self.model.sigma[over] * math.sqrt(folded * squares)


@dataclass(frozen=True, eq=False)
class Derived:
    """What follows from marginals that were measured whole, or else from single cells."""

    linear: LeastSquares
    singles: Mapping[Features, Mapping[int, tuple[float, float]]]
    """By sorted features: position, noisy fraction and sigma of each cell that was measured."""
    tests: Mapping[Hashable, tuple[Reals, float]] = field(default_factory=dict)
    """By what identifies a test, or a marginal of bands: the noisy fractions of its cells, and their sigma."""

    def tally(self, tally: GroupBy | AtLeast) -> Estimate:
        """Returns the estimates of a slab of marginals or thresholds; those of one block have one sigma."""
        slab = tally.slab if isinstance(tally, AtLeast) else tally
        features = tuple(sorted(slab.features))
        if self.linear.knows(features):
            least = tally.least if isinstance(tally, AtLeast) else len(features)
            weights = threshold_weights(slab.sizes, features, least)
            sigma = self.linear.weighted(features, weights).sigma
            base = float(weights.sum()) / weights.size
            return Estimate(self.linear.answer(tally), np.full(tally.cells, sigma), base)
        nothing = np.full(tally.cells, np.nan)
        if isinstance(tally, AtLeast) or features not in self.singles:
            return Estimate(nothing, nothing, 0.0)
        values, sigmas = nothing.copy(), nothing.copy()
        mine = {ordered(slab, features, cell): reading for cell, reading in self.singles[features].items()}
        for position, (value, sigma) in mine.items():
            if 0 <= position - slab.offset < slab.cells:
                values[position - slab.offset], sigmas[position - slab.offset] = value, sigma
        return Estimate(values, sigmas, 0.0)

    def numbers(self, tally: Where | Bands) -> Estimate:
        """Returns what was measured of tests, or of a marginal of bands."""
        keys = list(identities(tally))
        width = tally.cells // len(keys)
        found = [self.tests.get(key, (np.full(width, np.nan), np.nan)) for key in keys]
        sigma = np.repeat([noise for _, noise in found], width)
        return Estimate(np.concatenate([values for values, _ in found]), sigma, 0.0)

    def weighted(self, features: Features, weights: Reals, tests: Sequence[Weighed] = ()) -> Estimate:
        """Returns the weighted sum, if everything with a weight is known."""
        value, variance, base = 0.0, 0.0, 0.0
        if not features:
            value = base = float(weights)
        elif not tests or np.any(weights):
            found = self.cells(features, weights)
            value, variance, base = float(found.value), float(found.sigma) ** 2, found.base
        for tally, each in tests:
            for key, mine in zip(tally.identities(), each, strict=True):
                noisy, sigma = self.tests.get(key, (np.full(tally.width, np.nan), np.nan))
                value, variance = value + float(mine @ noisy), variance + sigma**2 * float(mine @ mine)
        return Estimate(np.array(value), np.array(math.sqrt(variance)), base)

    def cells(self, features: Features, weights: Reals) -> Estimate:
        """Returns the weighted sum, if the marginal is known, or every cell with a weight was measured."""
        if self.linear.knows(features):
            value, sigma = self.linear.weighted(features, weights)
            return Estimate(np.array(value), np.array(sigma), float(weights.sum()) / weights.size)
        cells, flat = self.singles.get(features, {}), weights.ravel()
        needed = np.flatnonzero(flat)
        if not needed.size or not all(int(cell) in cells for cell in needed):
            return Estimate(np.array(np.nan), np.array(np.nan), 0.0)
        found = np.array([cells[int(cell)] for cell in needed])
        value, sigma = flat[needed] @ found[:, 0], math.sqrt(flat[needed] ** 2 @ found[:, 1] ** 2)
        return Estimate(np.array(value), np.array(sigma), 0.0)


def threshold_weights(sizes: tuple[int, ...], features: Features, least: int) -> Reals:
    """Returns 1 for the cells of a marginal that agree with its first in at least `least` features."""
    codes = np.indices([sizes[feature] for feature in features], sparse=True)
    alike = sum((code == 0).astype(np.int64) for code in codes)
    return np.asarray(alike >= least, np.float64)


def ordered(slab: GroupBy, features: Features, cell: int) -> int:
    """Returns the position of a cell in a marginal with its features in another order."""
    codes = dict(zip(features, codes_of(slab.sizes, features, np.array([cell]))[0].tolist(), strict=True))
    return int(np.ravel_multi_index([codes[f] for f in slab.features], [slab.sizes[f] for f in slab.features]))


def single_cells(
    sizes: tuple[int, ...], measurements: tuple[Measurement, ...]
) -> dict[Features, dict[int, tuple[float, float]]]:
    """Returns what was measured of single cells of marginals."""
    found: dict[Features, dict[int, tuple[float, float]]] = {}
    for tally, values, sigma in readings(measurements):
        if not isinstance(tally, Tests):
            continue
        for index, features in enumerate(tally.sets):
            if tally.needed(index) == len(features):
                key = tuple(sorted(features))
                codes = tally.codes(index)[:, np.argsort(features)]
                cells = np.asarray(np.ravel_multi_index(tuple(codes.T), [sizes[feature] for feature in key]))
                noisy = values[tally.which == index]
                mine = {cell: (value, sigma) for cell, value in zip(cells.tolist(), noisy.tolist(), strict=True)}
                found.setdefault(key, {}).update(mine)
    return found


def measured_tests(measurements: tuple[Measurement, ...]) -> dict[Hashable, tuple[Reals, float]]:
    """Returns what was measured of tests and bands of numbers, the least noisy of each."""
    found: dict[Hashable, tuple[Reals, float]] = {}
    for tally, values, sigma in readings(measurements):
        if isinstance(tally, Where | Bands):
            keys = list(identities(tally))
            for key, noisy in zip(keys, values.reshape(len(keys), -1), strict=True):
                if key not in found or sigma < found[key][1]:
                    found[key] = noisy, sigma
    return found


def identities(tally: Where | Bands) -> Iterable[Hashable]:
    """Returns what tells each test of a tally, or a marginal of bands, from all others."""
    return tally.identities() if isinstance(tally, Where) else (tally,)
