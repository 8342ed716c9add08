"""`auto` against all others, over data, workloads and epsilons. NOT PRIVATE: true errors.

`make accuracy` runs what is not in the files of `make compare` yet (bench/results/compare-*.csv: they are the store of
all runs, written after each), then writes `accuracy.csv` and `accuracy.md` beside them. The cheap mechanisms run with
five seeds, the dear ones and the peers that are installed with the first of them; AIM at the largest model size that
ends in time. `python -m bench.grid --data titanic --only auto` runs a part; `--summary` runs nothing.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from bench import compare
from bench.peers import harness, results
from bench.peers.outside import Limits
from bench.peers.results import Result, shown

DATA = ("adult", "loans", "nltcs", "titanic")
EPSILONS = (0.1, 1.0, 10.0)
WORKLOADS = ("marginals:k=3,count=64,seed=0", "marginals:k=2")
NEIGHBOURS = "add-remove"
SECONDS = 300.0
"""The most that one run may take."""

OURS = "auto"
CHEAP = (OURS, "gaussian", "hdmm", "mst", "mwem-pgm", "independent")
SEEDS = (0, 1, 2, 3, 4)
LADDER = ("aim:80MB", "aim:20MB", "aim")
"""AIM's model sizes, the largest first."""
DEAR = ("all-zero", "gem", "rap")
"""Run once; all-zero since it has no noise."""
ONCE = SEEDS[0]
PEERS = "peers"
"""All peers together, as one that is compared with."""

MOST = {"max": 0.5, "tv": 0.95, "rows_max": 1.1, "rows_tv": 1.1, "seconds": 0.1}
"""What is aimed at: errors relative to the best other's, rows relative to the model, seconds relative to AIM's."""
TARGETS = {"max": ("max",), "tv": ("tv",), "rows": ("rows_max", "rows_tv"), "seconds": ("seconds",)}
"""The ratios that each target is made of."""


@dataclass(frozen=True)
class Cell:
    """One combination of the grid."""

    data: str
    workload: str
    epsilon: float

    def comparison(self, seed: int = ONCE, seconds: float = SECONDS) -> compare.Comparison:
        """Returns what is asked for with one seed."""
        limits = Limits(seconds=seconds)
        return compare.Comparison(self.data, self.workload, self.epsilon, NEIGHBOURS, seed, limits)


def cells(
    data: Sequence[str] = DATA, workloads: Sequence[str] = WORKLOADS, epsilons: Sequence[float] = EPSILONS
) -> list[Cell]:
    """Returns the grid, or a part of it."""
    return [Cell(*parts) for parts in product(data, workloads, epsilons)]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is run in each cell, and where its results are."""

    only: tuple[str, ...] = ()
    """Names of mechanisms, peers or single lines; all without names."""
    seeds: tuple[int, ...] = SEEDS
    seconds: float = SECONDS
    fresh: bool = False
    folder: Path = field(default_factory=lambda: compare.RESULTS)

    def entries(self, cell: Cell, seed: int) -> list[compare.Entry]:
        """Returns the lines that can be run: peers that are not installed have an error from the start."""
        found = compare.entries(cell.comparison(seed, self.seconds))
        return [entry for entry in found if compare.chosen(entry, self.only) and not entry.result.error]

    def complete(self, cell: Cell, seed: int, asked: Sequence[compare.Entry]) -> list[Result]:
        """Returns all results of a cell, having run those that are not in its file."""
        comparison = cell.comparison(seed, self.seconds)
        return compare.complete(comparison, asked, fresh=self.fresh, folder=self.folder)


def run_cheap(request: Request, cell: Cell) -> None:
    """Runs the cheap mechanisms with every seed."""
    for seed in request.seeds:
        request.complete(cell, seed, [entry for entry in request.entries(cell, seed) if entry.mechanism in CHEAP])


def run_ladder(request: Request, cell: Cell) -> None:
    """Runs AIM, the largest model first, until one ends in time."""
    named = {entry.result.name: entry for entry in request.entries(cell, ONCE)}
    for name in LADDER:
        if name in named:
            found = request.complete(cell, ONCE, [named[name]])
            if any(item.same_run(named[name].result) and finished(item, request.seconds) for item in found):
                return


def run_dear(request: Request, cell: Cell) -> None:
    """Runs the dear mechanisms and the peers once."""
    asked = [entry for entry in request.entries(cell, ONCE) if entry.peer or entry.mechanism in DEAR]
    request.complete(cell, ONCE, asked)


def run(request: Request, asked: Sequence[Cell]) -> None:
    """Runs what is not known yet, the cheap ones of all cells first: they say the most for their time."""
    stages: list[Callable[[Request, Cell], None]] = [run_cheap]
    if ONCE in request.seeds:
        stages += [run_ladder, run_dear]
    for stage, cell in product(stages, asked):
        stage(request, cell)


def finished(result: Result, seconds: float) -> bool:
    """Returns whether a run gave a result in time; one of an earlier, higher limit may not have."""
    return not result.error and result.seconds is not None and result.seconds <= seconds


@dataclass(frozen=True)
class Best:
    """The best of the others by one measure."""

    name: str = ""
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How `auto` fares in one cell: medians over its seeds. Figures that are not there yet are None."""

    cell: Cell
    ours: Result | None
    runs: int
    """Of ours, those without a result too."""
    failed: int
    others: tuple[Result, ...]
    """Those that have figures: the best of few is not the best of all."""
    aim: Best
    """Its seconds, at the largest model size that ended in time."""

    @property
    def best_max(self) -> Best:
        """Returns the lowest of the largest errors."""
        return best(self.others, "max")

    @property
    def best_tv(self) -> Best:
        """Returns the lowest tv."""
        return best(self.others, "tv")

    def against(self, family: str, measure: str) -> float | None:
        """Returns our figure relative to that of the best variant of one mechanism, or of the best peer."""
        theirs = [item for item in self.others if family_of(item) == family]
        return ratio(figure(self.ours, measure), best(theirs, measure).value)

    @property
    def ratios(self) -> dict[str, float | None]:
        """Returns our figures relative to those of the best other, our model and AIM, by the names of `MOST`."""
        if self.ours is None:
            return dict.fromkeys(MOST)
        return {
            "max": ratio(figure(self.ours, "max"), self.best_max.value),
            "tv": ratio(figure(self.ours, "tv"), self.best_tv.value),
            "rows_max": ratio(self.ours.rows_max, self.ours.model_max),
            "rows_tv": ratio(self.ours.rows_tv, self.ours.model_tv),
            "seconds": ratio(self.ours.seconds, self.aim.value),
        }

    def reached(self, target: str) -> bool | None:
        """Returns whether a target is reached; None where a figure is missing. With a run that failed none is."""
        if self.failed:
            return False
        names = TARGETS[target]
        values = [(value, MOST[name]) for name in names if (value := self.ratios[name]) is not None]
        return all(value <= most for value, most in values) if len(values) == len(names) else None


def figure(result: Result | None, measure: str) -> float | None:
    """Returns the error of the model's answers, or of the rows where there is no model."""
    if result is None:
        return None
    model = getattr(result, f"model_{measure}")
    return model if model is not None else getattr(result, f"rows_{measure}")


def ratio(value: float | None, of: float | None) -> float | None:
    """Returns a quotient, if it has one."""
    return value / of if value is not None and of else None


def family_of(result: Result) -> str:
    """Returns the mechanism that a result is of; all peers are one family."""
    return PEERS if "/" in result.name else result.name.partition(":")[0]


def is_ours(result: Result) -> bool:
    """Returns whether a result is of `auto`."""
    return family_of(result) == OURS


def best(others: Sequence[Result], measure: str) -> Best:
    """Returns the lowest figure of a measure and whose it is."""
    pairs = [(value, item.name) for item in others if (value := figure(item, measure)) is not None]
    value, name = min(pairs, default=(None, ""))
    return Best(name, value)


def aim_seconds(found: Sequence[Result], seconds: float) -> Best:
    """Returns AIM's seconds at the largest model size that ended in time.

    Where none did, those after which the smallest was stopped: it would have taken longer.
    """
    named = {item.name: item for item in found}
    for name in LADDER:
        if name in named and finished(named[name], seconds):
            return Best(name, named[name].seconds)
    last = named.get(LADDER[-1])
    if last and last.error.startswith("stopped after"):
        return Best(f"{last.name}, stopped", last.seconds)
    return Best()


def summarised(cell: Cell, found: Sequence[Result], seconds: float = SECONDS) -> Summary:
    """Returns how `auto` fares in a cell. All that is in its file counts, also what took longer than the limit."""
    found = [item for item in found if item.neighbours == NEIGHBOURS]
    named = results.medians([item for item in found if not is_ours(item)])
    others = [item for item in named if not item.error]
    runs = [item for item in found if item.name == OURS]
    return Summary(
        cell=cell,
        ours=next(iter(results.medians(runs)), None),
        runs=len(runs),
        failed=sum(bool(item.error) for item in runs),
        others=tuple(others),
        aim=aim_seconds(named, seconds),
    )


def summaries(asked: Sequence[Cell], folder: Path, seconds: float = SECONDS) -> list[Summary]:
    """Returns how `auto` fares in each cell, from the files alone."""
    return [summarised(cell, results.read(compare.store(cell.comparison(), folder)), seconds) for cell in asked]


def record(item: Summary) -> dict[str, Any]:
    """Returns one line of the CSV file; what is missing is empty."""
    ours = {
        name: getattr(item.ours, name) if item.ours else None
        for name in ("model_max", "model_tv", "rows_max", "rows_tv", "seconds")
    }
    return {
        **vars(item.cell),
        **{"runs": item.runs, "failed": item.failed, "others": len(item.others)},
        **{f"auto_{name}": value for name, value in ours.items()},
        **{"best_max_name": item.best_max.name, "best_max": item.best_max.value},
        **{"best_tv_name": item.best_tv.name, "best_tv": item.best_tv.value},
        **{"aim_name": item.aim.name, "aim_seconds": item.aim.value},
        **{f"{name}_ratio": value for name, value in item.ratios.items()},
        **{f"{target}_reached": item.reached(target) for target in TARGETS},
    }


HEAD = (
    *("data", "workload", "epsilon", "seeds", "max", "best other", "ratio", "tv", "best other", "ratio"),
    *("rows max", "/ model", "rows tv", "/ model", "seconds", "AIM's", "reached"),
)


def line(item: Summary) -> tuple[str, ...]:
    """Returns one line of the table for people."""
    cell, ours, ratios = item.cell, item.ours, item.ratios
    rows_max, rows_tv, seconds = (ours.rows_max, ours.rows_tv, ours.seconds) if ours else (None, None, None)
    seeds = f"{item.runs - item.failed} of {item.runs}" if item.failed else str(item.runs)
    reached = ", ".join(target for target in TARGETS if item.reached(target))
    return (
        *(cell.data, f"`{cell.workload}`", f"{cell.epsilon:g}", seeds),
        *(number(figure(ours, "max")), other(item.best_max), number(ratios["max"])),
        *(number(figure(ours, "tv")), other(item.best_tv), number(ratios["tv"])),
        *(number(rows_max), number(ratios["rows_max"]), number(rows_tv), number(ratios["rows_tv"])),
        *(number(seconds), other(item.aim), reached or "-"),
    )


def number(value: float | None) -> str:
    """Returns a number with three digits."""
    return shown(value, ".3g")


def other(item: Best) -> str:
    """Returns a figure and whose it is."""
    return f"{number(item.value)} ({item.name})" if item.name else "-"


def table(items: Sequence[Summary]) -> str:
    """Returns the table of all cells, how often each target is reached, and the table of each other by itself."""
    counts = [f"{target} in {sum(bool(item.reached(target)) for item in items)}" for target in TARGETS]
    families = sorted({family_of(other) for item in items for other in item.others})
    return "\n\n".join(
        [
            markdown(HEAD, [line(item) for item in items]),
            f"Reached: {', '.join(counts)}; of {len(items)}.",
            markdown(AGAINST, [against(items, family) for family in families]),
        ]
    )


AGAINST = ("against", "cells", "max, ratio", "not below 1", "tv, ratio", "not below 1")


def against(items: Sequence[Summary], family: str) -> tuple[str, ...]:
    """Returns one line: the cells with figures of both, the lowest and highest ratio, how many are not below 1."""
    ratios = [[item.against(family, measure) for item in items] for measure in ("max", "tv")]
    (cells, *parts), (_, *more) = (spread([value for value in values if value is not None]) for values in ratios)
    return (family, cells, *parts, *more)


def spread(values: Sequence[float]) -> tuple[str, str, str]:
    """Returns how many ratios there are, the lowest and highest, and how many are not below 1."""
    ends = f"{number(min(values))} to {number(max(values))}" if values else "-"
    return str(len(values)), ends, str(sum(value >= 1 for value in values))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join(f"| {' | '.join(texts)} |" for texts in (head, ("---",) * len(head), *lines))


def write(folder: Path, items: Sequence[Summary]) -> None:
    """Writes the summary as CSV and as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [record(item) for item in items]
    with (folder / "accuracy.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: results.rounded(value) for key, value in item.items()} for item in records)
    (folder / "accuracy.md").write_text(f"{table(items)}\n", encoding="utf-8")


def names() -> Iterator[str]:
    """Yields all that can be asked for by name."""
    for entry in compare.entries(cells()[0].comparison()):
        if entry.peer:
            yield from (entry.peer.name, entry.result.name)
        elif entry.mechanism in (*CHEAP, *LADDER, *DEAR):
            yield from (entry.mechanism, entry.result.name)


def texts(given: str) -> tuple[str, ...]:
    """Returns the parts of a text with commas between."""
    return tuple(part.strip() for part in given.split(",") if part.strip())


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options; refuses names that are not in the grid, which would run nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=texts, default=DATA, help="with commas between: adult,titanic")
    parser.add_argument("--epsilon", type=texts, default=EPSILONS, help="with commas between: 0.1,1")
    parser.add_argument("--workload", action="append", help="may be given more than once")
    parser.add_argument("--only", type=texts, default=(), help="names, with commas between: auto,rap:blocks,dpmm")
    parser.add_argument("--seeds", type=texts, default=SEEDS, help=f"what runs once does so with seed {ONCE}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the most that one run may take")
    parser.add_argument("--fresh", action="store_true", help="run again what is in the files already")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=compare.RESULTS, help="where the results are")
    given = parser.parse_args(arguments)
    for option, values, allowed in (("data", given.data, DATA), ("only", given.only, tuple(dict.fromkeys(names())))):
        for value in values:
            if value not in allowed:
                parser.error(f"{option} ({value!r}) must be one of {', '.join(allowed)}")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a part of the grid and prints its summary; that of the whole grid is written."""
    given = parsed(arguments)
    seeds = tuple(int(seed) for seed in given.seeds)
    request = Request(only=given.only, seeds=seeds, seconds=given.seconds, fresh=given.fresh, folder=given.folder)
    asked = cells(given.data, given.workload or WORKLOADS, [float(epsilon) for epsilon in given.epsilon])
    if not given.summary:
        for peer in harness.PEERS:
            if not (found := harness.state(peer)).ready:
                print(f"left out: {peer.name} ({found.status})", file=sys.stderr)
        run(request, asked)
    write(given.folder, summaries(cells(), given.folder, given.seconds))
    print(table(summaries(asked, given.folder, given.seconds)))


if __name__ == "__main__":
    main()
