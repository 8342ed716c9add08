"""Quantiles: the knots of quantile transforms, as a differentially private estimate that is charged like any run.

A column is searched on its native grid without a transform. The share of its rows with a code of at most b is a
prefix of the number; the quantile of a share s is the least code whose prefix is at least s of the rows that are not
missing, and it is found by halves: at each level every quantile asks for the prefix in the middle of the codes that it
still may be, those that ask for the same one together. So level l has at most min(2^l, quantiles) tests for a column,
2^20 codes have 20 levels, and each level is one measurement whose budget is in proportion to the tests that it may
have: a test costs the same at every level, and where some coincide the others have less noise.

The search sees nothing but noisy answers, so its path is public, and the next level may depend on it (adaptive
composition). Quantiles that asked the same question had the same answer: they come out in order.

Reference: the search for one quantile by noisy counts is folklore; for several that share tests see Kaplan, Schnapp &
Stemmer, "Differentially private approximate quantiles", ICML 2022, whose recursion by exponential mechanisms this is
not: prefixes are tests that every source counts, and their cost does not depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.columns import Numeric
from anamorph.curator.budget import proportional
from anamorph.curator.curator import Curator
from anamorph.curator.where import Where
from anamorph.errors import ParameterError, SchemaError
from anamorph.mechanisms.mechanism import Step
from anamorph.queries.numbers import Tested
from anamorph.queries.workload import Workload
from anamorph.ranges import MOST_KNOTS
from anamorph.release import Measurement
from anamorph.schema import Schema

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """The knots of some columns at equal shares of their rows."""

    columns: tuple[str, ...] = ()
    """Columns that declare `transform: quantile`; none named: those whose knots are still to come."""
    knots: int = 16
    """How many knots a column is to have, both bounds included; fewer are kept where several coincide."""

    def __post_init__(self) -> None:
        whole = isinstance(self.knots, int) and not isinstance(self.knots, bool)
        if not whole or not 3 <= self.knots <= MOST_KNOTS:
            raise ParameterError(f"knots ({self.knots!r}) must be a whole number from 3 to {MOST_KNOTS}")

    def prepared(self, schema: Schema) -> Schema:
        """Returns the schema to count with: the columns without knots; refuses other columns than those."""
        wanted = self.columns or schema.pending
        if not wanted:
            raise SchemaError("a column must declare `transform: quantile`, without knots, for them to be estimated")
        for name in wanted:
            column = schema.columns[schema.index(name)]
            if not isinstance(column, Numeric) or column.transform != "quantile":
                raise SchemaError(
                    f"column {name!r} must declare `transform: quantile` for knots to be estimated; do so before "
                    "anything is charged, for a ledger keeps the account of a dataset by its schema"
                )
        columns = (replace(column, knots=None) if column.name in wanted else column for column in schema.columns)
        return replace(schema, columns=tuple(columns))

    def steps(self, schema: Schema, rho: float) -> tuple[Step, ...]:
        """Returns the planned spends: a measurement for each level."""
        tests = self.tests(schema)
        return tuple(Step("measure", b, t, t) for t, b in zip(tests, proportional(rho, tests), strict=True))

    def tests(self, schema: Schema) -> list[int]:
        """Returns how many tests each level may have: the first has another one where numbers may be missing."""
        found = [schema.columns[number] for number in self.numbers(schema)]
        deepest = max(depth(column.regular) for column in found)
        reached = [[column for column in found if depth(column.regular) > level] for level in range(deepest)]
        tests = [len(mine) * min(1 << level, self.knots - 2) for level, mine in enumerate(reached)]
        return [tests[0] + sum(column.missing for column in found), *tests[1:]]

    def numbers(self, schema: Schema) -> tuple[int, ...]:
        """Returns the positions of the columns."""
        return tuple(sorted({schema.index(name) for name in self.columns or schema.pending}))

    def __call__(self, curator: Curator) -> Schema:
        """Returns the schema with knots; the curator's must be a prepared one."""
        schema, numbers = curator.schema, self.numbers(curator.schema)
        shares = np.arange(1, self.knots - 1) / (self.knots - 1)
        found = {number: Search.begin(schema, number, shares) for number in numbers}
        plan = self.steps(schema, curator.remaining)
        for level, step in enumerate(plan):
            progress.report("measure", level, len(plan))
            asked = {number: tests for number, search in found.items() if len(tests := search.tests(level == 0))}
            if asked:  # else all were found before the last level
                parts = tuple(Tested(prefixes(schema, number, tests)) for number, tests in asked.items())
                values = answers(curator.measure(Workload(parts), rho=step.rho))
                found |= {n: found[n].narrowed(tests, next(values)) for n, tests in asked.items()}
        progress.report("measure", len(plan), len(plan))
        columns = (
            with_knots(column, found[number].low) if number in found else column
            for number, column in enumerate(schema.columns)
        )
        return replace(schema, columns=tuple(columns))


@dataclass(frozen=True, eq=False)
class Search:
    """Where the quantiles of a column may still be: codes from `low` to `high`, for each a share of the rows."""

    low: Integers
    high: Integers
    targets: NDArray[np.float64]
    last: int
    """The last code that is not `missing`."""
    missing: bool

    @classmethod
    def begin(cls, schema: Schema, number: int, shares: NDArray[np.float64]) -> Search:
        """Returns the search before the first level."""
        column = schema.columns[number]
        last, none = column.regular - 1, np.zeros(shares.size, np.int64)
        return cls(none, none + last, shares, last, column.missing)

    def tests(self, first: bool) -> Integers:
        """Returns the bounds of the prefixes to ask for next, each once; at first also how many are not missing."""
        ahead = self.low < self.high
        middle = (self.low[ahead] + self.high[ahead]) // 2
        return np.unique(np.append(middle, [self.last] if first and self.missing else []).astype(np.int64))

    def narrowed(self, tests: Integers, values: NDArray[np.float64]) -> Search:
        """Returns the search after a level, given the noisy shares of its prefixes."""
        targets = self.targets * values[-1] if self.missing and tests[-1] == self.last else self.targets
        ahead, middle = self.low < self.high, (self.low + self.high) // 2
        passed = values[np.minimum(np.searchsorted(tests, middle), tests.size - 1)] >= targets
        low, high = np.where(ahead & ~passed, middle + 1, self.low), np.where(ahead & passed, middle, self.high)
        return replace(self, low=low, high=high, targets=targets)


def depth(codes: int) -> int:
    """Returns how many halvings tell so many codes apart."""
    return (codes - 1).bit_length()


def prefixes(schema: Schema, number: int, tests: Integers) -> Where:
    """Returns the prefixes of a number with nothing given."""
    return Where(schema.sizes, (), (number,), (schema.columns[number].regular,), tests[:, None])


def answers(measured: Measurement) -> Iterator[NDArray[np.float64]]:
    """Yields the noisy answers of each part of a measurement."""
    ends = np.cumsum([part.cells for part in measured.workload.parts])
    yield from np.split(measured.values, ends[:-1])


def with_knots(column: object, codes: Integers) -> Numeric:
    """Returns a column with knots where the steps of some codes begin, without those too near to another."""
    if not isinstance(column, Numeric):
        raise ParameterError("columns must be numeric to have knots")
    grid, kept = column.grid, [column.lower]
    starts = grid.first(codes) if column.integer else grid.at(codes)
    for knot in starts.tolist():
        if kept[-1] < knot < column.upper and column.apart(kept[-1], knot) and column.apart(knot, column.upper):
            kept.append(knot)
    return replace(column, knots=(*kept, column.upper), source="dp")
