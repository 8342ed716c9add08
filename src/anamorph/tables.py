"""Tables that people take away: synthetic rows, and the answers of a workload, as CSV or Parquet files."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.columns import OTHER, Categorical, Codes, Column, Datetime, Numeric, guarded, label
from anamorph.curator.bands import Bands
from anamorph.curator.rowwise import RowFunction
from anamorph.curator.tallies import AtLeast, GroupBy, Tally, marginal_cells
from anamorph.curator.where import Where
from anamorph.errors import ParameterError, ResourceError
from anamorph.intervals import intervals
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.spec import workload as parse_workload
from anamorph.release import Release
from anamorph.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 10**10
STAMP = "NOT PRIVATE"
"""The column that marks every table made from a seeded run."""

LARGEST_ANSWERS = 50_000_000
"""The most answers that are written to one file."""


def sample_rows(release: Release, rows: int | None = None, *, seed: int = 0) -> pa.Table:
    """Returns synthetic rows in the original schema: as many as the data publicly had, unless told."""
    wanted = max(round(release.total), 1) if rows is None else rows
    if not 1 <= wanted <= MOST_ROWS:
        raise ParameterError(f"rows ({wanted}) must be from 1 to {MOST_ROWS}")
    table = release.model.sample(wanted, seed=seed, keep=measured_sets(release))
    return stamped(release.schema.decode(table, np.random.default_rng((seed, 1))), release)


def measured_sets(release: Release) -> tuple[tuple[int, ...], ...]:
    """Returns the columns of each marginal or residual that was measured, but for one inside another of one more.

    They are what rows should keep: the smallest first, as many as can be held.
    """
    cells: dict[frozenset[int], int] = {}
    for part in (part for measurement in release.measurements for part in measurement.workload.parts):
        if isinstance(part, Marginals | Residuals | Banded):
            sizes = part.merged.sizes if isinstance(part, Banded) else part.sizes
            cells |= {frozenset(features): marginal_cells(sizes, features) for features in part.sets}
    inner = {frozenset(less) for features in cells for less in itertools.combinations(features, len(features) - 1)}
    found = [features for features in cells if features not in inner and len(features) > 1]
    found.sort(key=lambda features: (cells[features], sorted(features)))
    held = itertools.accumulate(cells[features] for features in found)
    return tuple(
        tuple(sorted(features)) for features, all_held in zip(found, held, strict=True) if all_held <= LARGEST_ANSWERS
    )


def answer_table(release: Release, spec: str, *, confidence: float = 0.95) -> pa.Table:
    """Returns every query of a workload with its answer: columns, values, fraction, count; and low, high.

    These are the ends of the interval that holds the true fraction with the confidence given; null where none is known.
    """
    import pyarrow as pa  # noqa: PLC0415

    workload = parse_workload(spec, release.schema)
    if workload.cells > LARGEST_ANSWERS:
        raise ParameterError(
            f"the workload has {workload.cells} queries; a file of answers must have at most {LARGEST_ANSWERS}"
        )
    names, values, fractions, lows, highs = [], [], [], [], []
    known = intervals(release, confidence)
    for piece, answers in zip(workload.pieces(), release.model.answers(workload), strict=True):
        progress.report("answer", piece.first + piece.blocks, workload.blocks)
        name, texts = query_texts(piece.tally, release.schema)
        names.append(pa.array([name]).take(pa.array(np.zeros(piece.tally.cells, np.int32))))
        values.append(pa.array(texts))
        fractions.append(answers.astype(np.float64))
        low, high = known.tally(piece.tally)
        lows.append(low)
        highs.append(high)
    fraction = np.concatenate(fractions)
    arrays = [
        pa.chunked_array(names),
        pa.chunked_array(values),
        pa.array(fraction),
        pa.array(fraction * release.total),
        pa.array(np.concatenate(lows), from_pandas=True),
        pa.array(np.concatenate(highs), from_pandas=True),
    ]
    return stamped(pa.table(arrays, names=["columns", "values", "fraction", "count", "low", "high"]), release)


def query_texts(tally: Tally, schema: Schema) -> tuple[str, list[str]]:
    """Returns what the queries of a tally have in common, and what each of them asks for."""
    if isinstance(tally, RowFunction):
        return tally.function.name, [str(value) for value in range(tally.cells)]
    if isinstance(tally, Where):
        return test_texts(tally, schema)
    if isinstance(tally, Bands):
        cut = zip(tally.features, tally.cuts, strict=True)
        labels = [band_labels(schema.columns[f], cuts) if cuts else code_labels(schema.columns[f]) for f, cuts in cut]
        return " x ".join(schema.names[feature] for feature in tally.features), crossed(labels)
    slab = tally.slab if isinstance(tally, AtLeast) else tally
    if not isinstance(slab, GroupBy):
        raise ParameterError("the workload must be of whole blocks")
    spans = zip(slab.features, slab.starts, slab.shape, strict=True)
    labels = [code_labels(schema.columns[feature])[start : start + size] for feature, start, size in spans]
    name = " x ".join(schema.names[feature] for feature in slab.features)
    return f"at least {tally.least} of {name}" if isinstance(tally, AtLeast) else name, crossed(labels)


def crossed(labels: list[list[str]]) -> list[str]:
    """Returns a text for each combination, in C order."""
    return [" x ".join(parts) for parts in itertools.product(*labels)]


def band_labels(column: Column, cuts: tuple[int, ...]) -> list[str]:
    """Returns which numbers of a column, or whether missing ones, are in each of its bands."""
    grid = column.grid
    if grid is None:
        raise ParameterError(f"column {column.name!r} must be numeric or datetime")
    codes = np.array(sorted({0, *cuts, grid.bins}))
    if grid.integer:
        numbers = grid.first(codes) - (codes == grid.bins)  # the last one is in its band
        ends = [column.text(number) if isinstance(column, Datetime) else str(number) for number in numbers.tolist()]
    else:
        ends = [f"{end:.12g}" for end in grid.at(codes).tolist()]
    texts = [f"{low} <= {column.name} < {high}" for low, high in itertools.pairwise(ends)]
    texts[-1] = f"{ends[-2]} <= {column.name} <= {ends[-1]}"
    if column.missing and grid.bins not in cuts:
        texts[-1] += " or (missing)"
    return texts + ["(missing)"] * (grid.bins in cuts)


def test_texts(tally: Where, schema: Schema) -> tuple[str, list[str]]:
    """Returns the columns of tests of numbers, and for each test and cell what it asks for."""
    names = [schema.names[number] for number in tally.numbers]
    if tally.weights is None:
        columns = [schema.columns[number] for number in tally.numbers]
        bounds = [at_most(column, codes) for column, codes in zip(columns, tally.bounds.T, strict=True)]
        tests = [" x ".join(parts) for parts in zip(*bounds, strict=True)]
    else:
        tests, names = halfspace_texts(tally, names), [" + ".join(names)]
    if not tally.given:
        return " x ".join(names), tests
    given, cells = query_texts(GroupBy(tally.sizes, tally.given, 0, tally.sizes[tally.given[0]]), schema)
    return " x ".join((given, *names)), [f"{cell} x {test}" for test in tests for cell in cells]


def at_most(column: Column, codes: NDArray[np.int64]) -> list[str]:
    """Returns which numbers of a native column have at most each of some codes."""
    grid = column.grid
    if grid is None:
        raise ParameterError(f"column {column.name!r} must be numeric or datetime")
    if grid.integer:
        last = (grid.first(codes + 1) - 1).tolist()
        return [f"<= {column.text(number) if isinstance(column, Datetime) else number}" for number in last]
    ends = grid.at(codes + 1).tolist()
    return [f"{'<' if code < grid.bins - 1 else '<='} {end:.12g}" for code, end in zip(codes, ends, strict=True)]


def halfspace_texts(tally: Where, names: list[str]) -> list[str]:
    """Returns the inequality of each halfspace; a number is 0 at the lower end of its range and 1 at the upper."""
    weights = np.asarray(tally.weights, np.float64)
    slopes = weights * np.array(tally.limits)
    lengths = np.maximum(np.linalg.norm(slopes, axis=1), 1.0)
    bounds = (tally.bounds + weights.sum(axis=1) / 2) / lengths
    return [
        " ".join(f"{slope:+.6g} {name}" for slope, name in zip(line, names, strict=True)) + f" <= {bound:.6g}"
        for line, bound in zip(slopes / lengths[:, None], bounds, strict=True)
    ]


def stamped(table: pa.Table, release: Release) -> pa.Table:
    """Returns the table; with a column that says so where the release is not private."""
    import pyarrow as pa  # noqa: PLC0415

    return table if release.privacy.private else table.append_column(STAMP, pa.repeat(True, table.num_rows))


def code_labels(column: Column) -> list[str]:
    """Returns a text for each code of a column."""
    if isinstance(column, Categorical):
        texts = [label(category) for category in column.categories] + [OTHER] * column.other
    elif isinstance(column, Numeric):
        edges = [f"{edge:.12g}" for edge in column.at(range(column.bins + 1))]
        texts = [f"[{low}, {high})" for low, high in itertools.pairwise(edges)]
    elif isinstance(column, Datetime):
        pairs = itertools.pairwise(column.grid.firsts.tolist())
        texts = [f"[{column.text(first)}, {column.text(after - 1)}]" for first, after in pairs]
    elif isinstance(column, Codes):
        texts = [str(code) for code in range(column.values)]
    else:
        raise ParameterError(f"column {column.name!r} must be categorical, ordinal, numeric, datetime or codes")
    return texts + ["(missing)"] * column.missing


def write_table(table: pa.Table, path: Path, *, overwrite: bool = False) -> None:
    """Writes a table as CSV or Parquet, by the name's ending; whole or not at all.

    In CSV, a text that a spreadsheet would take for a formula gets a leading apostrophe; reading accepts it.
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".parquet"):
        raise ParameterError(f"output ({str(path)!r}) must end in .csv or .parquet")

    def write(fresh: Path) -> None:
        if ending == ".parquet":
            from pyarrow import parquet  # noqa: PLC0415

            parquet.write_table(table, fresh)
        else:
            from pyarrow import csv  # noqa: PLC0415

            csv.write_csv(guard_texts(table), fresh)

    replace_file(path, overwrite=overwrite, write=write)


def guard_texts(table: pa.Table) -> pa.Table:
    """Returns the table with formulas disarmed, in column names too."""
    import pyarrow as pa  # noqa: PLC0415

    arrays = []
    for array in table.columns:
        if pa.types.is_string(array.type):
            encoded = array.dictionary_encode().combine_chunks()
            encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
            texts = pa.array([guarded(text) for text in encoded.dictionary.to_pylist()], pa.string())
            array = pa.DictionaryArray.from_arrays(encoded.indices, texts).cast(pa.string())  # noqa: PLW2901
        arrays.append(array)
    return pa.table(arrays, names=[guarded(name) for name in table.column_names])


def replace_file(path: Path, *, overwrite: bool, write: Callable[[Path], object]) -> None:
    """Writes a file beside its target, syncs it, and renames it into place: an earlier file is never harmed."""
    if path.exists() and not overwrite:
        raise ParameterError(f"output ({str(path)!r}) must not exist yet: name another, or add --overwrite")
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        write(fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise ResourceError(
            f"output ({str(path)!r}) cannot be written: {error.strerror or 'the system refused'}"
        ) from None
    finally:
        fresh.unlink(missing_ok=True)
