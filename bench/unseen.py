"""`auto` on made-up tables, none of which any of its constants was chosen on. NOT PRIVATE: true errors, seeded noise.

The columns of benchmark data depend on each other in the ways of surveys. Those of these tables do so in others: along
a tree, strongly or weakly, on two columns each, or all on one hidden class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.evaluation.errors import merged, model_errors
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.auto import Auto
from anamorph.mechanisms.independent import Independent
from anamorph.mechanisms.mechanism import Mechanism
from anamorph.mechanisms.mst import MST
from anamorph.models import shrinking
from anamorph.queries.spec import workload as parse_workload
from anamorph.schema import Schema
from anamorph.table import Table
from bench.peers.results import rounded
from bench.tables import Rows

EPSILONS = (0.1, 1.0, 10.0)
SEEDS = (0, 1, 2)
WORKLOAD = "marginals:k=2"
UNTRIED = "auto, nothing tried"
MECHANISMS: dict[str, Mechanism] = {
    "auto": Auto(),
    UNTRIED: Auto(),
    "independent": Independent(),
    "mst": MST(),
    "aim": AIM(model_size=1.0),
}
"""AIM with the model size that ends within minutes on all of the tables."""


def table(codes: NDArray, sizes: Iterable[int]) -> Rows:
    """Returns rows with a schema."""
    schema = Schema(tuple(Codes(name=f"c{index}", values=int(size)) for index, size in enumerate(sizes)))
    return Rows(Table(codes.astype(np.int32), schema.sizes), schema)


def network(*, rows: int, columns: int, largest: int, parents: int, evenness: float) -> Rows:
    """Returns a table in which each column depends on some before it; the more even, the less it does."""
    generator = np.random.default_rng(3)
    sizes = generator.integers(2, largest + 1, columns)
    codes = np.zeros((rows, columns), int)
    for column, size in enumerate(sizes):
        before = generator.choice(column, min(parents, column), replace=False)
        kind = np.ravel_multi_index(codes[:, before].T, sizes[before]) if before.size else np.zeros(rows, int)
        chances = generator.dirichlet(np.full(size, evenness), kind.max() + 1).cumsum(axis=1)
        codes[:, column] = np.minimum((generator.random((rows, 1)) > chances[kind]).sum(axis=1), size - 1)
    return table(codes, sizes)


def classes() -> Rows:
    """Returns a table of 60 columns of two codes that depend on one of ten hidden classes."""
    generator = np.random.default_rng(3)
    chances = generator.beta(0.4, 0.4, (10, 60))
    return table(generator.random((5000, 60)) < chances[generator.integers(0, 10, 5000)], [2] * 60)


TABLES: dict[str, Callable[[], Rows]] = {
    "tree, strong": lambda: network(rows=20_000, columns=20, largest=20, parents=1, evenness=0.3),
    "tree": lambda: network(rows=50_000, columns=15, largest=10, parents=1, evenness=1.0),
    "tree, weak": lambda: network(rows=50_000, columns=15, largest=14, parents=1, evenness=3.0),
    "two parents": lambda: network(rows=50_000, columns=15, largest=10, parents=2, evenness=0.5),
    "classes": classes,
}


def errors(rows: Rows, name: str, epsilon: float, seed: int) -> tuple[float, float]:
    """Returns the largest error and the tv of one run."""
    queries = parse_workload(WORKLOAD, rows.schema)
    budget = Budget(epsilon=epsilon, delta=1 / rows.rows() ** 2)
    curator = Curator(rows, budget, neighbours="add-remove", unsafe_seed=1000 + seed)
    with mock.patch.object(shrinking, "FACTORS", shrinking.FACTORS[: None if name != UNTRIED else 1]):
        found = merged(model_errors(rows, MECHANISMS[name](curator, queries, seed=seed).model, queries))
    return found.max_error, found.tv or 0.0


def unseen() -> dict[str, Any]:
    """Returns the medians of each mechanism, on each table at each epsilon: max, tv."""
    medians: dict[str, Any] = {}
    for title, made in TABLES.items():
        rows = made()
        for epsilon in EPSILONS:
            runs = {name: [errors(rows, name, epsilon, seed) for seed in SEEDS] for name in MECHANISMS}
            found = {name: tuple(map(rounded, np.median(each, axis=0))) for name, each in runs.items()}
            medians[f"{title}, epsilon {epsilon:g}"] = found
    return {"unit": "max, tv", "seeds": len(SEEDS), "medians": medians}
