"""How long counting takes: all 364 three-way marginals of ADULT, through our source and by bare SQL.

Both read the same Parquet file. Ours is timed from opening the file to the last count; the bare SQL is what an analyst
would write, a GROUP BY for each marginal straight on the file.
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
import pyarrow.csv
import pyarrow.parquet

from anamorph.datasets import benchmark
from anamorph.schema import Schema
from anamorph.sources import open_source


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
