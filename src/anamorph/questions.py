"""Questions: conditions such as "age < 30 and sex = 'F'", answered by a release.

A condition names some columns. Its answer is a weighted sum over the cells of the marginal over those columns: a cell
counts in full where the condition holds for its values, not at all where it does not, and, for a bin of numbers that a
bound of the condition cuts, in proportion to the part of the bin on the right side. A missing value makes a comparison
unknown, as in SQL, and so its negation; so does the `other` of an ordered list, which has no rank, for < and between.
Moments are compared with texts such as '2020-01-31', as the numbers that they are.

A native number has no marginal; a model that holds numbers answers prefixes of them, x <= b, with the cells of the
marginal over the coded columns. So the condition's own bounds split the number's codes into a few intervals, with the
missing ones as the last, and the answer, a sum over intervals, is a signed sum over prefixes: with w_i the weight of
interval i and P_i the share of the rows in the first i,

    sum over i of w_i (P_i - P_i-1)  =  sum over i of (w_i - w_i+1) P_i,

along each number in turn; the last prefix of each is no test at all. This is exact for every formula. Native numbers
are compared by their codes, a bound by the code that a cell of its value would have: a step that a bound cuts is not
split, so x = b holds for all of the step of b, x < b for the steps before it and x > b for those after.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anamorph.columns import LONGEST_NUMBER, OTHER, Categorical, Codes, Column, Datetime, Numeric, Ordinal, label
from anamorph.curator.where import Where
from anamorph.errors import ParameterError, SchemaError, suggestion
from anamorph.intervals import intervals
from anamorph.models.answers import Zero
from anamorph.models.model import Model
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested, limits_of
from anamorph.queries.workload import Queries, Workload
from anamorph.ranges import DAY, instant, is_number
from anamorph.release import Release
from anamorph.schema import Schema

if TYPE_CHECKING:
    from sqlglot import Expr

LARGEST = 1 << 24
"""The most cells that a condition's columns may have together."""

LARGEST_GIVEN = 1 << 16
"""The most cells of the coded columns beside native ones: a model of rows has a number for each row and cell."""

LARGEST_TESTS = 1 << 20
"""The most intervals of native columns, together."""

LONGEST = 1 << 14
"""The most characters of a condition."""

WORDS = ("and", "or", "not", "in", "between", "is", "null", "true", "false")
"""The words of conditions: a column of such a name is always written in quotes."""

Truth = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Where a condition holds, and where it fails; neither, where a missing value leaves it unknown."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a fraction of the rows, the same as a count, and the noise where it is known."""

    question: str
    fraction: float
    count: float
    sigma: float | None = None
    """The standard deviation of what was measured of the answer, as a fraction; none where nothing was."""
    low: float | None = None
    """The lower end of the interval that holds the true fraction with the confidence asked for."""
    high: float | None = None
    """Its upper end."""


@dataclass(frozen=True)
class Part:
    """A part of a column's domain on which the condition is constant: a code, a share of it, and a value of it.

    Of a native number it is an interval of codes, by the last of them and as a value the first.
    """

    code: int
    share: float
    value: Any


@dataclass(frozen=True, eq=False)
class Sums:
    """A condition as a weighted sum of answers."""

    given: tuple[int, ...]
    """The coded columns."""
    cells: NDArray[np.float64]
    """The weight of each cell of their marginal, an axis for each; of no columns, a number that is added."""
    tests: tuple[tuple[Where, NDArray[np.float64]], ...] = ()
    """Prefixes of numbers, and the weight of each cell of each of them: tests by cells."""

    def answer(self, model: Model, schema: Schema) -> float:
        """Returns the sum of a model's answers; refuses a model that holds no numbers where some are tested."""
        total = 0.0
        for tally, weights in self.tests:
            try:
                total += weighed(model, Tested(tally), weights)
            except ParameterError:
                names = ", ".join(repr(schema.names[number]) for number in tally.numbers)
                raise ParameterError(
                    f"columns {names} must have bins in this release, whose model holds no native numbers: "
                    "declare them without `native`, or fit with auto"
                ) from None
        if not self.given:
            return total if isinstance(model, Zero) else total + float(self.cells)
        if not self.tests or np.any(self.cells):
            total += weighed(model, Marginals(schema.sizes, (self.given,)), self.cells)
        return total


def ask(release: Release, question: str, *, confidence: float = 0.95) -> Answer:
    """Returns the release's answer to a condition on its columns, with an interval where one is known."""
    schema = release.schema
    condition = parse(question, schema.names)
    features = tuple(sorted({schema.index(name) for name in column_names(condition, schema)}))
    if not features:
        raise ParameterError(f"question ({question!r}) must name a column")
    try:
        sums = sums_of(condition, schema, features)
    except RecursionError:
        raise ParameterError("question must be less deeply nested") from None
    fraction = sums.answer(release.model, schema)
    found = intervals(release, confidence).weighted(sums.given, sums.cells, sums.tests)
    return Answer(question, fraction, fraction * release.total, *(found or ()))


def weighed(model: Model, queries: Queries, weights: NDArray[np.float64]) -> float:
    """Returns the weighted sum of a model's answers."""
    values = np.concatenate(list(model.answers(Workload((queries,)))))
    return float(weights.ravel() @ values)


def parse(question: str, names: Sequence[str] = ()) -> Expr:
    """Returns the tree of a condition on columns of these names."""
    from sqlglot import exp, parse_one  # noqa: PLC0415
    from sqlglot.errors import SqlglotError  # noqa: PLC0415

    if len(question) > LONGEST:
        raise ParameterError(f"question of {len(question)} characters must have at most {LONGEST}")
    for text in (lambda: question, lambda: quoted(question, names)):
        with contextlib.suppress(SqlglotError, RecursionError):
            return parse_one(text(), dialect="duckdb", into=exp.Condition)
    raise ParameterError(f"question ({question!r}) must be a condition such as \"age < 30 and sex = 'F'\"")


def quoted(question: str, names: Sequence[str]) -> str:
    """Returns a condition with the names of columns in quotes, for those that SQL reserves, such as when."""
    from sqlglot import tokenize  # noqa: PLC0415

    for token in reversed(tokenize(question, "duckdb")):
        word = question[token.start : token.end + 1]
        if word in names and word.isidentifier() and word.lower() not in WORDS:
            question = f'{question[: token.start]}"{word}"{question[token.end + 1 :]}'
    return question


def column_names(condition: Expr, schema: Schema) -> set[str]:
    """Returns the columns that a condition names; refuses unknown ones."""
    from sqlglot import exp  # noqa: PLC0415

    names = {column.name for column in condition.find_all(exp.Column)}
    for name in names:
        if name not in schema.names:
            raise SchemaError(f"column ({name!r}) must be in the schema.{suggestion(name, schema.names)}")
    return names


def sums_of(condition: Expr, schema: Schema, features: tuple[int, ...]) -> Sums:
    """Returns the condition as a sum over the marginal of its coded columns, and over prefixes of its numbers."""
    numbers = tuple(feature for feature in features if feature in schema.numbers)
    given = tuple(feature for feature in features if feature not in numbers)
    require_few((schema.sizes[feature] for feature in given), LARGEST_GIVEN if numbers else LARGEST)
    columns = [schema.columns[feature] for feature in (*numbers, *given)]
    parts = {column.name: split(column, bounds(condition, column)) for column in columns}
    require_few((len(parts[schema.names[number]]) for number in numbers), LARGEST_TESTS)
    weights = cell_weights(condition, schema, parts)
    for axis in range(len(numbers)):
        weights = -np.diff(weights, axis=axis, append=0)
    lasts = [np.array([part.code for part in parts[schema.names[number]]]) for number in numbers]
    everything = (-1,) * len(numbers)
    return Sums(given, weights[everything], tuple(prefixes(schema, numbers, given, lasts, weights)))


def prefixes(
    schema: Schema,
    numbers: tuple[int, ...],
    given: tuple[int, ...],
    lasts: Sequence[NDArray[np.int64]],
    weights: NDArray[np.float64],
) -> Iterator[tuple[Where, NDArray[np.float64]]]:
    """Yields the prefixes that have a weight, by the last code of each interval; those of the same numbers together.

    The last interval of a number ends with all of its codes: that is no test, and the number is left out.
    """
    shape = tuple(map(len, lasts))
    flat = weights.reshape(*shape, -1)
    asked = np.argwhere(np.any(flat != 0, axis=-1))
    tested = asked < np.array(shape, np.int64) - 1
    for chosen in np.unique(tested, axis=0) if numbers else ():
        mine, axes = asked[np.all(tested == chosen, axis=1)], np.flatnonzero(chosen).tolist()
        if axes:
            kept = tuple(numbers[axis] for axis in axes)
            ends = np.stack([lasts[axis][mine[:, axis]] for axis in axes], axis=1)
            yield Where(schema.sizes, given, kept, limits_of(schema, kept), ends), flat[tuple(mine.T)]


def cell_weights(condition: Expr, schema: Schema, parts: dict[str, list[Part]]) -> NDArray[np.float64]:
    """Returns how much each cell of the marginal over some columns counts; of native ones, each of their parts."""
    shape = tuple(map(len, parts.values()))
    require_few(shape)
    axes = dict(zip(parts, np.ix_(*(range(size) for size in shape)), strict=True))
    holds = np.broadcast_to(evaluate(condition, parts, axes, schema)[0], shape).astype(np.float64)
    for axis, (name, found) in enumerate(parts.items()):
        column = schema.columns[schema.index(name)]
        if not column.native:
            fold = np.zeros((column.size, len(found)))
            fold[[part.code for part in found], range(len(found))] = [part.share for part in found]
            holds = np.moveaxis(np.tensordot(fold, holds, axes=(1, axis)), 0, axis)
    return holds


def require_few(sizes: Iterable[int], most: int = LARGEST) -> None:
    """Refuses more cells than can be weighed."""
    if math.prod(sizes) > most:
        beside = " beside native numbers" if most == LARGEST_GIVEN else ""
        raise ParameterError(
            f"the question's columns{beside} must have at most {most} cells together: ask about fewer columns"
        )


def bounds(condition: Expr, column: Column) -> list[float]:
    """Returns the numbers that a condition compares a column with."""
    from sqlglot import exp  # noqa: PLC0415

    found = []
    for node in condition.find_all(exp.Predicate, exp.In, exp.Between):
        if column.name in {named.name for named in node.find_all(exp.Column)}:
            found += [ranked(column, literal(item)) for item in node.find_all(exp.Literal, exp.Neg)]
    return sorted({value for value in found if value is not None})


def ranked(column: Column, value: Any) -> float | None:  # noqa: ANN401 - a text, a number or a truth value
    """Returns the number that a value stands for in a column of numbers or moments, none where it is none."""
    found = float(value) if is_number(value) else None
    if isinstance(column, Datetime):
        seconds = instant(value)
        found = seconds / DAY if column.date and seconds is not None else seconds
    return place(column.grid, found) if column.native and column.grid and found is not None else found


def place(column: Numeric, number: float) -> float:
    """Returns the code of a number of the range; outside it, one that no cell has; between whole numbers, a half."""
    if not column.lower <= number <= column.upper:
        return -1.0 if number < column.lower else float(column.bins)
    whole = math.floor(number) if column.integer else number
    return float(column.bin(np.array(whole, np.float64))) + (0.5 if whole < number else 0.0)


def split(column: Column, cuts: list[float]) -> list[Part]:
    """Returns the parts of a column's domain: its codes, bins of numbers cut at the condition's bounds."""
    if column.native and column.grid is not None:
        parts = split_codes(column.grid, cuts)
    elif column.grid is not None:
        parts = [part for code in range(column.regular) for part in split_bin(column.grid, code, cuts)]
    elif isinstance(column, Codes):
        parts = [Part(code, 1.0, float(code)) for code in range(column.values)]
    elif isinstance(column, Ordinal):
        parts = [Part(code, 1.0, float(code)) for code in range(column.regular)]
    elif isinstance(column, Categorical):
        parts = [Part(code, 1.0, label(category)) for code, category in enumerate(column.categories)]
    else:
        raise ParameterError(f"column {column.name!r} must be categorical, ordinal, numeric, datetime or codes")
    if isinstance(column, Categorical) and column.other:
        parts.append(Part(column.regular, 1.0, OTHER))
    if column.missing:
        parts.append(Part(column.size - 1, 1.0, None))
    return parts


def split_codes(column: Numeric, cuts: list[float]) -> list[Part]:
    """Returns the codes of a native number in intervals, before, at and between the cuts, which are codes too.

    A code that is decoded to a number of another step (of whole numbers, some steps have none) goes with that one.
    """
    firsts = sorted({edge for cut in cuts for edge in (math.ceil(cut), math.floor(cut) + 1) if 0 < edge < column.bins})
    ends = np.searchsorted(column.settled, [*firsts, column.bins]).tolist()
    parts = zip([0, *firsts], ends, [0, *ends], strict=False)
    return [Part(end - 1, 1.0, float(first)) for first, end, begin in parts if end > begin]


def split_bin(column: Numeric, code: int, cuts: list[float]) -> list[Part]:
    """Returns the parts of a bin between the cuts, each with its share of the bin's values."""
    low, high = (float(edge) for edge in column.at([code, code + 1]))
    if column.integer:
        low, high = int(column.firsts[code]), int(column.firsts[code + 1])
        # A whole number that is a cut is a part of its own.
        cuts = sorted({edge for cut in cuts if low - 1 < cut < high for edge in (math.ceil(cut), math.floor(cut) + 1)})
    if low == high:  # no whole number: rows are given the nearest one
        return [Part(code, 1.0, float(np.clip(np.round(column.at(code + 0.5)), column.lower, column.upper)))]
    edges = [low, *(cut for cut in cuts if low < cut < high), high]
    places = edges if column.integer else column.forward(np.array(edges))  # rows are drawn uniformly in these
    return [
        Part(code, (after - before) / (places[-1] - places[0]), float(left) if column.integer else (left + right) / 2)
        for (left, right), (before, after) in zip(itertools.pairwise(edges), itertools.pairwise(places), strict=True)
    ]


def evaluate(node: Expr, parts: dict[str, list[Part]], axes: dict[str, NDArray[np.int64]], schema: Schema) -> Truth:
    """Returns where a condition holds and where it fails, over the grid of parts."""
    from sqlglot import exp  # noqa: PLC0415

    def inner(child: Expr) -> Truth:
        return evaluate(child, parts, axes, schema)

    if isinstance(node, exp.Paren):
        return inner(node.this)
    if isinstance(node, exp.And | exp.Or):
        left, right = inner(node.left), inner(node.right)
        both, either = (0, 1) if isinstance(node, exp.And) else (1, 0)
        truth = {both: left[both] & right[both], either: left[either] | right[either]}
        return truth[0], truth[1]
    if isinstance(node, exp.Not):
        holds, fails = inner(node.this)
        return fails, holds
    column, test = predicate(node, schema)
    found = [test(part.value) for part in parts[column.name]]
    place = axes[column.name]
    return np.array([truth is True for truth in found])[place], np.array([truth is False for truth in found])[place]


def predicate(node: Expr, schema: Schema) -> tuple[Column, Callable[[Any], bool | None]]:
    """Returns the column of a simple condition, and the test of one value: None where it is unknown."""
    from sqlglot import exp  # noqa: PLC0415

    compare = {exp.LT: operator.lt, exp.LTE: operator.le, exp.GT: operator.gt, exp.GTE: operator.ge}
    target = node.this
    if not isinstance(target, exp.Column):
        raise ParameterError(f"condition ({node.sql()!r}) must compare a column with values")
    column = schema.columns[schema.index(target.name)]
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        return column, lambda value: value is None
    if isinstance(node, exp.In) and node.expressions:
        wanted = [comparable(column, item) for item in node.expressions]
        return column, lambda value: None if value is None else value in wanted
    if isinstance(node, exp.Between):
        low, high = rank(column, node.args["low"], node), rank(column, node.args["high"], node)
        return column, lambda value: low <= value <= high if isinstance(value, float) else None
    if isinstance(node, exp.EQ | exp.NEQ):
        wanted, equal = comparable(column, node.expression), isinstance(node, exp.EQ)
        return column, lambda value: None if value is None else (value == wanted) is equal
    if type(node) in compare:
        ordered, bound = compare[type(node)], rank(column, node.expression, node)
        return column, lambda value: ordered(value, bound) if isinstance(value, float) else None
    raise ParameterError(
        f"condition ({node.sql()!r}) must be =, <>, <, <=, >, >=, in, between or is null, joined by and, or, not"
    )


def rank(column: Column, bound: Expr, node: Expr) -> float:
    """Returns the number that a bound stands for in the order of a column; refuses values that have no order."""
    value = comparable(column, bound)
    if not isinstance(value, float):
        raise ParameterError(f"condition ({node.sql()!r}) must not order {column.name!r} by {value!r}: it has no order")
    return value


def comparable(column: Column, node: Expr) -> Any:  # noqa: ANN401 - a text or a number
    """Returns the value that a literal stands for in a column: a number, a category's label, or its rank."""
    value = literal(node)
    if isinstance(column, Categorical):
        code = column.spellings.get(label(value))
        if code is None and not (column.other and value == OTHER):
            known = [label(category) for category in column.categories]
            raise ParameterError(
                f"value ({value!r}) must be a category of {column.name!r}.{suggestion(str(value), known)}"
            )
        if isinstance(column, Ordinal):
            return float(code) if code is not None else OTHER
        return label(column.categories[code]) if code is not None else OTHER
    number = ranked(column, value)
    if number is None:
        moments = isinstance(column, Datetime)
        rule = "a moment such as '2020-01-31': {} holds moments" if moments else "a number: {} holds numbers"
        raise ParameterError(f"value ({value!r}) must be {rule.format(repr(column.name))}")
    return number


def literal(node: Expr) -> Any:  # noqa: ANN401 - a text, a number or a truth value
    """Returns the value of a literal."""
    from sqlglot import exp  # noqa: PLC0415

    if isinstance(node, exp.Neg) and is_number(value := literal(node.this)):
        return -value
    if isinstance(node, exp.Boolean):
        return bool(node.this)
    moments = exp.DType.DATE, exp.DType.TIMESTAMP, exp.DType.TIMESTAMPNTZ
    if isinstance(node, exp.Cast) and node.is_type(*moments) and node.this.is_string:
        return node.this.this  # date '2020-01-31'
    if isinstance(node, exp.Literal):
        if node.is_string:
            return node.this
        whole = node.this.isdigit() and len(node.this) <= LONGEST_NUMBER
        return int(node.this) if whole else float(node.this)
    raise ParameterError(f"value ({node.sql()!r}) must be a number or a text in single quotes")
