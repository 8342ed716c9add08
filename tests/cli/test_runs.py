"""The program as people run it: the whole way from a survey to answers, and what it prints where."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import subprocess

import pytest
from commands import ROWS, SCHEMA, command, explained, fit, tree

from anamorph.archive import load
from anamorph.datasets import survey, survey_schema
from anamorph.tables import write_table

SMALL = "--set rounds=2 --set per_round=4 --set steps=20 --set rows=50"
MECHANISMS = {
    "rap": f"--mechanism rap {SMALL} --set blocks=false",
    "rap blocks": f"--mechanism rap {SMALL} --set blocks=true",
    "gaussian": "--mechanism gaussian",
    "hdmm": "--mechanism hdmm",
    "all-zero": "--mechanism all-zero",
    "fem": "--mechanism fem --set eps0=0.2 --set samples=5",
    "sepfem": "--mechanism sepfem --set eps0=0.2 --set samples=5",
    "dualquery": "--mechanism dualquery --set rounds=5 --set samples=5",
    "dqrs": "--mechanism dqrs --set rounds=5 --set samples=5",
}
ROUNDS = {"rap": 2, "rap blocks": 2, "fem": 4, "sepfem": 4, "dualquery": 5, "dqrs": 5}
"""Of those that have rows: how many they say."""
GAME = ("fem", "sepfem", "dualquery", "dqrs")
"""They measure nothing."""
PLAN = "plan schema.yaml --workload marginals:k=2 --epsilon 1 --delta 1e-6"


@pytest.fixture
def people(place):
    """The fictional survey in place of the usual data."""
    (place / "data.csv").unlink()
    write_table(survey(2000), place / "data.csv")
    (place / "schema.yaml").write_text(survey_schema().to_yaml())
    return place


def has_interval(name, path):
    """Whether what was measured tells of age and sex: everything, nothing, or what the rounds happened to choose."""
    if name != "rap blocks":  # 8 single cells never hold all of those that the question asks for
        return name in ("gaussian", "hdmm")
    made = load(path)
    wanted = {made.schema.index("age"), made.schema.index("sex")}
    return any(wanted <= set(f) for log in made.measurements for part in log.workload.parts for f in part.sets)


def check_interval(name, answer):
    """All of sigma and both ends, or none; the answers of linear mechanisms are in the middle, where no end is cut."""
    assert (answer["sigma"] is None) == (answer["low"] is None) == (answer["high"] is None)
    if answer["sigma"] is not None:
        assert 0 <= answer["low"] < answer["high"] <= 1
    if name in ("gaussian", "hdmm"):
        low, high = (answer["fraction"] + sign * 1.95996 * answer["sigma"] for sign in (-1, 1))
        assert (answer["low"], answer["high"]) == pytest.approx((max(low, 0), min(high, 1)), abs=1e-6)


def check_intervals(name, path):
    """A file of answers has the ends of everything, of nothing, or of what was measured."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = [bool(row["low"]) for row in rows]
    assert known == [bool(row["high"]) for row in rows]
    if name in ("all-zero", *GAME):
        assert not any(known)
    else:
        assert all(known) if name in ("gaussian", "hdmm") else any(known)
    assert name != "rap" or sum(known) == 2 * 4, "those of the single queries that were measured"


@pytest.mark.parametrize("name", MECHANISMS)
def test_from_a_survey_to_answers(people, program, cli, name):
    """`program` where the process matters, `cli` for the rest: each start of the program costs a second."""
    before = tree(people)
    checked = cli("schema check schema.yaml data.csv")
    assert checked.code == 0
    assert "age: numeric, 16 values, source public" in checked.out
    planned = json.loads(cli(f"{PLAN} {MECHANISMS[name]} --rows 2000 --json").out)
    assert planned["rho"] == pytest.approx(0.02436, rel=1e-3)
    assert planned["queries"] == planned["queries"] // 1 > 1000
    assert planned["memory_bytes"] >= 0
    assert tree(people) == before

    fitted = program(fit(MECHANISMS[name]))
    assert fitted.code == 0, fitted.text
    assert "(1, 1e-06)-differentially private" in fitted.out
    assert fitted.out.endswith("release: release\n" + "ledger:  anamorph.ledger\n" * (name != "all-zero"))
    told, rounds = [line for line in fitted.err.splitlines() if "round" in line], ROUNDS.get(name, 0)
    assert told == [f"round {done} of {rounds}" for done in range(1, rounds + 1)]
    header = json.loads((people / "release" / "release.json").read_text())
    assert header["private"] is True
    assert sum(spend["rho"] for spend in header["privacy"]["spends"]) <= header["privacy"]["rho"] * (1 + 1e-12)

    figures = json.loads(cli("evaluate release data.csv --schema schema.yaml --json").out)
    assert figures["private"] is False
    assert figures["queries"] == planned["queries"]
    assert 0 < figures["mean_error"] <= figures["max_error"] <= 1
    asked = cli(["query", "release", "age < 30 and sex = 'F'", "--json"])
    assert asked.code == 0
    answer = json.loads(asked.out)["answers"][0]
    assert answer["count"] == pytest.approx(answer["fraction"] * header["total"])
    assert (answer["sigma"] is not None) == has_interval(name, people / "release")
    check_interval(name, answer)

    sampled = cli("sample release -o rows.csv")
    if name in ROUNDS:
        assert sampled.code == 0
        assert len((people / "rows.csv").read_text().splitlines()) == 2001
        assert cli("schema check schema.yaml rows.csv").code == 0
        assert cli("sample release -o rows.parquet --rows 10 --seed 3").code == 0
    else:
        explained(sampled, 2, "such as rap")
    assert cli("query release --workload marginals:k=2 -o answers.csv").code == 0
    check_intervals(name, people / "answers.csv")
    if name == "all-zero":  # asks nothing, and takes nothing
        assert not (people / "anamorph.ledger").exists()
        return
    account = json.loads(cli("ledger show --json").out)["accounts"][0]
    assert account["dataset"] == "survey"
    assert account["remaining"] == 0.0
    assert cli("ledger verify --release release").code == 0
    entries = json.loads(cli("ledger show survey --json").out)["entries"]
    assert [entry["kind"] for entry in entries] == [spend["kind"] for spend in header["privacy"]["spends"]]


def test_the_program_and_the_module_are_one(place, program):
    for module in (False, True):
        ran = program("plan schema.yaml --workload marginals:k=4 --epsilon 1 --delta 1e-6", module=module)
        explained(ran, 2, "k (4) must be from 1 to 3")
    assert program("--help").code == 0
    assert program([]).code == 2


def test_only_debug_shows_a_traceback(place):
    ran = subprocess.run(command(fit("--debug", data="absent.csv")), capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr
    assert "may hold private values" in ran.stderr


def test_a_terminal_of_few_letters(place, program):
    (place / "schema.yaml").write_text("columns:\n  été: {type: codes, values: 2}\n", encoding="utf-8")
    ran = program("schema check schema.yaml", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert ran.code == 0, ran.text
    assert "\\xe9t\\xe9: codes" in ran.out


def test_an_output_nobody_reads(place, cli):
    """A closed pipe is no fault; a full disk behind standard output is one."""
    assert cli(fit()).code == 0
    with subprocess.Popen(command("ledger show"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(command("ledger show"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 5
    assert "No space left" in ran.stderr
    assert "Exception" not in ran.stderr


def on_terminal(arguments, *, also_stdout):
    """Runs the program with a terminal for stderr (and stdout); returns its code, its stdout, what the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(arguments),
        stdin=theirs,
        stdout=theirs if also_stdout else subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # the program closed its end
            break
        if not chunk:
            break
        shown += chunk
    out, _ = process.communicate()
    os.close(ours)
    return process.returncode, (out or b"").decode(), shown.decode(errors="replace")


def test_progress_on_a_terminal(people):
    code, _, shown = on_terminal(fit(MECHANISMS["rap blocks"]), also_stdout=True)
    assert code == 0, shown
    assert re.search(r"rounds.*2/2", shown)
    assert "projecting" in shown
    arguments = "evaluate release data.csv --schema schema.yaml --json"
    code, out, shown = on_terminal(arguments, also_stdout=False)
    assert code == 0, shown
    assert json.loads(out)["private"] is False
    assert "NOT PRIVATE" in shown


def test_a_second_fit_is_refused_and_nothing_changes(place, program, cli):
    assert cli(fit()).code == 0
    before = tree(place)
    explained(program(fit("-o second")), 4, "'people'", "anamorph ledger open people --epsilon E --delta D")
    (place / "data.csv").rename(place / "elsewhere.csv")  # refused before anything is read
    explained(cli(fit("-o second")), 4, "remains")
    (place / "elsewhere.csv").rename(place / "data.csv")
    assert tree(place) == before
    explained(cli("ledger open people --epsilon 1 --delta 1e-6"), 2, "must be above the present")
    assert cli("ledger open people --epsilon 3 --delta 1e-6").code == 0
    assert cli(fit("-o second")).code == 0


def test_an_account_is_of_one_schema_and_one_relation(place, cli):
    assert cli("ledger open people --epsilon 9 --delta 1e-6 --schema schema.yaml").code == 0
    before = tree(place)
    explained(cli(fit("--neighbours add-remove")), 4, "another relation (replace)")
    (place / "schema.yaml").write_text(SCHEMA.replace("bins: 4", "bins: 5"))
    explained(cli(fit()), 4, "another schema")
    (place / "schema.yaml").write_text(SCHEMA)
    assert tree(place) == before
    assert cli(fit()).code == 0


def test_a_seeded_run_is_marked_and_touches_no_ledger(place, cli):
    (place / "anamorph.ledger").write_text("damaged, and nobody looks")
    seeded = f"--unsafe-seed 7 --mechanism rap {SMALL} --workload marginals:k=1"
    said = [cli(fit(f"{seeded} -o {name}")) for name in ("one", "two")]
    assert [ran.code for ran in said] == [0, 0]
    assert all(ran.out.startswith("NOT PRIVATE") and "ledger" not in ran.out for ran in said)
    assert (place / "anamorph.ledger").read_text() == "damaged, and nobody looks"
    assert tree(place / "one") == tree(place / "two")
    header = json.loads((place / "one" / "release.json").read_text())
    assert header["private"] is False
    assert header["privacy"]["private"] is False
    assert header["statement"].startswith("NOT PRIVATE")
    for arguments in ("sample one -o rows.csv", "query one 'age < 30'", "query one --workload marginals:k=1 -o a.csv"):
        ran = cli(arguments)
        assert ran.code == 0
        assert "NOT PRIVATE" in ran.err
    for made in ("rows.csv", "a.csv"):
        assert "NOT PRIVATE" in (place / made).read_text().splitlines()[0]
    assert json.loads(cli("query one 'age < 30' --json").out)["private"] is False
    (place / "anamorph.ledger").unlink()
    assert cli(fit(f"{seeded} -o three")).code == 0
    assert not (place / "anamorph.ledger").exists()


def test_add_remove_never_shows_the_number_of_rows(place, cli):
    """With so little budget that the noisy number is far from the true one."""
    options = f"--neighbours add-remove --epsilon 0.001 --mechanism rap {SMALL} --workload marginals:k=1"
    said = [
        cli(arguments)
        for arguments in (
            fit(options),
            "sample release -o rows.csv",
            "query release 'age < 30'",
            "ledger show",
            "ledger show people",
            "ledger verify --release release",
        )
    ]
    assert [ran.code for ran in said] == [0] * 6
    header = json.loads((place / "release" / "release.json").read_text())
    assert header["total"] != ROWS
    number = re.compile(rf"(?<![\w.-]){ROWS}([.]0*)?(?![\w.])")
    kept = [(place / "release" / "release.json").read_text(), (place / "anamorph.ledger").read_text(errors="replace")]
    assert not any(number.search(text) for text in [*kept, *(ran.text for ran in said)])
    assert len((place / "rows.csv").read_text().splitlines()) - 1 == header["total"]
    assert header["privacy"]["spends"][0]["kind"] == "total"


WARNINGS = [
    ("--epsilon 21", "epsilon (21) exceeds 20"),
    ("--delta 0.01", f"delta (0.01) exceeds 1/{ROWS}"),
]


@pytest.mark.parametrize(("option", "warning"), WARNINGS)
def test_warnings(place, cli, option, warning):
    ran = cli(fit(option))
    assert ran.code == 0
    assert ran.err.count(warning) == 1
    figures = json.loads(cli(f"{PLAN} --mechanism gaussian {option} --rows {ROWS} --json").out)
    assert [text for text in figures["warnings"] if text.startswith(warning)]


def test_noise_larger_than_the_data(place, cli):
    figures = json.loads(cli(f"{PLAN} --mechanism gaussian --epsilon 0.001 --rows 50 --json").out)
    assert any("larger than the number of rows" in text for text in figures["warnings"])
    assert "larger than the number of rows" in cli(f"{PLAN} --mechanism gaussian --epsilon 0.001 --rows 50").out


def test_a_plan_says_equal_rounds_once_and_of_many_the_first(place, cli):
    equal = cli(f"{PLAN} --mechanism fem --set eps0=0.02").out
    (line,) = [line for line in equal.splitlines() if line.startswith("  kind draw")]
    assert line.endswith(" times)")
    many = cli(f"{PLAN} --mechanism dualquery --set rounds=50").out.splitlines()
    assert len([line for line in many if line.startswith("  kind draw")]) == 20
    assert "  and 29 more: --json lists them all" in many
    assert len(json.loads(cli(f"{PLAN} --mechanism dualquery --set rounds=50 --json").out)["steps"]) == 49


def test_a_plan_reads_no_data(place, cli):
    (place / "data.csv").unlink()
    before = tree(place)
    figures = json.loads(cli(f"{PLAN} --json --set objective=max --set rows=100").out)
    assert {"rho", "queries", "memory_bytes"} <= set(figures)
    assert all(isinstance(figures[name], int) for name in ("queries", "memory_bytes"))
    assert tree(place) == before


def test_a_drafted_schema_must_be_completed(place, cli):
    drafted = cli("schema init data.csv -o draft.yaml")
    assert drafted.code == 0
    assert "fill in" in drafted.err
    explained(cli("schema check draft.yaml"), 2, "'town'", "categories must be filled in")
    explained(cli(fit("--schema draft.yaml")), 2, "must be filled in")
    assert "Ayr" not in (place / "draft.yaml").read_text()


def test_a_schema_from_data_is_marked_and_refused(place, cli):
    drafted = cli("schema init data.csv --from-data -o draft.yaml")
    assert drafted.code == 0
    assert "NOT PRIVATE" in drafted.err
    checked = cli("schema check draft.yaml data.csv")
    assert checked.code == 0
    assert "fit will refuse them" in checked.err
    explained(cli(fit("--schema draft.yaml")), 2, "'town'", "write `source: declared`")
    assert not (place / "anamorph.ledger").exists()
    text = (place / "draft.yaml").read_text()
    (place / "draft.yaml").write_text(text.replace("source: data", "source: declared"))
    assert cli(fit("--schema draft.yaml")).code == 0


def test_a_draft_of_any_types(place, cli):
    (place / "data.csv").write_text(
        "day,hour,moment,yes,code,n\n" + "2024-01-02,10:30:00,2024-01-02 10:30:00,true,NO,1.5\n" * 3
    )
    assert cli("schema init data.csv --from-data -o draft.yaml").code == 0
    assert cli("schema check draft.yaml data.csv").code == 0


def test_a_workload_file_is_evaluated_without_it(place, cli):
    """The release knows its own workload, whatever it was made from."""
    (place / "w.yaml").write_text("workload: ['marginals:k=1', 'marginals:of=town+age']\n")
    assert cli(fit("--workload w.yaml")).code == 0
    (place / "w.yaml").unlink()
    ran = cli("evaluate release data.csv --schema schema.yaml --json")
    assert ran.code == 0, ran.text
    assert json.loads(ran.out)["queries"] == 5 + 5 + 4 + 25


def test_evaluate_refuses_another_schema(place, cli):
    assert cli(fit()).code == 0
    (place / "other.yaml").write_text(SCHEMA.replace("bins: 4", "bins: 5"))
    explained(cli("evaluate release data.csv --schema other.yaml"), 2, "must be the one of the release")
    explained(cli("evaluate release absent.csv --schema schema.yaml"), 2, "'absent.csv'")
    explained(cli("evaluate release data.csv --schema schema.yaml --workload marginals:k=3"), 2, "measured")


QUESTIONS = [
    ("aeg < 30", "Did you mean 'age'"),
    ("town = 'Ary'", "Did you mean 'Ayr'"),
    ("town < 'Ayr'", "no order"),
    ("age < 'old'", "must be a number"),
    ("age +", "must be a condition"),
    ("1 = 1", "must name a column"),
    ("age < kind", "must be"),
    ("age < 30; drop table x", "must be a condition"),
    ("(" * 3000 + "age < 1" + ")" * 3000, "must be a condition"),
    ("age in (select 1)", "must be"),
    ("town like 'A%'", "must be"),
    ("", "must be a condition"),
]


def test_questions_that_cannot_be_answered(place, cli):
    assert cli(fit()).code == 0
    for question, said in QUESTIONS:
        explained(cli(["query", "release", question]), 2, said)


def test_answers_come_with_their_intervals(place, cli):
    assert cli(fit("--mechanism hdmm --set strategy=residuals")).code == 0
    answers = {}
    for confidence in (None, 0.5, 0.999):
        option = "" if confidence is None else f" --confidence {confidence}"
        answers[confidence] = json.loads(cli(f"query release 'age < 30' --json{option}").out)["answers"][0]
        low, high = answers[confidence]["low"], answers[confidence]["high"]
        said = cli(f"query release 'age < 30'{option}").out
        percent = f"{100 * (confidence or 0.95):g}%"
        expected = f"age < 30: {answers[None]['fraction']:.6g}, from {low:.6g} to {high:.6g} ({percent}); about "
        assert said.startswith(expected), said
        assert said.endswith(f"; about {answers[None]['count']:.0f} rows\n")
        name = f"{confidence or 'usual'}.csv"
        assert cli(f"query release --workload marginals:of=age -o {name}{option}").code == 0
    sigmas = {answer["sigma"] for answer in answers.values()}
    assert len(sigmas) == 1
    (sigma,) = sigmas
    for confidence, quantile in ((None, 1.95996), (0.5, 0.67449), (0.999, 3.29053)):
        answer = answers[confidence]
        assert answer["high"] - answer["low"] == pytest.approx(2 * quantile * sigma, rel=1e-4)
        with (place / f"{confidence or 'usual'}.csv").open(newline="") as file:
            row = next(csv.DictReader(file))
        assert list(row) == ["columns", "values", "fraction", "count", "low", "high"]
        middle = (float(row["low"]) + float(row["high"])) / 2
        assert middle == pytest.approx(float(row["fraction"]), abs=1e-9)
    for confidence in ("0", "1", "95", "-1", "nan"):
        refused = f"confidence ({float(confidence)!r}) must be in (0, 1)"
        explained(cli(f"query release 'age < 30' --confidence {confidence}"), 2, refused)
        explained(cli(f"query release --workload marginals:k=1 -o x.csv --confidence {confidence}"), 2, refused)
    assert not (place / "x.csv").exists()


def test_answers_without_an_interval_say_none(place, cli):
    assert cli(fit("--mechanism all-zero")).code == 0
    assert cli("query release 'age < 30'").out == "age < 30: 0; about 0 rows\n"


def test_samples_of_odd_sizes(place, cli):
    assert cli(fit(f"--mechanism rap {SMALL} --workload marginals:k=1")).code == 0
    for rows in ("0", "-1"):
        explained(cli(f"sample release --rows {rows} -o rows.csv"), 2, f"rows ({rows}) must be from 1")
    explained(cli(f"sample release --rows {10**30} -o rows.csv"), 2, "must be from 1")
    assert cli("sample release --rows 1 -o rows.csv").code == 0


def test_the_demonstration(place, cli):
    ran = cli("demo --out demo --rows 500")
    assert ran.code == 0, ran.text
    made = {"answers.csv", "release", "rows.csv", "survey.csv", "survey.ledger", "survey.ledger.witness", "survey.yaml"}
    assert {path.name for path in (place / "demo").iterdir()} == made
    explained(cli("demo --out demo"), 2, "empty directory")
