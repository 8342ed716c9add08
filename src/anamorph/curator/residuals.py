"""Residual: what a marginal says beyond its own smaller marginals.

The residual of a set of features A is the marginal over A, centred along every axis, so that every line of it sums to
0: with m_i the sizes of the features, and P_A the product over them of (I - 1 1^T / m_i),

    r_A = P_A M_A(D),      M_A = the sum over B within A of r_B, spread evenly over the features outside of B.

Residuals of different sets are orthogonal: nothing is measured twice, and a row that is added or removed moves r_A by
a column of P_A only, of squared length (see PROOFS.md, section 17)

    add-remove: prod of (m_i - 1) / m_i, below 1;     replace: at most 2 prod over all but the smallest of the same.

Numbers are counted in units of 1 / prod m_i, in which they are whole: prod m_i * P_A has whole entries.

Reference: Xiao, He, Zhang & Kifer 2023 (ResidualPlanner), section 4 and its discrete mechanism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anamorph.curator.budget import Relation

MOST_CELLS = 1 << 23
"""The most cells of one residual."""

LARGEST = 1 << 62
"""What no number exceeds on the way."""


@dataclass(frozen=True)
class Residual:
    """All numbers of one residual, in C order of the features, in units of 1 / `scale`."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    features: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the features."""
        return tuple(self.sizes[feature] for feature in self.features)

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return math.prod(self.shape)

    @property
    def scale(self) -> int:
        """One over the unit of the numbers."""
        return self.cells

    @property
    def most(self) -> int:
        """The most rows that a cell counts: an axis of size m makes numbers larger by a factor of 2 (m - 1) at most."""
        return LARGEST // math.prod(2 * (size - 1) for size in self.shape)

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by."""
        return (self.features,)

    def copied(self) -> Residual:
        """Returns the same, made of plain integers."""
        return Residual(tuple(map(int, self.sizes)), tuple(map(int, self.features)))

    def squared_sensitivity(self, relation: Relation) -> Fraction:
        """Returns a bound on the squared L2 norm of what one neighbour changes, in counts."""
        shares = [Fraction(size - 1, size) for size in sorted(self.shape)]
        moved = shares if relation == "add-remove" else [Fraction(2), *shares[1:]]
        return math.prod(moved, start=Fraction(1))

    def centred(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of the residual from the cells of the marginal."""
        numbers = np.minimum(counts, self.most).reshape(self.shape)
        for axis, size in enumerate(self.shape):
            numbers = size * numbers - numbers.sum(axis=axis, keepdims=True)
        return numbers.ravel()
