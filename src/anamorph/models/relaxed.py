"""Relaxed rows, and the relaxed projection that fits them (RAP, algorithm 1).

The model is a table of n' rows whose cells are probability vectors, with a weight for each row. Fitting minimises, by
Adam steps on the probabilities, each followed by the projection onto the simplices (SparseMax), or on free numbers
whose softmax they are,

    chi^2 / (2 n)  +  penalty * I,     chi^2 = sum over measured answers of ((answer - noisy answer) / sigma)^2,

with answers and sigma as counts. I is the information that the rows carry beyond independence,

    I = sum over features f of sum over rows r of w_r KL(P_rf || mean_f)  +  KL(w || uniform):

among the tables that explain the measurements the penalty prefers the one nearest to independence, as a graphical
model of maximum entropy does. Penalty 0 and equal weights are the RAP paper's objective.

References: Aydore et al. 2021, algorithm 1 and section 5.1 (Adam, rate 0.001, at most 5000 steps, stop when the
relative improvement of the loss falls below 1e-7, start in [-1, 1]).
Deviations: the loss weighs measurements by 1 / sigma^2; before Adam scales it, the gradient is centred within each
simplex (`tangent`); the best table seen is returned, not the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from anamorph.curator.estimates import RelaxedTable
from anamorph.curator.tallies import GroupBy, RowFunction, Special, Tally
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models import functions, goals, products
from anamorph.models.answers import no_residuals
from anamorph.models.descent import Problem, descend
from anamorph.models.simplex import NOWHERE, Layout, Stacks, softmax, sparsemax, step_back
from anamorph.models.tiles import ALL, NO_TAIL, Share, Tail, tiled_loss
from anamorph.queries.workload import WHOLE, Workload
from anamorph.release import Measurement
from anamorph.rounding import round_rows
from anamorph.table import Table


class Parameters(NamedTuple):
    """What Adam moves."""

    free: Stacks
    rows: Array
    """The logarithms of the row weights, up to a constant."""


@dataclass(frozen=True, eq=False)
class RelaxedRows:
    """A table of relaxed rows."""

    sizes: tuple[int, ...]
    probabilities: NDArray[np.float32]
    """A line for each code of each feature, a column for each row."""
    weights: NDArray[np.float32]
    """The weight of each row; they sum to 1."""
    parameters: Parameters | None = None
    """What the fit moved, for a warm start; a loaded model has none."""
    degraded: bool = False
    """Whether a fit met a loss that was not a number and fell back to the best table before it."""

    @cached_property
    def layout(self) -> Layout:
        """Where the lines lie."""
        return Layout(self.sizes)

    @cached_property
    def table(self) -> Array:
        """The padded matrix that answers are computed from."""
        return pad(self.layout, self.probabilities)

    @cached_property
    def placed_weights(self) -> Array:
        """The weights, where answers are computed."""
        return jnp.asarray(self.weights)

    def answers(self, workload: Workload) -> Iterator[NDArray[np.float32]]:
        """Yields the relaxed answers of each piece of a workload."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> NDArray[np.float32]:
        """Returns the relaxed answers of one tally."""
        if isinstance(tally, RowFunction):
            found = functions.answers(tally.function, jnp.asarray(self.probabilities), self.placed_weights)
            return np.asarray(found)[slice(None) if tally.chosen is None else tally.chosen]
        if isinstance(tally, Special):
            raise no_residuals()
        return products.answers(self.layout, self.table, self.placed_weights, tally)

    def estimate(self, workload: Workload) -> RelaxedTable:
        """Returns the table for a curator to compare with, and its answers to the functions of a workload."""
        tallies = [piece.tally for piece in workload.pieces(WHOLE)]
        used = {tally.function for tally in tallies if isinstance(tally, RowFunction)}
        answers = {function: self.answer(RowFunction(self.sizes, function)).astype(np.float64) for function in used}
        return RelaxedTable(self.sizes, self.probabilities, self.weights, answers)

    def popular(self) -> NDArray[np.float64]:
        """Returns the one-way answers of every feature: a number for each line."""
        return self.probabilities @ self.weights.astype(np.float64)

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows rounded at random from the relaxed ones, their marginals over `keep` polished."""
        targets = {f: self.answer(GroupBy(self.sizes, f, 0, self.sizes[f[0]])) for f in keep}
        return round_rows(self.probabilities, self.weights, self.sizes, rows=rows, seed=seed, targets=targets)

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps."""
        return {"probabilities": self.probabilities, "weights": self.weights}

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses anything but probability vectors."""
        probabilities, weights = arrays["probabilities"], arrays["weights"]
        fits = probabilities.ndim == 2 and probabilities.shape == (sum(sizes), weights.size) and weights.ndim == 1
        if not fits or not (np.all(probabilities >= 0) and np.all(weights >= 0)):
            raise CorruptionError("the model must hold a probability for each code of each row; it does not")
        sums = np.add.reduceat(probabilities, np.cumsum((0, *sizes[:-1])), axis=0)
        if not (np.allclose(sums, 1, atol=1e-3) and np.isclose(weights.sum(), 1, atol=1e-3)):
            raise CorruptionError("the model's probabilities must sum to 1; they do not")
        return cls(sizes, probabilities.astype(np.float32), weights.astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class RelaxedProjection:
    """The estimator of relaxed rows."""

    rows: int = 1000
    """n', the number of relaxed rows."""
    steps: int = 5000
    """The most Adam steps of one fit."""
    rate: float = 1e-3
    """Adam's learning rate."""
    tolerance: float = 1e-7
    """A fit stops when the loss changes by less than this fraction of itself from one step to the next."""
    simplex: Literal["sparsemax", "softmax"] = "sparsemax"
    """How free numbers become probabilities."""
    start: float = 1.0
    """Free numbers start uniformly in [-start, start]."""
    row_weights: bool = False
    """Whether rows have weights of their own, fitted with the rest."""
    penalty: float = 0.0
    """The weight of the information penalty."""

    def __post_init__(self) -> None:
        for name in ("rows", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{name} ({value!r}) must be a whole number of at least 1")
        for name, least in (("rate", 1e-12), ("start", 0), ("tolerance", 0), ("penalty", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < np.inf:
                raise ParameterError(f"{name} ({value!r}) must be a finite number of at least {least}")
        # Beyond, single precision cannot keep the sum of a probability vector.
        for name, most in (("rate", 100), ("start", 100)):
            if getattr(self, name) > most:
                raise ParameterError(f"{name} ({getattr(self, name)!r}) must be at most {most}")
        if self.simplex not in ("sparsemax", "softmax"):
            raise ParameterError(f"simplex ({self.simplex!r}) must be sparsemax or softmax")

    def init(self, sizes: tuple[int, ...], *, seed: int) -> RelaxedRows:
        """Returns rows started at random."""
        layout = Layout(sizes)
        return self.model(layout, scatter(self, layout, jax.random.key(seed)))

    def fit(self, model: RelaxedRows, measurements: Sequence[Measurement], *, seed: int = 0) -> RelaxedRows:
        """Returns the rows that best explain all measurements, starting from the model's rows.

        The fit has no randomness of its own, so the seed is not used.
        """
        if model.parameters is None:
            raise ParameterError("model must come from init or fit: a loaded release cannot be fitted further")
        best, finite = descend(self.problem(model.layout), model.parameters, goals.build(model.layout, measurements))
        return replace(self.model(model.layout, best), degraded=model.degraded or not finite)

    def problem(self, layout: Layout) -> Problem:
        """Returns what a fit minimises, and how."""
        return Problem(self, layout, objective, tangent, settle)

    def model(self, layout: Layout, parameters: Parameters) -> RelaxedRows:
        """Returns the rows that parameters stand for."""
        probabilities, weights = map(np.asarray, reveal(self, layout, parameters))
        return RelaxedRows(layout.sizes, probabilities, weights, parameters)


@partial(jax.jit, static_argnums=0)
def pad(layout: Layout, probabilities: Array) -> Array:
    """Returns the matrix of all lines, padding and the lines of ones and zeros included."""
    return layout.flatten(layout.stack(jnp.asarray(probabilities), 0.0))


@partial(jax.jit, static_argnums=(0, 1))
def scatter(estimator: RelaxedProjection, layout: Layout, key: Array) -> Parameters:
    """Returns parameters at random."""
    shape = (sum(layout.sizes), estimator.rows)
    free = layout.stack(jax.random.uniform(key, shape, minval=-estimator.start, maxval=estimator.start), NOWHERE)
    if estimator.simplex == "sparsemax":
        free = tuple(map(sparsemax, free))
    return Parameters(free, jnp.zeros(estimator.rows))


@partial(jax.jit, static_argnums=(0, 1))
def reveal(estimator: RelaxedProjection, layout: Layout, parameters: Parameters) -> tuple[Array, Array]:
    """Returns the probabilities, a line for each code, and the row weights that parameters stand for."""
    return layout.flatten(points(estimator, parameters.free))[layout.lines], row_weights(estimator, parameters.rows)


def points(estimator: RelaxedProjection, free: Stacks) -> Stacks:
    """Returns the probabilities that the parameters stand for."""
    return tuple(softmax(stack) for stack in free) if estimator.simplex == "softmax" else free


def tangent(estimator: RelaxedProjection, parameters: Parameters, gradient: Parameters) -> Parameters:
    """Returns the gradient along the simplices: for SparseMax, less its mean under the row's own probabilities.

    What is subtracted is constant over a simplex, so no direction inside it changes; but Adam scales every number on
    its own, and only differences within a simplex should set its sign.
    """
    if estimator.simplex == "softmax":
        return gradient

    def centred(slope: Array, point: Array) -> Array:
        # As a product with ones: XLA's own sum of a product, fused, is several times slower on a CPU.
        mean = jnp.einsum("s,fsr->fr", jnp.ones(slope.shape[1], slope.dtype), slope * point)
        return slope - mean[:, None]

    return gradient._replace(free=tuple(map(centred, gradient.free, parameters.free)))


def settle(
    estimator: RelaxedProjection, layout: Layout, _aims: object, before: Parameters, moved: Parameters
) -> Parameters:
    """Returns moved parameters: for SparseMax, projected back onto the simplices."""
    if estimator.simplex == "softmax":
        return moved
    return moved._replace(free=tuple(map(step_back, before.free, moved.free, layout.masks)))


def row_weights(estimator: RelaxedProjection, rows: Array) -> Array:
    """Returns the weights of the rows, which sum to 1."""
    return jax.nn.softmax(rows) if estimator.row_weights else jnp.full(rows.shape, 1 / rows.size, rows.dtype)


def objective(estimator: RelaxedProjection, layout: Layout, parameters: Parameters, aims: goals.Goals) -> Array:
    """Returns chi^2 / (2 n) plus the information penalty."""
    probabilities = points(estimator, parameters.free)
    weights = row_weights(estimator, parameters.rows)
    return table_loss(layout, probabilities, weights, aims, estimator.penalty)


def table_loss(layout: Layout, probabilities: Stacks, weights: Array, aims: goals.Goals, penalty: float) -> Array:
    """Returns chi^2 / (2 n) of a table of relaxed rows, plus its information penalty."""
    loss = lines_loss(layout, layout.flatten(probabilities), weights, aims)
    if penalty:
        loss += penalty * information(probabilities, weights)
    return loss


def lines_loss(
    layout: Layout, table: Array, weights: Array, aims: goals.Goals, tail: Tail = NO_TAIL, share: Share = ALL
) -> Array:
    """Returns chi^2 / (2 n) of the lines of a table, with its tail; of whole marginals, a share may stand for all."""
    parts = [products.gathered_loss(table, weights, gathered, tail) for gathered in aims.gathered]
    parts += [tiled_loss(table, weights, tiled, tail, share) for tiled in aims.tiled]
    parts += [functions.functioned_loss(table[layout.lines], weights, goal) for goal in aims.functioned]
    return sum(parts, start=jnp.zeros((), table.dtype))


def information(probabilities: Stacks, weights: Array) -> Array:
    """Returns the mutual information between the row and each feature, summed, plus KL(w || uniform)."""

    def entropy(p: Array, axis: int | None = None) -> Array:
        return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=axis)

    total = jnp.log(weights.size) - entropy(weights)
    for stack in probabilities:
        total += entropy(stack @ weights) - jnp.sum(entropy(stack, axis=1) @ weights)
    return total
