"""What the tests of the command line share: two ways to run it.

`cli` runs a command inside this process, as `main` does, and is fast; `program` runs the installed program. Both
check what is true of every run, whatever it was asked: no traceback, no control character, no planted secret, no
number of rows.
"""

from __future__ import annotations

import signal
import subprocess

import pytest
from commands import DATA, SCHEMA, Ran, command, decent, words

from anamorph import _console
from anamorph.cli import invoke


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with the usual data and schema."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text(DATA)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return tmp_path


@pytest.fixture
def cli(place, capsys):
    """Runs a command in this process, as `main` does."""

    def run(arguments):
        before = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            code = _console.guarded(lambda: invoke(words(arguments)), debug=False)
        finally:
            signal.signal(signal.SIGTERM, before)
        return decent(Ran(code, *capsys.readouterr()))

    return run


@pytest.fixture
def program(place):
    """Runs the installed program."""

    def run(arguments, *, module=False, **options):
        ended = subprocess.run(
            command(arguments, module=module),
            capture_output=True,
            check=False,
            text=True,
            timeout=120,
            **options,
        )
        return decent(Ran(ended.returncode, ended.stdout, ended.stderr))

    return run


@pytest.fixture
def started(place):
    """Starts the installed program and returns it running; it ends with the test."""
    running = []

    def start(arguments, **options):
        process = subprocess.Popen(
            command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()
