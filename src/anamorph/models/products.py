"""Answers of relaxed rows, as gathers and matrix products of fixed shapes.

The relaxed answer of the cell y of a marginal over S is the mean over rows of the product of the probabilities of its
values, sum_r w_r prod_{i in S} P[i, y_i, r] (RAP, lemma 3.3); that of a threshold, the mean over rows of the
probability that at least r of the values are drawn, each drawn on its own. With a line of P for each code:

- a single cell reads |S| lines: a gather (`Gather`);
- a whole marginal is a matrix product: the lines of its largest feature (left) times the products of the lines of the
  others (right). It is cut into *tiles* of a few fixed shapes, padded with the line of zeros, so that any number of
  marginals of any shape runs through the same few compiled loops: compilations grow neither with the workload nor with
  the rounds;
- a whole block of thresholds is a sum of whole marginals (`AtLeast.broadcast`).

Costs, for n' rows: a cell k n' multiplications, memory bound, and r times as many for a threshold; a tile of a x b
cells 2 a b n' flops, plus (a + (k - 1) b) lines read. Fits compare whole marginals in tiles of another kind (tiles.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from anamorph.curator.tallies import AtLeast, GroupBy, Tests
from anamorph.models.simplex import Layout
from anamorph.models.tiles import NO_TAIL, Tail, misfit

Counted = GroupBy | AtLeast | Tests
"""The tallies that are sums of products of lines."""

Shape = tuple[int, int]

TILES: tuple[Shape, ...] = ((128, 512), (32, 128), (16, 16))
"""The shapes of tiles: lines of the left factor, lines of the right."""

FEW = 64
"""The most factors of all cells of a block that is answered cell by cell: a tile would read more lines."""
FEW_ELSEWHERE = 1024
"""The same where tiles wait for one another longer than they compute: not on a CPU."""

BATCH = 256
"""How many single cells are answered at a time."""

AT_A_TIME = 1 << 13
"""How many single queries a fit compares at a time: a power of two, as their number is."""

LARGE = 1 << 20
"""From this many cells on, a slab is answered in tiles as tall as itself: worth the compilation for each height."""

RUNS = (64, 8, 1)
"""How many tiles, or batches of single cells, are answered in one dispatch."""


@dataclass(frozen=True, eq=False)
class Gather:
    """Single queries of one kind: for each the line of each of its factors, the line of ones where it has fewer."""

    lines: NDArray[np.int32]
    """Queries by factors."""
    least: int
    """How many of the factors must agree: all of them for cells of marginals."""
    places: NDArray[np.int64]
    """Where each query stands in its tally."""


def gather(layout: Layout, tally: Counted, factors: int) -> Iterator[Gather]:
    """Yields the queries of a tally by kind: cells of marginals all with this many factors, thresholds by (k, r)."""
    if isinstance(tally, Tests):
        yield from gather_tests(layout, tally, factors)
    elif isinstance(tally, AtLeast):
        yield Gather(slab_lines(layout, tally.slab, len(tally.slab.features)), tally.least, np.arange(tally.cells))
    else:
        yield Gather(slab_lines(layout, tally, factors), factors, np.arange(tally.cells))


def gather_tests(layout: Layout, tally: Tests, factors: int) -> Iterator[Gather]:
    """Yields single cells by kind."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, features in enumerate(tally.sets):
        needed = tally.needed(index)
        kind = (factors, factors) if needed == len(features) else (len(features), needed)
        kinds.setdefault(kind, []).append(index)
    for (order, least), members in kinds.items():
        places = np.flatnonzero(np.isin(tally.which, members))
        lines = np.full((places.size, order), layout.one, np.int32)
        for index in members:
            features = tally.sets[index]
            lines[tally.which[places] == index, : len(features)] = tally.codes(index) + layout.offsets[list(features)]
        yield Gather(lines, least, places)


def slab_lines(layout: Layout, slab: GroupBy, factors: int) -> NDArray[np.int32]:
    """Returns the line of each factor of each cell of a slab: cells by factors."""
    lines = np.full((slab.cells, factors), layout.one, np.int32)
    codes = np.stack(np.unravel_index(np.arange(slab.cells), slab.shape), axis=1)
    lines[:, : codes.shape[1]] = codes + slab.starts + layout.offsets[list(slab.features)]
    return lines


def simplest(tally: Counted) -> Counted:
    """Returns the tally itself; the marginal, for thresholds with which all features must agree."""
    if isinstance(tally, AtLeast) and tally.least == len(tally.slab.features):
        return tally.slab
    return tally


def conjunction_factors(tally: Counted) -> int:
    """Returns the most factors of a tally's cells of marginals; 0 if it has none."""
    if isinstance(tally, AtLeast):
        return 0
    if isinstance(tally, GroupBy):
        return len(tally.features)
    orders = (len(features) for i, features in enumerate(tally.sets) if tally.needed(i) == len(features))
    return max(orders, default=0)


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

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Returns how many tiles cover the rows, and how many the columns."""
        return -(-self.rows // shape[0]), -(-self.columns // shape[1])

    def as_values(self, tiles: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns tiles as the marginal's values, in C order."""
        shape = tiles.shape[1:]
        down, across = self.grid(shape)
        whole = tiles.reshape(down, across, *shape).swapaxes(1, 2).reshape(down * shape[0], across * shape[1])
        matrix = whole[: self.rows, : self.columns].reshape(self.rows, *self.rest)
        return np.moveaxis(matrix, 0, self.left).ravel()

    def lines(self, layout: Layout, shape: Shape, factors: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the lines of the left factor and of each right factor of every tile, padded with zeros."""
        down, across = self.grid(shape)
        firsts = layout.offsets[list(self.tally.features)] + self.tally.starts
        left = np.full(down * shape[0], layout.zero, np.int32)
        left[: self.rows] = firsts[self.left] + np.arange(self.rows)
        right = np.full((factors, across * shape[1]), layout.one, np.int32)
        right[0, self.columns :] = layout.zero
        codes = np.unravel_index(np.arange(self.columns), self.rest) if self.rest else ()
        for factor, (code, first) in enumerate(zip(codes, np.delete(firsts, self.left), strict=True)):
            right[factor, : self.columns] = code + first
        panels = right.reshape(factors, across, shape[1]).swapaxes(0, 1)
        return np.repeat(left.reshape(down, shape[0]), across, axis=0), np.tile(panels, (down, 1, 1))


def tiling(tally: GroupBy) -> Tiling:
    """Returns the matrix form of a marginal."""
    return Tiling(tally, int(np.argmax(tally.shape)))


def tile_shape(matrix: Tiling, shapes: Sequence[Shape] = TILES) -> Shape:
    """Returns the shape of tile that covers a marginal with the least work."""

    def work(shape: Shape) -> float:
        tiles = math.prod(matrix.grid(shape))
        return tiles * (60 + 0.1 * shape[0] * shape[1] + 1.5 * (shape[0] + len(matrix.rest) * shape[1]))

    return min(shapes, key=work)


def answer_shape(matrix: Tiling) -> Shape:
    """Returns the shape of tile that a marginal is answered in, where nothing is fitted: one of a few more."""
    if matrix.tally.cells < LARGE:
        return tile_shape(matrix)
    parts = -(-matrix.rows // 512)
    tall = (-(-matrix.rows // (64 * parts)) * 64, 512)
    return tile_shape(matrix, (*TILES, tall))


def small(tally: GroupBy | AtLeast) -> bool:
    """Returns whether a block has so few cells that a gather beats the smallest tile."""
    slab = tally.slab if isinstance(tally, AtLeast) else tally
    return slab.cells * len(slab.features) <= (FEW if jax.default_backend() == "cpu" else FEW_ELSEWHERE)


def at_least(chances: Sequence[Array], least: int) -> Array:
    """Returns the probability that at least `least` of independent events happen, given the chance of each.

    The tail of a Poisson-binomial: of the first i events at least j happen with probability

        A_i[j] = p_i A_{i-1}[j-1] + (1 - p_i) A_{i-1}[j],    A_i[0] = 1,  A_i[j] = 0 for j > i.

    Nothing cancels; only entries that the last one needs are computed; for all events it is their product.
    """
    tail: dict[int, Array] = {}
    for i, chance in enumerate(chances, start=1):
        needed = range(max(1, least - len(chances) + i), min(i, least) + 1)
        happens = {j: chance * tail[j - 1] if j > 1 else chance for j in needed}
        tail = {j: happens[j] + (1 - chance) * tail[j] if j < i else happens[j] for j in needed}
    return tail[least]


@partial(jax.jit, static_argnames="least")
def gather_answers(table: Array, weights: Array, lines: Array, least: int) -> Array:
    """Returns, for each query, the mean over rows of the probability that at least `least` of its factors agree.

    With as many as there are factors, sum_r w_r prod_i P[line_i, r]; of one factor each, from the means of all lines.
    """
    if lines.shape[1] == least == 1:
        return (table @ weights)[lines[:, 0]]
    return at_least([table[lines[:, factor]] for factor in range(lines.shape[1])], least) @ weights


@partial(jax.jit, static_argnames="least")
def gather_run(table: Array, weights: Array, lines: Array, least: int) -> Array:
    """Returns the answers of several batches of queries, one after the other."""
    return jax.lax.map(lambda batch: gather_answers(table, weights, batch, least), lines)


def tile_answers(table: Array, weights: Array, left: Array, right: Array) -> Array:
    """Returns one tile of answers, left codes by right combinations."""
    product = table[right[0]] * weights
    for factor in range(1, right.shape[0]):
        product = product * table[right[factor]]
    return jnp.matmul(table[left], product.T, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def tile_run(table: Array, weights: Array, left: Array, right: Array) -> Array:
    """Returns several tiles of answers, one after the other."""
    return jax.lax.map(lambda tile: tile_answers(table, weights, *tile), (left, right))


def in_runs(answer: Callable[..., Array], *parts: NDArray[np.int32]) -> NDArray[np.float32]:
    """Returns the answers of all parts along their first axis, in dispatches of a few fixed sizes."""
    found: list[NDArray[np.float32]] = []
    first, stop = 0, len(parts[0])
    while first < stop:
        size = next(run for run in RUNS if run <= stop - first)
        found.append(np.asarray(answer(*(part[first : first + size] for part in parts))))
        first += size
    return np.concatenate(found) if len(found) > 1 else found[0]


def answers(layout: Layout, table: Array, weights: Array, tally: Counted) -> NDArray[np.float32]:
    """Returns the relaxed answers of a tally, in its order."""
    tally = simplest(tally)
    if isinstance(tally, Tests) or small(tally):
        return single_answers(layout, table, weights, tally)
    if isinstance(tally, AtLeast):
        return tally.broadcast(lambda part: answers(layout, table, weights, part), np.float32)
    matrix = tiling(tally)
    left, right = matrix.lines(layout, answer_shape(matrix), max(1, len(matrix.rest)))
    return matrix.as_values(in_runs(partial(tile_run, table, weights), left, right))


def single_answers(layout: Layout, table: Array, weights: Array, tally: Counted) -> NDArray[np.float32]:
    """Returns the answers of queries one by one."""
    found = np.empty(tally.cells, np.float32)
    for queries in gather(layout, tally, conjunction_factors(tally)):
        size, factors = queries.lines.shape
        padded = np.pad(queries.lines, ((0, -size % BATCH), (0, 0)), constant_values=layout.zero)
        run = partial(gather_run, table, weights, least=queries.least)
        found[queries.places] = in_runs(run, padded.reshape(-1, BATCH, factors)).ravel()[:size]
    return found


@dataclass(frozen=True)
class Gathered:
    """Noisy answers of single queries of one kind: what a fit compares them with."""

    lines: Array
    targets: Array
    precision: Array
    """The weight of half a squared residual in the loss; 0 for padding."""
    least: int
    """How many of the factors must agree."""


jax.tree_util.register_dataclass(Gathered, data_fields=["lines", "targets", "precision"], meta_fields=["least"])


def gathered_loss(table: Array, weights: Array, goal: Gathered, tail: Tail = NO_TAIL) -> Array:
    """Returns the misfit of single queries: half the sum of their squared residuals in units of sigma, and tails.

    Many queries are compared some at a time, forwards and backwards: never are the factors of all held.
    """

    def misfit_of(lines: Array, targets: Array, precision: Array) -> Array:
        return misfit(gather_answers(table, weights, lines, goal.least) - targets, precision, tail)[0]

    parts = (goal.lines, goal.targets, goal.precision)
    if len(goal.targets) <= AT_A_TIME:
        return misfit_of(*parts)
    cut = tuple(part.reshape(-1, AT_A_TIME, *part.shape[1:]) for part in parts)
    body = jax.checkpoint(lambda total, some: (total + misfit_of(*some), None))
    return jax.lax.scan(body, jnp.zeros((), table.dtype), cut)[0]
