"""Frames as rows: pandas, polars, pyarrow, anything narwhals knows, anything with an Arrow stream.

Columns of Python objects, of whatever mixture, become text by one rule (`spell`), so that what a column is
does not depend on the values in it.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np
import pyarrow as pa

from anamorph.columns import Categorical, Column, label
from anamorph.errors import AnamorphError, DataError, ParameterError
from anamorph.schema import Schema
from anamorph.sources.rows import Rows, match_columns, unreadable

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = "\ufffd"
"""The text of an object that has none: no category, no number."""


def read_frame(frame: Any, schema: Schema) -> Rows:  # noqa: ANN401 - any frame
    """Returns the rows of a frame."""
    failure = None
    try:
        return _read(frame, schema)
    except AnamorphError:
        raise
    except Exception as error:  # a lazy frame computes its values here, and may quote them
        failure = unreadable(error, "the frame")
    raise failure


def _read(frame: Any, schema: Schema) -> Rows:  # noqa: ANN401
    native = nw.to_native(frame, pass_through=True)
    if nw.dependencies.is_pandas_dataframe(native):
        return _pandas(native, schema)
    if isinstance(native, pa.Table):
        return _arrow(native, schema)
    if isinstance(native, pa.RecordBatch):
        return _arrow(pa.Table.from_batches([native]), schema)
    known = nw.from_native(native, pass_through=True)
    if isinstance(known, nw.DataFrame | nw.LazyFrame):
        return _narwhals(known, schema)
    if hasattr(native, "__arrow_c_stream__"):
        return _arrow(pa.RecordBatchReader.from_stream(native).read_all(), schema)
    raise ParameterError(f"data ({type(frame).__name__}) must be a path, a URL, a frame or an encoded Table")


def _pandas(frame: pd.DataFrame, schema: Schema) -> Rows:
    places, ignored = match_columns([str(name) for name in frame.columns], schema)
    series = [frame.iloc[:, place] for place in places]
    return _rows([_pandas_column(*pair) for pair in zip(schema.columns, series, strict=True)], schema, ignored)


def _pandas_column(column: Column, series: pd.Series) -> pa.Array | pa.ChunkedArray:
    array = None
    if series.dtype != object:
        array = _or_none(lambda: pa.array(series, from_pandas=True))
    return _spelled(column, series.tolist()) if array is None else array


def _narwhals(frame: nw.DataFrame[Any] | nw.LazyFrame[Any], schema: Schema) -> Rows:
    places, ignored = match_columns(frame.collect_schema().names(), schema)
    if isinstance(frame, nw.LazyFrame):
        # polars reads some names as patterns: then all columns are collected, and chosen by position.
        patterns = any(name == "*" or name.startswith("^") for name in schema.names)
        places = places if patterns else range(len(schema.names))
        frame = (frame if patterns else frame.select(*schema.names)).collect()
    series = [frame[:, place] for place in places]
    return _rows([_narwhals_column(*pair) for pair in zip(schema.columns, series, strict=True)], schema, ignored)


def _narwhals_column(column: Column, series: nw.Series[Any]) -> pa.Array | pa.ChunkedArray:
    array = None if series.dtype == nw.Object else _or_none(series.to_arrow)
    return _spelled(column, series.to_list()) if array is None else array


def _arrow(table: pa.Table, schema: Schema) -> Rows:
    places, ignored = match_columns(table.column_names, schema)
    return _rows([table.column(place) for place in places], schema, ignored)


def _rows(arrays: Sequence[pa.Array | pa.ChunkedArray], schema: Schema, ignored: tuple[str, ...]) -> Rows:
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise DataError("the columns of the frame must be of one length")
    table = pa.table(list(arrays), names=[f"c{i}" for i in range(len(arrays))])

    def batches() -> Iterator[Sequence[pa.Array]]:
        for batch in table.to_batches():
            yield batch.columns

    return Rows(schema, tuple(table.schema.types), batches(), ignored)


def _or_none(convert: Any) -> pa.Array | pa.ChunkedArray | None:  # noqa: ANN401
    """Returns what the conversion gives, or nothing where it stumbles over a value."""
    try:
        return convert()
    except (pa.ArrowException, UnicodeError, ValueError, TypeError, NotImplementedError):
        return None


def _spelled(column: Column, values: Sequence[object]) -> pa.Array:
    number = not isinstance(column, Categorical)
    return pa.array([spell(value, number=number) for value in values], pa.large_string())


def spell(value: object, *, number: bool) -> str | None:
    """Returns the text of an object as a file would hold it, None where it is empty; never raises."""
    try:
        text = _text(value, number)
        return None if text is None else text.encode("utf-8", "replace").decode()
    except Exception:  # an object's own code may do anything
        return UNKNOWN


def _text(value: Any, number: bool) -> str | None:  # noqa: ANN401
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]")
    if isinstance(value, np.generic):
        value = value.item()
    if _is_empty(value):
        return None
    if isinstance(value, bool):
        return str(int(value)) if number else label(value)
    if isinstance(value, str | int | float):
        return value if isinstance(value, str) else label(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, datetime.datetime | datetime.time):
        return _moment(value)
    return str(value)


def _is_empty(value: object) -> bool:
    """Returns whether a value is None, NaN, or one of pandas' own: known by name, without pandas."""
    if isinstance(value, float | decimal.Decimal):
        return math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _moment(value: datetime.datetime | datetime.time) -> str:
    """The ISO text of a moment, as an engine writes it: UTC where it has a zone, no zeros at the end."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC)
    text, zone, _ = value.isoformat().partition("+00:00")
    return (text.rstrip("0") if "." in text else text) + ("Z" if zone else "")
