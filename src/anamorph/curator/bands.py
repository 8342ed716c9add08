"""Bands: a marginal in which neighbouring codes of a column are counted together.

The codes of a number are cut into bands: a new one begins at each cut. Every row is in exactly one cell, as in a
marginal, of which this is one with fewer cells: its sensitivity is the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.where import MOST_CUTS

if TYPE_CHECKING:
    from anamorph.curator.tallies import Counts

Integers = NDArray[np.int64]

MOST_CELLS = 1 << 24
"""The most cells of one marginal of bands."""


@dataclass(frozen=True)
class Bands:
    """All cells of a marginal of bands, in C order."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    features: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    """For each feature the codes, ascending, at which a new band begins; none: every code is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of bands of each feature."""
        pairs = zip(self.features, self.cuts, strict=True)
        return tuple(len(cuts) + 1 if cuts else self.sizes[feature] for feature, cuts in pairs)

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return math.prod(self.shape)

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by: none, rows are placed one by one."""
        return ()

    def copied(self) -> Bands:
        """Returns the same, made of plain integers."""
        cuts = tuple(tuple(map(int, each)) for each in self.cuts)
        return Bands(tuple(map(int, self.sizes)), tuple(map(int, self.features)), cuts)


def band_counts(tally: Bands, source: Counts) -> Integers:
    """Returns the number of rows in each cell.

    A source may have a method `grouped(given, cuts)`, the marginal over features and the ranks of numbers (where.py).
    It is asked unless there are too many cuts; else the rows are read.
    """
    grouped = getattr(source, "grouped", None)
    if grouped and max(map(len, tally.cuts)) < MOST_CUTS:
        return requested(tally, grouped)
    counts = np.zeros(tally.cells, np.int64)
    for batch in source.batches():
        cells = np.zeros(len(batch), np.int64)
        for feature, cuts, size in zip(tally.features, tally.cuts, tally.shape, strict=True):
            codes = batch[:, feature]
            cells = cells * size + (np.searchsorted(cuts, codes, side="right") if cuts else codes)
        np.add.at(counts, cells, 1)
    return counts


def requested(tally: Bands, grouped: Callable[..., tuple[Integers, Integers]]) -> Integers:
    """Returns the counts from a marginal over ranks that a source has counted, which has the cut features last.

    The band of a code is the number of cuts that are at most the code, so of cuts less 1 that are below it: its rank
    among those. The last code of the column is one more of them, that no row is beyond.
    """
    order = sorted(range(len(tally.features)), key=lambda axis: bool(tally.cuts[axis]))
    given = tuple(tally.features[axis] for axis in order if not tally.cuts[axis])
    ends = {
        tally.features[axis]: np.array((*tally.cuts[axis], tally.sizes[tally.features[axis]]), np.int64) - 1
        for axis in order
        if tally.cuts[axis]
    }
    cells, counts = grouped(given, ends)
    dense = np.zeros(tally.cells, np.int64)
    dense[cells] = counts
    return dense.reshape([tally.shape[axis] for axis in order]).transpose(np.argsort(order)).ravel()


def is_bands(tally: Bands, sizes: tuple[int, ...]) -> bool:
    """Returns whether a tally is over distinct columns of these sizes, cut inside of them."""
    within = all(type(feature) is int and 0 <= feature < len(sizes) for feature in tally.features)
    if not tally.features or not within or len(set(tally.features)) < len(tally.features):
        return False
    if tally.sizes != sizes or len(tally.cuts) != len(tally.features):
        return False
    pairs = zip(tally.features, tally.cuts, strict=True)
    return all(is_cut(cuts, sizes[feature]) for feature, cuts in pairs) and tally.cells <= MOST_CELLS


def is_cut(cuts: tuple[int, ...], size: int) -> bool:
    """Returns whether cuts are ascending codes of a column, so that every band has a code."""
    return all(type(cut) is int for cut in cuts) and all(a < b for a, b in itertools.pairwise((0, *cuts, size)))
