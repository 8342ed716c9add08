"""HDMM against RAP on few small marginals, and the coverage of intervals: NOT PRIVATE, true errors of private runs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from anamorph.curator.budget import Budget, Relation
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import count, marginal_cells
from anamorph.evaluation.errors import merged, model_errors
from anamorph.intervals import intervals
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.hdmm import HDMM
from anamorph.mechanisms.mechanism import Mechanism, description
from anamorph.mechanisms.rap import RAP
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from bench.tables import Rows, load

EPSILONS = (0.1, 0.25, 0.5, 1.0)
RUNS = 200
CONTENDERS: dict[str, Mechanism] = {
    "hdmm": HDMM(objective="max"),
    "hdmm+lls": HDMM(objective="max", inference="local"),
    "hdmm+pgm": HDMM(objective="max", inference="graphical"),
    "rap cells (4, 16)": RAP(rounds=4, per_round=16),
    "rap cells (16, 16)": RAP(rounds=16, per_round=16),
}
COVERED: dict[str, Mechanism] = {
    "gaussian": Gaussian(),
    "hdmm": HDMM(),
    "hdmm residuals": HDMM(strategy="residuals"),
    "aim": AIM(rounds=8, iterations=50),
    "rap cells": RAP(rounds=4, per_round=16, steps=20, rows=100),
}


def small_marginals(sizes: tuple[int, ...]) -> Workload:
    """Returns 15 3-way marginals of ADULT with 62,833 queries: the study had 15, with 62,876, and does not name them.

    Drawn among those of at most 10,000 cells; of 2,000 seeds this is the one whose number of queries is nearest.
    """
    sets = [f for f in itertools.combinations(range(len(sizes)), 3) if marginal_cells(sizes, f) <= 10_000]
    chosen = np.random.default_rng(1809).choice(len(sets), 15, replace=False)
    return Workload((Marginals(sizes, tuple(sets[index] for index in chosen)),))


def hdmm() -> dict[str, Any]:
    """Returns the errors of HDMM's variants and of RAP over single queries: RAP's paper, figure 5a."""
    source = load("adult")
    asked = small_marginals(source.schema.sizes)
    table: dict[str, dict[str, Any]] = {}
    for epsilon, (name, made) in itertools.product(EPSILONS, CONTENDERS.items()):
        curator = Curator(source, Budget(epsilon=epsilon, delta=1 / source.rows() ** 2), neighbours="replace")
        found = merged(model_errors(source, made(curator, asked, seed=0).model, asked))
        table.setdefault(str(epsilon), {})[name] = {"max_error": found.max_error, "tv": found.tv}
    reached = all(
        row["hdmm+pgm"]["max_error"] < min(row[name]["max_error"] for name in row if name.startswith("rap"))
        for row in table.values()
    )
    return {"queries": asked.cells, "table": table, "target": "hdmm+pgm below rap cells", "reached": reached}


def coverage() -> dict[str, Any]:
    """Returns how often 95% intervals hold the true answers of all 2-way marginals of NLTCS, over 200 runs each."""
    source = load("nltcs")
    asked = parse_workload("marginals:k=2", source.schema)
    table = {
        relation: {name: covered(source, asked, made, relation) for name, made in COVERED.items()}
        for relation in ("replace", "add-remove")
    }
    reached = all(0.93 <= item["coverage"] <= 0.98 for row in table.values() for item in row.values())
    return {"runs": RUNS, "table": table, "target": "0.93 to 0.98", "reached": reached}


def covered(source: Rows, asked: Workload, made: Mechanism, relation: Relation) -> dict[str, Any]:
    """Returns the share of intervals that hold the truth, the share of queries that have one, and their mean width."""
    truth = [count(piece.tally, source) / source.rows() for piece in asked.pieces()]
    held, known, width = 0, 0, 0.0
    for seed in range(RUNS):
        curator = Curator(source, Budget(epsilon=1.0, delta=1 / source.rows() ** 2), neighbours=relation)
        found = intervals(made(curator, asked, seed=seed))
        for piece, exact in zip(asked.pieces(), truth, strict=True):
            low, high = found.tally(piece.tally)
            held += int(np.sum((low <= exact) & (exact <= high)))
            known += int(np.sum(~np.isnan(low)))
            width += float(np.nansum(high - low))
    return {
        "coverage": held / known,
        "queries_with_interval": known / (RUNS * asked.cells),
        "mean_width": width / known,
        "settings": description(made),
    }
