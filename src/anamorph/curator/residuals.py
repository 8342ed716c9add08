"""Residual: what a marginal says beyond its own smaller marginals.

The residual of a set of features A is the marginal over A, centred along every axis, so that every line of it sums to
0: with m_i the sizes of the features, and P_A the product over them of (I - 1 1^T / m_i),

    r_A = P_A M_A(D),      M_A = the sum over B within A of r_B, spread evenly over the features outside of B.

Residuals of different sets are orthogonal: nothing is measured twice, and a row that is added or removed moves r_A by
a column of P_A only, of squared length kappa_A = prod of (m_i - 1) / m_i, below 1. A row that is replaced moves it by
2 (kappa_A - p_A), p_A the product of 1 - 1 / m_i over the features in which the two rows agree and of -1 / m_i over
the others: no two rows move every residual as much as one can be moved (`joint`; PROOFS.md, section 17).

Numbers are counted in units of 1 / prod m_i, in which they are whole: prod m_i * P_A has whole entries.

Reference: Xiao, He, Zhang & Kifer 2023 (ResidualPlanner), section 4 and its discrete mechanism.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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

MOST_COLUMNS, MOST_FEATURES = 16, 6
"""Of how many columns two rows are taken to agree or not together, and in residuals of how many features at most."""

UNITS = 1 << 50
"""Into how many parts a bound is divided; parts are rounded up."""


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

    @property
    def kappa(self) -> Fraction:
        """The squared L2 norm of what one row more or less changes, in counts."""
        return math.prod((Fraction(size - 1, size) for size in self.shape), start=Fraction(1))

    @property
    def furthest(self) -> Fraction:
        """The largest squared L2 norm of what one replaced row changes, in counts."""
        return 2 * self.kappa * Fraction(min(self.shape), min(self.shape) - 1)

    def replaced(self) -> NDArray[np.object_]:
        """Returns what one replaced row changes for each set of features in which the rows differ: 1 on its axes."""
        axes = [np.array([Fraction(size - 1, size), Fraction(-1, size)]) for size in self.shape]
        return 2 * (self.kappa - functools.reduce(np.multiply.outer, axes))

    def centred(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of the residual from the cells of the marginal."""
        numbers = np.minimum(counts, self.most).reshape(self.shape)
        for axis, size in enumerate(self.shape):
            numbers = size * numbers - numbers.sum(axis=axis, keepdims=True)
        return numbers.ravel()


def joint(residuals: Sequence[tuple[Residual, Fraction]], relation: Relation) -> Fraction:
    """Returns a bound on the squared L2 sensitivity of residuals together, each scaled by the root of its weight.

    Of a replaced row all ways are tried in which it differs in the `MOST_COLUMNS` columns of the fewest values; of the
    other columns each residual has the worst, as a residual of more than `MOST_FEATURES` has of all.
    """
    if relation == "add-remove":
        return sum((weight * residual.kappa for residual, weight in residuals), start=Fraction(0))
    values = {f: size for residual, _ in residuals for f, size in zip(residual.features, residual.shape, strict=True)}
    columns = sorted(values, key=lambda feature: (values[feature], feature))[:MOST_COLUMNS]
    unit = sum((weight * residual.furthest for residual, weight in residuals), start=Fraction(0)) / UNITS
    moved, everywhere = np.zeros((2,) * len(columns), np.int64), 0
    for residual, weight in residuals:
        if len(residual.features) > MOST_FEATURES:
            everywhere += math.ceil(weight * residual.furthest / unit)
            continue
        worst = residual.replaced().max(axis=tuple(a for a, f in enumerate(residual.features) if f not in columns))
        parts = np.array([math.ceil(weight * change / unit) for change in np.ravel(worst)], np.int64)
        places = [columns.index(feature) for feature in residual.features if feature in columns]
        upright = parts.reshape((2,) * len(places)).transpose(np.argsort(places))
        moved += upright.reshape([2 if place in places else 1 for place in range(len(columns))])
    return unit * (everywhere + int(moved.max()))
