"""Table: encoded rows."""

from __future__ import annotations

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

    def cells(self, features: tuple[int, ...]) -> NDArray[np.int64]:
        """Returns, for each row, the position of its cell in the marginal over `features`, in C order."""
        position = np.zeros(self.rows, np.int64)
        for feature in features:
            position *= self.sizes[feature]
            position += self.codes[:, feature]
        return position
