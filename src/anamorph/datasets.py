"""Datasets: a fictional survey made here, and loaders for the public benchmark data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anamorph.columns import Categorical, Numeric, Ordinal
from anamorph.errors import ParameterError
from anamorph.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa

REGIONS = ("north", "east", "south", "west", "islands")
EDUCATION = ("none", "school", "college", "degree", "doctorate")
WORK = ("employed", "self-employed", "student", "retired", "seeking", "at home")


def survey_schema() -> Schema:
    """Returns the schema of the fictional survey."""
    return Schema(
        (
            Numeric(name="age", lower=16, upper=95, bins=16, integer=True, source="public"),
            Categorical(name="sex", categories=("F", "M"), other=True, source="public"),
            Categorical(name="region", categories=REGIONS, source="public"),
            Ordinal(name="education", categories=EDUCATION, missing=True, source="public"),
            Categorical(name="work", categories=WORK, source="public"),
            Numeric(name="income", lower=0, upper=200_000, bins=20, missing=True, source="declared"),
            Categorical(name="owns_home", categories=("no", "yes"), source="public"),
        ),
        dataset="survey",
    )


def survey(rows: int, *, seed: int = 0) -> pa.Table:
    """Returns the fictional survey: people who never were, with the dependences that real ones have."""
    import pyarrow as pa  # noqa: PLC0415

    if rows < 1:
        raise ParameterError(f"rows ({rows}) must be at least 1")
    random = np.random.default_rng(seed)
    age = np.clip(random.gamma(6.0, 7.5, rows), 16, 95).astype(np.int64)
    sex = np.array(["F", "M", "X"])[random.choice(3, rows, p=(0.505, 0.485, 0.01))]
    region = random.choice(5, rows, p=(0.30, 0.22, 0.25, 0.17, 0.06))
    drive = random.normal(size=rows) + 0.3 * (region == 1)
    education = np.clip(np.floor(1.8 + 0.9 * drive + 0.4 * (age < 45)), 0, 4).astype(np.int64)
    young, old = age < 22, age > 64
    work = np.where(young, 2, np.where(old, 3, random.choice(6, rows, p=(0.66, 0.14, 0.03, 0.02, 0.08, 0.07))))
    scale = np.array([34_000, 38_000, 6_000, 19_000, 9_000, 4_000])[work]
    income = scale * np.exp(0.45 * random.normal(size=rows) + 0.22 * (education - 2)) * (1 + 0.004 * (age - 40))
    owns = random.random(rows) < 1 / (1 + np.exp(-(age - 42) / 9 - (income - 30_000) / 40_000))
    return pa.table(
        {
            "age": age,
            "sex": sex,
            "region": np.array(REGIONS)[region],
            "education": pa.array(np.array(EDUCATION)[education], mask=random.random(rows) < 0.03),
            "work": np.array(WORK)[work],
            "income": pa.array(np.round(income, 2), mask=random.random(rows) < 0.06),
            "owns_home": np.where(owns, "yes", "no"),
        }
    )


def benchmark_directory() -> Path | None:
    """Returns the directory of the public benchmark data (`ANAMORPH_DATA`, or ../shared/data), if it is there."""
    directory = Path(os.environ.get("ANAMORPH_DATA", "../shared/data"))
    return directory if (directory / "adult-domain.json").exists() else None


def benchmark(name: str) -> tuple[Path, Schema]:
    """Returns the path and the schema of a coded benchmark dataset: adult, loans, nltcs, titanic."""
    directory = benchmark_directory()
    if directory is None or not (directory / f"{name}.csv.gz").exists():
        raise ParameterError(f"dataset ({name!r}) must be in the benchmark data: set ANAMORPH_DATA to its directory")
    return directory / f"{name}.csv.gz", Schema.load(directory / f"{name}-domain.json")
