"""Bookkeeping: what the ledger verbs of the command line do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from anamorph.curator.budget import Budget
from anamorph.curator.ledger import Account, Ledger
from anamorph.errors import CorruptionError, ParameterError, suggestion
from anamorph.schema import Schema


def summary(path: Path) -> dict[str, Any]:
    """Returns the accounts of a ledger."""
    return {"accounts": [asdict(account) for account in existing(path).accounts()]}


def entries(path: Path, dataset: str) -> dict[str, Any]:
    """Returns the account of a dataset, and each of its spends."""
    ledger = existing(path)
    account = ledger.account(dataset)
    if account is None:
        known = [item.dataset for item in ledger.accounts()]
        raise ParameterError(f"dataset ({dataset!r}) must have an account.{suggestion(dataset, known)}")
    return asdict(account) | {"entries": [asdict(entry) for entry in ledger.entries(dataset)]}


def open_account(path: Path, dataset: str, budget: Budget, *, schema: Path | None, neighbours: str) -> Account:
    """Returns the account of a dataset: opened with this total, or raised to it."""
    ledger = Ledger(path)
    terms = {"epsilon": budget.epsilon, "delta": budget.delta, "rho": budget.rho}
    if ledger.account(dataset) is not None:
        return ledger.raise_total(dataset, **terms)
    if schema is None:
        raise ParameterError(f"a new account must be opened for a schema: add --schema, or check the name {dataset!r}")
    declared = Schema.load(schema)
    if declared.dataset != dataset:
        raise ParameterError(f"dataset ({dataset!r}) must be the one of the schema, {declared.dataset!r}")
    return ledger.open(dataset=dataset, relation=neighbours, schema=declared.fingerprint, **terms)


def verify(path: Path, release: Path | None) -> str:
    """Returns what was checked, in words."""
    ledger = existing(path)
    records = ledger.verify()
    if release is None:
        return f"the ledger is sound: {records} records"
    from anamorph import archive  # noqa: PLC0415

    if archive.digest(release) not in ledger.releases():
        raise CorruptionError(
            f"release {str(release)!r} must be on record in this ledger; it is not: "
            "is this another ledger, or one that was rolled back?"
        )
    return f"the ledger is sound: {records} records, and the release is on record"


def existing(path: Path) -> Ledger:
    """Returns a ledger that is there."""
    ledger = Ledger(path)
    if not path.exists():
        raise ParameterError(f"ledger ({str(path)!r}) must exist: name it with --ledger")
    return ledger
