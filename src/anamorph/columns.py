"""Columns: what the cells of a private table may hold, and the code that stands for each.

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
               [lower, upper), or native
Datetime       native, or equal bins       clamped into the range       `missing`, else the last code
Codes          the number itself           clamped into the range       `missing`, else the last code
=============  ==========================  ===========================  ==========================================

`other` and `missing`, where declared, are one code each, after the regular ones, in this order.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from anamorph.column import Column
from anamorph.errors import SchemaError
from anamorph.ranges import MOST_BINS, Datetime, Numeric  # noqa: F401 - all columns are found here

if TYPE_CHECKING:
    import pyarrow as pa

Value = str | int | float | bool

WHITESPACE = " \t\r\n"
"""What is trimmed from both ends of a text cell before it is looked up."""

NUMBER = r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?|[+-]?[iI][nN][fF]([iI][nN][iI][tT][yY])?"
"""The texts that are numbers; all others, such as 1,234 or nan or 0x10, count as empty."""

OTHER = "other"
"""The label under which the `other` code of a categorical column is decoded."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet would take for a formula."""

LONGEST_NUMBER = 1 << 8


def canonical(text: str) -> str:
    """Returns the form in which text is compared: trimmed, Unicode NFC."""
    return unicodedata.normalize("NFC", text.strip(WHITESPACE))


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


KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Categorical, Ordinal, Numeric, Codes, Datetime)}


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
