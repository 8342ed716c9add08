"""Tallies: the closed set of ways in which private rows are counted, each with its sensitivity.

A tally is a public description; query classes compile to tallies, the curator alone executes them, and a model
answers the same tallies on its own rows. The sensitivity of a tally follows from its kind alone:

- `GroupBy`: a slab of one marginal. Every row falls in at most one cell.
- `AtLeast`: the same cells as thresholds: a row adds 1 to every cell that it agrees with in at least r features.
- `Tests`: single cells, each of some marginal, with the number of features that must agree.
- `RowFunction` (rowwise.py): a function of one row, with values in [0, 1].
- `Residual` (residuals.py): a marginal, centred along every axis.
- `Where` (where.py): the cells of a marginal, for the rows whose numbers pass a test; each test is a block.
- `Bands` (bands.py): a marginal in which neighbouring codes are counted together.
- `Cosines` (cosines.py): random Fourier features of numbers, for each cell of a marginal: one block.

A row adds 1 to at most h of the cells of one block, h = 1 for a marginal (see `held`). One row added or removed
changes at most h numbers by 1, one row replaced at most 2 h; so c numbers of one block contribute min(c, h) or
min(c, 2 h) to the squared L2 sensitivity, and blocks add up. Values of a function contribute 1 each, residuals and
cosines what residuals.py and cosines.py say.

A new query class needs no privacy review; a new tally does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.bands import Bands, band_counts, is_bands
from anamorph.curator.cosines import Cosines, cosine_sums, is_cosines, squared_length
from anamorph.curator.residuals import MOST_CELLS, Residual, joint
from anamorph.curator.rowwise import RowFunction, Rowwise, sums
from anamorph.curator.scores import GRID
from anamorph.curator.where import Where, is_where, where_counts
from anamorph.errors import WorkloadError

if TYPE_CHECKING:
    from anamorph.curator.budget import Relation


WHOLE = 1 << 62
"""A limit on pieces that cuts no block."""


@dataclass(frozen=True)
class GroupBy:
    """A slab of one marginal, in C order.

    Its leading features have the codes of `prefix`, the next one a code from `start` to `stop` - 1, the others any.
    """

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    features: tuple[int, ...]
    start: int
    stop: int
    prefix: tuple[int, ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        """The first code of each feature."""
        return (*self.prefix, self.start, *(0 for _ in self.features[len(self.prefix) + 1 :]))

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of codes of each feature."""
        others = (self.sizes[feature] for feature in self.features[len(self.prefix) + 1 :])
        return (*(1 for _ in self.prefix), self.stop - self.start, *others)

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return math.prod(self.shape)

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by."""
        return (self.features,)

    @property
    def offset(self) -> int:
        """The position, in the whole marginal, of the first cell."""
        position = 0
        for feature, code in zip(self.features, self.starts, strict=True):
            position = position * self.sizes[feature] + code
        return position


@dataclass(frozen=True)
class AtLeast:
    """The cells of a slab as thresholds: how many rows agree with each in at least `least` of its features."""

    slab: GroupBy
    least: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns."""
        return self.slab.sizes

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return self.slab.cells

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by: the features and all their subsets of at least `least`."""
        return tuple(tuple(self.slab.features[axis] for axis in axes) for axes, _ in self.terms())

    def terms(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yields (axes, coefficient): the numbers are the sum of these sub-marginals, broadcast over the other axes.

        By inclusion-exclusion, a row that agrees in u features is counted sum_j (-1)^(j-r) C(j-1, r-1) C(u, j) = 1
        times if u >= r, and 0 times if not.
        """
        order = len(self.slab.features)
        for size in range(self.least, order + 1):
            coefficient = (-1) ** (size - self.least) * math.comb(size - 1, self.least - 1)
            for axes in itertools.combinations(range(order), size):
                yield axes, coefficient

    def broadcast(self, numbers: Callable[[GroupBy], NDArray], dtype: type) -> NDArray:
        """Returns the numbers of the tally, of `dtype`, from those of slabs of its sub-marginals."""
        total = np.zeros(self.slab.shape, dtype)
        for axes, coefficient in self.terms():
            part = narrowed(self.slab, axes)
            shape = [size if axis in axes else 1 for axis, size in enumerate(self.slab.shape)]
            total += coefficient * numbers(part).reshape(shape)
        return total.ravel()


def narrowed(slab: GroupBy, axes: tuple[int, ...]) -> GroupBy:
    """Returns the slab of a sub-marginal: the features at `axes`, with the codes that they have in the slab."""
    features = tuple(slab.features[axis] for axis in axes)
    fixed = tuple(axis for axis in axes if axis < len(slab.prefix))
    prefix = tuple(slab.prefix[axis] for axis in fixed)
    if len(prefix) == len(features):
        return GroupBy(slab.sizes, features, prefix[-1], prefix[-1] + 1, prefix[:-1])
    first = axes[len(fixed)]
    start, stop = (slab.start, slab.stop) if first == len(slab.prefix) else (0, slab.sizes[slab.features[first]])
    return GroupBy(slab.sizes, features, start, stop, prefix)


@dataclass(frozen=True, eq=False)
class Tests:
    """Single cells: query j asks for agreement with cell `positions[j]` of the marginal over `sets[which[j]]`."""

    sizes: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    which: NDArray[np.int64]
    positions: NDArray[np.int64]
    least: tuple[int, ...] | None = None
    """For each set, how many of its features must agree; without it all must."""

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return self.which.size

    def needed(self, index: int) -> int:
        """Returns how many features of a set must agree."""
        return len(self.sets[index]) if self.least is None else self.least[index]

    def codes(self, index: int) -> NDArray[np.int64]:
        """Returns, for the queries of one set, the code that each of its features should have: queries by features."""
        return codes_of(self.sizes, self.sets[index], self.positions[self.which == index])


def codes_of(sizes: tuple[int, ...], features: tuple[int, ...], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the codes of cells of a marginal: cells by features."""
    shape = tuple(sizes[feature] for feature in features)
    return np.stack(np.unravel_index(positions, shape), axis=1)


Special = Residual | Where | Bands | Cosines
"""The tallies that only some models answer."""

Tally = GroupBy | AtLeast | Tests | RowFunction | Special


class Test(NamedTuple):
    """A test of numbers with the marginal of those that pass it, or a marginal of bands."""

    key: tuple[object, ...]


class Circles(NamedTuple):
    """The cosines and sines of some frequencies."""

    frequencies: int
    key: tuple[object, ...]


class Settled(NamedTuple):
    """A piece of a workload as a curator has read it, each field once: what is checked is what is counted."""

    tally: Tally
    first: int
    blocks: int
    weight: Fraction


Alone = tuple[tuple[int, ...], tuple[int, ...], int] | Rowwise | Test | Circles
"""Blocks whose sensitivities add up."""
Block = Alone | Residual
"""What numbers of several tallies may share: (sizes, features, how many must agree), a function, or one of the rest."""


class Counts(Protocol):
    """What a tally needs of a source of rows.

    For marginals, their non-empty cells, positions ascending, and counts; for functions, the encoded rows in batches.
    It may have `grouped` too, for marginals over ranks of numbers: see where.py and bands.py.
    """

    def counts(self, sets: tuple[tuple[int, ...], ...]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]: ...
    def batches(self) -> Iterator[NDArray[np.int32]]: ...


def count(tally: Tally, source: Counts) -> NDArray[np.int64]:
    """Returns the exact numbers of a tally, in units of 1 / `scale(tally)`."""
    if isinstance(tally, RowFunction):
        remembered = getattr(source, "values", None)  # one that has counted the function before
        whole = remembered(tally.function) if remembered else sums(tally.function, source.batches())
        return whole if tally.chosen is None else whole[tally.chosen]
    if isinstance(tally, AtLeast):
        return tally.broadcast(lambda part: count(part, source), np.int64)
    if isinstance(tally, Special):
        return special(tally, source)
    numbers = np.zeros(tally.cells, np.int64)
    for index, (cells, counts) in enumerate(source.counts(tally.sets)):
        if isinstance(tally, GroupBy):
            first, last = np.searchsorted(cells, (tally.offset, tally.offset + tally.cells))
            numbers[cells[first:last] - tally.offset] = counts[first:last]
        elif tally.needed(index) == len(tally.sets[index]):
            asked = np.flatnonzero(tally.which == index)
            numbers[asked] = look_up(cells, counts, tally.positions[asked])
        else:
            rows = codes_of(tally.sizes, tally.sets[index], cells)
            numbers[tally.which == index] = agreeing(rows, counts, tally.codes(index), tally.needed(index))
    return numbers


def special(tally: Special, source: Counts) -> NDArray[np.int64]:
    """Returns the exact numbers of a tally that is neither of cells nor of functions."""
    if isinstance(tally, Residual):
        return tally.centred(count(GroupBy(tally.sizes, tally.features, 0, tally.shape[0]), source))
    if isinstance(tally, Where):
        known = getattr(source, "tested", None)  # one that has counted the tests before
        return known(tally) if known else where_counts(tally, source)
    if isinstance(tally, Bands):
        kept = getattr(source, "banded", None)
        return kept(tally) if kept else band_counts(tally, source)
    return cosine_sums(tally, source.batches())


def grid(tally: Tally) -> int:
    """Returns the binary digits after the point of a tally's numbers."""
    return GRID if isinstance(tally, RowFunction) else 0


def scale(tally: Tally) -> int:
    """Returns one over the unit of a tally's numbers."""
    return tally.scale if isinstance(tally, Residual | Cosines) else 1 << grid(tally)


def agreeing(
    rows: NDArray[np.int64], counts: NDArray[np.int64], wanted: NDArray[np.int64], least: int
) -> NDArray[np.int64]:
    """Returns, for each wanted combination, how many rows agree with it in at least `least` features.

    Rows are listed once, with their counts; both are arrays of codes, one line each.
    """
    numbers = np.empty(wanted.shape[0], np.int64)
    for query, codes in enumerate(wanted):
        alike = np.zeros(rows.shape[0], np.int8)
        for feature, code in enumerate(codes):
            alike += rows[:, feature] == code
        numbers[query] = counts[alike >= least].sum()
    return numbers


def look_up(cells: NDArray[np.int64], counts: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the counts at `positions`, zero where a cell is not listed."""
    if cells.size == 0:
        return np.zeros(positions.size, np.int64)
    place = np.minimum(np.searchsorted(cells, positions), cells.size - 1)
    return np.where(cells[place] == positions, counts[place], 0)


def squared_sensitivity(
    tallies: Sequence[Tally], relation: Relation, weights: Sequence[Fraction] | None = None
) -> Fraction:
    """Returns the square of the joint L2 sensitivity of tallies, each scaled by the root of its weight, in counts.

    The sum over blocks of weight * min(numbers asked, h or 2 h), or what residuals and cosines add: see the head of
    this module.
    It holds only if no number is asked twice of one block, so that is refused.
    """
    found = numbers_asked(tallies, weights or [Fraction(1)] * len(tallies))
    residuals = [(block, weight) for block, weight in found if isinstance(block, Residual)]
    others = [
        weight * moved(block, asked, relation)
        for (block, weight), asked in found.items()
        if not isinstance(block, Residual)
    ]
    return sum(others, start=joint(residuals, relation))


def moved(block: Alone, asked: int, relation: Relation) -> Fraction | int:
    """Returns the squared L2 sensitivity of some of the numbers of one block, in counts."""
    if isinstance(block, Circles):
        return squared_length(block.frequencies, relation)
    most = 1 if relation == "add-remove" else 2
    return min(asked, most if isinstance(block, Test) else most * held(block))


def held(block: tuple[tuple[int, ...], tuple[int, ...], int] | Rowwise) -> int:
    """Returns to how many numbers of a block one row can add.

    With at least r of k features in agreement: sum over subsets U of r or more of the product of (size - 1) over the
    features outside U; 1 for r = k. A function may add to all of its values.
    """
    if isinstance(block, Rowwise):
        return block.count
    sizes, features, least = block
    ways = [1] + [0] * len(features)  # ways[u]: how many cells agree with a row in u of the features so far
    for feature in features:
        ways = [ways[u] * (sizes[feature] - 1) + (ways[u - 1] if u else 0) for u in range(len(ways))]
    return sum(ways[least:])


def numbers_asked(tallies: Sequence[Tally], weights: Sequence[Fraction]) -> dict[tuple[Block, Fraction], int]:
    """Returns how many numbers of each block are asked; refuses a number that is asked twice."""
    spans: dict[tuple[Block, Fraction], list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for tally, weight in zip(tallies, weights, strict=True):
        for block, span in spans_of(tally):
            spans.setdefault((block, weight), []).append(span)
    asked = {}
    for key, found in spans.items():
        starts, stops = (np.concatenate(ends) for ends in zip(*found, strict=True))
        order = np.argsort(starts)
        if np.any(stops[order][:-1] > starts[order][1:]):
            raise WorkloadError("a query must be asked once in one measurement: these blocks overlap")
        asked[key] = int(np.sum(stops - starts))
    return asked


def spans_of(tally: Tally) -> Iterator[tuple[Block, tuple[NDArray[np.int64], NDArray[np.int64]]]]:
    """Yields, for each block of a tally, where the runs of positions asked of it start and stop."""
    if isinstance(tally, RowFunction):
        positions = np.arange(tally.function.count) if tally.chosen is None else tally.chosen
        yield tally.function, (positions, positions + 1)
    elif isinstance(tally, Residual):
        yield tally, (np.array([0]), np.array([tally.cells]))
    elif isinstance(tally, Where):
        for key in tally.identities():
            yield Test(key), (np.array([0]), np.array([tally.width]))
    elif isinstance(tally, Bands):
        key = ("bands", tally.sizes, tally.features, tally.cuts)
        yield Test(key), (np.array([0]), np.array([tally.cells]))
    elif isinstance(tally, Cosines):
        yield Circles(tally.count, tally.identity), (np.array([0]), np.array([tally.cells]))
    elif isinstance(tally, Tests):
        for index, features in enumerate(tally.sets):
            positions = tally.positions[tally.which == index]
            yield (tally.sizes, features, tally.needed(index)), (positions, positions + 1)
    else:
        slab, least = (tally.slab, tally.least) if isinstance(tally, AtLeast) else (tally, len(tally.features))
        yield (
            (slab.sizes, slab.features, least),
            (np.array([slab.offset]), np.array([slab.offset + slab.cells])),
        )


def check_tally(tally: object, sizes: tuple[int, ...]) -> None:
    """Refuses what is not a tally of the closed set over these columns."""
    if type(tally) is GroupBy:
        sound = is_slab(tally, sizes)
    elif type(tally) is AtLeast:
        sound = type(tally.slab) is GroupBy and is_slab(tally.slab, sizes)
        sound = sound and 1 <= tally.least <= len(tally.slab.features)
    elif type(tally) is Tests:
        sound = all(is_set(features, sizes) for features in tally.sets) and within(tally)
    elif type(tally) is RowFunction:
        sound = type(tally.function) is Rowwise and tally.function.sizes == sizes and is_choice(tally)
    elif type(tally) is Residual:
        sound = is_set(tally.features, sizes) and min(tally.shape) > 1 and tally.cells <= MOST_CELLS
    elif type(tally) is Where:
        sound = is_where(tally, sizes)
    elif type(tally) is Bands:
        sound = is_bands(tally, sizes)
    elif type(tally) is Cosines:
        sound = is_cosines(tally, sizes)
    else:
        sound = False
    if not sound or getattr(tally, "sizes", None) != sizes:
        raise WorkloadError("the workload must be of tallies over the columns of this schema")


def copied(tally: Tally) -> Tally:
    """Returns a tally made of plain integers and arrays of its own; what is no tally as it is."""
    if type(tally) is GroupBy:
        return GroupBy(
            whole(tally.sizes), whole(tally.features), int(tally.start), int(tally.stop), whole(tally.prefix)
        )
    if type(tally) is AtLeast and type(tally.slab) is GroupBy:
        slab = copied(tally.slab)
        return AtLeast(slab, int(tally.least)) if isinstance(slab, GroupBy) else tally
    if type(tally) is Tests:
        sets = tuple(map(whole, tally.sets))
        least = None if tally.least is None else whole(tally.least)
        which, positions = np.array(tally.which, np.int64), np.array(tally.positions, np.int64)
        return Tests(whole(tally.sizes), sets, which, positions, least)
    if isinstance(tally, Special) and type(tally) in get_args(Special):
        kind: Any = type(tally)
        return kind.copied(tally)  # the method of the class, whatever the object says
    if type(tally) is RowFunction and tally.chosen is not None:
        return RowFunction(whole(tally.sizes), tally.function, np.array(tally.chosen, np.int64))
    return tally


def whole(numbers: Iterable[int]) -> tuple[int, ...]:
    """Returns plain integers."""
    return tuple(int(number) for number in numbers)


def is_slab(slab: GroupBy, sizes: tuple[int, ...]) -> bool:
    """Returns whether a slab lies inside a marginal of these columns."""
    if not is_set(slab.features, sizes) or len(slab.prefix) >= len(slab.features):
        return False
    fixed = all(0 <= code < sizes[feature] for code, feature in zip(slab.prefix, slab.features, strict=False))
    return fixed and 0 <= slab.start < slab.stop <= sizes[slab.features[len(slab.prefix)]]


def is_choice(tally: RowFunction) -> bool:
    """Returns whether the values chosen are values of the function."""
    if tally.chosen is None:
        return True
    whole = tally.chosen.ndim == 1 and tally.chosen.size > 0 and tally.chosen.dtype == np.int64
    return whole and bool(tally.chosen.min() >= 0 and tally.chosen.max() < tally.function.count)


def is_set(features: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Returns whether features are distinct columns."""
    return len(features) > 0 and len(set(features)) == len(features) and all(0 <= f < len(sizes) for f in features)


def within(tally: Tests) -> bool:
    """Returns whether every cell asked is a cell of its marginal."""
    if tally.which.shape != tally.positions.shape or tally.which.ndim != 1 or not tally.cells:
        return False
    if tally.which.min() < 0 or tally.which.max() >= len(tally.sets):
        return False
    if tally.least is not None and len(tally.least) != len(tally.sets):
        return False
    if not all(1 <= tally.needed(index) <= len(features) for index, features in enumerate(tally.sets)):
        return False
    cells = np.array([marginal_cells(tally.sizes, features) for features in tally.sets])
    return bool(np.all((tally.positions >= 0) & (tally.positions < cells[tally.which])))


def marginal_cells(sizes: tuple[int, ...], features: tuple[int, ...]) -> int:
    """Returns the number of cells of a marginal, as a Python integer of any size."""
    return math.prod(sizes[feature] for feature in features)
