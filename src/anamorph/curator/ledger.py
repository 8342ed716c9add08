"""The persistent ledger: one dataset, one budget, every spend. The one mutable object of the house.

1. *Charge first, then look; no refunds.* A run's whole budget is taken from the account when the run begins:
   runs cannot collide later, and a crashed run is resumed within its own budget. Sums are exact (fractions of
   floats): the runs of an account never exceed its total, the steps of a run never exceed its budget.
2. *Never draw twice for one charge.* The noisy answer of a step is on disk before it is used; a resumed run
   gets it back. A step that was charged but not answered is wasted, and charged to the account once more.
3. *Kill at any instant.* Every change is one record in one durable transaction. Whoever resumes a run takes
   it over: an older process that still holds it is refused.
4. *Damage is seen.* Records form one hash chain, and all totals come from replaying it. The sibling file
   ``<ledger>.witness`` names the last record, so a ledger that was rolled back, cut or lost is noticed.
   Whoever rewrites or deletes both files is not: keep them where only the owner of the data can write.

The file holds public names and requests, and the noisy answers of unfinished runs; nothing private.
"""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from anamorph.curator.budget import round_down, round_up
from anamorph.curator.chain import Account, Book, Chain, Entry, Story, canonical, checked_name, sha256
from anamorph.errors import BudgetError, CorruptionError, ParameterError, ResourceError

__all__ = ["Account", "Entry", "Ledger", "Run"]


class Ledger:
    """The ledger at `path`. Nothing is written before the first record; each use checks chain and witness.

    Raises:
        CorruptionError: not a ledger, or damaged, edited, rolled back or lost.
        ResourceError: the disk, a permission or another process stands in the way; nothing was drawn.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path).absolute()
        self._chain = Chain(self.path)
        self._chain.read()

    @property
    def head(self) -> str:
        """The hash of the last record; zeros for an empty ledger."""
        return self._chain.read().head

    def account(self, dataset: str) -> Account | None:
        """Returns the account of `dataset`, or None when it was never opened."""
        return self._chain.read().account(dataset)

    def accounts(self) -> tuple[Account, ...]:
        """Returns all accounts, in the order in which they were opened."""
        book = self._chain.read()
        return tuple(account for name in list(book.terms) if (account := book.account(name)))

    def entries(self, dataset: str) -> tuple[Entry, ...]:
        """Returns every charge of `dataset`, oldest first."""
        return tuple(self._chain.read().entries.get(checked_name(dataset), ()))

    def releases(self) -> frozenset[str]:
        """Returns the digests of the releases of all finished runs."""
        return frozenset(story.release for story in list(self._chain.read().runs.values()) if story.finished)

    def open(self, *, dataset: str, relation: str, schema: str, epsilon: float, delta: float, rho: float) -> Account:
        """Returns the account of `dataset`, opened now unless it exists. An existing total stays as it is.

        Raises:
            BudgetError: the account was opened for another neighbour relation or another schema.
        """
        if relation not in ("replace", "add-remove"):
            raise ParameterError(f"relation ({relation!r}) must be 'replace' or 'add-remove'")
        name, total = checked_name(dataset), _total(epsilon, delta, rho)
        with self._chain.transaction() as (book, connection):
            account = book.account(name)
            if account is None:
                record = {"record": "open", "dataset": dataset, "relation": relation, "schema": schema}
                self._chain.append(connection, record | total)
            else:
                _check_same_terms(account, relation, schema)
            return _opened(book, dataset)

    def raise_total(self, dataset: str, *, epsilon: float, delta: float, rho: float) -> Account:
        """Returns the account with its total raised, on record, to `rho` (the promise epsilon, delta)."""
        total = _total(epsilon, delta, rho)
        _opened(self._chain.read(), dataset)
        with self._chain.transaction() as (book, connection):
            present = _opened(book, dataset).total
            if total["rho"] <= present:
                raise ParameterError(
                    f"rho ({rho!r}, from epsilon {epsilon!r} and delta {delta!r}) must be above the present "
                    f"total of dataset {dataset!r} ({present!r}); a total is never lowered"
                )
            self._chain.append(connection, book.terms[dataset] | total | {"record": "raise"})
            return _opened(book, dataset)

    def check_terms(self, dataset: str, *, relation: str, schema: str) -> None:
        """Refuses, for an account that exists, another neighbour relation or another schema than it was opened for."""
        account = self._chain.read().account(dataset)
        if account is not None:
            _check_same_terms(account, relation, schema)

    def check(self, dataset: str, *, terms: Mapping[str, object], rho: float) -> None:
        """Refuses what `begin` would refuse an account that exists; nothing is written, nothing is promised.

        Raises:
            BudgetError: the account has less than `rho` left.
        """
        text, rho = canonical(terms), _positive("rho", rho)
        book = self._chain.read()
        if (account := book.account(dataset)) is not None:
            _check_affordable(book, account, text, rho)

    def begin(self, dataset: str, *, terms: Mapping[str, object], rho: float) -> Run:
        """Returns a new run of stated public terms; its whole budget `rho` is taken from the account now.

        Raises:
            BudgetError: the account has less than `rho` left, or was never opened.
        """
        text, rho = canonical(terms), _positive("rho", rho)
        _opened(self._chain.read(), dataset)
        with self._chain.transaction() as (book, connection):
            _check_affordable(book, _opened(book, dataset), text, rho)
            run = secrets.token_hex(8)
            record = {"record": "begin", "dataset": dataset, "run": run, "terms": text, "rho": rho}
            self._chain.append(connection, record)
            return Run(self._chain, run, book.runs[run])

    def resume(self, dataset: str, *, terms: Mapping[str, object]) -> Run:
        """Returns the newest unfinished run of identical terms, at its first step; ParameterError if none."""
        text = canonical(terms)
        _opened(self._chain.read(), dataset)
        with self._chain.transaction() as (book, connection):
            run = book.unfinished(dataset, text)
            if run is None:
                raise ParameterError(
                    f"dataset {dataset!r} has no unfinished run of these terms to resume: mechanism, workload, "
                    f"budget and seed must be those of the run"
                )
            self._chain.append(connection, {"record": "resume", "run": run})
            return Run(self._chain, run, book.runs[run])

    def verify(self) -> int:
        """Returns the number of records, after checking all records, stored answers and pages anew."""
        return self._chain.verify()


class Run:
    """One mechanism's talk with one curator: charge, look, store, step after step; then finish.

    `spent` and `remaining` tell of the steps of this talk so far, so that a resumed run sees at each step the
    numbers that the crashed one saw. What a crash wasted shows in the account alone.
    """

    def __init__(self, chain: Chain, identifier: str, story: Story) -> None:
        self.identifier = identifier
        self.rho = story.rho
        self._chain = chain
        self._attempt = story.attempt
        self._step = 0
        self._spent = Fraction(0)
        self._pending = False

    @property
    def spent(self) -> float:
        """What the steps so far cost, rounded up."""
        return round_up(self._spent)

    @property
    def remaining(self) -> float:
        """What is left for further steps, rounded down."""
        return round_down(Fraction(self.rho) - self._spent)

    def charge(self, *, kind: str, rho: float, what: str, digest: str) -> bytes | None:
        """Returns None once the step is charged, durably: look, then `store`. Or the answer stored before.

        Raises:
            BudgetError: the run, or for a wasted step the account, has too little left.
            CorruptionError: the resumed run asks something else than it did before.
            ResourceError: the ledger cannot be written, or another process resumed this run.
        """
        rho = _positive("rho", rho)
        request = (kind, rho, digest)
        with self._chain.transaction() as (book, connection):
            story = self._live(book)
            if self._step in story.answers:
                self._check_same(story, request)
                answer = self._chain.answer(connection, self.identifier, self._step)
                self._advance(rho)
                return answer
            if self._step < len(story.requests):
                self._check_same(story, request)
                self._check_waste(book, story)
            elif story.charged + Fraction(rho) > Fraction(story.rho):
                left = f"{self.remaining!r} of {self.rho!r}"
                raise BudgetError(f"rho ({rho!r}) must be at most what run {self.identifier} has left ({left})")
            record = {"record": "charge", "run": self.identifier, "step": self._step, "what": what}
            self._chain.append(connection, record | {"kind": kind, "rho": rho, "digest": digest})
        self._pending = True
        return None

    def store(self, answer: bytes) -> None:
        """Persists the noisy answer of the step just charged, durably; call it before the answer is used."""
        if not self._pending:
            raise ParameterError("store() must follow a charge() that returned None")
        record = {"record": "answer", "run": self.identifier, "step": self._step, "sha256": sha256(answer)}
        with self._chain.transaction() as (book, connection):
            story, row = self._live(book), (self.identifier, self._step, answer)
            if story.answers.get(self._step) != record["sha256"]:  # equal: committed by a call that failed
                connection.execute("INSERT INTO answers VALUES (?, ?, ?)", row)
                self._chain.append(connection, record)
        self._advance(story.requests[self._step][1])

    def finish(self, release_digest: str) -> None:
        """Records that the release is complete and drops the stored answers: the run is over."""
        with self._chain.transaction() as (book, connection):
            self._live(book)
            connection.execute("DELETE FROM answers WHERE run = ?", (self.identifier,))
            record = {"record": "finish", "run": self.identifier, "release": release_digest}
            self._chain.append(connection, record)

    def _advance(self, rho: float) -> None:
        self._step, self._spent, self._pending = self._step + 1, self._spent + Fraction(rho), False

    def _live(self, book: Book) -> Story:
        story = book.runs[self.identifier]
        if story.finished:
            raise BudgetError(f"run {self.identifier} is finished; begin a new one")
        if story.attempt != self._attempt:
            raise ResourceError(f"run {self.identifier} was resumed by another process; this one must stop")
        return story

    def _check_same(self, story: Story, request: tuple[str, float, str]) -> None:
        if story.requests[self._step] != request:
            raise CorruptionError(
                f"step {self._step} of run {self.identifier} was charged for another request: the code or a "
                f"setting changed since; put it back, or begin a new run"
            )

    def _check_waste(self, book: Book, story: Story) -> None:
        rho = story.requests[self._step][1]
        if not book.affords(story.dataset, rho):
            raise BudgetError(
                f"step {self._step} of run {self.identifier} was charged, but no answer was stored; "
                f"it must be charged again. {_refusal(_opened(book, story.dataset), rho)} Then --resume."
            )


def _check_same_terms(account: Account, relation: str, schema: str) -> None:
    if (account.relation, account.schema) != (relation, schema):
        other = "schema" if account.relation == relation else f"relation ({account.relation})"
        raise BudgetError(
            f"the account of dataset {account.dataset!r} was opened for another {other}; go back to it, or use another "
            "dataset name if these are the rows of other people"
        )


def _check_affordable(book: Book, account: Account, terms: str, rho: float) -> None:
    if not book.affords(account.dataset, rho):
        resumable = book.unfinished(account.dataset, terms)
        hint = " An unfinished run of the same terms exists: --resume continues it." if resumable else ""
        raise BudgetError(_refusal(account, rho) + hint)


def _refusal(account: Account, rho: float) -> str:
    return (
        f"dataset {account.dataset!r}: rho {rho!r} is asked, {account.remaining!r} of {account.total!r} "
        f"remains. Raise the total openly: `{_opening(account.dataset)}`."
    )


def _opened(book: Book, dataset: str) -> Account:
    if (account := book.account(dataset)) is None:
        raise BudgetError(f"dataset {dataset!r} has no account; open one: `{_opening(dataset)}`")
    return account


def _opening(dataset: str) -> str:
    return f"anamorph ledger open {shlex.quote(dataset)} --epsilon E --delta D"


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ParameterError(f"{name} ({value!r}) must be finite and above 0")
    return float(value)


def _total(epsilon: float, delta: float, rho: float) -> dict[str, float]:
    if not 0 < delta < 1:
        raise ParameterError(f"delta ({delta!r}) must be in (0, 1)")
    return {"epsilon": _positive("epsilon", epsilon), "delta": float(delta), "rho": _positive("rho", rho)}
