"""Table: encoded rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Table:
    """Encoded rows: the code of each cell, and the size of each column's domain."""

    codes: NDArray[np.int32]
    """Codes, rows by columns."""
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.shape[1] != len(self.sizes):
            raise ValueError(f"codes {self.codes.shape} must be rows by {len(self.sizes)} columns")

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.codes.shape[0]

    def counts(self, sets: Iterable[tuple[int, ...]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields the non-empty cells of each marginal, in order, and their counts."""
        for features in sets:
            positions = self.cells(features)
            size = math.prod(self.sizes[feature] for feature in features)
            if size > 4 * self.rows:
                found, counts = np.unique(positions, return_counts=True)
                yield found, counts.astype(np.int64)
            else:
                dense = np.bincount(positions, minlength=size).astype(np.int64)
                yield np.flatnonzero(dense), dense[dense > 0]

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Yields the rows."""
        yield self.codes

    def cells(self, features: tuple[int, ...]) -> NDArray[np.int64]:
        """Returns, for each row, the position of its cell in the marginal over `features`, in C order."""
        position = np.zeros(self.rows, np.int64)
        for feature in features:
            position *= self.sizes[feature]
            position += self.codes[:, feature]
        return position
