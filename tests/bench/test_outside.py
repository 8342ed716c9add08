"""Commands measured from outside: what they cost, how they end, what stops them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from bench.peers import outside
from bench.peers.outside import Limits, execute, last_lines, members


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def test_a_command_that_ends_well_is_measured(tmp_path):
    text = "import time; held = bytearray(60 << 20); time.sleep(0.5); print('done')"
    outcome = execute(python(text), log=tmp_path / "log", limits=Limits())
    assert outcome.error == ""
    assert outcome.seconds >= 0.5
    assert 60 < outcome.peak_mb < 200
    assert 0 < outcome.cpu_seconds < outcome.seconds + 1
    assert (tmp_path / "log").read_text() == "done\n"


def test_memory_of_children_is_counted(tmp_path):
    child = "import time; held = bytearray(40 << 20); time.sleep(1)"
    text = f"import subprocess, sys; a = [subprocess.Popen([sys.executable, '-S', '-c', {child!r}]) for _ in range(2)]"
    outcome = execute(python(f"{text}; [each.wait() for each in a]"), log=tmp_path / "log", limits=Limits())
    assert outcome.peak_mb > 80


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("print('a'); raise ValueError('no such domain')", "exit code 1: ValueError: no such domain"),
        ("import os; print('b', flush=True); os.kill(os.getpid(), 9)", "killed by signal 9: b"),
    ],
)
def test_a_command_that_fails_says_why_in_its_last_line(tmp_path, text, error):
    assert execute(python(text), log=tmp_path / "log", limits=Limits()).error == error


def test_a_command_that_takes_too_long_is_stopped_with_its_children(tmp_path):
    child = "import time; time.sleep(60)"
    text = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {child!r}]); print(os.getpid())"
    start = time.perf_counter()
    log = tmp_path / "log"
    outcome = execute(python(f"{text}; sys.stdout.flush(); {child}"), log=log, limits=Limits(seconds=1))
    assert outcome.error == "stopped after 1 s"
    assert time.perf_counter() - start < 30
    time.sleep(0.2)
    assert [pid for pid in members(int(log.read_text())) if alive(pid)] == []


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_a_command_that_holds_too_much_is_stopped(tmp_path):
    text = "import time; held = bytearray(200 << 20); time.sleep(30)"
    outcome = execute(python(text), log=tmp_path / "log", limits=Limits(megabytes=100))
    assert outcome.error == "stopped above 100 MB"
    assert outcome.seconds < 20


def test_last_lines_skip_empty_ones(tmp_path):
    log = tmp_path / "log"
    log.write_text("a\n\nb  \n\n")
    assert last_lines(log, 1) == "b"
    assert last_lines(log, 5) == "a\nb"


def test_an_interrupted_wait_leaves_nothing_running(tmp_path, monkeypatch):
    begun = []

    def interrupted(seconds):
        begun.extend(int(line) for line in (tmp_path / "log").read_text().split())
        if begun:
            raise KeyboardInterrupt

    monkeypatch.setattr(outside.time, "sleep", interrupted)
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        execute(python(text), log=tmp_path / "log", limits=Limits())
    assert members(begun[0]) == []
