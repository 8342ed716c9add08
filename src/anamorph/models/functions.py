"""Answers of relaxed rows to functions of one row: the weighted mean of the function's values over the rows.

The function is evaluated on the probability vectors of a row themselves, as a product query is (RAP, lemma 3.3): it is
the function's own relaxation, exact on rows that are one-hot.

Costs, for n' rows and m values: n' times the function, and n' m numbers in memory up to `HELD`; beyond, the rows are
taken in chunks, and the gradient evaluates each chunk once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from anamorph.curator.rowwise import Rowwise, values

HELD = 1 << 23
"""How many values of a function are held at a time."""

SLACK = 1e-5
"""How far a value may lie outside of [0, 1] by rounding, and keep its derivative."""


@dataclass(frozen=True)
class Functioned:
    """Noisy answers of one function: what a fit compares with."""

    chosen: Array
    targets: Array
    precision: Array
    """The weight of half a squared residual in the loss; 0 for padding."""
    function: Rowwise


jax.tree_util.register_dataclass(Functioned, ("chosen", "targets", "precision"), ("function",))


def functioned(function: Rowwise, chosen: ArrayLike, targets: ArrayLike, precision: ArrayLike) -> Functioned:
    """Returns the goal of some values of a function, padded so that few sizes occur: to a power of two."""
    size = np.size(chosen)
    spare = (1 << max(0, size - 1).bit_length()) - size
    numbers = [np.broadcast_to(np.asarray(item, np.float32), size) for item in (targets, precision)]
    padded = [jnp.asarray(np.pad(item, (0, spare))) for item in (np.asarray(chosen, np.int32), *numbers)]
    return Functioned(padded[0], padded[1], padded[2], function)


def functioned_loss(matrix: Array, weights: Array, goal: Functioned) -> Array:
    """Returns half the sum of precision * (answer - target)^2; the matrix is that of `answers`."""
    found = relaxed(goal.function, matrix, weights, goal.chosen)
    return 0.5 * jnp.sum(goal.precision * (found - goal.targets) ** 2)


@partial(jax.jit, static_argnums=0)
def answers(function: Rowwise, matrix: Array, weights: Array, chosen: Array | None = None) -> Array:
    """Returns the relaxed answers of a function, or the chosen ones.

    Args:
        function: the function.
        matrix: a line for each code of each feature, in the order of the schema and without padding; a column for
            each row.
        weights: the weight of each row; they sum to 1.
        chosen: which of the values are wanted.
    """
    return relaxed(function, matrix, weights, chosen)


def relaxed(function: Rowwise, matrix: Array, weights: Array, chosen: Array | None) -> Array:
    """Returns the weighted mean over rows, a chunk of rows at a time where all would not fit."""
    rows = matrix.shape[1]
    chunks = -(-rows // max(1, HELD // function.count))
    if chunks <= 1:
        return weighted(function, matrix, weights, chosen)
    length = -(-rows // chunks)
    spare = -rows % length
    lines = jnp.pad(matrix, ((0, 0), (0, spare))).reshape(matrix.shape[0], -1, length)
    shares = jnp.pad(weights, (0, spare)).reshape(-1, length)

    @jax.checkpoint
    def step(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        return total + weighted(function, *chunk, chosen), None

    cells = function.count if chosen is None else chosen.size
    return jax.lax.scan(step, jnp.zeros(cells, matrix.dtype), (jnp.moveaxis(lines, 1, 0), shares))[0]


def weighted(function: Rowwise, matrix: Array, weights: Array, chosen: Array | None) -> Array:
    """Returns the sum over rows of weight * value."""

    def row(*vectors: Array) -> Array:
        found = values(function, vectors, slack=SLACK)
        return found if chosen is None else found[chosen]

    found = jax.vmap(row, in_axes=1)(*blocks(matrix, function.sizes))
    return jnp.matmul(weights, found, precision=jax.lax.Precision.HIGHEST)


def blocks(matrix: Array, sizes: Sequence[int]) -> list[Array]:
    """Returns the lines of each feature."""
    return jnp.split(matrix, np.cumsum(sizes)[:-1].tolist())
