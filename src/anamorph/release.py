"""Measurement and Release: everything that has left the curator. Public data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anamorph.models.model import Model
    from anamorph.queries.workload import Workload
    from anamorph.schema import Schema


@dataclass(frozen=True, eq=False)
class Measurement:
    """Noisy answers of a workload: the one type that crosses the line from private to public."""

    workload: Workload
    values: NDArray[np.float64]
    """A noisy answer for each query, as a fraction of `total`."""
    sigma: NDArray[np.float64]
    """The standard deviation of the noise of each block, as a fraction of `total`."""
    total: float
    """The public number of rows: n itself where rows are replaced, a noisy one where they are added or removed."""


@dataclass(frozen=True)
class Spend:
    """One step of a run and what it cost."""

    kind: str
    rho: float
    what: str


@dataclass(frozen=True)
class Privacy:
    """The promise of a release, and what was spent where."""

    neighbours: str
    epsilon: float
    delta: float
    rho: float
    spends: tuple[Spend, ...]
    private: bool = True
    """False for a run with a seed: its noise can be guessed, and it promises nothing."""

    @property
    def spent(self) -> float:
        """The rho that the run spent."""
        return float(np.sum([spend.rho for spend in self.spends]))

    def statement(self) -> str:
        """Returns the promise in words."""
        if not self.private:
            return "NOT PRIVATE: this run was seeded (--unsafe-seed); its noise can be reproduced. Never publish it."
        change = (
            "one row is replaced by another (the number of rows is public)"
            if self.neighbours == "replace"
            else "one row is added or removed (the number of rows is private)"
        )
        return (
            f"This release is ({self.epsilon:g}, {self.delta:g})-differentially private: whatever anybody does with "
            f"it, the probability of any outcome changes by at most a factor e^{self.epsilon:g}, up to {self.delta:g}, "
            f"when {change}. Accounting: {self.rho:.6g}-zCDP, of which {self.spent:.6g} was spent."
        )


@dataclass(frozen=True, eq=False)
class Release:
    """The result of a mechanism: a model, what it was made from, and what it cost."""

    schema: Schema
    model: Model
    measurements: tuple[Measurement, ...]
    privacy: Privacy
    total: float
    """The public number of rows."""
    mechanism: Mapping[str, Any] = field(default_factory=dict)
    """The name and the parameters of the mechanism."""
    workload: str = ""
    """The workload's spec."""
    degraded: bool = False
