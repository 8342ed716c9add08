"""Queries of native numbers: mixed marginals and class conditional linear thresholds, in blocks by test.

A block is a test of numbers with all cells of a marginal: of the rows that pass, how many have each combination of
values of the features given. A row is in at most one cell, so a block has the sensitivity of a marginal.

- *Mixed marginals* (RAP++, definition 3; prefix marginals, definition 13, where nothing is given): every number at most
  its threshold.
- *Class conditional linear thresholds* (definition 4): a random halfspace of the numbers, given a label.

Numbers are the codes of native columns, from 0 to their limit; x = (code + 1/2) / limit is the unit real that a code
stands for. A halfspace theta . x <= tau is rounded to whole numbers once, when it is drawn: sum of round(S theta_j /
limit_j) code_j <= floor(S (tau - sum of theta_j / (2 limit_j))), S = 2^40 or as much as keeps sums exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.curator.where import LARGEST_SUM, Where
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import MOST_MARGINALS
from anamorph.queries.piece import Piece
from anamorph.schema import Schema

Integers = NDArray[np.int64]

MOST_QUERIES = 10_000_000
"""The most tests of a workload."""

PRECISION = 1 << 40
"""How finely the weights of a halfspace are rounded, as far as sums stay exact."""


@dataclass(frozen=True, eq=False)
class Tested:
    """Tests of the same numbers with the same features given: block i is test i, with all cells of the marginal."""

    tally: Where

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        return self.tally.sizes

    @property
    def blocks(self) -> int:
        """The number of tests."""
        return self.tally.tests

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.tally.cells

    @property
    def largest_block(self) -> int:
        """The number of queries of a test."""
        return self.tally.width

    def take(self, ids: ArrayLike) -> Tested:
        """Returns the tests named, in the order named."""
        wanted = np.asarray(ids, np.int64)
        weights = None if self.tally.weights is None else self.tally.weights[wanted]
        return Tested(replace(self.tally, bounds=self.tally.bounds[wanted], weights=weights))

    def by_cell(self) -> Tested:
        """Refuses: the cells of a test are counted together."""
        raise WorkloadError("tests of numbers must be taken in whole blocks, not as single queries")

    def measured(self, order: int = 0) -> Tested:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields tests in order, as many at a time as the limit allows."""
        step = max(1, limit // self.tally.width)
        for first in range(0, self.tally.tests, step):
            part = self.take(np.arange(first, min(first + step, self.tally.tests))).tally
            yield Piece(part, first, part.tests)


def mixed_marginals(schema: Schema, k: int, *, count: int, seed: int, target: str | None = None) -> tuple[Tested, ...]:
    """Returns random k-way mixed marginals, a part for each set of columns: the same for the same seed, everywhere.

    A block draws k columns, of which one at least is a native number (and one the target, if given), uniformly from all
    such sets in lexicographic order, then for each column of numbers in order a threshold, uniformly from its codes.
    """
    check_count(count)
    if not 1 <= k <= len(schema.sizes):
        raise WorkloadError(f"k ({k}) must be from 1 to {len(schema.sizes)}, the number of columns")
    sets = math.comb(len(schema.sizes), k)
    if sets > MOST_MARGINALS:
        raise WorkloadError(
            f"k ({k}) must leave at most {MOST_MARGINALS} sets of columns to draw from, not {Decimal(sets):.3g}: "
            "take a smaller one"
        )
    label = () if target is None else (coded(schema, target),)
    kept = [
        columns
        for columns in itertools.combinations(range(len(schema.sizes)), k)
        if set(columns) & set(schema.numbers) and set(label) <= set(columns)
    ]
    if not kept:
        raise WorkloadError(f"k ({k}) must leave a set of columns with a native number: declare `native: true`")
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(kept), count)
    uniform = generator.random((count, k))
    return tuple(prefixes(schema, kept[index], uniform[drawn == index]) for index in np.unique(drawn).tolist())


def prefixes(schema: Schema, columns: tuple[int, ...], uniform: NDArray[np.float64]) -> Tested:
    """Returns tests of the numbers among some columns, given the others, with thresholds from uniform numbers."""
    numbers = tuple(column for column in columns if column in schema.numbers)
    given = tuple(column for column in columns if column not in numbers)
    limits = limits_of(schema, numbers)
    bounds = np.floor(uniform[:, : len(numbers)] * np.array(limits)).astype(np.int64)
    return Tested(Where(schema.sizes, given, numbers, limits, bounds))


def halfspaces(schema: Schema, *, count: int, seed: int, targets: tuple[str, ...]) -> tuple[Tested, ...]:
    """Returns random class conditional linear thresholds over all native numbers, a part for each target.

    theta_j normal with variance 1 / d for d numbers, tau standard normal, the target uniform, as in RAP++, section 5.
    """
    check_count(count)
    labels, numbers = [coded(schema, target) for target in targets], schema.numbers
    if not labels or not numbers:
        raise WorkloadError("halfspaces must have a target and native numbers: declare `native: true` for some columns")
    generator = np.random.default_rng(seed)
    theta = generator.standard_normal((count, len(numbers))) / math.sqrt(len(numbers))
    tau = generator.standard_normal(count)
    label = generator.integers(0, len(labels), count)
    limits = limits_of(schema, numbers)
    weights, bounds = rounded(theta, tau, limits)
    return tuple(
        Tested(Where(schema.sizes, (feature,), numbers, limits, bounds[label == index], weights[label == index]))
        for index, feature in enumerate(labels)
        if np.any(label == index)
    )


def rounded(theta: NDArray[np.float64], tau: NDArray[np.float64], limits: tuple[int, ...]) -> tuple[Integers, Integers]:
    """Returns the whole weights and bounds of halfspaces theta . x <= tau over codes."""
    scale = np.array(limits, np.float64)
    largest = max(float(np.abs(theta).sum(axis=1).max()), float(np.abs(tau).max()), 1.0)
    precision = 2.0 ** math.floor(math.log2(min(PRECISION, LARGEST_SUM / 4 / largest)))
    weights = np.rint(precision * theta / scale).astype(np.int64)
    offset = (theta / (2 * scale)).sum(axis=1)
    return weights, np.floor(precision * (tau - offset)).astype(np.int64)


def limits_of(schema: Schema, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many codes each column has without `missing`."""
    return tuple(schema.columns[number].regular for number in numbers)


def coded(schema: Schema, name: str) -> int:
    """Returns the index of a column that is not a native number."""
    feature = schema.index(name)
    if feature in schema.numbers:
        raise WorkloadError(f"target ({name!r}) must have categories: it is a native number")
    return feature


def check_count(count: int) -> None:
    """Refuses more tests than can be listed."""
    if not 1 <= count <= MOST_QUERIES:
        raise WorkloadError(f"count ({count}) must be from 1 to {MOST_QUERIES}")
