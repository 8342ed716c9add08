"""Strategies: which marginals, or residuals of marginals, to measure, and how well each, for a workload of marginals.

What is measured with precision t_A in each cell costs rho = 1/2 sum of t_A s_A, s_A its squared sensitivity (where
rows are replaced residuals together cost less: curator/residuals.py), and least squares answers a cell of a marginal A
with the variance (models/least_squares.py)

    Var_A = sum over B within A of kappa_B / (lambda_B prod over A less B of m^2), kappa_B = prod over B of (m - 1) / m,

lambda_B the precision of the residual of B. A strategy minimises a weighted mean of these variances for a given rho,

    sum over A of c_A Var_A = sum over B of v_B / lambda_B.

*Residuals* (ResidualPlanner) are measured one by one: lambda_B = t_B, and t_B proportional to sqrt(v_B / s_B) is
optimal, not only among residuals but among all linear strategies with Gaussian noise where one row is added or removed.
*Marginals* (HDMM): lambda_B = sum over A with B of t_A / prod over A less B of m, which no formula minimises; the
multiplicative steps t_A <- t_A sqrt(g_A), g the gradient, lower it every time, and t keeps its sum.

With `objective` "total", c_A is the number of cells: the total squared error over all queries, as in HDMM. With "max",
weights c_A are sought for which no marginal has a larger variance than the others that matter: c_A <- c_A Var_A.

References: McKenna et al. 2018 (HDMM), section 6.3 (OPT_M); Xiao et al. 2023 (ResidualPlanner), theorems 4.7 and 4.8;
Yu 2010 (multiplicative algorithms of optimal design).
Deviations: of marginals only those inside one that is asked are measured; the number of rows is no part of the
strategy, since fractions are answered; steps instead of L-BFGS; the maximum by weights instead of a cone program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.residuals import MOST_CELLS, Residual
from anamorph.curator.tallies import marginal_cells
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals, free, subsets
from anamorph.queries.workload import Queries, Workload

Features = tuple[int, ...]
Reals = NDArray[np.float64]
Objective = Literal["total", "max"]

RESOLUTION = 1 << 24
"""Weights of a strategy are rounded to this fraction of the largest."""

NEGLIGIBLE = 1e-6
"""A marginal with less of the budget than this fraction of the largest is not measured, if others tell of it."""

STEPS = 2000
"""Steps of the search for a strategy of marginals."""

ROUNDS = 200
"""Steps of the search for weights."""

MOST_SETS = 1 << 16
"""The most sets of features of a strategy."""


@dataclass(frozen=True, eq=False)
class Strategy:
    """What to measure, and the relative precision of each."""

    sizes: tuple[int, ...]
    precisions: Mapping[Features, float]
    residuals: bool

    def workload(self) -> Workload:
        """Returns what to measure, a part for each weight."""
        largest = max(self.precisions.values())
        weights = {f: Fraction(max(1, round(t / largest * RESOLUTION)), RESOLUTION) for f, t in self.precisions.items()}
        kind = Residuals if self.residuals else Marginals
        ordered = itertools.groupby(sorted(weights, key=lambda f: (-weights[f], f)), key=weights.__getitem__)
        groups = {weight: tuple(sets) for weight, sets in ordered}
        parts: tuple[Queries, ...] = tuple(kind(self.sizes, sets) for sets in groups.values())
        return Workload(parts, weights=tuple(groups))


@dataclass(frozen=True, eq=False)
class Design:
    """The residuals that a workload depends on, and how."""

    sizes: tuple[int, ...]
    asked: Mapping[Features, float]
    """The marginals asked for, features sorted, with their weight."""

    @cached_property
    def sets(self) -> list[Features]:
        """All sets of features inside one that is asked, without features of one value."""
        several = {free(self.sizes, features) for features in self.asked}
        if sum(2 ** len(features) for features in several) > MOST_SETS:
            raise WorkloadError("the workload must have fewer or smaller marginals for a strategy to be found")
        found = {inner for features in several for inner in subsets(self.sizes, features)}
        if not found:
            raise WorkloadError("the workload must have a column with more than one value")
        return sorted(found, key=lambda features: (len(features), features))

    @cached_property
    def kappa(self) -> Reals:
        """The variance of a cell of each residual, relative to its precision."""
        return np.array([math.prod(1 - 1 / self.sizes[feature] for feature in features) for features in self.sets])

    @cached_property
    def spread(self) -> Reals:
        """Marginals asked by residuals: the variance of a cell for a residual of variance 1."""
        place = {features: index for index, features in enumerate(self.sets)}
        matrix = np.zeros((len(self.asked), len(self.sets)))
        for row, features in enumerate(self.asked):
            cells = marginal_cells(self.sizes, features)
            for inner in subsets(self.sizes, features):
                outside = cells / marginal_cells(self.sizes, inner)
                matrix[row, place[inner]] = self.kappa[place[inner]] / outside**2
        return matrix

    @cached_property
    def reach(self) -> Reals:
        """Marginals by residuals: the precision of a residual for a marginal measured with precision 1."""
        place = {features: index for index, features in enumerate(self.sets)}
        matrix = np.zeros((len(self.sets), len(self.sets)))
        for row, outer in enumerate(self.sets):
            cells = marginal_cells(self.sizes, outer)
            for inner in subsets(self.sizes, outer):
                matrix[row, place[inner]] = marginal_cells(self.sizes, inner) / cells
        return matrix

    def weights(self) -> Reals:
        """Returns how much the variance of a cell of each marginal matters in the total squared error."""
        return np.array([weight * marginal_cells(self.sizes, f) for f, weight in self.asked.items()])

    def residual_precisions(self, weights: Reals) -> Reals:
        """Returns the optimal precision of each residual, at a cost of 1."""
        found = np.sqrt(weights @ self.spread / self.kappa)
        return found / (found @ self.kappa)

    def marginal_precisions(self, weights: Reals, start: Reals | None = None, steps: int = STEPS) -> Reals:
        """Returns the best precision of each marginal that some steps find, at a cost of 1."""
        matter = weights @ self.spread
        found = np.full(len(self.sets), 1 / len(self.sets)) if start is None else start
        for _ in range(steps):
            known = found @ self.reach
            found = found * np.sqrt(self.reach @ (matter / known**2))
            found /= found.sum()
        return found

    def variances(self, known: Reals) -> Reals:
        """Returns the variance of a cell of each marginal that is asked, given the precision of each residual."""
        return self.spread @ (1 / known)


def strategy(
    sizes: tuple[int, ...], asked: Mapping[Features, float], *, residuals: bool, objective: Objective = "total"
) -> Strategy:
    """Returns the strategy for marginals, each with its weight; features must be sorted."""
    design = Design(sizes, dict(asked))
    weights = design.weights()
    if residuals and any(Residual(sizes, features).cells > MOST_CELLS for features in design.sets):
        raise WorkloadError(f"marginals must have at most {MOST_CELLS} cells for residuals: take strategy=marginals")
    found = design.residual_precisions(weights) if residuals else design.marginal_precisions(weights)
    if objective == "max":
        found = even(design, found, residuals=residuals)
    precisions = dict(zip(design.sets, found.tolist(), strict=True))
    if not residuals:
        tops = maximal(design.sets)
        precisions = {f: t for f, t in precisions.items() if f in tops or t > NEGLIGIBLE * max(precisions.values())}
    return Strategy(sizes, precisions, residuals)


def even(design: Design, start: Reals, *, residuals: bool) -> Reals:
    """Returns precisions for which the largest variance is least, up to what the rounds find."""
    importance = np.array(list(design.asked.values()))
    weights, found = importance.copy(), start
    best, least = start, math.inf
    for _ in range(ROUNDS):
        found = design.residual_precisions(weights) if residuals else design.marginal_precisions(weights, found, 20)
        variances = importance * design.variances(found if residuals else found @ design.reach)
        if variances.max() < least:
            best, least = found, float(variances.max())
        weights = weights * variances
        weights /= weights.sum()
    return best


def marginals_telling(sizes: tuple[int, ...], known: Mapping[Features, float]) -> dict[Features, float]:
    """Returns precisions of marginals that tell about as much as is known of each residual; the largest come first.

    They are the t_A for which lambda_B = sum over A with B of t_A / prod over A less B of m, but none is below 0:
    where the marginals with B tell more of it than is known, nothing is left for B itself.
    """
    left, found = dict(known), {}
    for features in sorted(known, key=lambda f: (-len(f), f)):
        found[features] = max(left[features], 0.0)
        cells = marginal_cells(sizes, features)
        for inner in subsets(sizes, features):
            left[inner] -= found[features] * marginal_cells(sizes, inner) / cells
    return found


def maximal(sets: list[Features]) -> set[Features]:
    """Returns the sets that are inside no other."""
    return {inner for inner in sets if not any(set(inner) < set(outer) for outer in sets)}
