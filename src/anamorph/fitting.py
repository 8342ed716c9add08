"""Fitting: one private release, or one estimate for a schema, from start to end; nothing is spent in vain.

Everything that can be refused is refused first: parameters and workload (nothing was read), output and ledger (nothing
was spent), structure of the data (nothing was spent). Then the run begins, is charged step by step, and the release is
on disk before the ledger is told that the run is over.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anamorph import archive, progress
from anamorph.compilation import forget_compiled, keep_compiled
from anamorph.curator.budget import Budget, Relation
from anamorph.curator.curator import Curator, check_request
from anamorph.curator.ledger import Ledger
from anamorph.errors import ParameterError, ResourceError
from anamorph.mechanisms.mechanism import Mechanism, description
from anamorph.planning import Memory, available_memory, check_numbers, check_steps, divide, suited
from anamorph.processors import use_cores
from anamorph.quantiles import Quantiles
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.release import Release
from anamorph.schema import Schema
from anamorph.sources import open_source
from anamorph.tables import replace_file

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
        } | ({"knots": self.schema.knots} if self.schema.knots else {})

    @property
    def planned(self) -> Mechanism:
        """The mechanism that says what the run will do."""
        return suited(self.mechanism, self.schema)

    def check(self) -> Workload:
        """Returns the workload, after all checks that need no private data and spend nothing."""
        check_request(self.schema, self.neighbours)
        self.schema.require_knots()
        workload = parse_workload(self.workload, self.schema)
        check_numbers(self.schema, self.mechanism)
        steps = self.planned.steps_for(workload, self.budget.rho)
        workload = replace(workload, limit=self.divided(workload).pieces)
        check_steps(steps, self.neighbours)
        if self.output is not None:
            archive.check_target(self.output, overwrite=self.overwrite)
        check_account(self, self.open_ledger(workload))
        return workload

    def divided(self, workload: Workload) -> Memory:
        """Returns how the run divides its memory; refuses one that does not fit."""
        return divide(available_memory() if self.memory is None else self.memory, self.planned, workload)

    def open_ledger(self, workload: Workload) -> Ledger | None:
        """Returns where spends are kept; None for a run that pays for nothing, because it is seeded or asks nothing."""
        free = self.unsafe_seed is not None or not self.planned.steps_for(workload, self.budget.rho)
        return None if self.ledger is None or free else Ledger(self.ledger)


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """All that an estimate of knots is asked to do; every field is public but the data."""

    data: Any
    schema: Schema
    quantiles: Quantiles
    budget: Budget
    neighbours: Relation = "replace"
    ledger: Path | None = DEFAULT_LEDGER
    output: Path | None = None
    """The schema file to write."""
    overwrite: bool = False
    resume: bool = False

    @property
    def terms(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it continues."""
        names = [self.schema.names[number] for number in self.quantiles.numbers(self.schema)]
        asked = {"estimate": "quantiles", "columns": names, "knots": self.quantiles.knots}
        return asked | {"epsilon": self.budget.epsilon, "delta": self.budget.delta}

    def check(self) -> Schema:
        """Returns the schema to count with, after all checks that need no private data and spend nothing."""
        check_request(self.schema, self.neighbours)
        prepared = self.quantiles.prepared(self.schema)
        check_steps(self.quantiles.steps(prepared, self.budget.rho), self.neighbours)
        if self.output is not None:
            check_file(self.output, overwrite=self.overwrite)
        check_account(self, None if self.ledger is None else Ledger(self.ledger))
        return prepared


def check_account(request: Fit | Estimation, ledger: Ledger | None) -> None:
    """Refuses what the ledger would refuse, and an output in its place; nothing is written."""
    named, kept = request.output, request.ledger
    if named is not None and kept is not None and kept.absolute() == named.absolute():
        raise ParameterError(f"output ({str(named)!r}) must not be the ledger: name another")
    if ledger is not None:
        name, schema = request.schema.dataset, request.schema.fingerprint
        ledger.check_terms(name, relation=request.neighbours, schema=schema)
        if not request.resume:
            ledger.check(name, terms=request.terms, rho=request.budget.rho)


def check_file(path: Path, *, overwrite: bool) -> None:
    """Refuses, before anything is spent, a file that could not be written."""
    if path.is_dir() or (path.exists() and not overwrite):
        raise ParameterError(f"output ({str(path)!r}) must not exist yet: name another, or add --overwrite")
    probe = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ResourceError(f"output ({str(path)!r}) cannot be written: {error.strerror}") from None


def estimate(request: Estimation, said: Callable[[str], None] = lambda _: None) -> tuple[Schema, str]:
    """Returns the schema with knots, written where the request says, and the promise in words."""
    prepared = request.check()
    warned = request.budget.warnings(None)
    for warning in warned:
        said(warning)
    with open_source(request.data, prepared, memory_limit=f"{max(available_memory() >> 22, 1)}MiB") as source:
        if source.ignored:
            said(f"columns not in the schema are ignored: {', '.join(map(repr, source.ignored))}")
        curator = Curator(
            source,
            request.budget,
            neighbours=request.neighbours,
            ledger=None if request.ledger is None else Ledger(request.ledger),
            terms=request.terms,
            resume=request.resume,
        )
        found = request.quantiles(curator)
        for warning in request.budget.warnings(round(curator.total) or None):
            if warning not in warned:
                said(warning)
        promise = curator.privacy().statement()
        if request.output is None:
            curator.finish("not saved")
        else:
            text = f"# {remark(request, curator)}\n{found.to_yaml()}"
            write = partial(Path.write_text, data=text, encoding="utf-8")
            replace_file(request.output, overwrite=request.overwrite, write=write)
            curator.finish(hashlib.sha256(text.encode()).hexdigest())
    return found, promise


def remark(request: Estimation, curator: Curator) -> str:
    """Returns, on one line, which knots of a schema were estimated and what they cost."""
    spent = curator.privacy()
    names = json.dumps(request.terms["columns"])  # escapes whatever would end a line
    return (
        f"knots of {names}: ({spent.epsilon:g}, {spent.delta:g})-differentially private, rho {spent.spent:.6g}, "
        f"neighbours {spent.neighbours}, charged to the account of the dataset"
    )


def run(fit: Fit, said: Callable[[str], None] = lambda _: None) -> Release:
    """Returns the release, saved where the fit says; `said` gets public remarks for people."""
    workload = fit.check()
    warned = fit.budget.warnings(None)
    for warning in warned:
        said(warning)
    keep_compiled()
    forget_compiled()
    use_cores()
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
