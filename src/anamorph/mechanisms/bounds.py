"""AIM's bounds on its own errors: of marginals inside a measured one, and of those that its last rounds did not select.

Reference: McKenna, Mullins, Sheldon & Miklau 2022, section 5.
Deviations: the bounds of several rounds hold at once; the noise of a selection is that of our weights and grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from anamorph.curator.scores import GRID
from anamorph.curator.tallies import is_set, marginal_cells
from anamorph.errors import ParameterError
from anamorph.models.answers import from_measurements
from anamorph.models.bounds import Tail
from anamorph.models.graphical import GraphicalModel
from anamorph.models.junction import Clique, clique_of
from anamorph.release import Measurement, Release

KEPT = 3
"""The last rounds whose candidates are given error bounds: earlier ones, with less budget, have worse."""

TRIVIAL = 2.0
"""An L1 distance that two distributions never exceed: no bound is kept that says no more."""

NOTHING = Tail(TRIVIAL, 0.0, 0.0, 1.0)
"""The bound that holds for all."""

LEVEL = 0.05
"""The probability of failure at which the bounds of several rounds are compared."""


class Seen(NamedTuple):
    """What a round tells of all its candidates, in counts."""

    model: GraphicalModel
    """What they were compared with."""
    shares: dict[tuple[int, ...], int]
    """What the error of each was multiplied by in the selection."""
    scale: float
    """That of the selection's noise."""
    offset: dict[tuple[int, ...], float]
    """What was subtracted from each error before it was multiplied."""
    chosen: tuple[int, ...]
    measurement: Measurement
    """Of the chosen one."""
    error: float
    """The L1 distance of the measurement from the model."""
    rho: float
    """What the round cost."""

    def tail(self, features: tuple[int, ...], portion: float) -> Tail:
        """Returns a bound on |M_r(D) - n M_r(p)|_1 / n for a candidate r and the model p that it was compared with.

        The selection took s, the largest of c_r (e_r - o_r) + beta Gumbel over the candidates C, with e_r the L1 error
        (of estimates rounded to the curator's grid), o_r the offset and c_r the share. That falls short of the largest
        c_r (e_r - o_r) by more than beta (ln |C| + l) with probability at most exp(-l): each such candidate is taken
        with probability at most exp(-ln |C| - l). So, for all r at once,

            e_r <= o_r + (c_s (e_s - o_s) + beta (ln |C| + l)) / c_r.

        As to e_s: y = M_s(D) + z was measured later, and |a_i| - |a_i + z_i| <= -sign(a_i) z_i for a = M_s(D) - n
        M_s(p), so that e_s exceeds |y - n M_s(p)|_1 by at most a sum of n_s independent variables +-z_i, sub-Gaussian
        with variance n_s sigma^2: by more than sigma sqrt(2 l n_s) with probability at most exp(-l).
        """
        sizes, total, chosen = self.model.sizes, self.measurement.total, self.chosen
        cells, measured = marginal_cells(sizes, features), marginal_cells(sizes, chosen)
        ratio = self.shares[chosen] / self.shares[features]
        rounded = (cells + 1 + ratio * (measured + 1)) / (2 << GRID)  # the estimates and the offsets, by half a unit
        scale, sigma = self.scale / self.shares[features], float(self.measurement.sigma[0]) * total
        base = self.offset[features] + ratio * (self.error - self.offset[chosen]) + scale * math.log(len(self.shares))
        return Tail((base + rounded) / total, ratio * sigma * math.sqrt(measured) / total, scale / total, portion)


def tails(model: GraphicalModel, rounds: Sequence[Seen], rho: float) -> dict[Clique, Tail]:
    """Returns the best error bound of some rounds for each of their candidates that is inside no measured marginal.

    What a round says of the model that it began with holds for the last one, with the distance between them added. The
    bounds of all rounds hold at once: a round has the part of the failure that it has of the rho of all rounds, which
    is known before it begins; these parts sum to 1.
    """
    kept: dict[Clique, Tail] = {}
    for seen in reversed(rounds):
        for features in seen.shares:
            clique = clique_of(model.sizes, features)
            if any(set(clique) <= set(other) for other in model.potentials):
                continue
            tail, best = seen.tail(features, min(seen.rho / rho, 1.0)), kept.get(clique, NOTHING).at(LEVEL)
            if tail.at(LEVEL) < best:
                moved = np.abs(seen.model.marginal(clique) - model.marginal(clique)).sum()
                tail = tail._replace(base=tail.base + float(moved))
            if tail.at(LEVEL) < best:
                kept[clique] = tail
    return kept


def confidence_bound(
    found: Release | GraphicalModel,
    features: tuple[int, ...],
    *,
    log: Sequence[Measurement] = (),
    failure: float = 0.05,
) -> float:
    """Returns what the L1 error of a marginal exceeds with probability at most `failure`, as a fraction of the rows.

    For a marginal inside a measured one: y, the mean of what was measured of it, weighted by precision, has independent
    noise of one sigma in its n cells, so that, with lambda^2 = -ln failure,

        |M(D) - M(p)|_1 <= |y - M(p)|_1 + sqrt(2 ln 2) sigma n + lambda sigma sqrt(2 n).

    For another that was a candidate in one of the last rounds, and was not selected: see `Seen.tail` and `tails`; these
    bounds hold for all such marginals at once. They were made by the run, and are kept in the model.

    McKenna et al. 2022, section 5; all of it holds for discrete noise, which is sub-Gaussian with the same sigma. Rows
    are counted as in the measurements: by their public number.

    Args:
        found: what AIM released, or its model.
        features: the columns of the marginal, in any order.
        log: the measurements that the model was fitted to; not needed with a release, which has them.
        failure: the probability with which the bound may fail.
    """
    model, log = (found.model, log or found.measurements) if isinstance(found, Release) else (found, log)
    if not isinstance(model, GraphicalModel) or not is_set(features, model.sizes):
        raise ParameterError(f"features ({features!r}) must be distinct columns of a graphical model")
    if not 0 < failure < 1:
        raise ParameterError(f"failure ({failure!r}) must be in (0, 1)")
    supported = measured_bound(model, log, features, failure)
    if supported is not None:
        return supported
    clique = clique_of(model.sizes, features)
    if clique not in model.bounds:
        raise ParameterError(
            f"features ({features!r}) must be inside a marginal that was measured, or have been a candidate of AIM's "
            f"last {KEPT} rounds, with a bound below {TRIVIAL:g}; of others nothing is known"
        )
    return model.bounds[clique].at(failure)


def measured_bound(
    model: GraphicalModel, log: Sequence[Measurement], features: tuple[int, ...], failure: float
) -> float | None:
    """Returns the bound for a marginal inside a measured one; none for others."""
    cells = marginal_cells(model.sizes, features)
    total, precision = np.zeros(cells), 0.0
    for measurement in log:
        known = from_measurements(model.sizes, (measurement,))
        for over in (over for over in known.marginals if set(features) <= set(over)):
            weight = cells / marginal_cells(model.sizes, over) / known.sigma[over] ** 2
            total += weight * replace(known, marginals={over: known.marginals[over]}).marginal(features)
            precision += weight
    if not precision:
        return None
    sigma, slack = precision**-0.5, math.sqrt(-math.log(failure))
    noise = math.sqrt(2 * math.log(2)) * sigma * cells + slack * sigma * math.sqrt(2 * cells)
    return float(np.abs(total / precision - model.marginal(features)).sum()) + noise
