"""Where: the rows for which a test of their numbers holds, by the cells of a marginal.

A test is a prefix, every number at most its bound (definition 3 of RAP++: mixed marginals), or a halfspace, a weighted
sum of the numbers at most its bound (definition 4: class conditional linear thresholds). Numbers are the whole codes of
native columns, weights and bounds are whole too, so a test is exact. A missing number fails every test.

The cells of one test are disjoint: a row adds 1 to at most one of them, as to the cells of a marginal. Each test is a
block of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

LARGEST_SUM = 1 << 52
"""What a weighted sum of numbers stays below: exact in double arithmetic."""

ROWS, TESTS = 4096, 512
"""How many rows meet how many tests at a time: 16 MiB of sums."""


@dataclass(frozen=True, eq=False)
class Where:
    """Some tests of the same numbers; for each, all cells of the marginal over `given`, in C order."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    given: tuple[int, ...]
    """The features of the marginal: none for a single number."""
    numbers: tuple[int, ...]
    """The native columns that are tested."""
    limits: tuple[int, ...]
    """How many codes each of them has without `missing`."""
    bounds: Integers
    """For prefixes a bound for each test and number; for halfspaces one for each test."""
    weights: Integers | None = None
    """The weights of halfspaces: tests by numbers."""

    @property
    def tests(self) -> int:
        """How many tests there are."""
        return len(self.bounds)

    @property
    def width(self) -> int:
        """How many cells each test has."""
        return math.prod(self.sizes[feature] for feature in self.given)

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return self.tests * self.width

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by: none, rows are tested one by one."""
        return ()

    def copied(self) -> Where:
        """Returns the same, made of plain integers and arrays of its own."""
        sizes, given = tuple(map(int, self.sizes)), tuple(map(int, self.given))
        numbers, limits = tuple(map(int, self.numbers)), tuple(map(int, self.limits))
        weights = None if self.weights is None else np.array(self.weights, np.int64)
        return Where(sizes, given, numbers, limits, np.array(self.bounds, np.int64), weights)

    def identities(self) -> Iterator[tuple[object, ...]]:
        """Yields what tells one test, with its marginal, from all others."""
        for index in range(self.tests):
            weights = b"" if self.weights is None else self.weights[index].tobytes()
            yield "where", self.sizes, self.given, self.numbers, self.limits, weights, self.bounds[index].tobytes()

    def holds(self, codes: NDArray[np.floating], tests: slice) -> NDArray[np.bool_]:
        """Returns for which rows some of the tests hold: tests by rows; codes are rows by numbers, and not missing."""
        if self.weights is not None:
            return self.weights[tests].astype(np.float64) @ codes.T <= self.bounds[tests, None]
        found = np.ones((len(self.bounds[tests]), len(codes)), np.bool_)
        for column in range(len(self.numbers)):
            found &= codes[:, column] <= self.bounds[tests, column, None]
        return found


def where_counts(tally: Where, batches: Iterable[NDArray[np.int32]]) -> Integers:
    """Returns, for each test and cell, the number of rows in the cell for which the test holds."""
    counts = np.zeros((tally.tests, tally.width), np.int64)
    for batch in batches:
        for first in range(0, len(batch), ROWS):
            add_rows(tally, batch[first : first + ROWS], counts)
    return counts.ravel()


def add_rows(tally: Where, rows: NDArray[np.int32], counts: Integers) -> None:
    """Counts some rows, those of each cell together."""
    numbers = rows[:, tally.numbers]
    present = np.all(numbers < np.array(tally.limits, np.int64), axis=1)
    cells = np.zeros(len(rows), np.int64)
    for feature in tally.given:
        cells = cells * tally.sizes[feature] + rows[:, feature]
    order = np.flatnonzero(present)
    order = order[np.argsort(cells[order], kind="stable")]
    codes, owners = numbers[order].astype(np.float64), cells[order]
    starts = np.flatnonzero(np.diff(owners, prepend=-1)).tolist()
    stops = [*starts[1:], len(owners)][: len(starts)]  # of no rows, no cells
    for first in range(0, tally.tests, TESTS):
        span = slice(first, first + TESTS)
        holding = tally.holds(codes, span)
        for start, stop in zip(starts, stops, strict=True):
            packed = np.packbits(holding[:, start:stop], axis=1)
            counts[span, owners[start]] += np.bitwise_count(packed).sum(axis=1, dtype=np.int64)


def is_where(tally: Where, sizes: tuple[int, ...]) -> bool:
    """Returns whether a tally is over columns of these sizes, with tests that are exact in double arithmetic."""
    columns = (*tally.given, *tally.numbers)
    within = all(0 <= feature < len(sizes) for feature in columns) and len(set(columns)) == len(columns)
    if not within or not tally.numbers or len(tally.limits) != len(tally.numbers):
        return False
    if not all(1 <= limit <= sizes[feature] for limit, feature in zip(tally.limits, tally.numbers, strict=True)):
        return False
    plain = [array for array in (tally.bounds, tally.weights) if array is not None]
    if not all(type(array) is np.ndarray and array.dtype == np.int64 for array in plain) or not len(tally.bounds):
        return False
    if tally.weights is None:
        return tally.bounds.shape == (tally.tests, len(tally.numbers))
    if tally.bounds.ndim != 1 or tally.weights.shape != (tally.tests, len(tally.numbers)):
        return False
    reach = sum(np.abs(tally.weights[:, i].astype(object)) * limit for i, limit in enumerate(tally.limits))
    return bool(np.all(reach < LARGEST_SUM)) and bool(
        np.all((tally.bounds > -LARGEST_SUM) & (tally.bounds < LARGEST_SUM))
    )
