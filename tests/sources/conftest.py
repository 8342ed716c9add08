"""What the tests of the sources share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anamorph.schema import Schema

SECRET = "Zanzibar-7341"
DATA = Path(os.environ.get("ANAMORPH_DATA", Path(__file__).parents[3] / "shared" / "data"))


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.fixture
def secret():
    """A private value: to be planted in data that is refused."""
    return SECRET


@pytest.fixture
def refused(secret):
    """Returns the message of the error that a call must raise: exactly this class, no private value."""

    def check(kind, call, *words):
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        for error in _chain(caught.value):
            for text in (str(error), repr(error), repr(error.args)):
                assert secret not in text
                assert "7341" not in text
        message = str(caught.value)
        assert "line " not in message.replace("first line ", "")
        for word in words:
            assert word in message
        return message

    return check


@pytest.fixture
def public_data():
    """Returns the schema and the path of a public benchmark dataset."""

    def find(name):
        if not (DATA / f"{name}.csv.gz").exists():
            pytest.skip("the benchmark data is not here: set ANAMORPH_DATA to its directory")
        plain = json.loads((DATA / f"{name}-domain.json").read_text())
        return Schema.from_dict(plain, dataset=name), DATA / f"{name}.csv.gz"

    return find
