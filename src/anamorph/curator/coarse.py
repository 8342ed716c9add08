"""Coarse blocks: the strata of r-of-k thresholds.

Call a code heavy if more than some number of rows have it, in either table. Light codes are put into classes of similar
numbers. A query agrees with a row in a light code for as many rows as have it; so its answer is that of its heavy codes
alone, where a light one counts as never in agreement, to within the number of rows of each light one. So

    |error of a query| <= |error of its heavy codes alone| + sum over its light codes of the most rows in their class,

for every r, since more agreement never makes "at least r agree" false. Queries with the same heavy codes and the same
classes of light ones share the bound: a coarse cell. There are few, and the number of queries in each is a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.candidates import Given, Tickets
from anamorph.curator.estimates import Integers, Merge, Reals, Side
from anamorph.curator.lottery import level
from anamorph.curator.tallies import AtLeast, GroupBy

COARSE_CELLS = 1 << 17
"""How many cells a coarse block may have where a larger one would hardly spare proposals."""

CHUNK = 1 << 22
"""How many cells of a coarse block are formed at a time."""

LOOSEST = 4
"""How many times the noise of the selection a light code may stand for."""

CLASSES = 6
"""Classes of light codes, each with at most half as many rows as the one before; the last holds all with fewer."""


@dataclass(frozen=True, eq=False)
class Axis(Merge):
    """A feature of a coarse block: heavy codes one by one, then classes of light ones."""

    heavy: int
    """How many coarse codes are heavy."""
    slack: Reals
    """For each coarse code, the most rows that one of its codes has; 0 for a heavy one."""


@dataclass(frozen=True, eq=False)
class CoarseBlock:
    """The thresholds of a block, those of one coarse cell in one stratum with others of its level."""

    axes: Sequence[Axis]
    cell_levels: Integers
    """The level of each coarse cell, in C order."""
    sizes: tuple[int, ...]
    """The number of codes of each feature."""
    tickets: Tickets

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of coarse codes of each feature."""
        return tuple(axis.size for axis in self.axes)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return self.cell_levels.nbytes

    @cached_property
    def marks(self) -> tuple[tuple[Integers, ...], ...]:
        """For each kind and feature, the tickets of all codes before each, in coarse order; then of all."""
        equal = [np.ones(axis.members.size, np.int64) for axis in self.axes]
        popular = [line[axis.members] for line, axis in zip(self.tickets.lines, self.axes, strict=False)]
        kinds = (equal, popular) if self.tickets.popular else (equal,)
        return tuple(tuple(np.append(0, np.cumsum(line)) for line in kind) for kind in kinds)

    def held(self, kind: int) -> list[Integers]:
        """Returns the tickets of each coarse code of each feature."""
        pairs = zip(self.marks[kind], self.axes, strict=True)
        return [np.diff(mark[np.append(axis.starts, axis.members.size)]) for mark, axis in pairs]

    @cached_property
    def strata(self) -> list[tuple[int, int, int]]:
        """(level, kind, tickets) of each stratum."""
        found, place = np.unique(self.cell_levels, return_inverse=True)
        strata = []
        for kind, multiplicity in enumerate(self.tickets.kinds):
            sums = np.zeros(found.size, np.int64)
            np.add.at(sums, place, outer(self.held(kind)))
            strata += [(int(high), kind, int(number) * multiplicity) for high, number in zip(found, sums, strict=True)]
        return strata

    @property
    def levels(self) -> Sequence[int]:
        """The level of each stratum."""
        return [high for high, _, _ in self.strata]

    @property
    def weights(self) -> Sequence[int]:
        """The tickets of each stratum."""
        return [number for _, _, number in self.strata]

    def find(self, stratum: int, ranks: Sequence[int]) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns the queries that hold the tickets: a coarse cell by its tickets, then a code for each feature."""
        high, kind, _ = self.strata[stratum]
        units = np.array([rank // self.tickets.kinds[kind] for rank in ranks], np.int64)
        codes = np.unravel_index(np.flatnonzero(self.cell_levels == high), self.shape)
        held = self.held(kind)
        stops = np.cumsum(math.prod(table[code] for table, code in zip(held, codes, strict=True)))
        place = np.searchsorted(stops, units, side="right")
        units = units - np.append(0, stops)[place]
        position, stride = np.zeros(units.size, np.int64), 1
        for axis, mark, table, code, size in reversed(
            list(zip(self.axes, self.marks[kind], held, codes, self.sizes, strict=True))
        ):
            units, digit = np.divmod(units, table[code[place]])
            inside = mark[axis.starts[code[place]]] + digit
            position += stride * axis.members[np.searchsorted(mark, inside, side="right") - 1]
            stride *= size
        return position, np.ones(units.size, np.bool_)

    def dismiss(self, excluded: Integers) -> None:
        """Lowers the level of coarse cells of which all queries are excluded."""
        fine = np.unravel_index(excluded, self.sizes)
        codes = [axis.coarse[code] for axis, code in zip(self.axes, fine, strict=True)]
        cells, times = np.unique(np.ravel_multi_index(codes, self.shape), return_counts=True)
        held = [table[code] for table, code in zip(self.held(0), np.unravel_index(cells, self.shape), strict=True)]
        self.cell_levels[cells[times == math.prod(held)]] = self.cell_levels.min()


def outer(tables: Sequence[Integers]) -> Integers:
    """Returns the products of one number of each table, in C order."""
    found = np.ones(1, np.int64)
    for table in tables:
        found = np.multiply.outer(found, table).ravel()
    return found


def threshold_strata(given: Given, least: int) -> CoarseBlock:
    """Returns the strata of a block of thresholds."""
    sides = given.data, given.estimate
    axes = coarse_axes(most_common(sides), given.tau / given.fineness)
    added = sum(abs(coefficient) for _, coefficient in whole_block(given.data.shape, least).terms())
    margin = given.margin * (1 + added / 16)  # as many marginals are added up, each rounded
    levels = [
        level(np.minimum(np.ceil((bound + margin) * given.unit), 2.0**61).astype(np.int64).ravel(), given.scale)
        for bound, _ in coarse_bounds(sides, least, axes)
    ]
    block = CoarseBlock(axes, np.concatenate(levels), given.data.shape, given.tickets)
    block.dismiss(given.excluded)
    return block


def most_common(sides: Sequence[Side]) -> list[Reals]:
    """Returns, for each code of each feature, how many rows have it, in the table where more have."""
    return [np.maximum(ours, theirs) for ours, theirs in zip(*(side.singles() for side in sides), strict=True)]


def coarse_axes(common: Sequence[Reals], tau: float) -> list[Axis]:
    """Returns the features of a coarse block: the more codes are heavy, the tighter its bounds and the larger it is.

    The bounds should be loose by about tau, which is what the noise of the selection stands for; where that makes a
    block large, by some more: more proposals are cheaper then.
    """
    bound = tau / 2
    while True:
        axes = [coarse_axis(numbers, bound) for numbers in common]
        if math.prod(axis.size for axis in axes) <= COARSE_CELLS or bound >= LOOSEST * tau:
            return axes
        bound *= 1.25


def coarse_axis(numbers: Reals, bound: float) -> Axis:
    """Returns a feature whose heavy codes are those that more than `bound` rows have."""
    members = np.argsort(-numbers, kind="stable")
    ordered = numbers[members]
    heavy = int(np.searchsorted(-ordered, -bound))
    edges = np.searchsorted(-ordered, -bound * 0.5 ** np.arange(1, CLASSES))
    starts = np.unique(np.concatenate([np.arange(heavy), [heavy], edges]))
    starts = starts[starts < members.size]
    slack = np.where(np.arange(starts.size) < heavy, 0.0, ordered[starts])
    return Axis(members, starts, heavy, slack)


def coarse_bounds(sides: Sequence[Side], least: int, axes: Sequence[Axis]) -> Iterator[tuple[Reals, NDArray[np.bool_]]]:
    """Yields a bound on the errors of each coarse cell, and where it is exact, in chunks of the first feature's codes.

    The error of the heavy codes alone is the sum of differences of broadcast sub-marginals, with 0 at light codes.
    """
    shape, order = tuple(axis.size for axis in axes), len(axes)
    merged = [side.merged(axes) for side in sides]
    whole = whole_block(shape, least)
    step = max(1, CHUNK // math.prod(shape[1:]))
    for start in range(0, shape[0], step):
        first = slice(start, min(start + step, shape[0]))
        spans = [first, *(slice(0, size) for size in shape[1:])]
        total = np.zeros((first.stop - start, *shape[1:]))
        for used, coefficient in whole.terms():
            others = tuple(set(range(order)) - set(used))
            part = difference(merged, used, first)  # not a sum of the whole's: probabilities sum to 1 only nearly
            for place, axis in enumerate(used):
                np.moveaxis(part, place, 0)[max(0, axes[axis].heavy - spans[axis].start) :] = 0
            total += coefficient * np.expand_dims(part, others)
        np.abs(total, out=total)
        loose = np.zeros(total.shape)
        for place, (axis, span) in enumerate(zip(axes, spans, strict=True)):
            loose += np.expand_dims(axis.slack[span], tuple(set(range(order)) - {place}))
        yield total + loose, loose == 0


def whole_block(shape: tuple[int, ...], least: int) -> AtLeast:
    """Returns the thresholds over features with so many codes each."""
    return AtLeast(GroupBy(shape, tuple(range(len(shape))), 0, shape[0]), least)


def difference(sides: Sequence[Side], axes: Sequence[int], first: slice) -> Reals:
    """Returns by how much two sides differ in the marginal over the features at `axes`."""
    return sides[0].dense(axes, first) - sides[1].dense(axes, first)
