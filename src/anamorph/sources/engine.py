"""DuckDB as a source: rows are encoded once into a table of small integers, and only counts leave it.

That table is one snapshot: what happens to the file or the database afterwards changes nothing. It lives in
memory and spills, above a limit, to a private directory that goes with the source. The engine has no access
to files beside that directory and the database it reads, loads no extensions, and none of its messages is
passed on: they quote values.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import duckdb
import numpy as np
from numpy.typing import NDArray
from sqlglot import exp

from anamorph.columns import Categorical, Column, Datetime
from anamorph.errors import AnamorphError, DataError, ParameterError, ResourceError, suggestion
from anamorph.schema import Schema
from anamorph.sources.files import open_file
from anamorph.sources.rows import Rows, match_columns, refuse_type
from anamorph.sources.sql import ENCODED, Stored, check_sets, count_statement, encode_statement, group_statement
from anamorph.table import Table

MEMORY = "50%"
"""How much of the machine's memory an engine may use before it spills to disk."""
TOGETHER = 32
"""Marginals counted by one statement: more gain nothing."""
MOST_COUNTED = 1 << 22
"""Cells fetched by one statement, about, where the marginals are large."""
BATCH = 1 << 16
"""Encoded rows fetched by one statement."""
DATABASE = "duckdb:///"
SETTINGS = {
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}
STORED = {
    Stored.TEXT: ("VARCHAR", "UUID", "ENUM", "JSON", '"NULL"'),
    Stored.WHOLE: (
        "TINYINT",
        "SMALLINT",
        "INTEGER",
        "BIGINT",
        "UTINYINT",
        "USMALLINT",
        "UINTEGER",
        "UBIGINT",
    ),
    Stored.WIDE: ("HUGEINT", "UHUGEINT", "BIGNUM"),
    Stored.REAL: ("FLOAT", "DOUBLE"),
    Stored.DECIMAL: ("DECIMAL",),
    Stored.TRUTH: ("BOOLEAN",),
    Stored.MOMENT: (
        "DATE",
        "TIME",
        "TIME_NS",
        "TIMESTAMP",
        "TIMESTAMP_S",
        "TIMESTAMP_MS",
        "TIMESTAMP_NS",
        "TIMESTAMP WITH TIME ZONE",
        "TIMESTAMPTZ_NS",
    ),
}


class Engine:
    """A private DuckDB and its directory; every error of it becomes one of ours."""

    def __init__(self, memory_limit: str, reads: Sequence[str] = ()) -> None:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*(%|[KMGT]i?B)", memory_limit):
            raise ParameterError(f"memory_limit ({memory_limit!r}) must be a size such as '4GB' or '50%'")
        self._directory = _private_directory()
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        settings: Any = {**SETTINGS, "memory_limit": memory_limit, "temp_directory": self._directory}
        self._connection = _connect(settings, memory_limit)
        paths = ", ".join(exp.Literal.string(path).sql("duckdb") for path in reads)
        for setting in (f"allowed_paths = [{paths}]", "enable_external_access = false", "TimeZone = 'UTC'"):
            self.execute(f"SET {setting}")
        self.execute("SET enable_progress_bar = false")
        self.execute("SET lock_configuration = true")

    def register(self, name: str, rows: Rows) -> None:
        """Lets statements read the rows under a name, once."""
        self._connection.register(name, rows.reader())

    def unregister(self, name: str) -> None:
        """Lets go of the rows."""
        self._connection.unregister(name)

    def execute(self, statement: str, otherwise: AnamorphError | None = None) -> dict[str, Any]:
        """Runs a statement and returns its columns; `otherwise` is raised where the data is to blame."""
        failure: BaseException
        try:
            return self._connection.execute(statement).fetchnumpy()
        except duckdb.InterruptException:
            failure = KeyboardInterrupt()
        except (duckdb.OutOfMemoryException, MemoryError):
            failure = ResourceError("memory_limit must be larger, or the disk for temporary files less full")
        except duckdb.ConnectionException:
            failure = ResourceError("the source must be open: it was closed")
        except duckdb.IOException:
            failure = otherwise or ResourceError("the disk for temporary files must be writable and not full")
        except (duckdb.Error, RuntimeError):
            failure = otherwise or ResourceError("the engine failed on a statement of ours: please report it")
        raise failure  # outside of the except clause: the engine's error is not even kept as context

    def close(self) -> None:
        """Ends the engine and removes its directory."""
        self._connection.close()
        self._remove()


class EngineSource:
    """Rows encoded inside an engine."""

    def __init__(self, engine: Engine, schema: Schema, ignored: tuple[str, ...]) -> None:
        self.schema = schema
        self.ignored = ignored
        self._engine = engine

    def rows(self) -> int:
        """Returns the number of rows."""
        return int(self._engine.execute(f"SELECT COUNT(*) AS number FROM {ENCODED}")["number"][0])  # noqa: S608

    def counts(self, sets: Sequence[tuple[int, ...]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Returns, for each marginal in turn, its non-empty cells in order and their counts."""
        return self._counts(sets, check_sets(sets, self.schema))

    def _counts(
        self, sets: Sequence[tuple[int, ...]], cells: Sequence[int]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        rows = self.rows()
        start = 0
        while start < len(sets):
            stop = start + _together([min(size, rows) for size in cells[start : start + TOGETHER]])
            columns = self._engine.execute(count_statement(sets[start:stop], self.schema.sizes))
            yield from _split(columns, stop - start)
            start = stop

    def grouped(
        self, given: tuple[int, ...], cuts: Mapping[int, NDArray[np.int64]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the non-empty cells of a marginal over columns and ranks, in order, and their counts.

        Args:
            given: the columns, which lead.
            cuts: for each column of numbers its cuts, ascending. The rank of a number is how many of them are below it;
                rows with a number beyond its last cut are in no cell.
        """
        check_sets([given, *((column,) for column in cuts)], self.schema)
        statement = group_statement(given, {column: each.tolist() for column, each in cuts.items()}, self.schema.sizes)
        columns = self._engine.execute(statement)
        cells, counts = (np.asarray(columns[name], np.int64) for name in ("cell", "number"))
        order = np.argsort(cells)
        return cells[order], counts[order]

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Yields the encoded rows, in batches."""
        for first in range(0, self.rows(), BATCH):
            yield self._codes(f"SELECT * FROM {ENCODED} WHERE rowid >= {first} AND rowid < {first + BATCH}")  # noqa: S608

    def table(self) -> Table:
        """Returns the encoded rows themselves. Private: for `encode`."""
        return Table(self._codes(f"SELECT * FROM {ENCODED}"), self.schema.sizes)  # noqa: S608

    def _codes(self, statement: str) -> NDArray[np.int32]:
        columns = self._engine.execute(statement)
        return np.stack([np.asarray(columns[f"f{i}"], np.int32) for i in range(len(self.schema.columns))], axis=1)

    def close(self) -> None:
        """Forgets the rows."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_rows(rows: Rows, *, memory_limit: str = MEMORY, ordered: bool = False) -> EngineSource:
    """Returns a source of the rows of a file or a frame; `ordered` keeps their order."""
    engine = None
    try:
        engine = Engine(memory_limit)
        engine.register("data", rows)
        table = exp.table_("data", quoted=True)
        _load(engine, rows.schema, names=rows.names, table=table, rows=rows, ordered=ordered)
        engine.unregister("data")
        return EngineSource(engine, rows.schema, rows.ignored)
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    finally:
        rows.close()


def load_database(url: str, schema: Schema, *, memory_limit: str = MEMORY, ordered: bool = False) -> EngineSource:
    """Returns a source of a table or view of a DuckDB file: `duckdb:///file.db#table`, `duckdb:////absolute/file.db#table`."""
    path, mark, name = url.removeprefix(DATABASE).rpartition("#")
    path, name = unquote(path), unquote(name)
    if not mark or not path or not name:
        raise ParameterError("data must name a file and a table: duckdb:///file.db#table")
    open_file(path).close()
    path = str(Path(path).absolute())
    engine = Engine(memory_limit, reads=(path, f"{path}.wal"))
    try:
        attach = f"ATTACH {exp.Literal.string(path).sql('duckdb')} AS attached (READ_ONLY)"
        engine.execute(attach, ResourceError("the database must be a DuckDB file that no one has open for writing"))
        table = _find_table(engine, name)
        described = _describe(engine, table)
        _, ignored = match_columns(list(described), schema)
        _load(engine, schema, names=schema.names, table=table, ordered=ordered)
        engine.execute("DETACH attached")
        return EngineSource(engine, schema, ignored)
    except BaseException:
        engine.close()
        raise


def _load(
    engine: Engine,
    schema: Schema,
    *,
    names: Sequence[str],
    table: exp.Table,
    rows: Rows | None = None,
    ordered: bool = False,
) -> None:
    """Encodes a table into ENCODED; raises first what the rows' own reader met."""
    described = _describe(engine, table)
    stored = [stored_as(column, described[name]) for column, name in zip(schema.columns, names, strict=True)]
    statement = encode_statement(schema, table, stored=stored, names=names, ordered=ordered)
    failure: AnamorphError | None = None
    try:
        engine.execute(
            f"CREATE TEMP TABLE {ENCODED} AS {statement}",
            DataError("the data must be readable to its end: it is damaged, or a view that reads other files"),
        )
    except AnamorphError as error:
        failure = error
    failure = (rows.failure if rows is not None else None) or failure
    if failure is not None:
        raise failure


def stored_as(column: Column, kind: str) -> Stored:
    """Returns how a column of a DuckDB type is stored; refuses a type that its declaration does not admit."""
    base = kind.partition("(")[0].rstrip()
    name = base if not kind.endswith("]") else "LIST"
    if re.fullmatch(r"DECIMAL\(\d+,0\)", kind):
        return Stored.WIDE
    for stored, kinds in STORED.items():
        if name in kinds and _admits(column, stored, name):
            return stored
    raise refuse_type(column, name)


def _admits(column: Column, stored: Stored, name: str) -> bool:
    """Returns whether a column may be stored so: numbers are no moments, moments no numbers, a time of day neither."""
    if isinstance(column, Datetime):
        return stored is Stored.TEXT or (stored is Stored.MOMENT and name not in ("TIME", "TIME_NS"))
    return stored is not Stored.MOMENT or isinstance(column, Categorical)


def _describe(engine: Engine, table: exp.Table) -> dict[str, str]:
    """Returns the type of each column of a table."""
    unread = DataError("the table must be readable: it is damaged, or a view that reads other files")
    described = engine.execute(f"DESCRIBE SELECT * FROM {table.sql('duckdb')}", unread)  # noqa: S608
    return dict(zip(described["column_name"], described["column_type"], strict=True))


def _find_table(engine: Engine, name: str) -> exp.Table:
    """Returns the table or view of the attached database that is called `name`, or `schema.name`."""
    listed = engine.execute(
        "SELECT schema_name, table_name FROM duckdb_tables() WHERE database_name = 'attached' UNION ALL "
        "SELECT schema_name, view_name FROM duckdb_views() WHERE database_name = 'attached' AND NOT internal"
    )
    pairs = sorted(zip(listed["schema_name"], listed["table_name"], strict=True), key=lambda pair: pair[0] != "main")
    for schema, table in pairs:
        if name in (table if schema == "main" else "", f"{schema}.{table}"):
            return exp.table_(table, db=schema, catalog="attached", quoted=True)
    known = [table if schema == "main" else f"{schema}.{table}" for schema, table in pairs]
    raise ParameterError(f"table ({name!r}) must be in the database.{suggestion(name, known)}")


def _together(counted: Sequence[int]) -> int:
    """Returns how many marginals to count at once: at least one, and no more cells than MOST_COUNTED."""
    return max(1, int(np.searchsorted(np.cumsum(counted), MOST_COUNTED, side="right")))


def _split(columns: dict[str, NDArray[Any]], parts: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns the rows of each part, in the order of its cells."""
    part, cell, number = (np.asarray(columns[name], np.int64) for name in ("part", "cell", "number"))
    order = np.lexsort((cell, part))
    bounds = np.searchsorted(part[order], np.arange(parts + 1))
    for first, last in pairwise(bounds):
        chosen = order[first:last]
        yield cell[chosen], number[chosen]


def _connect(settings: Any, memory_limit: str) -> duckdb.DuckDBPyConnection:  # noqa: ANN401
    with contextlib.suppress(duckdb.Error):
        return duckdb.connect(":memory:", config=settings)
    raise ParameterError(f"memory_limit ({memory_limit!r}) must be enough for an engine to start, at most 100%")


def _private_directory() -> str:
    with contextlib.suppress(OSError):
        return tempfile.mkdtemp(prefix="anamorph-")
    raise ResourceError("the directory for temporary files must be writable and not full")
