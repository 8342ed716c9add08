"""Polishing: rounded rows are changed, a value at a time, until their marginals are near a model's answers.

Rows drawn from relaxed ones (`rounding`) have the model's answers in expectation only: which values meet in a row is
left to chance, and where the privacy noise is small this sampling noise is the larger error. Polishing lowers

    objective = sum over sets of sum over cells of (count - N target)^2

by moves. A move gives one row another value of one column, drawn from the probabilities of the relaxed row it came
from: what is impossible there stays impossible, and a row stays one that its relaxed row could have given. A move
takes 1 from a cell of each set that holds the column and adds 1 to another, so alone it changes the objective by

    change = 2 sum over these sets of (residual of the new cell - residual of the old cell + 1).

A sweep visits the columns in random order, and in each every row once, in batches. Each row of a batch draws some
candidates and proposes the best, if it lowers the objective. Moves that are made together interact: if move i is made
with chance p_i, the objective changes in expectation by

    sum over i of p_i change_i  +  sum over i != j of p_i p_j <move i, move j>.

With q_i = sum over j of <move i, move j>, p_i = min(1, -change_i / (2 q_i)) (1 if q_i is not positive) makes this at
most half of its first sum, and so negative, where no two moves help each other. No table is needed for q: all moves
are made, q_i is read from how the residuals at the cells of move i have grown, and what chance rejects is taken back.
The change of what remains is computed exactly; as long as it is not negative, each move is taken back with chance 1/2.
So the objective never rises. What was taken back is weighed again, with the new residuals, in further rounds.

Residuals are counted in whole units, a power of two to a row, so they equal a recount whatever the order of additions.

References: Aydore et al. 2021, section 4, which rounds by sampling only. Deviation: everything here. The targets are
the model's own answers, and nothing else is used, so the rows are as private as the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.table import Table

SWEEPS = 6
"""The most sweeps."""
CANDIDATES = 3
"""How many values a row draws when it is visited."""
ROUNDS = 3
"""How often the moves of a batch are weighed."""
BATCHES = 96
"""The batches of a column: with more, moves interact less; with fewer, arrays are longer and so faster."""
SMALLEST, LARGEST = 32, 8192
"""The fewest and the most rows of a batch."""
FLOOR = 1e-6
"""A value less probable than this is never drawn: it may be a structural zero, which a softmax does not reach."""
STALLED = 0.02
"""Sweeps end when one lowers the objective by less than this fraction of it."""
LOOKUPS = 1 << 31
"""The most residuals that all sweeps may look up, some minutes' work: there are fewer sweeps, or none, for more."""
RANGE = 1 << 29
"""The most units that all rows together may be."""

Targets = Mapping[tuple[int, ...], NDArray[np.floating]]


def polished(
    codes: NDArray[np.int32],
    owner: NDArray[np.int64],
    probabilities: NDArray[np.floating],
    sizes: tuple[int, ...],
    targets: Targets,
    *,
    seed: int,
    sweeps: int = SWEEPS,
) -> NDArray[np.int32]:
    """Returns the rows with some values changed, so that their marginals are near the targets.

    `owner` says which relaxed row each row was drawn from; `probabilities` has a line for each code of each feature
    and a column for each relaxed row; `targets` has the fractions wanted of the cells of sets of features, in C order.
    """
    lookups = len(codes) * sum(map(len, targets)) * (CANDIDATES + 1)
    affordable = min(sweeps, LOOKUPS // lookups) if lookups else 0
    if affordable < 1:
        return codes.copy()
    polish = Polish.start(codes, sizes, targets)
    bounds = np.cumsum((0, *sizes))
    values = [Values.of(probabilities[first : first + size]) for first, size in zip(bounds, sizes, strict=False)]
    sweep_all(polish, owner, values, affordable, np.random.default_rng((seed, 2)))
    return np.ascontiguousarray(polish.codes.T, np.int32)


def sweep_all(
    polish: Polish, owner: NDArray[np.int64], values: list[Values], sweeps: int, generator: np.random.Generator
) -> None:
    """Polishes until sweeps are spent or no longer worth their time."""
    objective = polish.objective()
    total = sweeps * len(values)
    for sweep in range(sweeps):
        before = objective
        for visited, column in enumerate(generator.permutation(len(values))):
            progress.report("polish", sweep * len(values) + visited, total)
            objective += polish.visit(int(column), owner, values[column], generator)
        if objective >= (1 - STALLED) * before:
            break
    progress.report("polish", total, total)


@dataclass(frozen=True, eq=False)
class Values:
    """The values of one column, to be drawn for any relaxed row."""

    ladder: NDArray[np.float64]
    """The cumulated probabilities of each relaxed row, those of row r raised by r, one row after the other."""
    size: int

    @classmethod
    def of(cls, probabilities: NDArray[np.floating]) -> Self:
        """Returns the values of a column: a line for each code, a column for each relaxed row."""
        floor = np.minimum(FLOOR, probabilities.max(axis=0))  # of very many codes all may be below
        cumulated = np.cumsum(np.where(probabilities < floor, 0, probabilities), axis=0, dtype=np.float64)
        ladder = cumulated / cumulated[-1] + np.arange(cumulated.shape[1])
        return cls(ladder.T.ravel(), len(cumulated))

    def draw(self, owner: NDArray[np.int64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns, for each number, the code whose step of the owner's ladder holds it; a probability 0 has no step."""
        heights = np.minimum(owner + uniform, np.nextafter(owner + 1.0, 0))
        return np.searchsorted(self.ladder, heights, side="right") - owner * self.size


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows that may take another value of one column."""

    rows: NDArray[np.int64]
    values: NDArray[np.int64]
    old: NDArray[np.int64]
    """Where the cells lie that the rows would leave: a line for each set, a column for each move."""
    new: NDArray[np.int64]
    """Where the cells lie that they would enter."""
    changes: NDArray[np.int64]
    """What each, made alone, adds to the objective, in units."""

    def part(self, kept: NDArray) -> Moves:
        """Returns some of the moves."""
        return Moves(self.rows[kept], self.values[kept], self.old[:, kept], self.new[:, kept], self.changes[kept])


@dataclass(frozen=True, eq=False)
class Polish:
    """Rows, and how far their marginals are from the targets; both change in place."""

    codes: NDArray[np.int64]
    """The codes, features by rows."""
    residuals: NDArray[np.int32]
    """Count - N target of each cell of each set, one set after the other, in units."""
    strides: NDArray[np.int64]
    """How far apart the cells of successive codes lie: a line for each set, a column for each feature, 0 outside."""
    members: NDArray[np.int64]
    """The features of each set, a line for each; those of small sets are followed by some outside it."""
    firsts: NDArray[np.int64]
    """Where each set begins."""
    unit: int
    """How many units a row is."""

    @classmethod
    def start(cls, codes: NDArray[np.int32], sizes: tuple[int, ...], targets: Targets) -> Self:
        """Returns the rows with their residuals."""
        unit = 1 << max(0, (RANGE // len(codes)).bit_length() - 1)
        table = Table(codes, sizes)
        firsts = np.cumsum([0, *(target.size for target in targets.values())])
        residuals = np.empty(firsts[-1], np.int32)
        strides = np.zeros((len(targets), len(sizes)), np.int64)
        for index, (features, target) in enumerate(targets.items()):
            shape = [sizes[feature] for feature in features]
            strides[index, list(features)] = [int(np.prod(shape[place + 1 :])) for place in range(len(shape))]
            counts = np.bincount(table.cells(features), minlength=int(np.prod(shape)))
            wanted = np.rint(target.astype(np.float64) * (len(codes) * unit))
            residuals[firsts[index] : firsts[index + 1]] = counts * unit - wanted
        members = np.argsort(strides == 0, axis=1, kind="stable")[:, : max(map(len, targets), default=0)]
        return cls(codes.T.astype(np.int64), residuals, strides, members, firsts[:-1], unit)

    def objective(self) -> float:
        """Returns the sum of the squared residuals, in rows."""
        parts = np.split(self.residuals, self.firsts[1:])
        return sum(float(np.square(part / self.unit).sum()) for part in parts)

    def visit(self, column: int, owner: NDArray[np.int64], values: Values, generator: np.random.Generator) -> float:
        """Moves rows to other values of one column; returns the change of the objective."""
        sets = np.flatnonzero(self.strides[:, column])
        if not sets.size:
            return 0.0
        order, change = generator.permutation(len(owner)), 0
        batch = min(max(len(order) // BATCHES, SMALLEST), LARGEST)
        for first in range(0, len(order), batch):
            rows = np.sort(order[first : first + batch])  # those of one relaxed row together: drawn and found faster
            uniform = generator.random((CANDIDATES, rows.size))
            drawn = values.draw(np.broadcast_to(owner[rows], uniform.shape), uniform)
            change += self.settle(column, self.proposals(column, sets, rows, drawn), generator)
        return change / self.unit

    def proposals(self, column: int, sets: NDArray, rows: NDArray[np.int64], drawn: NDArray[np.int64]) -> Moves:
        """Returns the moves to the best of the values drawn (candidates by rows), where it lowers the objective."""
        held, old = self.codes[column, rows], self.cells(sets, rows)
        stride = self.strides[sets, column][:, None]
        candidate, place = np.nonzero(drawn != held)
        reached = old[:, place] + stride * (drawn[candidate, place] - held[place])
        changes = np.zeros(drawn.shape, np.int64)
        changes[candidate, place] = self.changes(old, reached, place)
        best = (changes.argmin(axis=0), np.arange(rows.size))
        value, change = drawn[best], changes[best]
        moves = Moves(rows, value, old, old + stride * (value - held), change)
        return moves.part(change < 0)

    def cells(self, sets: NDArray, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where the cells of rows lie: a line for each set.

        As a product of matrices it would be mostly zeros, and wait for the threads of BLAS where others work beside it.
        """
        codes = self.codes[:, rows]
        found = np.repeat(self.firsts[sets, None], rows.size, axis=1)
        for member in self.members[sets].T:
            found += self.strides[sets, member][:, None] * codes[member]
        return found

    def changes(self, old: NDArray[np.int64], new: NDArray[np.int64], place: NDArray | slice) -> NDArray[np.int64]:
        """Returns what moves add to the objective alone, from those columns of the old cells that `place` names."""
        there = self.residuals[old].sum(axis=0, dtype=np.int64)
        reached = self.residuals[new].sum(axis=0, dtype=np.int64)
        return 2 * (reached - there[place] + self.unit * len(new))

    def settle(self, column: int, moves: Moves, generator: np.random.Generator) -> int:
        """Makes random parts of the moves, each of which lowers the objective; returns its change, in units."""
        total = 0
        for _ in range(ROUNDS):
            if not moves.rows.size:
                break
            made, change = self.make(moves, generator)
            self.codes[column, moves.rows[made]] = moves.values[made]
            total += change
            moves = moves.part(~made)
            moves = replace(moves, changes=self.changes(moves.old, moves.new, slice(None)))
            moves = moves.part(moves.changes < 0)
        return total

    def make(self, moves: Moves, generator: np.random.Generator) -> tuple[NDArray[np.bool_], int]:
        """Counts a random part of the moves that lowers the objective; returns which, and the change, in units."""
        self.shift(moves, self.unit)
        made = np.ones(moves.rows.size, np.bool_)
        chance = chances(moves.changes, self.together(moves))
        while made.any():
            kept = made & (generator.random(made.size) < chance)
            self.shift(moves.part(made & ~kept), -self.unit)
            part, made = moves.part(kept), kept
            change = int(part.changes.sum() + self.together(part).sum())
            if change < 0:
                return made, change
            chance = 0.5
        return made, 0

    def shift(self, moves: Moves, units: int) -> None:
        """Adds units to the cells that rows enter, and takes them from those that they leave."""
        np.add.at(self.residuals, moves.new.ravel(), units)
        np.subtract.at(self.residuals, moves.old.ravel(), units)

    def together(self, moves: Moves) -> NDArray[np.int64]:
        """Returns each move's interaction with all others, where all are made and counted.

        A move that was made is undone at a change of -change - 2 * interaction, which is what a move back would cost.
        """
        back = self.changes(moves.new, moves.old, slice(None))
        return -(back + moves.changes) // 2


def chances(changes: NDArray[np.int64], together: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the chance with which each move is made: less where it meets many others of the same effect."""
    return np.minimum(1, -changes / np.maximum(2 * together, 1))
