"""The exceptions of anamorph, one tree; each class knows the exit code of the command line.

    AnamorphError
    ├── UsageError            2   nothing was read, nothing was spent
    │   ├── SchemaError
    │   ├── WorkloadError
    │   └── ParameterError
    ├── DataError             3   the data does not fit the schema's structure
    ├── BudgetError           4   the ledger refuses
    ├── ResourceError         5   disk, memory, permission, connection; the run can be resumed
    └── CorruptionError       6   a ledger, release or checkpoint is damaged or foreign

A message says what, where, and how to mend it: ``name (value) must be rule``. It never carries a private value, a
row number or a count of rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class AnamorphError(Exception):
    """The root of the tree."""

    exit_code: ClassVar[int] = 1


class UsageError(AnamorphError):
    """The request itself is wrong: nothing was read, nothing was spent."""

    exit_code = 2


class SchemaError(UsageError):
    """A schema that cannot be used."""


class WorkloadError(UsageError):
    """A workload that cannot be used."""


class ParameterError(UsageError):
    """A parameter outside its rule."""


class DataError(AnamorphError):
    """The data does not fit the structure that the schema declares."""

    exit_code = 3


class BudgetError(AnamorphError):
    """The ledger refuses the spend."""

    exit_code = 4


class ResourceError(AnamorphError):
    """Disk, memory, permission or connection failed."""

    exit_code = 5


class CorruptionError(AnamorphError):
    """A file of ours is damaged, was edited, or is not ours."""

    exit_code = 6


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean …?" for the public name nearest to `name`, or nothing."""
    names = list(known)
    folded = {other.strip().casefold(): other for other in names}
    near = folded.get(name.strip().casefold())
    close = [near] if near else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_positive(name: str, value: object) -> None:
    """Refuses a parameter that is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParameterError(f"{name} ({value!r}) must be a whole number of at least 1")
