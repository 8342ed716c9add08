"""Release directories: saved whole or not at all, loaded only if every byte is as it was written.

    RELEASE/
      release.json               schema, promise, spends, mechanism, workload; the hash of each file below
      model.safetensors          the model's arrays
      measurements.safetensors   noisy answers and their sigma

No pickle, no path taken from a file: the names are fixed, links are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.budget import Budget, Relation
from anamorph.curator.chain import sync_directory
from anamorph.curator.cosines import Cosines
from anamorph.curator.tallies import check_tally
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError, ParameterError, ResourceError, UsageError
from anamorph.models.answers import Answers, Zero
from anamorph.models.banded import BandedRows
from anamorph.models.generator import Generator
from anamorph.models.graphical import GraphicalModel
from anamorph.models.least_squares import LeastSquares
from anamorph.models.listed import ListedRows
from anamorph.models.mixed import MixedRows
from anamorph.models.model import Model
from anamorph.models.relaxed import RelaxedRows
from anamorph.models.universe import Universe
from anamorph.queries.bands import Banded
from anamorph.queries.custom import Custom, CustomCells, Recorded
from anamorph.queries.embeddings import Embedding
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Queries, Workload
from anamorph.release import Measurement, Privacy, Release, Spend
from anamorph.schema import Schema

FORMAT = "anamorph release"
VERSION = 1
HEADER = "release.json"
ARRAYS = ("model.safetensors", "measurements.safetensors")
MODELS: dict[str, type[Model]] = {
    "relaxed": RelaxedRows,
    "generator": Generator,
    "mixed": MixedRows,
    "banded": BandedRows,
    "graphical": GraphicalModel,
    "listed": ListedRows,
    "universe": Universe,
    "least-squares": LeastSquares,
    "answers": Answers,
    "zero": Zero,
}
LARGEST_HEADER = 256 << 20


def save(release: Release, directory: str | Path, *, overwrite: bool = False) -> str:
    """Writes a release directory; returns the hash that identifies it.

    The directory appears by one rename, after everything in it is on disk; an earlier one is replaced only then.
    """
    from safetensors.numpy import save as encode  # noqa: PLC0415

    directory = Path(directory)
    check_target(directory, overwrite=overwrite)
    measured, described = plain_measurements(release.measurements)
    contents = {
        "model.safetensors": encode({name: np.ascontiguousarray(a) for name, a in release.model.arrays().items()}),
        "measurements.safetensors": encode(measured),
    }
    header = render(plain_header(release, described, contents))
    contents[HEADER] = header
    write_directory(directory, contents)
    return hashlib.sha256(header).hexdigest()


def load(directory: str | Path) -> Release:
    """Returns the release of a directory; refuses anything that is damaged or not ours."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ParameterError(f"release ({str(directory)!r}) must be a directory made by `anamorph fit`")
    header = parse_header(read(directory, HEADER, limit=LARGEST_HEADER))
    arrays = {}
    for name in ARRAYS:
        content = read(directory, name)
        if hashlib.sha256(content).hexdigest() != header["files"].get(name):
            raise CorruptionError(f"release {str(directory)!r}: {name} must be as it was written; it was changed")
        arrays[name] = decode(content, directory / name)
    try:
        return from_plain(header, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, UsageError):
        raise CorruptionError(
            f"release {str(directory)!r}: release.json must describe a release; it does not"
        ) from None


def check_target(directory: Path, *, overwrite: bool) -> None:
    """Refuses, before anything is spent, a target that could not be written."""
    if directory.is_symlink() or not directory.name:
        raise ParameterError(f"output ({str(directory)!r}) must be a name, and not that of a link")
    if directory.exists() and not overwrite:
        raise ParameterError(f"output ({str(directory)!r}) must not exist yet: name another, or add --overwrite")
    if directory.exists() and (
        not directory.is_dir() or {path.name for path in directory.iterdir()} - {HEADER, *ARRAYS}
    ):
        raise ParameterError(f"output ({str(directory)!r}) must be a release to be overwritten; it holds other files")
    probe = directory.parent / f".{directory.name}.{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ResourceError(f"output ({str(directory)!r}) cannot be written: {error.strerror}") from None


def write_directory(directory: Path, contents: dict[str, bytes]) -> None:
    """Writes files into a new directory beside the target, syncs them, and renames it into place."""
    fresh = directory.parent / f".{directory.name}.{secrets.token_hex(4)}"
    old = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.old"
    earlier = directory.exists()
    try:
        fresh.mkdir()
        for name, content in contents.items():
            write_file(fresh / name, content)
        sync_directory(fresh)
        if earlier:
            directory.rename(old)
        fresh.rename(directory)
        sync_directory(directory.parent)
    except BaseException as error:
        if directory.exists() and (old.exists() or not earlier):
            directory.rename(fresh)
        if old.exists():
            old.rename(directory)
        if isinstance(error, OSError):
            raise ResourceError(f"output ({str(directory)!r}) cannot be written: {error.strerror}") from None
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file and waits until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path, name: str, limit: int | None = None) -> bytes:
    """Returns the content of a plain file of the release."""
    path = directory / name
    if path.is_symlink() or not path.is_file():
        raise CorruptionError(f"release {str(directory)!r} must hold the file {name}; it does not")
    if limit is not None and path.stat().st_size > limit:
        raise CorruptionError(f"release {str(directory)!r}: {name} must be at most {limit >> 20} MiB")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ResourceError(f"release {str(directory)!r}: {name} cannot be read: {error.strerror}") from None


def decode(content: bytes, path: Path) -> dict[str, NDArray]:
    """Returns the arrays of a safetensors file."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.numpy import load as decode_arrays  # noqa: PLC0415

    try:
        return decode_arrays(content)
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise CorruptionError(f"release {str(path.parent)!r}: {path.name} must be safetensors; it is not") from None


def parse_header(content: bytes) -> dict[str, Any]:
    """Returns the JSON of a release: duplicate keys and NaN are refused, and so is any format but ours."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    def refuse(constant: str) -> float:
        raise ValueError(constant)

    def finite(number: str) -> float:
        return float(number) if math.isfinite(float(number)) else refuse(number)

    try:
        header = json.loads(content, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError):
        raise CorruptionError("release.json must be JSON without duplicate keys or NaN; it is not") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("files"), dict):
        raise CorruptionError("release.json must be one that anamorph wrote; it is not")
    if header.get("version") != VERSION:
        raise CorruptionError(f"release.json: version ({header.get('version')!r}) must be {VERSION}: update anamorph")
    plain = {key: value for key, value in header.items() if key != "checksum"}
    if render(plain) != content:
        raise CorruptionError("release.json must be as it was written; it was changed")
    return plain


def render(plain: dict[str, Any]) -> bytes:
    """Returns the bytes of a header: its JSON, with the hash of all the rest as the last entry."""
    rest = json.dumps(plain, indent=1, allow_nan=False)
    checksum = hashlib.sha256(rest.encode()).hexdigest()
    return json.dumps(plain | {"checksum": checksum}, indent=1, allow_nan=False).encode()


def plain_header(release: Release, described: list[Any], contents: dict[str, bytes]) -> dict[str, Any]:
    """Returns all that a release holds besides arrays."""
    kinds = [kind for kind, model in MODELS.items() if isinstance(release.model, model)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "private": release.privacy.private,
        "statement": release.privacy.statement(),
        "schema": release.schema.to_dict(),
        "model": kinds[0],
        "total": release.total,
        "mechanism": dict(release.mechanism),
        "workload": release.workload,
        "degraded": release.degraded,
        "privacy": asdict(release.privacy),
        "measurements": described,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }


def from_plain(header: dict[str, Any], arrays: dict[str, dict[str, NDArray]]) -> Release:
    """Returns the release that a header and its arrays describe."""
    schema = Schema.from_dict(header["schema"])
    promise = privacy_of(header["privacy"])
    if header["private"] is not promise.private or header["statement"] != promise.statement():
        raise ValueError("the statement must be that of the promise")
    return Release(
        schema,
        MODELS[header["model"]].from_arrays(schema.sizes, arrays["model.safetensors"]),
        measurements_of(header["measurements"], arrays["measurements.safetensors"], schema.sizes),
        promise,
        number(header["total"]),
        header["mechanism"],
        header["workload"],
        header["degraded"],
    )


def privacy_of(plain: dict[str, Any]) -> Privacy:
    """Returns the promise of a release; refuses one that could not have been made."""
    spends = tuple(Spend(text(item["kind"]), number(item["rho"]), text(item["what"])) for item in plain["spends"])
    budget = Budget(epsilon=number(plain["epsilon"]), delta=number(plain["delta"]))
    if plain["neighbours"] not in get_args(Relation) or not isinstance(plain["private"], bool):
        raise ValueError("the promise must name its neighbours, and whether it is private")
    found = Privacy(
        plain["neighbours"], budget.epsilon, budget.delta, number(plain["rho"]), spends, private=plain["private"]
    )
    if asdict(found) != plain | {"spends": tuple(plain["spends"])}:
        raise ValueError("the promise must have nothing else")
    return found


def number(value: object, *, least: float = 0.0) -> float:
    """Returns a finite number that is not below the least; refuses anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError("a figure must be a finite number, and not too small")
    return float(value)


def text(value: object) -> str:
    """Returns a text; refuses anything else."""
    if not isinstance(value, str):
        raise TypeError("a name must be a text")
    return value


def plain_measurements(measurements: tuple[Measurement, ...]) -> tuple[dict[str, NDArray], list[Any]]:
    """Returns the arrays of measurements, and the description of their workloads."""
    arrays: dict[str, NDArray] = {}
    described = []
    for index, measurement in enumerate(measurements):
        arrays[f"values.{index}"] = np.ascontiguousarray(measurement.values)
        # One sigma serves all blocks of a measurement, as a rule: then one is kept.
        same = np.all(measurement.sigma == measurement.sigma[0])
        arrays[f"sigma.{index}"] = np.ascontiguousarray(measurement.sigma[:1] if same else measurement.sigma)
        parts = []
        for number, part in enumerate(measurement.workload.parts):
            described_part, chosen = plain_queries(part)
            parts.append(described_part)
            if isinstance(part, Tested):
                arrays[f"bounds.{index}.{number}"] = np.ascontiguousarray(part.tally.bounds)
                if part.tally.weights is not None:
                    arrays[f"weights.{index}.{number}"] = np.ascontiguousarray(part.tally.weights)
            if isinstance(part, Embedding):
                arrays[f"frequencies.{index}.{number}"] = np.ascontiguousarray(part.tally.frequencies)
            if chosen is not None:
                arrays[f"chosen.{index}.{number}"] = np.ascontiguousarray(chosen)
        weights = {"weights": [weight.as_integer_ratio() for weight in measurement.workload.weights]}
        described.append(
            {"total": measurement.total, "parts": parts} | (weights if measurement.workload.weights else {})
        )
    return arrays, described


def measurements_of(
    described: list[Any], arrays: dict[str, NDArray], sizes: tuple[int, ...]
) -> tuple[Measurement, ...]:
    """Returns the measurements of a release."""
    measurements = []
    for index, item in enumerate(described):
        parts = [
            queries_of(part, lambda name, place=place: arrays.get(f"{name}.{index}.{place}"), sizes)  # noqa: B023
            for place, part in enumerate(item["parts"])
        ]
        workload = Workload(tuple(parts), weights=tuple(Fraction(*pair) for pair in item.get("weights", ())))
        values, sigma = arrays[f"values.{index}"], arrays[f"sigma.{index}"]
        real = values.dtype == np.float64 and sigma.dtype == np.float64 and bool(np.all(np.isfinite(values)))
        if values.shape != (workload.cells,) or not real or not np.all((sigma > 0) & (sigma < np.inf)):
            raise CorruptionError("the release's measurements must fit their workload; they do not")
        sigma = np.broadcast_to(sigma, workload.blocks).copy()
        measurements.append(Measurement(workload, values, sigma, number(item["total"], least=1.0)))
    return tuple(measurements)


def plain_queries(part: Queries) -> tuple[dict[str, Any], NDArray | None]:
    """Returns the description of one part of a workload, and which of its queries it holds, where not all."""
    if isinstance(part, Custom | CustomCells):
        part = Recorded(
            part.function.name, part.function.count, getattr(part, "chosen", None), isinstance(part, CustomCells)
        )
    if isinstance(part, Recorded):
        return {"function": part.name, "values": part.count, "cells": part.single}, part.chosen
    if isinstance(part, Residuals):
        return {"residuals": part.sets}, None
    if isinstance(part, Embedding):
        columns = {"given": part.tally.given, "numbers": part.tally.numbers, "limits": part.tally.limits}
        return {"embedding": columns}, None
    if isinstance(part, Tested):
        return {"given": part.tally.given, "numbers": part.tally.numbers, "limits": part.tally.limits}, None
    if isinstance(part, Banded):
        return {"bands": {"sets": part.sets, "cuts": part.cuts}}, None
    if not isinstance(part, Marginals | Cells):
        raise ParameterError("measurements must be of marginals, thresholds or functions to be saved")
    marginals = part.marginals if isinstance(part, Cells) else part
    described: dict[str, Any] = {"cells": isinstance(part, Cells), "sets": marginals.sets}
    if isinstance(marginals, Thresholds):
        described["least"] = marginals.least
    return described, part.chosen if isinstance(part, Cells) else None


def queries_of(described: dict[str, Any], found: Callable[[str], NDArray | None], sizes: tuple[int, ...]) -> Queries:
    """Returns the part of a workload that a release describes; refuses queries that its schema does not have.

    A function is known by its name only: a release never makes Python import anything.
    """
    if "numbers" in described:
        return tested_of(described, found("bounds"), found("weights"), sizes)
    if "embedding" in described:
        return embedding_of(described["embedding"], found("frequencies"), sizes)
    if "bands" in described:
        return banded_of(described["bands"], sizes)
    chosen = found("chosen")
    if "function" in described:
        name, count, single = str(described["function"]), int(described["values"]), bool(described["cells"])
        whole: Queries = Recorded(name, count, chosen, single, sizes=sizes)
    elif "residuals" in described:
        whole = Residuals(sizes, tuple(tuple(features) for features in described["residuals"]))
        count = 0
    else:
        sets = tuple(tuple(features) for features in described["sets"])
        marginals = Marginals(sizes, sets)
        if "least" in described:
            marginals = Thresholds(sizes, sets, operator.index(described["least"]))
        count = marginals.cells
        whole = Cells(marginals, chosen) if described["cells"] else marginals
    if chosen is not None:
        integers = chosen.dtype == np.int64 and chosen.ndim == 1
        if not integers or np.any(chosen < 0) or np.any(chosen >= count):
            raise CorruptionError("the release's measurements must be of queries of its schema; they are not")
    return whole


def tested_of(
    described: dict[str, Any], bounds: NDArray | None, weights: NDArray | None, sizes: tuple[int, ...]
) -> Tested:
    """Returns the tests of numbers that a release describes; refuses any but those of its schema."""
    columns = columns_of(described)
    if bounds is None:
        raise CorruptionError("the release's measurements must be of queries of its schema; they are not")
    tally = Where(sizes, *columns, bounds, weights)
    check_tally(tally, sizes)
    return Tested(tally)


def embedding_of(described: dict[str, Any], frequencies: NDArray | None, sizes: tuple[int, ...]) -> Embedding:
    """Returns the embedding that a release describes; refuses any but those of its schema."""
    if frequencies is None:
        raise CorruptionError("the release's measurements must be of queries of its schema; they are not")
    tally = Cosines(sizes, *columns_of(described), frequencies)
    check_tally(tally, sizes)
    return Embedding(tally)


def banded_of(described: dict[str, Any], sizes: tuple[int, ...]) -> Banded:
    """Returns the marginals of bands that a release describes; refuses any but those of its schema."""
    sets, cuts = tuple(map(tuple, described["sets"])), tuple(map(tuple, described["cuts"]))
    if len(described) != 2 or not all(type(feature) is int for features in sets for feature in features):
        raise CorruptionError("the release's measurements must be of queries of its schema; they are not")
    return Banded(sizes, sets, cuts)


def columns_of(described: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the columns given, the numbers, and their limits; refuses what are not whole numbers."""
    columns = tuple(described["given"]), tuple(described["numbers"]), tuple(described["limits"])
    if len(described) != len(columns) or not all(type(column) is int for part in columns for column in part):
        raise CorruptionError("the release's measurements must be of queries of its schema; they are not")
    return columns


def digest(directory: str | Path) -> str:
    """Returns the hash that identifies a release, after checking it."""
    load(directory)
    return hashlib.sha256(read(Path(directory), HEADER)).hexdigest()
