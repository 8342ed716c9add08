"""Fitting: one private release from start to end, in the order that spends nothing in vain.

Everything that can be refused is refused first: parameters and workload (nothing was read), output and ledger (nothing
was spent), structure of the data (nothing was spent). Then the run begins, is charged step by step, and the release is
on disk before the ledger is told that the run is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anamorph import archive, progress
from anamorph.curator.budget import Budget, Relation
from anamorph.curator.curator import Curator, check_request
from anamorph.curator.ledger import Ledger
from anamorph.errors import ParameterError
from anamorph.mechanisms.mechanism import Mechanism, description
from anamorph.planning import Memory, available_memory, check_numbers, check_steps, divide
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.release import Release
from anamorph.schema import Schema
from anamorph.sources import open_source

DEFAULT_LEDGER = Path("anamorph.ledger")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All that one run is asked to do; every field is public but the data."""

    data: Any
    schema: Schema
    workload: str
    mechanism: Mechanism
    budget: Budget
    neighbours: Relation = "replace"
    ledger: Path | None = DEFAULT_LEDGER
    """Where spends are kept; None keeps them nowhere."""
    output: Path | None = None
    overwrite: bool = False
    resume: bool = False
    memory: int | None = None
    """How many bytes the run may use; None for all that the machine has."""
    seed: int = 0
    """The seed of the public side: projection and rounding."""
    unsafe_seed: int | None = None
    """A seed for the noise: NOT PRIVATE, and no ledger is touched."""

    @property
    def terms(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it continues."""
        return {
            "mechanism": description(self.mechanism),
            "workload": self.workload,
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "seed": self.seed,
        }

    def check(self) -> Workload:
        """Returns the workload, after all checks that need no private data and spend nothing."""
        check_request(self.schema, self.neighbours)
        workload = parse_workload(self.workload, self.schema)
        check_numbers(self.schema, self.mechanism)
        steps = self.mechanism.steps_for(workload, self.budget.rho)
        workload = replace(workload, limit=self.divided(workload).pieces)
        check_steps(steps, self.neighbours)
        if self.output is not None:
            archive.check_target(self.output, overwrite=self.overwrite)
            if self.ledger is not None and self.ledger.absolute() == self.output.absolute():
                raise ParameterError(f"output ({str(self.output)!r}) must not be the ledger: name another")
        ledger = self.open_ledger(workload)
        if ledger is not None:
            name, schema = self.schema.dataset, self.schema.fingerprint
            ledger.check_terms(name, relation=self.neighbours, schema=schema)
            if not self.resume:
                ledger.check(name, terms=self.terms, rho=self.budget.rho)
        return workload

    def divided(self, workload: Workload) -> Memory:
        """Returns how the run divides its memory; refuses one that does not fit."""
        return divide(available_memory() if self.memory is None else self.memory, self.mechanism, workload)

    def open_ledger(self, workload: Workload) -> Ledger | None:
        """Returns where spends are kept; None for a run that pays for nothing, because it is seeded or asks nothing."""
        free = self.unsafe_seed is not None or not self.mechanism.steps_for(workload, self.budget.rho)
        return None if self.ledger is None or free else Ledger(self.ledger)


def run(fit: Fit, said: Callable[[str], None] = lambda _: None) -> Release:
    """Returns the release, saved where the fit says; `said` gets public remarks for people."""
    workload = fit.check()
    warned = fit.budget.warnings(None)
    for warning in warned:
        said(warning)
    progress.report("read", 0, 1)
    engine = f"{max(fit.divided(workload).engine >> 20, 1)}MiB"
    with open_source(fit.data, fit.schema, memory_limit=engine) as source:
        progress.report("read", 1, 1)
        if source.ignored:
            said(f"columns not in the schema are ignored: {', '.join(map(repr, source.ignored))}")
        curator = Curator(
            source,
            fit.budget,
            neighbours=fit.neighbours,
            ledger=fit.open_ledger(workload),
            terms=fit.terms,
            resume=fit.resume,
            unsafe_seed=fit.unsafe_seed,
        )
        release = fit.mechanism(curator, workload, seed=fit.seed)
        for warning in fit.budget.warnings(round(release.total) or None):
            if warning not in warned:
                said(warning)
        if fit.output is None:
            curator.finish("not saved")
        else:
            curator.finish(archive.save(release, fit.output, overwrite=fit.overwrite))
    return release
