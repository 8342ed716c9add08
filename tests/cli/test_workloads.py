"""Every query class on the command line: planned, fitted, evaluated and answered, from specs, modules and files."""

from __future__ import annotations

import csv
import json
import sys

import pytest
from commands import explained, fit

SMALL = "--mechanism rap --set steps=20 --set rows=50"
RAP = f"{SMALL} --set rounds=2 --set per_round=4"
BLOCKS = f"{SMALL} --set rounds=2 --set per_round=1 --set blocks=true"
AT_ONCE = f"{SMALL} --set rounds=1"
MODULE = """\
import jax.numpy as jnp


def either(row):
    return 1 - jnp.einsum("i,j->ij", 1 - row["town"], 1 - row["kind"])
"""
MIXED = """\
workload:
  - marginals:k=2
  - thresholds:k=3,r=2,weight=2.5
  - custom:cli_queries:either,weight=1/2
"""
CUSTOM = "custom:cli_queries:either"


@pytest.fixture
def queries(place):
    """A module of the user's own, in the working directory."""
    (place / "cli_queries.py").write_text(MODULE)
    (place / "mixed.yaml").write_text(MIXED)
    yield place
    sys.modules.pop("cli_queries", None)


def answers(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figures(ran):
    assert ran.code == 0, ran.text
    return json.loads(ran.out)


@pytest.mark.parametrize("mechanism", [RAP, BLOCKS, AT_ONCE, "--mechanism gaussian"])
def test_thresholds_from_plan_to_answers(place, cli, mechanism):
    spec = "--workload thresholds:k=2,r=1"
    asked = f"plan schema.yaml {spec} --epsilon 1 --delta 1e-6 {mechanism} --json --memory"
    planned = figures(cli(f"{asked} 2GB"))
    assert (planned["queries"], planned["blocks"], planned["largest_block"]) == (25 + 20 + 20, 3, 25)
    assert planned["memory_bytes"] + planned["engine_bytes"] <= 2 * 10**9
    assert planned["engine_bytes"] == 5 * 10**8
    assert planned["piece_queries"] == 1 << 22
    assert cli(fit(f"{mechanism} {spec} --memory 2GB")).code == 0
    evaluated = figures(cli("evaluate release data.csv --schema schema.yaml --json"))
    assert evaluated["queries"] == 65
    assert 0 < evaluated["mean_error"] <= evaluated["max_error"] <= 1
    assert "parts" not in evaluated
    assert cli(f"query release {spec} -o answers.csv").code == 0
    found = answers(place / "answers.csv")
    assert [row["columns"] for row in found] == (
        ["at least 1 of town x age"] * 25 + ["at least 1 of town x kind"] * 20 + ["at least 1 of age x kind"] * 20
    )
    assert found[0]["values"] == "Ayr x [0, 25)"
    assert cli("ledger verify --release release").code == 0


def test_a_function_of_a_module_in_the_working_directory(queries, program, cli):
    """The program finds it, as Python itself would; a release names it, and never imports it."""
    assert (
        figures(program(f"plan schema.yaml --workload {CUSTOM} --epsilon 1 --delta 1e-6 {RAP} --json"))["queries"] == 20
    )
    fitted = program(fit(f"{RAP} --workload {CUSTOM}"))
    assert fitted.code == 0, fitted.text
    evaluated = figures(cli(f"evaluate release data.csv --schema schema.yaml --workload {CUSTOM} --json"))
    assert evaluated["queries"] == 20
    assert 0 <= evaluated["mean_error"] <= evaluated["max_error"] <= 1
    assert cli(f"query release --workload {CUSTOM};thresholds:of=town+kind,r=1 -o answers.csv".split()).code == 0
    found = answers(queries / "answers.csv")
    assert [row["columns"] for row in found] == ["cli_queries:either"] * 20 + ["at least 1 of town x kind"] * 20
    own, ours = ([float(row["fraction"]) for row in found[at : at + 20]] for at in (0, 20))
    assert own == pytest.approx(ours, abs=1e-5)  # the function says the same as the threshold
    (queries / "cli_queries.py").unlink()
    sys.modules.pop("cli_queries")
    assert cli("query release 'age < 30'").code == 0
    assert cli("sample release -o rows.csv --rows 5").code == 0
    assert cli("ledger verify --release release").code == 0
    explained(cli(f"query release --workload {CUSTOM} -o more.csv"), 2, "'cli_queries'", "that Python can import")


@pytest.mark.parametrize("mechanism", [RAP, AT_ONCE], ids=["adaptive", "at once"])
def test_a_mixed_workload_with_weights_from_a_file(queries, cli, mechanism):
    planned = figures(cli(f"plan schema.yaml --workload mixed.yaml --epsilon 1 --delta 1e-6 {mechanism} --json"))
    assert (planned["queries"], planned["blocks"]) == (65 + 100 + 20, 3 + 1 + 1)
    assert cli(fit(f"{mechanism} --workload mixed.yaml --neighbours add-remove")).code == 0
    evaluated = figures(cli("evaluate release data.csv --schema schema.yaml --workload mixed.yaml --json"))
    parts = evaluated["parts"]
    assert [part["workload"] for part in parts] == [
        "marginals:k=2",
        "thresholds:k=3,r=2,weight=2.5",
        "custom:cli_queries:either,weight=1/2",
    ]
    assert [part["queries"] for part in parts] == [65, 100, 20]
    assert evaluated["max_error"] == max(part["max_error"] for part in parts)
    said = cli("evaluate release data.csv --schema schema.yaml --workload mixed.yaml")
    assert "  workload thresholds:k=3,r=2,weight=2.5, queries 100, max_error" in said.out
    assert cli("query release --workload mixed.yaml -o answers.parquet").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mechanism gaussian", "take auto for functions"),
        ("--mechanism gaussian --set blocks=false", "take auto for functions"),
        (BLOCKS, "set blocks=false, or rounds=1"),
    ],
)
@pytest.mark.parametrize("workload", [CUSTOM, "mixed.yaml"])
def test_mechanisms_that_do_not_suit_functions_spend_nothing(queries, cli, options, said, workload):
    explained(cli(fit(f"{options} --workload {workload}")), 2, said)
    assert not (queries / "anamorph.ledger").exists()
    assert not (queries / "release").exists()


def test_weighted_thresholds_are_seeded_like_all_else(queries, cli):
    spec = "--workload 'marginals:k=1,weight=3;thresholds:k=2,r=1'"
    for name in ("one", "two"):
        assert cli(fit(f"{RAP} {spec} --unsafe-seed 5 -o {name} --memory {2 if name == 'one' else 1}GB")).code == 0
    made = [(queries / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert made[0] == made[1]


def test_a_run_is_resumed_with_its_function(queries, cli, monkeypatch):
    """Cut short in its second round; a changed function is another question."""
    from anamorph.models.relaxed import RelaxedProjection

    project, calls = RelaxedProjection.fit, []

    def cut(self, *given, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return project(self, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(RelaxedProjection, "fit", cut)
        assert cli(fit(f"{RAP} --workload {CUSTOM}")).code == 130
    sys.modules.pop("cli_queries")
    (queries / "cli_queries.py").write_text(MODULE.replace("return 1 -", "return 0.5 -"))
    explained(
        cli(fit(f"{RAP} --workload {CUSTOM} --resume")), 6, "charged for another request: the code or a setting changed"
    )
    sys.modules.pop("cli_queries")
    (queries / "cli_queries.py").write_text(MODULE)
    assert cli(fit(f"{RAP} --workload {CUSTOM} --resume")).code == 0
    assert cli("ledger verify --release release").code == 0
