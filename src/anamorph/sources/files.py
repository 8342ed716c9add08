"""Files as rows: CSV (plain or gzip) and Parquet, told apart by their first bytes.

CSV is RFC 4180: UTF-8, commas, double quotes, a header, as many fields in every row as in the header. Nothing
is guessed, since a guess would depend on private values: every cell is text until the schema reads it. Empty
lines are skipped, but in a file of one column, where they are empty cells.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from anamorph.columns import guarded
from anamorph.errors import AnamorphError, DataError, ParameterError, ResourceError
from anamorph.schema import Schema
from anamorph.sources.rows import Rows, distinct, match_columns, unreadable

GZIP, PARQUET, BOM = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"
LONGEST_HEADER = 16 << 20
BLOCK = 4 << 20
"""Bytes of CSV parsed at a time, and so the longest row."""
BATCH = 1 << 16
"""Rows of Parquet decoded at a time."""


def read_file(path: str | Path, schema: Schema) -> Rows:
    """Returns the rows of a CSV or Parquet file."""
    handle = open_file(path)
    try:
        start = handle.read(4)
        handle.seek(0)
        if start == PARQUET:
            return _parquet(handle, schema)
        check_name(path)
        return _csv(handle, schema, zipped=start.startswith(GZIP))
    except BaseException:
        handle.close()
        raise


def structure(path: str | Path) -> dict[str, pa.DataType | None]:
    """Returns the columns of a file and the types they are stored in; None for text. Reads no value."""
    import pyarrow.parquet as reading  # noqa: PLC0415

    with contextlib.closing(open_file(path)) as handle:
        start = handle.read(4)
        handle.seek(0)
        if start != PARQUET:
            check_name(path)
            raw = TextStream(handle, zipped=start.startswith(GZIP))
            names = _header(io.BufferedReader(raw, buffer_size=1 << 20), raw)
            return dict(zip(distinct(names), [None] * len(names), strict=True))
        described = None
        with contextlib.suppress(Exception):  # whatever it is, its text may quote a private value
            described = reading.ParquetFile(handle).schema_arrow
        if described is None:
            raise DataError("the file must be whole Parquet, not encrypted: it is damaged or of an unknown type")
        return dict(zip(distinct(described.names), described.types, strict=True))


def check_name(path: str | Path) -> None:
    """Refuses a file that is named as Parquet and is not."""
    if Path(path).suffix.lower() in (".parquet", ".pq"):
        raise DataError("the file must be Parquet, as its name says: its first bytes are not")


def open_file(path: str | Path) -> BinaryIO:
    """Returns the open file; refuses what is missing, not a regular file, or not ours to read."""
    failure: AnamorphError
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return Path(path).open("rb")
        failure = ParameterError(f"data ({str(path)!r}) must be a file, not a directory or a device")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        failure = ParameterError(f"data ({str(path)!r}) must be a file that exists")
    except OSError as error:
        failure = ResourceError(f"data ({str(path)!r}) must be readable: {error.strerror}")
    raise failure


class TextStream(io.RawIOBase):
    """The bytes of a CSV file, checked as they pass; a failure ends the stream and is kept."""

    def __init__(self, handle: BinaryIO, *, zipped: bool) -> None:
        super().__init__()
        self._file = handle
        self._bytes = gzip.GzipFile(fileobj=handle) if zipped else handle
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._before = _state(handle)
        self._quotes = 0
        self.failure: AnamorphError | None = None

    def readable(self) -> bool:
        """Returns that it is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Returns how many bytes were put into the buffer; none once something failed."""
        if self.failure is None:
            chunk = self._next(len(buffer))
            if self.failure is None:
                buffer[: len(chunk)] = chunk
                return len(chunk)
        return 0

    def _next(self, size: int) -> bytes:
        try:
            chunk = self._bytes.read(size)
            self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError:
            self.failure = DataError("the file must be UTF-8 text: save it as UTF-8, not UTF-16 or Latin-1")
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.failure = DataError("the file must be whole: its gzip data is damaged or cut off")
        except OSError as error:
            self.failure = unreadable(error, "the file")
        else:
            if b"\0" in chunk:
                self.failure = DataError("the file must be text without NUL bytes: it is UTF-16 or binary")
            self._quotes += chunk.count(b'"')
            return chunk
        return b""

    def finish(self) -> None:
        """Raises what made the stream fail; refuses an open quote, and a file that changed meanwhile."""
        require_unchanged(self._file, self._before)
        if self.failure is not None:
            raise self.failure
        if self._quotes % 2:
            raise DataError('the file must close every quote: a field with " in it is quoted, and the " doubled')

    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            self._bytes.close()
            self._file.close()
        super().close()


def _csv(handle: BinaryIO, schema: Schema, *, zipped: bool) -> Rows:
    raw = TextStream(handle, zipped=zipped)
    stream = io.BufferedReader(raw, buffer_size=1 << 20)
    ours = {guarded(name): name for name in schema.names}
    names = [name if name in schema.names else ours.get(name, name) for name in _header(stream, raw)]
    if len(names) == 1 and names[0] not in schema.names and any(mark in names[0] for mark in ";\t|"):
        raise DataError("the file must separate fields by commas: its header seems to use another delimiter")
    places, ignored = match_columns(names, schema)
    batches = _csv_batches(stream, raw, len(names), places)
    return Rows(schema, (pa.string(),) * len(places), batches, ignored, stream.close)


def _header(stream: io.BufferedReader[TextStream], raw: TextStream) -> list[str]:
    """Returns the names on the first line, which runs on where a quoted name has a line break in it."""
    line = stream.readline(LONGEST_HEADER)
    while line.count(b'"') % 2 and len(line) < LONGEST_HEADER and (more := stream.readline(LONGEST_HEADER)):
        line += more
    if raw.failure is not None:
        raise raw.failure
    line = line.removeprefix(BOM)
    if not line:
        raise DataError("the file must not be empty: its first line names the columns")
    names: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        names = list(csv.reader(io.StringIO(line.decode(errors="replace"), newline=""), strict=True))
    if len(names) != 1 or not names[0] or len(line) >= LONGEST_HEADER:
        raise DataError("the file's first line must name the columns, in RFC 4180 form, and end in LF or CRLF")
    return names[0]


def _csv_batches(
    stream: io.BufferedReader[TextStream], raw: TextStream, width: int, places: Sequence[int]
) -> Iterator[Sequence[pa.Array]]:
    import pyarrow.csv as reading  # noqa: PLC0415

    names, kept = [f"p{place}" for place in range(width)], [f"p{place}" for place in places]
    options = (
        reading.ReadOptions(column_names=names, block_size=BLOCK, use_threads=False),
        reading.ParseOptions(newlines_in_values=True, ignore_empty_lines=width > 1),
        reading.ConvertOptions(
            check_utf8=False,
            column_types=dict.fromkeys(kept, pa.string()),
            strings_can_be_null=False,
            include_columns=kept,
        ),
    )
    ragged = False
    try:
        for batch in reading.open_csv(stream, *options) if stream.peek(1) else ():
            yield batch.columns
    except pa.ArrowInvalid:
        ragged = True
    raw.finish()
    if ragged:
        most = BLOCK >> 20
        raise DataError(f"every row must have as many fields as the header ({width}), in at most {most} MiB")


def _parquet(handle: BinaryIO, schema: Schema) -> Rows:
    import pyarrow.parquet as reading  # noqa: PLC0415

    before = _state(handle)
    file, described = None, None
    with contextlib.suppress(Exception):  # whatever it is, its text may quote a private value
        file = reading.ParquetFile(handle)
        described = file.schema_arrow
    if file is None or described is None:
        raise DataError("the file must be whole Parquet, not encrypted: it is damaged or of an unknown type")
    places, ignored = match_columns(described.names, schema)
    types = tuple(described.types[place] for place in places)

    def batches() -> Iterator[Sequence[pa.Array]]:
        for batch in file.iter_batches(BATCH, columns=list(schema.names)):
            yield [batch.column(name) for name in schema.names]
        require_unchanged(handle, before)

    return Rows(schema, types, batches(), ignored, handle.close)


def _state(handle: BinaryIO) -> tuple[int, int]:
    status = os.fstat(handle.fileno())
    return status.st_size, status.st_mtime_ns


def require_unchanged(handle: BinaryIO, before: tuple[int, int]) -> None:
    """Refuses a file that was written to since it was opened."""
    if _state(handle) != before:
        raise ResourceError("the file must not change while it is read: begin again when it is complete")
