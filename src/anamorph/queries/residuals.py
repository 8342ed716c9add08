"""Residuals of marginals as queries: block i is what the marginal over `sets[i]` says beyond its smaller ones.

They are measured, and never asked by users: see curator/residuals.py for what they are, and models/least_squares.py
for how answers are put together from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import is_set
from anamorph.errors import WorkloadError
from anamorph.queries.piece import Piece


@dataclass(frozen=True)
class Residuals:
    """Whole residuals."""

    sizes: tuple[int, ...]
    """The sizes of all columns of the schema."""
    sets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not all(is_set(features, self.sizes) for features in self.sets):
            raise WorkloadError("a residual must be over one or more distinct columns of the schema")

    @property
    def blocks(self) -> int:
        """The number of residuals."""
        return len(self.sets)

    @property
    def cells(self) -> int:
        """The number of queries."""
        return sum(Residual(self.sizes, features).cells for features in self.sets)

    @property
    def largest_block(self) -> int:
        """The number of queries of the largest residual."""
        return max((Residual(self.sizes, features).cells for features in self.sets), default=0)

    def take(self, ids: ArrayLike) -> Self:
        """Returns the residuals named, in the order named."""
        return type(self)(self.sizes, tuple(self.sets[i] for i in np.asarray(ids, np.int64).tolist()))

    def by_cell(self) -> Self:
        """Refuses: the numbers of a residual are measured together."""
        raise WorkloadError("residuals must be measured whole: take whole blocks")

    def measured(self, order: int = 0) -> Self:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields each residual whole, whatever the limit."""
        for block, features in enumerate(self.sets):
            yield Piece(Residual(self.sizes, features), block, 1)


def free(sizes: tuple[int, ...], features: Sequence[int]) -> tuple[int, ...]:
    """Returns the features of more than one value, sorted: of the others there are no residuals."""
    return tuple(sorted({feature for feature in features if 0 <= feature < len(sizes) and sizes[feature] > 1}))


def subsets(sizes: tuple[int, ...], features: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all non-empty sets of features, sorted, smaller ones first, without features of one value."""
    known = free(sizes, features)
    return [subset for order in range(1, len(known) + 1) for subset in itertools.combinations(known, order)]
