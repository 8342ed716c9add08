"""Custom queries: any jax function of one row that returns values in [0, 1].

A function is given an encoded row, a mapping from column names to vectors: one-hot for a real row, probabilities for a
relaxed one. `Custom`, whose block is all values of one function, and `CustomCells`, whose block is a single value.
Several functions are several parts of a workload.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.curator.rowwise import RowFunction, Rowwise, told, trace
from anamorph.errors import WorkloadError, suggestion
from anamorph.queries.piece import Piece
from anamorph.schema import Schema

if TYPE_CHECKING:
    from anamorph.curator.rowwise import Function


@dataclass(frozen=True)
class Custom:
    """All values of one function as one block; a block may be named several times, or not at all."""

    function: Rowwise
    blocks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        return self.function.sizes

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.blocks * self.function.count

    @property
    def largest_block(self) -> int:
        """The number of values of the block."""
        return self.function.count

    def take(self, ids: ArrayLike) -> Custom:
        """Returns the blocks named, which are all the same."""
        return replace(self, blocks=named(ids, self.blocks).size)

    def by_cell(self) -> CustomCells:
        """Returns the same queries, every value its own block."""
        return CustomCells(self.function, whole(self.blocks, self.function.count))

    def measured(self, order: int = 0) -> Custom:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields each block whole: a function is evaluated once for all of its values."""
        for block in range(self.blocks):
            yield Piece(RowFunction(self.function.sizes, self.function), block, 1)


@dataclass(frozen=True, eq=False)
class CustomCells:
    """Single values of one function: all of them, or the chosen ones."""

    function: Rowwise
    chosen: NDArray[np.int64] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all columns of the schema."""
        return self.function.sizes

    @property
    def blocks(self) -> int:
        """The number of queries."""
        return self.cells

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.function.count if self.chosen is None else self.chosen.size

    @property
    def largest_block(self) -> int:
        """The number of values of a block: one."""
        return 1

    def take(self, ids: ArrayLike) -> CustomCells:
        """Returns the values named, in the order named."""
        wanted = named(ids, self.cells)
        return replace(self, chosen=wanted if self.chosen is None else self.chosen[wanted])

    def by_cell(self) -> CustomCells:
        """Returns itself."""
        return self

    def measured(self, order: int = 0) -> CustomCells:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yields the values, at most `limit` at a time."""
        chosen = self.chosen
        if chosen is None and self.cells > limit:
            chosen = np.arange(self.cells)
        for first in range(0, self.cells, limit):
            part = None if chosen is None else chosen[first : first + limit]
            tally = RowFunction(self.function.sizes, self.function, part)
            yield Piece(tally, first, tally.cells)


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a release knows of custom queries without their function: which values they are."""

    name: str
    """Where the function came from, `module:function`."""
    count: int
    """The number of values of the function."""
    chosen: NDArray[np.int64] | None = None
    """Which of them, for single values; None is all."""
    single: bool = False
    """Whether each value is a block of its own, as of `CustomCells`, or all are one, as of `Custom`."""
    copies: int = 1
    """How many times the block of all values is named."""
    sizes: tuple[int, ...] = ()
    """The sizes of all columns of the schema, where they are known."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.cells if self.single else self.copies

    @property
    def cells(self) -> int:
        """The number of queries."""
        return self.copies * self.count if self.chosen is None else self.chosen.size

    @property
    def largest_block(self) -> int:
        """The number of values of a block."""
        return 1 if self.single else self.count

    def take(self, ids: ArrayLike) -> Recorded:
        """Returns the blocks named, in the order named."""
        wanted = named(ids, self.blocks)
        if not self.single:
            return replace(self, copies=wanted.size)
        return replace(self, chosen=wanted if self.chosen is None else self.chosen[wanted])

    def by_cell(self) -> Recorded:
        """Returns the same queries, every value its own block."""
        return self if self.single else replace(self, single=True, copies=1, chosen=whole(self.copies, self.count))

    def measured(self, order: int = 0) -> Recorded:
        """Returns itself."""
        return self

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Refuses: without the function there is nothing to compute with."""
        raise WorkloadError(
            f"function ({self.name!r}) must be given to compute with its queries: a release holds its name alone"
        )


def whole(copies: int, count: int) -> NDArray[np.int64] | None:
    """Returns the values of some copies of a block, one block after the other; None for all values once."""
    return None if copies == 1 else np.tile(np.arange(count), copies)


def named(ids: ArrayLike, blocks: int) -> NDArray[np.int64]:
    """Returns ids as an array; refuses those of another workload."""
    wanted = np.asarray(ids, np.int64).reshape(-1)
    if wanted.size and (wanted.min() < 0 or wanted.max() >= blocks):
        raise WorkloadError(f"ids must be from 0 to {blocks - 1}: they are ids into these queries")
    return wanted


def custom(function: Function, schema: Schema, *, name: str | None = None) -> Custom:
    """Returns the queries of a jax function of one row.

    Args:
        function: from an encoded row, a mapping from column names to vectors, to an array of values in [0, 1]. It is
            called once, here, with abstract vectors.
        schema: the columns.
        name: what it is called in messages and releases; `module:function` unless given.
    """
    if not callable(function):
        raise WorkloadError(f"function ({name or type(function).__name__!r}) must be a jax function of one row")
    return Custom(trace(function, schema.names, schema.sizes, name=name or called(function)))


def called(function: object) -> str:
    """Returns `module:function`."""
    kind = type(function)
    module = getattr(function, "__module__", None) or kind.__module__
    return f"{module}:{getattr(function, '__qualname__', kind.__qualname__)}"


def from_spec(spec: str, schema: Schema) -> Custom:
    """Returns the queries of the function that `module:function` names; the current directory is looked in, too."""
    module, colon, path = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise WorkloadError(f"function ({spec!r}) must be named as module:function, such as 'my_queries:any_of'")
    return custom(attribute(load(module), path, spec), schema, name=spec)


def load(module: str) -> object:
    """Returns a module."""
    try:
        with current_directory():
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"module ({module!r}) must be one that Python can import: {told(error)}") from error


@contextmanager
def current_directory() -> Iterator[None]:
    """Lets modules be imported from the current directory, as Python itself does, for a while."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def attribute(module: object, path: str, spec: str) -> Function:
    """Returns the function at a dotted path in a module."""
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError:
        near = suggestion(path, (name for name in vars(module) if not name.startswith("_")))
        raise WorkloadError(f"function ({spec!r}) must be in its module.{near}") from None
    if not callable(found):
        raise WorkloadError(f"function ({spec!r}) must be a jax function of one row, and is {type(found).__name__}")
    return found
