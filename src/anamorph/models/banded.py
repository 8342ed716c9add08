"""Banded rows: relaxed rows that hold a number as chances of bands, and a ruler that says where in its band it lies.

The relaxed rows (relaxed.py) have a probability for each code of a coded column and for each band of a native one.
Where in its band a number lies is the same for all rows: a *ruler* h maps codes to bands, piecewise linear and rising,
with h(first code of band i) = i; so of band i the share

    clip(h(b + 1) - i, 0, 1)    has a code of at most b.

A prefix x <= b is then a weighted sum of bands, and what is asked of several columns of one relaxed row is a product,
as it is of codes: prefixes, and bands that are cut anywhere, are answered exactly. A halfspace is no product; it is
answered by numbers drawn from every relaxed row, always the same.

Where nothing is known of the inside of a band, numbers are spread evenly over its codes. If a number was also measured
in finer bands, those that stand out have what was measured: zeros, round numbers, forty hours a week. What is left is
halved again and again, and has in each half what was measured where that is no noise, as a slope is (Haar wavelets with
a hard threshold; Donoho & Johnstone 1994). So is each of these in turn, if there are finer ones still.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.bands import Bands
from anamorph.curator.tallies import AtLeast, GroupBy, Tally, Tests
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError
from anamorph.models.answers import no_residuals
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.workload import Workload
from anamorph.rounding import draw, strata
from anamorph.table import Table

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]

DRAWN = 1 << 17
"""About how many numbers are drawn to answer halfspaces."""

LOUD = 3.0
"""How many sigmas two halves of a band must differ by from what their lengths say, to be told as they were measured."""

SINGLE = 4.0
"""How many sigmas a finer band must stand out by to be told as it was measured, alone."""

HELD = 1 << 24
"""About how many products are held at a time."""


@dataclass(frozen=True, eq=False)
class Ruler:
    """Where in its bands a number lies."""

    edges: Integers
    """Ascending codes, from 0 to one more than the last; some of them are where a band begins."""
    heights: Reals
    """h of each of them, from 0 to the number of bands."""

    @property
    def bands(self) -> int:
        """The number of bands."""
        return round(self.heights[-1])

    def below(self, codes: Integers) -> Reals:
        """Returns the share of each band that lies below some codes: codes by bands."""
        reached = np.interp(codes, self.edges, self.heights)
        return np.clip(reached[:, None] - np.arange(self.bands), 0, 1)

    def cut(self, cuts: Sequence[int]) -> Reals:
        """Returns the share of each band that lies in each of other bands, which begin at 0 and at these codes."""
        return np.diff(self.below(np.array((0, *cuts, self.edges[-1]))), axis=0)

    def codes(self, bands: Integers, generator: np.random.Generator) -> Integers:
        """Returns numbers in some bands, those of one band spread as the ruler has it."""
        order = np.argsort(bands, kind="stable")
        inside = np.empty(bands.size)
        inside[order] = strata(bands[order], generator)
        starts = np.searchsorted(self.heights, np.arange(self.bands + 1))  # the first edge of each band
        found = np.interp(bands + inside, self.heights, self.edges).astype(np.int64)
        return np.clip(found, self.edges[starts[bands]], self.edges[starts[bands + 1]] - 1)


def even(cuts: Sequence[int], size: int) -> Ruler:
    """Returns the ruler of a number that lies anywhere in its band."""
    edges = np.array((0, *cuts, size), np.int64)
    return Ruler(edges, np.arange(edges.size, dtype=np.float64))


def detailed(ruler: Ruler, masses: Reals, cuts: Sequence[int], noisy: Reals, sigma: float) -> tuple[Ruler, Reals]:
    """Returns a ruler that also tells what was measured of finer bands, and what share of the rows is in each of these.

    `masses` are those of the pieces of the ruler, each about as well known as one finer band. A piece has the mean of
    that and of what was measured in it, weighed by their noise, and what was measured is moved to agree (Hay et al.
    2010): a sum over many bands has the noise of all of them.
    """
    edges = np.array((0, *cuts, ruler.edges[-1]), np.int64)
    starts = np.searchsorted(edges, ruler.edges).tolist()
    heights, found = [np.zeros(1)], []
    for piece, (start, stop) in enumerate(itertools.pairwise(starts)):
        inner, (low, high) = noisy[start:stop], ruler.heights[piece : piece + 2]
        total = (inner.size * masses[piece] + inner.sum()) / (inner.size + 1)
        agreed = inner + (total - inner.sum()) / inner.size
        shares = divided(np.diff(edges[start : stop + 1]), agreed, sigma)
        rising = low + (high - low) * np.cumsum(shares)
        heights.append(np.append(np.minimum(rising[:-1], high), high))
        found.append(total * shares)
    return Ruler(edges, np.concatenate(heights)), np.concatenate(found)


def divided(lengths: NDArray[np.integer], noisy: Reals, sigma: float) -> Reals:
    """Returns the share of each finer band of a piece: what was measured of single ones that stand out, else by halves.

    A value that many share would be lost in halves: in most of them it has the noise of many bands.
    """
    total = max(noisy.sum(), 0.0)
    single = noisy > total * lengths / lengths.sum() + SINGLE * sigma
    shares = np.where(single, noisy, 0.0)
    if not single.all():
        shares[~single] = max(total - shares.sum(), 0.0) * halved(lengths[~single], noisy[~single], sigma)
    return shares / shares.sum() if shares.sum() > 0 else lengths / lengths.sum()


def halved(lengths: NDArray[np.integer], noisy: Reals, sigma: float) -> Reals:
    """Returns the share of each fine band of a band: even but where the noise tells otherwise.

    The fine bands are halved, and the halves again. Where a half is off by more than `LOUD` sigmas from what its length
    says, it has its share of what was measured of both.
    """
    if noisy.size == 1:
        return np.ones(1)
    half = noisy.size // 2
    parts, spans = (np.array([part[:half].sum(), part[half:].sum()], float) for part in (noisy, lengths))
    even_share = spans[0] / spans.sum()
    # Of first - even_share * (first + second), the noise of either half counts by what the other has.
    spread = sigma * math.sqrt((1 - even_share) ** 2 * half + even_share**2 * (noisy.size - half))
    loud = abs(parts[0] - even_share * parts.sum()) > LOUD * spread
    first = np.clip(parts[0] / parts.sum(), 0, 1) if loud and parts.sum() > 0 else even_share
    inner = (halved(lengths[:half], noisy[:half], sigma), halved(lengths[half:], noisy[half:], sigma))
    return np.concatenate([first * inner[0], (1 - first) * inner[1]])


@dataclass(frozen=True, eq=False)
class BandedRows:
    """A table of relaxed rows with numbers in bands."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    rulers: dict[int, Ruler]
    """Of each number, by its column."""
    rows: RelaxedRows
    """Over bands where a column is a number, else over codes."""

    @property
    def degraded(self) -> bool:
        """Whether a fit met a loss that was not a number and fell back to the best table before it."""
        return self.rows.degraded

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields the answers of each piece of a workload."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> NDArray[np.floating]:
        """Returns the answers of one tally."""
        if isinstance(tally, Where):
            return self.prefixes(tally) if tally.weights is None else self.halfspaces(tally)
        if isinstance(tally, Bands):
            return self.banded(tally)
        if isinstance(tally, GroupBy):
            return self.rows.answer(self.coded(tally))
        if isinstance(tally, AtLeast):
            return self.rows.answer(replace(tally, slab=self.coded(tally.slab)))
        if isinstance(tally, Tests) and not self.rulers.keys() & {f for features in tally.sets for f in features}:
            return self.rows.answer(replace(tally, sizes=self.rows.sizes))
        raise no_residuals()

    def coded(self, slab: GroupBy) -> GroupBy:
        """Returns a slab of a marginal of coded columns, over bands."""
        if self.rulers.keys() & set(slab.features):
            raise no_residuals()
        return replace(slab, sizes=self.rows.sizes)

    def lines(self, column: int) -> NDArray[np.float32]:
        """Returns the probabilities of a column: codes or bands by relaxed rows."""
        first = sum(self.rows.sizes[:column])
        return self.rows.probabilities[first : first + self.rows.sizes[column]]

    def cell_weights(self, given: Sequence[int]) -> Reals:
        """Returns the weight of each relaxed row in each cell of some coded columns: rows by cells."""
        if self.rulers.keys() & set(given):
            raise no_residuals()
        return joint([self.lines(column).astype(np.float64) for column in given], self.rows.weights).T

    def prefixes(self, tally: Where) -> Reals:
        """Returns the answers of prefixes."""
        weights = self.cell_weights(tally.given)
        bounds = np.clip(tally.bounds, -1, np.array(tally.limits, np.int64) - 1)
        answers = np.empty((tally.tests, weights.shape[1]))
        step = max(1, HELD // len(weights))
        for first in range(0, tally.tests, step):
            span = slice(first, first + step)
            passing = np.ones((len(bounds[span]), len(weights)))
            for axis, number in enumerate(tally.numbers):
                passing *= self.rulers[number].below(bounds[span, axis] + 1) @ self.lines(number)
            answers[span] = passing @ weights
        return answers.ravel()

    def halfspaces(self, tally: Where) -> Reals:
        """Returns the answers of halfspaces, by numbers that are drawn from each relaxed row."""
        weights = self.cell_weights(tally.given)
        codes = np.stack([self.drawn[number] for number in tally.numbers], axis=1).astype(np.float64)
        present = np.all(codes < np.array(tally.limits), axis=1)
        answers = np.empty((tally.tests, weights.shape[1]))
        step = max(1, HELD // len(codes))
        for first in range(0, tally.tests, step):
            span = slice(first, first + step)
            holding = tally.holds(codes, span) & present
            answers[span] = holding.reshape(len(holding), len(weights), -1).mean(axis=2) @ weights
        return answers.ravel()

    @cached_property
    def drawn(self) -> dict[int, Integers]:
        """Numbers drawn from the relaxed rows, as many from each, by column."""
        generator = np.random.default_rng(0)
        rows = self.rows.weights.size
        alike = np.full(rows, 1 / rows)
        codes, _ = draw(self.rows.probabilities, alike, self.rows.sizes, rows * -(-DRAWN // rows), generator)
        return {
            number: ruler.codes(codes[:, number].astype(np.int64), generator) for number, ruler in self.rulers.items()
        }

    def banded(self, tally: Bands) -> Reals:
        """Returns the answers of a marginal of bands."""
        found = []
        for feature, cuts in zip(tally.features, tally.cuts, strict=True):
            lines = self.lines(feature).astype(np.float64)
            if feature in self.rulers:
                ruler = self.rulers[feature]
                found.append(ruler.cut(cuts or range(1, self.sizes[feature])) @ lines)
            else:
                owner = np.searchsorted(cuts, np.arange(len(lines)), side="right") if cuts else np.arange(len(lines))
                found.append(np.add.reduceat(lines, np.flatnonzero(np.diff(owner, prepend=-1)), axis=0))
        first, *between, last = (np.ones((1, self.rows.weights.size)), *found)
        step = max(1, HELD // (self.rows.weights.size * math.prod(map(len, between[1:]))))
        parts = [between[0][start : start + step] for start in range(0, len(between[0]), step)] if between else [first]
        return np.concatenate([joint([part, *between[1:]], self.rows.weights) @ last.T for part in parts]).ravel()

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows rounded at random from the relaxed ones, their marginals over `keep` polished."""
        codes = self.rows.sample(rows, seed=seed, keep=keep).codes.copy()
        generator = np.random.default_rng((seed, 6))
        for number, ruler in self.rulers.items():
            codes[:, number] = ruler.codes(codes[:, number].astype(np.int64), generator)
        return Table(codes, self.sizes)

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps."""
        rulers = self.rulers.values()
        return self.rows.arrays() | {
            "numbers": np.array([(number, ruler.edges.size) for number, ruler in self.rulers.items()], np.int64),
            "edges": np.concatenate([ruler.edges for ruler in rulers]),
            "heights": np.concatenate([ruler.heights for ruler in rulers]),
        }

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses anything but probability vectors and rising rulers."""
        listed, edges, heights = arrays["numbers"], arrays["edges"], arrays["heights"]
        plain = listed.dtype == edges.dtype == np.int64 and heights.dtype == np.float64 and len(arrays) == 5
        if not plain or listed.ndim != 2 or listed.shape[1] != 2 or not np.all(listed >= 0):
            raise foreign()
        if not edges.shape == heights.shape == (listed[:, 1].sum(),):
            raise foreign()
        ends = np.cumsum(listed[:, 1]).tolist()
        rulers = {
            number: checked(Ruler(edges[end - length : end], heights[end - length : end]), number, sizes)
            for (number, length), end in zip(listed.tolist(), ends, strict=True)
        }
        merged = tuple(rulers[column].bands if column in rulers else size for column, size in enumerate(sizes))
        kept = {name: arrays[name] for name in ("probabilities", "weights")}
        return cls(sizes, rulers, RelaxedRows.from_arrays(merged, kept))


def joint(lines: Sequence[Reals], weights: NDArray[np.floating]) -> Reals:
    """Returns the products of the lines of some columns, and of the weights of the rows: cells by rows."""
    found = weights.astype(np.float64)[None]
    for mine in lines:
        found = (found[:, None] * mine[None]).reshape(-1, weights.size)
    return found


def checked(ruler: Ruler, number: int, sizes: tuple[int, ...]) -> Ruler:
    """Returns the ruler of a column of a release; refuses one that does not rise, or does not begin every band."""
    edges, heights = ruler.edges, ruler.heights
    ends = number < len(sizes) and edges.size > 1 and edges[0] == 0 and edges[-1] == sizes[number]
    if not ends or not np.all(np.diff(edges) > 0) or not np.all(np.diff(heights) >= 0):
        raise foreign()
    if heights[0] != 0 or not np.isin(np.arange(1, ruler.bands + 1), heights).all() or heights[-1] != ruler.bands:
        raise foreign()
    return ruler


def foreign() -> CorruptionError:
    """Returns the refusal of arrays that are not banded rows."""
    return CorruptionError("the model must hold a rising ruler for each number; it does not")
