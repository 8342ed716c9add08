"""Real rows in two parts: some to fit a release and to train models, others to test them.

NOT PRIVATE: the parts are the rows themselves.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anamorph.errors import DataError, ParameterError
from anamorph.schema import Schema
from anamorph.sources.files import read_file
from anamorph.sources.frame import read_frame
from anamorph.tables import replace_file

TRAINING = 0.8
"""The part of the rows that is trained on."""


def parts(rows: int, *, fraction: float = TRAINING, seed: int = 0) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns the places of the training rows and of the test rows, each in order; the seed is public."""
    if not 0 < fraction < 1:
        raise ParameterError(f"fraction ({fraction}) must be above 0 and below 1")
    first = round(fraction * rows)
    if not 0 < first < rows:
        raise DataError("the data must have rows enough for two parts")
    shuffled = np.random.default_rng(seed).permutation(rows)
    return np.sort(shuffled[:first]), np.sort(shuffled[first:])


def split(
    data: Any,  # noqa: ANN401 - a path or a frame
    schema: Schema,
    *,
    fraction: float = TRAINING,
    seed: int = 0,
) -> tuple[pa.Table, pa.Table]:
    """Returns the training rows and the test rows of a file or a frame: the schema's columns, cells as they are."""
    table = raw_rows(data, schema)
    train, test = parts(table.num_rows, fraction=fraction, seed=seed)
    return table.take(pa.array(train)), table.take(pa.array(test))


def write_split(
    data: str, schema: Schema, train: Path, test: Path, *, fraction: float = TRAINING, seed: int = 0, overwrite: bool
) -> None:
    """Writes the two parts of a file, as CSV or Parquet by the names' endings."""
    for path in (train, test):
        if path.suffix.lower() not in (".csv", ".parquet"):
            raise ParameterError(f"output ({str(path)!r}) must end in .csv or .parquet")
        if path.exists() and not overwrite:
            raise ParameterError(f"output ({str(path)!r}) must not exist yet: name another, or add --overwrite")
    if train.absolute() == test.absolute():
        raise ParameterError("train and test must be two files")
    for path, table in zip((train, test), split(data, schema, fraction=fraction, seed=seed), strict=True):
        write = write_parquet if path.suffix.lower() == ".parquet" else write_csv
        replace_file(path, overwrite=overwrite, write=partial(write, table))


def write_parquet(table: pa.Table, path: Path) -> None:
    """Writes rows as they are."""
    from pyarrow import parquet  # noqa: PLC0415

    parquet.write_table(table, path)


def write_csv(table: pa.Table, path: Path) -> None:
    """Writes rows as they are: a cell that looks like a formula stays one, since -5 may be a number."""
    from pyarrow import csv  # noqa: PLC0415

    csv.write_csv(table, path)


def raw_rows(data: Any, schema: Schema) -> pa.Table:  # noqa: ANN401
    """Returns the rows of a file or a frame, cells as they are stored."""
    if isinstance(data, str) and "://" in data:
        raise ParameterError("data must be a file or a frame to be split: make two tables of it in the database")
    rows = read_file(Path(data), schema) if isinstance(data, str | os.PathLike) else read_frame(data, schema)
    try:
        table = rows.reader().read_all()
    finally:
        rows.close()
    if rows.failure is not None:
        raise rows.failure
    return table.rename_columns(list(schema.names))
