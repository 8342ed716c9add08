"""The query release game: what FEM, sepFEM, DualQuery and DQRS share.

Two players meet over rounds: one names queries that tell the private rows from public ones, the other answers with
rows that agree with the queries named (Hsu, Roth & Ullman 2013). The class of queries is closed under negation: a drawn
number 2 i is query i, 2 i + 1 its negation, as `Curator.draw` returns them. Rows are found by an oracle
(models/rows.py), to whom a query is a weighted sum of conjunctions: a cell of a marginal is one, an r-of-k
threshold the sum of those of `AtLeast.terms`, and a negation is a query with the other sign, up to a constant. Where
queries have weights, both players count a query by its weight relative to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.estimates import RowTable
from anamorph.curator.tallies import AtLeast, GroupBy, Tests, codes_of
from anamorph.errors import ParameterError, WorkloadError
from anamorph.models.conjunctions import Conjunctions
from anamorph.models.rows import best_rows, climbed
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.piece import Piece
from anamorph.queries.workload import WHOLE, Workload
from anamorph.table import Table

Integers = NDArray[np.int64]
Solver = Literal["local", "cp-sat", "highs"]

BASE_BYTES = 400 << 20
"""What a run takes before it holds anything: the interpreter, numpy, the engine."""

MOST_ROUNDS = 100_000
"""The most rounds of a run."""


@dataclass(frozen=True)
class Game:
    """The queries of a workload, one by one, and their negations."""

    workload: Workload
    """Of single queries."""

    @cached_property
    def _firsts(self) -> Integers:
        return np.array([piece.first for piece in self._pieces])

    @cached_property
    def _pieces(self) -> list[Piece]:
        return list(self.workload.pieces(WHOLE))

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The weight of each piece of the workload relative to the largest."""
        largest = max(piece.weight for piece in self._pieces)
        return tuple(float(piece.weight / largest) for piece in self._pieces)

    def anything(self, count: int, generator: np.random.Generator) -> Integers:
        """Returns numbers of queries and negations, each as likely as any other."""
        return generator.integers(0, 2 * self.workload.blocks, count)

    def conjunctions(self, drawn: Iterable[int]) -> Conjunctions:
        """Returns what rows should agree with: the sum of some queries and negations."""
        return self.agreed(Conjunctions.none(self.workload.sizes), drawn)

    def agreed(self, before: Conjunctions, drawn: Iterable[int]) -> Conjunctions:
        """Returns what rows should agree with, and with some more queries and negations."""
        features, codes, weights = [], [], []
        for number in drawn:
            sign = -1.0 if number & 1 else 1.0
            for columns, wanted, weight in self.terms(number >> 1):
                features.append(columns)
                codes.append(wanted)
                weights.append(sign * weight)
        return before.extended(features, codes, weights)

    def terms(self, query: int) -> Iterable[tuple[tuple[int, ...], Integers, float]]:
        """Yields the conjunctions that a query, times its share, is the sum of: columns, their codes, the weight."""
        place = int(np.searchsorted(self._firsts, query, side="right")) - 1
        piece, share = self._pieces[place], self.shares[place]
        features, cell, least = located(piece.tally, query - piece.first)
        codes = codes_of(self.workload.sizes, features, np.array([cell]))[0]
        whole = AtLeast(GroupBy(self.workload.sizes, features, 0, self.workload.sizes[features[0]]), least)
        for axes, weight in whole.terms():
            yield tuple(features[axis] for axis in axes), codes[list(axes)], share * weight


def located(tally: object, place: int) -> tuple[tuple[int, ...], int, int]:
    """Returns the features of a query of a tally, its cell, and how many features must agree."""
    if isinstance(tally, Tests):
        index = int(tally.which[place])
        return tally.sets[index], int(tally.positions[place]), tally.needed(index)
    if isinstance(tally, AtLeast):
        return tally.slab.features, tally.slab.offset + place, tally.least
    assert isinstance(tally, GroupBy)  # noqa: S101 - `checked` has let nothing else in
    return tally.features, tally.offset + place, len(tally.features)


def checked(workload: Workload) -> Workload:
    """Returns the single queries of a workload; refuses what an oracle does not know."""
    if not all(isinstance(part, Marginals | Cells) for part in workload.parts):
        raise WorkloadError("the workload must be of marginals and thresholds: take auto for functions or for numbers")
    return workload.by_cell()


def public(rows: NDArray[np.int32], sizes: tuple[int, ...]) -> RowTable:
    """Returns rows as what the curator compares with."""
    return RowTable(Table(rows, sizes), len(rows))


@dataclass(frozen=True, kw_only=True)
class Player:
    """How rows are found; the parameters that the mechanisms share."""

    solver: Solver = "local"
    """local is a search that is fast and nearly always right; cp-sat and highs prove that they are."""
    seconds: float = 10.0
    """The most that a solver takes for one row."""

    def __post_init__(self) -> None:
        if self.solver not in get_args(Solver):
            raise ParameterError(f"solver ({self.solver!r}) must be one of {', '.join(get_args(Solver))}")
        if not 0 < self.seconds < math.inf:
            raise ParameterError(f"seconds ({self.seconds!r}) must be a finite number above 0")

    def best(self, wanted: Conjunctions, linear: NDArray[np.float64], seed: int) -> NDArray[np.int32]:
        """Returns for each line of `linear` a row that agrees best."""
        if self.solver == "local":
            return climbed(wanted, linear, seed=seed).rows
        return best_rows(wanted, linear, solver=self.solver, seconds=self.seconds).rows
