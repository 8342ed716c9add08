"""Keeping drawn queries: what it costs, and the bits that decide. PROOFS.md, section 22, has the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.contest import Comparison
from anamorph.curator.noise import Bits, bernoulli
from anamorph.curator.scores import GRID
from anamorph.curator.tallies import Settled
from anamorph.errors import ParameterError

LARGEST_RATE, LARGEST_MARGIN = 1e6, 100.0
"""The largest rate and margin of keeping queries: beyond them nothing is kept."""


def keeping_rho(count: int, rate: float, margin: float, total: float) -> float:
    """Returns the rho of keeping some queries or not: count (rate / (total (1 - exp(-margin))))^2 / 8, rounded up.

    The roundings are a dozen, each of a relative 2^-52 at most.
    """
    if not (0 < rate <= LARGEST_RATE and 0 < margin <= LARGEST_MARGIN):
        raise ParameterError(
            f"rate ({rate!r}) must be above 0 and at most {LARGEST_RATE:g}, margin ({margin!r}) above 0 and at most "
            f"{LARGEST_MARGIN:g}"
        )
    width = rate / total / -math.expm1(-margin)
    return count * width * width / 8 * (1 + 2.0**-46)


def excesses(compared: Comparison, pieces: Sequence[Settled], drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the score of each drawn query or negation, in grid units, without its weight."""
    found, ids = np.zeros(drawn.size, np.int64), drawn >> 1
    for piece in pieces:
        mine = np.flatnonzero((ids >= piece.first) & (ids < piece.first + piece.blocks))
        if mine.size:
            found[mine] = compared.differences(piece, ids[mine] - piece.first)
    return np.where(drawn & 1, -found, found)


def kept(scores: NDArray[np.int64], total: float, rate: float, margin: float, bits: Bits) -> NDArray[np.bool_]:
    """Returns independent bits, each 1 with probability exp(rate (a - 1) - margin), a the score over the total.

    A score is cut at the total, so that no probability is above exp(-margin). numpy's exponent has five roundings of
    numbers that are at most rate + margin + |rate a|, as `bernoulli` asks.
    """
    most = math.floor(Fraction(total) * (1 << GRID))
    scores = np.minimum(scores, most)
    shares = rate * (scores / (total * float(1 << GRID)))
    error = 2.0**-48 * (rate + margin + np.abs(shares))
    units = Fraction(total) * (1 << GRID)

    def exact(item: int) -> tuple[Fraction, int]:
        return Fraction(rate) * (1 - int(scores[item]) / units) + Fraction(margin), 0

    return bernoulli(rate + margin - shares, error, exact, bits)
