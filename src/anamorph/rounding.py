"""Rounding: relaxed rows become rows (RAP, section 4).

Every row takes, for each feature, a code drawn from the row's probabilities: this keeps the expected answer of every
product query. Drawing several rows from each relaxed row (oversampling) brings the rounded answers near the relaxed
ones; five are nearly enough.

Deviation from the paper: the copies of one relaxed row are drawn by stratified sampling. Copy c of a row uses, for
each feature, a uniform number in stratum pi(c) of [0, 1), with pi a random permutation, drawn anew for each feature.
A single copy is distributed as before, features stay independent, and the copies together follow the row's
probabilities more closely than independent draws would.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.polishing import polished
from anamorph.table import Table

ENTRIES = 1 << 22
"""How many cumulated probabilities are compared at a time."""


def round_rows(
    probabilities: NDArray[np.floating],
    weights: NDArray[np.floating],
    sizes: tuple[int, ...],
    *,
    rows: int,
    seed: int,
    targets: Mapping[tuple[int, ...], NDArray[np.floating]] | None = None,
) -> Table:
    """Returns `rows` rows drawn from relaxed ones: a line of `probabilities` for each code, a column for each row.

    With targets, the answers of the relaxed rows to some marginals, the rows are polished: their own come near these.
    """
    generator = np.random.default_rng(seed)
    codes, owner = draw(probabilities, weights, sizes, rows, generator)
    if targets:
        codes = polished(codes, owner, probabilities, sizes, targets, seed=seed)
    return Table(codes[generator.permutation(rows)], sizes)


def draw(
    probabilities: NDArray[np.floating],
    weights: NDArray[np.floating],
    sizes: tuple[int, ...],
    rows: int,
    generator: np.random.Generator,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Returns the codes of rows drawn from relaxed ones, and which one each was drawn from, in order of these."""
    owner = np.repeat(np.arange(weights.size), copies(weights, rows, generator))
    codes = np.empty((rows, len(sizes)), np.int32)
    for feature, first in enumerate(np.cumsum((0, *sizes[:-1]))):
        progress.report("sample", feature, len(sizes))
        cumulated = np.cumsum(probabilities[first : first + sizes[feature]].T, axis=1, dtype=np.float64)
        codes[:, feature] = invert(cumulated, owner, strata(owner, generator))
    progress.report("sample", len(sizes), len(sizes))
    return codes, owner


def copies(weights: NDArray[np.floating], rows: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Returns how often each relaxed row is drawn: systematic sampling, so within one of rows * weight.

    The order of the rows is shuffled first, so that the remainder falls on rows at random.
    """
    order = generator.permutation(weights.size)
    marks = np.cumsum(weights[order], dtype=np.float64)
    stops = np.floor(marks / marks[-1] * rows + generator.random()).astype(np.int64)
    stops = np.minimum(stops, rows)
    stops[-1] = rows
    drawn = np.empty(weights.size, np.int64)
    drawn[order] = np.diff(stops, prepend=0)
    return drawn


def strata(owner: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Returns a uniform number for each drawn row, those of one owner in distinct strata, in random order."""
    total = np.bincount(owner)[owner] if owner.size else owner
    first = np.searchsorted(owner, owner)
    shuffled = np.lexsort((generator.random(owner.size), owner))
    rank = np.empty(owner.size, np.int64)
    rank[shuffled] = np.arange(owner.size)
    return (rank - first + generator.random(owner.size)) / np.maximum(total, 1)


def invert(cumulated: NDArray[np.float64], owner: NDArray[np.int64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns for each drawn row the code whose interval of its owner's cumulated probabilities holds its number.

    The interval of a code of probability 0 is empty; a number that rounding brought up to the total stays below it.
    """
    totals = cumulated[owner, -1]
    heights = np.minimum(uniform * totals, np.nextafter(totals, 0))
    codes = np.empty(owner.size, np.int64)
    step = max(1, ENTRIES // cumulated.shape[1])
    for first in range(0, owner.size, step):
        span = slice(first, first + step)
        codes[span] = (cumulated[owner[span]] <= heights[span, None]).sum(axis=1)
    return codes
