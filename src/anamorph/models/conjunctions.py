"""Weighted conjunctions, and what a row is worth by them: the objective of the oracle (models/rows.py).

A conjunction is a set of tests "this column has this code"; a row agrees with it if it passes them all. With one number
for each code of each column, `linear`, a row x is worth

    sum_i w_i [x agrees with conjunction i] + <linear, one-hot(x)>.

Weights may be negative: a negated query is 1 minus its conjunction, so a weight of -1 up to a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.errors import ParameterError

Codes = NDArray[np.int32]
"""Rows: a code for each column."""
Places = NDArray[np.intp]
"""Codes numbered through all columns: code c of column j is place offsets[j] + c; the number after the last pads."""
Reals = NDArray[np.float64]

CELLS = 1 << 22
"""The most agreements, conjunctions by rows, that are held at once."""


@dataclass(frozen=True)
class Conjunctions:
    """Weighted conjunctions over columns of given sizes: no two are equal, no weight is 0."""

    sizes: tuple[int, ...]
    tests: Places
    """A line of places for each conjunction, ascending; shorter conjunctions end with the padding place."""
    weights: Reals

    @classmethod
    def none(cls, sizes: Sequence[int]) -> Conjunctions:
        """Returns no conjunctions over these columns."""
        if not sizes or min(sizes) < 1:
            raise ParameterError(f"sizes ({tuple(sizes)}) must be whole numbers of at least 1, one for each column")
        return cls(tuple(int(size) for size in sizes), np.empty((0, 1), np.intp), np.empty(0))

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        features: Sequence[ArrayLike],
        codes: Sequence[ArrayLike],
        weights: ArrayLike | None = None,
    ) -> Conjunctions:
        """Returns conjunctions: row i agrees with the i-th if its columns features[i] have codes[i]. Weights: or 1."""
        return cls.none(sizes).extended(features, codes, weights)

    def extended(
        self, features: Sequence[ArrayLike], codes: Sequence[ArrayLike], weights: ArrayLike | None = None
    ) -> Conjunctions:
        """Returns these conjunctions and more; the weights of equal ones are added, those of weight 0 dropped."""
        new = np.ones(len(features)) if weights is None else np.array(weights, np.float64, ndmin=1)
        if not len(features) == len(codes) == len(new):
            raise ParameterError(
                f"features ({len(features)}), codes ({len(codes)}) and weights ({len(new)}) must be equally many"
            )
        if not np.isfinite(new).all():
            raise ParameterError("weights must be finite")
        tests = self._placed(features, codes)
        width = max(self.tests.shape[1], tests.shape[1])
        both = np.vstack([_widened(part, width, self.total) for part in (self.tests, tests)])
        return Conjunctions(self.sizes, *merged(both, np.append(self.weights, new)))

    def __len__(self) -> int:
        return len(self.weights)

    @cached_property
    def total(self) -> int:
        """The number of places, which is the place that pads."""
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> Places:
        """The first place of each column."""
        return np.cumsum((0, *self.sizes[:-1]), dtype=np.intp)

    @cached_property
    def columns(self) -> Places:
        """The column of each place."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def values(self, rows: ArrayLike, linear: ArrayLike) -> Reals:
        """Returns the objective of each row; `linear` is one vector, or one for each row."""
        places = np.asarray(rows, np.intp) + self.offsets
        found = np.take_along_axis(np.broadcast_to(linear, (len(places), self.total)), places, axis=1).sum(axis=1)
        for part in batches(len(places), len(self)):
            found[part] += self._agreements(places[part]) @ self.weights
        return found

    def leading(self, linear: Reals) -> Codes:
        """Returns the best code of each column by `linear` alone: a row for each line of it."""
        bounds = zip(self.offsets, self.sizes, strict=True)
        best = [linear[:, first : first + size].argmax(axis=1) for first, size in bounds]
        return np.stack(best, axis=1).astype(np.int32)

    def choices(self, kept: NDArray[np.bool_]) -> Places:
        """Returns how many codes of each column are among the places that are kept."""
        return np.add.reduceat(kept[: self.total], self.offsets, dtype=np.intp)

    def vectors(self, linear: ArrayLike) -> Reals:
        """Returns `linear` as an array of one line for each problem; refuses what does not fit the columns."""
        found = np.asarray(linear, np.float64)
        if found.ndim != 2 or found.shape[1] != self.total:
            raise ParameterError(f"linear {found.shape} must have a line of {self.total} numbers for each problem")
        if not np.isfinite(found).all():
            raise ParameterError("linear must be finite")
        return found

    def checked(self, rows: ArrayLike, problems: int) -> Codes:
        """Returns rows as an array, one for each problem; refuses those that do not fit the columns."""
        found = np.asarray(rows, np.int32)
        if found.shape != (problems, len(self.sizes)):
            raise ParameterError(f"rows {found.shape} must be {problems} rows of {len(self.sizes)} columns")
        if (found < 0).any() or (found >= self.sizes).any():
            raise ParameterError("rows must have codes from 0 to the size of their column less 1")
        return found

    def _agreements(self, places: Places) -> NDArray[np.bool_]:
        """Returns which conjunctions each row, given by its places, agrees with."""
        held = np.zeros((len(places), self.total + 1), bool)
        np.put_along_axis(held, places, True, axis=1)
        held[:, -1] = True
        found = held[:, self.tests[:, 0]]
        for tests in self.tests.T[1:]:
            found &= held[:, tests]
        return found

    def _placed(self, features: Sequence[ArrayLike], codes: Sequence[ArrayLike]) -> Places:
        """Returns the tests of conjunctions as lines of places."""
        orders = np.array([np.size(line) for line in features], np.intp)
        if list(orders) != [np.size(line) for line in codes] or 0 in orders:
            raise ParameterError("every conjunction must name at least one column, and one code for each")
        if not len(orders):
            return np.empty((0, 1), np.intp)
        column = np.concatenate([np.ravel(line) for line in features]).astype(np.intp)
        code = np.concatenate([np.ravel(line) for line in codes]).astype(np.intp)
        if column.min() < 0 or column.max() >= len(self.sizes):
            raise ParameterError(f"features must be from 0 to {len(self.sizes) - 1}")
        if (code < 0).any() or (code >= np.take(self.sizes, column)).any():
            raise ParameterError("codes must be from 0 to the size of their column less 1")
        tests = np.full((len(orders), orders.max()), self.total, np.intp)
        tests[np.arange(orders.max()) < orders[:, None]] = self.offsets[column] + code
        tests.sort(axis=1)
        named = np.append(self.columns, -1)[tests]
        if ((named[:, 1:] == named[:, :-1]) & (named[:, 1:] >= 0)).any():
            raise ParameterError("no conjunction may name a column twice")
        return tests


def _widened(tests: Places, width: int, padding: int) -> Places:
    return np.pad(tests, ((0, 0), (0, width - tests.shape[1])), constant_values=padding)


def merged(tests: Places, weights: Reals) -> tuple[Places, Reals]:
    """Returns lines that differ, in lexicographic order, and the sums of their weights where these are not 0."""
    if len(tests) < 2:
        return tests[weights != 0], weights[weights != 0]
    order = np.lexsort(tests.T[::-1])
    tests = tests[order]
    first = np.flatnonzero(np.append(True, (tests[1:] != tests[:-1]).any(axis=1)))
    sums = np.add.reduceat(weights[order], first)
    return tests[first[sums != 0]], sums[sums != 0]


def batches(rows: int, conjunctions: int) -> Iterator[slice]:
    """Yields slices of the rows for which all agreements fit in memory."""
    step = max(1, CELLS // max(1, conjunctions))
    return (slice(first, first + step) for first in range(0, rows, step))


@dataclass(frozen=True)
class Best:
    """Rows that solve problems, one for each."""

    rows: Codes
    values: Reals
    proven: NDArray[np.bool_]
    """Which values are proven to be the optimum, up to the tolerance of the solver."""
