"""One table of all mechanisms and all peers that are installed, on the same work. NOT PRIVATE: true errors.

`make compare DATA=adult WORKLOAD=marginals:k=3,count=64,seed=0 EPSILON=1` runs what has not been run yet, prints the
table, and writes `bench/results/compare-DATA-WORKLOAD-EPSILON.csv` and a plot beside it. Ours run through the command
line, as a user would run them; peers through their drivers (bench/peers). Everything is scored alike, on rows read
from a file; ours in addition by the model's own answers. Seconds and memory are measured from outside.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import anamorph
from anamorph.curator.tallies import AtLeast, GroupBy
from anamorph.evaluation.errors import merged, row_errors
from anamorph.mechanisms.mechanism import NAMES
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import WHOLE, Workload
from anamorph.table import Table
from bench import tables
from bench.peers import harness, plot, results
from bench.peers.outside import Limits, Outcome, execute
from bench.peers.results import Result, settings_text

RESULTS = Path(__file__).resolve().parent / "results"
COMMAND = str(Path(sys.executable).parent / "anamorph")

VARIANTS: dict[str, dict[str, dict[str, str]]] = {
    "aim": {"": {"model_size": "5"}, "20MB": {"model_size": "20"}, "80MB": {"model_size": "80"}},
    "hdmm": {
        "": {},
        "residuals": {"strategy": "residuals"},
        "local": {"inference": "local"},
        "graphical": {"inference": "graphical"},
    },
    "rap": {
        "": {},
        "blocks": {
            "rounds": "1",
            "blocks": "true",
            "simplex": "softmax",
            "row_weights": "true",
            "penalty": "0.01",
            "steps": "1000",
        },
    },
}
"""Settings that a user would take, by mechanism and label; mechanisms that are not here run with their defaults."""


@dataclass(frozen=True)
class Comparison:
    """What everybody is asked for."""

    data: str
    workload: str
    epsilon: float
    neighbours: str = "add-remove"
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    @property
    def title(self) -> str:
        """Returns what is compared, for people."""
        return f"{self.data}, {self.workload}, epsilon {self.epsilon:g}, {self.neighbours}"


@dataclass(frozen=True)
class Entry:
    """One line to be: a mechanism of ours with settings, or a method of a peer."""

    result: Result
    """Without figures yet."""
    mechanism: str = ""
    peer: harness.Peer | None = None
    method: harness.Method | None = None


class Bench:
    """Data, workload and files of a comparison."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        self.comparison, self.folder = comparison, folder
        self.truth = tables.load(comparison.data)
        self.workload = parse_workload(comparison.workload, self.truth.schema)
        self.delta = 1 / self.truth.rows() ** 2

    def job(self) -> harness.Job:
        """Returns the files that peers are given, written on the first call."""
        schema = self.truth.schema
        data, sizes, asked = (self.folder / name for name in ("data.csv", "schema.json", "workload.json"))
        if not data.exists():
            with data.open("w", newline="", encoding="ascii") as file:
                csv.writer(file).writerows([schema.names, *self.truth.table.codes.tolist()])
            sizes.write_text(json.dumps(dict(zip(schema.names, schema.sizes, strict=True))), encoding="utf-8")
            sets = [[schema.names[column] for column in columns] for columns in column_sets(self.workload)]
            asked.write_text(json.dumps(sets), encoding="utf-8")
        return harness.Job(data, sizes, asked, self.comparison.epsilon, self.delta, self.comparison.seed)

    def score(self, path: Path) -> dict[str, float | None]:
        """Returns the true errors of synthetic rows."""
        rows = tables.Rows(read_codes(path, self.truth.schema.names, self.truth.schema.sizes), self.truth.schema)
        errors = merged(row_errors(self.truth, rows, self.workload))
        return {"rows_max": errors.max_error, "rows_mean": errors.mean_error, "rows_tv": errors.tv}


def column_sets(workload: Workload) -> list[tuple[int, ...]]:
    """Returns the columns of each marginal or threshold of a workload, each set once."""
    found: dict[tuple[int, ...], None] = {}
    for piece in workload.pieces(WHOLE):
        tally = piece.tally.slab if isinstance(piece.tally, AtLeast) else piece.tally
        if not isinstance(tally, GroupBy):
            raise SystemExit(f"workload ({workload.spec!r}) must be of marginals and thresholds: peers know no others")
        found[tally.features] = None
    return list(found)


def read_codes(path: Path, names: Sequence[str], sizes: tuple[int, ...]) -> Table:
    """Returns rows of integer codes, whatever the order of the file's columns."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    order = [header.index(name) for name in names]
    codes = np.array(lines, np.float64)[:, order].astype(np.int32)
    if np.any(codes < 0) or np.any(codes >= np.array(sizes)):
        raise ValueError("synthetic rows must have the codes of the schema")
    return Table(codes, sizes)


def entries(comparison: Comparison) -> Iterator[Entry]:
    """Yields every line of the table: ours, with each of their settings, then the peers'."""
    for name in NAMES:
        for label, settings in VARIANTS.get(name, {"": {}}).items():
            known = Result(
                name=f"{name}:{label}" if label else name,
                version=anamorph.__version__,
                settings=settings_text(settings),
                neighbours=comparison.neighbours,
                seed=comparison.seed,
            )
            yield Entry(known, mechanism=name)
    for peer in harness.PEERS:
        found = harness.state(peer)
        for method in peer.methods:
            known = Result(
                name=f"{peer.name}/{method.name}",
                version=found.version,
                settings=settings_text(method.settings),
                neighbours="add-remove",  # all of them; see the drivers
                seed=comparison.seed,
                error="" if found.ready else found.status,
                remark=method.remark,
            )
            yield Entry(known, peer=peer, method=method)


def chosen(entry: Entry, only: Sequence[str]) -> bool:
    """Returns whether a line is asked for: by its whole name, its mechanism or its peer; all are without names."""
    names = {entry.result.name, entry.mechanism, entry.peer.name if entry.peer else ""}
    return not only or bool(names.intersection(only))


def run_ours(entry: Entry, bench: Bench, folder: Path) -> Result:
    """Returns the figures of a mechanism of ours: fit, sample and evaluate, each by the command line."""
    comparison, result = bench.comparison, entry.result
    data, schema = (tables.DATA / f"{comparison.data}{ending}" for ending in (".csv.gz", "-domain.json"))
    asked = ("--schema", str(schema), "--workload", comparison.workload)
    data, release, rows = str(data.resolve()), str(folder / "release"), folder / "rows.csv"
    settings: Mapping[str, str] = json.loads(result.settings)
    fit = (
        *(COMMAND, "fit", data, *asked, "--mechanism", entry.mechanism, "--neighbours", comparison.neighbours),
        *("--epsilon", str(comparison.epsilon), "--delta", repr(bench.delta), "--seed", str(comparison.seed)),
        *(text for name, value in settings.items() for text in ("--set", f"{name}={value}")),
        *("-o", release, "--ledger", str(folder / "ledger")),
    )
    fitted = execute(fit, log=folder / "fit.log", limits=comparison.limits)
    if fitted.error:
        return costed(result, fitted)
    sample = (COMMAND, "sample", release, "-o", str(rows), "--seed", str(comparison.seed))
    sampled = execute(sample, log=folder / "sample.log", limits=comparison.limits)
    result = costed(result, fitted, sampled) if not sampled.error else costed(result, fitted)
    found: dict[str, Any] = model_figures((COMMAND, "evaluate", release, data, *asked, "--json"), folder)
    found |= bench.score(rows) if not sampled.error else {"remark": no_rows(sampled.error)}
    return replace(result, **found)


def model_figures(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the errors of the model's own answers, as the command line gives them; a remark where it does not."""
    log = folder / "evaluate.log"
    outcome = execute(command, log=log, limits=Limits(seconds=3600))
    if outcome.error:
        return {"remark": f"evaluation: {outcome.error}"}
    line = next(text for text in log.read_text(encoding="utf-8").splitlines() if text.startswith("{"))
    figures = json.loads(line)
    return {"model_max": figures["max_error"], "model_mean": figures["mean_error"], "model_tv": figures["tv"]}


def no_rows(error: str) -> str:
    """Returns why a release gave no rows."""
    return "answers only, no rows" if "not rows" in error else f"no rows: {error}"


def run_peer(entry: Entry, bench: Bench, folder: Path) -> Result:
    """Returns the figures of a method of a peer."""
    assert entry.peer is not None
    assert entry.method is not None
    rows = folder / "rows.csv"
    outcome = harness.run(entry.peer, entry.method, bench.job(), rows, limits=bench.comparison.limits)
    result = costed(entry.result, outcome)
    return result if outcome.error else replace(result, **bench.score(rows))


def costed(result: Result, *outcomes: Outcome) -> Result:
    """Returns a result with what its commands cost together, and their error."""
    return replace(
        result,
        seconds=sum(outcome.seconds for outcome in outcomes),
        cpu_seconds=sum(outcome.cpu_seconds for outcome in outcomes),
        peak_mb=max(outcome.peak_mb for outcome in outcomes),
        error=next((outcome.error for outcome in outcomes if outcome.error), ""),
    )


def run(entry: Entry, bench: Bench) -> Result:
    """Returns the figures of one line; whatever goes wrong is its error."""
    if entry.result.error:  # not installed
        return entry.result
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        try:
            return (run_peer if entry.peer else run_ours)(entry, bench, Path(folder))
        except (ValueError, OSError, KeyError) as error:
            return replace(entry.result, error=f"{type(error).__name__}: {error}")


def known(result: Result, found: Sequence[Result], limits: Limits) -> bool:
    """Returns whether a run is among the results; one that was stopped by a lower limit is not."""
    earlier = [item.error for item in found if item.same_run(result)]
    stopped = [re.fullmatch(r"stopped after (\d+) s", error) for error in earlier]
    return bool(earlier) and not any(stop and float(stop[1]) < limits.seconds for stop in stopped)


def store(comparison: Comparison, folder: Path | None = None) -> Path:
    """Returns the file of a comparison's results."""
    name = results.file_name(comparison.data, comparison.workload, comparison.epsilon)
    return (folder or RESULTS) / f"{name}.csv"


def lines(comparison: Comparison, found: Sequence[Result]) -> list[Result]:
    """Returns the table: a line for each name, of the relation that is asked for; peers know one alone."""
    return results.medians([item for item in found if item.peer or item.neighbours == comparison.neighbours])


def compare(
    comparison: Comparison, *, only: Sequence[str] = (), fresh: bool = False, folder: Path | None = None
) -> list[Result]:
    """Returns all results of a comparison, having run what is not in its file yet."""
    asked = [entry for entry in entries(comparison) if chosen(entry, only)]
    return complete(comparison, asked, fresh=fresh, folder=folder)


def complete(
    comparison: Comparison, asked: Sequence[Entry], *, fresh: bool = False, folder: Path | None = None
) -> list[Result]:
    """Returns all results of a comparison, having run those entries that are not in its file yet.

    The file is written after every run: what stops a run loses that run alone.
    """
    path, bench = store(comparison, folder), None
    with tempfile.TemporaryDirectory() as scratch:
        for entry in asked:
            if not fresh and known(entry.result, results.read(path), comparison.limits):
                continue
            bench = bench or Bench(comparison, Path(scratch))
            print(f"{comparison.title}, seed {comparison.seed}: {entry.result.name}", file=sys.stderr, flush=True)
            result = run(entry, bench)
            print(results.table([result]).splitlines()[-1], file=sys.stderr, flush=True)
            results.add(path, result)
    found = results.read(path)
    if found and (bench or not path.with_suffix(".svg").exists()):
        plot.save(lines(comparison, found), comparison.title, path.with_suffix(".svg"))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="adult", help="adult, loans, nltcs or titanic")
    parser.add_argument("--workload", default="marginals:k=3,count=64,seed=0")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--neighbours", default="add-remove")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names, with commas between: rap, smartnoise, dpmm/aim")
    parser.add_argument("--fresh", action="store_true", help="run again what is in the file already")
    parser.add_argument("--seconds", type=float, default=Limits().seconds, help="the most that one run may take")
    given = parser.parse_args(arguments)
    limits = Limits(seconds=given.seconds)
    comparison = Comparison(given.data, given.workload, given.epsilon, given.neighbours, given.seed, limits)
    only = [name.strip() for name in given.only.split(",") if name.strip()]
    print(results.table(lines(comparison, compare(comparison, only=only, fresh=given.fresh))))


if __name__ == "__main__":
    main()
