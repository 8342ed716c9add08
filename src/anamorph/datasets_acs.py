"""The prediction tasks of the American Community Survey: income, employment, coverage, travel, mobility, multitask.

The rows are those of a PUMS person file of 2014 to 2018, which the `folktables` package downloads; columns, types and
targets are those of the RAP++ paper. What the schema declares is public: codes and ranges are those of the Census
Bureau's data dictionary, and of each task's own rules. Amounts of money are clamped at 500,000 dollars, since equal
bins of the dictionary's 4.2 million would put nearly everybody into one.

References: Ding, Hardt, Miller, Schmidt, Retiring Adult (2021), for tasks and rules; Vietri et al., Private synthetic
data for multitask learning and marginal queries (2022), tables 1 and 4, for columns. Where the marks of table 4 (ESR,
JWTR, FER) contradict the counts of table 1, the counts are followed: they agree with folktables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anamorph.columns import Categorical, Column, Numeric
from anamorph.errors import DataError, ParameterError, ResourceError, suggestion
from anamorph.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa

Values = Mapping[str, NDArray[np.float64]]
"""The columns of a person file; NaN where a cell is empty."""

MONEY = 500_000
YEARS = range(2014, 2019)
"""Later files call RELP and JWTR otherwise, and count other categories."""

CODES: dict[str, tuple[int, ...]] = {
    "COW": tuple(range(1, 10)),
    "SCHL": tuple(range(1, 25)),
    "MAR": tuple(range(1, 6)),
    "RELP": tuple(range(18)),
    "SEX": (1, 2),
    "RAC1P": tuple(range(1, 10)),
    "WAOB": tuple(range(1, 9)),
    "FOCCP": (0, 1),
    "DIS": (1, 2),
    "ESP": tuple(range(1, 9)),
    "CIT": tuple(range(1, 6)),
    "JWTR": tuple(range(1, 13)),
    "MIL": tuple(range(1, 5)),
    "ANC": (1, 2, 3, 4, 8),
    "NATIVITY": (1, 2),
    "DEAR": (1, 2),
    "DEYE": (1, 2),
    "DREM": (1, 2),
    "GCL": (1, 2),
    "FER": (1, 2),
    "ESR": tuple(range(1, 7)),
    "MIG": (1, 2, 3),
}
"""The codes of each categorical column. FOCCP, "occupation" in the paper, is the flag that one was allocated."""

RANGES: dict[str, tuple[int, int]] = {
    "WKHP": (1, 99),
    "PINCP": (-20_000, MONEY),
    "AGEP": (0, 99),
    "PWGTP": (1, 9999),
    "INTP": (-10_000, MONEY),
    "JWRIP": (1, 10),
    "SEMP": (-10_000, MONEY),
    "WAGP": (0, MONEY),
    "POVPIP": (0, 501),
    "JWMNP": (1, 200),
}
"""The least and the largest value of each numeric column; all are whole."""

COMPLETE = frozenset(
    "MAR RELP SEX RAC1P WAOB FOCCP DIS CIT ANC NATIVITY DEAR DEYE AGEP PWGTP".split()  # noqa: SIM905 - a table
)
"""The columns that everybody has; in all others an empty cell says that the question does not apply."""


@dataclass(frozen=True)
class Label:
    """A target: a column of two classes, made of one of the file. An empty cell is in the class `no`."""

    name: str
    column: str
    holds: Callable[[NDArray[np.float64]], NDArray[np.bool_]]


LABELS = {
    "income": Label("income_over_50000", "PINCP", lambda x: x > 50_000),
    "employment": Label("employed", "ESR", lambda x: x == 1),
    "coverage": Label("public_coverage", "PUBCOV", lambda x: x == 1),
    "travel": Label("commute_over_20", "JWMNP", lambda x: x > 20),
    "mobility": Label("same_home", "MIG", lambda x: x == 1),
}


@dataclass(frozen=True)
class Task:
    """The columns of one task, and who is in it."""

    categorical: tuple[str, ...]
    numeric: tuple[str, ...]
    labels: tuple[Label, ...]
    keeps: Callable[[Values], NDArray[np.bool_]]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Ranges that the rule of `keeps` makes narrower."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns of a file that make the task's, those of its rule included."""
        rule = ("AGEP", "PINCP", "WKHP", "PWGTP", "ESR")
        return tuple(dict.fromkeys((*self.categorical, *self.numeric, *(label.column for label in self.labels), *rule)))


def _task(
    name: str,
    extra: str,
    less: str,
    keeps: Callable[[Values], NDArray[np.bool_]],
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> Task:
    """Returns a task: columns that all tasks share and `extra` ones, all numbers but `less`, and one label."""
    categorical = tuple(column for column in CODES if column in f"SCHL MAR SEX RAC1P WAOB FOCCP {extra}".split())
    numeric = tuple(column for column in RANGES if column not in less.split())
    return Task(categorical, numeric, (LABELS[name],), keeps, ranges or {})


HEALTH = "DIS ESP CIT MIL ANC NATIVITY DEAR DEYE DREM"
TASKS: dict[str, Task] = {
    "income": _task(
        "income",
        "COW RELP",
        "PINCP",
        lambda row: (row["AGEP"] > 16) & (row["PINCP"] > 100) & (row["WKHP"] > 0) & (row["PWGTP"] >= 1),
        {"AGEP": (17, 99)},
    ),
    "employment": _task("employment", f"RELP MIG {HEALTH}", "", lambda row: row["AGEP"] >= 0),
    "coverage": _task(
        "coverage",
        f"MIG FER ESR {HEALTH}",
        "",
        lambda row: (row["AGEP"] < 65) & (row["PINCP"] <= 30_000),
        {"AGEP": (0, 64), "PINCP": (-20_000, 30_000)},
    ),
    "travel": _task(
        "travel",
        "RELP MIG DIS ESP CIT JWTR",
        "JWMNP",
        lambda row: (row["AGEP"] > 16) & (row["PWGTP"] >= 1) & (row["ESR"] == 1),
        {"AGEP": (17, 99)},
    ),
    "mobility": _task(
        "mobility",
        f"COW RELP GCL ESR {HEALTH}",
        "",
        lambda row: (row["AGEP"] > 18) & (row["AGEP"] < 35),
        {"AGEP": (19, 34)},
    ),
    "multitask": Task(
        tuple(column for column in CODES if column not in ("ESR", "MIG")),
        tuple(column for column in RANGES if column not in ("PINCP", "JWMNP")),
        tuple(LABELS.values()),
        lambda row: row["AGEP"] >= 0,
    ),
}


def acs(
    task: str, state: str, year: int = 2018, *, directory: str | Path = "data", bins: int | None = 32
) -> tuple[pa.Table, Schema]:
    """Returns the rows and the schema of a task in one state; downloads its file into a directory, once.

    Args:
        task: income, employment, coverage, travel, mobility or multitask.
        state: two capital letters, such as "NY".
        year: 2014 to 2018; the paper's counts of rows are those of 2014.
        directory: where the files are kept.
        bins: of each numeric column, at most; none for native numbers, which RAP++ takes.
    """
    schema = acs_schema(task, bins=bins, dataset=f"acs_{state}_{task}_{year}")
    if year not in YEARS:
        raise ParameterError(f"year ({year}) must be from {YEARS[0]} to {YEARS[-1]}: later files have other columns")
    try:
        from folktables import ACSDataSource  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ResourceError("folktables must be installed to load ACS data: pip install 'anamorph[acs]'") from None
    source = ACSDataSource(survey_year=str(year), horizon="1-Year", survey="person", root_dir=str(directory))
    try:
        frame = source.get_data(states=[state], download=True)
    except AssertionError:
        raise ParameterError(f"state ({state!r}) must be the two letters of a state, such as 'NY'") from None
    except OSError:
        raise ResourceError(f"the person file of {state}, {year}, must be there or be downloaded: it is not") from None
    return acs_table(frame, task), schema


def acs_schema(task: str, *, bins: int | None = 32, dataset: str | None = None) -> Schema:
    """Returns the schema of a task: features in the paper's order, then its targets."""
    wanted = find_task(task)
    columns: list[Column] = [
        Categorical(name=name, categories=CODES[name], missing=name not in COMPLETE, source="public")
        for name in wanted.categorical
    ]
    for name in wanted.numeric:
        lower, upper = wanted.ranges.get(name, RANGES[name])
        steps: dict[str, Any] = {"native": True} if bins is None else {"bins": min(bins, upper - lower + 1)}
        columns.append(
            Numeric(
                name=name,
                lower=lower,
                upper=upper,
                integer=True,
                missing=name not in COMPLETE,
                source="public",
                **steps,
            )
        )
    columns += [Categorical(name=label.name, categories=("no", "yes"), source="public") for label in wanted.labels]
    return Schema(tuple(columns), dataset or f"acs_{task}")


def acs_table(frame: Any, task: str) -> pa.Table:  # noqa: ANN401 - any frame
    """Returns the rows of a task, out of a PUMS person file read as a frame: pandas, polars or Arrow."""
    import pyarrow as pa  # noqa: PLC0415

    wanted = find_task(task)
    row = person_values(frame, wanted.needs)
    kept = wanted.keeps(row)
    columns = {}
    for name in (*wanted.categorical, *wanted.numeric):
        values = row[name][kept]
        empty = np.isnan(values)
        columns[name] = pa.array(np.where(empty, 0, values).astype(np.int64), mask=empty)
    for label in wanted.labels:
        columns[label.name] = pa.array(np.where(label.holds(row[label.column][kept]), "yes", "no"))
    return pa.table(columns)


def person_values(frame: Any, names: tuple[str, ...]) -> dict[str, NDArray[np.float64]]:  # noqa: ANN401
    """Returns columns of a person file as numbers; an empty or blank cell is NaN."""
    import narwhals as nw  # noqa: PLC0415

    known = nw.from_native(frame, eager_only=True)
    found = {}
    for name in names:
        if name not in known.columns:
            raise DataError(f"column {name!r} must be in the person file.{suggestion(name, known.columns)}")
        column = known[name]
        numbers = column.cast(nw.Float64).to_numpy() if column.dtype.is_numeric() else text_numbers(column.to_list())
        values = np.asarray(numbers, np.float64)
        if not np.all(np.isnan(values) | (np.isfinite(values) & (values == np.floor(values)))):
            raise DataError(f"column {name!r} of the person file must hold whole numbers or nothing")
        found[name] = values
    return found


def text_numbers(cells: Sequence[object]) -> list[float]:
    """Returns the number of each cell; NaN for a blank one, infinity for what is none."""
    numbers = []
    for cell in cells:
        text = "" if cell is None else str(cell).strip()
        try:
            numbers.append(float(text or "nan"))
        except ValueError:
            numbers.append(math.inf)
    return numbers


def find_task(name: str) -> Task:
    """Returns the task of a name."""
    if name not in TASKS:
        raise ParameterError(f"task ({name!r}) must be one of {', '.join(TASKS)}.{suggestion(name, TASKS)}")
    return TASKS[name]
