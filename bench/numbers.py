"""Numbers as numbers, on ADULT with raw values: `auto`, RAP++, and binned numbers. NOT PRIVATE: true errors.

`auto` and RAP++ see native columns and marginals of bands; the others the same columns in equal bins, and all 3-way
marginals with the target. Rows of all of them are put into the same native schema, without transforms, and compared
with the data on random mixed marginals: thresholds uniform over the declared ranges, so that equal bins have no
disadvantage. On workloads of numbers themselves, which bins cannot answer, `auto` is compared with RAP++.
"""

from __future__ import annotations

import itertools
import math
import resource
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anamorph.columns import Numeric
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import count
from anamorph.evaluation.errors import merged, model_errors
from anamorph.evaluation.features import examples
from anamorph.evaluation.learning import parse_target, usefulness
from anamorph.evaluation.splitting import split
from anamorph.mechanisms.mechanism import Mechanism, mechanism
from anamorph.models.annealing import MixedProjection
from anamorph.models.mixed import Columns
from anamorph.queries.numbers import mixed_marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release
from anamorph.schema import Schema
from anamorph.sources import TableSource, encode, open_source
from anamorph.table import Table
from anamorph.tables import sample_rows
from bench.peers.results import rounded
from bench.tables import DATA

PATH = DATA / "adult_raw.csv.gz"
EPSILONS = (0.07, 0.15, 0.23, 0.41, 0.74, 1.0)
BINS = 30
RUNS = 3
"""Runs with fresh noise and another public seed, of which the median is reported."""
EPOCHS = 14
"""One less than the columns, for RAP and MWEM+PGM, as in the RAP++ paper."""
SPEED_BINS = (10, 30, 50, 100)
SIGMAS = (4, 8, 16, 32, 64, 128, 256, 512)
"""The fixed inverse temperatures that annealing is compared with."""
LEVELS, STEPS = 10, 60
"""Those of the annealing, from 4 to 2048; a fixed one has as many steps in all."""
SINGLE = ("income",)
MULTITASK = ("income", "sex", "marital-status:Married-civ-spouse+Married-AF-spouse")

NATIVE: dict[str, dict[str, str]] = {"auto": {}, "rap++": {}, "dp-merf": {}}
BINNED = {
    "rap": {"rounds": str(EPOCHS), "per_round": "16"},
    "rap, all marginals at once": {"rounds": "1", "blocks": "true"},
    "mwem-pgm": {"rounds": str(EPOCHS)},
    "aim": {"model_size": "5"},
    "mst": {},
    "independent": {},
    "gem": {},
}
"""What mechanisms are given: native columns, or bins."""
COMPARED = ("auto", "rap++", "rap", "rap, all marginals at once", "mwem-pgm")
ASKED = (
    "bands:k=3,bands=8,target=income",
    "bands:k=2,bands=16",
    "mixed:k=3,count=1000,seed=0",
    "marginals:k=2; mixed:k=2,count=300,seed=0",
    "halfspaces:count=500,target=income,seed=0",
)
"""Workloads of numbers, and of numbers beside codes."""


@cache
def schema_of(bins: int = 0, *, plain: bool = False) -> Schema:
    """Returns the schema of the raw data: as declared, with equal bins, or native without transforms."""
    declared = Schema.load(Path(__file__).with_name("adult_raw.yaml"))
    if not bins and not plain:
        return declared

    def changed(column: Numeric) -> Numeric:
        whole: dict[str, Any] = {"name": column.name, "lower": column.lower, "upper": column.upper, "integer": True}
        shape: dict[str, Any] = {"bins": min(bins, int(column.length))} if bins else {"native": True}
        return Numeric(**whole, **shape, source="public")

    columns = tuple(changed(c) if isinstance(c, Numeric) else c for c in declared.columns)
    return replace(declared, columns=columns)


def workload_of(name: str, schema: Schema, targets: tuple[str, ...] = SINGLE) -> Workload:
    """Returns the workload that a mechanism is given: 3-way marginals with each target."""
    kind = "bands:k=3,bands=8" if name in ("auto", "rap++") else "marginals:k=3"
    columns = [target.partition(":")[0] for target in targets]
    if name == "dp-merf":  # it measures what it needs; the workload tells it the label
        return parse_workload(f"marginals:k=2,target={columns[0]}", schema)
    parts = [part for column in columns for part in parse_workload(f"{kind},target={column}", schema).parts]
    return Workload(tuple(parts)).measured()


def made(name: str) -> Mechanism:
    """Returns a mechanism with the settings of this bench."""
    settings = NATIVE.get(name, BINNED.get(name, {}))
    return mechanism(name.partition(",")[0], settings)


def run(name: str, epsilon: float, data: Any, *, seed: int, bins: int = BINS, targets: tuple[str, ...] = SINGLE):  # noqa: ANN201, ANN401
    """Returns the release of one private run, and its seconds without reading the data."""
    schema = schema_of(0 if name in NATIVE else bins)
    with open_source(data, schema) as source:
        rows = source.rows()
        start = time.perf_counter()
        curator = Curator(source, Budget(epsilon=epsilon, delta=1 / rows**2))
        release = made(name)(curator, workload_of(name, schema, targets), seed=seed)
        return release, time.perf_counter() - start


class MixedErrors:
    """The mean error on random mixed marginals, every one of which weighs as much."""

    def __init__(self, queries: int, data: Any, seed: int = 1000) -> None:  # noqa: ANN401
        self.schema = schema_of(plain=True)
        self.parts = mixed_marginals(self.schema, 3, count=queries, seed=seed)
        self.truth = self.answers(encode(data, self.schema))

    def answers(self, table: Table) -> list[np.ndarray]:
        """Returns the fractions of each part: queries by cells."""
        source = TableSource(table, self.schema)
        return [count(part.tally, source).reshape(part.blocks, -1) / table.rows for part in self.parts]

    def of(self, release: Release, seed: int) -> float:
        """Returns the mean error of as many synthetic rows as there are real ones."""
        found = self.answers(encode(sample_rows(release, seed=seed), self.schema))
        errors = [np.abs(a - b).mean(axis=1) for a, b in zip(found, self.truth, strict=True)]
        return float(np.concatenate(errors).mean())


def mixed() -> dict[str, Any]:
    """Returns the mean error on 20,000 mixed marginals that no mechanism was given, for each epsilon."""
    return mixed_table(EPSILONS, RUNS, 20_000, str(PATH), COMPARED)


def mixed_table(
    epsilons: tuple[float, ...],
    runs: int,
    queries: int,
    data: Any,  # noqa: ANN401
    names: tuple[str, ...],
) -> dict[str, Any]:
    """Returns the medians of some runs (of RAP, which is slow, of one), and the ratio of RAP++ to the best other."""
    errors, table = MixedErrors(queries, data), {}
    for epsilon in epsilons:
        row = {
            name: float(np.median([errors.of(run(name, epsilon, data, seed=s)[0], s) for s in range(times)]))
            for name in names
            for times in [1 if name.startswith("rap,") or name == "rap" else runs]
        }
        best = min(error for name, error in row.items() if name not in NATIVE)
        table[str(epsilon)] = row | {"ratio": row["rap++"] / best}
        print(epsilon, table[str(epsilon)], file=sys.stderr)
    return {
        "queries": queries,
        "table": table,
        "target": 0.7,
        "reached": all(row["ratio"] <= 0.7 for row in table.values()),
    }


def learning() -> dict[str, Any]:
    """Returns macro F1 of logistic regression on income at epsilon 1, for every mechanism that makes rows."""
    table = f1_table((*NATIVE, *BINNED), SINGLE, RUNS, 1.0, str(PATH))
    best = max(row["income"]["median"] for name, row in table.items() if name not in ("real", "rap++", "auto"))
    ours, real = table["rap++"]["income"]["median"], table["real"]["income"]["median"]
    reached = ours >= 0.97 * real and ours >= best
    return {"table": table, "of_real": ours / real, "best_other": best, "target": "0.97, best", "reached": reached}


def multitask() -> dict[str, Any]:
    """Returns macro F1 on three targets at once, of one release, at epsilon 1."""
    names = ("auto", "rap++", "rap, all marginals at once", "mwem-pgm", "aim", "mst")
    return {"table": f1_table(names, MULTITASK, RUNS, 1.0, str(PATH))}


def asked() -> dict[str, Any]:
    """Returns the errors of `auto` and RAP++ on workloads of numbers: medians of max, mean and tv of their answers."""
    return asked_table(ASKED, (0.1, 1.0, 10.0), RUNS, str(PATH))


def asked_table(specs: tuple[str, ...], epsilons: tuple[float, ...], runs: int, data: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns the medians for each workload and epsilon, with declared transforms, where rows are added or removed."""
    schema, table = schema_of(), {}
    source = TableSource(encode(data, schema), schema)
    for spec, epsilon in itertools.product(specs, epsilons):
        queries, row = parse_workload(spec, schema), {}
        budget = Budget(epsilon=epsilon, delta=1 / source.rows() ** 2)
        for name in ("auto", "rap++"):
            found = []
            for seed in range(runs):
                curator = Curator(source, budget, neighbours="add-remove")
                model = made(name)(curator, queries, seed=seed).model
                errors = merged(model_errors(source, model, queries))
                found.append((errors.max_error, errors.mean_error, errors.tv or math.nan))
            row[name] = [rounded(each) for each in np.median(found, axis=0).tolist()]
        table[f"{spec}, epsilon {epsilon:g}"] = row
        print(spec, epsilon, row, file=sys.stderr)
    return {"unit": "max, mean, tv", "runs": runs, "table": table}


def f1_table(
    names: tuple[str, ...],
    targets: tuple[str, ...],
    runs: int,
    epsilon: float,
    data: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Returns the F1 of each mechanism and target on held-out rows: the median and all runs."""
    schema = schema_of(plain=True)
    train, test = split(data, schema, seed=0)
    known, held = examples(train, schema), examples(test, schema)
    wanted = [parse_target(target, schema) for target in targets]
    table: dict[str, Any] = {}
    for name in names:
        scores: list[list[float]] = []
        for seed in range(runs):
            release, _ = run(name, epsilon, train, seed=seed, targets=targets)
            found = usefulness(examples(sample_rows(release, seed=seed), schema), known, held, wanted)
            scores.append([each.f1 for each in found])
            table["real"] = {each.target: {"median": each.f1_real} for each in found}
        table[name] = {
            target: {"median": float(np.median(each)), "runs": list(each)}
            for target, each in zip(targets, zip(*scores, strict=True), strict=True)
        }
        print(name, table[name], file=sys.stderr)
    return table


def annealing() -> dict[str, Any]:
    """Returns the errors of fits to the exact answers of 1,000 2-way mixed marginals: annealed, and at fixed sigma."""
    return annealing_table(1000, LEVELS, STEPS, SIGMAS, str(PATH))


def annealing_table(queries: int, levels: int, steps: int, sigmas: tuple[int, ...], data: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns max and mean error of the model's answers, not relaxed, for each way to fit."""
    schema = schema_of(plain=True)
    source = TableSource(encode(data, schema), schema)
    workload = Workload(mixed_marginals(schema, 2, count=queries, seed=0)).measured()
    truth = np.concatenate([count(piece.tally, source) for piece in workload.pieces()]) / source.rows()
    exact = Measurement(workload, truth, np.full(workload.blocks, 10 / source.rows()), float(source.rows()))
    columns = Columns(schema.sizes, schema.numbers, tuple(schema.columns[n].regular for n in schema.numbers))
    ways = {"annealed": MixedProjection(levels=levels, steps=steps, gamma=0.0)}
    ways |= {
        f"sigma {sigma}": MixedProjection(temperature=float(sigma), levels=1, steps=levels * steps, gamma=0.0)
        for sigma in sigmas
    }
    table = {}
    for name, estimator in ways.items():
        model = estimator.fit(estimator.begin(columns, seed=0), [exact])
        errors = np.abs(np.concatenate(list(model.answers(workload))) - truth)
        table[name] = {"max": float(errors.max()), "mean": float(errors.mean())}
    others = [row for name, row in table.items() if name != "annealed"]
    reached = all(table["annealed"][key] < min(row[key] for row in others) for key in ("max", "mean"))
    return {"queries": workload.cells, "table": table, "target": "below every fixed sigma", "reached": reached}


def speed() -> dict[str, Any]:
    """Returns seconds and peak memory of RAP++ and of MWEM+PGM with several bins, each in a process of its own."""
    asked = [("rap++", 0), *(("mwem-pgm", bins) for bins in SPEED_BINS)]
    table = {}
    for name, bins in asked:
        command = [sys.executable, "-m", "bench.numbers", name, str(bins)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        first, again, megabytes = map(float, out[-3:])
        table[f"{name}, {bins} bins" if bins else name] = {"seconds": first, "again": again, "megabytes": megabytes}
    ratio = table[f"mwem-pgm, {BINS} bins"]["seconds"] / table["rap++"]["seconds"]
    return {"table": table, "faster_at_30": ratio, "target": 2.0, "reached": ratio >= 2}


def timed(name: str, bins: int) -> None:
    """Prints the seconds of a first run, of another in the same process, and the peak of memory in MB."""
    seconds = [run(name, 1.0, str(PATH), seed=seed, bins=bins)[1] for seed in range(2)]
    print(*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    timed(sys.argv[1], int(sys.argv[2]))
