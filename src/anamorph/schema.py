"""Schema: the public description of a private table.

A schema names the columns, and for each one the values it may take. Encoding maps every cell to a *code*, a whole
number below the column's `size`; decoding maps codes back. Nothing here is ever read from private rows: each column
carries the provenance of its values (`source`), and a mechanism refuses a column whose values came from the data.

Every cell has a code, whatever it holds, so no row is ever dropped and none raises:

=============  ==========================  ===========================  ==========================================
column         regular codes               out of range or unseen       empty, null, NaN, not a number
=============  ==========================  ===========================  ==========================================
Categorical    position in `categories`    `other`, else `missing`,     `missing`, else `other`, else the last code
                                           else the last code
Numeric        equal bins of               clamped into the range       `missing`, else the last code
               [lower, upper)
Codes          the number itself           clamped into the range       `missing`, else the last code
=============  ==========================  ===========================  ==========================================

`other` and `missing`, where declared, are one code each, after the regular ones, in this order.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import ParameterError, SchemaError, suggestion
from anamorph.table import Table

if TYPE_CHECKING:
    import pyarrow as pa

Provenance = Literal["declared", "public", "dp", "data"]
"""Where a column's values came from: written by the owner, from public knowledge, a charged estimate, or the data."""

Value = str | int | float | bool

WHITESPACE = " \t\r\n"
"""What is trimmed from both ends of a text cell before it is looked up."""

NUMBER = r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?|[+-]?[iI][nN][fF]([iI][nN][iI][tT][yY])?"
"""The texts that are numbers; all others, such as 1,234 or nan or 0x10, count as empty."""

OTHER = "other"
"""The label under which the `other` code of a categorical column is decoded."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet would take for a formula."""

LARGEST_FILE = 16 << 20
MOST_BINS = 1 << 20
LARGEST_NAME = 1 << 14
LONGEST_NUMBER = 1 << 8


def canonical(text: str) -> str:
    """Returns the form in which text is compared: trimmed, Unicode NFC."""
    return unicodedata.normalize("NFC", text.strip(WHITESPACE))


@dataclass(frozen=True, kw_only=True)
class Column:
    """What all columns share. Abstract: see Categorical, Ordinal, Numeric, Codes."""

    kind: ClassVar[str]
    name: str
    missing: bool = False
    """Whether empty cells have a code of their own."""
    source: Provenance = "declared"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise SchemaError(f"column name ({self.name!r}) must be a text that is not empty")
        if len(self.name) > LARGEST_NAME:
            raise SchemaError(f"column name of {len(self.name)} characters must be at most {LARGEST_NAME}")
        self._require(isinstance(self.missing, bool), "missing", "true or false")
        self._require(self.source in get_args(Provenance), "source", "declared, public, dp or data")

    def _require(self, holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise SchemaError(f"column {self.name!r}: {field} ({getattr(self, field)!r}) must be {rule}")

    def _require_size(self) -> None:
        if self.size < 2:
            raise SchemaError(
                f"column {self.name!r}: the domain must have at least 2 values; drop a column that is constant, "
                "or declare `missing: true`"
            )

    @property
    def regular(self) -> int:
        """The number of codes that stand for proper values."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The number of codes."""
        return self.regular + self.missing

    @property
    def empty_code(self) -> int:
        """The code of an empty cell: `missing` where declared, else the last code."""
        return self.size - 1

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        """Returns values of the original kind; a missing code becomes null."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain form that a schema file holds, without the name."""
        plain = {key: value for key, value in asdict(self).items() if key != "name"}
        return {"type": self.kind} | plain


@dataclass(frozen=True, kw_only=True)
class Categorical(Column):
    """A value of a list. Values are compared as trimmed NFC text, case sensitive; whole numbers as numbers."""

    kind: ClassVar[str] = "categorical"
    categories: tuple[Value, ...]
    other: bool = False
    """Whether values outside the list have a code of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.categories, Sequence) and not isinstance(self.categories, str)
        self._require(listed and len(self.categories) > 0, "categories", "a list that is not empty")
        self._require(isinstance(self.other, bool), "other", "true or false")
        object.__setattr__(self, "categories", tuple(self.categories))
        for category in self.categories:
            if not isinstance(category, Value) or (isinstance(category, float) and not math.isfinite(category)):
                raise SchemaError(f"column {self.name!r}: category ({category!r}) must be a text or a finite number")
            if isinstance(category, str) and not canonical(category):
                raise SchemaError(
                    f"column {self.name!r}: category ({category!r}) must not be blank; use `missing: true`"
                )
        labels = [label(category) for category in self.categories] + [OTHER] * self.other
        for text, times in Counter(labels).items():
            if times > 1:
                raise SchemaError(f"column {self.name!r}: category ({text!r}) must be listed once")
        self._require_size()

    @property
    def regular(self) -> int:
        return len(self.categories)

    @property
    def size(self) -> int:
        return self.regular + self.other + self.missing

    @property
    def unseen_code(self) -> int:
        """The code of a value outside the list: `other`, else `missing`, else the last code."""
        return self.regular if self.other or self.missing else self.regular - 1

    @property
    def spellings(self) -> dict[str, int]:
        """Returns every text that stands for a category, with its code; a category's own label goes first."""
        labels = {label(category): code for code, category in enumerate(self.categories)}
        texts = [(text, code) for code, category in enumerate(self.categories) for text in spellings(category)]
        return dict(texts) | labels

    @property
    def numbers(self) -> dict[int | float, int]:
        """Returns every number that stands for a category, with its code: for columns stored as numbers.

        Whole numbers are exact, of any size. A category that is the number goes before one that spells it "07".
        """
        values = [number(category) for category in self.categories]
        pairs = [(value, code) for code, value in enumerate(values) if value is not None]
        plain = [(value, code) for value, code in pairs if label(value) == label(self.categories[code])]
        return dict(reversed(pairs)) | dict(plain)

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        import pyarrow as pa  # noqa: PLC0415

        plain = {type(category) for category in self.categories}
        large = any(isinstance(category, int) and abs(category) >= 2**63 for category in self.categories)
        texts = len(plain) > 1 or self.other or large or plain == {str}
        values = [label(category) if texts else category for category in self.categories]
        values += [OTHER] * self.other + [None] * self.missing
        return pa.array(values).take(pa.array(codes))


@dataclass(frozen=True, kw_only=True)
class Ordinal(Categorical):
    """A value of an ordered list: as Categorical, and the order of the list is meant."""

    kind: ClassVar[str] = "ordinal"


@dataclass(frozen=True, kw_only=True)
class Numeric(Column):
    """A number, in equal bins of a declared range; values outside are clamped.

    The bin of x is floor((x - lower) * bins / width), evaluated in IEEE double arithmetic in this order, then clamped
    to 0 … bins - 1: the same in every engine, half-open, a value on an edge belongs to the bin above. The width is
    upper - lower; for whole numbers upper - lower + 1, both bounds included.
    """

    kind: ClassVar[str] = "numeric"
    lower: float
    upper: float
    bins: int = 32
    integer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for bound in ("lower", "upper"):
            value = getattr(self, bound)
            self._require(is_number(value) and abs(value) < math.inf, bound, "a finite number")
            self._require(abs(value) <= sys.float_info.max, bound, "below 1.8e308")
        self._require(self.lower < self.upper, "lower", f"below upper ({self.upper!r})")
        self._require(isinstance(self.integer, bool), "integer", "true or false")
        self._require(math.isfinite(self.width), "upper", "closer to lower: the range overflows")
        most = min(int(self.width), MOST_BINS) if self.integer else MOST_BINS
        counted = isinstance(self.bins, int) and not isinstance(self.bins, bool)
        self._require(counted and 1 <= self.bins <= most, "bins", f"a whole number from 1 to {most}")
        self._require(math.isfinite(self.width * self.bins), "bins", "smaller: times the range it overflows")
        if self.integer:
            whole = float(self.lower).is_integer() and float(self.upper).is_integer()
            self._require(
                whole and max(abs(self.lower), abs(self.upper)) < 2**53,
                "lower",
                "whole, as upper, below 2^53",
            )
        self._require_size()

    @property
    def width(self) -> float:
        """The length of the range."""
        return float(self.upper) - float(self.lower) + float(self.integer)

    @property
    def regular(self) -> int:
        return self.bins

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The least whole number of each bin, and the one after the last: exact, where step times code is not."""
        lower, width = int(self.lower), int(self.width)
        return np.array([lower - (-code * width // self.bins) for code in range(self.bins + 1)], np.int64)

    def bin(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns the code of each number; NaN is not one."""
        lower, upper = float(self.lower), float(self.upper)
        scaled = np.floor((np.clip(values, lower, upper) - lower) * self.bins / self.width)
        return np.clip(scaled, 0, self.bins - 1).astype(np.int64)

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        """Returns a number drawn uniformly from each bin, so that encoding it again gives the same code."""
        import pyarrow as pa  # noqa: PLC0415

        kept = np.minimum(codes, self.bins - 1).astype(np.int64)
        step, lower = self.width / self.bins, float(self.lower)
        if self.integer:
            first, stop = self.firsts[kept].astype(np.float64), self.firsts[kept + 1]
            values = np.minimum(first + np.floor(generator.random(kept.size) * (stop - first)), stop - 1)
        else:
            values = np.minimum(lower + (kept + generator.random(kept.size)) * step, float(self.upper))
        values = np.where(self.bin(values) == kept, values, lower + (kept + 0.5) * step)
        values = np.round(values).astype(np.int64) if self.integer else values
        return pa.array(values, mask=codes >= self.bins) if self.missing else pa.array(values)


@dataclass(frozen=True, kw_only=True)
class Codes(Column):
    """A whole number from 0 to values - 1, as in mbi's domain files."""

    kind: ClassVar[str] = "codes"
    values: int

    def __post_init__(self) -> None:
        super().__post_init__()
        counted = isinstance(self.values, int) and not isinstance(self.values, bool)
        self._require(counted and 1 <= self.values <= 2**31 - 2, "values", "a whole number from 1 to 2^31 - 2")
        self._require_size()

    @property
    def regular(self) -> int:
        return self.values

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        import pyarrow as pa  # noqa: PLC0415

        return pa.array(codes.astype(np.int64), mask=codes >= self.values)


KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Categorical, Ordinal, Numeric, Codes)}


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
    def fingerprint(self) -> str:
        """A hash of all that the schema declares, the order of its columns included."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()

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
        if value is None:
            raise SchemaError(f"column {name!r}: {key} must be filled in: the schema's owner declares it")
    try:
        return KINDS[kind](name=name, **{str(key): value for key, value in spec.items() if key != "type"})
    except TypeError:
        needed = {
            "categorical": "categories",
            "ordinal": "categories",
            "numeric": "lower and upper",
            "codes": "values",
        }
        raise SchemaError(f"column {name!r}: a {kind} column must declare {needed[str(kind)]}") from None


def label(category: Value) -> str:
    """Returns the canonical text of a category: 7, 7.0 -> "7"; true -> "true"."""
    if isinstance(category, bool):
        return str(category).lower()
    if isinstance(category, float) and category.is_integer() and abs(category) < 2**53:
        return str(int(category))
    return canonical(category) if isinstance(category, str) else str(category)


def guarded(text: str) -> str:
    """Returns text as it is written to CSV: what a spreadsheet would take for a formula gets an apostrophe."""
    return f"'{text}" if text[:1] in FORMULA else text


def spellings(category: Value) -> tuple[str, ...]:
    """Returns the texts that a file may hold for a category: whole numbers also as 7.0, truth values in any case.

    A text that looks like a formula is also read as our own CSV files write it.
    """
    text = label(category)
    texts = [text]
    if isinstance(category, bool):
        texts += [text.title(), text.upper()]
    elif isinstance(category, int | float) and text.lstrip("-").isdigit():
        texts += [f"{text}.0"]
    return tuple(dict.fromkeys([*texts, guarded(text)]))


def number(category: Value) -> int | float | None:
    """Returns the finite number that a category is or spells; truth values are none."""
    if isinstance(category, bool):
        return None
    if not isinstance(category, str):
        return category
    text = canonical(category)
    if not re.fullmatch(NUMBER, text) or len(text) > LONGEST_NUMBER:
        return None
    value = int(text) if text.lstrip("+-").isdigit() else float(text)
    return value if math.isfinite(value) else None


def is_number(value: object) -> bool:
    """Returns whether a value is a plain number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def require_positive(name: str, value: object) -> None:
    """Refuses a parameter that is not a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ParameterError(f"{name} ({value!r}) must be a whole number of at least 1")
