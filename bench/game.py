"""The methods of the query release game beside RAP, over the grids of their paper. NOT PRIVATE: true errors.

`python -m bench.game` runs what is not in `bench/results/game.csv` yet, each run as a line, several at a time with
`--workers`: the grids with one seed, then the three best settings of each mechanism with all seeds, lest the luckiest
run of forty be called the best. Then prints, for each data set, workload and epsilon, the setting with the least median
of these. `--rounds` leaves out settings of more rounds: what a small eps0 makes of a large budget takes hours.
`python -m bench fem` and `python -m bench dqrs` are parts of it, as figures. Replace, delta = 1 / n^2.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.evaluation.errors import merged, model_errors
from anamorph.mechanisms.fem import FEM
from anamorph.mechanisms.mechanism import mechanism
from anamorph.queries.spec import workload as parse_workload
from bench import tables
from bench.peers.results import rounded

RESULTS = Path(__file__).parent / "results" / "game.csv"
EPSILONS = (0.1, 0.25, 0.5, 1.0)
ORDERS = (3, 5)
SEEDS = (0, 1, 2, 3, 4)
MOST_ROUNDS = 400
FINALISTS = 3
"""How many settings of a grid are run with all seeds."""

DUAL = ("dualquery", "dqrs")
KINDS = ("fem", "fem paper", "sepfem", *DUAL, "rap")

FEMS = [
    {"eps0": str(eps0), "eta": str(eta)}
    for eps0, eta in itertools.product((0.003, 0.005, 0.007, 0.009, 0.011, 0.015, 0.017, 0.019), (1, 2, 3, 4))
]
"""Table 2 of the paper."""
GROWING = [
    {"eps0": str(eps0), "eta": str(eta)}
    for eps0, eta in itertools.product((0.0025, 0.003, 0.0035), (0.75, 1, 1.25))
    if (eps0, eta) != (0.003, 1)
]
"""Table 3 of the paper, but for the one that table 2 has."""
DUALS = [
    {"rounds": str(rounds), "samples": str(samples)}
    for rounds, samples in itertools.product((50, 100, 200, 400), (10, 25, 50))
]
RAPS = [{"rounds": "4", "per_round": "16"}, {"rounds": "16", "per_round": "16"}]


class Run(NamedTuple):
    """One run."""

    data: str
    order: int
    epsilon: float
    mechanism: str
    settings: str
    seed: int


class Found(NamedTuple):
    """What came of it."""

    rounds: int
    max: float
    tv: float
    seconds: float


Store = dict[Run, Found]


def asked(data: Sequence[str], orders: Sequence[int], epsilons: Sequence[float], only: Sequence[str] = ()) -> list[Run]:
    """Returns the runs: the grids with one seed, for the dual methods with all of them."""
    settings = {
        "fem": [(given, SEEDS[:1]) for given in (*FEMS, *GROWING)],
        "fem paper": [(given | {"accounting": "paper"}, SEEDS[:1]) for given in (*FEMS, *GROWING)],
        "sepfem": [(given, SEEDS[:1]) for given in FEMS],
        "dualquery": [(given, SEEDS) for given in DUALS],
        "dqrs": [(given, SEEDS) for given in DUALS],
        "rap": [(given, SEEDS[:1]) for given in RAPS],
    }
    return [
        Run(name, order, epsilon, kind, json.dumps(given), seed)
        for name, order, epsilon in itertools.product(data, orders, epsilons)
        for kind, grid in settings.items()
        if not only or kind in only
        for given, seeds in grid
        for seed in seeds
    ]


def again(store: Store, runs: Iterable[Run]) -> list[Run]:
    """Returns the runs, with all seeds, of the settings that have the least errors among some runs of one seed."""
    cells: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run in store:
            cells.setdefault(run[:4], []).append(run)
    chosen = [run for cell in cells.values() for run in sorted(cell, key=lambda run: store[run].max)[:FINALISTS]]
    return [run._replace(seed=seed) for run in chosen if run.mechanism not in DUAL for seed in SEEDS]


@cache
def loaded(data: str) -> tables.Rows:
    """Returns a table, which is read once."""
    return tables.load(data)


def budget(run: Run) -> Budget:
    """Returns what a run may spend."""
    return Budget(epsilon=run.epsilon, delta=1 / loaded(run.data).rows() ** 2)


def rounds(run: Run) -> int:
    """Returns how many rounds a run has; 0 where there is not even one."""
    made = mechanism(run.mechanism.split()[0], json.loads(run.settings))
    if isinstance(made, FEM):
        return int(budget(run).rho / made.eps0**2 * (2 if made.accounting == "paper" else 8))
    return int(json.loads(run.settings)["rounds"])


def measured(run: Run) -> Found:
    """Returns the true errors of one run; its noise is that of the seed."""
    rows = loaded(run.data)
    workload = parse_workload(f"marginals:k={run.order},count=64,seed=0", rows.schema)
    made = mechanism(run.mechanism.split()[0], json.loads(run.settings))
    curator = Curator(rows, budget(run), neighbours="replace", unsafe_seed=1000 + run.seed)
    start = perf_counter()
    model = made(curator, workload, seed=run.seed).model
    seconds = perf_counter() - start
    errors = merged(model_errors(rows, model, workload))
    return Found(rounds(run), errors.max_error, errors.tv or 0.0, seconds)


def completed(runs: Sequence[Run], path: Path = RESULTS, *, workers: int = 1, most: int = MOST_ROUNDS) -> Store:
    """Runs grids, then the best of them with all seeds; returns all that is in the file."""
    store = complete(runs, path, workers=workers, most=most)
    return complete(again(store, runs), path, workers=workers, most=most)


def complete(runs: Iterable[Run], path: Path = RESULTS, *, workers: int = 1, most: int = MOST_ROUNDS) -> Store:
    """Runs what is not in a file yet, and adds each run to it; returns all that is there."""
    known = read(path)
    missing = [run for run in runs if run not in known and 1 <= rounds(run) <= most]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measured, run): run for run in sorted(missing, key=rounds, reverse=True)}
        for done in as_completed(waiting):
            add(path, waiting[done], done.result())
    return read(path)


def read(path: Path) -> Store:
    """Returns the runs of a file; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return {
        Run(d, int(o), float(e), m, s, int(seed)): Found(int(r), *map(float, rest))
        for d, o, e, m, s, seed, r, *rest in csv.reader(lines)
    }


def add(path: Path, run: Run, found: Found) -> None:
    """Adds a run at the end of a file."""
    with path.open("a", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        if not file.tell():
            lines.writerow((*Run._fields, *Found._fields))
        lines.writerow((*run, found.rounds, *map(rounded, found[1:])))


def best(store: Store, data: str, order: int, epsilon: float, kind: str) -> dict[str, Any] | None:
    """Returns the setting with the least median of max errors among those that have the most runs; None without any."""
    cells: dict[str, list[Found]] = {}
    for run, found in store.items():
        if run[:4] == (data, order, epsilon, kind):
            cells.setdefault(run.settings, []).append(found)
    if not cells:
        return None
    most = max(map(len, cells.values()))
    medians = {
        settings: np.median([found[:3] for found in runs], axis=0)
        for settings, runs in cells.items()
        if len(runs) == most
    }
    settings = min(medians, key=lambda key: medians[key][1])
    count, largest, distance = medians[settings].tolist()
    return {
        "max_error": largest,
        "tv": distance,
        "rounds": int(count),
        "settings": json.loads(settings),
        "runs": most,
        "tried": len(cells),
    }


def table(store: Store) -> list[dict[str, Any]]:
    """Returns a line for each data set, order and epsilon: the best of each mechanism."""
    cells = sorted({run[:3] for run in store})
    return [
        {"data": cell[0], "order": cell[1], "epsilon": cell[2]} | {kind: best(store, *cell, kind) for kind in KINDS}
        for cell in cells
    ]


def fem() -> dict[str, Any]:
    """Returns the best of FEM's grid, tight and as the paper counts, beside RAP: ADULT, 64 3-way marginals."""
    store = completed(asked(["adult"], [3], EPSILONS, ("fem", "fem paper", "sepfem", "rap")), workers=2)
    lines = [line for line in table(store) if line["data"] == "adult" and line["order"] == 3]
    reached = all(
        line["rap"]["max_error"] < line["fem"]["max_error"] < line["fem paper"]["max_error"] for line in lines
    )
    return {"table": lines, "target": "rap below fem, fem below fem as the paper counts", "reached": reached}


def dqrs() -> dict[str, Any]:
    """Returns DQRS over DualQuery with the same rounds and samples: ADULT, 64 3-way marginals, medians of five runs."""
    store = complete(asked(["adult"], [3], EPSILONS, ("dualquery", "dqrs")), workers=2)
    ratios: dict[str, dict[str, float]] = {}
    for epsilon, given in itertools.product(EPSILONS, map(json.dumps, DUALS)):
        ours, theirs = (
            [store[run].max for seed in SEEDS if (run := Run("adult", 3, epsilon, kind, given, seed)) in store]
            for kind in ("dqrs", "dualquery")
        )
        ratios.setdefault(given, {})[str(epsilon)] = float(np.median(ours) / np.median(theirs))
    default = ratios[json.dumps({"rounds": "100", "samples": "50"})]
    return {"ratios": ratios, "target": "below 1 by default", "reached": max(default.values()) < 1}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and prints the best of each mechanism."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=("adult", "loans"), default=["adult", "loans"])
    parser.add_argument("--order", nargs="+", type=int, choices=ORDERS, default=ORDERS)
    parser.add_argument("--epsilon", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="the most rounds of a run")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    runs = asked(given.data, given.order, given.epsilon, given.only)
    store = completed(runs, given.results, workers=given.workers, most=given.rounds)
    for line in table(store):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
