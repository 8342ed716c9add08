"""RAP++: relaxed adaptive projection of rows with numbers, onto marginals and tests of numbers.

The workload has two classes: marginals of coded columns (CM in the paper), and tests of numbers (LT, MM). Each has
rounds of its own: the K worst answered blocks of the class are selected privately, measured, and mixed rows
(models/mixed.py) are fitted to all measurements of both classes so far, numbers by an annealed sigmoid.

    rho_t = rho / (T_CM + T_LT) a round, the share a for selection and 1 - a for measurement:
    Gumbel scale beta = Delta sqrt(K / (2 a rho_t)), noise sigma = Delta_2 sqrt(K / (2 (1 - a) rho_t)), in counts,

with Delta = 1 or 2 (L1 error), Delta_2 = 1 or sqrt 2 for a block, whole marginals and tests alike: a test comes with
all values of its label, of which a row has one.

Reference: Vietri et al. 2022, algorithm 2; T_LT = 50, K = 10, T_CM one less than the coded columns.
Deviations: blocks, not single queries, are selected and measured, none twice, and none is measured anew in a later
round (the published code draws new noise for the whole history each round); rho follows from (epsilon, delta) by the
tight conversion; noise is discrete, on exact counts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from anamorph import progress
from anamorph.curator.budget import proportional
from anamorph.curator.curator import Curator
from anamorph.curator.scores import L1Error
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.adaptive import Round
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.mixed import Columns, MixedProjection
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release


@dataclass(frozen=True, kw_only=True)
class RAPPlusPlus(MixedProjection):
    """RAP++'s own parameters; the others are those of the projection."""

    name: ClassVar[str] = "rap++"
    native: ClassVar[bool] = True
    rounds: int = 50
    """T_LT, the rounds of tests."""
    marginal_rounds: int = 0
    """T_CM, the rounds of marginals; 0 takes one less than the coded columns."""
    per_round: int = 10
    """K, the blocks of a round; fewer where a class has not enough."""
    split: float = 0.5
    """a, the share of a round's budget that pays for the selection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rounds", 1), ("marginal_rounds", 0), ("per_round", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParameterError(f"{name} ({value!r}) must be a whole number of at least {least}")
        if not 0 < self.split < 1:
            raise ParameterError(f"split ({self.split!r}) must be in (0, 1)")

    def classes(self, workload: Workload) -> list[tuple[Workload, int, int]]:
        """Returns the marginals and the tests of a workload, with the rounds and the blocks a round of each."""
        if not all(isinstance(part, Marginals | Tested) for part in workload.parts):
            raise WorkloadError("the workload must be of whole marginals, thresholds and tests of numbers")
        found = []
        for kind, rounds in ((Marginals, self.marginal_rounds), (Tested, self.rounds)):
            parts = tuple(part for part in workload.parts if isinstance(part, kind))
            if parts:
                queries = Workload(parts, limit=workload.limit).measured()
                columns = {
                    feature for part in queries.parts if isinstance(part, Marginals) for f in part.sets for feature in f
                }
                times = min(rounds or max(len(columns) - 1, 1), queries.blocks)
                found.append((queries, times, min(self.per_round, queries.blocks // times)))
        return found

    def plan(self, workload: Workload, rho: float) -> list[tuple[Workload, Round]]:
        """Returns the rounds: of marginals, then of tests, all with the same budget."""
        kinds = [(queries, k) for queries, rounds, k in self.classes(workload) for _ in range(rounds)]
        budgets = proportional(rho, [1.0] * len(kinds))
        return [(queries, Round(rho=b, k=k, split=self.split)) for (queries, k), b in zip(kinds, budgets, strict=True)]

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the rounds; refuses queries of other classes."""
        steps: tuple[Step, ...] = ()
        for queries, planned in self.plan(workload, rho):
            selection, measurement = planned.shares()
            steps += (Step("select", selection, queries.blocks, queries.cells, planned.k),)
            steps += (Step("measure", measurement, planned.k, planned.k * queries.largest_block),)
        return steps

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of rows, of what is measured, and of counts and answers of a class."""
        measured = sum(step.cells for step in self.steps_for(workload, 1.0) if step.kind == "measure")
        held = max(queries.cells for queries, *_ in self.classes(workload))
        return (
            (450 << 20) + 12 * 4 * self.rows * 4096 + 48 * measured + 8 * self.rows * min(measured, 1 << 16) + 64 * held
        )

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns mixed rows fitted to the measurements."""
        self.steps_for(workload, curator.budget.rho)
        schema = curator.schema
        columns = Columns(schema.sizes, schema.numbers, tuple(schema.columns[n].regular for n in schema.numbers))
        estimator = projection(self)
        model = estimator.begin(columns, seed=seed)
        log: tuple[Measurement, ...] = ()
        plan = self.plan(workload, curator.remaining)
        taken: dict[int, list[int]] = {}
        for step, (queries, planned) in enumerate(plan):
            progress.report("round", step, len(plan))
            selection, measurement = planned.shares()
            mine = taken.setdefault(id(queries), [])
            chosen = curator.select(
                queries, model.answers(queries), rho=selection, k=planned.k, score=L1Error(), exclude=mine
            )
            log += (curator.measure(queries.take(np.sort(chosen)), rho=measurement),)
            mine += chosen.tolist()
            model = estimator.fit(model, log)
        progress.report("round", len(plan), len(plan))
        return release(self, curator, workload, model, log)


def projection(made: RAPPlusPlus) -> MixedProjection:
    """Returns the estimator alone."""
    values: dict[str, Any] = {item.name: getattr(made, item.name) for item in fields(MixedProjection)}
    return MixedProjection(**values)
