"""Tallies: the closed set of ways in which private rows are counted, each with its sensitivity.

A tally is a public description; query classes compile to tallies, the curator alone executes them, and a model
answers the same tallies on its own rows. A row adds 0 or 1 to each number of a tally, so the numbers are exact
integers and their sensitivity follows from the kind of tally alone:

- `GroupBy`: a slab of one marginal. Every row falls in at most one cell. One row added or removed changes one number
  by 1; one row replaced moves a unit from one cell to another: squared L2 sensitivity 1 and 2.
- `Tests`: single cells, each of some marginal. A row holds at most one of the cells of the same marginal, so c cells
  of one marginal contribute 1 (add-remove) or min(c, 2) (replace), and marginals add up.

A new query class needs no privacy review; a new tally does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import WorkloadError

if TYPE_CHECKING:
    from anamorph.curator.budget import Relation


@dataclass(frozen=True)
class GroupBy:
    """The cells of one marginal whose first feature has a code from `start` to `stop` - 1, in C order."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    features: tuple[int, ...]
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of codes of each feature."""
        return (self.stop - self.start, *(self.sizes[feature] for feature in self.features[1:]))

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return math.prod(self.shape)

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by."""
        return (self.features,)

    @property
    def offset(self) -> int:
        """The position, in the whole marginal, of the first cell."""
        return self.start * (self.cells // max(self.stop - self.start, 1))


@dataclass(frozen=True, eq=False)
class Tests:
    """Single cells: query j is cell `positions[j]` of the marginal over `sets[which[j]]`."""

    sizes: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    which: NDArray[np.int64]
    positions: NDArray[np.int64]

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return self.which.size

    def codes(self, index: int) -> NDArray[np.int64]:
        """Returns, for the queries of one set, the code that each of its features must have: queries by features."""
        shape = tuple(self.sizes[feature] for feature in self.sets[index])
        return np.stack(np.unravel_index(self.positions[self.which == index], shape), axis=1)


Tally = GroupBy | Tests


class Counts(Protocol):
    """What a tally needs of a source of rows: the non-empty cells of marginals, positions ascending, and counts."""

    def counts(self, sets: tuple[tuple[int, ...], ...]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]: ...


def count(tally: Tally, source: Counts) -> NDArray[np.int64]:
    """Returns the exact numbers of a tally."""
    numbers = np.zeros(tally.cells, np.int64)
    for index, (cells, counts) in enumerate(source.counts(tally.sets)):
        if isinstance(tally, GroupBy):
            first, last = np.searchsorted(cells, (tally.offset, tally.offset + tally.cells))
            numbers[cells[first:last] - tally.offset] = counts[first:last]
        else:
            asked = np.flatnonzero(tally.which == index)
            numbers[asked] = look_up(cells, counts, tally.positions[asked])
    return numbers


def look_up(cells: NDArray[np.int64], counts: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the counts at `positions`, zero where a cell is not listed."""
    if cells.size == 0:
        return np.zeros(positions.size, np.int64)
    place = np.minimum(np.searchsorted(cells, positions), cells.size - 1)
    return np.where(cells[place] == positions, counts[place], 0)


def squared_sensitivity(tallies: Iterable[Tally], relation: Relation) -> int:
    """Returns the square of the joint L2 sensitivity of the numbers of some tallies, in counts.

    The sum over the distinct marginals of min(cells asked of it, 1 or 2): see the head of this module. It holds only if
    no cell is asked twice, so that is refused.
    """
    most = 1 if relation == "add-remove" else 2
    return sum(min(asked, most) for asked in cells_asked(tallies).values())


def cells_asked(tallies: Iterable[Tally]) -> dict[tuple[int, ...], int]:
    """Returns how many cells of each marginal are asked; refuses a cell that is asked twice."""
    spans: dict[tuple[int, ...], list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for tally in tallies:
        for features, span in spans_of(tally):
            spans.setdefault(features, []).append(span)
    asked = {}
    for features, found in spans.items():
        starts, stops = (np.concatenate(ends) for ends in zip(*found, strict=True))
        order = np.argsort(starts)
        if np.any(stops[order][:-1] > starts[order][1:]):
            raise WorkloadError("a cell must be asked once in one measurement: these blocks overlap")
        asked[features] = int(np.sum(stops - starts))
    return asked


def spans_of(tally: Tally) -> Iterator[tuple[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]]]:
    """Yields, for each marginal of a tally, where the runs of cells asked of it start and stop."""
    if isinstance(tally, GroupBy):
        yield tally.features, (np.array([tally.offset]), np.array([tally.offset + tally.cells]))
        return
    for index, features in enumerate(tally.sets):
        positions = tally.positions[tally.which == index]
        yield features, (positions, positions + 1)


def check_tally(tally: object, sizes: tuple[int, ...]) -> None:
    """Refuses what is not a tally of the closed set over these columns."""
    if type(tally) is GroupBy:
        sound = 0 <= tally.start < tally.stop <= sizes[tally.features[0]] if is_set(tally.features, sizes) else False
    elif type(tally) is Tests:
        sound = all(is_set(features, sizes) for features in tally.sets) and within(tally)
    else:
        sound = False
    if not sound or getattr(tally, "sizes", None) != sizes:
        raise WorkloadError("the workload must be of tallies over the columns of this schema")


def is_set(features: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Returns whether features are distinct columns."""
    return len(features) > 0 and len(set(features)) == len(features) and all(0 <= f < len(sizes) for f in features)


def within(tally: Tests) -> bool:
    """Returns whether every cell asked is a cell of its marginal."""
    if tally.which.shape != tally.positions.shape or tally.which.ndim != 1 or not tally.cells:
        return False
    if tally.which.min() < 0 or tally.which.max() >= len(tally.sets):
        return False
    cells = np.array([marginal_cells(tally.sizes, features) for features in tally.sets])
    return bool(np.all((tally.positions >= 0) & (tally.positions < cells[tally.which])))


def marginal_cells(sizes: tuple[int, ...], features: tuple[int, ...]) -> int:
    """Returns the number of cells of a marginal, as a Python integer of any size."""
    return math.prod(sizes[feature] for feature in features)
