"""Public tables that a curator compares counts with at any cell, without listing all cells.

Selection needs four things of the private rows and of the public estimate alike: one-way answers, the cells that more
than a share of the rows fall in, answers at given cells, and answers over a coarsened domain. `Support` gives them for
rows that are listed as the non-empty cells of a marginal, `RelaxedTable` for relaxed rows.

The answer at a cell is a function of the table and of that cell alone, bit by bit: it is computed by operations on one
line of numbers of fixed length, whatever other cells are asked with it. So which cells a curator asks may depend on
private rows, and the estimate of a cell still does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.rowwise import Rowwise
from anamorph.curator.tallies import Counts, agreeing, look_up
from anamorph.errors import ParameterError

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]

ENTRIES = 1 << 20
"""How many products of relaxed rows are formed at a time."""

SAFETY = 1e-9
"""A bound on the difference of answers to one query that are computed in two ways, as a fraction of the rows: both are
sums of at most a million products of positive numbers, in double precision."""


@dataclass(frozen=True, eq=False)
class Merge:
    """A feature with merged codes: coarse code j stands for the codes members[starts[j] : starts[j + 1]]."""

    members: Integers
    starts: Integers

    @property
    def size(self) -> int:
        """The number of coarse codes."""
        return self.starts.size

    @cached_property
    def coarse(self) -> Integers:
        """The coarse code of each code."""
        codes = np.empty(self.members.size, np.int64)
        codes[self.members] = np.searchsorted(self.starts, np.arange(self.members.size), side="right") - 1
        return codes


class Side(Protocol):
    """One side of a comparison, the rows or the estimate, seen through the marginal over some features."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of codes of each feature."""
        ...

    @property
    def total(self) -> float:
        """What all cells sum to."""
        ...

    def singles(self) -> list[Reals]:
        """Returns the one-way answers of each feature."""
        ...

    def above(self, bound: float) -> Integers:
        """Returns all cells whose number exceeds a bound, and perhaps some others, in order."""
        ...

    def fractions(self, cells: Integers, least: int) -> Reals:
        """Returns the fraction of the rows that agree with each cell in at least `least` features."""
        ...

    def merged(self, merges: Sequence[Merge]) -> Side:
        """Returns the same rows over a coarser domain: a merge for each feature."""
        ...

    def dense(self, axes: Sequence[int], first: slice) -> Reals:
        """Returns the marginal over the features at `axes`; of feature 0, if it is one, the codes of a slice only."""
        ...


@dataclass(frozen=True, eq=False)
class Support:
    """Rows as the non-empty cells of one marginal, with a number for each."""

    shape: tuple[int, ...]
    cells: Integers
    """Positions, ascending."""
    counts: Integers
    rows: int = 1
    """How many rows there are."""
    total: float = 1.0
    """How many they stand for: a row counts total / rows."""

    @property
    def scale(self) -> float:
        """What a row counts."""
        return self.total / max(self.rows, 1)

    @cached_property
    def codes(self) -> Integers:
        """The codes of the cells: cells by features."""
        return np.stack(np.unravel_index(self.cells, self.shape), axis=1)

    def singles(self) -> list[Reals]:
        """Returns the one-way answers of each feature."""
        weights = self.counts * self.scale
        axes = zip(self.codes.T, self.shape, strict=True)
        return [np.bincount(codes, weights, size).astype(np.float64) for codes, size in axes]

    def above(self, bound: float) -> Integers:
        """Returns the cells whose number exceeds a bound."""
        return self.cells[self.counts * self.scale > bound]

    def merged(self, merges: Sequence[Merge]) -> Support:
        """Returns the same rows over a coarser domain."""
        shape = tuple(merge.size for merge in merges)
        codes = tuple(merge.coarse[code] for merge, code in zip(merges, self.codes.T, strict=True))
        cells, place = np.unique(np.ravel_multi_index(codes, shape), return_inverse=True)
        counts = np.bincount(place, self.counts, cells.size).astype(np.int64)
        return replace(self, shape=shape, cells=cells, counts=counts)

    def dense(self, axes: Sequence[int], first: slice) -> Reals:
        """Returns the marginal over the features at `axes`; of feature 0 the codes of a slice."""
        codes, counts, wanted = self.codes, self.counts, [self.shape[axis] for axis in axes]
        if axes[0] == 0:
            inside = (codes[:, 0] >= first.start) & (codes[:, 0] < first.stop)
            codes, counts, wanted[0] = codes[inside], counts[inside], first.stop - first.start
            codes[:, 0] -= first.start
        position = np.zeros(counts.size, np.int64)
        for axis, size in zip(axes, wanted, strict=True):
            position = position * size + codes[:, axis]
        numbers = np.bincount(position, counts * self.scale, math.prod(wanted))
        return numbers.astype(np.float64).reshape(wanted)

    def fractions(self, cells: Integers, least: int) -> Reals:
        """Returns the fraction of the rows that agree with each cell in at least `least` features."""
        return self.at(cells, least) / max(self.rows, 1)

    def at(self, cells: Integers, least: int) -> Integers:
        """Returns how many rows agree with each cell in at least `least` features."""
        if least == len(self.shape):
            return look_up(self.cells, self.counts, cells)
        wanted = np.stack(np.unravel_index(cells, self.shape), axis=1)
        return agreeing(self.codes, self.counts, wanted, least)


@dataclass(frozen=True, eq=False)
class RowTable:
    """A public estimate: rows that are counted where they are, such as synthetic ones."""

    source: Counts
    rows: int

    def side(self, sizes: tuple[int, ...], features: tuple[int, ...], total: float) -> Support:
        """Returns the table seen through one marginal, as if it had `total` rows."""
        shape = tuple(sizes[feature] for feature in features)
        cells, counts = next(iter(self.source.counts((features,))))
        return Support(shape, cells, counts, self.rows, total)


@dataclass(frozen=True, eq=False)
class RelaxedTable:
    """A public estimate: relaxed rows, each feature of each a probability vector."""

    sizes: tuple[int, ...]
    lines: NDArray[np.float32]
    """A line for each code of each feature, a column for each row."""
    weights: NDArray[np.float32]
    """The weight of each row; they sum to 1."""
    functions: Mapping[Rowwise, Reals] = field(default_factory=dict)
    """The answers of user-written functions, which the owner of the table has computed."""

    def __post_init__(self) -> None:
        for name in ("lines", "weights"):  # no bound on a query's answer holds for other numbers: see candidates.py
            numbers = np.clip(np.array(getattr(self, name), np.float32), 0, 1)
            if not np.all(np.isfinite(numbers)):
                raise ParameterError("estimate must be finite numbers")
            object.__setattr__(self, name, numbers)
        if self.lines.shape != (sum(self.sizes), self.weights.size) or self.weights.ndim != 1:
            raise ParameterError("estimate must have a line for each code, and in it a number for each row")
        answers = {function: np.array(found, np.float64) for function, found in self.functions.items()}
        object.__setattr__(self, "functions", answers)

    @cached_property
    def blocks(self) -> list[NDArray[np.float32]]:
        """The lines of each feature."""
        return np.split(self.lines, np.cumsum(self.sizes)[:-1])

    def side(self, sizes: tuple[int, ...], features: tuple[int, ...], total: float) -> RelaxedSide:
        """Returns the table seen through one marginal, as if it had `total` rows."""
        return RelaxedSide([self.blocks[feature] for feature in features], self.weights, total)


Estimate = RowTable | RelaxedTable


def tail(chances: Sequence[Reals], least: int) -> Reals:
    """Returns the probability that at least `least` of independent events occur.

    A[j] after i events is p A[j - 1] + (1 - p) A[j], with A[0] = 1: the tail of a Poisson-binomial, in k r steps.
    """
    order = len(chances)
    beyond: dict[int, Reals] = {}
    for i, chance in enumerate(chances, start=1):
        for j in range(min(i, least), max(1, least - order + i) - 1, -1):
            reached = chance if j == 1 else chance * beyond[j - 1]
            beyond[j] = reached + (1 - chance) * beyond[j] if j in beyond else reached
    return beyond[least]


@dataclass(frozen=True, eq=False)
class RelaxedSide:
    """A relaxed table seen through the marginal over some features."""

    blocks: Sequence[NDArray[np.floating]]
    """The lines of each feature: codes by rows."""
    weights: NDArray[np.float32]
    total: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of codes of each feature."""
        return tuple(map(len, self.blocks))

    def singles(self) -> list[Reals]:
        """Returns the one-way answers of each feature."""
        weights = self.weights.astype(np.float64)
        return [block @ weights * self.total for block in self.blocks]

    def above(self, bound: float) -> Integers:
        """Returns all cells whose number exceeds a bound, and perhaps some others.

        Feature by feature: a combination that exceeds the bound has a prefix that does, so only those are extended; at
        most total / bound of them exceed it at each step. Sums of n' products of positive numbers in single precision
        have a relative error below (n' + k) 2^-23.
        """
        share = bound / self.total * (1 - (self.weights.size + 16) * 2.0**-22)
        cells, prefixes = np.zeros(1, np.int64), self.weights[None]
        for block in self.blocks:
            found = prefixes @ block.T
            prefix, code = np.nonzero(found > share)
            cells = cells[prefix] * block.shape[0] + code
            prefixes = prefixes[prefix] * block[code]
        return cells

    def merged(self, merges: Sequence[Merge]) -> RelaxedSide:
        """Returns the same rows over a coarser domain."""
        pairs = zip(merges, self.blocks, strict=True)
        blocks = [np.add.reduceat(block[merge.members], merge.starts, 0, np.float64) for merge, block in pairs]
        return replace(self, blocks=blocks)

    def fractions(self, cells: Integers, least: int) -> Reals:
        """Returns the relaxed answer of each cell: the weighted mean of the chance that `least` features agree."""
        codes = np.stack(np.unravel_index(cells, self.shape), axis=1)
        answers = np.empty(cells.size)
        step = max(1, ENTRIES // self.weights.size)
        for first in range(0, cells.size, step):
            part = codes[first : first + step].T
            chances = [block[code].astype(np.float64) for block, code in zip(self.blocks, part, strict=True)]
            answers[first : first + step] = (tail(chances, least) * self.weights).sum(axis=1)
        return answers

    def dense(self, axes: Sequence[int], first: slice) -> Reals:
        """Returns the marginal over the features at `axes`; of feature 0 the codes of a slice. One matrix product."""
        blocks = [self.blocks[axis][first] if axis == 0 else self.blocks[axis] for axis in axes]
        shape = [len(block) for block in blocks]
        cut = min(range(len(shape)), key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]))
        left = reduce(products, blocks[:cut], self.weights[None].astype(np.float64))
        right = reduce(products, blocks[cut + 1 :], blocks[cut])
        return (left @ right.T).reshape(shape) * self.total


def products(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.floating]:
    """Returns the products of every line of one block with every line of another, in C order."""
    return (left[:, None] * right[None]).reshape(-1, left.shape[1])
