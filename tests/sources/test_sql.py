"""The SQL writer: what it sends, in which dialects, and that it says what numpy says."""

from __future__ import annotations

import pytest
import sqlglot
from sqlglot import exp

from anamorph.columns import Categorical, Codes, Numeric
from anamorph.schema import Schema
from anamorph.sources import sql
from anamorph.sources.sql import Stored, check_sets, count_statement, encode_statement, group_statement, lookup

SCHEMA = Schema(
    (
        Categorical(name='a"b', categories=["it's", "back\\slash", 7], missing=True),
        Numeric(name="x", lower=0.1, upper=0.3, bins=3),
        Codes(name="n", values=300),
    )
)


def statement(dialect="duckdb", stored=Stored.TEXT):
    table = exp.table_('t"; DROP TABLE x; --', quoted=True)
    return encode_statement(SCHEMA, table, stored=[stored] * 3, names=SCHEMA.names, dialect=dialect)


@pytest.mark.parametrize("dialect", ["duckdb", "postgres", "spark"])
@pytest.mark.parametrize("stored", [each for each in Stored if each is not Stored.MOMENT])
def test_one_select_in_every_dialect(dialect, stored):
    (parsed,) = sqlglot.parse(statement(dialect, stored), dialect=dialect)
    assert isinstance(parsed, exp.Select)
    assert [column.alias for column in parsed.selects] == ["f0", "f1", "f2"]
    (table,) = parsed.find_all(exp.Table)
    assert table.name == 't"; DROP TABLE x; --'


def test_literals_are_doubles_by_text():
    assert "CAST('0.1' AS DOUBLE)" in statement()
    assert "'it''s'" in statement()
    assert "'back\\slash'" in statement()


def test_codes_are_small():
    assert [text in statement() for text in ("AS UTINYINT) AS f0", "AS UTINYINT) AS f1", "AS USMALLINT) AS f2")] == [
        True
    ] * 3


def test_lookups():
    column = Categorical(name="x", categories=["red", 7, 2.5, True, "08", 10**400, 2**53 + 1])
    assert lookup(column, Stored.WHOLE) == {"7": 1, "8": 4, str(10**400): 5, str(2**53 + 1): 6}
    assert lookup(column, Stored.REAL) == {7.0: 1, 2.5: 2, 8.0: 4}
    assert lookup(column, Stored.TRUTH) == {"true": 3}
    assert lookup(column, Stored.TEXT)["7.0"] == 1


@pytest.mark.parametrize("dialect", ["duckdb", "postgres", "spark"])
@pytest.mark.parametrize("few", [0, 1, 4])
def test_counting_by_ranks_is_plain_sql(dialect, few, monkeypatch):
    """Ranks among few cuts are searched by halves, those among many come by a join."""
    monkeypatch.setattr(sql, "FEW_CUTS", few)
    text = group_statement((0, 2), {1: [-1, 2, 4], 3: [7]}, (3, 9, 300, 8))
    (parsed,) = sqlglot.parse(text, dialect=dialect)
    assert isinstance(parsed, exp.Select)
    assert [column.alias for column in parsed.selects] == ["cell", "number"]
    assert {table.name for table in parsed.find_all(exp.Table)} == {"encoded"}
    assert not list(parsed.find_all(exp.Anonymous))
    first = "r1.place" if few < 3 else "CASE WHEN f1 <= 2 THEN CASE WHEN f1 <= -1 THEN 0 ELSE 1 END ELSE 2 END"
    assert f"(((CAST(f0 AS BIGINT)) * 300 + f2) * 3 + {first}) * 1 + {'0' if few else 'r3.place'} AS cell" in text
    assert ("(VALUES (0), (3), (5)) AS cuts(code)" in text) is (few < 3)
    assert ("f1 <= 4 AND f3 <= 7" in text, "WHERE f3 <= 7 GROUP" in text) == (few == 4, few == 1)


def test_counting_is_plain_sql():
    text = count_statement([(0, 2), ()], SCHEMA.sizes)
    assert text.count("UNION ALL") == 1
    assert "(CAST(f0 AS BIGINT)) * 300 + f2" in text
    assert "x" not in text
    for dialect in ("duckdb", "postgres", "spark"):
        assert sqlglot.parse_one(text, dialect=dialect)


def test_sizes_of_marginals():
    assert check_sets([(), (0,), (2, 0)], SCHEMA) == [1, 4, 1200]
