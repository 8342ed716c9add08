"""Accuracy figures on ADULT: NOT PRIVATE, the true errors of private runs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.datasets import benchmark
from anamorph.evaluation.errors import merged, model_errors
from anamorph.mechanisms.rap import RAP
from anamorph.queries.spec import workload as parse_workload
from anamorph.sources import open_source

ROWS = 48842
DELTA = 1 / ROWS**2
SPEC = "marginals:k=3,count=64,seed=0"
GRID = ((4, 4), (16, 4), (4, 16), (16, 16), (16, 64))
TARGETS = {0.1: 0.08, 1.0: 0.03}
RUNS = 3
"""Runs with fresh noise and another public seed, of which the median is reported."""


def rho() -> dict[str, Any]:
    """Returns the tight conversion at the papers' budgets."""
    found = {str(epsilon): Budget(epsilon=epsilon, delta=DELTA).rho for epsilon in (0.1, 1.0, 10.0)}
    expected = {"0.1": 1.6748e-4, "1.0": 0.014270, "10.0": 1.05208}
    reached = all(abs(found[key] / expected[key] - 1) < 1e-4 for key in expected)
    return {"rho": found, "target": expected, "reached": reached}


def run(mechanism: RAP, epsilon: float, seed: int) -> dict[str, Any]:
    """Returns the errors and the seconds of one private run."""
    path, schema = benchmark("adult")
    workload = parse_workload(SPEC, schema)
    with open_source(path, schema) as source:
        start = time.perf_counter()
        curator = Curator(source, Budget(epsilon=epsilon, delta=DELTA), neighbours="replace")
        release = mechanism(curator, workload, seed=seed)
        seconds = time.perf_counter() - start
        return merged(model_errors(source, release.model, workload)).to_dict() | {"seconds": round(seconds, 1)}


def rap_cells() -> dict[str, Any]:
    """Returns the largest error of RAP over single queries, the median of some runs for each (T, K)."""
    table: dict[str, dict[str, Any]] = {}
    for epsilon in TARGETS:
        for rounds, per_round in GRID:
            mechanism = RAP(rounds=rounds, per_round=per_round)
            runs = [run(mechanism, epsilon, seed) for seed in range(RUNS)]
            table.setdefault(str(epsilon), {})[f"({rounds}, {per_round})"] = {
                "max_error": float(np.median([item["max_error"] for item in runs])),
                "max_errors": [item["max_error"] for item in runs],
                "tv": float(np.median([item["tv"] for item in runs])),
                "seconds": float(np.median([item["seconds"] for item in runs])),
            }
    best = {epsilon: min(cell["max_error"] for cell in row.values()) for epsilon, row in table.items()}
    reached = all(best[str(epsilon)] <= target for epsilon, target in TARGETS.items())
    return {
        "table": table,
        "best": best,
        "target": {str(e): t for e, t in TARGETS.items()},
        "reached": reached,
    }


def rap_blocks() -> dict[str, Any]:
    """Returns the errors of RAP over whole marginals, all measured at once, at epsilon 1."""
    mechanism = RAP(rounds=1, blocks=True)
    found = run(mechanism, 1.0, seed=0)
    return found | {"target": 0.006, "reached": found["max_error"] <= 0.006}
