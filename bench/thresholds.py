"""r-of-k thresholds: accuracy over the large-scale study's grid, and speed. NOT PRIVATE: true errors of private runs.

`python -m bench.thresholds adult 1` prints the table of one dataset and one r, `adult blocks` instead that of whole
marginals for all r; they need numpy and jax alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable
from anamorph.evaluation.largest import largest_error
from anamorph.mechanisms.rap import RAP
from anamorph.models.relaxed import RelaxedProjection, RelaxedRows
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from bench.tables import Rows, load

EPSILON = 0.1
GRID = (4, 16, 64)
LARGEST_MEASURED = 100_000_000
BLOCKS: dict[str, Any] = {
    "rounds": 1,
    "blocks": True,
    "simplex": "softmax",
    "row_weights": True,
    "penalty": 0.003,
    "steps": 800,
}
"""RAP over whole marginals, measured once."""


def grid() -> tuple[int, ...]:
    """Returns the values of T and of K: the study's, and on a CPU all but the slowest."""
    return GRID[:2] if jax.default_backend() == "cpu" else GRID


def spec(r: int) -> str:
    """Returns the study's workload: 64 r-of-4 thresholds."""
    return f"thresholds:k=4,r={r},count=64,seed=0"


def run(rows: Rows, workload: Workload, mechanism: RAP) -> tuple[RelaxedRows, float]:
    """Returns the model of one private run, and its seconds."""
    start = time.perf_counter()
    curator = Curator(rows, Budget(epsilon=EPSILON, delta=1 / rows.rows() ** 2))
    model = mechanism(curator, workload, seed=0).model
    return model, time.perf_counter() - start  # pyright: ignore[reportReturnType]


def error(rows: Rows, workload: Workload, table: RelaxedTable) -> float:
    """Returns the exact largest error of a table."""
    return round(largest_error(rows, rows.rows(), table, workload), 5)


def accuracy(name: str, r: int) -> Iterator[dict[str, Any]]:
    """Yields the largest error of each mechanism on one dataset, for one r."""
    rows = load(name)
    workload = parse_workload(spec(r), rows.schema)
    common = {"dataset": name, "r": r, "epsilon": EPSILON, "queries": workload.cells}
    empty = RelaxedTable(rows.schema.sizes, np.zeros((sum(rows.schema.sizes), 1), np.float32), np.ones(1, np.float32))
    yield common | {"mechanism": "all-zero", "max_error": error(rows, workload, empty)}
    rho = Budget(epsilon=EPSILON, delta=1 / rows.rows() ** 2).rho
    noise = math.sqrt(workload.cells / (2 * rho)) / rows.rows()
    expected = noise * math.sqrt(2 * math.log(workload.cells))  # the largest of as many Gaussians, about
    yield common | {"mechanism": "gaussian cells", "max_error": round(expected, 3), "note": "expected"}
    for rounds, per_round in itertools.product(grid(), grid()):
        model, seconds = run(rows, workload, RAP(rounds=rounds, per_round=per_round))
        largest = error(rows, workload, model.estimate(workload))
        found = {"mechanism": "rap cells", "rounds": rounds, "per_round": per_round, "max_error": largest}
        yield common | found | {"seconds": round(seconds, 1)}


def blocks(name: str) -> Iterator[dict[str, Any]]:
    """Yields the largest error for every r of all marginals measured once, of order 4 or in their place of order 2.

    Which marginals are measured does not depend on r: one run serves all.
    """
    rows = load(name)
    workloads = {r: parse_workload(spec(r), rows.schema) for r in (1, 2, 3, 4)}
    for order in (2, 4):
        measured = workloads[1].measured(order)
        common = {"dataset": name, "mechanism": f"rap blocks of order {order}", "epsilon": EPSILON}
        if measured.cells > LARGEST_MEASURED or (order == 4 and jax.default_backend() == "cpu"):
            yield common | {"measured": measured.cells, "note": "not run: too many cells to measure or to fit here"}
            continue
        model, seconds = run(rows, workloads[1], RAP(order=order, **BLOCKS))
        found = {r: error(rows, workload, model.estimate(workload)) for r, workload in workloads.items()}
        common |= {"measured": measured.cells, "seconds": round(seconds, 1)}
        yield from (common | {"r": r, "max_error": largest} for r, largest in found.items())


def table() -> dict[str, Any]:
    """Returns the largest errors of both datasets and all r; on a CPU, of the quicker part of the grid."""
    names = ("adult", "loans")
    lines = [line for name in names for r in (1, 2, 3, 4) for line in accuracy(name, r)]
    wholes = [line for name in names for line in blocks(name)]
    reached = True
    for name, r in {(line["dataset"], line["r"]) for line in lines}:
        mine = [line for line in lines if (line["dataset"], line["r"]) == (name, r)]
        least = min(line["max_error"] for line in mine if line["mechanism"] == "rap cells")
        baselines = [line["max_error"] for line in mine if line["mechanism"] in ("all-zero", "gaussian cells")]
        reached = reached and least < min(baselines)
    return {"table": lines + wholes, "target": "the best of rap cells below all-zero and gaussian", "reached": reached}


@contextlib.contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Adds up the seconds of compilation, selection and projection."""
    found = {"compile": 0.0, "select": 0.0, "project": 0.0}

    def heard(event: str, seconds: float, **_: object) -> None:
        if event.startswith("/jax/core/compile"):
            found["compile"] += seconds

    def timed(kind: type, name: str, label: str) -> None:
        inner = getattr(kind, name)

        def outer(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            start = time.perf_counter()
            result = inner(*arguments, **options)
            found[label] += time.perf_counter() - start
            return result

        setattr(kind, name, outer)

    jax.monitoring.register_event_duration_secs_listener(heard)  # pyright: ignore[reportArgumentType]
    select, fit = Curator.select, RelaxedProjection.fit
    timed(Curator, "select", "select")
    timed(RelaxedProjection, "fit", "project")
    try:
        yield found
    finally:
        Curator.select, RelaxedProjection.fit = select, fit


def speed() -> dict[str, Any]:
    """Returns how fast 64 1-of-4 thresholds of LOANS are answered, at T = 64 and K = 4."""
    rows = load("loans")
    workload = parse_workload(spec(1), rows.schema)
    with clocks() as found:
        _, seconds = run(rows, workload, RAP(rounds=64, per_round=4))
    rate = workload.cells / seconds
    return {
        "device": str(jax.devices()[0].device_kind),
        "queries": workload.cells,
        "seconds": round(seconds, 1),
        "queries_per_second": round(rate),
        "target": 2_800_000,
        "reached": rate >= 2_800_000,
    } | {f"{name}_seconds": round(value, 1) for name, value in found.items()}


if __name__ == "__main__":
    if sys.argv[1] == "speed":
        print(json.dumps(speed()), flush=True)
    else:
        for line in blocks(sys.argv[1]) if sys.argv[2] == "blocks" else accuracy(sys.argv[1], int(sys.argv[2])):
            print(json.dumps(line), flush=True)
