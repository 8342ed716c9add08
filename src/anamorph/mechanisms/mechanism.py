"""What mechanisms share: the protocol, the names, and how a mechanism says what it will do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, get_type_hints

from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError, suggestion
from anamorph.models.model import Model
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release


@dataclass(frozen=True)
class Step:
    """One planned spend: what for, its rho, and the blocks and queries that it measures or selects among."""

    kind: str
    rho: float
    blocks: int
    cells: int
    selected: int = 0
    """How many blocks a selection takes."""
    workload: Workload | None = None
    """What a measurement asks for, where that is known beforehand."""


class Mechanism(Protocol):
    """A short program that talks to a curator: a frozen dataclass whose fields are its parameters."""

    name: ClassVar[str]
    # Planning reads two more, where they are there: a class variable `native`, if true, says that columns of native
    # numbers do no harm; a method `for_schema` returns the mechanism that plans for a schema.

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the planned spends; refuses parameters that do not fit the workload. Reads nothing private."""
        ...

    def memory(self, workload: Workload) -> int:
        """Returns an estimate of the bytes that the run needs."""
        ...

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the release."""
        ...


NAMES = {
    "aim": ("anamorph.mechanisms.aim", "AIM"),
    "all-zero": ("anamorph.mechanisms.all_zero", "AllZero"),
    "auto": ("anamorph.mechanisms.auto", "Auto"),
    "dp-merf": ("anamorph.mechanisms.dp_merf", "DPMERF"),
    "dqrs": ("anamorph.mechanisms.dqrs", "DQRS"),
    "dualquery": ("anamorph.mechanisms.dual_query", "DualQuery"),
    "fem": ("anamorph.mechanisms.fem", "FEM"),
    "gaussian": ("anamorph.mechanisms.gaussian", "Gaussian"),
    "gem": ("anamorph.mechanisms.gem", "GEM"),
    "hdmm": ("anamorph.mechanisms.hdmm", "HDMM"),
    "independent": ("anamorph.mechanisms.independent", "Independent"),
    "mst": ("anamorph.mechanisms.mst", "MST"),
    "mwem": ("anamorph.mechanisms.mwem", "MWEM"),
    "mwem-pgm": ("anamorph.mechanisms.mwem_pgm", "MWEMPGM"),
    "rap": ("anamorph.mechanisms.rap", "RAP"),
    "rap++": ("anamorph.mechanisms.rap_plus_plus", "RAPPlusPlus"),
    "sepfem": ("anamorph.mechanisms.sep_fem", "SepFEM"),
}


def mechanism(name: str, settings: Mapping[str, str] | None = None) -> Mechanism:
    """Returns the mechanism of a name, with some of its parameters set from text."""
    if name not in NAMES:
        raise ParameterError(f"mechanism ({name!r}) must be one of {', '.join(NAMES)}.{suggestion(name, NAMES)}")
    module, kind = NAMES[name]
    made = getattr(importlib.import_module(module), kind)
    hints = get_type_hints(made)
    known = [field.name for field in fields(made)]
    values: dict[str, Any] = {}
    for key, text in (settings or {}).items():
        if key not in known:
            raise ParameterError(f"setting ({key!r}) must be one of {', '.join(known)}.{suggestion(key, known)}")
        values[key] = from_text(key, text, hints[key])
    return made(**values)


def from_text(name: str, text: str, kind: object) -> Any:  # noqa: ANN401 - whatever the field holds
    """Returns the value that a text stands for, by the type of the field."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ParameterError(f"{name} ({text!r}) must be true or false")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            rule = "a whole number" if kind is int else "a number"
            raise ParameterError(f"{name} ({text!r}) must be {rule}") from None
    return text


def release(
    made: Mechanism, curator: Curator, workload: Workload, model: Model, log: tuple[Measurement, ...] = ()
) -> Release:
    """Returns the release of a run: the model, what it was made from, what it cost, and by which parameters."""
    total = curator.total  # where it is private it is measured and charged now, before the spends are listed
    degraded = bool(getattr(model, "degraded", False))
    privacy = curator.privacy()
    return Release(curator.schema, model, log, privacy, total, description(made), workload.spec, degraded)


def description(made: Mechanism) -> dict[str, Any]:
    """Returns the name and the parameters of a mechanism, for the release and the ledger."""
    return {"name": made.name} | {field.name: getattr(made, field.name) for field in fields(made)}  # pyright: ignore
