"""What every driver shares: a task comes in as files and options, rows go out as a CSV file. Standard library only.

A driver runs in the environment of its peer, as `python drive_NAME.py --data D.csv --schema S.json --workload W.json
--epsilon E --delta D --seed N --output ROWS.csv --method M --settings JSON`, and imports nothing of anamorph.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What a peer is asked for."""

    data: Path
    """A CSV file of integer codes, its columns in the order of `sizes`."""
    sizes: dict[str, int]
    """The number of codes of each column: public."""
    workload: tuple[tuple[str, ...], ...]
    """The marginals that the rows are scored on; for peers that can be told."""
    epsilon: float
    delta: float
    seed: int
    output: Path
    method: str
    settings: Mapping[str, Any]
    """Arguments of the method, by the peer's own names."""

    def codes(self) -> list[list[int]]:
        """Returns the private rows."""
        with self.data.open(newline="", encoding="ascii") as file:
            lines = csv.reader(file)
            header = next(lines)
            order = [header.index(column) for column in self.sizes]
            return [[int(line[place]) for place in order] for line in lines]

    def degree(self) -> int:
        """Returns the most columns of a marginal of the workload."""
        return max(map(len, self.workload))

    def domain_rows(self) -> list[list[int]]:
        """Returns public rows in which every code of every column occurs, for peers that learn categories from rows."""
        return [[min(row, size - 1) for size in self.sizes.values()] for row in range(max(self.sizes.values()))]

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        """Writes synthetic rows; a cell without a code takes that of another row, drawn at random."""
        generator = random.Random(self.seed)
        columns = [list(column) for column in zip(*rows, strict=True)]
        for name, column in zip(self.sizes, columns, strict=True):
            known = [int(code) for code in column if is_code(code, self.sizes[name])]
            if not known:
                raise SystemExit(f"column {name!r} must have codes from 0 to {self.sizes[name] - 1}; it has none")
            column[:] = [int(code) if is_code(code, self.sizes[name]) else generator.choice(known) for code in column]
        with self.output.open("w", newline="", encoding="ascii") as file:
            csv.writer(file).writerows([list(self.sizes), *zip(*columns, strict=True)])


def is_code(value: Any, size: int) -> bool:  # noqa: ANN401 - whatever a peer puts in a cell
    """Returns whether a cell is one of the codes of its column; None and nan are not."""
    return value is not None and not math.isnan(value) and 0 <= int(value) < size


def read_task(arguments: Sequence[str] | None = None) -> Task:
    """Returns the task that the command line describes."""
    parser = argparse.ArgumentParser()
    for name in ("data", "schema", "workload", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("epsilon", "delta"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    given = parser.parse_args(arguments)
    sets = json.loads(given.workload.read_text(encoding="utf-8"))
    return Task(
        data=given.data,
        sizes=json.loads(given.schema.read_text(encoding="utf-8")),
        workload=tuple(tuple(columns) for columns in sets),
        epsilon=given.epsilon,
        delta=given.delta,
        seed=given.seed,
        output=given.output,
        method=given.method,
        settings=given.settings,
    )
