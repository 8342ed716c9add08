"""Contests: the blocks of single queries in a selection, as strata that are formed when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.candidates import (
    TICKETS,
    Ballot,
    Given,
    Prior,
    Scored,
    Tickets,
    listed,
    marginal_strata,
)
from anamorph.curator.coarse import threshold_strata
from anamorph.curator.estimates import Estimate, Integers, RelaxedTable, Side, Support
from anamorph.curator.lottery import lottery, winners
from anamorph.curator.noise import Bits
from anamorph.curator.rowwise import RowFunction
from anamorph.curator.scores import GRID, differences, times
from anamorph.curator.tallies import (
    AtLeast,
    Counts,
    GroupBy,
    Settled,
    Special,
    Tally,
    Tests,
    count,
    grid,
    marginal_cells,
)
from anamorph.errors import ParameterError

FINEST = 1 << 30
"""How much bounds are tightened at most."""

PATIENCE = 20_000
"""After so many tickets drawn in vain the bounds are tightened."""

KEPT_BYTES = 128 << 20
"""How much memory is kept for strata."""


Block = tuple[tuple[int, ...], tuple[int, ...], int]
"""The sizes of all columns, the features of a block, and how many of them must agree."""


@dataclass(frozen=True)
class Contest:
    """A block of single queries in a selection."""

    first: int
    """The id of its first query."""
    size: int
    ballot: Callable[[Integers, int], tuple[Ballot, Scored]]
    """Returns its strata, and the differences of cells, whose absolute values are their scores: with as few tickets as
    can be for some cells that are excluded, and with bounds so much tighter than usual."""


class Pool:
    """All strata of a selection; those of a block are formed again when a ticket falls on it, unless they are kept."""

    def __init__(self, contests: Sequence[Contest], excluded: Integers) -> None:
        self._contests, self._excluded = contests, excluded
        self._firsts = np.array([contest.first for contest in contests])
        self._kept: dict[int, tuple[Ballot, Scored]] = {}
        self._bytes = 0
        self._fineness, self._asked = [1] * len(contests), np.zeros(len(contests), np.int64)
        self._strata = [self._described(index) for index in range(len(contests))]

    @property
    def levels(self) -> list[int]:
        """The level of each stratum."""
        return [level for levels, _ in self._strata for level in levels]

    @property
    def weights(self) -> list[int]:
        """The tickets of each stratum."""
        return [weight for _, weights in self._strata for weight in weights]

    def draw(self, k: int, scale: float, bits: Bits) -> Integers:
        """Returns the k queries with the largest noisy scores, in order."""
        chosen = np.zeros(0, np.int64)
        while chosen.size < k:
            won = lottery(self.levels, self.weights, k - chosen.size, scale, self.errors, bits, PATIENCE)
            chosen = np.concatenate([chosen, won])
            if won.size:
                self.exclude(won)
            else:
                self.refine()
        return chosen

    def draw_signed(self, draws: int, scale: float, bits: Bits) -> Integers:
        """Returns independent draws, with replacement: 2 i for query i, 2 i + 1 for its negation.

        A negation has the difference of its query with the other sign: every ticket is torn in two.
        """
        drawn: list[int] = []
        while len(drawn) < draws:
            left = draws - len(drawn)
            doubled = [2 * weight for weight in self.weights]
            won = list(islice(winners(self.levels, doubled, left, scale, self.signed, bits, PATIENCE), left))
            drawn += won
            if not won:
                self.refine()
        return np.array(drawn, np.int64)

    def errors(self, strata: Integers, ranks: Sequence[int]) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Returns the id of the query that holds each ticket, its error, and whether the ticket is valid."""
        ids, differences, valid = self.find(strata, ranks)
        return ids, np.abs(differences), valid

    def signed(self, strata: Integers, ranks: Sequence[int]) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Returns the same for a half of a ticket: of a query and its difference, or of its negation."""
        ids, differences, valid = self.find(strata, [rank >> 1 for rank in ranks])
        negated = np.array([rank & 1 for rank in ranks], np.int64)
        return 2 * ids + negated, np.where(negated, -differences, differences), valid

    def refine(self) -> None:
        """Tightens the bounds of the blocks that most tickets fell on, in vain."""
        for owner in np.flatnonzero(self._asked >= self._asked.max() / 2).tolist():
            self._fineness[owner] = min(2 * self._fineness[owner], FINEST)
            self._form(owner)
        self._asked[:] = 0

    def exclude(self, chosen: Integers) -> None:
        """Takes queries out of the pool."""
        self._excluded = np.union1d(self._excluded, chosen)
        for owner in np.unique(np.searchsorted(self._firsts, chosen, side="right") - 1).tolist():
            self._form(owner)

    def find(self, strata: Integers, ranks: Sequence[int]) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Returns the id of the query that holds each ticket, its difference, and whether the ticket is valid."""
        ids, found = np.zeros(strata.size, np.int64), np.zeros(strata.size, np.int64)
        valid = np.zeros(strata.size, np.bool_)
        starts = np.cumsum([0, *(len(levels) for levels, _ in self._strata)])
        owners = np.searchsorted(starts, strata, side="right") - 1
        for owner in np.unique(owners).tolist():
            ballot, differences = self._ballot(owner)
            self._asked[owner] += np.count_nonzero(owners == owner)
            for stratum in np.unique(strata[owners == owner]).tolist():
                mine = np.flatnonzero(strata == stratum)
                cells, sound = ballot.find(stratum - int(starts[owner]), [ranks[i] for i in mine.tolist()])
                ids[mine], valid[mine] = self._firsts[owner] + cells, sound
                found[mine[sound]] = differences(cells[sound])
        return ids, found, valid & ~np.isin(ids, self._excluded)

    def _form(self, index: int) -> None:
        if index in self._kept:
            self._bytes -= self._kept.pop(index)[0].nbytes
        self._strata[index] = self._described(index)

    def _described(self, index: int) -> tuple[Sequence[int], Sequence[int]]:
        ballot, _ = self._ballot(index)
        return ballot.levels, ballot.weights

    def _ballot(self, index: int) -> tuple[Ballot, Scored]:
        if index in self._kept:
            return self._kept[index]
        contest = self._contests[index]
        start, stop = np.searchsorted(self._excluded, (contest.first, contest.first + contest.size))
        made = contest.ballot(self._excluded[start:stop] - contest.first, self._fineness[index])
        if self._bytes + made[0].nbytes <= KEPT_BYTES:
            self._bytes += made[0].nbytes
            self._kept[index] = made
        return made


@dataclass(frozen=True, eq=False)
class Comparison:
    """What queries are scored by: exact counts, a public table, the public total, and the scale of the selection."""

    counts: Counts
    estimate: Estimate
    total: float
    scale: float
    prior: Prior | None = None

    def contests(self, pieces: Sequence[Settled], shares: Sequence[int]) -> Iterator[Contest]:
        """Yields the contest of each piece of single queries; its differences are times its share."""
        blocks = [block_of(piece.tally) for piece in pieces]
        known = [marginal_cells(sizes, features) for sizes, features, _ in filter(None, blocks)]
        mean = sum(known) // max(len(known), 1)
        for piece, block, share in zip(pieces, blocks, shares, strict=True):
            if block is None:
                yield Contest(piece.first, piece.blocks, partial(self.listed, piece.tally, share))
            else:
                yield Contest(piece.first, piece.blocks, partial(self.block, block, share, mean))

    def block(self, block: Block, share: int, mean: int, excluded: Integers, fineness: int) -> tuple[Ballot, Scored]:
        """Returns the strata of a whole block, and its differences."""
        sizes, features, least = block
        data, side = self.sides(block)
        tickets = Tickets() if self.prior is None else self.prior.tickets(sizes, features, mean)
        given = Given(data, side, float(share << GRID), self.scale, tickets, excluded, fineness)

        def found(cells: Integers) -> Integers:
            return times(differences(data.at(cells, least), side.fractions(cells, least), self.total), share)

        if least == len(features):
            return marginal_strata(given, lambda cells: np.abs(found(cells))), found
        return threshold_strata(given, least), found

    def sides(self, block: Block) -> tuple[Support, Side]:
        """Returns the rows and the estimate, seen through a block."""
        sizes, features, _ = block
        shape = tuple(sizes[feature] for feature in features)
        data = Support(shape, *next(iter(self.counts.counts((features,)))))
        return data, self.estimate.side(sizes, features, self.total)

    def listed(self, tally: Tally, share: int, excluded: Integers, _: int) -> tuple[Ballot, Scored]:
        """Returns the strata of queries that are listed one by one, and their differences."""
        found = times(differences(count(tally, self.counts), self.answers(tally), self.total, grid(tally)), share)
        cells = np.delete(np.arange(tally.cells), excluded)
        tickets = Tickets() if self.prior is None else Tickets(1 << 30 + TICKETS)  # as many as a weight of 1 has
        return listed(cells, np.abs(found[cells]), self.scale, tickets), lambda cells: found[cells]

    def differences(self, piece: Settled, cells: Integers) -> Integers:
        """Returns the differences of some single queries of a piece."""
        if (block := block_of(piece.tally)) is not None:
            data, side = self.sides(block)
            return differences(data.at(cells, block[2]), side.fractions(cells, block[2]), self.total)
        tally = piece.tally
        return differences(count(tally, self.counts), self.answers(tally), self.total, grid(tally))[cells]

    def answers(self, tally: Tally) -> NDArray[np.float64]:
        """Returns the estimate of queries that are listed one by one."""
        if isinstance(tally, RowFunction):
            functions = self.estimate.functions if isinstance(self.estimate, RelaxedTable) else {}
            if tally.function not in functions:
                raise ParameterError("estimate must hold the answers of the workload's functions")
            found = functions[tally.function]
            return found if tally.chosen is None else found[tally.chosen]
        if isinstance(tally, Special):
            raise ParameterError("residuals and tests of numbers must not be selected against a table")
        if isinstance(tally, Tests):
            values = np.empty(tally.cells)
            for index, features in enumerate(tally.sets):
                mine = tally.which == index
                side = self.estimate.side(tally.sizes, features, self.total)
                values[mine] = side.fractions(tally.positions[mine], tally.needed(index))
            return values
        slab, least = (tally.slab, tally.least) if isinstance(tally, AtLeast) else (tally, len(tally.features))
        side = self.estimate.side(slab.sizes, slab.features, self.total)
        return side.fractions(slab.offset + np.arange(slab.cells), least)


def block_of(tally: Tally) -> Block | None:
    """Returns the sizes, the features and how many must agree, of a tally that is a whole block; else None."""
    slab = tally.slab if isinstance(tally, AtLeast) else tally
    if not isinstance(slab, GroupBy) or slab.cells != marginal_cells(slab.sizes, slab.features):
        return None
    return slab.sizes, slab.features, tally.least if isinstance(tally, AtLeast) else len(slab.features)
