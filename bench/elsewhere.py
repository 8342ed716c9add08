"""`auto` and the others on workloads that nothing was chosen on. NOT PRIVATE: true errors, seeded noise.

Other orders, few and many marginals, all with one column, thresholds, and several kinds in one workload, on the
benchmark data. `python -m bench elsewhere` runs all of them, for about an hour on two cores.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np

from anamorph.compilation import forget_compiled
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.evaluation.errors import Errors, merged, model_errors
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.auto import Auto
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.hdmm import HDMM
from anamorph.mechanisms.independent import Independent
from anamorph.mechanisms.mechanism import Mechanism
from anamorph.mechanisms.mst import MST
from anamorph.mechanisms.mwem_pgm import MWEMPGM
from anamorph.mechanisms.rap import RAP
from anamorph.queries.spec import workload as parse_workload
from bench.peers.results import rounded
from bench.tables import Rows, load
from bench.thresholds import BLOCKS

EPSILONS = (0.1, 1.0, 10.0)
SEEDS = (0, 1, 2)
CASES = (
    ("adult", "marginals:k=1"),
    ("adult", "marginals:k=2,count=10,seed=2"),
    ("adult", "marginals:k=3,target=income>50K"),
    ("adult", "marginals:k=4,count=16,seed=1"),
    ("adult", "thresholds:k=3,r=1,count=16,seed=1"),
    ("adult", "marginals:k=1; thresholds:k=3,r=2,count=16,seed=3"),
    ("loans", "marginals:k=2,count=32,seed=3"),
    ("nltcs", "marginals:k=5,count=64,seed=1"),
    ("nltcs", "thresholds:k=4,r=2,count=64,seed=0"),
    ("titanic", "marginals:k=4,count=32,seed=1"),
)
MECHANISMS: dict[str, Mechanism] = {
    "auto": Auto(),
    "rap, all at once with penalty": RAP(**BLOCKS),
    "aim": AIM(model_size=5.0),
    "mst": MST(),
    "mwem-pgm": MWEMPGM(),
    "independent": Independent(),
    "gaussian": Gaussian(),
    "hdmm": HDMM(),
}
ONCE = ("aim", "rap, all at once with penalty")
"""Those that run with the first seed alone: they are slow."""


def errors(rows: Rows, workload: str, made: Mechanism, epsilon: float, seed: int) -> Errors:
    """Returns the errors of one run."""
    forget_compiled()
    queries = parse_workload(workload, rows.schema)
    budget = Budget(epsilon=epsilon, delta=1 / rows.rows() ** 2)
    curator = Curator(rows, budget, neighbours="add-remove", unsafe_seed=1000 + seed)
    return merged(model_errors(rows, made(curator, queries, seed=seed).model, queries))


def elsewhere() -> dict[str, Any]:
    """Returns the medians of each mechanism, for each workload and epsilon: max, mean, tv."""
    medians: dict[str, Any] = {}
    for (data, workload), epsilon in itertools.product(CASES, EPSILONS):
        rows, found = load(data), {}
        for name, made in MECHANISMS.items():
            runs = [errors(rows, workload, made, epsilon, seed) for seed in (SEEDS[:1] if name in ONCE else SEEDS)]
            figures = [(run.max_error, run.mean_error, math.nan if run.tv is None else run.tv) for run in runs]
            found[name] = tuple(map(rounded, np.median(figures, axis=0)))
            print(data, workload, epsilon, name, found[name], file=sys.stderr)
        medians[f"{data}, {workload}, epsilon {epsilon:g}"] = found
    return {"unit": "max, mean, tv", "seeds": len(SEEDS), "medians": medians}
