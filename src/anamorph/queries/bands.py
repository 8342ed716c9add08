"""Marginals of bands: block i is the marginal over `sets[i]`, in which numbers are cut into bands.

A query asks how many rows have their numbers in given bands, and their other columns at given codes. Bands are parts of
the question, not of the data: numbers stay numbers, and another block may cut them elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from anamorph.curator.bands import MOST_CELLS, Bands, is_cut
from anamorph.curator.tallies import GroupBy
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.piece import Piece
from anamorph.schema import Schema

BANDS = 32
"""Into how many bands a number is cut unless told."""


@dataclass(frozen=True)
class Banded:
    """Whole marginals of bands."""

    sizes: tuple[int, ...]
    """The sizes of all columns of the schema."""
    sets: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, ...], ...]
    """For each column of the schema the codes at which a new band begins; none: every code is one."""

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.sizes) or not all(map(is_cut, self.cuts, self.sizes)):
            raise WorkloadError(
                "cuts must be ascending codes, above 0 and below the size, for each column of the schema"
            )
        if self.largest_block > MOST_CELLS:
            raise WorkloadError(
                f"a marginal of bands ({self.largest_block} cells) must have at most {MOST_CELLS}: cut into fewer"
            )

    @cached_property
    def merged(self) -> Marginals:
        """The same marginals, of columns whose codes are the bands."""
        return Marginals(merged_sizes(self.sizes, self.cuts), self.sets)

    @property
    def blocks(self) -> int:
        """The number of marginals."""
        return self.merged.blocks

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.merged.cells

    @property
    def largest_block(self) -> int:
        """The number of queries of the largest marginal."""
        return self.merged.largest_block

    def take(self, ids: ArrayLike) -> Banded:
        """Returns the marginals named, in the order named."""
        return replace(self, sets=tuple(self.sets[i] for i in np.asarray(ids, np.int64).tolist()))

    def by_cell(self) -> Banded:
        """Refuses: the cells of a marginal of bands are counted together."""
        raise WorkloadError("marginals of bands must be taken in whole blocks, not as single queries")

    def measured(self, order: int = 0) -> Banded:
        """Returns itself."""
        return self

    def tally(self, block: int) -> Bands | GroupBy:
        """Returns how one marginal is counted: one in which nothing is cut, as any other."""
        features = self.sets[block]
        cuts = tuple(self.cuts[feature] for feature in features)
        return (
            Bands(self.sizes, features, cuts)
            if any(cuts)
            else GroupBy(self.sizes, features, 0, self.sizes[features[0]])
        )

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields each marginal whole, whatever the limit."""
        for block in range(self.blocks):
            yield Piece(self.tally(block), block, 1)


def merged_sizes(sizes: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Returns how many bands each column has."""
    return tuple(len(each) + 1 if each else size for size, each in zip(sizes, cuts, strict=True))


def equal_cuts(schema: Schema, bands: int = BANDS) -> tuple[tuple[int, ...], ...]:
    """Returns the cuts of native numbers into bands of equal width; `missing` has one of its own.

    A number with no more codes than bands has one for each code.
    """
    if bands < 2:  # no cuts would mean that every code is a band
        raise WorkloadError(f"bands ({bands}) must be at least 2: take marginals to leave numbers out")
    cuts: list[tuple[int, ...]] = [() for _ in schema.sizes]
    for number in schema.numbers:
        limit, size = schema.columns[number].regular, schema.sizes[number]
        inner = {-(-index * limit // bands) for index in range(1, bands)} if limit > bands else set(range(1, limit))
        cuts[number] = tuple(sorted(inner | ({limit} if size > limit else set())))
    return tuple(cuts)
