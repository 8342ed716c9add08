"""Answers of relaxed rows, as gathers and matrix products of fixed shapes.

The relaxed answer of the cell y of a marginal over S is the mean over rows of the product of the probabilities of its
values, sum_r w_r prod_{i in S} P[i, y_i, r] (RAP, lemma 3.3). With a line of P for each code:

- a single cell reads |S| lines: a gather (`Gather`);
- a whole marginal is a matrix product: the lines of its largest feature (left) times the products of the lines of the
  others (right). It is cut into *tiles* of a few fixed shapes, padded with the line of zeros, so that any number of
  marginals of any shape runs through the same few compiled loops, one tile in memory at a time: compilations grow
  neither with the workload nor with the rounds.

Costs, for n' rows: a cell k n' multiplications, memory bound; a tile of a x b cells 2 a b n' flops forwards and twice
that backwards, plus (a + (k - 1) b) lines read and added to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from anamorph.curator.tallies import GroupBy, Tests
from anamorph.models.simplex import Layout

TILES = ((128, 512), (32, 128))
"""The shapes of tiles: lines of the left factor, lines of the right."""

BATCH = 256
"""How many single cells are answered at a time."""


@dataclass(frozen=True)
class Gather:
    """Single cells: for each query the line of each of its factors, the line of ones where it has fewer."""

    lines: NDArray[np.int32]

    @property
    def size(self) -> int:
        """The number of queries."""
        return self.lines.shape[0]


def gather(layout: Layout, tally: GroupBy | Tests, factors: int) -> Gather:
    """Returns the lines that every query of a tally multiplies."""
    lines = np.full((tally.cells, factors), layout.one, np.int32)
    if isinstance(tally, GroupBy):
        codes = np.stack(np.unravel_index(np.arange(tally.cells), tally.shape), axis=1)
        codes[:, 0] += tally.start
        lines[:, : codes.shape[1]] = codes + layout.offsets[list(tally.features)]
    else:
        for index, features in enumerate(tally.sets):
            mine = np.flatnonzero(tally.which == index)
            lines[mine, : len(features)] = tally.codes(index) + layout.offsets[list(features)]
    return Gather(lines)


@dataclass(frozen=True)
class Tiling:
    """A marginal as a matrix: rows are the codes of one feature, columns the combinations of the others."""

    tally: GroupBy
    left: int
    """Which of the tally's features is on the left: the one with the most codes."""

    @property
    def rows(self) -> int:
        """The number of codes on the left."""
        return self.tally.shape[self.left]

    @property
    def columns(self) -> int:
        """The number of combinations on the right."""
        return self.tally.cells // self.rows

    @property
    def rest(self) -> tuple[int, ...]:
        """The codes of each feature on the right."""
        return tuple(size for i, size in enumerate(self.tally.shape) if i != self.left)

    def as_matrix(self, values: NDArray[np.floating]) -> NDArray[np.floating]:
        """Returns the marginal's values, in C order, as the matrix."""
        return np.moveaxis(values.reshape(self.tally.shape), self.left, 0).reshape(self.rows, self.columns)

    def as_values(self, matrix: NDArray[np.floating]) -> NDArray[np.floating]:
        """Returns the matrix as the marginal's values, in C order."""
        return np.moveaxis(matrix.reshape(self.rows, *self.rest), 0, self.left).ravel()

    def cuts(self, shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
        """Yields the part of the matrix that each tile covers."""
        for top in range(0, self.rows, shape[0]):
            for start in range(0, self.columns, shape[1]):
                yield (
                    slice(top, min(top + shape[0], self.rows)),
                    slice(start, min(start + shape[1], self.columns)),
                )

    def lines(
        self, layout: Layout, cut: tuple[slice, slice], shape: tuple[int, int], factors: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the lines of the left factor and of each right factor of one tile, padded with zeros."""
        first = np.array([self.tally.start] + [0] * (len(self.tally.features) - 1))
        offsets = layout.offsets[list(self.tally.features)] + first
        left = np.full(shape[0], layout.zero, np.int32)
        left[: cut[0].stop - cut[0].start] = offsets[self.left] + np.arange(cut[0].start, cut[0].stop)
        right = np.full((factors, shape[1]), layout.one, np.int32)
        wanted = np.arange(cut[1].start, cut[1].stop)
        right[0, wanted.size :] = layout.zero
        others = np.delete(offsets, self.left)
        codes = np.unravel_index(wanted, self.rest) if self.rest else ()
        for factor, (code, offset) in enumerate(zip(codes, others, strict=True)):
            right[factor, : wanted.size] = code + offset
        return left, right


def tiling(tally: GroupBy) -> Tiling:
    """Returns the matrix form of a marginal."""
    return Tiling(tally, int(np.argmax(tally.shape)))


def tile_shape(matrix: Tiling) -> tuple[int, int]:
    """Returns the shape of tile that covers a marginal with the least work."""

    def work(shape: tuple[int, int]) -> float:
        tiles = math.ceil(matrix.rows / shape[0]) * math.ceil(matrix.columns / shape[1])
        return tiles * (0.1 * shape[0] * shape[1] + 1.5 * (shape[0] + len(matrix.rest) * shape[1]))

    return min(TILES, key=work)


def small(tally: GroupBy) -> bool:
    """Returns whether a marginal has so few cells that a gather beats the smallest tile."""
    return tally.cells * len(tally.features) <= 1024


@jax.jit
def gather_answers(table: Array, weights: Array, lines: Array) -> Array:
    """Returns sum_r w_r prod_i P[line_i, r] for each query."""
    product = table[lines[:, 0]]
    for factor in range(1, lines.shape[1]):
        product = product * table[lines[:, factor]]
    return product @ weights


@jax.jit
def tile_answers(table: Array, weights: Array, left: Array, right: Array) -> Array:
    """Returns one tile of answers, left codes by right combinations."""
    product = table[right[0]] * weights
    for factor in range(1, right.shape[0]):
        product = product * table[right[factor]]
    return jnp.matmul(table[left], product.T, precision=jax.lax.Precision.HIGHEST)


def answers(layout: Layout, table: Array, weights: Array, tally: GroupBy | Tests) -> NDArray[np.float32]:
    """Returns the relaxed answers of a tally, in its order."""
    if isinstance(tally, Tests) or small(tally):
        queries = gather(layout, tally, max(map(len, tally.sets)))
        padded = np.pad(queries.lines, ((0, -queries.size % BATCH), (0, 0)), constant_values=layout.zero)
        batches = [gather_answers(table, weights, lines) for lines in padded.reshape(-1, BATCH, padded.shape[1])]
        return np.concatenate([np.asarray(batch) for batch in batches])[: queries.size]
    matrix = tiling(tally)
    shape = tile_shape(matrix)
    whole = np.empty((matrix.rows, matrix.columns), np.float32)
    for cut in matrix.cuts(shape):
        left, right = matrix.lines(layout, cut, shape, max(1, len(matrix.rest)))
        tile = np.asarray(tile_answers(table, weights, left, right))
        whole[cut] = tile[: cut[0].stop - cut[0].start, : cut[1].stop - cut[1].start]
    return matrix.as_values(whole)


@dataclass(frozen=True)
class Gathered:
    """Noisy answers of single cells: what a fit compares them with."""

    lines: Array
    targets: Array
    precision: Array
    """The weight of half a squared residual in the loss; 0 for padding."""


@dataclass(frozen=True)
class Tiled:
    """Noisy answers of whole marginals, as tiles of one shape; the first `used` tiles count."""

    left: Array
    right: Array
    targets: Array
    precision: Array
    used: Array


for _kind, _fields in (
    (Gathered, ("lines", "targets", "precision")),
    (Tiled, ("left", "right", "targets", "precision", "used")),
):
    jax.tree_util.register_dataclass(_kind, data_fields=list(_fields), meta_fields=[])


def gathered_loss(table: Array, weights: Array, goal: Gathered) -> Array:
    """Returns half the sum of squared residuals in units of sigma, over single cells."""
    residuals = gather_answers(table, weights, goal.lines) - goal.targets
    return 0.5 * jnp.sum(goal.precision * residuals**2)


@jax.custom_vjp
def tiled_loss(table: Array, weights: Array, goal: Tiled) -> Array:
    """Returns half the sum of squared residuals in units of sigma, over whole marginals, one tile at a time.

    The gradient is found in the same pass, so that a tile is formed once: with G = precision (L R^T - target) and
    R = w * (products of right lines), dL = G R and dR = w * (G^T L), each added to the lines it came from.
    """
    return _tiled_forward(table, weights, goal)[0]


def _tiled_forward(table: Array, weights: Array, goal: Tiled) -> tuple[Array, tuple[Array, Array]]:
    factors = goal.right.shape[1]

    def add_tile(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        loss, table_gradient, weights_gradient = state
        left = table[goal.left[i]]
        parts = [table[goal.right[i, factor]] for factor in range(factors)]
        right = math.prod(parts[1:], start=parts[0])
        weighted = right * weights
        residuals = left @ weighted.T - goal.targets[i]
        pull = goal.precision[i] * residuals
        table_gradient = table_gradient.at[goal.left[i]].add(pull @ weighted)
        back = pull.T @ left
        weights_gradient = weights_gradient + jnp.sum(back * right, axis=0)
        back = back * weights
        for factor in range(factors):
            others = math.prod([part for j, part in enumerate(parts) if j != factor], start=back)
            table_gradient = table_gradient.at[goal.right[i, factor]].add(others)
        return loss + 0.5 * jnp.sum(pull * residuals), table_gradient, weights_gradient

    start = (jnp.zeros((), table.dtype), jnp.zeros_like(table), jnp.zeros_like(weights))
    loss, *gradients = jax.lax.fori_loop(0, goal.used, add_tile, start)
    return loss, tuple(gradients)


def _tiled_backward(gradients: tuple[Array, Array], pulled: Array) -> tuple[Array, Array, None]:
    return pulled * gradients[0], pulled * gradients[1], None


tiled_loss.defvjp(_tiled_forward, _tiled_backward)
