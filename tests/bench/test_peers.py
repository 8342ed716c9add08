"""The peers' harness, with fakes: no peer and no network is needed."""

from __future__ import annotations

import csv
import json
import sys

import pytest
from bench.peers import harness, protocol
from bench.peers.harness import Job, Method, Peer
from bench.peers.outside import Limits, Outcome

FAKE = f"""
import sys, time
sys.path.insert(0, {str(harness.DRIVERS)!r})
from protocol import read_task
task = read_task()
if task.method == "crash":
    raise ValueError("no such model")
if task.method == "sleep":
    time.sleep(60)
if task.method != "silent":
    assert task.settings == {{"size": 5}} and task.workload == (("b", "a"),) and task.epsilon == 0.5
    task.write([[None, 1] if place == 0 else row for place, row in enumerate(task.codes())])
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "data.csv").write_text("b,a\n1,0\n2,1\n1,1\n")
    (tmp_path / "schema.json").write_text(json.dumps({"a": 2, "b": 3}))
    (tmp_path / "workload.json").write_text(json.dumps([["b", "a"]]))
    return Job(*(tmp_path / name for name in ("data.csv", "schema.json", "workload.json")), 0.5, 1e-9, 7)


def peer(path, *methods: str) -> Peer:
    return Peer("fake", ("fake==1",), "fake", "fake", str(path), tuple(Method(name, {"size": 5}) for name in methods))


def driven(tmp_path, job, method, limits=None):
    (tmp_path / "driver.py").write_text(FAKE)
    made = peer(tmp_path / "driver.py", method)
    output = tmp_path / "rows.csv"
    python = sys.executable
    return harness.run(made, made.methods[0], job, output, limits=limits or Limits(), python=python), output


def test_a_driver_reads_a_task_and_writes_rows(tmp_path, job):
    outcome, output = driven(tmp_path, job, "copy")
    assert outcome.error == ""
    with output.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["a", "b"]  # as in the schema
    assert rows[0] == ["1", "1"]  # a cell without a code takes that of another row
    assert rows[1:] == [["1", "2"], ["1", "1"]]


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("crash", "exit code 1: ValueError: no such model"),
        ("silent", "the driver wrote no rows"),
        ("sleep", "stopped after 1 s"),
    ],
)
def test_what_goes_wrong_in_a_driver_is_its_outcome(tmp_path, job, method, error):
    outcome, _ = driven(tmp_path, job, method, Limits(seconds=1) if method == "sleep" else None)
    assert outcome.error == error


def test_public_rows_have_every_code(job):
    task = protocol.read_task(arguments(job))
    assert task.domain_rows() == [[0, 0], [1, 1], [1, 2]]
    assert task.degree() == 2


def arguments(job):
    named = {"data": job.data, "schema": job.schema, "workload": job.workload, "output": job.data.parent / "rows.csv"}
    named |= {"epsilon": 1, "delta": 1e-9, "seed": 0, "method": "m"}
    return [text for name, value in named.items() for text in (f"--{name}", str(value))]


def test_a_column_without_codes_is_refused(job):
    task = protocol.read_task(arguments(job))
    with pytest.raises(SystemExit, match=r"column 'b' must have codes from 0 to 2"):
        task.write([(0, float("nan")), (1, 3)])


@pytest.fixture
def pip(monkeypatch):
    """Installs that end at once: well, or with an error."""
    commands, failing = [], []

    def execute(command, *, log, limits):
        commands.append(command)
        with log.open("a") as file:
            file.write("ERROR: no matching distribution\n" if failing else "1.2.3\n")
        return Outcome(1, 1, 1, "exit code 1: ERROR: no matching distribution" if failing and "pip" in command else "")

    monkeypatch.setattr(harness, "execute", execute)
    return commands, failing


def test_a_ready_environment_is_not_made_again(tmp_path, pip):
    commands, _ = pip
    made = peer("driver.py", "m")
    assert harness.state(made, tmp_path).status == "not made: make peers"
    assert harness.install(made, tmp_path) == harness.Installed("fake", "1.2.3", "ready")
    number = len(commands)
    assert harness.install(made, tmp_path).ready
    assert len(commands) == number
    other = Peer("fake", ("fake==2",), "fake", "fake", "driver.py", ())
    assert not harness.state(other, tmp_path).ready  # other requirements: it is made again
    harness.install(other, tmp_path)
    assert len(commands) == 2 * number


def test_a_failed_install_is_recorded_and_tried_again(tmp_path, pip):
    commands, failing = pip
    failing.append(True)
    made = peer("driver.py", "m")
    found = harness.install(made, tmp_path)
    assert found.status == "failed: exit code 1: ERROR: no matching distribution"
    assert "no matching distribution" in (tmp_path / "fake" / "error.txt").read_text()
    assert "failed" in harness.table([found])
    failing.clear()
    assert harness.install(made, tmp_path).ready
    assert len(commands) == 5


def test_every_peer_has_a_driver_and_settings_that_can_be_written():
    for made in harness.PEERS:
        assert (harness.DRIVERS / made.driver).exists()
        assert made.methods
        for method in made.methods:
            json.dumps(dict(method.settings))
