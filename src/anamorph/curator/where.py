"""Where: the rows for which a test of their numbers holds, by the cells of a marginal.

A test is a prefix, every number at most its bound (definition 3 of RAP++: mixed marginals), or a halfspace, a weighted
sum of the numbers at most its bound (definition 4: class conditional linear thresholds). Numbers are the whole codes of
native columns, weights and bounds are whole too, so a test is exact. A missing number fails every test.

The cells of one test are disjoint: a row adds 1 to at most one of them, as to the cells of a marginal. Each test is a
block of its own.

Prefixes are counted by ranks. The rank of a number is how many of the distinct bounds of its tests are below it, so a
number is at most a bound if and only if its rank is at most the bound's place among them. The marginal over the ranks,
cumulated along them, holds the answer of every test; where it would be too large, ranks are compared with places row by
row, as halfspaces are.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anamorph.curator.tallies import Counts

Integers = NDArray[np.int64]

LARGEST_SUM = 1 << 52
"""What a weighted sum of numbers stays below: exact in double arithmetic."""

ROWS, TESTS = 4096, 64
"""How many rows meet how many tests at a time."""

PRODUCT = 1 << 19
"""The most multiplications of a matrix product: one that is larger is shared among threads, which wait for each other
where cores are busy, for longer than it takes."""

GRID = 1 << 22
"""The most cells of a marginal over ranks: 32 MiB."""

MOST_CUTS = 1 << 14
"""The most bounds of a number that one request to a source lists."""

LEAST_TESTS = 512
"""The fewest tests that a request must answer, unless it answers all: else to read the rows once is cheaper."""

SPARSE = 256
"""How many cells over ranks there may be for each test; beyond, to compare every row with every test is cheaper."""


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
        """Returns the same, made of plain integers and arrays of its own, of the types that they have."""
        sizes, given = tuple(map(int, self.sizes)), tuple(map(int, self.given))
        numbers, limits = tuple(map(int, self.numbers)), tuple(map(int, self.limits))
        weights = None if self.weights is None else np.array(self.weights)
        return Where(sizes, given, numbers, limits, np.array(self.bounds), weights)

    def identities(self) -> Iterator[tuple[object, ...]]:
        """Yields what tells one test, with its marginal, from all others."""
        for index in range(self.tests):
            weights = b"" if self.weights is None else self.weights[index].tobytes()
            yield "where", self.sizes, self.given, self.numbers, self.limits, weights, self.bounds[index].tobytes()

    def taken(self, tests: slice) -> Where:
        """Returns some of the tests."""
        return replace(self, bounds=self.bounds[tests], weights=None if self.weights is None else self.weights[tests])

    def holds(self, codes: NDArray[np.number], tests: slice) -> NDArray[np.bool_]:
        """Returns for which rows some of the tests hold: tests by rows; codes are rows by numbers, and not missing."""
        if self.weights is None:
            return below(codes, self.bounds[tests])
        weights, bounds = self.weights[tests].astype(np.float64), self.bounds[tests, None].astype(np.float64)
        found, step = np.empty((len(weights), len(codes)), np.bool_), max(1, PRODUCT // max(codes.size, 1))
        for first in range(0, len(weights), step):
            some = slice(first, first + step)
            np.less_equal(weights[some] @ codes.T, bounds[some], out=found[some])
        return found


@dataclass(frozen=True, eq=False)
class Ranks:
    """Prefix tests by ranks."""

    cuts: tuple[Integers, ...]
    """The distinct bounds of each number, in order. Bounds that differ in no code are one: -1, or the last code; so the
    rank of a missing number is beyond all places."""
    places: NDArray[np.integer]
    """Where the bounds of each test are among them, tests by numbers; of a small type, which is compared fast."""

    @property
    def shape(self) -> tuple[int, ...]:
        """How many ranks of each number pass some test."""
        return tuple(map(len, self.cuts))

    def holds(self, codes: NDArray[np.number], tests: slice) -> NDArray[np.bool_]:
        """Returns for which rows some of the tests hold: tests by rows; codes are ranks, rows by numbers."""
        return below(codes, self.places[tests])


def ranks_of(tally: Where) -> Ranks:
    """Returns the ranks of prefix tests."""
    bounds = np.clip(tally.bounds, -1, np.array(tally.limits, np.int64) - 1)
    cuts, places = zip(*(np.unique(column, return_inverse=True) for column in bounds.T), strict=True)
    return Ranks(cuts, np.stack(places, axis=1).astype(np.uint16 if max(map(len, cuts)) < 1 << 16 else np.int32))


def where_counts(tally: Where, source: Counts) -> Integers:
    """Returns, for each test and cell, the number of rows in the cell for which the test holds.

    A source may have a method `grouped(given, cuts)`, the marginal over features and the ranks of numbers. It is asked
    where a request answers all tests, or many; else the rows are read.
    """
    if tally.weights is not None:
        return compared(tally, source.batches()).ravel()
    ranks, grouped = ranks_of(tally), getattr(source, "grouped", None)
    together = tests_together(tally.width, ranks.shape, tally.tests)
    if grouped and together >= min(tally.tests, LEAST_TESTS):
        parts = [tally.taken(slice(first, first + together)) for first in range(0, tally.tests, together)]
        return np.concatenate([requested(part, grouped) for part in parts], axis=None)
    cells = math.prod(ranks.shape)
    if cells <= SPARSE * tally.tests and cells * tally.width <= GRID:
        return gathered(histogram(tally, ranks, source.batches()), ranks.places).ravel()
    return compared(tally, source.batches(), ranks).ravel()


def tests_together(width: int, shape: tuple[int, ...], tests: int) -> int:
    """Returns how many tests to count by one marginal over ranks, at least one: their bounds may all differ."""

    def too_large(number: int) -> bool:
        lengths = [min(number, length) for length in shape]
        return max(lengths) > MOST_CUTS or width * math.prod(lengths) > GRID

    return max(1, bisect.bisect_left(range(1, tests + 1), True, key=too_large))


def requested(tally: Where, grouped: Callable[..., tuple[Integers, Integers]]) -> Integers:
    """Returns the counts of prefix tests from a marginal over ranks that a source has counted: tests by cells."""
    ranks = ranks_of(tally)
    cells, counts = grouped(tally.given, dict(zip(tally.numbers, ranks.cuts, strict=True)))
    dense = np.zeros((tally.width, *ranks.shape), np.int64)
    dense.reshape(-1)[cells] = counts
    return gathered(dense, ranks.places)


def histogram(tally: Where, ranks: Ranks, batches: Iterable[NDArray[np.int32]]) -> Integers:
    """Returns the marginal over the features given and the ranks of the numbers, without ranks beyond all bounds."""
    dense = np.zeros((tally.width, *ranks.shape), np.int64)
    for batch in batches:
        cells, codes = passing(tally, batch, ranks)
        for column, length in enumerate(ranks.shape):
            cells = cells * length + codes[:, column].astype(np.int64)
        np.add.at(dense.reshape(-1), cells, 1)
    return dense


def gathered(dense: Integers, places: NDArray[np.integer]) -> Integers:
    """Returns the counts of tests from a marginal over ranks, which it cumulates: tests by cells."""
    for axis in range(1, dense.ndim):
        np.cumsum(dense, axis=axis, out=dense)
    return dense[:, *places.T].T


def compared(tally: Where, batches: Iterable[NDArray[np.int32]], ranks: Ranks | None = None) -> Integers:
    """Returns the counts of tests, each compared with each row; of prefixes, by ranks: tests by cells."""
    counts = np.zeros((tally.tests, tally.width), np.int64)
    holds = tally.holds if ranks is None else ranks.holds
    for batch in batches:
        cells, codes = passing(tally, batch, ranks)
        order = np.argsort(cells, kind="stable")
        for first in range(0, len(order), ROWS):
            rows = order[first : first + ROWS]
            add_rows(np.asfortranarray(codes[rows]), cells[rows], holds, counts)
    return counts


def passing(tally: Where, rows: NDArray[np.int32], ranks: Ranks | None = None) -> tuple[Integers, NDArray[np.number]]:
    """Returns the cells and the numbers, or their ranks, of the rows that may pass a test: none is missing."""
    codes, limits = rows[:, tally.numbers].astype(np.float64 if ranks is None else np.int32), tally.limits
    if ranks is not None:
        limits = ranks.shape
        found = [np.searchsorted(cuts.astype(np.int32), codes[:, i]) for i, cuts in enumerate(ranks.cuts)]
        codes = np.stack(found, axis=1).astype(ranks.places.dtype)
    kept = np.flatnonzero(np.all(codes < np.array(limits), axis=1))
    cells = np.zeros(len(kept), np.int64)
    for feature in tally.given:
        cells = cells * tally.sizes[feature] + rows[kept, feature]
    return cells, codes[kept]


def add_rows(
    codes: NDArray[np.number],
    cells: Integers,
    holds: Callable[[NDArray[np.number], slice], NDArray[np.bool_]],
    counts: Integers,
) -> None:
    """Counts some rows, in the order of their cells, those of each cell together."""
    starts = np.flatnonzero(np.diff(cells, prepend=-1)).tolist()
    for first in range(0, len(counts), TESTS):
        span = slice(first, first + TESTS)
        holding = holds(codes, span)
        for start, stop in itertools.pairwise((*starts, len(cells))):
            packed = np.packbits(holding[:, start:stop], axis=1)
            counts[span, cells[start]] += np.bitwise_count(packed).sum(axis=1, dtype=np.int64)


def below(codes: NDArray[np.number], bounds: NDArray[np.number]) -> NDArray[np.bool_]:
    """Returns for which rows every number is at most its bound: tests by rows."""
    found = np.ones((len(bounds), len(codes)), np.bool_)
    for column in range(bounds.shape[1]):
        found &= codes[:, column] <= bounds[:, column, None]
    return found


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
