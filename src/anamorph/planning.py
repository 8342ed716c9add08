"""Planning: what a fit would ask, spend and need. Reads no private data."""

from __future__ import annotations

from typing import Any

from anamorph.curator.budget import Budget, gaussian_sigma, gumbel_scale, rest
from anamorph.curator.curator import TOTAL_SHARE
from anamorph.errors import ParameterError
from anamorph.mechanisms.mechanism import Mechanism, Step, description
from anamorph.queries.spec import workload as parse_workload
from anamorph.schema import Schema


def plan(
    schema: Schema, spec: str, mechanism: Mechanism, budget: Budget, *, neighbours: str, rows: int | None
) -> dict[str, Any]:
    """Returns the figures of a fit by name: queries, memory, rho, and the noise of each step."""
    if neighbours not in ("replace", "add-remove"):
        raise ParameterError(f"neighbours ({neighbours!r}) must be replace or add-remove")
    if rows is not None and rows < 1:
        raise ParameterError(f"rows ({rows}) must be at least 1")
    workload = parse_workload(spec, schema)
    steps = mechanism.steps_for(workload, budget.rho)
    if neighbours == "add-remove" and steps:
        total = Step("total", TOTAL_SHARE * budget.rho, 1, 1)
        steps = (total, *mechanism.steps_for(workload, rest(budget.rho, total.rho)))
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
        "largest_block": int(max(workload.block_cells)),
        "memory_bytes": mechanism.memory(workload),
        "seconds_estimate": seconds(mechanism, workload.cells, steps),
        "steps": described,
        "warnings": warnings,
    }


def describe(step: Step, neighbours: str, rows: int | None) -> dict[str, Any]:
    """Returns one step with its noise, in counts and, where the number of rows is known, as a fraction."""
    plain: dict[str, Any] = {"kind": step.kind, "rho": step.rho, "blocks": step.blocks, "queries": step.cells}
    if step.kind in ("measure", "total"):
        most = 2 if neighbours == "replace" and step.cells > step.blocks else 1
        plain["sigma_counts"] = gaussian_sigma(most * step.blocks, step.rho)
        if rows is not None:
            plain["sigma_fraction"] = plain["sigma_counts"] / rows
    elif step.kind == "select":
        most = 2 if neighbours == "replace" and step.cells > step.blocks else 1
        plain["gumbel_counts"] = gumbel_scale(most, step.selected, step.rho)
    return plain


def seconds(mechanism: Mechanism, cells: int, steps: tuple[Step, ...]) -> float:
    """Returns a rough time on two cores: steps of the projection, selections and exact noise.

    A projection step costs about 12 ns for each parameter, and 150 ns for each measured cell of a whole marginal or
    8 us for a single one; a selection 60 ns a query; a noisy answer 2 us.
    """
    plain = description(mechanism)
    measured = [step for step in steps if step.kind == "measure"]
    noise = 2e-6 * sum(step.cells for step in measured)
    if "steps" not in plain:
        return noise
    selections = sum(step.kind == "select" for step in steps) * cells * 6e-8
    done, projection = 0.0, 0.0
    for step in measured:
        done += step.cells * (1.5e-7 if step.cells > step.blocks else 8e-6) * plain["rows"] / 1000
        projection += plain["steps"] * (3e-3 + done)
    return noise + selections + projection
