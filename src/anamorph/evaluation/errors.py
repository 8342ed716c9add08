"""True errors of a release. NOT PRIVATE: these figures touch private rows without noise.

For a workload with true answers a (fractions of n) and released answers b: max is the largest |a - b|, mean the average
over all queries, tv the average over marginals of half the L1 distance.

Answers are compared piece by piece. A marginal with many more cells than rows is compared on the cells of rows alone:
with b >= 0 and sum(b) = 1, sum |a - b| = 1 + sum over the support of a of (|a - b| - b); its largest error is found by
bounds (largest.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.bands import Bands
from anamorph.curator.estimates import Estimate, RowTable, Support
from anamorph.curator.tallies import Counts, GroupBy, count, scale
from anamorph.evaluation.largest import block_error
from anamorph.models.generator import Generator
from anamorph.models.listed import ListedRows
from anamorph.models.model import Model
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.workload import WHOLE, Queries, Workload

LARGE = 1 << 22
"""A marginal of more cells than this is compared on the supports alone."""


class Rows(Counts, Protocol):
    """A source of rows."""

    def rows(self) -> int: ...


@dataclass(frozen=True)
class Errors:
    """Error figures of one set of answers."""

    queries: int
    max_error: float
    mean_error: float
    tv: float | None
    """None where no block is a marginal."""
    blocks: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return asdict(self)


def model_errors(truth: Rows, model: Model, workload: Workload) -> list[Errors]:
    """Returns the errors of a model's own answers, for each part of a workload."""
    estimate = model.estimate(workload) if isinstance(model, RelaxedRows | Generator | ListedRows) else None
    return compare(truth, model, workload, estimate)


def row_errors(truth: Rows, rows: Rows, workload: Workload) -> list[Errors]:
    """Returns the errors of a table of synthetic rows, for each part of a workload."""
    return compare(truth, Counted(rows), workload, RowTable(rows, rows.rows()))


@dataclass(frozen=True)
class Counted:
    """Rows that answer a workload by their own counts."""

    rows: Rows

    def answers(self, workload: Workload) -> Iterable[NDArray[np.float64]]:
        """Yields the answers of each piece."""
        total = max(self.rows.rows(), 1)
        for piece in workload.pieces():
            yield count(piece.tally, self.rows) / scale(piece.tally) / total


class Answering(Protocol):
    """What answers a workload, piece by piece."""

    def answers(self, workload: Workload) -> Iterable[NDArray[np.floating]]: ...


def compare(truth: Rows, answering: Answering, workload: Workload, estimate: Estimate | None) -> list[Errors]:
    """Returns the errors of answers; of large marginals by the table they come from, where there is one."""
    found = []
    for part, first in zip(workload.parts, workload.firsts, strict=True):
        if not part.blocks:
            continue
        errors = []
        for block in blocks_of(part, workload):
            progress.report("compare", first + len(errors), workload.blocks)
            tally = next(block.pieces(WHOLE)).tally
            sparse = isinstance(estimate, RowTable) or tally.cells > LARGE
            if estimate is not None and isinstance(tally, GroupBy) and block.blocks == 1 and sparse:
                errors.append(sparse_errors(truth, estimate, block, tally))
            else:
                errors.append(dense_errors(truth, answering.answers(block), block))
        found.append(merged(errors))
    progress.report("compare", workload.blocks, workload.blocks)
    return found


def blocks_of(part: Queries, workload: Workload) -> Iterator[Workload]:
    """Yields the blocks of a part one by one; single queries all at once."""
    if part.largest_block == 1:
        yield replace(workload, parts=(part,), weights=())
        return
    for block in range(part.blocks):
        yield replace(workload, parts=(part.take([block]),), weights=())


def merged(found: Sequence[Errors]) -> Errors:
    """Returns the errors of several sets of blocks as those of all of them."""
    queries, blocks = sum(part.queries for part in found), sum(part.blocks for part in found)
    distances = [(part.tv, part.blocks) for part in found if part.tv is not None]
    return Errors(
        queries,
        max(part.max_error for part in found),
        sum(part.mean_error * part.queries for part in found) / queries,
        sum(tv * times for tv, times in distances) / sum(times for _, times in distances) if distances else None,
        blocks,
    )


def dense_errors(truth: Rows, answers: Iterable[NDArray[np.floating]], workload: Workload) -> Errors:
    """Returns the errors of answers that come piece by piece, holding one piece at a time."""
    largest, summed = 0.0, 0.0
    total = max(truth.rows(), 1)
    for piece, guess in zip(workload.pieces(), answers, strict=True):
        exact = count(piece.tally, truth) / scale(piece.tally) / total
        wrong: NDArray[np.float64] = np.abs(exact - guess)
        largest, summed = max(largest, float(wrong.max())), summed + float(wrong.sum())
    marginals = all(isinstance(piece.tally, GroupBy | Bands) and piece.blocks == 1 for piece in workload.pieces(WHOLE))
    tv = summed / 2 / workload.blocks if marginals else None
    return Errors(workload.cells, largest, summed / workload.cells, tv, workload.blocks)


def sparse_errors(truth: Rows, estimate: Estimate, workload: Workload, tally: GroupBy) -> Errors:
    """Returns the errors of one marginal from the cells that are not empty."""
    total = max(truth.rows(), 1)
    shape = tuple(tally.sizes[feature] for feature in tally.features)
    data = Support(shape, *next(iter(truth.counts((tally.features,)))), total, 1.0)
    side = estimate.side(tally.sizes, tally.features, 1.0)
    guess = side.fractions(data.cells, len(shape))
    summed = float(np.sum(np.abs(data.counts / total - guess) - guess)) + 1
    largest = block_error(data, side, len(shape))
    return Errors(workload.cells, largest, summed / workload.cells, summed / 2 / workload.blocks, workload.blocks)
