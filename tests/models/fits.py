"""What the tests of estimators share: small exact tables, measurements of them, and how often something is compiled."""

from __future__ import annotations

import itertools
from functools import cache

import jax.monitoring
import numpy as np

from anamorph.columns import Codes
from anamorph.curator.tallies import count
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4)
PAIRS = Workload((Marginals(SIZES, ((0, 1), (0, 2), (1, 2))),))
WIDE = (60, 70, 65, 30)
SETS = tuple(itertools.combinations(range(4), 2))
WHOLE = Workload((Marginals(WIDE, tuple((i,) for i in range(4))), Marginals(WIDE, SETS)))
"""All fits of this file are of these marginals and as many rows, so that they are compiled once."""

COMPILED: list[str] = []


def _compiled(event: str, _seconds: float, **_details: object) -> None:
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_compiled)


def truth(workload, rows=200, sizes=SIZES, seed=0):
    """Exact fractions of a small table with dependent columns."""
    generator = np.random.default_rng(seed)
    first = generator.integers(0, sizes[0], rows)
    columns = [first] + [(first + generator.binomial(2, 0.3, rows)) % size for size in sizes[1:]]
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    source = TableSource(Table(np.stack(columns, axis=1).astype(np.int32), sizes), schema)
    return np.concatenate([count(piece.tally, source) for piece in workload.pieces()]) / rows


def measure(workload, values, sigma=0.01, total=100.0):
    return Measurement(workload, np.asarray(values, float), np.full(workload.blocks, sigma), total)


@cache
def exact():
    """The answers of a table of few kinds of rows."""
    generator = np.random.default_rng(1)
    kinds = np.concatenate([generator.dirichlet(np.full(size, 0.1), 6).T for size in WIDE]).astype(np.float32)
    return answers(RelaxedRows(WIDE, kinds, np.full(6, 1 / 6, np.float32)), WHOLE).astype(float)


def unrelated():
    """The answers of a table whose columns do not depend on each other."""
    generator = np.random.default_rng(2)
    kind = np.concatenate([generator.dirichlet(np.full(size, 1.0), 1).T for size in WIDE]).astype(np.float32)
    return answers(RelaxedRows(WIDE, kind, np.ones(1, np.float32)), WHOLE).astype(float)


def noisy(sigma, seed=0, values=None, total=5000.0):
    heard = (exact() if values is None else values) + np.random.default_rng(seed).normal(0, sigma, WHOLE.cells)
    return [measure(WHOLE, heard, sigma=sigma, total=total)]


def answers(model, workload):
    return np.concatenate(list(model.answers(workload)))


def blocks_of(item):
    """The sigma and the number of cells of each run of a measurement's answers."""
    for piece in item.workload.pieces():
        yield item.sigma[piece.first : piece.first + piece.blocks], piece.tally.cells


def chi_squared(model, measurements):
    found = 0.0
    for item in measurements:
        sigma = np.concatenate([np.broadcast_to(s, c) for s, c in blocks_of(item)])
        found += np.sum(((answers(model, item.workload) - item.values) / sigma) ** 2) / (2 * item.total)
    return found


def compilations(estimator, sizes, workload, rounds):
    """New compilations of each round of a run: answers, then a fit with one measurement more."""
    model, log, new = estimator.init(sizes, seed=0), [], []
    for taken in rounds:
        before = len(COMPILED)
        answers(model, workload)
        part = workload.take(taken)
        log.append(measure(part, np.full(part.cells, 0.1)))
        model = estimator.fit(model, log)
        new.append(len(COMPILED) - before)
    return new
