"""The largest error of a block, found by bounds, without listing its queries. NOT PRIVATE.

Selection needs bounds on errors (curator/candidates.py); with them the largest error is found as well: queries whose
bound is below an error that was seen are done with, and the bounds tighten until no others are left.
"""

from __future__ import annotations

import numpy as np

from anamorph.curator.coarse import coarse_axis, coarse_bounds, most_common
from anamorph.curator.estimates import SAFETY, Estimate, Side, Support
from anamorph.curator.tallies import AtLeast, Counts, GroupBy
from anamorph.errors import ParameterError
from anamorph.queries.workload import WHOLE, Workload

FINEST = 1e-7
"""Errors below this are not told apart."""


def largest_error(truth: Counts, rows: int, estimate: Estimate, workload: Workload) -> float:
    """Returns the exact largest error of a table over a workload of marginals and thresholds."""
    largest = 0.0
    for piece in workload.pieces(WHOLE):
        slab, least = (piece.tally.slab, piece.tally.least) if isinstance(piece.tally, AtLeast) else (piece.tally, 0)
        if not isinstance(slab, GroupBy):
            raise ParameterError("workload must be of whole marginals and thresholds")
        shape = tuple(slab.sizes[feature] for feature in slab.features)
        data = Support(shape, *next(iter(truth.counts((slab.features,)))), rows, 1.0)
        side = estimate.side(slab.sizes, slab.features, 1.0)
        largest = max(largest, block_error(data, side, least or len(shape), largest))
    return largest


def block_error(data: Side, estimate: Side, least: int, floor: float = 0.0) -> float:
    """Returns the largest error of a block, both sides having a total of 1; or `floor`, if it is less than that."""
    search = marginal_errors if least == len(data.shape) else threshold_errors
    bound = 1 / 16
    best, rest = search((data, estimate), least, bound)
    while rest > max(best, floor, FINEST):
        bound /= 2
        best, rest = search((data, estimate), least, bound)
    return max(best, floor)


def marginal_errors(sides: tuple[Side, Side], least: int, bound: float) -> tuple[float, float]:
    """Returns the largest error of the cells above a bound, in either table, and a bound on all others."""
    cells = np.union1d(*(side.above(bound) for side in sides))
    exact, guess = (side.fractions(cells, least) for side in sides)
    return float(np.max(np.abs(exact - guess), initial=0.0)), bound * (1 + SAFETY)


def threshold_errors(sides: tuple[Side, Side], least: int, bound: float) -> tuple[float, float]:
    """Returns the largest error of the queries all of whose codes are heavy, and a bound on all others."""
    axes = [coarse_axis(numbers, bound / 2) for numbers in most_common(sides)]
    best, rest = 0.0, 0.0
    for bounds, exact in coarse_bounds(sides, least, axes):
        best = max(best, float(np.max(bounds, initial=0.0, where=exact)))
        rest = max(rest, float(np.max(bounds, initial=0.0, where=~exact)))
    return best, rest
