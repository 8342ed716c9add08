"""Points on simplices: how a table of relaxed rows is laid out, and how free numbers become probabilities.

A relaxed row holds, for each feature, a probability for each of its codes. All rows are kept as one matrix with a line
for each (feature, code) and a column for each row, so that a query reads whole lines. For arithmetic, features of
similar size are stacked: a stack is a dense tensor (features, codes, rows), its codes padded to at most a quarter
above the feature's size, and every operation on simplices is a few reductions over the middle axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

NOWHERE = -1e9
"""The free number of a padded code: far below every other, so its probability is 0."""

Stacks = tuple[Array, ...]


@dataclass(frozen=True)
class Layout:
    """Where each code of each feature lies.

    Lines are numbered through the stacks; two more lines follow them, `one` (all ones, the factor of an absent
    feature) and `zero` (all zeros, the factor of a padded query).
    """

    sizes: tuple[int, ...]

    @cached_property
    def stacks(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(padded size, features) of each stack."""
        padded = [padded_size(size) for size in self.sizes]
        return tuple((size, tuple(np.flatnonzero(np.equal(padded, size)).tolist())) for size in sorted(set(padded)))

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """The line of code 0 of each feature."""
        offsets, line = np.zeros(len(self.sizes), np.int64), 0
        for size, features in self.stacks:
            for feature in features:
                offsets[feature] = line
                line += size
        return offsets

    @cached_property
    def height(self) -> int:
        """The number of lines of the stacks."""
        return sum(size * len(features) for size, features in self.stacks)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of lines of each feature, padding left out."""
        return self.sizes

    @property
    def end(self) -> int:
        """The number of lines of the whole matrix."""
        return self.height + 2

    @property
    def one(self) -> int:
        """The line of ones."""
        return self.height

    @property
    def zero(self) -> int:
        """The line of zeros."""
        return self.height + 1

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        """The line of every code of every feature, feature by feature: the padding left out."""
        return np.concatenate([offset + np.arange(size) for offset, size in zip(self.offsets, self.sizes, strict=True)])

    @cached_property
    def masks(self) -> tuple[NDArray[np.bool_], ...]:
        """For each stack, which codes are not padding: features by codes by 1."""
        return tuple(
            (np.arange(size) < np.array([self.sizes[feature] for feature in features])[:, None])[:, :, None]
            for size, features in self.stacks
        )

    def stack(self, matrix: Array, padding: float) -> Stacks:
        """Returns the stacks of a matrix that has a line for each code, without padding."""
        rows = matrix.shape[1]
        whole = jnp.full((self.height, rows), padding, matrix.dtype).at[self.lines].set(matrix)
        stops = np.cumsum([size * len(features) for size, features in self.stacks])[:-1]
        shapes = [(len(features), size, rows) for size, features in self.stacks]
        return tuple(part.reshape(shape) for part, shape in zip(jnp.split(whole, stops), shapes, strict=True))

    def flatten(self, stacks: Stacks) -> Array:
        """Returns the matrix of all lines, `one` and `zero` included."""
        rows = stacks[0].shape[2]
        ends = jnp.stack([jnp.ones(rows, stacks[0].dtype), jnp.zeros(rows, stacks[0].dtype)])
        return jnp.concatenate([*(stack.reshape(-1, rows) for stack in stacks), ends])


def padded_size(size: int) -> int:
    """Returns the size rounded up to a multiple of an eighth of the next power of two: few distinct sizes."""
    step = max(1, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def sparsemax(free: Array, below: Array | None = None) -> Array:
    """Returns the Euclidean projection of each fibre along axis 1 onto the probability simplex.

    max(x - tau, 0) with tau such that the sum is 1 (Martins & Astudillo 2016). The threshold is the root of a convex,
    decreasing, piecewise linear function; Newton's method from a number below the root climbs to it and ends after
    finitely many steps (Michelot 1986), in practice fewer than ten: no sort is needed.

    Args:
        free: any numbers.
        below: numbers not above the thresholds, to start from; the nearer the faster. Without them max(x) - 1 is used.
    """
    start = jnp.max(free, axis=1, keepdims=True) - 1 if below is None else below

    def climb(state: tuple[Array, Array]) -> tuple[Array, Array]:
        tau, _ = state
        above = free > tau
        total = jnp.sum(jnp.where(above, free, 0), axis=1, keepdims=True)
        raised = jnp.maximum((total - 1) / jnp.sum(above, axis=1, keepdims=True, dtype=free.dtype), tau)
        return raised, jnp.any(raised > tau)

    tau, _ = jax.lax.while_loop(lambda state: state[1], climb, (start, jnp.array(True)))
    return jnp.maximum(free - tau, 0)


def step_back(points: Array, moved: Array, mask: NDArray[np.bool_]) -> Array:
    """Returns the projection of points of simplices that were moved a little; `mask` tells codes from padding.

    The threshold is at least the least movement m of a fibre's codes: sum(max(x - m, 0)) >= sum(points) = 1. A margin
    allows for points whose sum is 1 but for rounding.
    """
    least = jnp.min(jnp.where(mask, moved - points, jnp.inf), axis=1, keepdims=True)
    return sparsemax(jnp.where(mask, moved, NOWHERE), below=least - 1e-5)


def softmax(free: Array) -> Array:
    """Returns exp(x) / sum(exp(x)) along axis 1."""
    return jax.nn.softmax(free, axis=1)
