"""A local search for the row that agrees best with weighted conjunctions (models/rows.py), for many problems at once.

Coordinate ascent: a column takes the code that is best given all others, then the next column does, until none changes.
It ends where no single column can gain, and there are many such rows: a conjunction for which two columns must change
at once is invisible to it. So conjunctions are then adopted whole: all their columns take the codes that they name, the
other columns answer, then all may move again. What is better is kept; what was tried in vain is not tried again.

Problems differ in `linear` alone, so one layout serves all, and every step is an operation on arrays that have a column
for each problem. Of the codes that no conjunction names only the best one of each column matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.errors import ParameterError
from anamorph.models.conjunctions import Best, Codes, Conjunctions, Places, Reals, batches

SWEEPS = 100
"""The most times that an ascent visits all columns; rounding alone could make it longer."""
HEAT = 0.3
"""How random the choice of a conjunction to adopt is, in units of the mean positive weight."""
REACH = 2.0
"""A conjunction is not tried if adopting it looks worse than by this many of the largest weight."""
SMALL = 1 << 10
"""The most entries of a matrix of weights: larger ones are mostly zeros, and slower than sums."""

Flags = NDArray[np.bool_]
Counts = NDArray[np.int16]


@dataclass(frozen=True)
class Column:
    """What the search knows of one column: slots for the codes that conjunctions name, and one for all others."""

    slots: slice
    """Among the slots of all columns; the last one is for the codes that no conjunction names."""
    lines: Places
    """The conjunctions that test this column, in the order of their slots."""
    named: Places
    """The slot that each of these names, upright."""
    bounds: list[int]
    """Where the conjunctions of each slot begin, and where the last ones end."""
    weights: Reals
    """The weights of these conjunctions."""
    matrix: Reals | None
    """The weights by slots and conjunctions, if that is small."""

    def sums(self, decisive: Flags) -> Reals:
        """Returns the weight of the decisive conjunctions of each slot but the last."""
        if self.matrix is not None:
            return self.matrix @ decisive
        numbers, found = decisive.astype(np.float64), np.empty((len(self.bounds) - 1, decisive.shape[1]))
        for line, (begin, end) in zip(found, pairwise(self.bounds), strict=True):
            np.dot(self.weights[begin:end], numbers[begin:end], out=line)
        return found


@dataclass(frozen=True)
class Layout:
    """How conjunctions are laid out for the search."""

    columns: tuple[Column, ...]
    places: Places
    """The place of each slot; -1 for the last one of a column, whose place depends on the problem."""
    tests: Places
    """As those of the conjunctions, by slots; the number of slots pads."""
    weights: Reals

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self.places)

    def column_of(self) -> Places:
        """Returns the column of each slot."""
        widths = [column.slots.stop - column.slots.start for column in self.columns]
        return np.repeat(np.arange(len(widths)), widths)


class Standing(NamedTuple):
    """Where rows are, one for each problem; changed in place."""

    held: Places
    """The slot that each column has: columns by problems."""
    missing: Counts
    """How many tests of each conjunction fail: conjunctions by problems."""
    values: Reals

    def take(self, problems: Places) -> Standing:
        """Returns a copy for some of the problems."""
        return Standing(self.held[:, problems], self.missing[:, problems], self.values[problems])

    def put(self, problems: Places, new: Standing) -> None:
        """Takes over the rows of some problems."""
        self.held[:, problems], self.missing[:, problems], self.values[problems] = new


def climbed(
    conjunctions: Conjunctions,
    linear: ArrayLike,
    *,
    seed: int | np.random.Generator = 0,
    restarts: int = 8,
    rows: ArrayLike | None = None,
) -> Best:
    """Returns good rows, one for each line of `linear`; nothing is proven.

    The first ascent starts at `rows`, or at the best codes of `linear`, and the result is never worse than that. Then
    `restarts` times a conjunction of positive weight is adopted, one that looks as if it were worth it.
    """
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ParameterError(f"restarts ({restarts!r}) must be a whole number of at least 0")
    vectors = conjunctions.vectors(linear)
    generator, layout = np.random.default_rng(seed), layout_of(conjunctions)
    starts = conjunctions.leading(vectors) if rows is None else conjunctions.checked(rows, len(vectors))
    found = starts.copy()
    for part in batches(len(vectors), max(len(conjunctions), conjunctions.total)):
        worth, others = _worth(conjunctions, layout, vectors[part])
        held = _searched(layout, worth, _held(conjunctions, layout, starts[part]), restarts, generator)
        places = layout.places[held]
        found[part] = np.where(places < 0, others, places).T - conjunctions.offsets
    values, before = conjunctions.values(found, vectors), conjunctions.values(starts, vectors)
    worse = values < before  # by rounding only
    found[worse], values[worse] = starts[worse], before[worse]
    return Best(found, values, np.zeros(len(found), bool))


def layout_of(conjunctions: Conjunctions) -> Layout:
    """Returns the layout that conjunctions ask for."""
    total, columns, weights = conjunctions.total, conjunctions.columns, conjunctions.weights
    named = np.unique(conjunctions.tests)
    named = named[named < total]
    bounds = np.searchsorted(columns[named], np.arange(len(conjunctions.sizes) + 1))
    bounds += np.arange(len(bounds))
    slot_of = np.full(total + 1, bounds[-1])
    slot_of[named] = np.arange(len(named)) + columns[named]
    places = np.full(bounds[-1], -1)
    places[slot_of[named]] = named
    tests = slot_of[conjunctions.tests]
    order = np.argsort(tests, axis=None, kind="stable")
    slot, line = tests.ravel()[order], order // tests.shape[1]
    parts = [slice(*ends) for ends in np.searchsorted(slot, np.stack([bounds[:-1], bounds[1:]], axis=1))]
    found = []
    for first, last, part in zip(bounds[:-1].tolist(), bounds[1:].tolist(), parts, strict=True):
        lines, named = line[part], slot[part]
        slots = np.arange(first, last - 1)
        starts = [*np.searchsorted(named, slots).tolist(), len(named)]
        matrix = (slots[:, None] == named) * weights[lines] if len(slots) * len(named) <= SMALL else None
        found.append(Column(slice(first, last), lines, named[:, None], starts, weights[lines], matrix))
    return Layout(tuple(found), places, tests, weights)


def _worth(conjunctions: Conjunctions, layout: Layout, linear: Reals) -> tuple[Reals, Places]:
    """Returns `linear` by slots, 0 for the padding, and for each column the best place that no conjunction names."""
    named = layout.places >= 0
    worth = np.zeros((layout.slots + 1, len(linear)))
    worth[:-1][named] = linear.T[layout.places[named]]
    rest = linear.copy()
    rest[:, layout.places[named]] = -np.inf
    others = conjunctions.leading(rest) + conjunctions.offsets
    last = [column.slots.stop - 1 for column in layout.columns]
    worth[last] = np.take_along_axis(rest, others, axis=1).T
    return worth, others.T


def _held(conjunctions: Conjunctions, layout: Layout, rows: Codes) -> Places:
    """Returns the slot that each row has in each column. A code that no conjunction names becomes the best of these."""
    slot_of = np.repeat([column.slots.stop - 1 for column in layout.columns], conjunctions.sizes)
    slot_of[layout.places[layout.places >= 0]] = np.flatnonzero(layout.places >= 0)
    return slot_of[rows.T + conjunctions.offsets[:, None]]


def _searched(layout: Layout, worth: Reals, held: Places, restarts: int, generator: np.random.Generator) -> Places:
    """Returns the slots that the rows of a search end at."""
    best = _ascended(layout, worth, held, np.zeros_like(held, bool))
    hopeful, active = np.flatnonzero(layout.weights > 0), np.arange(held.shape[1])
    if not len(hopeful):
        return best.held
    tried = np.zeros((len(hopeful), len(active)), bool)
    for _ in range(restarts):
        part, part_worth = best.take(active), worth[:, active]
        promise = _promise(layout, part_worth, part, hopeful)
        promise[tried[:, active]] = -np.inf
        promising = np.flatnonzero(promise.max(axis=0) > -REACH * layout.weights.max())
        active = active[promising]
        if not len(active):
            break
        heat = HEAT * layout.weights[hopeful].mean()
        chosen = (promise[:, promising] + heat * generator.standard_exponential((len(hopeful), len(promising)))).argmax(
            axis=0
        )
        tried[chosen, active] = True
        held, firm = _adopted(layout, part.held[:, promising], layout.tests[hopeful[chosen]])
        new = _ascended(layout, part_worth[:, promising], held, firm)
        better = np.flatnonzero(new.values > best.values[active])
        best.put(active[better], new.take(better))
        tried[:, active[better]] = False
    return best.held


def _promise(layout: Layout, worth: Reals, rows: Standing, hopeful: Places) -> Reals:
    """Returns what adopting each conjunction seems to be worth, as if its columns changed one by one."""
    change = np.zeros_like(worth)
    for column, held in zip(layout.columns, rows.held, strict=True):
        scores = _scores(column, worth, held, rows.missing)
        change[column.slots] = scores - np.take_along_axis(scores, held[None] - column.slots.start, axis=0)
    missing = rows.missing[hopeful]
    promise = np.where(missing > 1, layout.weights[hopeful, None], 0.0)  # the change of a single column has it already
    for slots in layout.tests[hopeful].T:
        promise += change[slots]
    promise[missing == 0] = -np.inf
    return promise


def _adopted(layout: Layout, held: Places, tests: Places) -> tuple[Places, Flags]:
    """Returns the slots of rows after each has adopted one conjunction, and which columns that are."""
    held, firm, column_of = held.copy(), np.zeros_like(held, bool), layout.column_of()
    for slots in tests.T:
        rows = np.flatnonzero(slots < layout.slots)
        columns = column_of[slots[rows]]
        held[columns, rows], firm[columns, rows] = slots[rows], True
    return held, firm


def _ascended(layout: Layout, worth: Reals, held: Places, firm: Flags) -> Standing:
    """Returns where coordinate ascent ends; columns that are firm stay as they are until all others have moved once."""
    held, missing = held.copy(), _missing(layout, held)
    active, moving = np.arange(held.shape[1]), ~firm
    for _ in range(SWEEPS):
        part_worth, part_held, part_missing = worth[:, active], held[:, active], missing[:, active]
        moved = ~moving.all(axis=0)  # rows with firm columns have another turn
        for column, slots, free in zip(layout.columns, part_held, moving, strict=True):
            moved |= _moved(column, part_worth, slots, part_missing, free)
        held[:, active], missing[:, active] = part_held, part_missing
        active = active[moved]
        moving = np.ones((len(held), len(active)), bool)
        if not len(active):
            break
    values = np.take_along_axis(worth, held, axis=0).sum(axis=0) + layout.weights @ (missing == 0)
    return Standing(held, missing, values)


def _missing(layout: Layout, held: Places) -> Counts:
    """Returns how many tests of each conjunction each row fails."""
    fails = np.ones((layout.slots + 1, held.shape[1]), np.int16)
    np.put_along_axis(fails, held, 0, axis=0)
    fails[-1] = 0
    found = fails[layout.tests[:, 0]]
    for tests in layout.tests.T[1:]:
        found += fails[tests]
    return found


def _moved(column: Column, worth: Reals, held: Places, missing: Counts, free: Flags) -> Flags:
    """Gives the rows that are free their best slot of this column, in place; returns which rows have changed."""
    scores = _scores(column, worth, held, missing)
    now = scores[held - column.slots.start, np.arange(len(held))]
    rows = np.flatnonzero(free & (scores.max(axis=0) > now))
    moved = np.zeros(len(held), bool)
    moved[rows] = True
    if len(rows):
        before, held[rows] = held[rows], scores[:, rows].argmax(axis=0) + column.slots.start
        lines = np.ix_(column.lines, rows)
        missing[lines] += (column.named == before).view(np.int8) - (column.named == held[rows]).view(np.int8)
    return moved


def _scores(column: Column, worth: Reals, held: Places, missing: Counts) -> Reals:
    """Returns what each slot of a column is worth given the other columns."""
    scores = worth[column.slots].copy()
    if len(column.lines):
        passed = (column.named == held).view(np.int8)
        scores[:-1] += column.sums(missing[column.lines] + passed == 1)  # all other tests are passed
    return scores
