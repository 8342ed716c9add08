"""Very large workloads in fixed memory: each figure in a process of its own, with its peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RowTable
from anamorph.evaluation.largest import largest_error
from anamorph.mechanisms.rap import RAP
from anamorph.queries.spec import workload as parse_workload
from anamorph.table import Table
from bench.tables import Rows, load

GIGABYTE = 1e9


def shuffled(rows: Rows) -> Rows:
    """Returns a synthetic table: every column of the rows, each in an order of its own."""
    generator = np.random.default_rng(0)
    columns = [generator.permutation(column) for column in rows.table.codes.T]
    return Rows(Table(np.stack(columns, axis=1).astype(np.int32), rows.table.sizes), rows.schema)


def curated(rows: Rows) -> Curator:
    """Returns a curator of the rows, with epsilon 1."""
    return Curator(rows, Budget(epsilon=1.0, delta=1 / rows.rows() ** 2))


def one_round() -> dict[str, Any]:
    """Returns one RAP round of single queries over 1024 random 3-way marginals of LOANS."""
    rows = load("loans")
    workload = parse_workload("marginals:k=3,count=1024,seed=0", rows.schema)
    mechanism = RAP(rounds=2, per_round=16)
    curator, queries, estimator = curated(rows), workload.by_cell(), mechanism.projection()
    start = time.perf_counter()
    model = estimator.init(rows.schema.sizes, seed=0)
    table, prior = mechanism.compare(queries, model)
    chosen = curator.select(queries, table, rho=curator.remaining * 0.6, k=16, prior=prior)
    selected = time.perf_counter()
    model = estimator.fit(model, [curator.measure(queries.take(chosen), rho=curator.remaining)])
    return {
        "queries": workload.cells,
        "select_seconds": round(selected - start, 1),
        "project_seconds": round(time.perf_counter() - selected, 1),
        "target_gigabytes": 4,
    }


def all_three_way() -> dict[str, Any]:
    """Returns an exact max_error and an exact selection over all 3-way marginals of LOANS."""
    rows = load("loans")
    workload = parse_workload("marginals:k=3", rows.schema)
    synthetic = shuffled(rows)
    estimate = RowTable(synthetic.table, synthetic.rows())
    start = time.perf_counter()
    largest = largest_error(rows, rows.rows(), estimate, workload)
    compared = time.perf_counter()
    curator = curated(rows)
    curator.select(workload.by_cell(), estimate, rho=curator.remaining)
    return {
        "queries": workload.cells,
        "marginals": workload.blocks,
        "max_error": round(largest, 6),
        "max_error_seconds": round(compared - start, 1),
        "select_seconds": round(time.perf_counter() - compared, 1),
        "target_gigabytes": 8,
    }


def five_way() -> dict[str, Any]:
    """Returns an exact selection over 64 random 5-way marginals of LOANS, from rows and from relaxed rows."""
    rows = load("loans")
    workload = parse_workload("marginals:k=5,count=64,seed=0", rows.schema)
    synthetic = shuffled(rows)
    curator, queries, mechanism = curated(rows), workload.by_cell(), RAP()
    start = time.perf_counter()
    curator.select(queries, RowTable(synthetic.table, synthetic.rows()), rho=curator.remaining / 2)
    selected = time.perf_counter()
    table, prior = mechanism.compare(queries, mechanism.projection().init(rows.schema.sizes, seed=0))
    curator.select(queries, table, rho=curator.remaining, k=16, prior=prior)
    return {
        "queries": workload.cells,
        "select_seconds_rows": round(selected - start, 1),
        "select_seconds_relaxed": round(time.perf_counter() - selected, 1),
        "target_gigabytes": 8,
    }


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "one-round": one_round,
    "all-three-way": all_three_way,
    "five-way": five_way,
}


def measured(name: str) -> dict[str, Any]:
    """Returns a figure, and the peak memory of the process that computed it."""
    done = subprocess.run([sys.executable, "-m", "bench.scale", name], capture_output=True, text=True, check=True)
    figure = json.loads(done.stdout)
    return figure | {"reached": figure["gigabytes"] <= figure["target_gigabytes"]}


def peak() -> float:
    """Returns the largest resident memory of this process so far, in gigabytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / GIGABYTE


if __name__ == "__main__":
    result = FIGURES[sys.argv[1]]()
    print(json.dumps(result | {"gigabytes": round(peak(), 2)}))
