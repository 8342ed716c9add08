"""Drafts of dates and timestamps."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pyarrow.parquet as pq

from anamorph.columns import Datetime
from anamorph.drafting import draft
from anamorph.schema import Schema, parse


def columns(path, **options):
    return parse(draft(str(path), **options)[0], "here")["columns"]


def test_stored_moments_are_drafted_as_such(tmp_path):
    days = [datetime.date(2020, 2, 28), datetime.date(2020, 3, 2), None]
    moments = [datetime.datetime(2020, 1, 1, 0, 0, 0, 500_000), None, datetime.datetime(2021, 1, 1)]
    table = pa.table({"day": days, "moment": moments, "same": [days[0]] * 3})
    pq.write_table(table, tmp_path / "data.parquet")
    empty = columns(tmp_path / "data.parquet")
    assert {spec["type"] for spec in empty.values()} == {"datetime"}
    assert [spec["lower"] for spec in empty.values()] == [None] * 3
    assert [spec.get("date") for spec in empty.values()] == [True, None, True]
    filled = columns(tmp_path / "data.parquet", from_data=True)
    assert {spec["source"] for spec in filled.values()} == {"data"}
    schema = Schema.from_dict({"columns": filled})
    day, moment, same = schema.columns
    assert day == Datetime(
        name="day", lower="2020-02-28", upper="2020-03-02", bins=4, date=True, missing=True, source="data"
    )
    assert (moment.lower, moment.upper, moment.bins) == ("2020-01-01T00:00:00", "2021-01-01T00:00:00", 32)
    assert same.kind == "categorical"


def test_dates_of_text_are_found_when_values_are_read(tmp_path):
    (tmp_path / "data.csv").write_text("day,moment\n2020-02-28,2020-02-28 10:00:00\n2020-03-02,2020-02-29 10:00:00\n")
    assert {spec["type"] for spec in columns(tmp_path / "data.csv").values()} == {"categorical"}
    filled = columns(tmp_path / "data.csv", from_data=True)
    assert {spec["type"] for spec in filled.values()} == {"datetime"}
    assert Schema.from_dict({"columns": filled}).sizes == (4, 32)
