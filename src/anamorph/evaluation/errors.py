"""True errors of a release. NOT PRIVATE: these figures touch private rows without noise.

For a workload with true answers a (fractions of n) and released answers b: max is the largest |a - b|, mean the average
over all queries, tv the average over blocks of half the L1 distance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.tallies import Counts, count
from anamorph.models.model import Model
from anamorph.queries.workload import Workload


class Rows(Counts, Protocol):
    """A source of rows."""

    def rows(self) -> int: ...


@dataclass(frozen=True)
class Errors:
    """Error figures of one set of answers."""

    queries: int
    max_error: float
    mean_error: float
    tv: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return asdict(self)


def model_errors(truth: Rows, model: Model, workload: Workload) -> Errors:
    """Returns the errors of a model's own answers."""
    return compare(truth, model.answers(workload), workload)


def row_errors(truth: Rows, rows: Rows, workload: Workload) -> Errors:
    """Returns the errors of a table of synthetic rows."""
    total = max(rows.rows(), 1)
    return compare(truth, (count(piece.tally, rows) / total for piece in workload.pieces()), workload)


def compare(truth: Rows, answers: Any, workload: Workload) -> Errors:  # noqa: ANN401 - any iterable of arrays
    """Returns the errors of answers that come piece by piece, holding one piece at a time."""
    largest, summed = 0.0, 0.0
    total = max(truth.rows(), 1)
    for piece, guess in zip(workload.pieces(), answers, strict=True):
        progress.report("compare", piece.first + piece.blocks, workload.blocks)
        wrong: NDArray[np.float64] = np.abs(count(piece.tally, truth) / total - guess)
        largest, summed = max(largest, float(wrong.max())), summed + float(wrong.sum())
    return Errors(workload.cells, largest, summed / workload.cells, summed / 2 / workload.blocks)
