"""Cosines: random Fourier features of rows, added up for each combination of values of some features.

A frequency turns the numbers of a row into an angle, and the angle into a point of the circle; the tally is, for each
cell of the features given, the sum of the points of its rows, cosines and sines: the kernel mean embedding of DP-MERF,
with Gaussian frequencies, unscaled, times one-hot(label). Numbers are the codes of native columns, centred:

    angle of a row = sum over numbers of  frequency * (2 code + 1 - limit),      in 2^-64 of a turn,

and a missing number adds nothing: it lies in the middle of its range. All of it is whole: angles are added modulo a
turn in 64-bit integers, and the first 16 bits of an angle look up its cosine in a public table of whole numbers. No
floating point operation meets a row.

With D frequencies a row adds a vector of squared length at most D, a replaced row moves the sum by at most 4 D (see
PROOFS.md, section 19).

Reference: Harder, Adamczewski & Park 2021 (DP-MERF), sections 3.1 and 3.2; Rahimi & Recht 2007 for the features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from anamorph.curator.budget import Relation

Integers = NDArray[np.int64]

UNIT = 1 << 16
"""One over the unit of cosines and sines."""

STEPS = 1 << 16
"""How many angles the table tells apart."""

TURN = 64
"""The binary digits of an angle, after the whole turns."""

MOST_FREQUENCIES = 1 << 20
"""The most frequencies of one tally."""

ENTRIES = 1 << 20
"""How many angles are held at a time."""


@dataclass(frozen=True, eq=False)
class Cosines:
    """For each cell of `given`, in C order: the sums of all cosines, then of all sines, in units of 1 / `scale`."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    given: tuple[int, ...]
    """The features whose cells have sums of their own: a label, or none."""
    numbers: tuple[int, ...]
    """The native columns that make the angles."""
    limits: tuple[int, ...]
    """How many codes each of them has without `missing`."""
    frequencies: Integers
    """Frequencies by numbers, in 2^-64 of a turn for half a code."""

    @property
    def count(self) -> int:
        """D, how many frequencies there are."""
        return len(self.frequencies)

    @property
    def width(self) -> int:
        """How many cells have sums of their own."""
        return math.prod(self.sizes[feature] for feature in self.given)

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return 2 * self.count * self.width

    @property
    def scale(self) -> int:
        """One over the unit of the numbers."""
        return UNIT

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by: none, rows are looked at one by one."""
        return ()

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells this tally from all others."""
        return self.sizes, self.given, self.numbers, self.limits, self.frequencies.tobytes()

    def copied(self) -> Cosines:
        """Returns the same, made of plain integers and an array of its own, of the type that it has."""
        sizes, given = tuple(map(int, self.sizes)), tuple(map(int, self.given))
        numbers, limits = tuple(map(int, self.numbers)), tuple(map(int, self.limits))
        return Cosines(sizes, given, numbers, limits, np.array(self.frequencies))

    def angles(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the place in the table of the angle of each row and frequency: rows by frequencies."""
        turned = np.zeros((len(rows), self.count), np.uint64)
        for index, (number, limit) in enumerate(zip(self.numbers, self.limits, strict=True)):
            codes = rows[:, number].astype(np.int64)
            steps = np.where(codes < limit, 2 * codes + 1 - limit, 0)
            turned += steps.view(np.uint64)[:, None] * self.frequencies[:, index].astype(np.uint64)  # modulo a turn
        return (turned >> np.uint64(TURN - 16)).astype(np.int64)


def squared_length(count: int, relation: Relation) -> int:
    """Returns a bound on the squared L2 norm of what one neighbour changes, for so many frequencies, in counts."""
    return count if relation == "add-remove" else 4 * count


@cache
def circle() -> tuple[Integers, Integers]:
    """Returns the cosines and the sines of all angles of the table, in units of 1 / UNIT.

    No point is outside of the circle of radius UNIT, whatever the library says: one that were would become its middle.
    """
    angles = (np.arange(STEPS) + 0.5) * (2 * math.pi / STEPS)
    cosines, sines = (np.rint((UNIT - 1) * wave(angles)).astype(np.int64) for wave in (np.cos, np.sin))
    cosines, sines = np.clip(cosines, -UNIT, UNIT), np.clip(sines, -UNIT, UNIT)
    inside = cosines * cosines + sines * sines <= UNIT * UNIT
    tables = np.where(inside, cosines, 0), np.where(inside, sines, 0)
    for table in tables:
        table.setflags(write=False)  # it is kept, and the bound is that of its entries
    return tables


def cosine_sums(tally: Cosines, batches: Iterable[NDArray[np.int32]]) -> Integers:
    """Returns the sums of the cosines and sines of all rows, for each cell."""
    sums = np.zeros((tally.width, 2, tally.count), np.int64)
    step = max(1, ENTRIES // tally.count)
    for batch in batches:
        for first in range(0, len(batch), step):
            add_rows(tally, batch[first : first + step], sums)
    return sums.ravel()


def add_rows(tally: Cosines, rows: NDArray[np.int32], sums: Integers) -> None:
    """Adds some rows, those of each cell together."""
    cells = np.zeros(len(rows), np.int64)
    for feature in tally.given:
        cells = cells * tally.sizes[feature] + rows[:, feature]
    angles = tally.angles(rows)
    for cell in np.unique(cells).tolist():
        mine = angles[cells == cell]
        for wave, table in enumerate(circle()):
            sums[cell, wave] += table[mine].sum(axis=0)


def is_cosines(tally: Cosines, sizes: tuple[int, ...]) -> bool:
    """Returns whether a tally is over columns of these sizes, with whole frequencies."""
    columns = (*tally.given, *tally.numbers)
    within = all(0 <= feature < len(sizes) for feature in columns) and len(set(columns)) == len(columns)
    if not within or not tally.numbers or len(tally.limits) != len(tally.numbers):
        return False
    if not all(1 <= limit <= sizes[feature] for limit, feature in zip(tally.limits, tally.numbers, strict=True)):
        return False
    plain = type(tally.frequencies) is np.ndarray and tally.frequencies.dtype == np.int64
    if not plain or tally.frequencies.ndim != 2:
        return False
    return 1 <= tally.count <= MOST_FREQUENCIES and tally.frequencies.shape == (tally.count, len(tally.numbers))
