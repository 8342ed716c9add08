"""Numbers kept as numbers, as people run them: dates, moments, money, whole numbers and empty cells."""

from __future__ import annotations

import csv
import datetime
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import explained

from anamorph.cli import invoke

SCHEMA = """\
dataset: mixed
columns:
  town: {type: categorical, categories: [Ayr, Bonn, Cork], source: declared}
  joined: {type: datetime, lower: 2000-01-01, upper: 2024-12-31, date: true, missing: true, source: public}
  seen: {type: datetime, lower: 2020-01-01, upper: 2023-12-31T23:59:59, missing: true, source: public}
  money: {type: numeric, lower: 0, upper: 1000000, native: true, transform: log, missing: true, source: declared}
  children: {type: numeric, lower: 0, upper: 12, integer: true, native: true, source: public}
  debt: {type: numeric, lower: -9000, upper: 9000, integer: true, native: true, transform: signed-log, source: declared}
  vote: {type: categorical, categories: ["no", "yes"], source: public}
"""
WORKLOAD = "marginals:k=2; mixed:k=2,count=40,seed=0; halfspaces:count=40,target=vote,seed=0"
SMALL = {
    "rap++": "--set rounds=2 --set per_round=4 --set steps=5 --set levels=3 --set rows=50",
    "auto": "--set rows=50 --set effort=4",
}
"""The mechanisms, with settings that make them quick."""
ASKED = f"--schema schema.yaml --workload '{WORKLOAD}'"
ROWS = 700


def write_data(path):
    """Rows with empty cells, a heavy tail, and some numbers out of range."""
    made = random.Random(7)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["town", "joined", "seen", "money", "children", "debt", "vote"])
        for _ in range(ROWS):
            day = datetime.date(2000, 1, 1) + datetime.timedelta(days=made.randrange(9500))
            moment = datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=made.randrange(4 * 365 * 86_400))
            cells = [made.choice(["Ayr", "Bonn", "Cork"]), day.isoformat(), f"{moment:%Y-%m-%d %H:%M:%S}"]
            cells += [f"{made.lognormvariate(8, 3):.2f}", made.randrange(14), round(made.gauss(0, 4000))]
            empty = [made.random() < share for share in (0, 0.2, 0.1, 0.3, 0, 0)]
            vote = "yes" if cells[4] < 5 else "no"
            lines.writerow([*("" if none else cell for cell, none in zip(cells, empty, strict=True)), vote])


@pytest.fixture(scope="module", params=SMALL)
def how(request):
    """The options that name a mechanism, and its settings."""
    return f"--mechanism {request.param} {SMALL[request.param]}"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, how):
    """A directory with the data and a release of it."""
    place = tmp_path_factory.mktemp("mixed")
    (place / "schema.yaml").write_text(SCHEMA)
    write_data(place / "data.csv")
    options = ["--schema", str(place / "schema.yaml"), "--workload", WORKLOAD, *how.split()]
    budget = ["--epsilon", "5", "--delta", "1e-6", "--ledger", str(place / "ledger")]
    assert not invoke(["fit", str(place / "data.csv"), *options, *budget, "-o", str(place / "release")])
    return place


@pytest.fixture
def mixed(fitted, cli, monkeypatch):
    """Runs a command in that directory."""
    monkeypatch.chdir(fitted)
    return cli


def test_a_plan_says_what_the_fit_spends(mixed, fitted, how):
    ran = mixed(f"plan schema.yaml --workload '{WORKLOAD}' {how} --epsilon 5 --delta 1e-6 --json")
    assert ran.code == 0
    figures = json.loads(ran.out)
    assert figures["seconds_estimate"] < 60
    told = json.loads((fitted / "release" / "release.json").read_text())
    spends = told["privacy"]["spends"]
    assert [step["kind"] for step in figures["steps"]] == [spend["kind"] for spend in spends]
    assert [step["rho"] for step in figures["steps"]] == pytest.approx([spend["rho"] for spend in spends])


def test_rows_are_of_the_original_schema(mixed, fitted):
    """Days are days, whole numbers whole, all within bounds; and the file is read again as it is."""
    assert mixed("sample release --rows 400 -o rows.csv --overwrite").code == 0
    with (fitted / "rows.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["town", "joined", "seen", "money", "children", "debt", "vote"]
    assert len(rows) == 400
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    filled = {name: [cell for cell in cells if cell] for name, cells in columns.items()}
    for name in ("joined", "seen", "money"):
        assert 0 < len(filled[name]) < 400, "some are missing, and some are not"
    for name in ("town", "children", "debt", "vote"):
        assert len(filled[name]) == 400
    days = [datetime.date.fromisoformat(cell) for cell in filled["joined"]]
    assert datetime.date(2000, 1, 1) <= min(days) <= max(days) <= datetime.date(2024, 12, 31)
    moments = [datetime.datetime.fromisoformat(cell) for cell in filled["seen"]]
    assert datetime.datetime(2020, 1, 1) <= min(moments) <= max(moments) <= datetime.datetime(2023, 12, 31, 23, 59, 59)
    assert all(0 <= float(cell) <= 10**6 for cell in filled["money"])
    assert len(set(filled["money"])) > 100
    assert {int(cell) for cell in filled["children"]} <= set(range(13))
    assert all(-9000 <= int(cell) <= 9000 for cell in filled["debt"])
    assert set(filled["town"]) <= {"Ayr", "Bonn", "Cork"}
    assert mixed("schema check schema.yaml rows.csv").code == 0


def test_parquet_has_the_types_of_the_schema(mixed, fitted):
    assert mixed("sample release --rows 30 -o rows.parquet --overwrite").code == 0
    kinds = {field.name: field.type for field in pq.read_schema(fitted / "rows.parquet")}
    assert (kinds["joined"], kinds["money"], kinds["children"]) == (pa.date32(), pa.float64(), pa.int64())
    assert pa.types.is_timestamp(kinds["seen"])


def test_the_errors_of_the_rows_are_those_of_the_model(mixed):
    """Rows are drawn from the model: their errors on tests are its errors, but for the drawing."""
    ran = mixed(f"evaluate release data.csv {ASKED} --json")
    assert ran.code == 0
    assert "NOT PRIVATE" in ran.err
    found = json.loads(ran.out)
    assert found["blocks"] == 1 + 40 + 40
    assert sum(part["queries"] for part in found["parts"]) == found["queries"]
    assert 0 < found["mean_error"] <= found["max_error"] <= 1
    assert found["rows"]["mean_error"] == pytest.approx(found["mean_error"], abs=0.02)


def test_answers_of_tests_are_listed(mixed, fitted):
    ran = mixed(f"query release --workload '{WORKLOAD}' -o answers.csv --overwrite")
    assert ran.code == 0
    with (fitted / "answers.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert {answer["columns"] for answer in answers} >= {
        "town x vote",
        "vote x joined + seen + money + children + debt",
    }
    days = [answer for answer in answers if answer["columns"] == "vote x joined"]
    assert days
    assert all("<= 20" in answer["values"] for answer in days)
    for answer in answers:
        assert 0 <= float(answer["fraction"]) <= 1.0001
        assert float(answer["count"]) == pytest.approx(float(answer["fraction"]) * ROWS)


def test_answers_of_bands_are_listed_and_scored(mixed, fitted):
    """Of a release that was not made for them: rows keep their numbers."""
    spec = "bands:k=2,bands=4,target=vote"
    assert mixed(f"query release --workload {spec} -o bands.csv --overwrite").code == 0
    with (fitted / "bands.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert {answer["columns"] for answer in answers} == {
        f"{name} x vote" for name in ("town", "joined", "seen", "money", "children", "debt")
    }
    days = [answer["values"] for answer in answers if answer["columns"] == "joined x vote"]
    assert days[::2] == [
        "2000-01-01 <= joined < 2006-04-02 x no",
        "2006-04-02 <= joined < 2012-07-02 x no",
        "2012-07-02 <= joined < 2018-10-02 x no",
        "2018-10-02 <= joined <= 2024-12-31 x no",
        "(missing) x no",
    ]
    for name in ("town", "joined", "money", "children"):
        whole = [float(answer["fraction"]) for answer in answers if answer["columns"] == f"{name} x vote"]
        assert sum(whole) == pytest.approx(1, abs=1e-4)
    ran = mixed(f"evaluate release data.csv --schema schema.yaml --workload {spec} --json")
    found = json.loads(ran.out)
    assert (found["queries"], found["blocks"]) == (len(answers), 6)
    assert 0 < found["mean_error"] <= found["max_error"] < 1
    assert found["mean_error"] * found["queries"] == pytest.approx(2 * found["tv"] * found["blocks"])


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("bands:k=8", "k (8) must be from 1 to 7, the number of columns"),
        ("bands:k=2,bands=1", "bands (1) must be at least 2"),
        ("bands:k=2,target=monney", "column ('monney') must be in the schema. Did you mean 'money'?"),
        ("mixed:k=8,count=3", "k (8) must be from 1 to 7, the number of columns"),
        ("mixed:k=2,count=3,target=monney", "column ('monney') must be in the schema. Did you mean 'money'?"),
        ("mixed:k=2,count=3,target=money", "target ('money') must have categories"),
        ("halfspaces:count=3", "halfspaces must have a target"),
        ("marginals:of=money+vote", "column ('money') must not be native"),
    ],
)
def test_requests_that_cannot_be(mixed, how, workload, words):
    for command in (f"plan schema.yaml --epsilon 1 --delta 1e-6 {how}", "query release -o none.csv"):
        explained(mixed(f"{command} --workload {workload}"), 2, words)


def test_other_mechanisms_say_which_columns_they_cannot_have(mixed):
    ran = mixed("plan schema.yaml --workload marginals:k=2 --mechanism rap --epsilon 1 --delta 1e-6")
    explained(ran, 2, "'joined', 'seen', 'money', 'children', 'debt' must have bins for rap", "or take auto")
