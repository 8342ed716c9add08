"""Planning: what a fit would ask, spend and need. Reads no private data."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from anamorph.curator.budget import Budget, Relation, gaussian_sigma, gumbel_scale, rest
from anamorph.curator.curator import LARGEST_ANSWER, TOTAL_SHARE
from anamorph.curator.noise import LARGEST
from anamorph.curator.tallies import scale, squared_sensitivity
from anamorph.errors import ParameterError, ResourceError, WorkloadError
from anamorph.mechanisms.mechanism import Mechanism, Step, description
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import PIECE_CELLS, WHOLE, Workload
from anamorph.schema import Schema

SMALLEST_PIECE = 1 << 14
"""The fewest answers that are held at a time."""

PASSES = 200
"""About how often `auto` compares with every measured answer."""

USUAL_ROWS = 256
"""About how many relaxed rows `auto` has, which depends on the noise."""

LONGEST = 20
"""The most characters of a size."""


@dataclass(frozen=True)
class Memory:
    """How a run divides the memory that it may use."""

    total: int
    """All of it, in bytes."""
    engine: int
    """What the engine that holds the rows may use before it spills to disk."""
    pieces: int
    """How many answers are held at a time."""


def parse_memory(text: str) -> int:
    """Returns the bytes of a size such as '4GB', '512MB' or '2GiB'."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(i?)B\s*", text, re.IGNORECASE)
    if found is None or len(text) > LONGEST:
        raise ParameterError(f"memory ({text!r}) must be a size such as 4GB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** (1 + "KMGT".index(found[2].upper())))


def divide(memory: int, mechanism: Mechanism, workload: Workload) -> Memory:
    """Returns the largest pieces with which a run keeps within its memory; refuses what no pieces make fit.

    A quarter is the engine's. The rest holds what the mechanism says it needs, in which pieces have a part.
    """
    engine = memory // 4
    pieces = PIECE_CELLS
    while (needed := mechanism.memory(replace(workload, limit=pieces))) > memory - engine:
        if pieces == SMALLEST_PIECE:
            fewer = " or fewer rows (--set rows=…)" if "rows" in description(mechanism) else ""
            raise ResourceError(
                f"memory ({memory / 1e9:.3g} GB) must be at least {(needed + needed // 3) / 1e9:.3g} GB for this run: "
                f"allow more, or take a smaller workload{fewer}"
            )
        pieces //= 2
    return Memory(memory, engine, pieces)


def suited(mechanism: Mechanism, schema: Schema) -> Mechanism:
    """Returns the mechanism that plans for a schema: itself, or the one that it stands for."""
    chosen = getattr(mechanism, "for_schema", None)
    return mechanism if chosen is None else chosen(schema)


def check_numbers(schema: Schema, mechanism: Mechanism) -> None:
    """Refuses native columns for a mechanism whose model has a place for every code of every column."""
    if schema.numbers and not getattr(mechanism, "native", False):
        names = ", ".join(repr(schema.names[number]) for number in schema.numbers)
        raise WorkloadError(
            f"columns {names} must have bins for {mechanism.name}: declare them without `native`, or take auto"
        )


def check_steps(steps: Sequence[Step], neighbours: Relation) -> None:
    """Refuses, before anything is spent, steps that a curator would: too small a budget, too many queries at once."""
    if not all(step.rho > 0 for step in steps):
        raise ParameterError("every step must have some of the budget: take a split further from 0 and 1")
    noise = max((sigma_of(step, neighbours) * finest(step) for step in steps if step.kind == "measure"), default=0.0)
    if noise > LARGEST:
        raise ParameterError(f"epsilon must be larger: the noise of a measurement (sigma {noise:.3g}) is out of range")
    largest = max((step.cells for step in steps if step.kind == "measure"), default=0)
    if largest > LARGEST_ANSWER:
        raise WorkloadError(
            f"a measurement (of up to {largest} queries) must have at most {LARGEST_ANSWER}: take a smaller workload, "
            "or measure fewer blocks at a time"
        )


def available_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan(
    schema: Schema,
    spec: str,
    mechanism: Mechanism,
    budget: Budget,
    *,
    neighbours: str,
    rows: int | None,
    memory: int | None = None,
) -> dict[str, Any]:
    """Returns the figures of a fit by name: queries, memory, rho, and the noise of each step."""
    if neighbours not in ("replace", "add-remove"):
        raise ParameterError(f"neighbours ({neighbours!r}) must be replace or add-remove")
    if rows is not None and rows < 1:
        raise ParameterError(f"rows ({rows}) must be at least 1")
    schema.require_knots()
    workload = parse_workload(spec, schema)
    check_numbers(schema, mechanism)
    planned = suited(mechanism, schema)
    divided = divide(available_memory() if memory is None else memory, planned, workload)
    workload = replace(workload, limit=divided.pieces)
    steps = planned.steps_for(workload, budget.rho)
    check_steps(steps, neighbours)
    if neighbours == "add-remove" and steps:
        total = Step("total", TOTAL_SHARE * budget.rho, 1, 1)
        steps = (total, *planned.steps_for(workload, rest(budget.rho, total.rho)))
    described = [describe(step, neighbours, rows) for step in steps]
    warnings = list(budget.warnings(rows))
    noise = max((item["sigma_counts"] for item in described if "sigma_counts" in item), default=0.0)
    if rows is not None and noise > rows:
        warnings.append(
            f"the noise (sigma {noise:.3g}) is larger than the number of rows: the answers will say nothing"
        )
    return {
        "mechanism": description(mechanism),
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "rho": budget.rho,
        "neighbours": neighbours,
        "queries": workload.cells,
        "blocks": workload.blocks,
        "largest_block": workload.largest_block,
        "memory_bytes": planned.memory(workload),
        "engine_bytes": divided.engine,
        "piece_queries": divided.pieces,
        "seconds_estimate": seconds(planned, workload, steps, parameters(schema)),
        "steps": described,
        "warnings": warnings,
    }


def describe(step: Step, neighbours: Relation, rows: int | None) -> dict[str, Any]:
    """Returns one step with its noise, in counts and, where the number of rows is known, as a fraction."""
    plain: dict[str, Any] = {"kind": step.kind, "rho": step.rho, "blocks": step.blocks, "queries": step.cells}
    if step.kind in ("measure", "total"):
        plain["sigma_counts"] = sigma_of(step, neighbours)
        if rows is not None:
            plain["sigma_fraction"] = plain["sigma_counts"] / rows
    elif step.kind == "select":
        most = 2 if neighbours == "replace" and step.cells > step.blocks else 1
        plain["gumbel_counts"] = gumbel_scale(most, step.selected, step.rho)
    elif step.kind == "draw":
        plain["gumbel_counts"] = gumbel_scale(1, step.selected, step.rho)
    return plain


def sigma_of(step: Step, neighbours: Relation) -> float:
    """Returns the noise of a measurement in counts; where weights differ, of the queries with the largest.

    What is not known beforehand is taken to be whole marginals, or single queries, of equal weight.
    """
    asked = step.workload
    if asked is None or not (asked.weights or any(type(part) not in (Marginals, Cells) for part in asked.parts)):
        most = 2 if neighbours == "replace" and step.cells > step.blocks else 1
        return gaussian_sigma(most * step.blocks, step.rho)
    pieces = list(asked.pieces(WHOLE))
    weights = [piece.weight for piece in pieces]
    squared = squared_sensitivity([piece.tally for piece in pieces], neighbours, weights)
    if any(piece.blocks > 1 for piece in pieces):  # single queries compose by block
        squared = max(squared, sum((piece.weight * piece.blocks for piece in pieces), start=Fraction(0)))
    return gaussian_sigma(squared / max(weights), step.rho)


def finest(step: Step) -> float:
    """Returns the most that the noise of some numbers, in their own units, is of what `sigma_of` says."""
    if step.workload is None or not step.workload.weights:
        return 1.0
    pieces = list(step.workload.pieces(WHOLE))
    heaviest = max(piece.weight for piece in pieces)
    return max(scale(piece.tally) * math.sqrt(heaviest / piece.weight) for piece in pieces)


def parameters(schema: Schema) -> int:
    """Returns how many numbers a relaxed row has: one for each code of a column, or for a native number."""
    return sum(1 if column.native else column.size for column in schema.columns)


def seconds(mechanism: Mechanism, workload: Workload, steps: tuple[Step, ...], width: int) -> float:
    """Returns a rough time on two cores: steps of the projection, selections and exact noise.

    A projection step costs about 8 ns for each of the `width` parameters of a row, and 150 ns for each measured cell of
    a whole marginal or 8 us for a single one (`auto`, whose rows are few and whose steps see a share of the cells, some
    0.18 ns for each row and cell); a selection of blocks 60 ns a query, of single queries 12 ms a block; a
    noisy answer 0.4 us; a round of a game, of which a draw is a part, 50 ms.
    """
    plain = description(mechanism)
    measured = [step for step in steps if step.kind == "measure"]
    noise = 4e-7 * sum(step.cells for step in measured)
    if "effort" in plain:
        passes, rows = PASSES * plain["effort"] / 40, plain["rows"] or USUAL_ROWS
        return noise + passes * rows * (1.8e-10 * sum(step.cells for step in measured) + 1.6e-8 * width)
    if "steps" not in plain:
        return noise + 0.05 * sum(step.kind == "draw" for step in steps)
    whole = [step.blocks < step.cells for step in steps if step.kind == "select"]
    selections = sum(workload.cells * 6e-8 if block else workload.blocks * 1.2e-2 for block in whole)
    done, projection, times = 0, 0.0, plain["steps"] * plain.get("levels", 1)
    for step in measured:
        done = min(done + step.cells, workload.cells)  # no query is measured twice
        each = 1.5e-7 if step.cells > step.blocks else 8e-6
        projection += times * plain["rows"] * (8e-9 * width + done * each / 1000)
    return noise + selections + projection
