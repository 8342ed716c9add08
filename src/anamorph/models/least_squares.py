"""Least squares: the answers that follow from noisy marginals, put together from their residuals.

A marginal is the sum of the residuals r_B of all sets B of its features (see curator/residuals.py), each spread evenly
over the features outside of B. A measured marginal A with noise of variance s^2 in each cell tells of the residual of
every B within A, by summing and centring, with independent noise of variance s^2 prod of the sizes outside of B; the
residuals of one marginal are independent of one another, being projections onto orthogonal spaces. So the least squares
estimate of everything, given all measurements, is for each residual the mean of what was measured of it, weighted by
precision: no system is solved, and the variance of any sum of cells is known,

    r_B = sum over A of P_B y_A / v_AB / lambda_B,   v_AB = s_A^2 prod over A less B of m,  lambda_B = sum of 1 / v_AB,
    Var(w . M_A) = sum over B within A of |P_B w|^2 / (lambda_B prod over A less B of m^2),   P_B w summed and centred.

Marginals are fractions of the rows, so the residual of no features at all is 1, and has no noise.

`nonnegative` adds that no cell be below 0 (local least squares): it minimises

    sum over B of lambda_B |r_B - (estimate of r_B)|^2,    M_A >= 0 for the sets A asked for,

by ADMM over copies z_A of the marginals; each step is again a weighted mean for each residual, and a cut at 0.

`as_marginals` puts measured residuals into words that any estimator understands.

References: McKenna, Miklau, Hay & Machanavajjhala 2018 (HDMM), section 7 (marginals); Xiao et al. 2023
(ResidualPlanner), theorems 4.5 and 4.6; Boyd et al. 2011 (ADMM), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import (
    WHOLE,
    AtLeast,
    GroupBy,
    RowFunction,
    Special,
    Tally,
    Tests,
    marginal_cells,
)
from anamorph.errors import CorruptionError
from anamorph.models.answers import no_rows, not_measured
from anamorph.queries.custom import Custom, CustomCells, Recorded
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import free, subsets
from anamorph.queries.strategies import NEGLIGIBLE, marginals_telling
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.table import Table

Features = tuple[int, ...]
Reals = NDArray[np.float64]


LEAST = 0.01
"""The least precision of a single column, as a part of what is known of it."""


class Part(NamedTuple):
    """The estimate of a residual, an axis for each feature; its covariance is the variance times P_B."""

    values: Reals
    variance: float


class Noisy(NamedTuple):
    """An estimate, and the standard deviation of its noise."""

    value: float
    sigma: float


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """Residuals of sets of features, each sorted; of features with one value there are none."""

    sizes: tuple[int, ...]
    parts: Mapping[Features, Part]

    def knows(self, features: Features) -> bool:
        """Returns whether a marginal follows from the measurements."""
        whole = free(self.sizes, features)
        return (not whole or whole in self.parts) and all(s in self.parts for s in subsets(self.sizes, features))

    def marginal(self, features: Features) -> Reals:
        """Returns a marginal, in C order of the features."""
        return self.slab(GroupBy(self.sizes, features, 0, self.sizes[features[0]]))

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields what follows from the measurements; refuses what does not."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> Reals:
        """Returns the answers of one tally."""
        if isinstance(tally, RowFunction | Special):
            raise not_measured()
        if isinstance(tally, AtLeast):
            return tally.broadcast(self.slab, np.float64)
        if isinstance(tally, GroupBy):
            return self.slab(tally)
        found = np.zeros(tally.cells)
        for index in range(len(tally.sets)):
            mine = tally.which == index
            found[mine] = self.answer(block_of(tally, index))[tally.positions[mine]]
        return found

    def slab(self, slab: GroupBy) -> Reals:
        """Returns a slab of a marginal: the sum of its residuals."""
        if not self.knows(slab.features):
            raise not_measured()
        order = sorted(range(len(slab.features)), key=slab.features.__getitem__)
        features = tuple(slab.features[axis] for axis in order)
        cells = marginal_cells(self.sizes, features)
        total = np.full([slab.shape[axis] for axis in order], 1 / cells)
        for subset in subsets(self.sizes, features):
            spans = [slice(slab.starts[a], slab.starts[a] + slab.shape[a]) for a in order if slab.features[a] in subset]
            part = self.parts[subset].values[tuple(spans)] / (cells // marginal_cells(self.sizes, subset))
            total += part.reshape([n if f in subset else 1 for f, n in zip(features, total.shape, strict=True)])
        return total.transpose(np.argsort(order)).ravel()

    def weighted(self, features: Features, weights: Reals) -> Noisy:
        """Returns a weighted sum of the cells of a marginal, and its noise; the weights have an axis for each feature.

        The features must be sorted.
        """
        cells = marginal_cells(self.sizes, features)
        value, variance = float(weights.sum()) / cells, 0.0
        for subset in subsets(self.sizes, features):
            outside = cells // marginal_cells(self.sizes, subset)
            folded = centred(summed(weights, features, subset)) / outside
            value += float(np.vdot(folded, self.parts[subset].values))
            variance += float(np.vdot(folded, folded)) * self.parts[subset].variance
        return Noisy(value, math.sqrt(variance))

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Refuses."""
        raise no_rows()

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps: features, values and variance of each residual."""
        kept: dict[str, NDArray] = {}
        for index, (features, part) in enumerate(self.parts.items()):
            kept[f"features.{index}"] = np.array(features, np.int64)
            kept[f"values.{index}"] = part.values.ravel()
            kept[f"variance.{index}"] = np.array([part.variance])
        return kept

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses residuals that the schema does not have."""
        parts: dict[Features, Part] = {}
        for index in range(len(arrays) // 3):
            features = tuple(arrays[f"features.{index}"].tolist())
            values, (variance,) = arrays[f"values.{index}"].astype(np.float64), arrays[f"variance.{index}"].tolist()
            known = bool(features) and features == free(sizes, features) and features not in parts
            if not known or values.shape != (marginal_cells(sizes, features),) or not np.all(np.isfinite(values)):
                raise foreign()
            parts[features] = Part(values.reshape([sizes[feature] for feature in features]), float(variance))
        sound = all(0 <= part.variance < math.inf for part in parts.values())
        if len(arrays) != 3 * len(parts) or not sound:
            raise foreign()
        return cls(sizes, parts)


def summed(values: Reals, features: Features, kept: Features) -> Reals:
    """Returns the sum over the features that are not kept."""
    return values.sum(axis=tuple(axis for axis, feature in enumerate(features) if feature not in kept))


def centred(values: Reals) -> Reals:
    """Returns numbers less their mean along every axis in turn."""
    for axis in range(values.ndim):
        values = values - values.mean(axis=axis, keepdims=True)
    return values


def block_of(tally: Tests, index: int) -> GroupBy | AtLeast:
    """Returns the whole block that the cells of one set are of."""
    features = tally.sets[index]
    whole = GroupBy(tally.sizes, features, 0, tally.sizes[features[0]])
    return whole if tally.needed(index) == len(features) else AtLeast(whole, tally.needed(index))


class Measured(NamedTuple):
    """A marginal or a residual that was measured: sorted features, an axis for each, one sigma."""

    features: Features
    values: Reals
    sigma: float
    residual: bool


def readings(measurements: Sequence[Measurement]) -> Iterator[tuple[Tally, Reals, float]]:
    """Yields what was measured, each block whole: the tally, fractions and their sigma; functions are left out."""
    for measurement in measurements:
        first, block = 0, 0
        for part in measurement.workload.parts:
            values = measurement.values[first : first + part.cells]
            if not isinstance(part, Custom | CustomCells | Recorded):
                stop = 0
                for piece in part.pieces(WHOLE):
                    start, stop = stop, stop + piece.tally.cells
                    yield piece.tally, values[start:stop], float(measurement.sigma[block + piece.first])
            first, block = first + part.cells, block + part.blocks


def measured(sizes: tuple[int, ...], measurements: Sequence[Measurement]) -> Iterator[Measured]:
    """Yields the marginals and residuals that were measured whole, views of the answers; nothing else is looked at."""
    for tally, values, sigma in readings(measurements):
        if isinstance(tally, GroupBy | Residual) and tally.cells == marginal_cells(sizes, tally.features):
            order = sorted(range(len(tally.features)), key=tally.features.__getitem__)
            features = tuple(tally.features[axis] for axis in order)
            yield Measured(features, values.reshape(tally.shape).transpose(order), sigma, isinstance(tally, Residual))


def least_squares(sizes: tuple[int, ...], measurements: Sequence[Measurement]) -> LeastSquares:
    """Returns what follows from all marginals and residuals that were measured whole."""
    totals: dict[Features, Reals] = {}
    precisions: dict[Features, float] = {}
    for features, values, sigma, residual in measured(sizes, measurements):
        for subset in [features] if residual else subsets(sizes, features):
            outside = marginal_cells(sizes, features) // marginal_cells(sizes, subset)
            precision = 1 / (sigma**2 * outside)
            totals[subset] = totals.get(subset, 0.0) + precision * centred(summed(values, features, subset))
            precisions[subset] = precisions.get(subset, 0.0) + precision
    return LeastSquares(
        sizes, {key: Part(total / precisions[key], 1 / precisions[key]) for key, total in totals.items()}
    )


def as_marginals(
    sizes: tuple[int, ...], measurements: Sequence[Measurement], weights: Mapping[Features, float] | None = None
) -> Measurement:
    """Returns whole marginals that tell about what the measurements do: their least squares estimates.

    Precisions are those of `marginals_telling`, for residuals with the precision that they have times their weight; of
    single columns, with which many a fit begins, `LEAST` at least.
    """
    model, weights = least_squares(sizes, measurements), weights or {}
    known = {features: weights.get(features, 1.0) / part.variance for features, part in model.parts.items()}
    told = {
        features: max(precision, LEAST * known[features] if len(features) == 1 else 0.0)
        for features, precision in marginals_telling(sizes, known).items()
    }
    sets = tuple(features for features, precision in told.items() if precision > NEGLIGIBLE * known[features])
    values = np.concatenate([model.marginal(features) for features in sets])
    sigma = np.array([told[features] ** -0.5 for features in sets])
    return Measurement(Workload((Marginals(sizes, sets),)), values, sigma, measurements[-1].total)


def nonnegative(model: LeastSquares, sets: Sequence[Features], *, steps: int, tolerance: float) -> LeastSquares:
    """Returns the nearest residuals whose marginals over the sets, sorted, are nowhere below 0, up to the tolerance.

    It stops when no marginal is further from its copy than `tolerance` times the noise of its cells, or after `steps`.
    """
    sizes = model.sizes
    sets = [features for features in sets if subsets(sizes, features)]
    weight = {features: 1 / model.parts[subsets(sizes, features)[-1]].variance for features in sets}
    duals = {features: np.zeros([sizes[feature] for feature in features]) for features in sets}
    found = model
    for step in range(steps):
        progress.report("consistency", step, steps)
        totals = {key: part.values / part.variance for key, part in model.parts.items()}
        precisions = {key: 1 / part.variance for key, part in model.parts.items()}
        far = 0.0
        for features in sets:
            shape, cells = duals[features].shape, duals[features].size
            marginal = found.marginal(features).reshape(shape)
            copy = np.maximum(marginal + duals[features], 0)
            duals[features] += marginal - copy
            far = max(far, float(np.abs(marginal - copy).max()) * math.sqrt(weight[features]))
            wanted = copy - duals[features]
            for subset in subsets(sizes, features):
                precision = weight[features] / (cells // marginal_cells(sizes, subset))
                totals[subset] = totals[subset] + precision * centred(summed(wanted, features, subset))
                precisions[subset] += precision
        parts = {key: Part(totals[key] / precisions[key], part.variance) for key, part in model.parts.items()}
        found = LeastSquares(sizes, parts)
        if far <= tolerance:
            break
    progress.report("consistency", steps, steps)
    return found


def foreign() -> CorruptionError:
    """Returns the refusal of arrays that are not residuals."""
    return CorruptionError("the release's residuals must be of marginals of its schema; they are not")
