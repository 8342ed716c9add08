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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from anamorph.curator.bands import Bands
from anamorph.curator.tallies import WHOLE
from anamorph.errors import WorkloadError
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.piece import Piece

PIECE_CELLS = 1 << 22
"""How many answers are held at a time: 32 MiB of counts."""


class Queries(Protocol):
    """A query class: blocks of queries that compile to tallies."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        ...

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        ...

    @property
    def cells(self) -> int:
        """The number of queries, as a Python integer of any size."""
        ...

    @property
    def largest_block(self) -> int:
        """The number of queries of the largest block."""
        ...

    def take(self, ids: ArrayLike) -> Queries:
        """Returns the blocks named, in the order named."""
        ...

    def by_cell(self) -> Queries:
        """Returns the same queries, every one its own block."""
        ...

    def measured(self, order: int = 0) -> Queries:
        """Returns the queries to measure where whole blocks are: these, or others that tell of them.

        Of marginals and thresholds those are marginals, over at most `order` features if it is not 0.
        """
        ...

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields the queries in order, as tallies of at most `limit` numbers."""
        ...


@dataclass(frozen=True, eq=False)
class Workload:
    """Queries of one or more classes."""

    parts: tuple[Queries, ...]
    spec: str = ""
    """The text it was made from, for people."""
    weights: tuple[Fraction, ...] = ()
    """How much the queries of each part matter, relative to one another: none for equal weights."""
    limit: int = PIECE_CELLS
    """How many answers a piece holds."""

    def __post_init__(self) -> None:
        if not any(part.blocks for part in self.parts):
            raise WorkloadError("a workload must have at least one query")
        if self.weights and (len(self.weights) != len(self.parts) or not all(weight > 0 for weight in self.weights)):
            raise WorkloadError("weights must be numbers above 0, one for each part of the workload")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        return self.parts[0].sizes

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(part.blocks for part in self.parts)

    @property
    def cells(self) -> int:
        """The number of queries."""
        return sum(part.cells for part in self.parts)

    @property
    def largest_block(self) -> int:
        """The number of queries of the largest block."""
        return max(part.largest_block for part in self.parts)

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
        split = zip(np.split(wanted, cuts), np.split(owner, cuts), strict=True)
        runs = [(run, int(part[0])) for run, part in split if run.size]
        return Workload(
            tuple(self.parts[part].take(run - self.firsts[part]) for run, part in runs),
            weights=tuple(self.weights[part] for _, part in runs) if self.weights else (),
            limit=self.limit,
        )

    def by_cell(self) -> Workload:
        """Returns the same queries, every one its own block."""
        return replace(self, parts=tuple(part.by_cell() for part in self.parts))

    def measured(self, order: int = 0) -> Workload:
        """Returns the queries to measure where whole blocks are: marginals in place of thresholds, each once.

        A marginal, or a test of numbers, that several parts need has the largest of their weights.
        """
        weights = self.weights or (Fraction(1),) * len(self.parts)
        heaviest = sorted(range(len(self.parts)), key=lambda index: -weights[index])
        kept: list[tuple[Queries, Fraction]] = []
        seen: set[object] = set()
        for index in heaviest:
            part = self.parts[index].measured(order)
            if isinstance(part, Marginals | Tested | Banded):
                keys = keys_of(part)
                firsts = {key: i for i, key in reversed(list(enumerate(keys))) if key not in seen}
                part = part.take(sorted(firsts.values()))
                seen.update(firsts)
            if part.blocks:
                kept.append((part, weights[index]))
        parts, found = zip(*kept, strict=True)
        return replace(self, parts=parts, weights=found if self.weights else ())

    def pieces(self, limit: int | None = None) -> Iterator[Piece]:
        """Yields the whole workload in order, cut into tallies of at most `limit` numbers, or the workload's own."""
        for index, (part, first) in enumerate(zip(self.parts, self.firsts, strict=True)):
            weight = self.weights[index] if self.weights else Fraction(1)
            for piece in part.pieces(limit or self.limit):
                yield replace(piece, first=piece.first + first, weight=weight)

    @cached_property
    def digest(self) -> str:
        """A hash of the queries, their order and their weights."""
        state = hashlib.sha256()
        for piece in self.pieces(WHOLE):
            state.update(repr((piece.first, piece.blocks, str(piece.weight), type(piece.tally).__name__)).encode())
            for field, value in vars(piece.tally).items():
                plain = (
                    value.tobytes() if isinstance(value, np.ndarray) else repr(getattr(value, "digest", value)).encode()
                )
                state.update(field.encode() + plain)
        return state.hexdigest()


def keys_of(part: Queries) -> tuple[object, ...]:
    """Returns what tells each block of a part from all others; a marginal in which nothing is cut is a plain one.

    Of classes whose blocks are not compared there is nothing to tell.
    """
    if isinstance(part, Tested):
        return tuple(part.tally.identities())
    if isinstance(part, Banded):
        tallies = map(part.tally, range(part.blocks))
        return tuple(tally if isinstance(tally, Bands) else tally.features for tally in tallies)
    return part.sets if isinstance(part, Marginals) else ()
