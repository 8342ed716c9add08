"""Rows on their way into an engine: one pass of Arrow batches of plain types, columns in the schema's order.

What reads a file or a frame makes `Rows`; an engine consumes them. A failure on the way is kept, not raised,
since it would pass through foreign code that quotes private values: the engine asks for it afterwards.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from anamorph.columns import Categorical, Column, Datetime
from anamorph.errors import AnamorphError, DataError, ResourceError, suggestion
from anamorph.schema import Schema

SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
FIRST, LAST = -62_135_596_800, 253_402_300_799
"""Years 1 to 9999, in seconds of 1970: moments beyond are clamped, since engines fail on some of them."""

PLAIN: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
)
"""Types that an engine reads as they are."""


@dataclass
class Rows:
    """Private rows, to be read once."""

    schema: Schema
    types: tuple[pa.DataType, ...]
    """The type of each column, in the schema's order, as it is found."""
    batches: Iterator[Sequence[pa.Array]]
    """The columns of each batch, in the schema's order."""
    ignored: tuple[str, ...] = ()
    """Names of the data that are not in the schema."""
    close: Callable[[], None] = lambda: None
    """Lets go of the file; the engine calls it, whether the rows were read or not."""
    failure: AnamorphError | None = None
    """What went wrong while the rows were read."""
    plain: tuple[pa.DataType, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = tuple(map(plain_type, self.schema.columns, self.types))

    @property
    def names(self) -> list[str]:
        """What the columns are called in the engine."""
        return [f"c{i}" for i in range(len(self.types))]

    def reader(self) -> pa.RecordBatchReader:
        """Returns the stream that an engine reads; look at `failure` when it ends."""
        described = pa.schema(list(zip(self.names, self.plain, strict=True)))
        return pa.RecordBatchReader.from_batches(described, self._guarded())

    def _guarded(self) -> Iterator[pa.RecordBatch]:
        try:
            for arrays in self.batches:
                columns = zip(self.schema.columns, arrays, self.plain, strict=True)
                yield pa.record_batch([to_plain(*column) for column in columns], names=self.names)
        except AnamorphError as error:
            self.failure = error.with_traceback(None)  # whose frames hold rows
        except MemoryError:
            self.failure = ResourceError("memory must hold a batch of rows: it is exhausted")
        except Exception as error:  # whatever a reader raises may quote a private value
            self.failure = unreadable(error)


def distinct(names: Sequence[str]) -> Sequence[str]:
    """Returns the names; refuses one that stands twice."""
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"column {name!r} must stand once in the data: names must be distinct")
    return names


def match_columns(names: Sequence[str], schema: Schema) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns where each column of the schema stands in the data, and the names beside them."""
    places = {name: place for place, name in enumerate(distinct(names))}
    for name in schema.names:
        if name not in places:
            raise DataError(f"column {name!r} of the schema must be in the data.{suggestion(name, names)}")
    known = set(schema.names)
    return tuple(places[name] for name in schema.names), tuple(name for name in names if name not in known)


def unreadable(error: Exception, what: str = "the data") -> AnamorphError:
    """Returns the public form of an error met while reading: nothing of its text."""
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES):
        return ResourceError(f"{what} cannot be read: {errno.errorcode[error.errno]}")
    if isinstance(error, pa.ArrowMemoryError):
        return ResourceError("memory must hold a batch of rows: it is exhausted")
    return DataError(f"{what} must be whole and readable: it is damaged, or of a kind that is not supported")


def refuse_type(column: Column, kind: str) -> DataError:
    """Returns the refusal of a column stored in a type that its declaration does not admit."""
    admitted = "text, dates or timestamps" if isinstance(column, Datetime) else "text, numbers or truth values"
    admitted += ", dates or times" if isinstance(column, Categorical) else ""
    return DataError(f"column {column.name!r} (stored as {kind}) must hold {admitted}: it is declared {column.kind}")


def plain_type(column: Column, kind: pa.DataType) -> pa.DataType:
    """Returns the type in which an engine sees a column; refuses nested and binary ones."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(column, kind.value_type)
    if isinstance(kind, pa.BaseExtensionType) and types.is_string(kind.storage_type):
        return kind.storage_type
    if types.is_null(kind) or types.is_decimal256(kind) or (types.is_decimal(kind) and kind.scale < 0):
        return pa.string()
    if types.is_date(kind) or types.is_timestamp(kind) or types.is_time(kind):
        return _moment_type(kind)
    if any(test(kind) for test in PLAIN):
        return pa.float32() if types.is_float16(kind) else kind
    raise refuse_type(column, str(kind).split("<")[0].split("[")[0])


def _moment_type(kind: pa.DataType) -> pa.DataType:
    """Days, or the finer of microseconds and the unit; an instant of any zone is one of UTC."""
    if pa.types.is_date(kind):
        return pa.date32()
    unit = "ns" if kind.unit == "ns" else "us"
    if pa.types.is_time(kind):
        return pa.time64(unit)
    return pa.timestamp(unit, None if kind.tz is None else "UTC")


def to_plain(column: Column, array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns the array in its plain type; never raises on a value, but on text that is not UTF-8."""
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    elif types.is_run_end_encoded(array.type):
        array = pc.call_function("run_end_decode", [array])
    if types.is_temporal(array.type):
        array = _clamp_moment(array)
    if array.type != kind:
        array = array.cast(kind, safe=False)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        require_text(column, array)
    return array


def require_text(column: Column, array: pa.Array) -> None:
    """Refuses text that is not UTF-8."""
    valid = True
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        valid = False
    if not valid:
        raise DataError(f"column {column.name!r} must hold UTF-8 text")


def _clamp_moment(array: pa.Array) -> pa.Array:
    """Moments of years 1 to 9999, times of one day."""
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return array
    if pa.types.is_date32(kind):
        return _clamp(array.view(pa.int32()), FIRST // 86_400, LAST // 86_400).view(kind)
    unit = SECOND["ms" if pa.types.is_date64(kind) else kind.unit]
    numbers = array.view(pa.int32() if pa.types.is_time32(kind) else pa.int64())
    if pa.types.is_time(kind):
        return _clamp(numbers, 0, 86_400 * unit - 1).view(kind)
    return _clamp(numbers, FIRST * unit, LAST * unit).view(kind)


def _clamp(numbers: pa.Array, lower: int, upper: int) -> pa.Array:
    options = pc.ElementWiseAggregateOptions(skip_nulls=False)
    raised = pc.call_function("max_element_wise", [numbers, pa.scalar(lower, numbers.type)], options)
    return pc.call_function("min_element_wise", [raised, pa.scalar(upper, numbers.type)], options)
