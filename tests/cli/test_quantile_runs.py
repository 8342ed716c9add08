"""From a schema without knots to answers about numbers, as people do it, and what they get where it goes wrong."""

from __future__ import annotations

import json

import pytest
from commands import explained, tree

from anamorph.schema import Schema

SCHEMA = """\
dataset: people
columns:
  town: {type: categorical, categories: [Ayr, Bonn, Cork], other: true, missing: true}
  age: {type: numeric, lower: 0, upper: 100000, native: true, integer: true, transform: quantile, missing: true}
  kind: {type: codes, values: 3, missing: true}
"""
QUANTILES = "schema quantiles data.csv --schema schema.yaml --epsilon 1 --delta 1e-6 -o known.yaml"
FIT = (
    "fit data.csv --schema known.yaml --workload 'marginals:k=1; mixed:k=2,count=20' --mechanism rap++ --epsilon 5 "
    "--delta 1e-6 -o release --set rounds=1 --set steps=5 --set marginal_rounds=1 --set per_round=2 --set rows=40"
)
OPEN = "ledger open people --epsilon 20 --delta 1e-6 --schema schema.yaml"


@pytest.fixture
def draft(place):
    (place / "schema.yaml").write_text(SCHEMA)
    return place


def test_from_a_schema_without_knots_to_answers(draft, cli):
    checked = cli("schema check schema.yaml data.csv")
    assert "age: numeric, knots to come, source declared" in checked.out
    assert cli(OPEN).code == 0
    done = cli(f"{QUANTILES} --columns age --knots 9")
    assert done.code == 0, done.text
    assert "(1, 1e-06)-differentially private" in done.out
    assert done.out.endswith("schema: known.yaml\nledger: anamorph.ledger\n")
    known = Schema.load(draft / "known.yaml")
    assert known.fingerprint == Schema.load(draft / "schema.yaml").fingerprint
    knots = known.columns[1].knots
    assert (knots[0], knots[-1], known.columns[1].source) == (0, 100000, "dp")
    assert 3 <= len(knots) <= 9
    assert (draft / "known.yaml").read_text().startswith('# knots of ["age"]: (1, 1e-06)-differentially private, rho ')
    assert "age: numeric, native, source dp" in cli("schema check known.yaml").out
    planned = cli("plan known.yaml --workload mixed:k=2,count=20 --mechanism rap++ --epsilon 5 --delta 1e-6 --json")
    assert json.loads(planned.out)["queries"] > 20

    fitted = cli(FIT)
    assert fitted.code == 0, fitted.text
    account = json.loads(cli("ledger show --json").out)["accounts"][0]
    assert 0 < account["remaining"] < account["total"]
    assert cli("ledger verify --release release").code == 0
    questions = ["age < 50", "age >= 50", "age is null", "age between 10 and 50 and town = 'Ayr'"]
    answers = json.loads(cli(["query", "release", *questions, "--json"]).out)["answers"]
    fractions = [answer["fraction"] for answer in answers]
    assert sum(fractions[:3]) == pytest.approx(1, abs=1e-5)
    assert -1e-6 <= fractions[3] <= 1
    assert cli("sample release -o rows.csv --rows 50").code == 0


def test_the_demands_of_quantiles(draft, cli):
    before = tree(draft)
    fit = "fit data.csv --schema schema.yaml --workload marginals:k=1 --epsilon 1 --delta 1e-6 -o release"
    explained(cli(fit), 2, "columns 'age': knots must be declared", "anamorph schema quantiles DATA")
    explained(cli("plan schema.yaml --workload marginals:k=1 --epsilon 1 --delta 1e-6"), 2, "knots must be declared")
    explained(cli(f"{QUANTILES} --columns town"), 2, "'town' must declare `transform: quantile`")
    explained(cli(f"{QUANTILES} --columns agee"), 2, "Did you mean 'age'?")
    explained(cli(f"{QUANTILES} --knots 2"), 2, "knots (2) must be a whole number from 3")
    explained(cli(f"{QUANTILES} --neighbours both"), 2, "neighbours ('both') must be")
    explained(cli(QUANTILES.replace("--epsilon 1", "--epsilon 0")), 2, "epsilon")
    explained(cli(QUANTILES.replace("known.yaml", "schema.yaml")), 2, "must not exist yet")
    explained(cli(QUANTILES.replace("known.yaml", "none/known.yaml")), 5, "cannot be written")
    explained(cli(QUANTILES.replace("data.csv", "none.csv")), 2, "must be a file that exists")
    assert tree(draft) == before


def test_a_budget_that_is_spent_is_refused(draft, cli):
    assert cli(f"{QUANTILES} --columns age --knots 4").code == 0
    text = (draft / "known.yaml").read_text()
    explained(cli(f"{QUANTILES} --overwrite"), 4, "0.0 of", "anamorph ledger open people")
    assert (draft / "known.yaml").read_text() == text


def test_columns_without_a_value_have_knots_too(draft, cli):
    (draft / "data.csv").write_text("town,age,kind\n" + "Ayr,,1\n" * 20)
    assert cli(f"{QUANTILES} --neighbours add-remove").code == 0
    assert Schema.load(draft / "known.yaml").columns[1].knots[0] == 0
