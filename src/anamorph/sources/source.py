"""Source: where private rows live, and the one thing it tells of them, exact counts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import DataError, ParameterError
from anamorph.schema import Schema
from anamorph.sources.engine import BATCH, DATABASE, MEMORY, EngineSource, load_database, load_rows
from anamorph.sources.files import read_file
from anamorph.sources.frame import read_frame
from anamorph.sources.sql import check_sets
from anamorph.table import Table


class Source(Protocol):
    """Private rows that can be counted. All it returns is exact, and so private: the curator's business."""

    @property
    def schema(self) -> Schema:
        """The columns."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of columns of the data that are not in the schema."""
        ...

    def rows(self) -> int:
        """Returns the number of rows."""
        ...

    def counts(self, sets: Sequence[tuple[int, ...]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Returns, for each marginal in turn, its non-empty cells and their counts.

        A marginal is given by the positions of its columns in the schema. Cells are positions in its C-order
        table, ascending. Refuses a marginal of 2^63 cells or more before anything is counted.
        """
        ...

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Yields the encoded rows, in batches: codes, rows by columns."""
        ...

    def close(self) -> None:
        """Forgets the rows."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class TableSource:
    """A source of rows that are encoded already: synthetic ones, or those of a test."""

    def __init__(self, table: Table, schema: Schema) -> None:
        if tuple(table.sizes) != schema.sizes:
            raise ParameterError("data must be a Table encoded by this schema: its sizes are others")
        for column, codes in zip(schema.columns, table.codes.T, strict=True):
            if table.rows and not (codes.min() >= 0 and codes.max() < column.size):
                raise DataError(f"column {column.name!r} must hold codes from 0 to {column.size - 1}")
        self.schema = schema
        self.ignored: tuple[str, ...] = ()
        self._table = table

    def rows(self) -> int:
        """Returns the number of rows."""
        return self._table.rows

    def counts(self, sets: Sequence[tuple[int, ...]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Returns, for each marginal in turn, its non-empty cells in order and their counts."""
        check_sets(sets, self.schema)
        return self._table.counts(sets)

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Yields the encoded rows, in batches."""
        for first in range(0, self.rows(), BATCH):
            yield self._table.codes[first : first + BATCH]

    def close(self) -> None:
        """Does nothing: the table is the caller's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(data: Any, schema: Schema, *, memory_limit: str = MEMORY) -> Source:  # noqa: ANN401
    """Returns the source of a CSV or Parquet path, a `duckdb:///file.db#table`, a frame, or an encoded Table.

    Args:
        data: where the rows are. A path is read once, whole, before this returns.
        schema: the columns; others of the data are ignored.
        memory_limit: the memory the engine may use before it spills to disk, as "4GB" or "50%".
    """
    return TableSource(data, schema) if isinstance(data, Table) else _open(data, schema, memory_limit)


def encode(frame: Any, schema: Schema) -> Table:  # noqa: ANN401
    """Returns the encoded rows of a frame, in their order; also of a path or a URL, as in `open_source`."""
    with _open(frame, schema, MEMORY, ordered=True) as source:
        return source.table()


def _open(data: Any, schema: Schema, memory_limit: str, *, ordered: bool = False) -> EngineSource:  # noqa: ANN401
    if not isinstance(data, str | os.PathLike):
        return load_rows(read_frame(data, schema), memory_limit=memory_limit, ordered=ordered)
    path = os.fspath(data)
    if not isinstance(path, str):
        raise ParameterError("data must be a path of text, not of bytes")
    if path.startswith(DATABASE):
        return load_database(path, schema, memory_limit=memory_limit, ordered=ordered)
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+(?=://)", path)
    if scheme:
        raise ParameterError(f"data ({scheme.group()}://…) must be a path or {DATABASE}file.db#table")
    return load_rows(read_file(path, schema), memory_limit=memory_limit, ordered=ordered)


def check_structure(path: str, schema: Schema) -> tuple[str, ...]:
    """Returns remarks on how a file's columns fit a schema; refuses a file that lacks one. Reads no value."""
    rows = read_file(path, schema)
    rows.close()
    return tuple(f"column {name!r} is not in the schema and will be ignored" for name in rows.ignored)
