"""Drafting: a first schema for a file, for its owner to complete.

Names and stored types are structure and may be read; values may not. So bounds and categories are left empty, unless
the owner asks for them from the data: such columns are marked `source: data`, and a fit refuses them until the owner
has reviewed them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anamorph._yaml import dump
from anamorph.errors import DataError
from anamorph.ranges import BINS, DAY, instant
from anamorph.sources.files import structure

if TYPE_CHECKING:
    import pyarrow as pa

MOST_CATEGORIES = 200
"""A column with more distinct values is drafted without them."""


def draft(data: str, *, from_data: bool = False) -> tuple[str, str]:
    """Returns the text of a schema, and a remark on what is left to do."""
    kinds = structure(data)
    if from_data:
        columns = {name: from_values(values) for name, values in read_columns(data).items()}
        todo = "values were READ FROM THE DATA, so it is NOT PRIVATE; review each column, then write source: declared"
    else:
        columns = {name: from_type(kind) for name, kind in kinds.items()}
        todo = "fill in every empty bound and list; nothing was read but names and types"
    plain = {"dataset": Path(data).name.split(".")[0] or "dataset", "columns": columns}
    return dump(plain), todo


def from_type(kind: pa.DataType | None) -> dict[str, Any]:
    """Returns the draft of a column by the type it is stored in; None is text."""
    import pyarrow as pa  # noqa: PLC0415

    if kind is not None and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        whole = {"integer": True} if pa.types.is_integer(kind) else {}
        return (
            {"type": "numeric", "lower": None, "upper": None, "bins": BINS}
            | whole
            | {"missing": True, "source": "declared"}
        )
    if kind is not None and (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        days = {"date": True} if pa.types.is_date(kind) else {}
        drafted = {"type": "datetime", "lower": None, "upper": None, "bins": BINS}
        return drafted | days | {"missing": True, "source": "declared"}
    if kind is not None and pa.types.is_boolean(kind):
        return {"type": "categorical", "categories": [False, True], "missing": True, "source": "declared"}
    return {"type": "categorical", "categories": None, "other": True, "missing": True, "source": "declared"}


def from_values(values: pa.ChunkedArray) -> dict[str, Any]:
    """Returns the draft of a column by its values: NOT PRIVATE, and marked so."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import compute  # noqa: PLC0415

    missing = {"missing": bool(values.null_count), "source": "data"}
    found = (value for value in values.unique().to_pylist() if value is not None and value != "")
    distinct = sorted((value if isinstance(value, str | int | float) else str(value) for value in found), key=str)
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        bounds = compute.call_function("min_max", [values])
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        if low is not None and math.isfinite(low) and math.isfinite(high) and low < high and len(distinct) > 2:
            whole = pa.types.is_integer(values.type)
            bins = min(BINS, high - low + 1) if whole else BINS
            extra = {"integer": True} if whole else {}
            return {"type": "numeric", "lower": low, "upper": high, "bins": bins} | extra | missing
    if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
        ends = compute.call_function("min_max", [values]).as_py()
        low, high = (None if ends[end] is None else ends[end].isoformat() for end in ("min", "max"))
        unit = DAY if pa.types.is_date(values.type) else 1
        units = int(((instant(high) or 0) - (instant(low) or 0)) // unit) + 1
        if units > 1:
            return from_type(values.type) | {"lower": low, "upper": high, "bins": min(BINS, units)} | missing
    categories = distinct if 0 < len(distinct) <= MOST_CATEGORIES else None
    return {"type": "categorical", "categories": categories, "other": True} | missing


def read_columns(path: str) -> dict[str, pa.ChunkedArray]:
    """Returns the columns of a file with the types that its values suggest."""
    import pyarrow as pa  # noqa: PLC0415

    try:
        if path.lower().endswith(".parquet"):
            from pyarrow import parquet  # noqa: PLC0415

            table = parquet.read_table(path)
        else:
            from pyarrow import csv  # noqa: PLC0415

            table = csv.read_csv(path)
    except (pa.ArrowException, OSError):
        raise DataError(
            "the data must be whole CSV or Parquet: UTF-8, commas, as many fields in every row as in the header"
        ) from None
    return dict(zip(table.column_names, table.columns, strict=True))
