"""RAP: relaxed adaptive projection.

In each of T rounds the K worst answered queries are selected privately, measured, and a table of relaxed rows is
projected onto all measurements so far. With T = 1 there is nothing to adapt to: everything is measured, and projected
once.

    rho_t proportional to g^t, the share a for selection and 1 - a for measurement, shared by the round's K blocks:
    Gumbel scale beta = Delta sqrt(K / (2 a rho_t)), noise sigma = Delta_2 / sqrt(2 (1 - a) rho_t), in counts.

Selection among m queries finds no error much below beta ln m, while K measured answers are off by about sigma: with
millions of queries selection is the bottleneck, so a is above one half. The first rounds face errors near 1, which any
budget finds; the last ones the small errors that are left: so budgets grow. And nearly all of the m queries are
combinations of rare values, whose answers and errors are near 0: a public prior that leans to combinations of values
which the table holds popular spares the selection most of their noise, at no cost (see `Curator.select`).

With `blocks`, whole marginals are selected (by L1 error) and measured; without, single queries as in the papers.

References: Aydore et al. 2021, algorithm 2; one-shot selection, the large-scale study's algorithm OSAS.
Deviations: rho follows from (epsilon, delta) by the tight conversion; a is 0.65, not 1/2, and g 1.3, not 1; the
selection has a prior; noise is discrete, on exact counts; cells of one marginal measured in one round share its
sensitivity, so sigma is at most the papers'; a measurement weighs 1 / sigma^2 in the projection.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np

from anamorph import progress
from anamorph.curator.budget import proportional
from anamorph.curator.candidates import LARGEST_SHARE, Prior
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable
from anamorph.curator.scores import AbsoluteError, L1Error
from anamorph.errors import ParameterError, WorkloadError, require_positive
from anamorph.mechanisms.adaptive import Round, adaptive
from anamorph.mechanisms.independent import asked
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.generator import Generator
from anamorph.models.model import Estimator
from anamorph.models.relaxed import RelaxedProjection, RelaxedRows
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.strategies import Objective, strategy
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release

TableT = TypeVar("TableT", RelaxedRows, Generator)
"""A model that is a table of relaxed rows."""


@dataclass(frozen=True, kw_only=True)
class RAP(RelaxedProjection):
    """RAP's own parameters; the others are those of the projection."""

    name: ClassVar[str] = "rap"
    rounds: int = 16
    """T."""
    per_round: int = 16
    """K; not used when T = 1."""
    blocks: bool = False
    """Whether whole marginals are selected and measured, or single queries."""
    order: int = 0
    """The most columns of a marginal that is measured whole; those of larger blocks are replaced by theirs. 0: any."""
    budgets: Literal["equal", "total", "max"] = "equal"
    """Where all is measured at once: the same noise for all marginals, or that of the best strategy (strategies.py)."""
    split: float = 0.65
    """a, the share of a round's budget that pays for the selection."""
    growth: float = 1.3
    """g, the budget of a round over that of the round before; beyond 16 rounds it grows more slowly, as much in all."""
    prior: float = 0.5
    """p, how much the selection of single queries leans to combinations of values that the table holds popular."""
    steps: int = 500
    """The most Adam steps of one round. (The paper: 5000.)"""
    simplex: Literal["auto", "sparsemax", "softmax"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """How free numbers become probabilities; auto takes softmax for single queries, sparsemax for whole marginals."""
    rate: float = 0.0
    """Adam's learning rate; 0 takes 0.03 for whole marginals, and for single queries 0.01 (sparsemax: 0.001)."""

    def __post_init__(self) -> None:
        self.projection()
        require_positive("rounds", self.rounds)
        require_positive("per_round", self.per_round)
        if self.budgets not in ("equal", *get_args(Objective)):
            raise ParameterError(f"budgets ({self.budgets!r}) must be equal, total or max")
        if self.budgets != "equal" and self.rounds > 1:
            raise ParameterError(f"budgets ({self.budgets!r}) must be equal where there are several rounds")
        if self.order < 0:
            raise ParameterError(f"order ({self.order!r}) must be at least 0")
        if not 0 < self.split < 1:
            raise ParameterError(f"split ({self.split!r}) must be in (0, 1)")
        if not 0 <= self.prior <= LARGEST_SHARE:
            raise ParameterError(f"prior ({self.prior!r}) must be from 0 to {LARGEST_SHARE}")
        if not 1 <= self.growth <= 10:
            raise ParameterError(f"growth ({self.growth!r}) must be in [1, 10]")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the rounds; refuses more selections than there are queries."""
        queries = self.queries(workload)
        if self.rounds == 1:
            return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)
        if self.blocks and not all(isinstance(part, Marginals) or part.largest_block == 1 for part in queries.parts):
            raise WorkloadError(
                "the workload must be of marginals and thresholds where whole blocks are selected: set blocks=false, "
                "or rounds=1 to measure everything"
            )
        if self.rounds * self.per_round > queries.blocks:
            kind = "marginals" if self.blocks else "queries"
            raise WorkloadError(
                f"rounds * per_round ({self.rounds * self.per_round}) must be at most {queries.blocks}, the number of "
                f"{kind} of the workload: set fewer rounds, or rounds=1 to measure everything"
            )
        cells = self.per_round * queries.largest_block
        steps: tuple[Step, ...] = ()
        for planned in self.plan(rho):
            selection, measurement = planned.shares()
            steps += (Step("select", selection, queries.blocks, queries.cells, self.per_round),)
            steps += (Step("measure", measurement, self.per_round, cells),)
        return steps

    def plan(self, rho: float) -> tuple[Round, ...]:
        """Returns the rounds: their budgets grow by a constant factor, and never exceed rho together."""
        factor = self.growth ** (min(self.rounds - 1, 15) / (self.rounds - 1))
        budgets = proportional(rho, [factor**step for step in range(self.rounds)])
        return tuple(Round(rho=budget, k=self.per_round, split=self.split) for budget in budgets)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the parameters, their optimiser and gradient; of what is measured; of a selection.

        A selection among blocks holds a piece of answers, one among single queries a share of their strata; both hold
        counts. What they hold is bounded, and less for a small workload.
        """
        table = 4 * sum(workload.sizes) * self.rows
        queries = self.queries(workload)
        planned = sum(step.cells for step in self.steps_for(workload, 1.0) if step.kind == "measure")
        measured = min(planned, queries.cells)  # no block is measured twice
        held = 48 * min(queries.largest_block, workload.limit) if queries.blocks < queries.cells else 384 << 20
        counts = 256 << 20
        return (450 << 20) + 12 * table + 48 * measured + min(held + counts, 256 * queries.cells)

    def queries(self, workload: Workload) -> Workload:
        """Returns the workload in the blocks that are selected and measured; refuses tests and bands of numbers."""
        if any(isinstance(part, Tested | Banded) for part in workload.parts):
            raise WorkloadError("the workload must be of marginals, thresholds and functions: take auto for numbers")
        queries = workload.measured(self.order) if self.blocks or self.rounds == 1 else workload.by_cell()
        return queries if self.budgets == "equal" else planned(queries, self.budgets)

    def projection(self) -> RelaxedProjection:
        """Returns the estimator alone, so that runs that differ in T and K share its compiled steps."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(RelaxedProjection)}
        whole = self.blocks or self.rounds == 1
        if self.simplex == "auto":
            values["simplex"] = "sparsemax" if whole else "softmax"
        values["rate"] = self.rate or (0.03 if whole else 0.01 if values["simplex"] == "softmax" else 0.001)
        return RelaxedProjection(**values)

    def compare(self, queries: Workload, model: RelaxedRows | Generator) -> tuple[RelaxedTable, Prior | None]:
        """Returns what a selection of single queries compares with: the table, and its popular cells as the prior."""
        return model.estimate(queries), Prior(self.prior, np.clip(model.popular(), 0, 1)) if self.prior else None

    def run(
        self, curator: Curator, workload: Workload, estimator: Estimator[TableT], *, seed: int
    ) -> tuple[TableT, tuple[Measurement, ...]]:
        """Returns the model that the rounds lead to with an estimator, RAP's own or another, and the measurements."""
        queries = self.queries(workload)
        if self.rounds == 1:
            progress.report("measure", 0, 1)
            log = (curator.measure(queries, rho=curator.remaining),)
            progress.report("measure", 1, 1)
            return estimator.fit(estimator.init(curator.schema.sizes, seed=seed), log, seed=seed), log
        score, plan = L1Error() if self.blocks else AbsoluteError(), self.plan(curator.remaining)
        compare = None if self.blocks else partial(self.compare, queries)
        return adaptive(curator, queries, estimator, plan, score=score, seed=seed, compare=compare)

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns relaxed rows fitted to the measurements."""
        self.steps_for(workload, curator.budget.rho)
        model, log = self.run(curator, workload, self.projection(), seed=seed)
        return release(self, curator, workload, model, log)


def planned(queries: Workload, objective: Objective) -> Workload:
    """Returns the marginals inside those of a workload, each with the share of the budget that is best for it.

    What is minimised is the variance of the least squares answers: their total, or the largest.
    """
    wanted = {features: float(weight) for features, weight in asked(queries).items()}
    return strategy(queries.sizes, wanted, residuals=False, objective=objective).workload()
