"""Workload specs: the short texts by which workloads are named.

`marginals:k=3` is every 3-way marginal, `marginals:k=3,count=64,seed=0` a random choice of 64 of them,
`marginals:of=age+sex` one marginal by its columns, `marginals:k=3,target=income` those that hold a column;
`thresholds:k=4,r=2,count=64,seed=0` are r-of-k thresholds over the same sets. Of native numbers,
`mixed:k=3,count=1000,seed=0` are random mixed marginals, and `halfspaces:count=1000,target=income,seed=0` random class
conditional linear thresholds; `bands:k=3,bands=8,target=income` are marginals over sets of all columns, in which
numbers are cut into 8 bands. `custom:module:function` is a class of your own. Several are joined by semicolons, or
listed in a YAML file under `workload:`; `weight=2` says that the queries of one matter twice as much as those of
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from anamorph.columns import Codes
from anamorph.curator.bands import MOST_CELLS
from anamorph.errors import WorkloadError, suggestion
from anamorph.queries.bands import BANDS, Banded, equal_cuts, merged_sizes
from anamorph.queries.marginals import NATIVE, Marginals, all_marginals, random_marginals, target_marginals
from anamorph.queries.numbers import Tested, halfspaces, mixed_marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import PIECE_CELLS, Queries, Workload, keys_of
from anamorph.schema import LARGEST_FILE, Schema, parse

CLASSES = ("marginals", "thresholds", "bands", "mixed", "halfspaces", "custom")
OPTIONS = {
    "marginals": ("k", "count", "seed", "of", "target", "weight"),
    "thresholds": ("k", "r", "count", "seed", "of", "target", "weight"),
    "bands": ("k", "bands", "count", "seed", "of", "target", "weight"),
    "mixed": ("k", "count", "seed", "target", "weight"),
    "halfspaces": ("count", "seed", "target", "weight"),
    "custom": ("weight",),
}

LARGEST_BLOCK = (1 << 63) - 1
"""The most cells that one block may have: positions are 64-bit integers."""

LARGEST_TEST = PIECE_CELLS
"""The most cells that a test of numbers may have: they are counted and answered together, not in pieces."""

LONGEST_WEIGHT = 20
"""The most characters of a weight."""


def workload(spec: str, schema: Schema) -> Workload:
    """Returns the workload that a spec, or a YAML file of specs, names."""
    specs = list(read_file(Path(spec))) if is_file(spec) else spec.split(";")
    found = [(part, weight) for parts, weight in (queries(item.strip(), schema) for item in specs) for part in parts]
    parts, weights = zip(*found, strict=True)
    check_sizes(parts, schema)
    return Workload(parts, "; ".join(specs), weights if len(set(weights)) > 1 else ())


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


def queries(spec: str, schema: Schema) -> tuple[tuple[Queries, ...], Fraction]:
    """Returns the queries of one spec, in one part or more, and their weight."""
    name, _, rest = spec.partition(":")
    if name not in CLASSES:
        raise WorkloadError(
            f"workload ({spec!r}) must begin with one of {', '.join(CLASSES)}, such as 'marginals:k=3'."
            + suggestion(name, CLASSES)
        )
    function, _, rest = rest.partition(",") if name == "custom" else ("", "", rest)
    options: dict[str, str] = {}
    for key, value in (option(item, spec, OPTIONS[name]) for item in rest.split(",") if item.strip()):
        if key in options:
            raise WorkloadError(f"workload ({spec!r}): {key} must be given once")
        options[key] = value
    weight = weight_of(options.pop("weight", "1"), spec)
    if name == "custom":
        from anamorph.queries.custom import from_spec  # noqa: PLC0415 - it needs jax

        return (from_spec(function.strip(), schema),), weight
    if name in ("mixed", "halfspaces"):
        return tests_of(name, options, schema, spec), weight
    if name == "bands":
        return (bands_of(options, schema, spec),), weight
    least = options.pop("r", None)
    marginals = sets_of(options, schema, spec)
    if name == "marginals":
        return (marginals,), weight
    if least is None:
        raise WorkloadError(f"workload ({spec!r}) must give r, how many of the columns must agree")
    return (Thresholds(marginals.sizes, marginals.sets, whole_number("r", least, spec)),), weight


def tests_of(name: str, options: dict[str, str], schema: Schema, spec: str) -> tuple[Queries, ...]:
    """Returns tests of native numbers."""
    targets = tuple(options.pop("target", "").split("+")) if "target" in options else ()
    numbers = {key: whole_number(key, value, spec) for key, value in options.items()}
    for key in ("k", "count") if name == "mixed" else ("count",):
        if key not in numbers:
            raise WorkloadError(f"workload ({spec!r}) must give {key}")
    seed = numbers.get("seed", 0)
    if name == "halfspaces":
        return halfspaces(schema, count=numbers["count"], seed=seed, targets=targets)
    if len(targets) > 1:
        raise WorkloadError(f"workload ({spec!r}): target must be one column")
    target = targets[0] if targets else None
    return mixed_marginals(schema, numbers["k"], count=numbers["count"], seed=seed, target=target)


def bands_of(options: dict[str, str], schema: Schema, spec: str) -> Queries:
    """Returns marginals in which native numbers are cut into bands, over sets of all columns."""
    cuts = equal_cuts(schema, whole_number("bands", options.pop("bands", str(BANDS)), spec))
    merged = zip(schema.names, merged_sizes(schema.sizes, cuts), strict=True)
    found = sets_of(options, Schema(tuple(Codes(name=name, values=size) for name, size in merged)), spec)
    if not any(feature in schema.numbers for features in found.sets for feature in features):
        return Marginals(schema.sizes, found.sets)
    for features, cells in zip(found.sets, found.block_cells, strict=True):
        check_cells(features, cells, MOST_CELLS, schema)
    return Banded(schema.sizes, found.sets, cuts)


def sets_of(options: Mapping[str, str], schema: Schema, spec: str) -> Marginals:
    """Returns the marginals over the sets of columns that options name or draw."""
    if "of" in options:
        if len(options) > 1:
            raise WorkloadError(f"workload ({spec!r}): of must stand without k, count, seed and target")
        return Marginals(schema.sizes, (named_set(options["of"], schema),))
    if "k" not in options:
        raise WorkloadError(f"workload ({spec!r}) must give k, the number of columns of each block")
    numbers = {key: whole_number(key, value, spec) for key, value in options.items() if key != "target"}
    if "target" in options:
        target, *more = named_set(options["target"], schema)
        if more:
            raise WorkloadError(f"workload ({spec!r}): target must be one column")
        if "seed" in numbers and "count" not in numbers:
            raise WorkloadError(f"workload ({spec!r}): seed must come with count")
        return target_marginals(schema, numbers["k"], target, count=numbers.get("count"), seed=numbers.get("seed", 0))
    if "count" not in numbers:
        if "seed" in numbers:
            raise WorkloadError(f"workload ({spec!r}): seed must come with count")
        return all_marginals(schema, numbers["k"])
    if numbers["count"] < 1:
        raise WorkloadError(f"workload ({spec!r}): count ({numbers['count']}) must be at least 1")
    return random_marginals(schema, numbers["k"], count=numbers["count"], seed=numbers.get("seed", 0))


def option(item: str, spec: str, known: tuple[str, ...]) -> tuple[str, str]:
    """Returns the name and the text of one option."""
    key, equals, value = item.partition("=")
    key = key.strip()
    if key not in known or not equals:
        raise WorkloadError(
            f"workload ({spec!r}): option ({item!r}) must be one of {', '.join(known)}, as name=value."
            + suggestion(key, known)
        )
    return key, value.strip()


def weight_of(text: str, spec: str) -> Fraction:
    """Returns the weight that an option holds."""
    try:
        near = 1.0 if "/" in text else float(text)  # before any power of ten is written out
        weight = Fraction(text) if len(text) <= LONGEST_WEIGHT and 1e-7 < near < 1e7 else Fraction(0)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if not Fraction(1, 10**6) <= weight <= 10**6:
        raise WorkloadError(f"workload ({spec!r}): weight ({text!r}) must be a number from 1e-6 to 1e6")
    return weight


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
        if schema.columns[schema.index(name)].native:
            raise WorkloadError(f"column ({name!r}) must not be native in a marginal or threshold: {NATIVE}")
    if len(set(names)) < len(names):
        raise WorkloadError(f"of ({text!r}) must name each column once")
    return tuple(sorted(schema.names.index(name) for name in names))


def check_sizes(parts: Iterable[Queries], schema: Schema) -> None:
    """Refuses blocks too large to count, and blocks listed twice."""
    seen: set[tuple[object, int]] = set()
    for part in parts:
        if isinstance(part, Tested):
            check_cells(part.tally.given, part.largest_block, LARGEST_TEST, schema)
        if not isinstance(part, Marginals | Banded):
            continue
        cells = part.block_cells if isinstance(part, Marginals) else part.merged.block_cells
        for features, each, key in zip(part.sets, cells, keys_of(part), strict=True):
            check_cells(features, each, LARGEST_BLOCK, schema)
            if isinstance(part, Banded) and key == features:  # a plain marginal, which others may have too
                continue
            block = key, part.least if isinstance(part, Thresholds) else len(features)
            if block in seen:
                raise WorkloadError(f"block {named(features, schema)} must be listed once")
            seen.add(block)


def check_cells(features: tuple[int, ...], cells: int, most: int, schema: Schema) -> None:
    """Refuses a block of too many cells."""
    if cells > most:
        raise WorkloadError(
            f"block {named(features, schema)} has {Decimal(cells):.3g} cells and must have at most "
            f"{Decimal(most):.3g}: take a smaller k, or fewer bins or bands"
        )


def named(features: tuple[int, ...], schema: Schema) -> str:
    """Returns a block as people write it."""
    return " x ".join(schema.names[feature] for feature in features)
