"""Numbers and moments: columns whose values lie in a declared range, and the grid on which they have codes.

A code is a step of an equal grid over the range. A few steps are bins. A *native* column has so many (2^20, or one for
each whole number) that a code is the number itself, as a fixed-point real: (code + 1/2) / steps is its place in the
range, from 0 to 1. A transform stretches the range first, for numbers with a heavy tail. A moment is a number too: the
days, or seconds, since 1970.
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.column import Column
from anamorph.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

Transform = Literal["none", "log", "signed-log", "quantile"]
"""What the grid is equal in: x, ln(1 + (x - lower)), sign(x) ln(1 + |x|), or a line between knots."""

BINS = 32
MOST_BINS = 1 << 20
"""The most bins, and the steps of a native number."""

MOST_KNOTS = 1 << 10
MARGIN = 1024
"""Of a transformed number, how many units of the last place a step has at least."""

NUDGE = 2.0**-20
"""In steps. A transformed number so near below an edge is on it: logarithms differ in the last bit between engines."""
INNER = 1 - 2.0**-6
"""The part of a step, around its middle, that transformed numbers are drawn from: none is near an edge."""

MOMENT = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]+)?)?"
    r"(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)?)?"
)
"""The texts that are moments, if such a day is in the calendar: ISO 8601, with T or a space, UTC unless they say."""

DAY = 86_400
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, kw_only=True)
class Numeric(Column):
    """A number, in equal bins of a declared range or native; values outside are clamped.

    The bin of x is floor((x - lower) * bins / width), evaluated in IEEE double arithmetic in this order, then clamped
    to 0 … bins - 1: the same in every engine, half-open, a value on an edge belongs to the bin above. The width is
    upper - lower; for whole numbers upper - lower + 1, both bounds included.

    With a transform t it is floor((t(x) - t(lower)) * bins / (t(upper) - t(lower)) + NUDGE), clamped likewise.

    The quantile transform sends knot i of K to i / (K - 1), and numbers between two knots to a line between, so that
    each pair of neighbours has as many steps as any other: for x from knot i on and below the next,
    t(x) = (i + (x - knot_i) / (knot_i+1 - knot_i)) / (K - 1), in double arithmetic in this order. Until its knots are
    declared or estimated (quantiles.py) such a column is counted on the native grid without a transform (`grid`).
    """

    kind: ClassVar[str] = "numeric"
    lower: float
    upper: float
    bins: int = BINS
    """The number of bins, of a native column the steps: not to be given then."""
    integer: bool = False
    native: bool = False  # type: ignore[override]
    """Whether there are as many steps as a number needs: 2^20, for whole numbers one each where they are fewer."""
    transform: Transform = "none"
    knots: tuple[float, ...] | None = None
    """For the quantile transform: increasing numbers from lower to upper; none where they are still to come."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for bound in ("lower", "upper"):
            value = getattr(self, bound)
            self._require(is_number(value) and abs(value) < math.inf, bound, "a finite number")
            self._require(abs(value) <= sys.float_info.max, bound, "below 1.8e308")
        self._require(self.lower < self.upper, "lower", f"below upper ({self.upper!r})")
        self._require(isinstance(self.integer, bool), "integer", "true or false")
        self._require(isinstance(self.native, bool), "native", "true or false")
        self._require(self.transform in get_args(Transform), "transform", "none, log, signed-log or quantile")
        self._require(math.isfinite(self.length), "upper", "closer to lower: the range overflows")
        self._set_knots()
        self._set_bins()
        if self.integer:
            whole = float(self.lower).is_integer() and float(self.upper).is_integer()
            self._require(
                whole and max(abs(self.lower), abs(self.upper)) < 2**53,
                "lower",
                "whole, as upper, below 2^53",
            )
        self._require_resolution()
        self._require_size()

    def _set_knots(self) -> None:
        """Refuses knots that are no increasing numbers from lower to upper."""
        if self.knots is None:
            return
        self._require(self.transform == "quantile", "transform", "quantile where there are knots")
        knots: Any = self.knots if isinstance(self.knots, list | tuple) else ()
        sound = 2 <= len(knots) <= MOST_KNOTS and all(is_number(knot) and abs(knot) < math.inf for knot in knots)
        sound = sound and (knots[0], knots[-1]) == (self.lower, self.upper)
        if not sound or not all(float(low) < float(high) for low, high in itertools.pairwise(knots)):
            raise SchemaError(
                f"column {self.name!r}: knots must be 2 to {MOST_KNOTS} increasing numbers, the first of them lower "
                f"({self.lower!r}) and the last upper ({self.upper!r})"
            )
        object.__setattr__(self, "knots", tuple(knots))

    def _set_bins(self) -> None:
        """Refuses a wrong number of bins; gives a native column its steps."""
        most = min(int(self.length), MOST_BINS) if self.integer else MOST_BINS
        if self.native:
            steps = MOST_BINS if self.transform != "none" else most
            self._require(self.bins in (BINS, steps), "bins", "left out: a native number has none")
            object.__setattr__(self, "bins", steps)
        else:
            counted = isinstance(self.bins, int) and not isinstance(self.bins, bool)
            self._require(counted and 1 <= self.bins <= most, "bins", f"a whole number from 1 to {most}")
        self._require(math.isfinite(self.width * self.bins), "bins", "smaller: times the range it overflows")

    def _require_resolution(self) -> None:
        """Refuses steps that floating point cannot tell apart, and so could not encode as they were decoded."""
        rule = f"farther from lower: the range must hold {self.bins} steps that doubles can tell apart"
        if self.transform == "quantile":
            pairs = list(itertools.pairwise(self.knots or (self.lower, self.upper)))
            self._require(all(self.apart(*pair, len(pairs)) for pair in pairs), "upper", f"{rule}, between knots too")
            return
        ends = float(self.lower), float(self.upper)
        if self.transform == "none":
            fine = self.integer or not self.native
            units = 16 * np.spacing(max(map(abs, ends)))
        else:
            fine = False
            near = 0.0 if self.integer or self.transform == "signed-log" else np.spacing(abs(ends[0]))
            units = MARGIN * max(near, sys.float_info.epsilon, *np.spacing(np.abs(self.forward(np.array(ends)))))
        self._require(fine or self.width / self.bins >= units, "upper", rule)

    def apart(self, low: float, high: float, pairs: int = 1) -> bool:
        """Returns whether doubles can tell the steps between two neighbours of so many pairs of knots apart."""
        step = (float(high) - float(low)) * pairs / self.bins
        return max(step, float(self.integer)) >= MARGIN * math.ulp(max(abs(low), abs(high)))

    @property
    def pending(self) -> bool:
        """Whether the knots of a quantile transform are still to come."""
        return self.transform == "quantile" and self.knots is None

    @property
    def length(self) -> float:
        """The length of the range; of whole numbers, how many they are."""
        return float(self.upper) - float(self.lower) + float(self.integer)

    @property
    def width(self) -> float:
        """The length of the range that the grid is equal in: the transformed one."""
        if self.transform == "none":
            return self.length
        start, stop = self.forward(np.array([self.lower, self.upper], np.float64))
        return float(stop - start)

    @property
    def origin(self) -> float:
        """Where that range begins."""
        return float(self.forward(np.float64(self.lower)))

    @property
    def regular(self) -> int:
        return self.grid.bins

    @cached_property
    def grid(self) -> Numeric:  # type: ignore[override]
        """The column itself; while knots are still to come, the native one without a transform."""
        return replace(self, bins=BINS, native=True, transform="none") if self.pending else self

    @cached_property
    def places(self) -> NDArray[np.float64]:
        """The knots."""
        return np.array(self.knots or (self.lower, self.upper), np.float64)

    def forward(self, values: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
        """Returns the transform of numbers of the range."""
        if self.transform == "quantile":
            pairs = len(self.places) - 1
            pair = np.clip(np.searchsorted(self.places, values, side="right") - 1, 0, pairs - 1)
            return (pair + (values - self.places[pair]) / (self.places[pair + 1] - self.places[pair])) / pairs
        if self.transform == "log":
            return np.log(1.0 + (values - float(self.lower)))
        return np.sign(values) * np.log(1.0 + np.abs(values)) if self.transform == "signed-log" else np.asarray(values)

    def inverse(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the numbers whose transform is given."""
        if self.transform == "quantile":
            pairs = len(self.places) - 1
            scaled = values * pairs
            pair = np.clip(np.floor(scaled), 0, pairs - 1).astype(np.int64)
            return self.places[pair] + (scaled - pair) * (self.places[pair + 1] - self.places[pair])
        if self.transform == "log":
            return float(self.lower) + np.expm1(values)
        return np.sign(values) * np.expm1(np.abs(values)) if self.transform == "signed-log" else values

    def at(self, places: ArrayLike) -> NDArray[np.float64]:
        """Returns the numbers at places on the grid: at code, where its step begins, at code + 1/2, its middle."""
        return self.inverse(self.origin + np.asarray(places, np.float64) * (self.width / self.bins))

    def bin(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns the code of each number; NaN is not one."""
        kept = np.clip(values, float(self.lower), float(self.upper))
        scaled = (self.forward(kept) - self.origin) * self.bins / self.width
        scaled = scaled if self.transform == "none" else scaled + NUDGE
        return np.clip(np.floor(scaled), 0, self.bins - 1).astype(np.int64)

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The least whole number of each bin, and the one after the last."""
        return self.first(np.arange(self.bins + 1))

    def first(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the least whole number whose code is at least the one given: exact, where step times code is not."""
        lower, upper = int(self.lower), int(self.upper)
        if self.transform == "none":
            each, rest = divmod(int(self.width), self.bins)
            return lower + codes * each - (-codes * rest // self.bins)
        near = np.clip(np.ceil(self.at(codes)), lower, upper).astype(np.int64)
        near -= (near > lower) & (self.bin((near - 1).astype(np.float64)) >= codes)
        return near + (self.bin(near.astype(np.float64)) < codes)

    @cached_property
    def settled(self) -> NDArray[np.int64]:
        """The code that each code has once it is decoded and encoded again.

        It is its own, but where a step of transformed whole numbers holds none: there, that of the nearest one.
        """
        codes = np.arange(self.bins)
        if not self.integer or self.transform == "none":
            return codes
        nearest = np.clip(np.round(self.at(codes + 0.5)), int(self.lower), int(self.upper))
        return np.where(self.firsts[:-1] == self.firsts[1:], self.bin(nearest), codes)

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        """Returns a number drawn uniformly from each bin, so that encoding it again gives the same code.

        With a transform, uniformly in it. A step of transformed whole numbers that holds none gives the nearest one:
        its code is another.
        """
        import pyarrow as pa  # noqa: PLC0415

        if self.pending:
            return self.grid.decode(codes, generator)
        kept = np.minimum(codes, self.bins - 1).astype(np.int64)
        values = self._draw(kept, generator.random(kept.size))
        values = np.where(self.bin(values) == kept, values, self.at(kept + 0.5))
        if self.integer:
            values = np.clip(np.round(values), int(self.lower), int(self.upper)).astype(np.int64)
        return pa.array(values, mask=codes >= self.bins) if self.missing else pa.array(values)

    def _draw(self, kept: NDArray[np.int64], uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns a number of each step, drawn by a number from 0 to 1."""
        if self.integer:
            first, stop = self.first(kept).astype(np.float64), self.first(kept + 1)
            return np.minimum(first + np.floor(uniforms * (stop - first)), stop - 1)
        inner = uniforms if self.transform == "none" else 0.5 + (uniforms - 0.5) * INNER
        return np.clip(self.at(kept + inner), float(self.lower), float(self.upper))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain form; fields that an older version did not have stand in it where they say something."""
        plain = super().to_dict()
        del plain["bins" if self.native else "native"]
        if self.transform == "none":
            del plain["transform"]
        del plain["knots"]
        return plain if self.knots is None else plain | {"knots": list(self.knots)}


@dataclass(frozen=True, kw_only=True)
class Datetime(Column):
    """A moment of a declared range: a day, or a second of UTC without a zone; values outside are clamped.

    Its number is that of days, or of seconds, since 1970-01-01, with the codes of a Numeric of whole numbers (`grid`).
    Parts of a second, and of a day where days are asked for, are dropped.
    """

    kind: ClassVar[str] = "datetime"
    lower: str | datetime.date
    """The first moment: ISO 8601 text, kept so; a day stands for its midnight."""
    upper: str | datetime.date
    """The last moment."""
    bins: int | None = None
    """The number of bins; none: native."""
    date: bool = False
    """Whether moments are whole days."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(isinstance(self.date, bool), "date", "true or false")
        for name in ("lower", "upper"):
            moment = instant(getattr(self, name))
            rule = "a day such as 2020-01-31" if self.date else "a moment such as 2020-01-31 or 2020-01-31T12:00:00"
            self._require(moment is not None and (moment % DAY == 0 or not self.date), name, rule)
            object.__setattr__(self, name, self.text((moment or 0) // (DAY if self.date else 1)))
        self._require(self.numbers[0] < self.numbers[1], "lower", f"before upper ({self.upper!r})")
        self._require_size()

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of the bounds."""
        unit = DAY if self.date else 1
        first, last = (int(instant(bound) or 0) // unit for bound in (self.lower, self.upper))
        return first, last

    @property
    def native(self) -> bool:
        return self.bins is None

    @cached_property
    def grid(self) -> Numeric:  # type: ignore[override]
        """The column of its numbers."""
        lower, upper = self.numbers
        bins = BINS if self.bins is None else self.bins
        ends: dict[str, Any] = {"lower": lower, "upper": upper, "integer": True}
        return Numeric(name=self.name, missing=self.missing, bins=bins, native=self.native, **ends)

    @property
    def regular(self) -> int:
        return self.grid.bins

    def text(self, number: float) -> str:
        """Returns the ISO text of a number of days or seconds."""
        moment = EPOCH + datetime.timedelta(**{"days" if self.date else "seconds": number})
        return moment.date().isoformat() if self.date else moment.replace(tzinfo=None).isoformat()

    def decode(self, codes: NDArray[np.integer], generator: np.random.Generator) -> pa.Array:
        """Returns days as date32, other moments as timestamp[s] without a zone."""
        import pyarrow as pa  # noqa: PLC0415

        numbers = self.grid.decode(codes, generator)
        return numbers.cast(pa.int32()).cast(pa.date32()) if self.date else numbers.cast(pa.timestamp("s"))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain form."""
        return {key: value for key, value in super().to_dict().items() if value is not None}


def instant(value: object) -> float | None:
    """Returns the seconds since 1970 of a day or a moment, or of its text; none where it is neither."""
    try:
        text = value.isoformat() if isinstance(value, datetime.date) else value
        if not isinstance(text, str) or not re.fullmatch(MOMENT, text.strip()):
            return None
        moment = datetime.datetime.fromisoformat(text.strip())
        zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
        return (zoned.astimezone(datetime.UTC) - EPOCH).total_seconds()
    except (ValueError, OverflowError):
        return None


def is_number(value: object) -> bool:
    """Returns whether a value is a plain number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
