"""Candidates of a selection among single queries, as strata for a lottery: none is listed that need not be.

A stratum is a set of queries whose scores have a common bound. For a marginal, |count - estimate| <= max(count,
estimate). At most n / tau cells have a count above tau, at most n / tau an estimate above tau; those are listed, each
with its score, and all others share the bound tau, which is what the noise of the selection stands for. (As tau nears 0
the others are the cells that are empty in both tables.) Thresholds have coarse blocks (coarse.py).

A prior gives a query w = (1 - p) + p * (mean cells of a block) * prod_i q_i tickets, up to rounding, where q_i are
public one-way answers in units of 2^-b: whole numbers, so that both kinds of tickets are drawn exactly.

Which cells are listed depends on private rows, but the distribution of what is selected does not: every ticket is
accepted or not by its own exact score (lottery.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.estimates import SAFETY, Integers, Reals, Side
from anamorph.curator.lottery import level
from anamorph.curator.scores import GRID
from anamorph.errors import ParameterError

TICKETS = 60
"""The binary digits of the tickets of one block."""

LARGEST_SHARE = 0.999
"""The largest share of the popular in a prior: beyond, the few tickets of the others would be waited for too long."""

Scored = Callable[[Integers], Integers]
"""Returns the exact scores of cells of a block."""


@dataclass(frozen=True, eq=False)
class Prior:
    """Public weights of the queries of marginals and thresholds: a mixture of equal ones and of popular cells."""

    share: float
    """p, the share of the popular."""
    popular: Reals
    """The public one-way answers: a number for each code of each feature."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "popular", np.array(self.popular, np.float64))  # a copy: nobody changes it later
        if not 0 <= self.share <= LARGEST_SHARE:
            raise ParameterError(f"share ({self.share!r}) must be from 0 to {LARGEST_SHARE}")
        if not np.all((self.popular >= 0) & (self.popular <= 1)):
            raise ParameterError("popular must be numbers from 0 to 1")

    def check(self, sizes: tuple[int, ...]) -> None:
        """Refuses what is not one-way answers of these columns: their products would not fit in 64 bits."""
        fits = self.popular.shape == (sum(sizes),)
        if not fits or np.any(np.add.reduceat(self.popular, np.cumsum((0, *sizes[:-1]))) > 1 + 1e-3):
            raise ParameterError("popular must be a number for each code of each column, and sum to 1 for each column")

    def tickets(self, sizes: tuple[int, ...], features: tuple[int, ...], mean: int) -> Tickets:
        """Returns the tickets of one block; `mean` is the mean number of cells of the blocks."""
        digits = TICKETS // len(features)
        offsets = np.cumsum((0, *sizes))
        lines = [np.floor(self.popular[offsets[f] : offsets[f + 1]] * 2.0**digits).astype(np.int64) for f in features]
        whole = 1 << 30
        popular = min(round(self.share * whole), whole - 1)  # every query keeps a ticket
        return Tickets(whole - popular << TICKETS, popular * mean << (TICKETS - digits * len(features)), lines)


@dataclass(frozen=True, eq=False)
class Tickets:
    """How many tickets the cells of a block hold: `equal` each, and `popular` times the product of its codes' lines."""

    equal: int = 1
    popular: int = 0
    lines: Sequence[Integers] = ()

    @property
    def kinds(self) -> tuple[int, ...]:
        """The multiplicities of the kinds in use."""
        return (self.equal, self.popular) if self.popular else (self.equal,)

    def products(self, codes: Integers) -> Integers:
        """Returns the product of the lines at the codes of each cell: cells by features."""
        found = np.ones(codes.shape[0], np.int64)
        for axis, line in enumerate(self.lines):
            found *= line[codes[:, axis]]
        return found


@dataclass(frozen=True, eq=False)
class Given:
    """What the strata of a block are formed from."""

    data: Side
    estimate: Side
    unit: float
    """The score of an error of one row."""
    scale: float
    """The scale of the noise of the selection."""
    tickets: Tickets
    excluded: Integers
    """Cells that are not valid: they should hold few tickets."""
    fineness: int = 1
    """How much tighter than usual the bounds should be."""

    @property
    def tau(self) -> float:
        """As many rows as the noise stands for."""
        return self.scale / self.unit

    @property
    def margin(self) -> float:
        """By how many rows a bound is raised: for the rounding of answers, and of estimates to the grid of scores."""
        return 2.0**-GRID + SAFETY * self.estimate.total


class Ballot(Protocol):
    """The strata of one block."""

    @property
    def levels(self) -> Sequence[int]:
        """The level of each stratum."""
        ...

    @property
    def weights(self) -> Sequence[int]:
        """The tickets of each stratum."""
        ...

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        ...

    def find(self, stratum: int, ranks: Sequence[int]) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns the cells that hold tickets of a stratum, by rank, and which of them are valid."""
        ...


@dataclass(frozen=True, eq=False)
class ListedCells:
    """Cells that are listed, in strata by the level of their scores."""

    cells: Integers
    """Positions, ascending by level."""
    starts: Integers
    """Where each level begins."""
    levels: Sequence[int]
    weights: Sequence[int]
    products: Integers | None
    kinds: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return 4 * self.cells.nbytes

    def find(self, stratum: int, ranks: Sequence[int]) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns the cells that hold the tickets."""
        place, kind = divmod(stratum, len(self.kinds))
        start, stop = self.starts[place], self.starts[place + 1]
        units = np.array([rank // self.kinds[kind] for rank in ranks], np.int64)
        if kind:
            assert self.products is not None  # noqa: S101 - popular tickets come with products
            units = np.searchsorted(np.cumsum(self.products[start:stop]), units, side="right")
        return self.cells[start + units], np.ones(len(ranks), np.bool_)


def listed(
    cells: Integers, scores: Integers, scale: float, tickets: Tickets | None = None, codes: Integers | None = None
) -> ListedCells:
    """Returns the strata of listed cells; `codes` are needed where popular cells hold more tickets."""
    tickets = tickets or Tickets()
    levels = level(scores, scale)
    order = np.argsort(levels, kind="stable")
    found, starts = np.unique(levels[order], return_index=True)
    products = None if codes is None or len(tickets.kinds) == 1 else tickets.products(codes[order])
    sizes = np.diff(starts, append=cells.size).tolist()
    heights = np.repeat(found, len(tickets.kinds)).tolist()
    weights = [size * tickets.equal for size in sizes]
    if products is not None:
        popular = np.add.reduceat(products, starts).tolist() if cells.size else []
        weights = [
            weight for pair in zip(weights, (tickets.popular * p for p in popular), strict=True) for weight in pair
        ]
    return ListedCells(cells[order], np.append(starts, cells.size), heights, weights, products, tickets.kinds)


@dataclass(frozen=True, eq=False)
class MarginalCells:
    """The cells of a marginal: those above tau are listed, the others are two strata at most."""

    shape: tuple[int, ...]
    above: ListedCells
    bound: int
    """The level of the cells that are not listed."""
    tickets: Tickets

    @cached_property
    def known(self) -> Integers:
        """The listed cells, ascending."""
        return np.sort(self.above.cells)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return self.above.nbytes

    @property
    def levels(self) -> Sequence[int]:
        """The level of each stratum: first those of all cells, listed ones being invalid there."""
        return [*(self.bound for _ in self.tickets.kinds), *self.above.levels]

    @property
    def weights(self) -> Sequence[int]:
        """The tickets of each stratum."""
        whole = [self.tickets.equal * math.prod(self.shape)]
        if self.tickets.popular:
            whole.append(self.tickets.popular * math.prod(int(line.sum()) for line in self.tickets.lines))
        return [*whole, *self.above.weights]

    def find(self, stratum: int, ranks: Sequence[int]) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns the cells that hold the tickets."""
        kinds = self.tickets.kinds
        if stratum >= len(kinds):
            return self.above.find(stratum - len(kinds), ranks)
        units = np.array([rank // kinds[stratum] for rank in ranks], np.int64)
        if stratum:
            codes = digits(units, [np.cumsum(line) for line in self.tickets.lines])
            units = np.ravel_multi_index(tuple(codes), self.shape)
        place = np.minimum(np.searchsorted(self.known, units), max(self.known.size - 1, 0))
        return units, self.known[place] != units if self.known.size else np.ones(units.size, np.bool_)


def digits(numbers: Integers, marks: Sequence[Integers]) -> list[Integers]:
    """Returns the digits of numbers in mixed radix, each as the interval of its axis' marks that it falls in."""
    codes = []
    for mark in reversed(marks):
        numbers, digit = np.divmod(numbers, mark[-1])
        codes.append(np.searchsorted(mark, digit, side="right"))
    return codes[::-1]


def marginal_strata(given: Given, score: Scored) -> MarginalCells:
    """Returns the strata of a marginal: tau is the scale of the noise, in rows."""
    shape = given.data.shape
    cells = np.setdiff1d(np.union1d(given.data.above(given.tau), given.estimate.above(given.tau)), given.excluded)
    codes = np.stack(np.unravel_index(cells, shape), axis=1)
    bound = math.ceil(min((given.tau + given.margin) * given.unit, 2.0**61))
    above = listed(cells, score(cells), given.scale, given.tickets, codes)
    return MarginalCells(shape, above, int(level(np.array([bound]), given.scale)[0]), given.tickets)
