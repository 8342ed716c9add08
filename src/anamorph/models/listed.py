"""Listed rows as a model: a table of plain rows, each of which counts the same.

This is what the methods of the query release game make: rows that an oracle has found, one or some each round. A query
is answered by counting them; synthetic rows are drawn from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.estimates import RowTable
from anamorph.curator.tallies import Special, count, scale
from anamorph.errors import CorruptionError
from anamorph.models.answers import no_residuals
from anamorph.queries.workload import Workload
from anamorph.table import Table


@dataclass(frozen=True, eq=False)
class ListedRows:
    """Some rows, at least one."""

    table: Table

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns."""
        return self.table.sizes

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields the fraction of the rows, or the mean of functions of them."""
        for piece in workload.pieces():
            if isinstance(piece.tally, Special):
                raise no_residuals()
            yield count(piece.tally, self.table) / (scale(piece.tally) * self.table.rows)

    def estimate(self, _: Workload) -> RowTable:
        """Returns the rows as a table that queries are compared with one by one."""
        return RowTable(self.table, self.table.rows)

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows in any order: each of the list equally often, up to one more of some, chosen at random."""
        generator = np.random.default_rng(seed)
        whole, more = divmod(rows, self.table.rows)
        places = np.concatenate(
            [np.tile(np.arange(self.table.rows), whole), generator.permutation(self.table.rows)[:more]]
        )
        return Table(self.table.codes[generator.permutation(places)], self.sizes)

    def arrays(self) -> dict[str, NDArray]:
        """Returns the codes."""
        return {"codes": self.table.codes}

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses codes that the schema does not have."""
        codes = arrays["codes"] if set(arrays) == {"codes"} else np.zeros((0, 0), np.int32)
        rows, columns = codes.shape if codes.ndim == 2 else (0, 0)
        if not rows or columns != len(sizes) or codes.dtype != np.int32 or np.any((codes < 0) | (codes >= sizes)):
            raise CorruptionError("the release's rows must be codes of the columns of its schema; they are not")
        return cls(Table(codes, sizes))
