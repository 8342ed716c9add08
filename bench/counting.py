"""How long counting takes.

All 364 three-way marginals of ADULT, through our source and by bare SQL: both read the same Parquet file. Ours is timed
from opening the file to the last count; the bare SQL is what an analyst would write, a GROUP BY for each marginal
straight on the file.

20,000 prefixes of numbers given a label: by ranks, in memory and inside the engine, and by comparing every row with
every test.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from anamorph.columns import Codes
from anamorph.curator.where import Where, where_counts
from anamorph.datasets import benchmark
from anamorph.schema import Schema
from anamorph.sources import open_source
from anamorph.table import Table


def ours(path: str, schema: Schema, sets: list[tuple[int, ...]]) -> int:
    """Returns the number of non-empty cells, counted by our source."""
    with open_source(path, schema) as source:
        return sum(len(cells) for cells, _ in source.counts(sets))


def bare(path: str, schema: Schema, sets: list[tuple[int, ...]]) -> int:
    """Returns the number of non-empty cells, counted by plain SQL."""
    total = 0
    with duckdb.connect() as connection:
        for columns in sets:
            names = ", ".join(f'"{schema.names[i]}"' for i in columns)
            statement = f"SELECT {names}, COUNT(*) AS number FROM '{path}' GROUP BY {names}"
            total += len(connection.execute(statement).fetchnumpy()["number"])
    return total


def seconds(work: Callable[[], int]) -> float:
    """Returns how long some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def counting(repeats: int = 5) -> dict[str, Any]:
    """Returns the times of both, in turn, and their ratio."""
    path_of_codes, schema = benchmark("adult")
    sets = list(itertools.combinations(range(len(schema.columns)), 3))
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "adult.parquet")
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(path_of_codes), path)
        cells = ours(path, schema, sets)
        if cells != bare(path, schema, sets):
            raise SystemExit("the two counts must agree")
        pairs = [
            (seconds(lambda: ours(path, schema, sets)), seconds(lambda: bare(path, schema, sets)))
            for _ in range(repeats)
        ]
    mine, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = mine / plain
    return {
        "marginals": len(sets),
        "cells": cells,
        "seconds": mine,
        "bare_seconds": plain,
        "ratio": ratio,
        "target": 1.5,
        "reached": ratio <= 1.5,
    }


ROWS, TESTS = 50_000, 20_000
LIMITS = (2, 74, 1 << 20, 100_000, 99)
"""A label, an age, a weight, a gain and hours: how many codes each has, as in ADULT."""


def seconds_and(work: Callable[[], NDArray[np.int64]]) -> tuple[float, NDArray[np.int64]]:
    """Returns how long some counting takes, and the counts."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def directly(tally: Where, codes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the counts of tests, every row compared with every test, number by number."""
    cells, counts = codes[:, 0], np.zeros((tally.tests, 2), np.int64)
    for label in (0, 1):
        numbers = np.asfortranarray(codes[cells == label][:, tally.numbers])
        for first in range(0, tally.tests, 64):
            span = slice(first, first + 64)
            counts[span, label] = np.count_nonzero(tally.holds(numbers, span), axis=1)
    return counts.ravel()


def tests() -> dict[str, Any]:
    """Returns the times of tests of one, two and three numbers; the ratio is that of ranks to direct comparison."""
    generator = np.random.default_rng(0)
    codes = np.stack([np.floor(limit * generator.random(ROWS) ** 2) for limit in LIMITS], axis=1).astype(np.int32)
    schema = Schema(tuple(Codes(name=f"c{i}", values=limit) for i, limit in enumerate(LIMITS)), dataset="tests")
    frame = pa.table({f"c{i}": codes[:, i] for i in range(len(LIMITS))})
    times: dict[str, list[float]] = {"ranks": [], "engine": [], "direct": []}
    with open_source(frame, schema) as engine:
        for numbers in ((2,), (1, 4), (2, 3), (1, 2, 3)):
            limits = tuple(LIMITS[number] for number in numbers)
            bounds = np.floor(generator.random((TESTS, len(numbers))) * limits).astype(np.int64)
            tally = Where(LIMITS, (0,), numbers, limits, bounds)
            ways = {
                "direct": lambda tally=tally: directly(tally, codes),
                "ranks": lambda tally=tally: where_counts(tally, Table(codes, LIMITS)),
                "engine": lambda tally=tally: where_counts(tally, engine),
            }
            found = {name: seconds_and(work) for name, work in ways.items()}
            if not all(np.array_equal(counts, found["direct"][1]) for _, counts in found.values()):
                raise SystemExit("the counts must agree")
            for name, (taken, _) in found.items():
                times[name].append(taken)
    ratio = sum(times["ranks"]) / sum(times["direct"])
    return {
        "rows": ROWS,
        "tests": TESTS,
        "numbers": [1, 2, 2, 3],
        "seconds": times["ranks"],
        "engine_seconds": times["engine"],
        "direct_seconds": times["direct"],
        "ratio": ratio,
        "target": 0.5,
        "reached": ratio <= 0.5,
    }
