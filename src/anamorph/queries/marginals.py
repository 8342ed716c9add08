"""k-way marginals: for a set S of features, how many rows have each combination of their values.

Two query classes: `Marginals`, whose block is a whole marginal, and `Cells`, whose block is a single cell (a k-way
conjunction, the statistical query of the RAP paper, definition 2.2). Cells of whole marginals are never listed: a
query is its position in the concatenation of the marginals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.curator.tallies import GroupBy, Tally, Tests, is_set, marginal_cells
from anamorph.errors import WorkloadError
from anamorph.queries.piece import Piece
from anamorph.schema import Schema

MOST_MARGINALS = 1 << 22
"""The most marginals that one workload lists."""

NATIVE = "declare bins for a number, or take a class of queries for numbers"
"""What to do about a native column, which has no marginals."""


@dataclass(frozen=True)
class Marginals:
    """Whole marginals: block i is every cell of the marginal over `sets[i]`."""

    sizes: tuple[int, ...]
    """The sizes of all columns of the schema."""
    sets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not all(is_set(features, self.sizes) for features in self.sets):
            raise WorkloadError("a marginal must be over one or more distinct columns of the schema")

    @property
    def blocks(self) -> int:
        """The number of marginals."""
        return len(self.sets)

    @cached_property
    def block_cells(self) -> tuple[int, ...]:
        """The number of cells of each marginal."""
        return tuple(marginal_cells(self.sizes, features) for features in self.sets)

    @property
    def largest_block(self) -> int:
        """The number of cells of the largest marginal."""
        return max(self.block_cells, default=0)

    @property
    def cells(self) -> int:
        """The number of queries."""
        return sum(self.block_cells)

    def take(self, ids: ArrayLike) -> Self:
        """Returns the marginals named, in the order named."""
        return replace(self, sets=tuple(self.sets[i] for i in np.asarray(ids, np.int64).tolist()))

    def by_cell(self) -> Cells:
        """Returns the same queries, every cell its own block."""
        return Cells(self)

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields slabs of at most `limit` cells."""
        for block, features in enumerate(self.sets):
            for slab in slabs(self.sizes, features, limit):
                yield Piece(self.tally(slab), block, 1)

    def tally(self, slab: GroupBy) -> Tally:
        """Returns how the queries of a slab are counted."""
        return slab

    def tests(self, which: NDArray[np.int64], positions: NDArray[np.int64]) -> Tests:
        """Returns the tally of single cells: of which marginal, and at which position of it; others are not named."""
        used, place = np.unique(which, return_inverse=True)
        return Tests(self.sizes, tuple(self.sets[i] for i in used.tolist()), place.astype(np.int64), positions)

    def measured(self, order: int = 0) -> Marginals:
        """Returns the marginals whose cells are measured where whole blocks are: these; or, of an order given, theirs.

        Larger ones are replaced by all their marginals over `order` features, each once.
        """
        if not order or order >= max(map(len, self.sets), default=0):
            return Marginals(self.sizes, self.sets)
        smaller = (itertools.combinations(features, min(order, len(features))) for features in self.sets)
        return Marginals(self.sizes, tuple(dict.fromkeys(itertools.chain.from_iterable(smaller))))


def slabs(sizes: tuple[int, ...], features: tuple[int, ...], limit: int) -> Iterator[GroupBy]:
    """Yields a marginal in slabs of at most `limit` cells, in order.

    The trailing features are whole as far as they fit; the one before them is cut, those before it fixed.
    """
    inner, axis = 1, len(features) - 1
    while axis > 0 and inner * sizes[features[axis]] <= limit:
        inner *= sizes[features[axis]]
        axis -= 1
    step, size = max(1, limit // inner), sizes[features[axis]]
    for prefix in itertools.product(*(range(sizes[feature]) for feature in features[:axis])):
        for start in range(0, size, step):
            yield GroupBy(sizes, features, start, min(start + step, size), prefix)


@dataclass(frozen=True, eq=False)
class Cells:
    """Single cells of marginals or thresholds: all, or the chosen positions in the concatenation of their blocks."""

    marginals: Marginals
    chosen: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.marginals.cells >= 1 << 63:
            raise WorkloadError(
                f"single queries ({Decimal(self.marginals.cells):.3g}) must be fewer than 2^63: take blocks"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        return self.marginals.sizes

    @property
    def blocks(self) -> int:
        """The number of queries."""
        return self.cells

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.marginals.cells if self.chosen is None else self.chosen.size

    @property
    def largest_block(self) -> int:
        """The number of cells of the largest block: one."""
        return 1

    def take(self, ids: ArrayLike) -> Cells:
        """Returns the cells named, in the order named."""
        wanted = np.asarray(ids, np.int64)
        return Cells(self.marginals, wanted if self.chosen is None else self.chosen[wanted])

    def by_cell(self) -> Cells:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields all cells slab by slab; or the chosen cells, at most `limit` at a time."""
        if self.chosen is None:
            first = 0
            for piece in self.marginals.pieces(limit):
                yield Piece(piece.tally, first, piece.tally.cells)
                first += piece.tally.cells
        else:
            for first in range(0, self.chosen.size, limit):
                tests = self.tests(self.chosen[first : first + limit])
                yield Piece(tests, first, tests.cells)

    def tests(self, positions: NDArray[np.int64]) -> Tests:
        """Returns the tally of cells by position."""
        stops = np.cumsum(self.marginals.block_cells)
        block = np.searchsorted(stops, positions, side="right")
        starts = stops - np.asarray(self.marginals.block_cells)
        return self.marginals.tests(block, positions - starts[block])

    def measured(self, order: int = 0) -> Cells:
        """Returns itself."""
        return self


def all_marginals(schema: Schema, k: int) -> Marginals:
    """Returns every k-way marginal of a schema's columns, but native ones, in lexicographic order."""
    check_count(check_order(schema, k), k)
    return Marginals(schema.sizes, tuple(itertools.combinations(schema.coded, k)))


def random_marginals(schema: Schema, k: int, *, count: int, seed: int) -> Marginals:
    """Returns `count` distinct k-way marginals drawn at random: the same for the same seed, everywhere.

    Draws `numpy.random.default_rng(seed).choice(all k-subsets in lexicographic order, count, replace=False)`, of the
    columns that are not native.
    """
    columns, subsets = schema.coded, check_order(schema, k)
    if count > subsets:
        raise WorkloadError(f"count ({count}) must be at most {subsets}, the number of {k}-way marginals")
    check_count(count, k)
    if subsets >= 1 << 63:
        raise WorkloadError(f"k ({k}) must be smaller: there are {Decimal(subsets):.3g} marginals to draw from")
    drawn = np.random.default_rng(seed).choice(subsets, count, replace=False)
    ranked = (subset(int(rank), len(columns), k) for rank in drawn)
    return Marginals(schema.sizes, tuple(tuple(columns[i] for i in places) for places in ranked))


def target_marginals(schema: Schema, k: int, target: int, *, count: int | None = None, seed: int = 0) -> Marginals:
    """Returns every k-way marginal that holds a column, or `count` of them drawn as by `random_marginals`."""
    check_order(schema, k)
    others = [column for column in schema.coded if column != target]
    check_count(math.comb(len(others), k - 1), k)
    sets = [tuple(sorted((*columns, target))) for columns in itertools.combinations(others, k - 1)]
    if count is not None:
        if not 1 <= count <= len(sets):
            raise WorkloadError(f"count ({count}) must be from 1 to {len(sets)}, the marginals with this column")
        sets = [sets[index] for index in np.random.default_rng(seed).choice(len(sets), count, replace=False)]
    return Marginals(schema.sizes, tuple(sets))


def check_order(schema: Schema, k: int) -> int:
    """Returns the number of k-way marginals; refuses an order that the schema does not have."""
    most = len(schema.coded)
    if not 1 <= k <= most:
        which = f" that are not native numbers: {NATIVE}" if schema.numbers else ""
        raise WorkloadError(f"k ({k}) must be from 1 to {most}, the number of columns{which}")
    return math.comb(most, k)


def check_count(count: int, k: int) -> None:
    """Refuses more marginals than can be listed."""
    if count > MOST_MARGINALS:
        raise WorkloadError(
            f"the workload has {Decimal(count):.3g} {k}-way marginals and must have at most {MOST_MARGINALS}: take a "
            "smaller k, or draw some with count"
        )


def subset(rank: int, columns: int, k: int) -> tuple[int, ...]:
    """Returns the k-subset of `range(columns)` that has this rank in lexicographic order."""
    chosen: list[int] = []
    candidate = 0
    while len(chosen) < k:
        below = math.comb(columns - candidate - 1, k - len(chosen) - 1)
        if rank < below:
            chosen.append(candidate)
        else:
            rank -= below
        candidate += 1
    return tuple(chosen)
