"""Column: what every column of a schema has, whatever its kind (columns.py, ranges.py)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

    from anamorph.ranges import Numeric

Provenance = Literal["declared", "public", "dp", "data"]
"""Where a column's values came from: written by the owner, from public knowledge, a charged estimate, or the data."""

LARGEST_NAME = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Column:
    """What all columns share. Abstract: see Categorical, Ordinal, Numeric, Datetime, Codes."""

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

    @property
    def native(self) -> bool:
        """Whether a code is as good as the number it stands for: such a column has no marginals."""
        return False

    @property
    def grid(self) -> Numeric | None:
        """The numbers that stand for the values, and the grid of their codes; none for lists and plain codes."""
        return None

    @property
    def pending(self) -> bool:
        """Whether something of the column is still to be estimated, so that it can be counted but not fitted."""
        return False

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        """Returns values of the original kind; a missing code becomes null."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain form that a schema file holds, without the name."""
        plain = {key: value for key, value in asdict(self).items() if key != "name"}
        return {"type": self.kind} | plain
