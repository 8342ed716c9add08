"""Banding: a table with numbers, looked at as one of codes.

A number of a million steps has no marginals, but cut into bands it has. A banding says where each number is cut; what a
workload asks is asked of bands: marginals of bands of these, a prefix test of the bands of its numbers with what is
given, a halfspace of the bands of each two of its numbers. Besides, each number alone is cut more finely, in one level
or two: a sum over many fine bands has the noise of all of them, so few bands tell of slopes, and many of single values.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.bands import MOST_CELLS
from anamorph.errors import WorkloadError
from anamorph.queries.bands import Banded, merged_sizes
from anamorph.queries.marginals import MOST_MARGINALS, Cells, Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Queries, Workload
from anamorph.release import Measurement

Cuts = tuple[int, ...]
Features = tuple[int, ...]

FINEST = 1024
"""Into about how many bands a number alone is cut, at most."""

FINER = 8
"""Into how many each band is cut first, where it is cut twice."""


class Detail(NamedTuple):
    """What was measured of the fine bands of a number alone."""

    cuts: Cuts
    """Where they begin, but for the first."""
    values: NDArray[np.float64]
    """Their noisy fractions."""
    sigma: float
    """The standard deviation of each."""


@dataclass(frozen=True)
class Banding:
    """Where the numbers of a table are cut; a coded column is not."""

    sizes: tuple[int, ...]
    """The sizes of all columns of the schema."""
    cuts: Mapping[int, Cuts]
    """For each number the codes at which a new band begins."""
    levels: Mapping[int, tuple[Cuts, ...]]
    """The same for a number alone, ever finer: a band of a level is inside of one of the level before."""

    @cached_property
    def merged(self) -> tuple[int, ...]:
        """How many codes or bands each column has."""
        return merged_sizes(self.sizes, self.per_column(self.cuts))

    @cached_property
    def alone(self) -> tuple[dict[int, Cuts], ...]:
        """Where numbers alone are cut, level by level: those that have so many."""
        deepest = max(map(len, self.levels.values()), default=0)
        return tuple(
            {n: cuts[level] for n, cuts in self.levels.items() if level < len(cuts)} for level in range(deepest)
        )

    def per_column(self, cuts: Mapping[int, Cuts]) -> tuple[Cuts, ...]:
        """Returns the cuts of each column, none for a coded one."""
        return tuple(cuts.get(column, ()) for column in range(len(self.sizes)))

    def merge(self, workload: Workload) -> Workload:
        """Returns the marginals of codes and bands that tell what a workload asks for; thresholds may stay such."""
        return replace(workload, parts=tuple(map(self.told, workload.parts))) if self.cuts else workload

    def told(self, part: Queries) -> Marginals:
        """Returns the marginals that tell of a part of a workload; thresholds, of codes alone, if none is too large."""
        sets = tuple(dict.fromkeys(inner for sets in sets_of(part) for inner in self.within(sets)))
        if isinstance(part, Thresholds) and sets == part.sets:
            return replace(part, sizes=self.merged)
        return Marginals(self.merged, sets)

    def within(self, features: Features) -> Iterator[Features]:
        """Returns the sets of as many of some columns as a marginal of bands may have cells for: all, as a rule."""
        largest = sorted((self.merged[feature] for feature in features), reverse=True)
        cells = enumerate(itertools.accumulate(largest, operator.mul), 1)
        few = [n for n, most in cells if most <= MOST_CELLS and math.comb(len(features), n) <= MOST_MARGINALS]
        return itertools.combinations(features, max(few))

    def measured(self, queries: Workload) -> Workload:
        """Returns how marginals of codes and bands are measured in the table, and each number alone, finely.

        The latter weigh as much as single columns do.
        """
        if not self.cuts:
            return queries
        weights = list(queries.weights or (Fraction(1),) * len(queries.parts))
        parts = [Banded(self.sizes, sets_of(part), self.per_column(self.cuts)) for part in queries.parts]
        of_single = (w for part, w in zip(parts, weights, strict=True) if any(len(sets) == 1 for sets in part.sets))
        weights += [next(of_single, weights[-1])] * len(self.alone)
        parts += [Banded(self.sizes, tuple((n,) for n in cuts), self.per_column(cuts)) for cuts in self.alone]
        return Workload(tuple(parts), weights=tuple(weights), limit=queries.limit)

    def seen(self, queries: Workload, measurement: Measurement) -> Measurement:
        """Returns what was measured of marginals of codes and bands."""
        if not self.cuts:
            return measurement
        values, sigma = measurement.values[: queries.cells], measurement.sigma[: queries.blocks]
        return replace(measurement, workload=queries, values=values, sigma=sigma)

    def details(self, queries: Workload, measurement: Measurement) -> dict[int, list[Detail]]:
        """Returns what was measured of each number alone, level by level."""
        found: dict[int, list[Detail]] = {number: [] for number in self.cuts}
        first, sigma = queries.cells, iter(measurement.sigma[queries.blocks :].tolist())
        for number, cuts in (item for level in self.alone for item in level.items()):
            values = measurement.values[first : first + len(cuts) + 1]
            found[number].append(Detail(cuts, values, next(sigma)))
            first += values.size
        return found


def banding(sizes: tuple[int, ...], limits: Mapping[int, int], workload: Workload, bands: int) -> Banding:
    """Returns where to cut numbers, each of so many codes without `missing`, into about so many bands.

    Where a workload has bands of its own, these stay as they are; if it tests the same number otherwise, too, they are
    divided, each into as many as come nearest to that number.
    """
    asked: dict[int, set[int]] = {number: set() for number in limits}
    tested: set[int] = set()
    for part in workload.parts:
        if isinstance(part, Tested):
            tested |= set(part.tally.numbers)
        elif isinstance(part, Banded):
            for number in {feature for features in part.sets for feature in features} & asked.keys():
                asked[number] |= set(part.cuts[number]) or set(range(1, limits[number]))
    cuts, levels = {}, {}
    for number, limit in limits.items():
        missing = (limit,) if sizes[number] > limit else ()
        own = tuple(sorted(cut for cut in asked[number] if cut < limit))
        coarse = own if own and number not in tested else divided(own, limit, bands)
        cuts[number] = (*coarse, *missing)
        levels[number] = tuple((*each, *missing) for each in finer(coarse, limit))
    return Banding(sizes, cuts, levels)


def finer(cuts: Cuts, limit: int) -> Iterator[Cuts]:
    """Yields finer cuts: into `FINER` times as many bands where `FINEST` would be far more, then into those."""
    bands = len(cuts) + 1
    between = divided(cuts, limit, FINER * bands) if 2 * FINER * bands < min(FINEST, limit) else cuts
    finest = divided(between, limit, FINEST)
    yield from (each for each in dict.fromkeys((between, finest)) if each != cuts)


def divided(cuts: Sequence[int], limit: int, bands: int) -> Cuts:
    """Returns cuts of the codes below a limit, and more, so that each band is divided into as many of equal width."""
    parts = max(1, round(bands / (len(cuts) + 1)))
    found = set(cuts)
    for low, high in itertools.pairwise((0, *cuts, limit)):
        found |= {low + -(-index * (high - low) // parts) for index in range(1, parts)}
    return tuple(sorted(found - {0, limit}))


def sets_of(part: Queries) -> tuple[Features, ...]:
    """Returns the columns of the marginals that tell what a part of a workload asks for."""
    if isinstance(part, Marginals | Banded):
        return part.sets
    if isinstance(part, Cells):
        return part.marginals.sets
    if not isinstance(part, Tested):
        raise WorkloadError(
            "a workload over a table with native numbers must be of marginals, thresholds, bands and tests of numbers"
        )
    given, numbers = part.tally.given, part.tally.numbers
    if part.tally.weights is None or len(numbers) == 1:
        return (tuple(sorted((*given, *numbers))),)
    return tuple(tuple(sorted((*given, *pair))) for pair in itertools.combinations(numbers, 2))
