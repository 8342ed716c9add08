"""Weighing: what stands out of the noise counts for more than what does not.

The penalty of a fit draws answers towards what independence says, all by about penalty * sigma^2 counts. In most tables
a few columns depend on each other strongly, many a little, and the rest not at all: what suits the last costs the first
dearly. So each interaction (quieting.py) has a weight w: it is told with w times the precision that it was measured
with, and drawn by penalty * sigma^2 / w counts, little where there is much to tell, far where noise is all there seems
to be. With z what it says beyond the plainest, in sigmas, and d its dimensions,

    s = max(|z|^2 / d,  max z^2 / (2 ln 2d)) - 1,      w = max(1/5, s / (s + 2)):

noise leaves about d of |z|^2 and 2 ln 2d of the largest z^2, so s is how many times stronger than noise is what there
is to tell, be it all over a marginal or in a few of its cells. Single columns have the least weight, beyond what larger
marginals say of them: with all of it, rare codes are fitted to their noise (docs/accuracy.md).

The weights follow from the noisy answers alone. Whether they help is tried on held-back noise (trials.py). Only whole
marginals are weighed; single cells, thresholds and functions count as they were measured.

Reference: Zou 2006 (the adaptive lasso).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anamorph.models.least_squares import LeastSquares, as_marginals, least_squares
from anamorph.models.quieting import dimensions, surplus
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement

Features = tuple[int, ...]
Reals = NDArray[np.float64]

LEAST = 0.2
"""The least weight."""

HALF = 2.0
"""How many times stronger than noise is what has half of the weight."""


def weighed(measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    """Returns measurements in which whole marginals are told with the precision that they deserve."""
    whole = parts_of(measurements, marginals=True)
    if not whole:
        return measurements
    sizes = whole[0].workload.sizes
    told = as_marginals(sizes, whole, weights(least_squares(sizes, whole)))
    return (told, *parts_of(measurements, marginals=False))


def weights(known: LeastSquares) -> dict[Features, float]:
    """Returns the weight of each interaction, and of each single column."""
    found = {}
    for features, part in known.parts.items():
        told = len(features) > 1 and known.knows(features)
        strength = standing_out(surplus(known, features) / math.sqrt(part.variance)) if told else 0.0
        found[features] = max(LEAST, strength / (strength + HALF))
    return found


def standing_out(interaction: Reals) -> float:
    """Returns how many times stronger than noise there is something to tell in an interaction, in sigmas."""
    free, squared = dimensions(interaction), np.square(interaction)
    return max(float(squared.sum()) / free, float(squared.max()) / (2 * math.log(2 * free))) - 1


def parts_of(measurements: Sequence[Measurement], *, marginals: bool) -> list[Measurement]:
    """Returns what measurements say of whole marginals, or of all else."""
    found = []
    for measurement in measurements:
        workload, cells, blocks = measurement.workload, 0, 0
        parts, values, sigma = [], [], []
        for part in workload.parts:
            if (type(part) is Marginals) == marginals:
                parts.append(part)
                values.append(measurement.values[cells : cells + part.cells])
                sigma.append(measurement.sigma[blocks : blocks + part.blocks])
            cells, blocks = cells + part.cells, blocks + part.blocks
        if parts:
            kept = Workload(tuple(parts), limit=workload.limit)
            found.append(
                replace(measurement, workload=kept, values=np.concatenate(values), sigma=np.concatenate(sigma))
            )
    return found
