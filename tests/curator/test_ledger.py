"""The ledger never overspends, never draws twice for one charge, survives kill -9, and sees damage."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anamorph.curator import chain as module
from anamorph.curator.budget import round_down, round_up
from anamorph.curator.ledger import Account, Ledger, Run
from anamorph.errors import AnamorphError, BudgetError, CorruptionError, ParameterError, ResourceError

TERMS = {"mechanism": "rap", "workload": "marginals:k=3", "epsilon": 1.0}


def opened(path: Path, rho: float = 1.0, dataset: str = "survey") -> Ledger:
    ledger = Ledger(path)
    ledger.open(dataset=dataset, relation="replace", schema="ab" * 32, epsilon=1.0, delta=1e-9, rho=rho)
    return ledger


def step(run: Run, rho: float, digest: str, answer: bytes = b"noisy") -> bytes | None:
    """Charges one step and stores its answer; returns the answer that was stored before, if any."""
    stored = run.charge(kind="measure", rho=rho, what="a marginal", digest=digest)
    if stored is None:
        run.store(answer)
    return stored


def script(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts `code` in a process of its own, after the imports that the scripts share."""
    shared = (
        "import json, os, random, resource, signal, sys, time\n"
        "from pathlib import Path\n"
        "from anamorph.curator import chain as module\n"
        "from anamorph.curator.ledger import Ledger\n"
        "from anamorph.errors import AnamorphError, BudgetError, ResourceError\n"
        f"TERMS = {TERMS!r}\n"
    )
    command = [sys.executable, "-c", shared + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = process.communicate(timeout=60)
    return process.returncode, output.strip() or errors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of durable writes are slow on a disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


@pytest.fixture
def used(path: Path) -> Path:
    """A ledger with one unfinished run of two answered steps, in an account of which half is left."""
    run = opened(path).begin("survey", terms=TERMS, rho=0.5)
    step(run, 0.25, "d0", b"first")
    step(run, 0.125, "d1", b"second")
    return path


class TestAccounts:
    def test_nothing_is_written_before_the_first_record(self, path):
        ledger = Ledger(path)
        assert ledger.account("survey") is None
        assert (ledger.accounts(), ledger.entries("survey"), ledger.verify()) == ((), (), 0)
        assert ledger.head == "0" * 64
        for refused in (
            lambda: ledger.begin("survey", terms=TERMS, rho=1.0),
            lambda: ledger.resume("survey", terms=TERMS),
            lambda: ledger.raise_total("survey", epsilon=1.0, delta=1e-9, rho=1.0),
        ):
            with pytest.raises(BudgetError, match="anamorph ledger open survey --epsilon E --delta D"):
                refused()
        assert list(path.parent.iterdir()) == []

    def test_open_again_returns_the_same_account(self, path):
        first = opened(path, 1.0)
        account = Account("survey", "replace", "ab" * 32, 1.0, 1e-9, total=1.0, spent=0.0, remaining=1.0)
        assert first.account("survey") == account
        head = first.head
        assert opened(path, 7.0).account("survey") == account  # the total only changes openly
        assert first.head == head
        json.dumps(asdict(account), allow_nan=False)

    @pytest.mark.parametrize(
        ("change", "word"), [({"relation": "add-remove"}, "relation"), ({"schema": "cd" * 32}, "schema")]
    )
    def test_open_for_another_relation_or_schema_is_refused(self, path, change, word):
        opened(path)
        terms = {"dataset": "survey", "relation": "replace", "schema": "ab" * 32}
        with pytest.raises(BudgetError, match=f"opened for another {word}.*another dataset name"):
            Ledger(path).open(**(terms | change), epsilon=1.0, delta=1e-9, rho=1.0)

    def test_totals_are_raised_openly_and_never_lowered(self, path):
        ledger = opened(path, 1.0)
        ledger.begin("survey", terms=TERMS, rho=1.0)
        for rho in (1.0, 0.5):
            with pytest.raises(ParameterError, match="must be above the present total"):
                ledger.raise_total("survey", epsilon=1.0, delta=1e-9, rho=rho)
        account = ledger.raise_total("survey", epsilon=2.0, delta=1e-8, rho=3.0)
        assert (account.epsilon, account.delta, account.total, account.remaining) == (2.0, 1e-8, 3.0, 2.0)
        assert Ledger(path).account("survey") == account
        assert ledger.verify() == 3

    @pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\x00", "a\x1b[31m", "a\u2028b", "a\ud800"])
    def test_names_that_cannot_be_shown_are_refused(self, path, name):
        with pytest.raises(ParameterError, match="dataset"):
            opened(path, dataset=name)
        with pytest.raises(ParameterError, match="dataset"):
            Ledger(path).account(name)
        assert not path.exists()

    def test_any_other_name_is_only_a_name(self, path):
        names = ['a"; DROP TABLE chain; --', "it's", "`x`", "家族 👨\u200d👩\u200d👧", "%s ? :a", "x" * 200]
        for name in names:
            ledger = opened(path, dataset=name)
        assert [account.dataset for account in ledger.accounts()] == names
        assert ledger.verify() == len(names)

    @pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
    def test_numbers_outside_their_rule(self, path, value):
        ledger = opened(path)
        run = ledger.begin("survey", terms=TERMS, rho=0.5)
        with pytest.raises(ParameterError, match="rho"):
            ledger.begin("survey", terms=TERMS, rho=value)
        with pytest.raises(ParameterError, match="rho"):
            run.charge(kind="measure", rho=value, what="", digest="")
        with pytest.raises(ParameterError, match="epsilon"):
            ledger.raise_total("survey", epsilon=value, delta=1e-9, rho=2.0)
        with pytest.raises(ParameterError, match="delta"):
            ledger.raise_total("survey", epsilon=2.0, delta=1.0 if value > 1 else value, rho=2.0)

    def test_other_parameters_outside_their_rule(self, path):
        ledger = opened(path)
        with pytest.raises(ParameterError, match="relation"):
            ledger.open(dataset="x", relation="swap", schema="", epsilon=1.0, delta=1e-9, rho=1.0)
        for terms in ({"x": math.nan}, {"x": object()}, {"x": {1, 2}}):
            with pytest.raises(ParameterError, match="plain JSON"):
                ledger.begin("survey", terms=terms, rho=0.5)


class TestRuns:
    def test_the_second_identical_run_is_refused_and_told_what_to_do(self, path):
        ledger = opened(path, 1.0)
        run = ledger.begin("survey", terms=TERMS, rho=0.75)
        with pytest.raises(BudgetError) as refusal:
            Ledger(path).begin("survey", terms=TERMS, rho=0.75)
        for word in ("'survey'", "0.75", "0.25 of 1.0", "anamorph ledger open survey", "--resume"):
            assert word in str(refusal.value)
        step(run, 0.75, "d")
        run.finish("release")
        with pytest.raises(BudgetError) as refusal:
            ledger.begin("survey", terms=TERMS, rho=0.75)
        assert "--resume" not in str(refusal.value)
        assert refusal.value.exit_code == 4

    def test_a_run_never_exceeds_its_budget(self, path):
        ledger = opened(path, 8.0)
        run = ledger.begin("survey", terms=TERMS, rho=1.0)
        step(run, 0.75, "d")
        with pytest.raises(BudgetError, match=r"0\.25 of 1\.0"):
            run.charge(kind="select", rho=math.nextafter(0.25, 1), what="", digest="")
        step(run, 0.25, "e")
        assert (run.spent, run.remaining, run.rho) == (1.0, 0.0, 1.0)
        with pytest.raises(BudgetError):
            run.charge(kind="select", rho=5e-324, what="", digest="")

    def test_entries_tell_every_charge(self, used):
        first, second = Ledger(used).entries("survey")
        assert (first.step, first.kind, first.rho, first.what, first.digest) == (
            0,
            "measure",
            0.25,
            "a marginal",
            "d0",
        )
        assert (second.step, second.run) == (1, first.run)
        assert len(first.run) == 16
        assert first.time.endswith("+00:00")

    def test_sums_are_exact(self, memory):
        total = 0.1
        left, shares = Fraction(total), []
        for parts in range(1000, 0, -1):
            shares.append(round_down(left / parts))
            left -= Fraction(shares[-1])
        assert left >= 0
        run = opened(memory / "ledger.db", total).begin("survey", terms=TERMS, rho=total)
        for number, share in enumerate(shares):
            step(run, share, str(number))
        with pytest.raises(BudgetError):
            run.charge(kind="measure", rho=shares[0], what="", digest="")
        assert Fraction(run.spent) >= sum(map(Fraction, shares))
        assert Fraction(run.remaining) <= left

    def test_floats_that_only_seem_to_fit_are_refused(self, path):
        ledger = opened(path, 1.0)
        for _ in range(9):
            ledger.begin("survey", terms=TERMS, rho=0.1)
        assert 0.9 + 0.1 == sum([0.1] * 5) * 2 == 1.0
        assert 10 * Fraction(0.1) > 1
        with pytest.raises(BudgetError):
            ledger.begin("survey", terms=TERMS, rho=0.1)
        account = ledger.account("survey")
        assert account is not None
        ledger.begin("survey", terms=TERMS, rho=account.remaining)

    @given(st.fractions(-10, 10))
    def test_rounding_is_to_the_safe_side_and_tight(self, value):
        below, above = round_down(value), round_up(value)
        assert Fraction(below) <= value <= Fraction(above)
        assert below == above or math.nextafter(below, math.inf) == above

    def test_check_refuses_in_the_words_of_begin(self, path):
        ledger = opened(path, 1.0)
        run = ledger.begin("survey", terms=TERMS, rho=0.75)
        for terms in (TERMS, TERMS | {"epsilon": 2.0}):
            refusals = []
            for act in (Ledger(path).check, Ledger(path).begin):
                with pytest.raises(BudgetError) as refusal:
                    act("survey", terms=terms, rho=0.75)
                refusals.append(str(refusal.value))
            assert refusals[0] == refusals[1]
            assert ("--resume" in refusals[0]) == (terms == TERMS)
        run.finish("release")
        with pytest.raises(BudgetError) as refusal:
            ledger.check("survey", terms=TERMS, rho=math.nextafter(0.25, 1))
        assert "--resume" not in str(refusal.value)

    def test_check_writes_nothing_and_takes_nothing(self, path):
        Ledger(path).check("survey", terms=TERMS, rho=1.0)
        assert list(path.parent.iterdir()) == []
        ledger = opened(path, 1.0)
        before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        for _ in range(2):
            ledger.check("survey", terms=TERMS, rho=1.0)
            ledger.check("another", terms=TERMS, rho=1e9)
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
        ledger.begin("survey", terms=TERMS, rho=1.0)

    def test_check_refuses_the_parameters_that_begin_refuses(self, path):
        for ledger in (Ledger(path), opened(path)):
            with pytest.raises(ParameterError, match="rho"):
                ledger.check("survey", terms=TERMS, rho=0.0)
            with pytest.raises(ParameterError, match="plain JSON"):
                ledger.check("survey", terms={"x": math.nan}, rho=0.5)
            with pytest.raises(ParameterError, match="dataset"):
                ledger.check("", terms=TERMS, rho=0.5)

    def test_releases_are_those_of_finished_runs(self, path):
        assert Ledger(path).releases() == frozenset()
        ledger = opened(path, 4.0)
        opened(path, 4.0, dataset="other")
        for dataset, digest in (("survey", "aa" * 32), ("survey", "bb" * 32), ("other", "aa" * 32)):
            run = ledger.begin(dataset, terms=TERMS, rho=1.0)
            step(run, 1.0, "d")
            assert digest not in ledger.releases() or dataset == "other"
            run.finish(digest)
        ledger.begin("survey", terms=TERMS, rho=1.0)
        assert ledger.releases() == Ledger(path).releases() == {"aa" * 32, "bb" * 32}

    def test_store_belongs_to_a_charge(self, path):
        run = opened(path).begin("survey", terms=TERMS, rho=1.0)
        with pytest.raises(ParameterError, match="must follow a charge"):
            run.store(b"")
        step(run, 0.5, "d")
        with pytest.raises(ParameterError, match="must follow a charge"):
            run.store(b"again")

    def test_finish_drops_the_answers_and_ends_the_run(self, used):
        ledger = Ledger(used)
        run = ledger.resume("survey", terms=TERMS)
        run.finish("ef" * 32)
        with sqlite3.connect(used) as connection:
            assert connection.execute("SELECT count(*) FROM answers").fetchone() == (0,)
        connection.close()
        with pytest.raises(ParameterError, match="no unfinished run"):
            ledger.resume("survey", terms=TERMS)
        for act in (lambda: step(run, 0.1, "d"), lambda: run.finish("again")):
            with pytest.raises(BudgetError, match="finished"):
                act()
        assert ledger.account("survey").remaining == 0.5  # what the run did not use is not given back
        assert Ledger(used).verify() == 7 + 1


class TestResume:
    def test_stored_answers_come_back_and_the_numbers_are_the_same(self, used):
        run = Ledger(used).resume("survey", terms=dict(reversed(TERMS.items())))
        assert (run.spent, run.remaining) == (0.0, 0.5)
        assert step(run, 0.25, "d0") == b"first"
        assert (run.spent, run.remaining) == (0.25, 0.25)
        assert step(run, 0.125, "d1") == b"second"
        assert step(run, 0.125, "d2") is None
        assert (run.spent, run.remaining) == (0.5, 0.0)
        assert Ledger(used).account("survey").spent == 0.5
        assert len(Ledger(used).entries("survey")) == 3

    @pytest.mark.parametrize("change", [{"kind": "select"}, {"rho": 0.2}, {"digest": "other"}])
    def test_asking_something_else_is_refused(self, used, change):
        run = Ledger(used).resume("survey", terms=TERMS)
        with pytest.raises(CorruptionError, match="another request"):
            run.charge(**({"kind": "measure", "rho": 0.25, "what": "", "digest": "d0"} | change))

    def test_other_terms_are_another_run(self, used):
        with pytest.raises(ParameterError, match="no unfinished run"):
            Ledger(used).resume("survey", terms=TERMS | {"epsilon": 2.0})

    def test_the_newest_run_is_resumed(self, used):
        newest = Ledger(used).begin("survey", terms=TERMS, rho=0.25)
        assert Ledger(used).resume("survey", terms=TERMS).identifier == newest.identifier

    def test_a_charge_without_an_answer_is_charged_again(self, path):
        run = opened(path, 1.0).begin("survey", terms=TERMS, rho=0.5)
        assert run.charge(kind="measure", rho=0.5, what="", digest="d") is None
        ledger = Ledger(path)
        again = ledger.resume("survey", terms=TERMS)
        assert again.charge(kind="measure", rho=0.5, what="", digest="d") is None
        again.store(b"x")
        assert (again.spent, again.remaining) == (0.5, 0.0)
        assert [(entry.step, entry.rho) for entry in ledger.entries("survey")] == [(0, 0.5), (0, 0.5)]
        assert (ledger.account("survey").spent, ledger.account("survey").remaining) == (1.0, 0.0)

    def test_a_wasted_charge_that_the_account_cannot_bear(self, path):
        run = opened(path, 0.5).begin("survey", terms=TERMS, rho=0.5)
        run.charge(kind="measure", rho=0.25, what="", digest="d")
        ledger = Ledger(path)
        again = ledger.resume("survey", terms=TERMS)
        with pytest.raises(BudgetError, match=r"no answer was stored.*ledger open.*--resume"):
            again.charge(kind="measure", rho=0.25, what="", digest="d")
        ledger.raise_total("survey", epsilon=2.0, delta=1e-9, rho=0.75)
        assert step(again, 0.25, "d") is None
        assert step(again, 0.25, "e") is None

    def test_whoever_resumes_takes_the_run_over(self, path):
        old = opened(path, 2.0).begin("survey", terms=TERMS, rho=1.0)
        old.charge(kind="measure", rho=0.5, what="", digest="d")
        new = Ledger(path).resume("survey", terms=TERMS)
        for act in (lambda: old.store(b"old"), lambda: step(old, 0.5, "d"), lambda: old.finish("f")):
            with pytest.raises(ResourceError, match="resumed by another process"):
                act()
        assert step(new, 0.5, "d", b"new") is None


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


class TestDamage:
    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE chain SET payload = replace(payload, '0.25', '0.01') WHERE payload LIKE '%\"charge\"%'",
            "UPDATE chain SET hash = previous WHERE sequence = 2",
            "UPDATE chain SET payload = CAST(payload AS BLOB)",
            "UPDATE chain SET payload = 7 WHERE sequence = 1",
            "UPDATE chain SET sequence = sequence + 1 WHERE sequence = (SELECT max(sequence) FROM chain)",
            "DELETE FROM chain WHERE sequence = (SELECT max(sequence) FROM chain)",
            "DELETE FROM chain WHERE sequence = 3",
            "DELETE FROM chain WHERE sequence = 1",
            "DELETE FROM chain",
            "DROP TABLE chain",
            "PRAGMA application_id = 7",
        ],
    )
    def test_edits_are_seen(self, used, statement):
        live = Ledger(used)
        edit(used, statement)
        with pytest.raises(CorruptionError, match=r"Restore the newest copy"):
            Ledger(used)
        with pytest.raises(CorruptionError):
            live.verify()
        with pytest.raises(CorruptionError):
            live.verify()

    def test_a_rewritten_chain_is_seen_by_its_witness(self, used):
        other = used.with_name("other.db")
        run = opened(other, 100.0).begin("survey", terms=TERMS, rho=0.5)
        for number in range(9):
            step(run, 0.01, str(number))
        shutil.copy(other, used)
        with pytest.raises(CorruptionError, match="rolled back, cut or replaced"):
            Ledger(used)

    def test_a_forged_record_that_overspends_is_seen_in_replay(self, used):
        records = Ledger(used)
        record = {"record": "begin", "dataset": "survey", "run": "f" * 16, "terms": "{}", "rho": 0.75}
        payload = json.dumps(record)
        link = hashlib.sha256((records.head + payload).encode()).hexdigest()
        edit(
            used,
            f"INSERT INTO chain VALUES ({records.verify() + 1}, '{payload}', '{records.head}', '{link}')",
        )
        with pytest.raises(CorruptionError, match="overspends"):
            records.account("survey")

    def test_a_rolled_back_copy_is_seen(self, used):
        copy = used.with_name("copy.db")
        shutil.copy(used, copy)
        live = Ledger(used)
        live.begin("survey", terms=TERMS, rho=0.25)
        shutil.copy(copy, used)
        for use in (lambda: Ledger(used), lambda: live.account("survey")):
            with pytest.raises(CorruptionError):
                use()

    def test_a_live_ledger_sees_that_both_files_were_rolled_back(self, used):
        folder = used.with_name("copy")
        folder.mkdir()
        for file in used.parent.glob("ledger.db*"):
            shutil.copy(file, folder)
        live = Ledger(used)
        live.begin("survey", terms=TERMS, rho=0.25)
        for file in folder.iterdir():
            shutil.copy(file, used.parent)
        Ledger(used).begin("survey", terms=TERMS, rho=0.125)
        with pytest.raises(CorruptionError, match="not the record that was there"):
            live.begin("survey", terms=TERMS, rho=0.25)

    def test_a_missing_ledger_is_seen_and_not_replaced(self, used):
        live = Ledger(used)
        used.unlink()
        for use in (lambda: Ledger(used), lambda: live.begin("survey", terms=TERMS, rho=0.1), live.verify):
            with pytest.raises(CorruptionError, match="missing"):
                use()
        assert not used.exists()

    def test_a_live_ledger_whose_two_files_vanish_is_seen(self, used):
        live = Ledger(used)
        used.unlink()
        used.with_name("ledger.db.witness").unlink()
        with pytest.raises(CorruptionError, match="missing"):
            live.begin("survey", terms=TERMS, rho=0.1)

    @pytest.mark.parametrize("content", [b"", b"7", b"1 abc\n", b"\xff" * 90])
    def test_a_damaged_witness_is_seen(self, used, content):
        used.with_name("ledger.db.witness").write_bytes(content)
        with pytest.raises(CorruptionError, match="witness is damaged"):
            Ledger(used)

    def test_a_witness_behind_or_absent_is_brought_up(self, used):
        witness = used.with_name("ledger.db.witness")
        for content in ("1 %s\n", None):
            connection = sqlite3.connect(used)
            link = connection.execute("SELECT hash FROM chain WHERE sequence = 1").fetchone()[0]
            connection.close()
            witness.write_text(content % link) if content else witness.unlink()
            ledger = Ledger(used)
            ledger.begin("survey", terms=TERMS, rho=0.125)
            assert witness.read_text() == f"{ledger.verify()} {ledger.head}\n"

    @pytest.mark.parametrize(
        "statements",
        [
            ["UPDATE answers SET body = 'first'"],
            ["UPDATE answers SET body = x'00'"],
            ["DELETE FROM answers"],
            ["UPDATE answers SET step = step + 2", "UPDATE answers SET step = 3 - step"],
        ],
    )
    def test_changed_lost_or_swapped_answers_are_seen(self, used, statements):
        edit(used, *statements)
        ledger = Ledger(used)
        with pytest.raises(CorruptionError, match="stored answer"):
            ledger.verify()
        run = ledger.resume("survey", terms=TERMS)
        with pytest.raises(CorruptionError, match="stored answer"):
            run.charge(kind="measure", rho=0.25, what="", digest="d0")

    def test_a_file_cut_anywhere_is_seen(self, used):
        whole = used.read_bytes()
        for length in [*range(0, 120, 7), *range(512, len(whole), 509)]:
            used.write_bytes(whole[:length])
            with pytest.raises(CorruptionError):
                Ledger(used).verify()

    def test_garbage_and_foreign_databases(self, path):
        path.write_bytes(os.urandom(5000))
        with pytest.raises(CorruptionError):
            Ledger(path)
        path.unlink()
        edit(path, "CREATE TABLE chain (sequence, payload, previous, hash)")
        before = path.read_bytes()
        with pytest.raises(CorruptionError, match="not a ledger"):
            Ledger(path)
        assert path.read_bytes() == before

    def test_an_empty_file_is_a_ledger_only_without_a_witness(self, path, used):
        used.write_bytes(b"")
        with pytest.raises(CorruptionError):
            Ledger(used)
        fresh = path.with_name("fresh.db")
        fresh.touch()  # what a crash at the birth of a ledger leaves
        assert opened(fresh).verify() == 1

    def test_every_flipped_byte_is_seen_or_harmless(self, used):
        whole, account = used.read_bytes(), Ledger(used).account("survey")
        for position in range(0, len(whole), 97):
            used.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
            try:
                ledger = Ledger(used)
                assert ledger.verify() == 6
                assert ledger.account("survey") == account
            except (CorruptionError, ResourceError):
                pass


class TestResources:
    def test_a_directory_that_cannot_be(self, tmp_path):
        (tmp_path / "file").touch()
        for place in (tmp_path / "file" / "ledger.db", tmp_path / "absent" / "ledger.db", tmp_path):
            with pytest.raises(ResourceError, match=r"Mend the disk"):
                opened(place)

    def test_a_read_only_directory_and_file(self, used):
        """Real permissions: root lays its privilege down in the process that tries."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in used.parent.glob("ledger.db*"):
                shutil.copy(file, folder)
                (folder / file.name).chmod(0o444)
            folder.chmod(0o555)
            code = """
if os.getuid() == 0: os.setuid(65534)
folder = Path(sys.argv[1])
ledger = Ledger(folder / "ledger.db")
seen = [ledger.verify(), ledger.account("survey").remaining]
def code(act):
    try: act()
    except AnamorphError as error: return error.exit_code
terms = dict(relation="replace", schema="", epsilon=1.0, delta=1e-9, rho=1.0)
seen += [code(lambda: ledger.begin("survey", terms=TERMS, rho=0.1))]
seen += [code(lambda: ledger.open(dataset="new", **terms))]
seen += [code(lambda: Ledger(folder / "new.db").open(dataset="new", **terms))]
print(json.dumps(seen))
"""
            assert outcome(script(code, folder)) == (0, "[6, 0.5, 5, 5, 5]")
            folder.chmod(0o755)

    def test_a_full_disk_as_sqlite_sees_it(self, used, monkeypatch):
        """The page limit of SQLite stands for the full disk: the same error code."""
        connect = sqlite3.connect

        def small(*arguments, **options):
            connection = connect(*arguments, **options)
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages}")
            return connection

        run = Ledger(used).resume("survey", terms=TERMS)
        step(run, 0.25, "d0")
        step(run, 0.125, "d1")
        run.charge(kind="measure", rho=0.0625, what="", digest="d2")
        before = Ledger(used).verify()
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", small)
            with pytest.raises(ResourceError, match="full"):
                run.store(bytes(100_000))
        assert Ledger(used).verify() == before
        run.store(bytes(100_000))  # room again: the same answer, the same charge

    def test_a_disk_that_refuses_every_further_byte(self, used):
        """A real refusal of the kernel (file size limit), at each size: charged or not, never broken."""
        code = """
path = Path(sys.argv[1])
run = Ledger(path).resume("survey", terms=TERMS)
run.charge(kind="measure", rho=0.25, what="", digest="d0")
run.charge(kind="measure", rho=0.125, what="", digest="d1")
refused = 0
for limit in [0, 50, 100, 600, 4000, 9000, *range(12000, 70000, 4096)]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        run.charge(kind="measure", rho=1e-3, what="w" * 9000, digest="d2")
        run.store(b"x" * 20000)
        break
    except ResourceError:
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Ledger(path).verify()
print(refused, Ledger(path).verify() > 7)
"""
        status, output = outcome(script(code, used))
        assert status == 0, output
        refused, grown = output.split()
        assert int(refused) >= 5
        assert grown == "True"

    def test_a_witness_that_cannot_be_written_is_found_before_the_charge(self, used, monkeypatch):
        run = Ledger(used).resume("survey", terms=TERMS)
        before = Ledger(used).verify()

        def full(_descriptor):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", full)
            with pytest.raises(ResourceError, match="No space left"):
                Ledger(used).begin("survey", terms=TERMS, rho=0.25)
        assert Ledger(used).verify() == before
        assert step(run, 0.25, "d0") == b"first"

    def test_store_can_be_tried_again_after_a_failure_behind_its_commit(self, path, monkeypatch):
        run = opened(path).begin("survey", terms=TERMS, rho=1.0)
        run.charge(kind="measure", rho=0.5, what="", digest="d")

        def broken(_source, _target):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "replace", broken)
            with pytest.raises(ResourceError, match="Input/output"):
                run.store(b"x")
        with pytest.raises(CorruptionError):
            run.store(b"another")
        run.store(b"x")
        assert step(run, 0.5, "e") is None
        assert step(Ledger(path).resume("survey", terms=TERMS), 0.5, "d") == b"x"

    def test_a_lock_that_is_not_released(self, used, monkeypatch):
        monkeypatch.setattr(module, "PATIENCE", 0.05)
        ledger = Ledger(used)
        holder = sqlite3.connect(used, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        for use in (lambda: ledger.begin("survey", terms=TERMS, rho=0.1), lambda: ledger.account("survey")):
            with pytest.raises(ResourceError, match="another process holds it"):
                use()
        holder.close()
        ledger.begin("survey", terms=TERMS, rho=0.1)

    def test_nobody_reads_between_commit_and_witness(self, used, monkeypatch):
        replace, seen = os.replace, []

        def watched(source, target):
            other = sqlite3.connect(used, timeout=0)
            with closing(other), pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("SELECT count(*) FROM chain")
            seen.append(target)
            replace(source, target)

        monkeypatch.setattr(module.os, "replace", watched)
        Ledger(used).begin("survey", terms=TERMS, rho=0.1)
        assert len(seen) == 1


class TestConcurrency:
    def test_processes_never_overspend(self, path):
        """Four processes begin runs of one tenth of a third, and charge them, until they are refused."""
        total, rho = 3.3, 0.1
        opened(path, total)
        code = """
ledger, granted = Ledger(Path(sys.argv[1])), 0
try:
    while True:
        run = ledger.begin("survey", terms=TERMS | {"process": sys.argv[2]}, rho=0.1)
        granted += 1
        for part in range(4):
            run.charge(kind="measure", rho=0.025, what="", digest=str(part))
            run.store(os.urandom(50))
        run.finish("r")
except BudgetError:
    print(granted)
"""
        results = [outcome(process) for process in [script(code, path, number) for number in range(4)]]
        assert [status for status, _ in results] == [0] * 4, results
        runs = sum(int(output) for _, output in results)
        assert runs == Fraction(total) // Fraction(rho)
        ledger = Ledger(path)
        assert ledger.verify() == 1 + runs * 10
        assert ledger.account("survey").remaining < rho
        assert len(ledger.entries("survey")) == 4 * runs

    def test_threads_that_share_one_ledger_never_overspend(self, path):
        ledger, granted = opened(path, 1.0), []

        def hammer():
            try:
                while True:
                    granted.append(ledger.begin("survey", terms=TERMS, rho=1 / 32).identifier)
                    assert ledger.accounts()
            except BudgetError:
                pass

        threads = [threading.Thread(target=hammer) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(granted)) == 32
        assert ledger.account("survey").remaining == 0.0


CRASH = """
path, point = Path(sys.argv[1]), sys.argv[2]
def die(*_arguments): os.kill(os.getpid(), signal.SIGKILL)
run = Ledger(path).begin("survey", terms=TERMS, rho=0.5)
run.charge(kind="measure", rho=0.25, what="", digest="d0")
run.store(b"first")
if point == "before commit": module.os.fsync = die
if point == "before witness": module.os.replace = die
run.charge(kind="measure", rho=0.25, what="", digest="d1")
if point == "before store": die()
if point == "in store": module.os.fsync = die
if point == "after store": module.os.replace = die
run.store(b"second")
"""


class TestKill:
    @pytest.mark.parametrize(
        ("point", "charges", "answer", "behind"),
        [
            ("before commit", 2, None, False),  # not charged: charged once by the resumed run
            ("before witness", 3, None, True),  # charged, wasted
            ("before store", 3, None, False),
            ("in store", 3, None, False),
            ("after store", 2, b"second", True),  # answered: never drawn again
        ],
    )
    def test_killed_at_a_chosen_point(self, path, point, charges, answer, behind):
        opened(path, 1.0)
        assert outcome(script(CRASH, path, point))[0] == -signal.SIGKILL
        ledger = Ledger(path)
        witness = path.with_name("ledger.db.witness")
        assert (witness.read_text() != f"{ledger.verify()} {ledger.head}\n") == behind
        run = ledger.resume("survey", terms=TERMS)
        assert witness.read_text() == f"{ledger.verify()} {ledger.head}\n"
        assert step(run, 0.25, "d0") == b"first"
        assert step(run, 0.25, "d1") == answer
        run.finish("release")
        assert len(ledger.entries("survey")) == charges
        assert ledger.account("survey").spent == 0.5 + 0.25 * (charges - 2)

    def test_killed_at_random_instants(self, path):
        """Children resume one run and are killed, again and again; the parent keeps what they really drew.

        Each draw is noted before it is stored. No step that was answered is drawn again, and there are never
        more draws than charges.
        """
        opened(path, 1e6)
        code = """
path, draws = Path(sys.argv[1]), Path(sys.argv[2])
Ledger(path).begin("survey", terms=TERMS, rho=1000.0)
def child(signs):
    run = Ledger(path).resume("survey", terms=TERMS)
    for number in range(1000):
        if run.charge(kind="measure", rho=1.0, what="", digest=str(number)) is None:
            os.write(signs, b"charged")
            answer = os.urandom(8)
            with draws.open("a") as file: file.write(f"{number} {answer.hex()}\\n")
            run.store(answer)
            with draws.open("a") as file: file.write(f"{number} stored\\n")
kills, until = 0, time.monotonic() + 8
while kills < 120 and time.monotonic() < until:
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try: child(writer)
        finally: os._exit(1)
    os.close(writer)
    if kills % 4: os.read(reader, 7)  # three in four get as far as a charge, however busy the machine is
    time.sleep(random.uniform(0, 0.02))
    os.kill(process, signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    os.close(reader)
    kills += 1
    Ledger(path).verify()
print(kills)
"""
        draws = path.with_name("draws")
        status, output = outcome(script(code, path, draws))
        assert status == 0, output
        lines = [line.split() for line in draws.read_text().splitlines()]
        done: set[str] = set()
        for number, event in lines:
            if event == "stored":
                done.add(number)
            else:
                assert number not in done, "drawn again after its answer was stored"
        ledger = Ledger(path)
        drawn = sum(event != "stored" for _, event in lines)
        entries = ledger.entries("survey")
        steps = len({entry.step for entry in entries})
        assert drawn <= len(entries)
        assert len(entries) >= int(output) // 2 > 2
        assert ledger.account("survey").spent == 1000.0 + len(entries) - steps

    def test_killed_while_others_write(self, path):
        """Four processes write while one of them at a time is killed; the survivors never see damage."""
        opened(path, 1e9)
        code = """
path = Path(sys.argv[1])
def child():
    try:
        while True: Ledger(path).begin("survey", terms=TERMS, rho=1.0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
def start():
    process = os.fork()
    if process == 0: child()
    return process
children = [start() for _ in range(4)]
for turn in range(40):
    time.sleep(random.uniform(0.01, 0.1))
    os.kill(children[turn % 4], signal.SIGKILL)
    assert os.waitpid(children[turn % 4], 0)[1] == signal.SIGKILL
    children[turn % 4] = start()
for process in children: os.kill(process, signal.SIGKILL)
ledger = Ledger(path)
print(ledger.verify() - 1 - int(ledger.account("survey").spent))
"""
        assert outcome(script(code, path)) == (0, "0")


class Machine(RuleBasedStateMachine):
    """The ledger against a model: a total, and for the newest run its budget, its steps and their answers."""

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.ledger = opened(self.path, 8.0)
        self.total, self.spent, self.charges, self.answered, self.pending = 8, 0, 0, [], None
        self.run: Run | None = None

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(rho=st.integers(1, 5))
    def begin(self, rho):
        if self.spent + rho > self.total:
            with pytest.raises(BudgetError):
                self.ledger.begin("survey", terms=TERMS, rho=rho)
            return
        self.run = self.ledger.begin("survey", terms=TERMS, rho=rho)
        self.spent, self.rho, self.step, self.answered, self.pending = self.spent + rho, rho, 0, [], None

    @precondition(lambda self: self.run)
    @rule(rho=st.integers(1, 2))
    def charge(self, rho):
        if self.step < len(self.answered):
            rho, answer = self.answered[self.step]
            assert self.run.charge(kind="k", rho=rho, what="", digest=str(self.step)) == answer
            self.step += 1
            return
        wasted = self.pending is not None
        rho = self.pending if wasted else rho
        used = sum(cost for cost, _ in self.answered)
        fits = self.spent + rho <= self.total if wasted else used + rho <= self.rho
        if not fits:
            with pytest.raises(BudgetError):
                self.run.charge(kind="k", rho=rho, what="", digest=str(self.step))
            return
        assert self.run.charge(kind="k", rho=rho, what="", digest=str(self.step)) is None
        self.spent, self.charges, self.pending = self.spent + rho * wasted, self.charges + 1, rho
        self.storable = True

    @precondition(lambda self: self.run and self.pending and self.storable)
    @rule(answer=st.binary(max_size=4))
    def store(self, answer):
        self.run.store(answer)
        self.answered.append((self.pending, answer))
        self.step, self.pending = self.step + 1, None

    @precondition(lambda self: self.run)
    @rule()
    def resume(self):
        self.ledger = Ledger(self.path)
        self.run = self.ledger.resume("survey", terms=TERMS)
        self.step, self.storable = 0, False

    @rule()
    def raise_total(self):
        self.total += 1
        self.ledger.raise_total("survey", epsilon=1.0, delta=1e-9, rho=self.total)

    @invariant()
    def agrees(self):
        account = Ledger(self.path).account("survey")
        assert account is not None
        assert (account.spent, account.remaining) == (self.spent, self.total - self.spent)
        assert len(self.ledger.entries("survey")) == self.charges


TestModel = Machine.TestCase
TestModel.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_every_refusal_is_of_the_tree():
    codes = {BudgetError: 4, ResourceError: 5, CorruptionError: 6, ParameterError: 2}
    assert all(issubclass(kind, AnamorphError) and kind.exit_code == code for kind, code in codes.items())
