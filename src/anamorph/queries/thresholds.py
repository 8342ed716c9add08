"""r-of-k thresholds: for a set S of k features and a value for each, how many rows agree in at least r of them.

With r = k this is a k-way marginal, with r = 1 a disjunction. The queries of one S are as many as the cells of its
marginal, and named by the same positions. They overlap, but each is a sum of cells of the marginal over S: so where
whole blocks are measured, marginals are (`measured`), whose noise does not grow with the number of thresholds.

References: Aydore et al. 2021, definition D.1; the large-scale study's definition of r-of-k thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import AtLeast, GroupBy, Tally, Tests
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals


@dataclass(frozen=True)
class Thresholds(Marginals):
    """Whole thresholds: block i is one query for every cell of the marginal over `sets[i]`."""

    least: int = 1
    """r."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(1 <= self.least <= len(features) for features in self.sets):
            raise WorkloadError(f"r ({self.least}) must be from 1 to k, the number of columns of a threshold")

    def tally(self, slab: GroupBy) -> Tally:
        """Returns how the queries of a slab are counted; as a marginal where all features must agree."""
        return slab if self.least == len(slab.features) else AtLeast(slab, self.least)

    def tests(self, which: NDArray[np.int64], positions: NDArray[np.int64]) -> Tests:
        """Returns the tally of single thresholds: of which block, and at which position of it."""
        tests = super().tests(which, positions)
        return replace(tests, least=(self.least,) * len(tests.sets))
