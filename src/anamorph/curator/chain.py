"""The chain behind the ledger: durable, hash chained records, and what they say by replay.

`Chain` is the file and its witness, `Book` the state that replaying its records gives, `Story` one run of it.
The promises are those of the ledger, which alone decides what is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from anamorph.curator.budget import round_down, round_up
from anamorph.errors import CorruptionError, ParameterError, ResourceError

PATIENCE = 30.0
"""Seconds to wait for another process that holds the ledger."""

_APPLICATION = 0x414E414D  # marks our files among SQLite's
_GENESIS = "0" * 64
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


@dataclass(frozen=True)
class Account:
    """One dataset's line: `spent` is what its runs took, rounded up; `remaining` the rest, rounded down."""

    dataset: str
    relation: str
    schema: str
    epsilon: float
    delta: float
    total: float
    spent: float
    remaining: float


@dataclass(frozen=True)
class Entry:
    """One charge for one step of a run. A step that a crash wasted appears once for each charge."""

    run: str
    step: int
    kind: str
    rho: float
    what: str
    digest: str
    time: str


@dataclass
class Story:
    """What the chain says of one run. `attempt` is the record that began or last resumed it."""

    dataset: str
    terms: str
    rho: float
    attempt: int
    charged: Fraction = Fraction(0)  # each step once
    finished: bool = False
    release: str = ""  # the digest of what a finished run made
    requests: list[tuple[str, float, str]] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)  # step -> sha256 of the stored answer


class Book:
    """What the chain says, by replay."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.terms: dict[str, dict[str, Any]] = {}
        self.granted: dict[str, Fraction] = {}
        self.entries: dict[str, list[Entry]] = {}
        self.runs: dict[str, Story] = {}

    @property
    def head(self) -> str:
        return self.hashes[-1] if self.hashes else _GENESIS

    def account(self, dataset: str) -> Account | None:
        terms, granted = self.terms.get(checked_name(dataset)), self.granted.get(dataset, Fraction(0))
        if terms is None:
            return None
        fixed = (terms[key] for key in ("dataset", "relation", "schema", "epsilon", "delta", "rho"))
        left = Fraction(terms["rho"]) - granted
        return Account(*fixed, spent=round_up(granted), remaining=round_down(left))

    def affords(self, dataset: str, rho: float) -> bool:
        return self.granted[dataset] + Fraction(rho) <= Fraction(self.terms[dataset]["rho"])

    def unfinished(self, dataset: str, terms: str) -> str | None:
        """Returns the newest unfinished run of these terms."""
        wanted = (dataset, terms, False)
        runs = reversed(self.runs.items())
        return next((run for run, s in runs if (s.dataset, s.terms, s.finished) == wanted), None)

    def apply(self, sequence: int, payload: str, previous: str, link: str) -> None:
        """Adds one record; ValueError, KeyError or TypeError when it breaks the chain or a budget."""
        if (sequence, previous, link) != (len(self.hashes) + 1, self.head, _link(previous, payload)):
            raise ValueError("it does not follow the record before it")
        record = json.loads(payload)
        match record["record"]:
            case "open" | "raise":
                self.terms[record["dataset"]] = record
                self.granted.setdefault(record["dataset"], Fraction(0))
            case "begin":
                self._grant(record["dataset"], record["rho"])
                self.runs[record["run"]] = Story(record["dataset"], record["terms"], record["rho"], sequence)
            case "resume":
                self.runs[record["run"]].attempt = sequence
            case "charge":
                self._charge(self.runs[record["run"]], record)
            case "answer":
                self.runs[record["run"]].answers[record["step"]] = record["sha256"]
            case "finish":
                story = self.runs[record["run"]]
                story.finished, story.release = True, record["release"]
            case _:
                raise ValueError("its kind is unknown to this version")
        self.hashes.append(link)

    def _grant(self, dataset: str, rho: float) -> None:
        if not (rho > 0 and self.affords(dataset, rho)):
            raise ValueError("it overspends the account")
        self.granted[dataset] += Fraction(rho)

    def _charge(self, story: Story, record: dict[str, Any]) -> None:
        if record["step"] < len(story.requests):  # charged before and never answered: wasted
            self._grant(story.dataset, record["rho"])
        else:
            story.requests.append((record["kind"], record["rho"], record["digest"]))
            story.charged += Fraction(record["rho"])
        if story.charged > Fraction(story.rho):
            raise ValueError("it overspends the run")
        fields = (record[key] for key in ("run", "step", "kind", "rho", "what", "digest", "time"))
        self.entries.setdefault(story.dataset, []).append(Entry(*fields))


class Chain:
    """The file and its witness: durable, hash chained records, and the answers of unfinished runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.book = Book()
        self._witness = path.with_name(path.name + ".witness")
        self._lock = threading.RLock()

    def read(self) -> Book:
        """Returns the present state; touches nothing."""
        with self._lock, self._faults():
            if self._present():
                with self.transaction(write=False):
                    pass
            return self.book

    def verify(self) -> int:
        """Returns the number of records, after checking all records, stored answers and pages anew."""
        with self._lock, self._faults():
            self.read()
            self.book = Book()
            if not self._present():
                return 0
            with self.transaction(write=False) as (book, connection):
                if (state := connection.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                    raise self._corruption(f"SQLite finds it damaged ({state})")
                for run in (run for run, story in book.runs.items() if not story.finished):
                    for step in book.runs[run].answers:
                        self.answer(connection, run, step)
                return len(book.hashes)

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[tuple[Book, sqlite3.Connection]]:
        """Yields the present state, and a connection whose transaction is undone unless `append` commits it.

        A connection for each operation: nothing to share after a fork. A rollback journal (DELETE), not WAL:
        the ledger is one file, on network disks too. EXTRA: a commit is on the disk when it returns. A writer
        keeps its lock until it closes (EXCLUSIVE), so the witness is replaced before others can look.
        """
        address = f"{self.path.as_uri()}?mode={'rwc' if write else 'rw'}"
        options = {"uri": True, "timeout": PATIENCE, "isolation_level": None}
        with self._lock, self._faults():
            self._present()
            with closing(sqlite3.connect(address, **options)) as connection:
                connection.execute("PRAGMA journal_mode=DELETE")
                connection.execute("PRAGMA synchronous=EXTRA")
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                if write:  # not before: one that waits must hold nothing, or two wait for each other
                    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
                self._synchronise(connection)
                yield self.book, connection

    def _synchronise(self, connection: sqlite3.Connection) -> None:
        """Brings the state up to the file: what was known must still be there, what is new must follow."""
        book, known = self.book, len(self.book.hashes)
        query = "SELECT sequence, payload, previous, hash FROM chain WHERE sequence >= ? ORDER BY sequence"
        rows = connection.execute(query, (known,)).fetchall() if self._recognised(connection) else []
        try:
            if known and (not rows or rows.pop(0)[3] != book.head):
                raise ValueError("it is not the record that was there before")
            for row in rows:
                book.apply(*row)
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            self.book = Book()
            raise self._corruption(f"after record {len(book.hashes)}: {error}") from error
        seen = self._seen()
        if seen and book.hashes[seen[0] - 1 : seen[0]] != [seen[1]]:  # a witness behind the chain is a crash
            ends = f"it ends at record {len(book.hashes)}, its witness knows record {seen[0]}"
            raise self._corruption(f"{ends} of another history: it was rolled back, cut or replaced")

    def _recognised(self, connection: sqlite3.Connection) -> bool:
        """Returns whether the file is a ledger; False when empty, as a crash at its birth leaves it."""
        identity = connection.execute("PRAGMA application_id").fetchone()[0]
        objects = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (identity, objects) == (0, 0):
            return False
        if identity != _APPLICATION:
            raise self._corruption("it is a database, but not a ledger of anamorph")
        return True

    def append(self, connection: sqlite3.Connection, record: dict[str, Any]) -> None:
        """Commits the transaction with `record` at the end of the chain, durably; then replaces the witness.

        The new witness is on the disk before the commit: a full disk is found before anything is charged, and
        what is left to do after the commit is a rename.
        """
        if not self._recognised(connection):
            connection.execute(f"PRAGMA application_id={_APPLICATION}")
            connection.execute("CREATE TABLE chain (sequence INTEGER PRIMARY KEY, payload, previous, hash)")
            connection.execute("CREATE TABLE answers (run, step, body, PRIMARY KEY (run, step))")
        time = datetime.now(UTC).isoformat(timespec="seconds")
        sequence, previous = len(self.book.hashes) + 1, self.book.head
        payload = canonical(record | {"time": time})
        row = (sequence, payload, previous, _link(previous, payload))
        connection.execute("INSERT INTO chain VALUES (?, ?, ?, ?)", row)
        fresh = self._witness.with_name(self._witness.name + ".new")
        with fresh.open("wb") as file:
            file.write(f"{sequence} {row[3]}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        connection.execute("COMMIT")
        self.book.apply(*row)
        os.replace(fresh, self._witness)
        sync_directory(self.path.parent)

    def answer(self, connection: sqlite3.Connection, run: str, step: int) -> bytes:
        """Returns the stored answer of a step, checked against the chain."""
        query = "SELECT body FROM answers WHERE run = ? AND step = ?"
        body = (connection.execute(query, (run, step)).fetchone() or [None])[0]
        if not isinstance(body, bytes) or sha256(body) != self.book.runs[run].answers[step]:
            raise self._corruption(f"the stored answer of step {step} of run {run} is lost or was changed")
        return body

    def _present(self) -> bool:
        """Returns whether the file exists; CorruptionError when it did before."""
        seen = self._seen()  # first: a witness is born after its ledger
        present = self.path.exists()
        if not present and (seen or self.book.hashes):
            raise self._corruption("it is missing, but held records before")
        return present

    def _seen(self) -> tuple[int, str] | None:
        """Returns the sequence and hash that the witness holds; None without a witness."""
        try:
            content = self._witness.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if (match := re.fullmatch(rb"([1-9][0-9]{0,17}) ([0-9a-f]{64})\n", content)) is None:
            raise self._corruption("its witness is damaged")
        return int(match[1]), match[2].decode()

    def _corruption(self, what: str) -> CorruptionError:
        return CorruptionError(
            f"ledger {self.path}: {what}. Restore the newest copy of the ledger and its .witness together; "
            f"without one, take the budget of its datasets as spent"
        )

    def _resource(self, what: str) -> ResourceError:
        return ResourceError(
            f"ledger {self.path}: {what}. Mend the disk, the permission or the lock and try again; "
            f"--resume continues a run that was begun"
        )

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Tells damage to the file from trouble around it."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            what = "another process holds it" if code == sqlite3.SQLITE_BUSY else str(error)
            raise (self._corruption if code in _DAMAGE else self._resource)(what) from error
        except (OSError, OverflowError) as error:
            raise self._resource(str(error)) from error


def checked_name(dataset: str) -> str:
    """Returns `dataset`, a name that fits on one line."""
    if not 0 < len(dataset) <= 200 or {"Cc", "Cs", "Zl", "Zp"} & {unicodedata.category(c) for c in dataset}:
        raise ParameterError(f"dataset ({dataset!r:.80}) must be 1 to 200 characters, no control characters")
    return dataset


def canonical(value: Mapping[str, object]) -> str:
    """Returns `value` as JSON that is the same for equal values: sorted, ASCII, floats exact, no NaN."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"terms must be plain JSON ({error})") from error


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _link(previous: str, payload: str) -> str:
    return sha256((previous + payload).encode())


def sync_directory(directory: Path) -> None:
    """Waits until a directory's names are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
