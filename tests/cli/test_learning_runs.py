"""`evaluate --ml` and `split` as people run them."""

from __future__ import annotations

import json

import pytest
from commands import explained, fit

INDEPENDENT = "--mechanism independent"


@pytest.fixture
def fitted(cli, place):
    """A release of the training rows; the test rows are in test.csv."""
    cli("split data.csv --schema schema.yaml --train train.csv --test test.csv")
    assert cli(fit(INDEPENDENT, data="train.csv")).code == 0
    return cli


def test_an_honest_experiment(fitted, place):
    ran = fitted(
        "evaluate release train.csv --schema schema.yaml --test test.csv --ml target=town --ml target=kind --json"
    )
    assert ran.code == 0
    assert "NOT PRIVATE" in ran.err
    found = json.loads(ran.out)
    assert found["private"] is False
    assert found["test_rows_in_fit"] is False
    assert found["train_rows"] + found["test_rows"] == 1237
    assert [item["target"] for item in found["ml"]] == ["town", "kind"]
    for item in found["ml"]:
        assert 0 <= item["f1"] <= item["accuracy"] + 0.5
        assert item["ratio"] == pytest.approx(item["f1"] / item["f1_real"])
    assert "max_error" not in found


def test_without_test_rows_the_output_says_so(fitted):
    ran = fitted("evaluate release data.csv --schema schema.yaml --ml target=town:Ayr+Bonn --learner boosting")
    assert ran.code == 0
    assert "part of the fit" in ran.out
    assert "target town:Ayr+Bonn, classes 2, f1 " in ran.out


def test_a_workload_may_be_scored_beside(fitted):
    ran = fitted("evaluate release data.csv --schema schema.yaml --ml target=town --workload marginals:k=1 --json")
    assert {"max_error", "ml", "workload", "private"} <= set(json.loads(ran.out))


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--ml town", 2, "--ml ('town') must be target=COLUMN"),
        ("--ml target=twn", 2, "Did you mean 'town'?"),
        ("--ml target=age", 2, "must be categorical, ordinal or codes"),
        ("--ml target=town --learner trees", 2, "learner ('trees') must be logistic or boosting"),
        ("--ml target=town --test none.csv", 2, "must be a file that exists"),
        ("--ml target=town --test empty.csv", 3, "the test rows must hold 'town'"),
        ("--test test.csv", 2, "--test must come with --ml"),
    ],
)
def test_requests_that_cannot_be(fitted, place, options, code, words):
    (place / "empty.csv").write_text("town,age,kind\n")
    explained(fitted(f"evaluate release train.csv --schema schema.yaml {options}"), code, words)


def test_a_release_without_rows_trains_nothing(cli):
    cli(fit())
    explained(cli("evaluate release data.csv --schema schema.yaml --ml target=town"), 2, "rows")


def test_split_says_what_it_wrote(cli, place):
    ran = cli("split data.csv --schema schema.yaml --train a.parquet --test b.csv --fraction 0.5 --seed 3")
    assert ran.code == 0
    assert "NOT PRIVATE" in ran.err
    assert ran.out.split() == ["train:", "a.parquet", "test:", "b.csv"]
    assert (place / "b.csv").read_text().count("\n") in (619, 620)
    explained(cli("split data.csv --schema schema.yaml --train a.parquet --test b.csv"), 2, "--overwrite")
    explained(cli("split data.csv --schema schema.yaml --train c.csv --test d.csv --fraction 2"), 2, "fraction (2.0)")
