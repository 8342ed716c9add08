"""Schema: the public description of a private table, in files and in memory.

A schema names the columns (columns.py) and the dataset. It is written as YAML, or taken from mbi's `{column: size}`
JSON. Files are plain: no tags, no aliases, no duplicate keys, and unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from anamorph.columns import KINDS, Codes, Column
from anamorph.errors import SchemaError, suggestion
from anamorph.table import Table

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_FILE = 16 << 20


@dataclass(frozen=True)
class Schema:
    """The columns of one dataset, in order."""

    columns: tuple[Column, ...]
    dataset: str = "dataset"
    """The public name under which a ledger keeps this dataset's budget."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns:
            raise SchemaError("columns must not be empty")
        for name in self.names:
            if self.names.count(name) > 1:
                raise SchemaError(f"column {name!r} must be declared once")
        plain = isinstance(self.dataset, str) and self.dataset.isprintable() and 0 < len(self.dataset) <= 200
        if not plain or any(mark in self.dataset for mark in "/\\") or self.dataset.startswith("."):
            raise SchemaError(
                f"dataset ({self.dataset!r}) must be a name of 1 to 200 printable characters, without slashes, "
                "that does not begin with a dot"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of codes of each column."""
        return tuple(column.size for column in self.columns)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The positions of the native columns: numbers kept as numbers."""
        return tuple(i for i, column in enumerate(self.columns) if column.native)

    @cached_property
    def coded(self) -> tuple[int, ...]:
        """The positions of the others, which have marginals."""
        return tuple(i for i, column in enumerate(self.columns) if not column.native)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the schema declares, the order of its columns included, by which a ledger knows an account.

        The knots of a quantile transform are left out, and with them where they came from: they may be an estimate that
        was charged to the same account, so a schema that only gains knots keeps it. No promise depends on them. A
        schema is public, each run is differentially private for the rows whatever the schema says, and runs compose
        where the schema of one is chosen by what another released. A run that is resumed must have the same `knots`.
        """
        plain = self.to_dict()
        for spec in plain["columns"].values():
            if spec.get("transform") == "quantile":
                del spec["source"]
                spec.pop("knots", None)
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    @cached_property
    def knots(self) -> dict[str, tuple[float, ...]]:
        """The knots of quantile transforms, by column."""
        return {column.name: found for column in self.columns if (found := getattr(column, "knots", None))}

    @cached_property
    def pending(self) -> tuple[str, ...]:
        """The columns whose quantile transform has no knots yet."""
        return tuple(column.name for column in self.columns if column.pending)

    def require_knots(self) -> None:
        """Refuses a schema in which knots are still to come."""
        if self.pending:
            raise SchemaError(
                f"columns {', '.join(map(repr, self.pending))}: knots must be declared for `transform: quantile`, or "
                "estimated first: `anamorph schema quantiles DATA --schema SCHEMA --epsilon E --delta D -o SCHEMA`"
            )

    def index(self, name: str) -> int:
        """Returns the position of a column."""
        if name not in self.names:
            raise SchemaError(f"column ({name!r}) must be in the schema.{suggestion(name, self.names)}")
        return self.names.index(name)

    def decode(self, table: Table, generator: np.random.Generator) -> pa.Table:
        """Returns the rows of a table in the original values; the generator places numbers inside their bins."""
        import pyarrow as pa  # noqa: PLC0415

        arrays = [column.decode(table.codes[:, i], generator) for i, column in enumerate(self.columns)]
        return pa.table(arrays, names=list(self.names))

    def from_data(self) -> tuple[str, ...]:
        """Returns the columns whose declared values were read from private rows."""
        return tuple(column.name for column in self.columns if column.source == "data")

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain form: what a schema file holds."""
        return {
            "dataset": self.dataset,
            "columns": {column.name: column.to_dict() for column in self.columns},
        }

    @classmethod
    def from_dict(cls, plain: object, dataset: str = "dataset") -> Self:
        """Returns the schema of a plain form, or of mbi's `{column: size}`."""
        if not isinstance(plain, Mapping) or not plain:
            raise SchemaError("a schema must be a mapping with `columns`, or `{column: size}`")
        if all(isinstance(size, int) and not isinstance(size, bool) for size in plain.values()):
            return cls(tuple(Codes(name=str(name), values=size) for name, size in plain.items()), dataset)
        for key in plain:
            if key not in ("dataset", "columns"):
                raise SchemaError(
                    f"key ({key!r}) must be dataset or columns.{suggestion(str(key), ('dataset', 'columns'))}"
                )
        columns = plain.get("columns")
        if not isinstance(columns, Mapping) or not columns:
            raise SchemaError("columns must be a mapping from names to columns, not empty")
        return cls(tuple(column(str(name), spec) for name, spec in columns.items()), plain.get("dataset", dataset))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Returns the schema of a YAML or JSON file; the dataset is named after the file unless it says otherwise."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)  # never more: it may be a device without an end
            if len(content) > LARGEST_FILE:
                raise SchemaError(f"schema {str(path)!r} must be at most {LARGEST_FILE >> 20} MiB")
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise SchemaError(f"schema {str(path)!r} must be UTF-8 text") from None
        except OSError as error:
            raise SchemaError(f"schema {str(path)!r} cannot be read: {error.strerror}") from None
        plain = parse(text, str(path))
        try:
            return cls.from_dict(plain, dataset=path.name.split(".")[0].lstrip(".") or "dataset")
        except SchemaError as error:
            raise SchemaError(f"schema {str(path)!r}: {error}") from None

    def to_yaml(self) -> str:
        """Returns the text of a schema file."""
        from anamorph._yaml import dump  # noqa: PLC0415

        plain = self.to_dict()
        for spec in plain["columns"].values():
            if "categories" in spec:
                spec["categories"] = list(spec["categories"])
        return dump(plain)


def column(name: str, spec: object) -> Column:
    """Returns the column that a schema file describes."""
    if not isinstance(spec, Mapping):
        raise SchemaError(f"column {name!r} must be a mapping with `type`")
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SchemaError(
            f"column {name!r}: type ({kind!r}) must be one of {', '.join(KINDS)}.{suggestion(str(kind), KINDS)}"
        )
    known = [field.name for field in fields(KINDS[kind]) if field.name != "name"]
    for key, value in spec.items():
        if key != "type" and key not in known:
            raise SchemaError(
                f"column {name!r}: key ({key!r}) must be one of {', '.join(known)}.{suggestion(str(key), known)}"
            )
        if key == "bins" and spec.get("native") is True:
            raise SchemaError(f"column {name!r}: bins must be left out: a native number has none")
        if value is None:
            raise SchemaError(f"column {name!r}: {key} must be filled in: the schema's owner declares it")
    try:
        return KINDS[kind](name=name, **{str(key): value for key, value in spec.items() if key != "type"})
    except TypeError:
        needed = {
            "categorical": "categories",
            "ordinal": "categories",
            "numeric": "lower and upper",
            "datetime": "lower and upper",
            "codes": "values",
        }
        raise SchemaError(f"column {name!r}: a {kind} column must declare {needed[str(kind)]}") from None


def parse(text: str, where: str) -> object:
    """Returns the plain content of YAML or JSON text: no tags, no aliases, no duplicate keys, no NaN."""
    import yaml  # noqa: PLC0415

    from anamorph._yaml import PlainLoader  # noqa: PLC0415

    try:
        return yaml.load(text, Loader=PlainLoader)  # noqa: S506 - PlainLoader is stricter than SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise SchemaError(f"{where}{place} must be plain YAML: {problem}") from None
