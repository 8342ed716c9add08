"""Workload: a public description of queries, in blocks.

A block is the unit of selection and of measurement: a whole marginal, or a single cell. A workload is a sequence of
parts, each of one query class; block ids run through the parts in order. A subset of a workload is a workload, and
ids are always ids into the workload they are used with.

Answers are streamed: `pieces(limit)` cuts the workload into tallies of about `limit` numbers, in order, the same cut
for whoever counts and whoever estimates.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.errors import WorkloadError
from anamorph.queries.piece import Piece

PIECE_CELLS = 1 << 22
"""How many answers are held at a time: 32 MiB of counts."""


class Queries(Protocol):
    """A query class: blocks of queries that compile to tallies."""

    @property
    def blocks(self) -> int: ...
    @property
    def cells(self) -> int: ...
    @property
    def block_cells(self) -> Sequence[int] | NDArray[np.int64]: ...
    def take(self, ids: ArrayLike) -> Queries: ...
    def by_cell(self) -> Queries: ...
    def pieces(self, limit: int) -> Iterator[Piece]: ...


@dataclass(frozen=True, eq=False)
class Workload:
    """Queries of one or more classes."""

    parts: tuple[Queries, ...]
    spec: str = ""
    """The text it was made from, for people."""

    def __post_init__(self) -> None:
        if not any(part.blocks for part in self.parts):
            raise WorkloadError("a workload must have at least one query")

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(part.blocks for part in self.parts)

    @property
    def cells(self) -> int:
        """The number of queries."""
        return sum(part.cells for part in self.parts)

    @property
    def block_cells(self) -> NDArray[np.int64]:
        """The number of queries of each block."""
        return np.concatenate([np.asarray(part.block_cells, np.int64) for part in self.parts])

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The id of the first block of each part."""
        return tuple(itertools.accumulate((part.blocks for part in self.parts[:-1]), initial=0))

    def take(self, ids: ArrayLike) -> Workload:
        """Returns the blocks named, in the order named."""
        wanted = np.asarray(ids, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.blocks):
            raise WorkloadError(f"ids must be from 0 to {self.blocks - 1}: they are ids into this workload")
        owner = np.searchsorted(self.firsts, wanted, side="right") - 1
        cuts = np.flatnonzero(np.diff(owner)) + 1
        runs = zip(np.split(wanted, cuts), np.split(owner, cuts), strict=True)
        return Workload(tuple(self.parts[part[0]].take(run - self.firsts[part[0]]) for run, part in runs if run.size))

    def by_cell(self) -> Workload:
        """Returns the same queries, every one its own block."""
        return replace(self, parts=tuple(part.by_cell() for part in self.parts))

    def pieces(self, limit: int = PIECE_CELLS) -> Iterator[Piece]:
        """Yields the whole workload in order, cut into tallies of about `limit` numbers."""
        for part, first in zip(self.parts, self.firsts, strict=True):
            for piece in part.pieces(limit):
                yield replace(piece, first=piece.first + first)

    @cached_property
    def digest(self) -> str:
        """A hash of the queries and their order."""
        state = hashlib.sha256()
        for piece in self.pieces():
            state.update(repr((piece.first, piece.blocks)).encode())
            for field, value in vars(piece.tally).items():
                plain = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
                state.update(field.encode() + plain)
        return state.hexdigest()
