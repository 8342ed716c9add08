"""The SQL of a source: what is sent to an engine, and no connection.

Encoding is one statement. An inner select reads each cell as the schema compares it, a text or a double or
null; the outer one turns that into a code. A category is searched in its list, or found by a join with it:

    SELECT CAST(CASE WHEN cells.v0 IS NULL THEN 3 ELSE COALESCE(list0.code, 2) END AS UTINYINT) AS f0, …
    FROM (SELECT … AS v0, … FROM data) AS cells
    LEFT JOIN (VALUES ('red', 0), ('green', 1)) AS list0(key, code) ON list0.key = cells.v0 …

It is built of sqlglot expressions, so names and categories of any spelling are quoted, and other dialects can
follow. Counting is standard SQL over the encoded columns f0, f1, …: it holds no name or text of the user's. So is
counting by ranks, where a number is told apart only by which of some bounds it exceeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from sqlglot import Expr, exp

from anamorph.columns import NUMBER, WHITESPACE, Categorical, Column, Datetime, Numeric
from anamorph.errors import WorkloadError
from anamorph.ranges import DAY, MOMENT, NUDGE
from anamorph.schema import Schema

ENCODED = "encoded"
"""The table of codes, columns f0, f1, … in the schema's order."""

MOST_CELLS = 2**63
"""A cell's position must fit the engine's 64-bit integers."""

FEW_CUTS = 128
"""The most cuts of a column among which a rank is searched by halves: up to here that is faster than a join."""

LONGEST_SEARCH, MOST_JOINS = 1024, 16
TRUTHS = {"false": ("false", "False", "FALSE"), "true": ("true", "True", "TRUE")}
UNSENDABLE = re.compile("[\0\ud800-\udfff]")
"""What no statement can hold; no cell does either, as the engine reads it."""


class Stored(Enum):
    """How a column is stored."""

    TEXT = "text"
    WHOLE = "whole numbers of up to 64 bits"
    WIDE = "wider whole numbers"
    REAL = "floating point numbers"
    DECIMAL = "decimal fractions"
    TRUTH = "truth values"
    MOMENT = "dates or times"


def encode_statement(
    schema: Schema,
    table: exp.Table,
    *,
    stored: Sequence[Stored],
    names: Sequence[str],
    dialect: str = "duckdb",
    ordered: bool = False,
) -> str:
    """Returns the select that encodes a table, in the order of its rows where `ordered`.

    Args:
        schema: the columns.
        table: the table, its name quoted.
        stored: how each column is stored.
        names: what each column is called in the table.
        dialect: sqlglot's name of the engine's SQL.
        ordered: whether the order of the rows is kept.
    """
    listed = [lookup(column, kind) for column, kind in zip(schema.columns, stored, strict=True)]
    joined = _joined([len(keys) for keys in listed], dialect)
    cells, outer = exp.Select(), exp.Select()
    for i, (column, kind, name) in enumerate(zip(schema.columns, stored, names, strict=True)):
        cell, value = exp.column(exp.to_identifier(name, quoted=True)), exp.column(f"v{i}", table="cells")
        cells.select(_read(column, cell, kind, dialect).as_(f"v{i}"), copy=False)
        found = exp.column("code", table=f"list{i}") if i in joined else _search(listed[i], value)
        code = _code(column, value, found)
        outer.select(exp.cast(code, _code_type(column.size, dialect)).as_(f"f{i}"), copy=False)
    if ordered:
        cells.select(exp.Window(this=exp.RowNumber()).as_("position"), copy=False)
        outer.order_by(exp.column("position", table="cells"), copy=False)
    outer.from_(cells.from_(table, copy=False).subquery("cells"), copy=False)
    for i in sorted(joined):
        same = exp.column("key", table=f"list{i}").eq(exp.column(f"v{i}", table="cells"))
        outer.join(_values(listed[i], f"list{i}"), on=same, join_type="left", copy=False)
    return outer.sql(dialect, copy=False)


def lookup(column: Column, stored: Stored) -> Mapping[Any, int]:
    """Returns the code of each value that a column may hold, as the engine reads it: texts, or floats."""
    if not isinstance(column, Categorical):
        return {}
    spellings, numbers = column.spellings, column.numbers
    if stored is Stored.TRUTH:
        found = {key: [text for text in texts if text in spellings] for key, texts in TRUTHS.items()}
        return {key: spellings[texts[0]] for key, texts in found.items() if texts}
    if stored in (Stored.WHOLE, Stored.WIDE):
        return {str(int(number)): code for number, code in numbers.items() if number == int(number)}
    if stored in (Stored.REAL, Stored.DECIMAL):
        return {float(number): code for number, code in numbers.items() if _is_double(number)}
    return {text: code for text, code in spellings.items() if not UNSENDABLE.search(text)}


def _joined(lengths: Sequence[int], dialect: str) -> set[int]:
    """Returns the columns whose lists are joined with; DuckDB searches short lists in place.

    A search takes time with the length of the list, a join memory (some 30 MB) whatever the length.
    """
    columns = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if dialect == "duckdb":
        return {i for i in columns[:MOST_JOINS] if lengths[i] > LONGEST_SEARCH}
    return {i for i in columns if lengths[i]}


def check_sets(sets: Sequence[tuple[int, ...]], schema: Schema) -> list[int]:
    """Returns the number of cells of each marginal; refuses absent columns, and too many cells."""
    cells = []
    for columns in sets:
        if len(set(columns)) < len(columns) or not all(0 <= i < len(schema.columns) for i in columns):
            raise WorkloadError(
                f"marginal {tuple(columns)} must name distinct columns from 0 to {len(schema.columns) - 1}"
            )
        size = 1
        for i in columns:
            size *= schema.sizes[i]
        if size >= MOST_CELLS:
            named = ", ".join(repr(schema.names[i]) for i in columns)
            raise WorkloadError(f"the marginal over {named} has {size} cells and must have fewer than 2^63")
        cells.append(size)
    return cells


def count_statement(sets: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> str:
    """Returns the select that counts marginals: (part, cell, number) for each non-empty cell of each."""
    # Plain text, which is fast to write, and safe: nothing but numbers is put in.
    return " UNION ALL ".join(
        f"SELECT {part} AS part, {_position(columns, sizes)} AS cell, COUNT(*) AS number "  # noqa: S608
        f"FROM {ENCODED} GROUP BY 2"
        for part, columns in enumerate(sets)
    )


def group_statement(given: tuple[int, ...], cuts: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> str:
    """Returns the select that counts a marginal over columns and ranks: (cell, number) for each non-empty cell.

    A rank among few cuts is searched by halves. Among many the ranks of a column come by a join with its codes: a
    window sums marks over them in order, one for each cut, put where the codes above it begin. Rows beyond the last cut
    of a column are left out, or find none.
    """
    position, joins, within = _position(given, sizes), "", []
    for column, ordered in cuts.items():
        few = len(ordered) <= FEW_CUTS
        rank = _rank(column, ordered[:-1]) if few else f"r{column}.place"
        position = f"({position}) * {len(ordered)} + {rank}"
        if few:
            within.append(f"f{column} <= {ordered[-1]}")
        else:
            joins += f" JOIN {_ranks(column, ordered)} AS r{column} ON r{column}.code = f{column}"
    where = f" WHERE {' AND '.join(within)}" if within else ""
    return f"SELECT {position} AS cell, COUNT(*) AS number FROM {ENCODED}{joins}{where} GROUP BY 1"  # noqa: S608


def _rank(column: int, cuts: Sequence[int], first: int = 0) -> str:
    """How many cuts are below a code, and `first` more: the middle one says in which half to go on."""
    if not cuts:
        return str(first)
    middle = len(cuts) // 2
    lower, upper = _rank(column, cuts[:middle], first), _rank(column, cuts[middle + 1 :], first + middle + 1)
    return f"CASE WHEN f{column} <= {cuts[middle]} THEN {lower} ELSE {upper} END"


def _ranks(column: int, cuts: Sequence[int]) -> str:
    """The rank of each code that is not beyond the last cut: how many cuts are below it."""
    codes = f"SELECT DISTINCT CAST(f{column} AS BIGINT) AS code, 0 AS mark FROM {ENCODED} WHERE f{column} <= {cuts[-1]}"  # noqa: S608
    starts = ", ".join(f"({cut + 1})" for cut in cuts)
    summed = (
        f"SELECT code, mark, CAST(SUM(mark) OVER (ORDER BY code) AS BIGINT) AS place "  # noqa: S608
        f"FROM ({codes} UNION ALL SELECT code, 1 AS mark FROM (VALUES {starts}) AS cuts(code)) AS marks"
    )
    return f"(SELECT code, place FROM ({summed}) AS summed WHERE mark = 0)"  # noqa: S608


def _position(columns: tuple[int, ...], sizes: Sequence[int]) -> str:
    """The C-order position of a row's cell, by Horner's rule."""
    position = "CAST(0 AS BIGINT)" if not columns else f"CAST(f{columns[0]} AS BIGINT)"
    for i in columns[1:]:
        position = f"({position}) * {sizes[i]} + f{i}"
    return position


def _text(cell: Expr, stored: Stored) -> Expr:
    """The text of a cell; moments in ISO 8601, in UTC where they have a zone."""
    text = exp.cast(cell, exp.DType.TEXT)
    if stored is Stored.MOMENT:
        return _call("REPLACE", _call("REPLACE", text, " ", "T"), "+00", "Z")
    return text


def _read(column: Column, cell: Expr, stored: Stored, dialect: str) -> Expr:
    """A cell as the schema compares it: a text, or a double; null where it is empty."""
    if isinstance(column, Datetime):
        seconds = _moment(cell, stored)
        return exp.Floor(this=exp.Div(this=seconds, expression=_double(DAY))) if column.date else seconds
    return _key(cell, stored, dialect) if isinstance(column, Categorical) else _number(cell, stored)


def _key(cell: Expr, stored: Stored, dialect: str) -> Expr:
    """What is looked up in a category list: null where the cell is empty."""
    if stored in (Stored.REAL, Stored.DECIMAL):
        return _number(cell, stored)
    text = _text(cell, stored)
    if stored is Stored.TEXT:
        # A table may declare a collation under which "a" equals "A"; the rule is equality of code points.
        plain = exp.Collate(this=text, expression=exp.to_identifier("C", quoted=True))
        text = exp.Nullif(this=_normal(_trim(plain), dialect), expression=exp.Literal.string(""))
    return text


def _normal(text: Expr, dialect: str) -> Expr:
    if dialect != "duckdb":
        return exp.Normalize(this=text, form=exp.var("NFC"))
    # DuckDB's function drops what follows a NUL character; as U+FFFD it is kept, and in no category.
    nul = exp.func("CHR", exp.Literal.number(0))
    return _call("NFC_NORMALIZE", exp.func("REPLACE", text, nul, exp.Literal.string("\ufffd")))


def _number(cell: Expr, stored: Stored) -> Expr:
    """The number of a cell as a double, null where there is none; wide numbers by text, which rounds once."""
    double = exp.DType.DOUBLE
    if stored is Stored.TEXT:
        trimmed = _trim(_text(cell, stored))
        grammar = exp.RegexpLike(this=trimmed, expression=exp.Literal.string(f"^({NUMBER})$"))
        return exp.case().when(grammar, exp.TryCast(this=trimmed.copy(), to=exp.DataType(this=double)))
    if stored is Stored.TRUTH:
        return exp.cast(exp.cast(cell, exp.DType.INT), double)
    if stored in (Stored.WIDE, Stored.DECIMAL):
        return exp.TryCast(this=_text(cell, stored), to=exp.DataType(this=double))
    return exp.Nullif(this=exp.cast(cell, double), expression=_double(float("nan")))


def _moment(cell: Expr, stored: Stored) -> Expr:
    """The whole seconds since 1970 of a cell as a double, null where there is no moment.

    Stored moments go by their text too, which is exact: other ways round parts of a second up.
    """
    text = _trim(_text(cell, stored))
    grammar = exp.RegexpLike(this=text, expression=exp.Literal.string(f"^({MOMENT})$"))
    zoned = exp.TryCast(this=text.copy(), to=exp.DataType(this=exp.DType.TIMESTAMPTZ))
    found = exp.case().when(grammar, _call("EPOCH", _call("DATE_TRUNC", "second", zoned)))
    if stored is Stored.MOMENT:  # the text of what is left: -infinity, years before Christ, infinity, years after 9999
        early = exp.RegexpLike(this=text.copy(), expression=exp.Literal.string("^-|BC"))
        found = found.when(early, _double(float("-inf"))).when(
            exp.Not(this=text.copy().is_(exp.Null())), _double(float("inf"))
        )
    return found


def _bin(column: Numeric, value: Expr) -> Expr:
    """Numeric.bin, in the same order of operations."""
    lower, upper = float(column.lower), float(column.upper)
    stretched = _forward(column, _clamp(value, lower, upper))
    above = exp.paren(exp.Sub(this=stretched, expression=_double(column.origin)))
    scaled = exp.Div(this=exp.Mul(this=above, expression=_double(column.bins)), expression=_double(column.width))
    if column.transform != "none":
        scaled = exp.Add(this=scaled, expression=_double(NUDGE))
    return _clamp(exp.Floor(this=scaled), 0, column.bins - 1)


def _forward(column: Numeric, value: Expr) -> Expr:
    """Numeric.forward, in the same order of operations; the value is in the range, so no logarithm fails."""
    if column.transform == "log":
        above = exp.paren(exp.Sub(this=value, expression=_double(float(column.lower))))
        return exp.Ln(this=exp.Add(this=_double(1), expression=above))
    if column.transform == "signed-log":
        size = exp.Ln(this=exp.Add(this=_double(1), expression=exp.Abs(this=value)))
        return exp.Mul(this=exp.Sign(this=value.copy()), expression=size)
    return _between_knots(column, value, 0, len(column.places) - 1) if column.transform == "quantile" else value


def _between_knots(column: Numeric, value: Expr, first: int, last: int) -> Expr:
    """The quantile transform of a value between two knots: the pair of neighbours is searched by halves."""
    low, high = column.places[first], column.places[last]
    if last - first > 1:
        middle = (first + last) // 2
        below = exp.LT(this=value.copy(), expression=_double(column.places[middle]))
        parts = _between_knots(column, value, first, middle), _between_knots(column, value, middle, last)
        return exp.case().when(below, parts[0], copy=False).else_(parts[1], copy=False)
    above = exp.paren(exp.Sub(this=value.copy(), expression=_double(low)), copy=False)
    place = exp.Add(this=_double(first), expression=exp.Div(this=above, expression=_double(high - low)))
    return exp.Div(this=exp.paren(place, copy=False), expression=_double(len(column.places) - 1))


def _whole(column: Column, value: Expr) -> Expr:
    """The number itself, clamped; a number that is not whole is none."""
    fraction = exp.NEQ(this=value, expression=exp.Floor(this=value.copy()))
    last = column.regular - 1
    return exp.case().when(fraction, _double(column.empty_code)).else_(_clamp(value.copy(), 0, last))


def _code(column: Column, value: Expr, found: Expr | None) -> Expr:
    """The code of a value; for categories, of the code `found` in their list."""
    if isinstance(column, Categorical):
        unseen = exp.Literal.number(column.unseen_code)
        code = exp.Coalesce(this=found, expressions=[unseen]) if found else unseen
    else:
        code = _whole(column, value) if column.grid is None else _bin(column.grid, value)
    empty = exp.Literal.number(column.empty_code)
    return exp.case().when(value.copy().is_(exp.Null()), empty, copy=False).else_(code, copy=False)


def _search(keys: Mapping[Any, int], value: Expr) -> Expr | None:
    """The code of a value in a list that is searched in place."""
    if not keys:
        return None
    lists = [_literal(key) for key in keys], [exp.Literal.number(code) for code in keys.values()]
    found = exp.Map(keys=exp.Array(expressions=lists[0]), values=exp.Array(expressions=lists[1]))
    return _call("MAP_EXTRACT_VALUE", found, value.copy())


def _values(keys: Mapping[Any, int], alias: str) -> Expr:
    """A list of keys and codes, to be joined with."""
    rows = [exp.Tuple(expressions=[_literal(key), exp.Literal.number(code)]) for key, code in keys.items()]
    columns = [exp.to_identifier("key"), exp.to_identifier("code")]
    return exp.Values(expressions=rows, alias=exp.TableAlias(this=exp.to_identifier(alias), columns=columns))


def _literal(key: str | float) -> Expr:
    return _double(key) if isinstance(key, float) else exp.Literal.string(key)


def _clamp(value: Expr, lower: float, upper: float) -> Expr:
    raised = exp.Greatest(this=value.copy(), expressions=[_double(lower)])
    return exp.Least(this=raised, expressions=[_double(upper)])


def _trim(text: Expr) -> Expr:
    return exp.Trim(this=text, expression=exp.Literal.string(WHITESPACE))


def _double(number: float) -> Expr:
    """A double written as text, which engines round correctly; a decimal literal may be rounded twice."""
    return exp.cast(exp.Literal.string(repr(float(number))), exp.DType.DOUBLE)


def _call(name: str, *arguments: Expr | str) -> Expr:
    plain = [exp.Literal.string(each) if isinstance(each, str) else each for each in arguments]
    return exp.Anonymous(this=name, expressions=plain)


def _is_double(number: float) -> bool:
    try:
        return float(number) == number
    except OverflowError:
        return False


def _code_type(size: int, dialect: str) -> exp.DType:
    """The smallest type that holds codes below `size`; few engines have unsigned ones."""
    if dialect != "duckdb" or size > 1 << 16:
        return exp.DType.INT
    return exp.DType.UTINYINT if size <= 1 << 8 else exp.DType.USMALLINT
