"""Purse: a run's budget without a ledger, for one object's lifetime."""

from __future__ import annotations

import threading
from fractions import Fraction

from anamorph.curator.budget import round_down
from anamorph.errors import BudgetError


class Purse:
    """Refuses a step beyond the budget; keeps nothing when the process ends. A ledger's run has the same methods."""

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._left = Fraction(rho)
        self._lock = threading.Lock()  # also makes a copy, which could be spent twice, impossible

    @property
    def remaining(self) -> float:
        """The rho that is left, rounded down."""
        return round_down(self._left)

    def charge(self, *, kind: str, rho: float, what: str, digest: str) -> bytes | None:
        """Takes rho; there is never a stored answer."""
        with self._lock:
            if Fraction(rho) > self._left:
                raise BudgetError(
                    f"rho ({rho:.6g}) of this {kind} must be at most {self.remaining:.6g}, what the run has left"
                )
            self._left -= Fraction(rho)
        return None

    def store(self, answer: bytes) -> None:
        """Keeps nothing."""

    def finish(self, release_digest: str) -> None:
        """Keeps nothing."""
