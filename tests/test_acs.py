"""The ACS tasks, on a small file in the format of a PUMS person file, made here."""

from __future__ import annotations

import io
import itertools
import sys
import types

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import csv

from anamorph import datasets_acs
from anamorph.datasets_acs import CODES, COMPLETE, RANGES, TASKS, acs, acs_schema, acs_table
from anamorph.errors import DataError, ParameterError, ResourceError
from anamorph.schema import Schema
from anamorph.sources import encode

ROWS = 400
PAPER = {
    "income": (9, 9),
    "employment": (18, 10),
    "coverage": (19, 10),
    "travel": (13, 9),
    "mobility": (20, 10),
    "multitask": (25, 8),
}
"""Categorical columns, the targets among them, and numeric ones: table 1 of the paper, and table 4."""


def person_file():
    """The text of a person file: codes with leading zeros, empty cells, and columns that no task uses."""
    random = np.random.default_rng(0)
    columns = {"RT": ["P"] * ROWS, "SERIALNO": [f"2018GQ{i:07d}" for i in range(ROWS)], "OCCP": ["0440"] * ROWS}
    for name, codes in (CODES | {"PUBCOV": (1, 2)}).items():
        width = len(str(max(codes)))
        columns[name] = [f"{code:0{width}d}" for code in random.choice(codes, ROWS)]
    for name, (lower, upper) in RANGES.items():
        columns[name] = [str(number) for number in random.integers(lower, upper + 1, ROWS)]
    columns["PINCP"] = [str(number) for number in random.integers(-15_000, 120_000, ROWS)]
    for name in (*CODES, *RANGES):
        if name not in COMPLETE:
            columns[name] = ["" if random.random() < 0.1 else cell for cell in columns[name]]
    lines = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
    return "\n".join(lines) + "\n"


TEXT = person_file()
FRAME = pd.read_csv(io.StringIO(TEXT), dtype={"RT": str, "SERIALNO": str, "PINCP": np.float64})
"""As folktables reads it."""


@pytest.mark.parametrize("task", TASKS)
def test_columns_are_as_many_as_in_the_paper(task):
    kinds = [column.kind for column in acs_schema(task).columns]
    assert (kinds.count("categorical"), kinds.count("numeric")) == PAPER[task]
    assert all(column.source == "public" for column in acs_schema(task).columns)


@pytest.mark.parametrize("bins", [32, None])
@pytest.mark.parametrize("task", TASKS)
def test_a_table_has_the_columns_of_its_schema_and_fits_it(task, bins):
    table, schema = acs_table(FRAME, task), acs_schema(task, bins=bins)
    assert tuple(table.column_names) == schema.names
    codes = encode(table, schema).codes
    for column, values, code in zip(schema.columns, table.columns, codes.T, strict=True):
        empty = np.array([value is None for value in values.to_pylist()])
        assert not (empty.any() and not column.missing)
        if column.missing:
            np.testing.assert_array_equal(code == column.size - 1, empty)
        if column.kind == "categorical":
            texts = [column.categories[i] for i in code[~empty]]
            assert texts == [value for value in values.to_pylist() if value is not None]
        else:
            known = [value for value in values.to_pylist() if value is not None]
            assert min(known) >= column.lower
            assert max(known) <= column.upper


def test_every_kind_of_frame_gives_the_same_table():
    texts = pa.table({name: [str(cell).strip() for cell in cells] for name, cells in text_columns().items()})
    blank = pd.read_csv(io.StringIO(TEXT.replace(",,", ", ,")), dtype=str).replace(" ", "")
    expected = acs_table(FRAME, "multitask")
    for frame in (csv.read_csv(io.BytesIO(TEXT.encode())), pl.read_csv(io.StringIO(TEXT)), texts, blank):
        assert acs_table(frame, "multitask").equals(expected)


def text_columns():
    header, *lines = (line.split(",") for line in TEXT.splitlines())
    return dict(zip(header, zip(*lines, strict=True), strict=True))


@pytest.mark.parametrize(
    ("task", "rule"),
    [
        ("income", "AGEP > 16 and PINCP > 100 and WKHP > 0 and PWGTP >= 1"),
        ("employment", "AGEP >= 0"),
        ("coverage", "AGEP < 65 and PINCP <= 30000"),
        ("travel", "AGEP > 16 and PWGTP >= 1 and ESR == 1"),
        ("mobility", "18 < AGEP < 35"),
        ("multitask", "AGEP >= 0"),
    ],
)
def test_who_is_in_a_task(task, rule):
    kept = FRAME.query(rule)
    table = acs_table(FRAME, task)
    assert 0 < table.num_rows == len(kept)
    np.testing.assert_array_equal(table["AGEP"].to_numpy(), kept["AGEP"])
    lower, upper = TASKS[task].ranges.get("AGEP", (0, 99))
    assert lower <= kept["AGEP"].min() <= kept["AGEP"].max() <= upper


def test_targets_are_what_folktables_says():
    found = acs_table(FRAME, "multitask").to_pandas()
    truths = {
        "income_over_50000": FRAME["PINCP"] > 50_000,
        "employed": FRAME["ESR"] == 1,
        "public_coverage": FRAME["PUBCOV"] == 1,
        "commute_over_20": FRAME["JWMNP"] > 20,
        "same_home": FRAME["MIG"] == 1,
    }
    for name, truth in truths.items():
        np.testing.assert_array_equal(found[name] == "yes", truth)
        assert set(found[name]) == {"no", "yes"}
    for task, label in datasets_acs.LABELS.items():
        table = acs_table(FRAME, task)
        assert table.column_names[-1] == label.name
        assert label.column not in table.column_names


def test_a_schema_survives_its_file(tmp_path):
    for task, bins in itertools.product(TASKS, (10, None)):
        schema = acs_schema(task, bins=bins)
        assert all(column.native == (bins is None) for column in schema.columns if column.kind == "numeric")
        (tmp_path / "acs.yaml").write_text(schema.to_yaml())
        assert Schema.load(tmp_path / "acs.yaml") == schema


@pytest.mark.parametrize("cells", [["x"] * ROWS, ["1.5"] * ROWS, [1.5] * ROWS, [float("inf")] * ROWS])
def test_cells_that_are_no_codes_are_refused(cells):
    with pytest.raises(DataError, match="'COW' of the person file must hold whole numbers or nothing"):
        acs_table(FRAME.assign(COW=cells), "income")


def test_a_file_of_later_years_is_refused():
    with pytest.raises(DataError, match="column 'RELP' must be in the person file"):
        acs_table(FRAME.rename(columns={"RELP": "RELSHIPP"}), "income")
    with pytest.raises(ParameterError, match=r"year \(2019\) must be from 2014 to 2018"):
        acs("income", "NY", 2019)


def test_tasks_are_known():
    with pytest.raises(ParameterError, match="Did you mean 'income'"):
        acs_table(FRAME, "incom")


def folktables(monkeypatch, get_data):
    """Puts a package in the place of folktables; returns what it was asked for."""
    asked = {}

    class Source:
        def __init__(self, **options):
            asked.update(options)

        def get_data(self, **options):
            asked.update(options)
            return get_data()

    monkeypatch.setitem(sys.modules, "folktables", types.SimpleNamespace(ACSDataSource=Source))
    return asked


def test_rows_come_through_folktables(monkeypatch):
    asked = folktables(monkeypatch, lambda: FRAME)
    table, schema = acs("travel", "NY", 2014, directory="here")
    assert asked == {
        "survey_year": "2014",
        "horizon": "1-Year",
        "survey": "person",
        "root_dir": "here",
        "states": ["NY"],
        "download": True,
    }
    assert table.equals(acs_table(FRAME, "travel"))
    assert schema.columns == acs_schema("travel").columns
    assert schema.dataset == "acs_NY_travel_2014"


def test_what_folktables_cannot_give_is_said(monkeypatch):
    def fails(error):
        def get_data():
            raise error

        return get_data

    folktables(monkeypatch, fails(AssertionError()))
    with pytest.raises(ParameterError, match=r"state \('New York'\) must be the two letters of a state"):
        acs("income", "New York")
    folktables(monkeypatch, fails(FileNotFoundError()))
    with pytest.raises(ResourceError, match="person file of NY, 2018, must be there"):
        acs("income", "NY")
    monkeypatch.setitem(sys.modules, "folktables", None)
    with pytest.raises(ResourceError, match=r"pip install 'anamorph\[acs\]'"):
        acs("income", "NY")
