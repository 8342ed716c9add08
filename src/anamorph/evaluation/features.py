"""Rows as learners see them. NOT PRIVATE: true values, without noise.

Columns of categories are codes of the schema, so that synthetic and real rows have the same features whatever values
occur in them. Numbers and moments are read as they are, clamped to their declared bounds, and never through the bins
of a mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anamorph.columns import MOST_BINS, Column, Datetime, Numeric
from anamorph.schema import Schema
from anamorph.sources import encode

Places = NDArray[np.intp]


@dataclass(frozen=True)
class Examples:
    """Rows, column by column."""

    schema: Schema
    codes: dict[str, NDArray[np.int32]]
    """The codes of every other column."""
    numbers: dict[str, NDArray[np.float64]]
    """The values of every column of numbers or moments; NaN where there is none."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter((self.codes | self.numbers).values())))

    def take(self, places: Places) -> Examples:
        """Returns some of the rows."""
        codes = {name: values[places] for name, values in self.codes.items()}
        return Examples(self.schema, codes, {name: values[places] for name, values in self.numbers.items()})


def examples(data: Any, schema: Schema) -> Examples:  # noqa: ANN401 - a path, a URL or a frame
    """Returns the rows of a file, a database or a frame."""
    reading = Schema(tuple(map(finest, schema.columns)), schema.dataset)
    table = encode(data, reading)
    codes, numbers = {}, {}
    for column, found in zip(reading.columns, table.codes.T, strict=True):
        if column.grid is not None:
            numbers[column.name] = values(column.grid, found)
        else:
            codes[column.name] = found
    return Examples(schema, codes, numbers)


def finest(column: Column) -> Column:
    """Returns a column of numbers or moments on a grid so fine that a code is as good; others as they are."""
    if isinstance(column, Datetime):
        return replace(column, bins=None, missing=True)
    if not isinstance(column, Numeric):
        return column
    width = float(column.upper) - float(column.lower) + 1
    bins = int(min(width, MOST_BINS)) if column.integer else MOST_BINS
    return Numeric(
        name=column.name, lower=column.lower, upper=column.upper, bins=bins, integer=column.integer, missing=True
    )


def values(grid: Numeric, codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Returns the number in the middle of each step, exact for whole ones; NaN for a missing one."""
    middle = 0.0 if grid.integer and grid.bins == grid.width else 0.5
    return np.where(codes < grid.bins, grid.at(codes + middle), np.nan)


@dataclass(frozen=True)
class Design:
    """How columns become features: what is learnt from the training rows at hand, and nothing from others."""

    columns: tuple[Column, ...]
    means: dict[str, float]
    scales: dict[str, float]

    @classmethod
    def of(cls, training: Examples, names: Sequence[str]) -> Self:
        """Returns the design of some columns: means and standard deviations of the training rows."""
        columns = tuple(column for column in training.schema.columns if column.name in names)
        means, scales = {}, {}
        for column in columns:
            if column.name in training.numbers:
                known = training.numbers[column.name][~np.isnan(training.numbers[column.name])]
                means[column.name] = float(np.mean(known)) if known.size else 0.0
                scales[column.name] = float(np.std(known)) or 1.0 if known.size else 1.0
        return cls(columns, means, scales)

    def linear(self, rows: Examples) -> Any:  # noqa: ANN401 - a sparse matrix
        """Returns one-hot categories beside standardised numbers, sparse.

        A missing number is the mean; where the schema declares missing ones, another feature says so.
        """
        from scipy.sparse import csr_matrix  # noqa: PLC0415

        places, entries, width = [], [], 0
        for column in self.columns:
            if column.name in rows.codes:
                places.append(width + rows.codes[column.name].astype(np.int64))
                entries.append(np.ones(rows.rows))
                width += column.size
                continue
            number = rows.numbers[column.name]
            standard = (number - self.means[column.name]) / self.scales[column.name]
            for feature in [np.nan_to_num(standard)] + [np.isnan(number).astype(float)] * column.missing:
                places.append(np.full(rows.rows, width))
                entries.append(feature)
                width += 1
        starts = np.arange(rows.rows + 1) * len(places)
        return csr_matrix(
            (np.stack(entries, axis=1).ravel(), np.stack(places, axis=1).ravel(), starts), shape=(rows.rows, width)
        )

    def trees(self, rows: Examples, most: int) -> tuple[NDArray[np.float64], list[bool]]:
        """Returns codes and numbers as they are, and which are categories: those of up to `most` codes."""
        arrays = [
            rows.codes[column.name].astype(np.float64) if column.name in rows.codes else rows.numbers[column.name]
            for column in self.columns
        ]
        categories = [column.name in rows.codes and column.size <= most for column in self.columns]
        return np.stack(arrays, axis=1), categories
