"""Independent: every column's own marginal, measured once; columns are taken as independent.

The model is the product of the fitted one-way marginals: the baseline that every other graphical model must beat.

    d marginals have L2 sensitivity sqrt(d), or sqrt(2 d) where rows are replaced: sigma = sqrt(d / (2 rho)).

Reference: the baseline "Independent" of McKenna et al. 2022 (AIM), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import ClassVar

from anamorph import progress
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import marginal_cells
from anamorph.errors import WorkloadError
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.graphical import Graphical
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Release

BASE_BYTES = 200 << 20
"""What a run needs besides its model."""


def estimator(made: Graphical) -> Graphical:
    """Returns the estimator of a mechanism alone."""
    return Graphical(**{item.name: getattr(made, item.name) for item in fields(Graphical)})


def asked(workload: Workload) -> dict[tuple[int, ...], Fraction]:
    """Returns the sets of columns that a workload asks about, and how much each matters; refuses other queries."""
    found: dict[tuple[int, ...], Fraction] = {}
    for index, part in enumerate(workload.parts):
        marginals = part.marginals if isinstance(part, Cells) else part
        if not isinstance(marginals, Marginals):
            raise WorkloadError(
                "the workload must be of marginals and thresholds: take auto for functions or for numbers"
            )
        weight = workload.weights[index] if workload.weights else Fraction(1)
        for features in marginals.sets:
            ordered = tuple(sorted(features))
            found[ordered] = found.get(ordered, Fraction(0)) + weight
    return found


def marginals(sizes: tuple[int, ...], *sets: tuple[int, ...]) -> Workload:
    """Returns the workload of some whole marginals."""
    return Workload((Marginals(sizes, sets),))


def one_way(sizes: tuple[int, ...]) -> Workload:
    """Returns the workload of every column's own marginal."""
    return marginals(sizes, *((feature,) for feature in range(len(sizes))))


def answer_bytes(workload: Workload) -> int:
    """Returns the bytes of the answers and counts that are held at a time."""
    largest = max(marginal_cells(workload.sizes, features) for features in asked(workload))
    return 64 * min(largest, workload.limit)


@dataclass(frozen=True, kw_only=True)
class Independent(Graphical):
    """Measures the one-way marginals; its parameters are those of the fit."""

    name: ClassVar[str] = "independent"

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement; refuses what a graphical model does not answer."""
        asked(workload)
        queries = one_way(workload.sizes)
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the measured marginals, and of a piece of answers."""
        return BASE_BYTES + 64 * sum(workload.sizes) + answer_bytes(workload)

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the product of the fitted one-way marginals."""
        self.steps_for(workload, curator.budget.rho)
        progress.report("measure", 0, 1)
        log = (curator.measure(one_way(curator.schema.sizes), rho=curator.remaining),)
        progress.report("measure", 1, 1)
        model = estimator(self).fit(self.init(curator.schema.sizes), log)
        return release(self, curator, workload, model, log)
