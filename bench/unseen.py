"""`auto` on made-up tables. NOT PRIVATE: true errors, seeded noise.

Budgets, penalty, steps and rows of `auto` were chosen on benchmark data, and it is seen here whether they hold
elsewhere. What it tries, and how many rows it adds (models/trials.py,
models/shrinking.py), was chosen on these.

The columns of benchmark data depend on each other in the ways of surveys. Those of these tables do so in others: along
a tree, strongly or weakly, on two columns each, or all on one hidden class; as the pages of visits to a site, which end
sooner or later, do; as places and kinds of events that largely follow from each other; or as the numbers of a trip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from anamorph.columns import Codes
from anamorph.compilation import forget_compiled
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.evaluation.errors import merged, model_errors
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.auto import Auto
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.independent import Independent
from anamorph.mechanisms.mechanism import Mechanism
from anamorph.mechanisms.mst import MST
from anamorph.models import trials
from anamorph.queries.spec import workload as parse_workload
from anamorph.schema import Schema
from anamorph.table import Table
from bench.peers.results import rounded
from bench.tables import Rows

EPSILONS = (0.1, 1.0, 10.0)
SEEDS = (0, 1, 2)
WORKLOADS = ("marginals:k=2", "marginals:k=3,count=64,seed=0")
UNTRIED = "auto, nothing tried"
MECHANISMS: dict[str, Mechanism] = {
    "auto": Auto(),
    UNTRIED: Auto(),
    "independent": Independent(),
    "gaussian": Gaussian(),
    "mst": MST(),
    "aim": AIM(model_size=1.0),
}
"""AIM with the model size that ends within minutes on all of the tables; it runs once."""


def table(codes: NDArray, sizes: Iterable[int]) -> Rows:
    """Returns rows with a schema."""
    schema = Schema(tuple(Codes(name=f"c{index}", values=int(size)) for index, size in enumerate(sizes)))
    return Rows(Table(codes.astype(np.int32), schema.sizes), schema)


def drawn(generator: np.random.Generator, chances: NDArray, kinds: NDArray) -> NDArray[np.int64]:
    """Returns a code for each row, by the chances of its kind."""
    codes = (generator.random((kinds.size, 1)) > chances.cumsum(axis=1)[kinds]).sum(axis=1)
    return np.minimum(codes, chances.shape[1] - 1)


def network(*, rows: int, columns: int, largest: int, parents: int, evenness: float) -> Rows:
    """Returns a table in which each column depends on some before it; the more even, the less it does."""
    generator = np.random.default_rng(3)
    sizes = generator.integers(2, largest + 1, columns)
    codes = np.zeros((rows, columns), int)
    for column, size in enumerate(sizes):
        before = generator.choice(column, min(parents, column), replace=False)
        kinds = np.asarray(np.ravel_multi_index(codes[:, before].T, sizes[before])) if before.size else codes[:, 0]
        codes[:, column] = drawn(generator, generator.dirichlet(np.full(size, evenness), kinds.max() + 1), kinds)
    return table(codes, sizes)


def classes() -> Rows:
    """Returns a table of 60 columns of two codes that depend on one of ten hidden classes."""
    generator = np.random.default_rng(3)
    chances = generator.beta(0.4, 0.4, (10, 60))
    return table(generator.random((5000, 60)) < chances[generator.integers(0, 10, 5000)], [2] * 60)


def sessions(rows: int = 300_000, columns: int = 16, pages: int = 17) -> Rows:
    """Returns visits to a site: the page seen at each step, 0 after the last."""
    generator = np.random.default_rng(3)
    moves = 0.45 * np.eye(pages) + 0.55 * generator.dirichlet(np.full(pages, 0.3), pages)
    leaving = generator.uniform(0.15, 0.5, pages)
    chances = np.zeros((pages + 1, pages + 1))
    chances[0, 0], chances[1:, 0], chances[1:, 1:] = 1, leaving, moves * (1 - leaving[:, None])
    codes = np.zeros((rows, columns), int)
    codes[:, 0] = 1 + generator.choice(pages, rows, p=generator.dirichlet(np.full(pages, 0.7)))
    for column in range(1, columns):
        codes[:, column] = drawn(generator, chances, codes[:, column - 1])
    return table(codes, [pages + 1] * columns)


def places(rows: int = 300_000) -> Rows:
    """Returns events: columns of where they were that largely follow from each other, and of what they were."""
    generator = np.random.default_rng(3)

    def follows(column: NDArray, size: int, of: int, seldom: float) -> NDArray:
        rule = generator.integers(0, of, size)
        other = generator.random(rows) < seldom
        return rule[np.where(other, generator.integers(0, size, rows), column)]

    def depends(column: NDArray, size: int, of: int, evenness: float) -> NDArray:
        return drawn(generator, generator.dirichlet(np.full(of, evenness), size), column)

    nothing = np.zeros(rows, int)
    area, kind = depends(nothing, 1, 40, 0.8), depends(nothing, 1, 30, 0.3)
    code, district = follows(area, 40, 27, 0.08), follows(area, 40, 11, 0.02)
    station = follows(area * 27 + code, 40 * 27, 45, 0.05)
    group, urgency, care = follows(kind, 30, 5, 0), depends(kind, 30, 3, 0.3), depends(kind, 30, 2, 0.3)
    columns = {
        "area": (area, 40),
        "code": (code, 27),
        "station": (station, 45),
        "battalion": (follows(station, 45, 11, 0), 11),
        "district": (district, 11),
        "kind": (kind, 30),
        "group": (group, 5),
        "urgency": (urgency, 3),
        "urgent": (follows(urgency, 3, 2, 0.1), 2),
        "care": (care, 2),
        "unit": (depends(kind * 2 + care, 60, 9, 0.3), 9),
        "alarms": (depends(kind, 30, 3, 0.05), 3),
        "hour": (depends(group, 5, 24, 2), 24),
        "day": (generator.integers(0, 7, rows), 7),
        "building": (depends(area * 5 + group, 200, 12, 0.3), 12),
    }
    codes, sizes = zip(*columns.values(), strict=True)
    return table(np.stack(codes, axis=1), sizes)


def trips(rows: int = 300_000, zones: int = 80) -> Rows:
    """Returns trips by taxi: zones, and numbers in bins that follow from each other but for some noise."""
    generator = np.random.default_rng(3)
    where, popular = generator.normal(size=(zones, 2)), generator.dirichlet(np.full(zones, 0.5))
    apart = np.linalg.norm(where[:, None] - where, axis=2)
    attracted = popular * np.exp(-apart)
    begin = generator.choice(zones, rows, p=popular)
    end = drawn(generator, attracted / attracted.sum(axis=1, keepdims=True), begin)
    hour = generator.choice(24, rows, p=generator.dirichlet(np.full(24, 3.0)))
    distance = 2 * (apart[begin, end] + 0.15) * np.exp(generator.normal(0, 0.15, rows))
    minutes = 4 * distance / (1 + 0.5 * np.sin(hour * math.tau / 24)) * np.exp(generator.normal(0, 0.2, rows))
    fare = 2.5 + 1.6 * distance + 0.4 * minutes + generator.normal(0, 0.2, rows)
    paid = generator.choice(4, rows, p=[0.6, 0.35, 0.03, 0.02])
    tip = np.where(paid == 0, fare * generator.choice([0, 0.1, 0.15, 0.2, 0.25], rows, p=[0.1, 0.1, 0.2, 0.4, 0.2]), 0)
    columns = [(begin, zones), (end, zones), (paid, 4), (hour, 24)]
    for number, bins in ((distance, 50), (minutes, 50), (fare, 60), (tip, 30), (fare + tip, 60)):
        edges = np.linspace(0, np.quantile(number, 0.99), bins)[1:-1]
        columns.append((np.searchsorted(edges, number), bins - 1))
    columns += [
        (generator.choice(6, rows, p=[0.7, 0.14, 0.05, 0.03, 0.05, 0.03]), 6),
        (generator.integers(0, 2, rows), 2),
    ]
    codes, sizes = zip(*columns, strict=True)
    return table(np.stack(codes, axis=1), sizes)


TABLES: dict[str, Callable[[], Rows]] = {
    "tree, strong": lambda: network(rows=20_000, columns=20, largest=20, parents=1, evenness=0.3),
    "tree": lambda: network(rows=50_000, columns=15, largest=10, parents=1, evenness=1.0),
    "tree, weak": lambda: network(rows=50_000, columns=15, largest=14, parents=1, evenness=3.0),
    "two parents": lambda: network(rows=50_000, columns=15, largest=10, parents=2, evenness=0.5),
    "classes": classes,
    "sessions": sessions,
    "places": places,
    "trips": trips,
}


def errors(rows: Rows, workload: str, name: str, epsilon: float, seed: int) -> tuple[float, float]:
    """Returns the largest error and the tv of one run."""
    forget_compiled()
    queries = parse_workload(workload, rows.schema)
    budget = Budget(epsilon=epsilon, delta=1 / rows.rows() ** 2)
    curator = Curator(rows, budget, neighbours="add-remove", unsafe_seed=1000 + seed)
    with mock.patch.object(trials, "ROOM", 0 if name == UNTRIED else trials.ROOM):
        found = merged(model_errors(rows, MECHANISMS[name](curator, queries, seed=seed).model, queries))
    return found.max_error, found.tv or 0.0


def unseen() -> dict[str, Any]:
    """Returns the medians of each mechanism, on each table and workload at each epsilon: max, tv."""
    medians: dict[str, Any] = {}
    for title, made in TABLES.items():
        rows = made()
        for workload, epsilon in itertools.product(WORKLOADS, EPSILONS):
            runs = {
                name: [errors(rows, workload, name, epsilon, seed) for seed in SEEDS[: 1 if name == "aim" else None]]
                for name in MECHANISMS
            }
            found = {name: tuple(map(rounded, np.median(each, axis=0))) for name, each in runs.items()}
            medians[f"{title}, {workload}, epsilon {epsilon:g}"] = found
    return {"unit": "max, tv", "seeds": len(SEEDS), "medians": medians}
