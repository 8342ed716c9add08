"""Workload specs: the short texts by which workloads are named.

`marginals:k=3` is every 3-way marginal, `marginals:k=3,count=64,seed=0` a random choice of 64 of them,
`marginals:of=age+sex` one marginal by its columns. Several are joined by semicolons, or
listed in a YAML file under `workload:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path

from anamorph.errors import WorkloadError, suggestion
from anamorph.queries.marginals import Marginals, all_marginals, random_marginals
from anamorph.queries.workload import Workload
from anamorph.schema import LARGEST_FILE, Schema, parse

CLASSES = ("marginals",)
OPTIONS = ("k", "count", "seed", "of")

LARGEST_BLOCK = 1 << 33
"""The most cells that one marginal may have: beyond, not even its positions are worth listing."""


def workload(spec: str, schema: Schema) -> Workload:
    """Returns the workload that a spec, or a YAML file of specs, names."""
    specs = list(read_file(Path(spec))) if is_file(spec) else spec.split(";")
    parts = tuple(queries(item.strip(), schema) for item in specs)
    check_sizes(parts, schema)
    return Workload(parts, spec="; ".join(specs))


def is_file(spec: str) -> bool:
    """Returns whether a spec is the name of a file of specs."""
    return spec.lower().endswith((".yaml", ".yml"))


def read_file(path: Path) -> Iterator[str]:
    """Yields the specs that a YAML file lists."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise WorkloadError(f"workload file ({str(path)!r}) must be at most {LARGEST_FILE >> 20} MiB")
        plain = parse(path.read_bytes().decode("utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError):
        raise WorkloadError(f"workload file ({str(path)!r}) must be a readable text file") from None
    listed = plain.get("workload") if isinstance(plain, Mapping) else plain
    if not isinstance(listed, list) or not listed or not all(isinstance(item, str) for item in listed):
        raise WorkloadError(f"workload file {str(path)!r} must list specs, such as `workload: ['marginals:k=2']`")
    yield from listed


def queries(spec: str, schema: Schema) -> Marginals:
    """Returns the queries of one spec."""
    name, _, rest = spec.partition(":")
    if name not in CLASSES:
        raise WorkloadError(
            f"workload ({spec!r}) must begin with one of {', '.join(CLASSES)}, such as 'marginals:k=3'."
            + suggestion(name, CLASSES)
        )
    options: dict[str, str] = {}
    for key, value in (option(item, spec) for item in rest.split(",") if item.strip()):
        if key in options:
            raise WorkloadError(f"workload ({spec!r}): {key} must be given once")
        options[key] = value
    if "of" in options:
        if len(options) > 1:
            raise WorkloadError(f"workload ({spec!r}): of must stand alone")
        return Marginals(schema.sizes, (named_set(options["of"], schema),))
    if "k" not in options:
        raise WorkloadError(f"workload ({spec!r}) must give k, the number of columns of each marginal")
    numbers = {key: whole_number(key, value, spec) for key, value in options.items()}
    if "count" not in numbers:
        if "seed" in numbers:
            raise WorkloadError(f"workload ({spec!r}): seed must come with count")
        return all_marginals(schema, numbers["k"])
    if numbers["count"] < 1:
        raise WorkloadError(f"workload ({spec!r}): count ({numbers['count']}) must be at least 1")
    return random_marginals(schema, numbers["k"], count=numbers["count"], seed=numbers.get("seed", 0))


def option(item: str, spec: str) -> tuple[str, str]:
    """Returns the name and the text of one option."""
    key, equals, value = item.partition("=")
    key = key.strip()
    if key not in OPTIONS or not equals:
        raise WorkloadError(
            f"workload ({spec!r}): option ({item!r}) must be one of {', '.join(OPTIONS)}, as name=value."
            + suggestion(key, OPTIONS)
        )
    return key, value.strip()


def whole_number(key: str, value: str, spec: str) -> int:
    """Returns the number that an option holds."""
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0:
        raise WorkloadError(f"workload ({spec!r}): {key} ({value!r}) must be a whole number of at least 0")
    return number


def named_set(text: str, schema: Schema) -> tuple[int, ...]:
    """Returns the columns named, joined by +, as positions in order."""
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in schema.names:
            raise WorkloadError(f"column ({name!r}) must be in the schema.{suggestion(name, schema.names)}")
    if len(set(names)) < len(names):
        raise WorkloadError(f"of ({text!r}) must name each column once")
    return tuple(sorted(schema.names.index(name) for name in names))


def check_sizes(parts: Iterable[Marginals], schema: Schema) -> None:
    """Refuses marginals too large to count, and marginals listed twice."""
    seen: set[tuple[int, ...]] = set()
    for part in parts:
        for features, cells in zip(part.sets, part.block_cells, strict=True):
            names = " x ".join(schema.names[feature] for feature in features)
            if cells > LARGEST_BLOCK:
                largest, at = max(zip(part.block_cells, part.sets, strict=True))
                names = " x ".join(schema.names[feature] for feature in at)
                raise WorkloadError(
                    f"marginal {names} has {Decimal(largest):.3g} cells and would need {Decimal(largest * 8):.3g} "
                    f"bytes; a marginal must have at most {Decimal(LARGEST_BLOCK):.3g} cells: take a smaller k, "
                    "or fewer bins"
                )
            if features in seen:
                raise WorkloadError(f"marginal {names} must be listed once")
            seen.add(features)
