"""anamorph: answers to very large sets of statistical queries, and synthetic rows, under differential privacy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anamorph.archive import load, save
    from anamorph.columns import Categorical, Codes, Ordinal
    from anamorph.curator.budget import Budget
    from anamorph.curator.curator import Curator
    from anamorph.curator.ledger import Ledger
    from anamorph.mechanisms.mechanism import mechanism
    from anamorph.queries.spec import workload
    from anamorph.queries.workload import Workload
    from anamorph.ranges import Datetime, Numeric
    from anamorph.release import Measurement, Release
    from anamorph.schema import Schema
    from anamorph.sources import open_source
    from anamorph.synthesizer import Synthesizer

__version__ = "0.1.0"

_HOMES = {
    "Budget": "anamorph.curator.budget",
    "Categorical": "anamorph.columns",
    "Codes": "anamorph.columns",
    "Curator": "anamorph.curator.curator",
    "Datetime": "anamorph.ranges",
    "Ledger": "anamorph.curator.ledger",
    "Measurement": "anamorph.release",
    "Numeric": "anamorph.ranges",
    "Ordinal": "anamorph.columns",
    "Release": "anamorph.release",
    "Schema": "anamorph.schema",
    "Synthesizer": "anamorph.synthesizer",
    "Workload": "anamorph.queries.workload",
    "load": "anamorph.archive",
    "mechanism": "anamorph.mechanisms.mechanism",
    "open_source": "anamorph.sources",
    "save": "anamorph.archive",
    "workload": "anamorph.queries.spec",
}

__all__ = [
    "Budget",
    "Categorical",
    "Codes",
    "Curator",
    "Datetime",
    "Ledger",
    "Measurement",
    "Numeric",
    "Ordinal",
    "Release",
    "Schema",
    "Synthesizer",
    "Workload",
    "load",
    "mechanism",
    "open_source",
    "save",
    "workload",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    """Imports a name when it is first used, so that `import anamorph` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'anamorph' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
