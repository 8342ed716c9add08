"""Values that do not fit go where the schema says: no row is dropped, none raises, none is spoken of.

`evaluate` counts the data exactly. Against a release that answers 0 to everything its figures are plain: for a column
of few cells, mean_error is 1 / cells, and max_error the largest share; so it tells where each value went.
"""

from __future__ import annotations

import json

import pytest
from commands import HEADER, SECRET, explained, fit

TOWN = {"Ayr": 0, "Bonn": 1, "Cork": 2, "other": 3, "missing": 4}
AGE = {"[0, 25)": 0, "[25, 50)": 1, "[50, 75)": 2, "[75, 100)": 3, "missing": 4}

# name, column, text of the cell, an equal value that is plainly declared (so that both fall in one cell)
CASES = [
    ("unseen category", "town", SECRET, "Quito"),
    ("empty category", "town", "", '""'),
    ("spaces", "town", " Ayr ", "Ayr"),
    ("other case is another value", "town", "ayr", "Quito"),
    ("a truth value", "town", "true", "Quito"),
    ("above the range", "age", "7341", "99"),
    ("below the range", "age", "-7341", "0"),
    ("infinity", "age", "inf", "99"),
    ("negative infinity", "age", "-inf", "0"),
    ("10^30", "age", "1e30", "99"),
    ("10^400", "age", "1" + "0" * 400, "99"),
    ("minus zero", "age", "-0.0", "0"),
    ("spaces around a number", "age", " 7 ", "7"),
    ("a thousands separator", "age", '"7,341"', ""),
    ("NaN", "age", "nan", ""),
    ("a text", "age", SECRET, ""),
    ("a bin's edge", "age", "25", "26"),
    ("below a bin's edge", "age", "24.999999", "1"),
    ("the upper bound", "age", "100", "99"),
    ("a code above", "kind", "9", "2"),
    ("a code below", "kind", "-1", "0"),
    ("a code that is none", "kind", SECRET, ""),
]


def row(column, cell):
    plain = {"town": "Ayr", "age": "1", "kind": "1"} | {column: cell}
    return ",".join(plain.values()) + "\n"


@pytest.fixture
def zero(cli):
    """A release that answers 0, so that errors are the data's own shares."""
    explained_code = cli(fit("--mechanism all-zero --workload marginals:k=1 -o zero")).code
    assert explained_code == 0

    def shares(column):
        ran = cli(f"evaluate zero values.csv --schema schema.yaml --workload marginals:of={column} --json")
        assert ran.code == 0, ran.text
        assert "NOT PRIVATE" in ran.err
        return json.loads(ran.out)

    return shares


def test_where_values_go(place, zero):
    """Two rows that must share a cell have one cell of share 1; with a third elsewhere the largest is 2/3."""
    for name, column, cell, same in CASES:
        (place / "values.csv").write_text(HEADER + row(column, cell) + row(column, same))
        found = zero(column)
        assert found["max_error"] == 1.0, name
        assert found["private"] is False


def test_distinct_values_stay_distinct(place, zero):
    for column, cells in (("town", ["Ayr", "Bonn", "Cork", SECRET, ""]), ("age", ["0", "25", "50", "75", "nan"])):
        (place / "values.csv").write_text(HEADER + "".join(row(column, cell) for cell in cells))
        found = zero(column)
        assert found["max_error"] == pytest.approx(1 / 5), column
        assert found["queries"] == 5


def test_composed_and_decomposed_letters_are_one(place, cli):
    (place / "schema.yaml").write_text(
        'columns:\n  town: {type: categorical, categories: ["Orl\\u00e9ans", Ayr], other: true}\n'
        "  day: {type: categorical, categories: ['2024-02-29', '2024-03-01'], other: true}\n"
        "  yes: {type: categorical, categories: [true, false], other: true}\n"
    )
    body = "Orle\u0301ans,2024-02-29,TRUE\nOrl\u00e9ans, 2024-02-29 ,true\n"
    (place / "data.csv").write_text("town,day,yes\n" + body)
    assert cli(fit("--mechanism all-zero --workload marginals:k=3")).code == 0
    ran = cli("evaluate release data.csv --schema schema.yaml --json")
    assert json.loads(ran.out)["max_error"] == 1.0


def test_a_fit_says_nothing_of_values(place, cli):
    """The same fit of clean data and of data full of bad values says the same, but for its noise."""
    bad = "".join(row(column, cell) for _, column, cell, _ in CASES)
    good = "".join(row("town", "Ayr") for _ in CASES)
    said = []
    for index, body in enumerate((bad, good)):
        (place / "data.csv").write_text(HEADER + body)
        ran = cli(fit(f"--ledger l{index} -o r{index}"))
        assert ran.code == 0
        said.append((ran.out.replace(f"r{index}", "r").replace(f"l{index}", "l"), ran.err))
    assert said[0] == said[1]


def test_one_row(place, cli):
    (place / "data.csv").write_text(HEADER + row("town", SECRET))
    ran = cli(fit())
    assert ran.code == 0
    assert "delta" not in ran.err  # 1e-6 is below 1/1


def test_byte_order_mark_and_gzip(place, cli):
    import gzip

    content = (place / "data.csv").read_bytes()
    (place / "data.csv").write_bytes(b"\xef\xbb\xbf" + content)
    assert cli(fit("-o r1 --ledger l1")).code == 0
    (place / "data.csv").write_bytes(gzip.compress(content))  # named .csv, and read for what it is
    assert cli(fit("-o r2 --ledger l2")).code == 0


def test_header_alone_is_fine_where_rows_are_added(place, cli):
    (place / "data.csv").write_text(HEADER)
    assert cli(fit("--neighbours add-remove")).code == 0
    explained(cli(fit("-o second --ledger other")), 3, "at least one row")


def test_extra_columns_are_said_once(place, cli):
    content = (place / "data.csv").read_text().replace(",", f",{SECRET},").replace(SECRET, "note\x1b[31m", 1)
    lines = [line.split(",") for line in content.splitlines()]
    text = "\n".join(",".join([line[0], line[1], line[2], line[-1]]) for line in lines) + "\n"
    (place / "data.csv").write_text(text)
    ran = cli(fit())
    assert ran.code == 0, ran.text
    assert ran.err.count("not in the schema") == 1
    assert "'note\\x1b[31m'" in ran.err
    checked = cli("schema check schema.yaml data.csv")
    assert checked.code == 0
    assert checked.err.count("not in the schema") == 1
