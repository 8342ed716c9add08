"""Piece: the unit in which a workload is streamed, from curator and model alike."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from anamorph.curator.tallies import Tally


@dataclass(frozen=True)
class Piece:
    """Consecutive answers of a workload: a tally, and the blocks that its numbers belong to.

    With as many blocks as cells, each number is a block of its own; with one block, all numbers belong to it (and a
    large block may come in several pieces); of tests of numbers (`Where`), each may be a block, of as many cells.
    """

    tally: Tally
    first: int
    """The id of the first block."""
    blocks: int
    weight: Fraction = Fraction(1)
    """How much these queries matter, relative to others of the workload."""
