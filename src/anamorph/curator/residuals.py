"""Residual: what a marginal says beyond its own smaller marginals.

The residual of a set of features A is the marginal over A, centred along every axis, so that every line of it sums to
0: with m_i the sizes of the features, and P_A the product over them of (I - 1 1^T / m_i),

    r_A = P_A M_A(D),      M_A = the sum over B within A of r_B, spread evenly over the features outside of B.

Residuals of different sets are orthogonal: nothing is measured twice, and a row that is added or removed moves r_A by
a column of P_A only, of squared length kappa_A = prod of (m_i - 1) / m_i, below 1. A row that is replaced moves it by
2 (kappa_A - p_A), p_A the product of 1 - 1 / m_i over the features in which the two rows agree and of -1 / m_i over
the others. Where residuals overlap, no two rows move all of them as much as each can be moved (`joint`; PROOFS.md,
section 17).

Numbers are counted in units of 1 / prod m_i, in which they are whole: prod m_i * P_A has whole entries.

Reference: Xiao, He, Zhang & Kifer 2023 (ResidualPlanner), section 4 and its discrete mechanism.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anamorph.curator.budget import Relation

Integers = NDArray[np.int64]

MOST_CELLS = 1 << 23
"""The most cells of one residual."""

MOST_COLUMNS = 16
"""Of how many columns all ways are tried in which two rows can differ."""

GROUPS, GROUP, MOST_FEATURES = 400, 12, 6
"""Of more columns: groups of some of them, how many there are in one, and the most features of a residual in one."""

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

    def replaced(self, factor: Fraction) -> Integers:
        """Returns the squared L2 norm, times a factor, rounded up, of what one replaced row changes.

        It has an axis for each feature: 0 where the two rows agree in it, and 1 where they differ.
        """
        axes = [np.array([Fraction(size - 1, size), Fraction(-1, size)]) for size in self.shape]
        changes = 2 * factor * (self.kappa - functools.reduce(np.multiply.outer, axes))
        return np.array([math.ceil(change) for change in changes.flat], np.int64).reshape(changes.shape)

    def centred(self, counts: Integers) -> Integers:
        """Returns the numbers of the residual from the cells of the marginal, modulo 2^64."""
        numbers = counts.reshape(self.shape)
        for axis, size in enumerate(self.shape):
            numbers = size * numbers - numbers.sum(axis=axis, keepdims=True)
        return numbers.ravel()


def joint(residuals: Sequence[tuple[Residual, Fraction]], relation: Relation) -> Fraction:
    """Returns a bound on the squared L2 sensitivity of residuals together, each scaled by the root of its weight.

    Where a row is replaced, each residual is shared out evenly among the groups of columns that hold its features, and
    a group is moved as far as any two rows move it; a residual that no group holds, as far as any two rows move that.
    """
    if relation == "add-remove":
        return sum((weight * residual.kappa for residual, weight in residuals), start=Fraction(0))
    unit = sum((weight * residual.furthest for residual, weight in residuals), start=Fraction(0)) / UNITS
    small = [(one.features, one.replaced(w / unit)) for one, w in residuals if len(one.features) <= MOST_FEATURES]
    groups = together({feature for features, _ in small for feature in features})
    held = [[place for place, (features, _) in enumerate(small) if group.issuperset(features)] for group in groups]
    times = Counter(itertools.chain.from_iterable(held))
    parts = sum(math.ceil(w * one.furthest / unit) for one, w in residuals if len(one.features) > MOST_FEATURES)
    parts += sum(int(changes.max()) for place, (_, changes) in enumerate(small) if place not in times)
    for group, places in zip(groups, held, strict=True):
        parts += most_moved(sorted(group), [(small[place][0], -(-small[place][1] // times[place])) for place in places])
    return unit * parts


def together(columns: Collection[int]) -> list[frozenset[int]]:
    """Returns groups of columns: one of all, if they are few; else some that follow from their numbers alone."""
    if len(columns) <= MOST_COLUMNS:
        return [frozenset(columns)]

    def order(group: int) -> Callable[[int], bytes]:
        return lambda column: hashlib.sha256(f"{group} {column}".encode()).digest()

    return [frozenset(sorted(columns, key=order(group))[:GROUP]) for group in range(GROUPS)]


def most_moved(columns: list[int], residuals: Iterable[tuple[tuple[int, ...], Integers]]) -> int:
    """Returns the most that two rows move residuals of some columns by together."""
    moved = np.zeros((2,) * len(columns), np.int64)
    for features, changes in residuals:
        places = [columns.index(feature) for feature in features]
        upright = changes.transpose(np.argsort(places))
        moved += upright.reshape([2 if place in places else 1 for place in range(len(columns))])
    return int(moved.max())
