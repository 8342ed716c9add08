"""Mixed rows: relaxed rows with numbers as numbers.

A row holds a probability vector for each coded column, and for each native column a unit real x in [0, 1], the number
itself; for native columns that may be missing also a probability vector (present, missing). A test of numbers (prefix
or halfspace, see curator/where.py) is a product of inequalities theta . x <= tau, and its answer for a cell of the
features given is

    sum over rows r of  w_r  prod of [theta . x_r <= tau]  prod of present  prod of P_r,code.

annealing.py fits them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.bands import Bands
from anamorph.curator.tallies import AtLeast, GroupBy, Tally, Tests
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError
from anamorph.models.answers import no_residuals
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.workload import Workload
from anamorph.rounding import draw
from anamorph.table import Table

TESTS = 1 << 12
"""How many tests are answered at a time."""


@dataclass(frozen=True)
class Columns:
    """Which columns are numbers, and where the others lie among the relaxed ones."""

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]
    limits: tuple[int, ...]
    """How many codes each number has without `missing`."""

    @cached_property
    def coded(self) -> tuple[int, ...]:
        """The columns with probabilities for each code."""
        return tuple(column for column in range(len(self.sizes)) if column not in self.numbers)

    @cached_property
    def flagged(self) -> tuple[int, ...]:
        """The numbers that may be missing."""
        pairs = zip(self.numbers, self.limits, strict=True)
        return tuple(number for number, limit in pairs if self.sizes[number] > limit)

    @cached_property
    def relaxed(self) -> tuple[int, ...]:
        """The sizes of the relaxed features: coded columns, then (present, missing) for each number that may be."""
        return (*(self.sizes[column] for column in self.coded), *(2 for _ in self.flagged)) or (1,)

    def place(self, column: int) -> int:
        """Returns the relaxed feature of a coded column, or of the flag of a number."""
        return (*self.coded, *self.flagged).index(column)

    def inner(self, slab: GroupBy) -> GroupBy:
        """Returns a slab of a marginal of coded columns, over the relaxed features."""
        if not set(slab.features) <= set(self.coded):
            raise no_residuals()
        return replace(slab, sizes=self.relaxed, features=tuple(map(self.place, slab.features)))


@dataclass(frozen=True, eq=False)
class MixedRows:
    """A table of relaxed rows with numbers."""

    columns: Columns
    coded: RelaxedRows
    reals: NDArray[np.float32]
    """The unit real of each number, a line for each native column, a column for each row."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns."""
        return self.columns.sizes

    @property
    def degraded(self) -> bool:
        """Whether a fit met a loss that was not a number and fell back to the best table before it."""
        return self.coded.degraded

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """The code of each number: rows by native columns."""
        limits = np.array(self.columns.limits)
        return np.minimum((self.reals.T.astype(np.float64) * limits).astype(np.int64), limits - 1)

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields the answers of each piece of a workload."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> NDArray[np.floating]:
        """Returns the answers of one tally: tests are not relaxed."""
        if isinstance(tally, Where):
            return self.tested(tally)
        if isinstance(tally, Bands):
            return self.banded(tally)
        if isinstance(tally, GroupBy):
            return self.coded.answer(self.columns.inner(tally))
        if isinstance(tally, AtLeast):
            return self.coded.answer(AtLeast(self.columns.inner(tally.slab), tally.least))
        if isinstance(tally, Tests) and all(set(features) <= set(self.columns.coded) for features in tally.sets):
            sets = tuple(tuple(map(self.columns.place, features)) for features in tally.sets)
            return self.coded.answer(replace(tally, sizes=self.columns.relaxed, sets=sets))
        raise no_residuals()

    def tested(self, tally: Where) -> NDArray[np.float64]:
        """Returns the answers of tests of numbers."""
        places = [self.columns.numbers.index(number) for number in tally.numbers]
        codes = self.codes[:, places].astype(np.float64)
        weights = self.cell_weights(tally.numbers, tally.given)
        spans = [slice(first, first + TESTS) for first in range(0, tally.tests, TESTS)]
        return np.concatenate([(tally.holds(codes, span) @ weights).ravel() for span in spans])

    def banded(self, tally: Bands) -> NDArray[np.float64]:
        """Returns the answers of a marginal of bands."""
        numbers = [axis for axis, feature in enumerate(tally.features) if feature in self.columns.numbers]
        given = [axis for axis in range(len(tally.features)) if axis not in numbers]
        shape = [tally.shape[axis] for axis in numbers]
        weights = self.cell_weights((), [tally.features[axis] for axis in given])
        total = np.zeros((math.prod(shape), weights.shape[1]))
        flagged = [tally.features[axis] in self.columns.flagged for axis in numbers]
        for missing in itertools.product(*((False, True) if flag else (False,) for flag in flagged)):
            part, place = weights, np.zeros(len(weights), np.int64)
            for axis, gone in zip(numbers, missing, strict=True):
                number = tally.features[axis]
                index = self.columns.numbers.index(number)
                codes = np.full(len(weights), self.columns.limits[index]) if gone else self.codes[:, index]
                cuts = tally.cuts[axis]
                place = place * tally.shape[axis] + (np.searchsorted(cuts, codes, side="right") if cuts else codes)
                if number in self.columns.flagged:
                    part = part * self.flag(number, missing=gone)[:, None]
            np.add.at(total, place, part)
        axes = total.reshape(*shape, *(tally.shape[axis] for axis in given))
        return np.moveaxis(axes, range(len(tally.features)), [*numbers, *given]).ravel()

    def cell_weights(self, numbers: Sequence[int], given: Sequence[int]) -> NDArray[np.float64]:
        """Returns the weight of each row in each cell of the features given, if some numbers are present."""
        weights = self.coded.weights.astype(np.float64)[:, None]
        for number in numbers:
            if number in self.columns.flagged:
                weights = weights * self.flag(number)[:, None]
        for column in given:
            first = self.starts[self.columns.place(column)]
            lines = self.coded.probabilities[first : first + self.sizes[column]].T
            weights = (weights[:, :, None] * lines[:, None]).reshape(len(weights), -1)
        return weights

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first line of each relaxed feature."""
        return np.cumsum((0, *self.columns.relaxed[:-1]))

    def flag(self, number: int, *, missing: bool = False) -> NDArray[np.float32]:
        """Returns the probability of each row that a number is present, or that it is missing."""
        return self.coded.probabilities[self.starts[self.columns.place(number)] + int(missing)]

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows rounded at random from the relaxed ones; numbers are those of their row."""
        generator = np.random.default_rng(seed)
        inner, owner = draw(self.coded.probabilities, self.coded.weights, self.columns.relaxed, rows, generator)
        codes = np.empty((rows, len(self.sizes)), np.int32)
        for place, column in enumerate(self.columns.coded):
            codes[:, column] = inner[:, place]
        for index, number in enumerate(self.columns.numbers):
            codes[:, number] = self.codes[owner, index]
            if number in self.columns.flagged:
                missing = inner[:, self.columns.place(number)] == 1
                codes[missing, number] = self.columns.limits[index]
        return Table(codes[generator.permutation(rows)], self.sizes)

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps."""
        limits = np.array((self.columns.numbers, self.columns.limits), np.int64).reshape(2, -1)
        return self.coded.arrays() | {"reals": self.reals, "numbers": limits}

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses anything but probability vectors and unit reals."""
        listed, reals = arrays["numbers"], arrays["reals"]
        if listed.dtype != np.int64 or listed.ndim != 2 or listed.shape[0] != 2:
            raise foreign()
        numbers, limits = map(tuple, listed.tolist())
        known = len(set(numbers)) == len(numbers) and all(0 <= number < len(sizes) for number in numbers)
        if not known or not all(limit in (sizes[n], sizes[n] - 1) for n, limit in zip(numbers, limits, strict=True)):
            raise foreign()
        columns = Columns(sizes, numbers, limits)
        coded = RelaxedRows.from_arrays(columns.relaxed, {name: arrays[name] for name in ("probabilities", "weights")})
        if (
            len(arrays) != 4
            or reals.shape != (len(numbers), coded.weights.size)
            or not np.all((reals >= 0) & (reals <= 1))
        ):
            raise foreign()
        return cls(columns, coded, reals.astype(np.float32))


def foreign() -> CorruptionError:
    """Returns the refusal of arrays that are not mixed rows."""
    return CorruptionError("the model must hold a unit real for each number of each row; it does not")
