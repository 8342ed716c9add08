"""Graphical models: the distribution of largest entropy that explains noisy marginals, and the descent that fits it.

The model is a Markov random field p(x) proportional to exp(sum over cliques r of theta_r(x_r)), with a clique for every
measured marginal that is inside no other. Fitting minimises over theta

    L = 1/2 sum over measured marginals of |mu_r - y_r|^2 / sigma_r^2,     mu = the marginals of p_theta
    (or, where residuals were measured, the marginals centred),

by mirror descent, theta <- theta - a dL/dmu: marginals y that no distribution has are projected onto those of one, and
among the distributions with the same loss the descent keeps to the one of largest entropy. A step is kept if it lowers
the loss by a (dL/dmu) (mu - mu') / 2 (Armijo); a then grows, and is halved where it does not. Marginals are computed
exactly, over a junction tree (junction.py).

Rows are drawn down the tree: a clique's features given those that it shares with its parent, all of them at once. So
rows have every dependence that the model has, also those between features that only triangulation joined.

References: McKenna, Sheldon & Miklau 2019, algorithm 1 (proximal estimation) and section 4; the package mbi.
Deviations: fractions, not counts; a fit starts from the model of the round before; it stops when the loss hardly falls;
the step size grows by 25% (mbi: 1%). Inference is numpy's instead of XLA's, which compiles mbi's
descent anew for every set of cliques: about 16 s on two cores for a tree of 4 MB, of which numpy makes a step in 10 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.tallies import (
    AtLeast,
    GroupBy,
    RowFunction,
    Special,
    Tally,
    Tests,
    is_set,
    marginal_cells,
)
from anamorph.errors import CorruptionError, ParameterError, require_positive
from anamorph.models import junction
from anamorph.models.answers import no_residuals
from anamorph.models.bounds import BOUNDED, BOUNDS, Tail, bounds_of
from anamorph.models.junction import Clique, Reals, Tree
from anamorph.models.least_squares import centred, measured
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.rounding import copies, strata
from anamorph.table import Table

LARGEST_MODEL = 4096.0
"""The most megabytes of the junction tree of a model that is loaded."""

LARGEST = 1e100
"""The largest potential of a model that is loaded: sums of them must be numbers."""

GROWTH = 1.25
"""By how much the step size grows after a step that was kept."""

DEVIATIONS = 2.5
"""How many standard deviations below its mean the loss of the truth is taken to be."""

CHECK = 10
"""Steps between two looks at how much the loss fell."""


def model_megabytes(sizes: tuple[int, ...], sets: Sequence[Sequence[int]]) -> float:
    """Returns the megabytes of the junction tree of a model with these marginals."""
    return junction.megabytes(sizes, [junction.clique_of(sizes, features) for features in sets])


@dataclass(frozen=True, eq=False)
class GraphicalModel:
    """A Markov random field."""

    sizes: tuple[int, ...]
    potentials: Mapping[Clique, Reals] = field(default_factory=dict)
    """The logarithms of the factors, up to a constant: an axis for each feature of a clique."""
    bounds: Mapping[Clique, Tail] = field(default_factory=dict)
    """Bounds on the errors of marginals that were not measured, as far as the mechanism knows them."""

    @cached_property
    def tree(self) -> Tree:
        """The junction tree of the cliques."""
        return junction.junction_tree(self.sizes, self.potentials)

    @cached_property
    def beliefs(self) -> list[Reals]:
        """The marginal of every clique of the junction tree."""
        return junction.calibrate(self.tree, self.potentials)

    @property
    def megabytes(self) -> float:
        """The size of the junction tree."""
        return junction.megabytes(self.sizes, self.potentials)

    def marginal(self, features: Sequence[int]) -> Reals:
        """Returns a marginal, in C order of the features."""
        return junction.marginal(self.tree, self.beliefs, features, {}).ravel()

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields the model's answers of each piece of a workload."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> Reals:
        """Returns the model's answers of one tally."""
        if isinstance(tally, RowFunction):
            raise ParameterError("the workload must be of marginals and thresholds: a graphical model has no functions")
        if isinstance(tally, Special):
            raise no_residuals()
        if isinstance(tally, AtLeast):
            return tally.broadcast(self.answer, np.float64)
        if isinstance(tally, Tests):
            return self.tests(tally)
        spans = zip(tally.features, tally.starts, tally.shape, strict=True)
        ranges = {feature: slice(start, start + size) for feature, start, size in spans}
        return junction.marginal(self.tree, self.beliefs, tally.features, ranges).ravel()

    def tests(self, tally: Tests) -> Reals:
        """Returns the answers of single cells, from the marginals or thresholds that they are of."""
        found = np.zeros(tally.cells)
        for index, features in enumerate(tally.sets):
            whole = GroupBy(self.sizes, features, 0, self.sizes[features[0]])
            least, mine = tally.needed(index), tally.which == index
            block = whole if least == len(features) else AtLeast(whole, least)
            found[mine] = self.answer(block)[tally.positions[mine]]
        return found

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows drawn clique by clique, parents first: each given the features that it shares with its parent.

        The rows that agree in those features are dealt to the others by stratified sampling (see rounding.py), the rows
        of the root by systematic sampling: so counts are near their expectation.
        """
        generator = np.random.default_rng(seed)
        codes = np.zeros((rows, len(self.sizes)), np.int64)
        for index, (clique, separator) in enumerate(zip(self.tree.cliques, self.tree.separators, strict=True)):
            progress.report("sample", index, len(self.tree.cliques))
            fresh = tuple(feature for feature in clique if feature not in separator)
            order = [clique.index(feature) for feature in (*separator, *fresh)]
            given = self.beliefs[index].transpose(order).reshape(marginal_cells(self.sizes, separator), -1)
            drawn = deal(given, Table(codes.astype(np.int32), self.sizes).cells(separator), generator)
            shape = tuple(self.sizes[feature] for feature in fresh)
            codes[:, fresh] = np.stack(np.unravel_index(drawn, shape), axis=1)
        progress.report("sample", 1, 1)
        return Table(codes[generator.permutation(rows)].astype(np.int32), self.sizes)

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps: the features and the potential of each clique, and the bounds, if any."""
        kept: dict[str, NDArray] = {}
        if self.bounds:
            columns = range(len(self.sizes))
            kept[BOUNDED] = np.array([[column in clique for column in columns] for clique in self.bounds])
            kept[BOUNDS] = np.array(list(self.bounds.values()))
        for index, (clique, potential) in enumerate(self.potentials.items()):
            kept[f"features.{index}"] = np.array(clique, np.int64)
            kept[f"potential.{index}"] = potential.ravel()
        return kept

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses anything but finite potentials over sets of its columns."""
        potentials: dict[Clique, Reals] = {}
        bounds = bounds_of(sizes, arrays)
        arrays = {name: array for name, array in arrays.items() if name not in (BOUNDED, BOUNDS)}
        for index in range(len(arrays) // 2):
            clique = tuple(int(feature) for feature in arrays[f"features.{index}"])
            values = arrays[f"potential.{index}"]
            sound = is_set(clique, sizes) and clique == junction.clique_of(sizes, clique) and clique not in potentials
            sound = sound and values.dtype == np.float64 and arrays[f"features.{index}"].dtype == np.int64
            if not sound or values.shape != (marginal_cells(sizes, clique),) or not np.all(np.abs(values) <= LARGEST):
                raise CorruptionError("the model must hold finite potentials over columns of its schema; it does not")
            potentials[clique] = values.reshape([sizes[feature] for feature in clique])
        found = cls(sizes, potentials, bounds=bounds)
        if len(arrays) != 2 * len(potentials) or found.megabytes > LARGEST_MODEL:
            raise CorruptionError(
                f"the model must be of cliques with a tree of at most {LARGEST_MODEL:g} MB; it is not"
            )
        return found


def deal(given: Reals, owner: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Returns a column of `given` for each row, drawn in proportion to the line that the row owns."""
    if given.shape[0] == 1:
        return generator.permutation(np.repeat(np.arange(given.shape[1]), copies(given[0], owner.size, generator)))
    order = np.argsort(owner, kind="stable")
    lines, place = np.unique(owner[order], return_inverse=True)
    heights = np.cumsum(given[lines] + 1e-300, axis=1)  # where rounding left nothing, anything
    heights = heights / heights[:, -1:] + np.arange(lines.size)[:, None]
    uniform = np.minimum(strata(place, generator), 1 - 1e-9)
    drawn = np.empty(owner.size, np.int64)
    drawn[order] = np.searchsorted(heights.ravel(), place + uniform, side="right") - place * given.shape[1]
    return drawn


class Target(NamedTuple):
    """What was measured: the marginal of a clique, or its residual."""

    clique: Clique
    residual: bool


class Goal(NamedTuple):
    """A measured marginal or residual: noisy fractions, an axis for each feature, and one over the variance of each."""

    values: Reals
    precision: float


class Point(NamedTuple):
    """Potentials over the maximal cliques, their marginals, the loss and its gradient in these marginals."""

    potentials: dict[Clique, Reals]
    marginals: dict[Clique, Reals]
    loss: float
    gradient: dict[Clique, Reals]


@dataclass(frozen=True, kw_only=True)
class Graphical:
    """The estimator of graphical models."""

    iterations: int = 1000
    """The most steps of one fit."""
    tolerance: float = 1e-5
    """A fit stops when ten steps lower the loss by less than this fraction of itself."""

    def __post_init__(self) -> None:
        require_positive("iterations", self.iterations)
        if not 0 <= self.tolerance < 1:
            raise ParameterError(f"tolerance ({self.tolerance!r}) must be in [0, 1)")

    def init(self, sizes: tuple[int, ...], *, seed: int = 0) -> GraphicalModel:
        """Returns the uniform distribution; the seed is not used."""
        return GraphicalModel(sizes)

    def fit(
        self,
        model: GraphicalModel,
        measurements: Sequence[Measurement],
        *,
        seed: int = 0,
        until_noise: bool = False,
    ) -> GraphicalModel:
        """Returns the model that explains all measurements, of whole marginals, starting from another's potentials.

        The fit has no randomness of its own, so the seed is not used. Until noise: it also stops when it explains the
        measurements as well as the truth would (see `noise_loss`), and so keeps near the model that it started from
        where they tell little.
        """
        goals = gather(model.sizes, measurements)
        enough = noise_loss(goals) if until_noise else -math.inf
        cliques = junction.maximal((*(target.clique for target in goals), *model.potentials))
        tree = junction.junction_tree(model.sizes, cliques)
        point = evaluate(tree, goals, moved(model.sizes, model.potentials, cliques))
        rate = 1 / sum(goal.precision for goal in goals.values())  # anew: a step that is too long drowns rare values
        before = point.loss
        for step in range(1, self.iterations + 1):
            point, rate = descend(tree, goals, point, rate)
            if point.loss <= enough:
                break
            if step % CHECK == 0:
                progress.report("fit", step, self.iterations)
                if before - point.loss <= self.tolerance * point.loss:
                    break
                before = point.loss
        progress.report("fit", self.iterations, self.iterations)
        return GraphicalModel(model.sizes, point.potentials)


def gather(sizes: tuple[int, ...], measurements: Sequence[Measurement]) -> dict[Target, Goal]:
    """Returns what was measured of each clique: of several measurements the mean, weighted by 1 / sigma^2."""
    goals: dict[Target, Goal] = {}
    cells = 0
    for features, values, sigma, residual in measured(sizes, measurements):
        clique = junction.clique_of(sizes, features)
        shaped = (centred(values) if residual else values).transpose([features.index(f) for f in clique])
        old = goals.get(Target(clique, residual), Goal(shaped, 0.0))
        total = old.precision + sigma**-2
        mean = (old.values * old.precision + shaped * sigma**-2) / total
        goals[Target(clique, residual)] = Goal(mean, total)
        cells += values.size
    if cells < sum(measurement.workload.cells for measurement in measurements):
        raise ParameterError("measurements must be of whole marginals, not of thresholds or single cells")
    return goals


def noise_loss(goals: Mapping[Target, Goal]) -> float:
    """Returns about the least loss of the truth: m / 2, m the independent numbers measured, less some deviations."""
    shapes = ([size - target.residual for size in goal.values.shape] for target, goal in goals.items())
    numbers = sum(map(math.prod, shapes))
    return numbers / 2 - DEVIATIONS * math.sqrt(numbers / 2)


def moved(sizes: tuple[int, ...], potentials: Mapping[Clique, Reals], cliques: Sequence[Clique]) -> dict[Clique, Reals]:
    """Returns the same potentials over other cliques, each of which holds some of them whole."""
    found = {clique: np.zeros([sizes[feature] for feature in clique]) for clique in cliques}
    for clique, potential in potentials.items():
        home = next(other for other in cliques if set(clique) <= set(other))
        found[home] += junction.spread(potential, clique, home)
    return found


def evaluate(tree: Tree, goals: Mapping[Target, Goal], potentials: dict[Clique, Reals]) -> Point:
    """Returns the loss of potentials, and its gradient."""
    beliefs = junction.calibrate(tree, potentials)
    homes = {clique: tree.home(clique) for clique in potentials}
    marginals = {c: junction.summed(beliefs[home], tree.cliques[home], c) for c, home in homes.items()}
    gradient = {clique: np.zeros_like(potential) for clique, potential in potentials.items()}
    loss = 0.0
    for (clique, residual), goal in goals.items():
        over = next(other for other in potentials if set(clique) <= set(other))
        answer = junction.summed(marginals[over], over, clique)
        wrong = (centred(answer) if residual else answer) - goal.values
        loss += goal.precision * float(np.vdot(wrong, wrong)) / 2
        gradient[over] += junction.spread(goal.precision * wrong, clique, over)
    return Point(potentials, marginals, loss, gradient)


def descend(tree: Tree, goals: Mapping[Target, Goal], point: Point, rate: float) -> tuple[Point, float]:
    """Returns the point after one step, or the same if the step went too far, and the rate of the next."""
    trial = {clique: point.potentials[clique] - rate * slope for clique, slope in point.gradient.items()}
    found = evaluate(tree, goals, trial)
    moves = (np.vdot(slope, point.marginals[c] - found.marginals[c]) for c, slope in point.gradient.items())
    if np.isfinite(found.loss) and point.loss - found.loss >= rate / 2 * float(sum(moves)):
        return found, GROWTH * rate
    return point, rate / 2
