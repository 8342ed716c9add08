"""Runs that end early: by a signal, a full disk, another process. What was charged is never charged again."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from commands import Ran, command, decent, explained, fit, tree, words
from safetensors.numpy import load

WAIT = 60
RAP = "--mechanism rap --workload marginals:k=1 --set rounds=2 --set per_round=2 --set rows=20"
QUICK = f"{RAP} --set steps=5"
SLOW = f"{RAP} --set steps=100000000 --set tolerance=0 --set rate=3e-5"
"""A fit that is in its first projection, charged and answered, until it is stopped."""
LARGE = "--mechanism rap --workload marginals:k=1 --set rounds=1 --set rows=3000 --set steps=2"
"""A fit whose release is larger than its ledger."""


def select(place, statement):
    with contextlib.closing(sqlite3.connect(f"file:{place}/anamorph.ledger?mode=ro", uri=True, timeout=5)) as ledger:
        return ledger.execute(statement).fetchall()


def answers(place):
    """Returns the stored answers of the ledger, none while there is no ledger yet."""
    with contextlib.suppress(sqlite3.OperationalError):
        return [np.frombuffer(body, np.int64) for (body,) in select(place, "SELECT body FROM answers ORDER BY step")]
    return []


def entries(cli):
    return json.loads(cli("ledger show people --json").out)["entries"]


def spent(cli):
    return json.loads(cli("ledger show --json").out)["accounts"][0]["spent"]


@pytest.fixture
def charged(place, started):
    """A slow fit that was charged and answered twice, and goes on."""
    process = started(fit(SLOW))
    deadline = time.monotonic() + WAIT
    while len(answers(place)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


@pytest.mark.parametrize(("number", "code", "word"), SIGNALS)
def test_signals(place, charged, cli, number, code, word):
    charged.send_signal(number)
    out, err = charged.communicate(timeout=WAIT)
    ran = decent(Ran(charged.returncode, out, err))
    assert ran.code == code, ran.text
    assert word in ran.err
    assert "--resume" in ran.err
    assert sorted(path.name for path in place.iterdir() if "release" in path.name) == []
    assert cli("ledger verify").code == 0


def test_interrupted_twice(charged, cli):
    charged.send_signal(signal.SIGINT)
    charged.send_signal(signal.SIGINT)
    charged.communicate(timeout=WAIT)
    assert charged.returncode in (130, -signal.SIGINT)
    assert cli("ledger verify").code == 0


KILL = """
import os, signal, sys
from anamorph.curator.curator import Curator
from anamorph.curator.ledger import Run
from anamorph.cli import main
owner, name, before, times = {point}
original = getattr(owner, name)
def dies(*arguments, **options):
    global times
    times -= 1
    if before and not times:
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*arguments, **options)
    if not times:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, dies)
main()
"""


def killed(arguments, point):
    """Runs the program until it is killed at a point: (owner, method, before or after it, at which call)."""
    script = KILL.format(point=point)
    ran = subprocess.run([sys.executable, "-c", script, *words(arguments)], capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr


def test_killed_then_resumed(place, cli, monkeypatch):
    """A resumed run takes up the stored answers, and its release is that of a run that was never stopped."""
    killed(fit(QUICK), "(Run, 'store', False, 2)")
    kept = answers(place)
    assert len(kept) == 2
    charged = entries(cli)
    explained(cli(fit(QUICK)), 4, "--resume continues it")
    explained(cli(fit(QUICK + " --resume --seed 5")), 2, "no unfinished run of these terms")

    from anamorph.curator.curator import Curator

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:  # the release is written, and the ledger is not told
        patch.setattr(Curator, "finish", fails)
        explained(cli(fit(QUICK + " --resume")), 5, "Input/output error")
    first = tree(place / "release")
    assert all((new == old).all() for new, old in zip(answers(place), kept, strict=False))
    assert len(answers(place)) == 4

    explained(cli(fit(QUICK + " --resume")), 2, "--overwrite")
    assert cli(fit(QUICK + " --resume --overwrite")).code == 0
    assert tree(place / "release") == first
    arrays = load(first["measurements.safetensors"])
    assert np.allclose(arrays["values.0"] * 1237, kept[1])
    assert entries(cli)[:2] == charged
    assert len(entries(cli)) == 4
    assert cli("ledger verify --release release").code == 0
    explained(cli(fit(QUICK + " --resume -o again")), 2, "no unfinished run")


def test_killed_between_charge_and_answer(place, cli):
    """Nobody knows what was drawn: the step is paid again, and not without the owner's word."""
    killed(fit(), "(Run, 'store', True, 1)")
    before = spent(cli)
    explained(cli(fit("--resume")), 4, "must be charged again", "ledger open people")
    assert spent(cli) == before
    assert cli("ledger open people --epsilon 3 --delta 1e-6").code == 0
    assert cli(fit("--resume")).code == 0
    assert spent(cli) == pytest.approx(2 * before)
    assert cli("ledger verify --release release").code == 0


def test_killed_between_release_and_record(place, cli):
    killed(fit(), "(Curator, 'finish', True, 1)")
    release = tree(place / "release")
    before = spent(cli)
    explained(cli("ledger verify --release release"), 6, "must be on record")
    assert cli(fit("--resume --overwrite")).code == 0
    assert tree(place / "release") == release
    assert spent(cli) == before


def test_two_fits_on_one_ledger(place, started, cli):
    both = [started(fit(f"-o r{index}")) for index in range(2)]
    ran = []
    for process in both:
        out, err = process.communicate(timeout=WAIT)
        ran.append(decent(Ran(process.returncode, out, err)))
    assert sorted(each.code for each in ran) == [0, 4], ran
    explained(next(each for each in ran if each.code), 4, "'people'")
    assert len([path for path in place.iterdir() if path.name in ("r0", "r1")]) == 1
    assert cli("ledger verify").code == 0


@contextlib.contextmanager
def largest_file(size):
    """No file may grow beyond a size: every write beyond fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 20, 100, 2000, 5000, 9000, 13000, 17000])
def test_a_disk_that_fills_while_the_ledger_is_written(place, cli, size):
    """Wherever it fills, the run can go on, at no more than the price of the step that was lost."""
    with largest_file(size):
        ran = cli(fit())
    if ran.code:
        explained(ran, 5)
        assert not (place / "release").exists()
        assert not list(place.glob(".release*"))
        begun = (place / "anamorph.ledger").exists() and cli("ledger show people").code == 0
        assert cli("ledger verify").code == (0 if (place / "anamorph.ledger").exists() else 2)
        again = cli(fit("--resume" if begun else ""))
        if begun and again.code == 2:  # the account was opened, and no run begun
            again = cli(fit())
        if again.code:
            explained(again, 4, "must be charged again")
            assert cli("ledger open people --epsilon 3 --delta 1e-6").code == 0
            assert cli(fit("--resume")).code == 0
    assert cli("ledger verify --release release").code == 0


def test_a_disk_that_fills_while_the_release_is_written(place, cli):
    with largest_file(60_000):
        explained(cli(fit(LARGE)), 5, "'release'", "cannot be written", "File too large")
    assert not list(place.glob("*release*"))
    before, paid = entries(cli), spent(cli)
    assert cli(fit(LARGE + " --resume")).code == 0
    assert (entries(cli), spent(cli)) == (before, paid)
    assert cli("ledger verify --release release").code == 0
    rows = "sample release --rows 5000 -o rows.csv --overwrite"
    assert cli(rows).code == 0
    kept = (place / "rows.csv").read_bytes()
    with largest_file(30_000):
        explained(cli(rows + " --seed 2"), 5, "'rows.csv'", "File too large")
    assert (place / "rows.csv").read_bytes() == kept


DISK = """
mount -t tmpfs -o size=20k tmpfs small || exit 99
{full}; echo "full $?"
mount -o remount,ro small
{readonly}; echo "output read-only $?"
{ledger}; echo "ledger read-only $?"
mount -o remount,rw,size=9m small
{resume}; echo "resumed $?"
head -c 9999999 /dev/zero > small/filler
{later}; echo "ledger full $?"
"""


def test_a_full_and_a_read_only_disk(place, cli):
    """On a small file system of its own, in a namespace of its own, where the system lets us."""
    (place / "small").mkdir()
    program = {
        "full": fit(f"{LARGE} -o small/release"),
        "readonly": fit("-o small/other --ledger other.ledger"),
        "ledger": fit("-o other --ledger small/ledger"),
        "resume": fit(f"{LARGE} -o small/release --resume"),
        "later": fit("-o other --ledger small/ledger"),
    }
    script = DISK.format(**{name: " ".join(command(arguments)) for name, arguments in program.items()})
    ran = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    if ran.returncode == 99 or "unshare" in ran.stderr:
        pytest.skip("file systems cannot be mounted here")
    decent(Ran(0, ran.stdout, ran.stderr))
    found = [line for line in ran.stdout.splitlines() if line.rpartition(" ")[2].isdigit() and ":" not in line]
    assert found == ["full 5", "output read-only 5", "ledger read-only 5", "resumed 0", "ledger full 5"], ran
    assert "No space left on device" in ran.stderr
    assert "Read-only file system" in ran.stderr
    assert not (place / "other").exists()
    assert not (place / "other.ledger").exists()
    assert len(entries(cli)) == 1


def edited(place):
    with contextlib.closing(sqlite3.connect(place / "anamorph.ledger")) as ledger, ledger:
        ledger.execute("UPDATE chain SET payload = replace(payload, '\"epsilon\":9.0', '\"epsilon\":99.0')")


def cut(place):
    with contextlib.closing(sqlite3.connect(place / "anamorph.ledger")) as ledger, ledger:
        ledger.execute("DELETE FROM chain WHERE sequence = (SELECT max(sequence) FROM chain)")


DAMAGE = {
    "truncated": lambda place: os.truncate(place / "anamorph.ledger", 5000),
    "emptied": lambda place: os.truncate(place / "anamorph.ledger", 0),
    "edited": edited,
    "cut": cut,
    "missing": lambda place: (place / "anamorph.ledger").unlink(),
    "rolled back": lambda place: shutil.copy(place / "older", place / "anamorph.ledger"),
    "another ledger": lambda place: shutil.copy(place / "foreign", place / "anamorph.ledger"),
    "witness edited": lambda place: (place / "anamorph.ledger.witness").write_text("1 " + "0" * 64 + "\n"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_ledger_that_is_damaged(place, cli, name):
    for ledger in ("older", "foreign"):
        assert cli(f"ledger open people --epsilon 9 --delta 1e-6 --schema schema.yaml --ledger {ledger}").code == 0
    for suffix in ("", ".witness"):
        shutil.copy(place / f"older{suffix}", place / f"anamorph.ledger{suffix}")
    assert cli(fit()).code == 0
    DAMAGE[name](place)
    before = tree(place)
    for arguments in (fit("-o second"), fit("-o second --resume"), "ledger show", "ledger verify"):
        explained(cli(arguments), 6, "anamorph.ledger", "Restore the newest copy")
    assert tree(place) == before


def test_stored_answers_of_another_run(place, cli):
    killed(fit(QUICK), "(Run, 'store', False, 2)")
    with contextlib.closing(sqlite3.connect(place / "anamorph.ledger")) as ledger, ledger:
        ledger.execute("UPDATE answers SET body = zeroblob(length(body)) WHERE step = 1")
    explained(cli("ledger verify"), 6, "stored answer of step 1")
    explained(cli(fit(QUICK + " --resume")), 6, "stored answer of step 1")
    assert not (place / "release").exists()


@pytest.mark.parametrize(
    "settings",
    ["--set rate=100 --set steps=500", "--set start=100", "--set penalty=1e6", "--set rate=100 --set start=100"],
)
def test_a_projection_at_its_limits(place, cli, settings):
    """Whatever the parameters do to the projection, what was paid for can be read."""
    ran = cli(fit(f"{RAP} {settings}"))
    assert ran.code == 0
    header = json.loads((place / "release" / "release.json").read_text())
    assert ("degraded" in ran.err) == header["degraded"]
    assert cli("sample release -o rows.csv").code == 0


def test_a_loss_that_is_not_a_number(place, cli, monkeypatch):
    """The best table so far is kept, and the release says so."""
    from dataclasses import replace

    from anamorph.models.relaxed import RelaxedProjection

    projected = RelaxedProjection.fit
    monkeypatch.setattr(RelaxedProjection, "fit", lambda *a, **o: replace(projected(*a, **o), degraded=True))
    ran = cli(fit(QUICK))
    assert ran.code == 0
    assert "degraded" in ran.err
    assert json.loads((place / "release" / "release.json").read_text())["degraded"] is True
