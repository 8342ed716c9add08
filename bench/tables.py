"""Benchmark tables in memory, read without an engine: these benches also run where only numpy and jax are."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anamorph.schema import Schema
from anamorph.table import Table

DATA = Path(os.environ.get("ANAMORPH_DATA", "../shared/data"))


class Rows:
    """Encoded rows that count themselves."""

    def __init__(self, table: Table, schema: Schema) -> None:
        self.schema, self.table = schema, table

    def rows(self) -> int:
        """Returns the number of rows."""
        return self.table.rows

    def counts(self, sets: Sequence[tuple[int, ...]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields the non-empty cells of each marginal and their counts."""
        for features in sets:
            cells, counts = np.unique(self.table.cells(features), return_counts=True)
            yield cells, counts.astype(np.int64)

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Yields the encoded rows."""
        yield self.table.codes


def load(name: str) -> Rows:
    """Returns a coded benchmark table."""
    sizes = json.loads((DATA / f"{name}-domain.json").read_text())
    plain = {column: {"type": "codes", "values": size, "source": "public"} for column, size in sizes.items()}
    schema = Schema.from_dict({"dataset": name, "columns": plain})
    with gzip.open(DATA / f"{name}.csv.gz", "rt", newline="") as file:
        header, *lines = csv.reader(file)
    order = [header.index(column) for column in sizes]
    codes = np.array(lines, np.float64)[:, order].astype(np.int32)
    return Rows(Table(codes, schema.sizes), schema)
