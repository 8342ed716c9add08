"""Scores: the closed set of quality functions that a curator selects by, each with its sensitivity.

A score is formed from errors, |count - n * estimate|, in whole units of 2^-GRID counts: exact counts, and public
estimates rounded to that grid, so that all arithmetic is on integers and the sensitivity holds exactly. One row moves
a count by at most 1; replacing a row moves at most two cells of one marginal, by 1 each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import ParameterError

if TYPE_CHECKING:
    from anamorph.curator.budget import Relation

GRID = 12
"""Errors are whole multiples of 2^-GRID counts."""

LARGEST = 1 << 61
"""A bound on scores, in grid units: far above n for any table, and safe in 64 bits."""


def differences(
    counts: NDArray[np.int64], estimate: NDArray[np.floating], total: float, digits: int = 0
) -> NDArray[np.int64]:
    """Returns count - total * estimate in grid units; the estimate is public, and rounded before the comparison.

    Counts are in units of 2^-digits.
    """
    scaled = np.asarray(estimate, np.float64) * total
    if not np.all(np.isfinite(scaled)):
        raise ParameterError("estimate must be finite numbers")
    bound = float(1 << (61 - GRID))
    expected = np.rint(np.clip(scaled, -bound, bound) * float(1 << GRID)).astype(np.int64)
    return np.subtract(counts << (GRID - digits), expected, out=expected)


def errors(
    counts: NDArray[np.int64], estimate: NDArray[np.floating], total: float, digits: int = 0
) -> NDArray[np.int64]:
    """Returns the absolute values of the differences."""
    return np.abs(differences(counts, estimate, total, digits))


def times(scores: NDArray[np.int64], share: int) -> NDArray[np.int64]:
    """Returns scores times a share; those whose product might overflow are clamped before."""
    most = LARGEST // share
    return np.clip(scores, -most, most) * share


@dataclass(frozen=True)
class AbsoluteError:
    """The error of a single query."""

    def sensitivity(self, relation: Relation) -> int:
        """Returns 1: one row moves one count by at most 1."""
        return 1

    def merge(self, errors: NDArray[np.int64], before: int) -> int:
        """Returns the one error; blocks of several queries have none."""
        if errors.size != 1 or before:
            raise ParameterError("score AbsoluteError must be used on single queries; blocks take L1Error or MaxError")
        return int(errors[0])


@dataclass(frozen=True)
class L1Error:
    """The sum of the errors of a block whose cells are disjoint."""

    def sensitivity(self, relation: Relation) -> int:
        """Returns 2 when a row is replaced (two cells move), else 1."""
        return 2 if relation == "replace" else 1

    def merge(self, errors: NDArray[np.int64], before: int) -> int:
        """Returns the score of a block, given that of its pieces before this one."""
        high, low = int((errors >> 32).sum()), int((errors & 0xFFFFFFFF).sum())  # neither sum can overflow
        return min(before + (high << 32) + low, LARGEST)


@dataclass(frozen=True)
class MaxError:
    """The largest error of a block."""

    def sensitivity(self, relation: Relation) -> int:
        """Returns 1: every error moves by at most 1."""
        return 1

    def merge(self, errors: NDArray[np.int64], before: int) -> int:
        """Returns the score of a block, given that of its pieces before this one."""
        return max(before, int(errors.max(initial=0)))


Score = AbsoluteError | L1Error | MaxError
SCORES = (AbsoluteError, L1Error, MaxError)
