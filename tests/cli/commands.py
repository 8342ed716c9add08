"""Commands of the tests, the data they meet, and what must hold of every run."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

SECRET = "Zanzibar-7341"
ROWS = 1237
"""Of the usual data: a number that no message may hold."""
PLANTED = 1201
"""The row at which bad files go bad."""

SCHEMA = """\
dataset: people
columns:
  town: {type: categorical, categories: [Ayr, Bonn, Cork], other: true, missing: true, source: declared}
  age: {type: numeric, lower: 0, upper: 100, bins: 4, missing: true, source: public}
  kind: {type: codes, values: 3, missing: true}
"""
HEADER = "town,age,kind\n"
BODY = [f"{('Ayr', 'Bonn', 'Cork')[i % 3]},{i * 7 % 100},{i % 2}\n" for i in range(ROWS)]
DATA = HEADER + "".join(BODY)


def planted(line: str = f"{SECRET},1,1\n") -> str:
    """Returns the usual data with another line at row PLANTED."""
    return HEADER + "".join([*BODY[:PLANTED], line, *BODY[PLANTED:]])


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def decent(ran: Ran) -> Ran:
    """Returns the run, after checking what every run owes; where it was refused, also that no row is spoken of."""
    assert "Traceback" not in ran.text
    assert "internal fault" not in ran.text
    assert SECRET not in ran.text
    assert "\x1b" not in ran.text
    assert "Warning" not in ran.err
    if ran.code:
        told = rf"(?<![\w-])({ROWS}|{ROWS + 1}|{PLANTED}|{PLANTED + 1}|{PLANTED + 2})\b"
        assert not re.search(told, ran.err)
        assert not re.search(r"\brow \d", ran.err)
        assert "7341" not in ran.text
    return ran


def explained(ran: Ran, code: int, *words: str) -> Ran:
    """Returns the run, after checking that it was refused with this code and a message with these words."""
    said = re.sub(r"[\s│]+", " ", ran.err)  # usage errors come in a frame, with lines broken
    assert ran.code == code, ran.text
    assert "error" in said.lower()
    for word in words:
        assert word in said, said
    return ran


def fit(extra: str = "", *, data: str = "data.csv") -> str:
    """Returns the usual fit: cheap, since it projects nothing. A later option replaces an earlier one."""
    usual = "--schema schema.yaml --workload marginals:k=2 --mechanism gaussian --epsilon 1 --delta 1e-6"
    return f"fit {data} {usual} -o release {extra}"


def words(arguments: str | list[str]) -> list[str]:
    return shlex.split(arguments) if isinstance(arguments, str) else arguments


def tree(directory: Path) -> dict[str, bytes]:
    """Returns every file below a directory with its content."""
    return {
        str(path.relative_to(directory)): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def command(arguments: str | list[str], *, module: bool = False) -> list[str]:
    """Returns the command line of the installed program."""
    program = Path(sys.executable).with_name("anamorph")
    start = [sys.executable, "-m", "anamorph"] if module or not program.exists() else [str(program)]
    return start + words(arguments)
