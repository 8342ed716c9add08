"""The kernel mean embedding of rows as one block of queries: random Fourier features of their numbers, label by label.

With frequencies w_1 .. w_D drawn from a normal distribution of deviation 1 / length, and x the numbers of a row on the
unit scale, the means of cos(w . x) and sin(w . x) tell the distribution of x as a Gaussian kernel sees it, or, with
several lengths, a mean of such kernels,

    (1 / D) sum over j of cos(w_j . (x - y))  ~  exp(-|x - y|^2 / (2 length^2)).

It is measured, and never asked by users: see curator/cosines.py for how it is counted, and models/embedding.py for
what is fitted to it.

References: Rahimi & Recht 2007; Harder, Adamczewski & Park 2021 (DP-MERF), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.curator.cosines import TURN, Cosines
from anamorph.errors import WorkloadError
from anamorph.queries.piece import Piece


@dataclass(frozen=True, eq=False)
class Embedding:
    """An embedding: all cosines and sines are one block."""

    tally: Cosines

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        return self.tally.sizes

    @property
    def blocks(self) -> int:
        """One."""
        return 1

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.tally.cells

    @property
    def largest_block(self) -> int:
        """The number of queries."""
        return self.tally.cells

    def take(self, ids: ArrayLike) -> Embedding:
        """Returns itself; refuses to be asked for anything but its one block, once."""
        if np.asarray(ids, np.int64).tolist() != [0]:
            raise WorkloadError("an embedding must be taken whole, and once")
        return self

    def by_cell(self) -> Embedding:
        """Refuses: the numbers of an embedding are measured together."""
        raise WorkloadError("an embedding must be measured whole: take whole blocks")

    def measured(self, order: int = 0) -> Embedding:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields the embedding whole, whatever the limit."""
        yield Piece(self.tally, 0, 1)


def embedding(
    sizes: tuple[int, ...],
    given: tuple[int, ...],
    limits: dict[int, int],
    frequencies: NDArray[np.float64],
) -> Embedding:
    """Returns the embedding of some numbers by the values of the features given.

    Args:
        sizes: the sizes of all columns.
        given: the label, or nothing.
        limits: the native columns, and how many codes each has without `missing`.
        frequencies: in radians over the range of a number, frequencies by numbers; rounded to 2^-64 of a turn for half
            a code. What exceeds half a turn for half a code is the same function of codes as one that does not.
    """
    turns = frequencies / (4 * math.pi * np.array(list(limits.values()), np.float64))
    turns -= np.rint(turns)
    whole = np.clip(np.rint(turns * 2.0**TURN), -(2.0**63), 2.0**63 - 1024).astype(np.int64)
    return Embedding(Cosines(sizes, given, tuple(limits), tuple(limits.values()), whole))


def radians(tally: Cosines) -> NDArray[np.float64]:
    """Returns the frequencies in radians over the range of a number."""
    return tally.frequencies * (4 * math.pi / 2.0**TURN) * np.array(tally.limits, np.float64)
