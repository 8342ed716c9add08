"""The rows of a comparison: kept as CSV, shown as a table."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

FIGURES = ("model_max", "model_mean", "model_tv", "rows_max", "rows_mean", "rows_tv")
COSTS = ("seconds", "cpu_seconds", "peak_mb")


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one mechanism or method of a peer fared. NOT PRIVATE: the errors are true ones."""

    name: str
    version: str = ""
    settings: str = "{}"
    """As JSON: what was not left at its default."""
    neighbours: str
    seed: int
    model_max: float | None = None
    model_mean: float | None = None
    model_tv: float | None = None
    rows_max: float | None = None
    rows_mean: float | None = None
    rows_tv: float | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_mb: float | None = None
    error: str = ""
    """Why there is no result, in one line."""
    remark: str = ""

    @property
    def peer(self) -> bool:
        """Returns whether it is somebody else's: peers are named PEER/METHOD."""
        return "/" in self.name

    @property
    def best_tv(self) -> float | None:
        """Returns the distance of the rows, or of the model's answers where there are no rows."""
        return self.rows_tv if self.rows_tv is not None else self.model_tv

    def same_run(self, other: Result) -> bool:
        """Returns whether another result is of the very same run."""
        mine, others = ((r.name, r.version, r.settings, r.neighbours, r.seed) for r in (self, other))
        return mine == others


def settings_text(settings: Mapping[str, Any]) -> str:
    """Returns settings as one text, the same whatever their order."""
    return json.dumps(dict(settings), sort_keys=True)


def file_name(data: str, workload: str, epsilon: float) -> str:
    """Returns the name of a comparison's files, of letters, digits, dots and hyphens alone."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"compare-{data}-{workload}-{epsilon:g}")
    return plain.strip("-")


def read(path: Path) -> list[Result]:
    """Returns the results of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [from_texts(line) for line in csv.DictReader(file)]


def from_texts(line: Mapping[str, str]) -> Result:
    """Returns the result of one line of CSV."""
    values: dict[str, Any] = {}
    for item in fields(Result):
        text = line.get(item.name, "")
        if "float" in str(item.type):
            values[item.name] = float(text) if text else None
        else:
            values[item.name] = int(text) if item.type == "int" else text
    return Result(**values)


def write(path: Path, found: Sequence[Result]) -> None:
    """Writes the results as CSV, whole or not at all."""
    fresh = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with fresh.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, [item.name for item in fields(Result)], lineterminator="\n")
        lines.writeheader()
        lines.writerows({key: rounded(value) for key, value in asdict(item).items()} for item in found)
    fresh.replace(path)


def rounded(value: Any) -> Any:  # noqa: ANN401 - a cell of CSV
    """Returns a number with as many digits as mean something."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def with_result(found: Sequence[Result], result: Result) -> list[Result]:
    """Returns the results with one more, in the place of earlier ones of the same name and relation.

    Other seeds stay if they are of the same version and settings: all runs of a name can be put together.
    """
    return [*(item for item in found if not replaces(result, item)), result]


def replaces(result: Result, earlier: Result) -> bool:
    """Returns whether a result takes the place of an earlier one."""
    if (earlier.name, earlier.neighbours) != (result.name, result.neighbours):
        return False
    return earlier.seed == result.seed or (earlier.version, earlier.settings) != (result.version, result.settings)


def add(path: Path, result: Result) -> list[Result]:
    """Returns the results of a file with one more, having written them.

    The file is read again for each result, and writers wait for each other: parts of a comparison may run at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = ordered(with_result(read(path), result))
        write(path, found)
    finally:
        os.close(lock)
    return found


def medians(found: Sequence[Result]) -> list[Result]:
    """Returns one result for each name: the median of each figure over the seeds that have it."""
    names = dict.fromkeys(item.name for item in found)
    return [middle([item for item in found if item.name == name]) for name in names]


def middle(runs: Sequence[Result]) -> Result:
    """Returns the medians of runs of one name; those without a result count only where all are."""
    done = [item for item in runs if not item.error]
    if len(runs) == 1 or not done:
        return runs[0]
    seeds = f"median of {len(done)} seeds" + (f", {len(runs) - len(done)} without result" * (len(done) < len(runs)))
    values: dict[str, Any] = {}
    for name in FIGURES + COSTS:
        given = [getattr(item, name) for item in done if getattr(item, name) is not None]
        values[name] = median(given) if given else None
    return replace(done[0], **values, remark="; ".join(text for text in (seeds, done[0].remark) if text))


def ordered(found: Sequence[Result]) -> list[Result]:
    """Returns the results by their distance, the best first; those without one last."""
    return sorted(found, key=lambda item: (item.best_tv is None, item.best_tv or 0.0, item.name))


def table(found: Sequence[Result]) -> str:
    """Returns the results as an aligned table for people."""
    head = ("name", "model max", "mean", "tv", "rows max", "mean", "tv", "seconds", "cpu s", "MB", "remark")
    lines = [head, *(cells(item) for item in ordered(found))]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head) - 1)]
    texts = []
    for line in lines:
        numbers = [text.rjust(width) for text, width in zip(line[1:-1], widths[1:], strict=True)]
        texts.append("  ".join([line[0].ljust(widths[0]), *numbers, line[-1]]).rstrip())
    return "\n".join(texts)


def cells(item: Result) -> tuple[str, ...]:
    """Returns one line of the table."""
    figures = [shown(getattr(item, name), ".2e" if "mean" in name else ".4f") for name in FIGURES]
    costs = [shown(value, ".0f") for value in (getattr(item, name) for name in COSTS)]
    why = f"NO RESULT: {item.error}" if item.error else ""
    return (item.name, *figures, *costs, "; ".join(text for text in (why, item.remark) if text))


def shown(value: float | None, form: str) -> str:
    """Returns a number as text; a hyphen where there is none."""
    return "-" if value is None else format(value, form)
