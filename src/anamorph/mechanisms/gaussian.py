"""The Gaussian mechanism: every answer of the workload with noise, and nothing else.

Over `blocks`, all whole marginals are measured jointly: m marginals have L2 sensitivity sqrt(m), or sqrt(2 m) where
rows are replaced, however many cells they have; thresholds are answered as sums of their cells. Query by query, as in
the papers (RAP, definition 2.9; each of the m queries with rho / m), the noise is sqrt(number of queries) large.

Deviation from the papers: noise is discrete, on exact counts (Canonne, Kamath & Steinke 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anamorph import progress
from anamorph.curator.curator import Curator
from anamorph.errors import WorkloadError
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.answers import from_measurements
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Release


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Measures the whole workload once."""

    name: ClassVar[str] = "gaussian"
    native: ClassVar[bool] = True
    blocks: bool = True
    """Whether whole marginals are measured, or single cells as in the papers."""

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement; refuses what noisy answers cannot be kept of."""
        if not all(
            isinstance(part, Marginals) or (isinstance(part, Cells) and part.chosen is None) for part in workload.parts
        ):
            raise WorkloadError(
                "the workload must be of whole marginals and thresholds: take auto for functions or for numbers"
            )
        queries = self.queries(workload)
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def queries(self, workload: Workload) -> Workload:
        """Returns what is measured: whole marginals, of which thresholds are sums, or every query on its own."""
        return workload.measured() if self.blocks else workload.by_cell()

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of exact counts, noise and noisy answers."""
        return 4 * 8 * self.queries(workload).cells

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the noisy answers."""
        self.steps_for(workload, curator.budget.rho)
        progress.report("measure", 0, 1)
        compose = "jointly" if self.blocks else "by block"
        measurement = curator.measure(self.queries(workload), rho=curator.remaining, compose=compose)
        progress.report("measure", 1, 1)
        model = from_measurements(curator.schema.sizes, (measurement,))
        return release(self, curator, workload, model, (measurement,))
