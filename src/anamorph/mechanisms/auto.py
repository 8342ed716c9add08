"""auto: the default. Measures the marginals inside the workload once, and projects with a penalty that fits the noise.

There is nothing to set. What is measured, and how well, follows from the workload alone; how much is shrunk, from the
noise that the budget leaves (models/shrinking.py). A user may say what matters: the largest error, the average one, or
both.

*What is measured.* All marginals inside those that are asked for, order by order, every marginal of an order alike, and
every column of the schema. A pair is worth its own measurement although a triple tells of it: it has far fewer cells to
spread its noise over. Single columns have the share 0.7 sqrt(e) of the budget, from 0.05 to 0.5, with e the share of a
column that noise would fill if they had all of it; of the rest the largest order has 0.55, those in between what is
left. Marginals of the largest order are left out while all together have more than `MOST_CELLS` cells: then those
inside them stand for them.

*Adaptivity.* Nothing is selected. A whole marginal costs the same however many cells it has, and a selection costs as
much as a measurement and gives no answer; whichever marginal a selection would name is measured here anyway, and the
penalty throws away what the noise says about those that did not deserve it. docs/accuracy.md has the trials.

*Native numbers.* Where the workload asks about numbers as numbers, or the schema has such columns, the run is RAP++'s.

*Functions* of rows are measured as they are, with the share of a largest order.

Budget: the share t_A of marginal A gives sigma_A = Delta / sqrt(2 rho t_A), Delta^2 = 1, or 2 where rows are replaced.

References: Aydore et al. 2021 (RAP, with one round); Vietri et al. 2022 (RAP++). Deviations: all else.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, get_args

import numpy as np

from anamorph import progress
from anamorph.curator.budget import gaussian_sigma
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import marginal_cells
from anamorph.errors import ParameterError, require_positive
from anamorph.mechanisms.mechanism import Step, description, release
from anamorph.mechanisms.rap_plus_plus import RAPPlusPlus
from anamorph.models.shrinking import Objective, ShrinkingProjection
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.strategies import RESOLUTION
from anamorph.queries.workload import Queries, Workload
from anamorph.release import Release

Features = tuple[int, ...]

SINGLES = 0.1
"""The share of the budget for single columns, before the number of rows is known."""

FEWEST, MOST = 0.05, 0.5
"""The least and the largest share for single columns."""

LARGEST = 0.55
"""The share of the rest for the largest order, where there are some in between."""

MOST_CELLS = 1 << 26
"""The most cells of all marginals that are measured."""

MOST_EFFORT = 1e4
"""The most effort: a hundred times what is of use."""

MOST_SETS = 1 << 17
"""The most marginals that are measured."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The default mechanism."""

    name: ClassVar[str] = "auto"
    native: ClassVar[bool] = True
    objective: Objective = "balanced"
    """What matters: `max`, `average`, or `balanced`, which is both."""
    rows: int = 256
    """n', the number of relaxed rows."""
    effort: float = 40.0
    """How many steps the fit takes, in relation to what the noise lets them tell."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ParameterError(f"objective ({self.objective!r}) must be one of {', '.join(get_args(Objective))}")
        require_positive("rows", self.rows)
        if not 0 < self.effort <= MOST_EFFORT:
            raise ParameterError(f"effort ({self.effort!r}) must be above 0 and at most {MOST_EFFORT}")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement; for numbers, what RAP++ does."""
        if asks_numbers(workload):
            return RAPPlusPlus().steps_for(workload, rho)
        queries = planned(workload)
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of what is measured, of its tiles, and of the rows with their optimiser and gradient."""
        if asks_numbers(workload):
            return RAPPlusPlus().memory(workload)
        table = 4 * sum(workload.sizes) * self.rows
        return (
            (450 << 20) + 16 * table + 64 * planned(workload).cells + 64 * min(workload.largest_block, workload.limit)
        )

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns relaxed rows fitted to the measurement."""
        if asks_numbers(workload) or curator.schema.numbers:
            return replace(RAPPlusPlus()(curator, workload, seed=seed), mechanism=description(self))
        estimator = ShrinkingProjection(rows=self.rows, effort=self.effort, objective=self.objective)
        progress.report("measure", 0, 1)
        queries = planned(workload, share_of_singles(curator))
        log = (curator.measure(queries, rho=curator.remaining),)
        progress.report("measure", 1, 1)
        return release(self, curator, workload, estimator.fit(curator.schema.sizes, log, seed=seed), log)


def asks_numbers(workload: Workload) -> bool:
    """Returns whether a workload asks about numbers as numbers."""
    return any(isinstance(part, Tested | Banded) for part in workload.parts)


def share_of_singles(curator: Curator) -> float:
    """Returns the share of the budget for single columns: the more noise would crowd them, the larger."""
    sizes, total = curator.schema.sizes, max(curator.total, 1.0)
    squared = len(sizes) * (2 if curator.neighbours == "replace" else 1)
    crowding = float(np.mean(sizes)) * gaussian_sigma(squared, curator.remaining) / total
    return float(np.clip(0.7 * math.sqrt(crowding), FEWEST, MOST))


def planned(workload: Workload, singles: float = SINGLES) -> Workload:
    """Returns what is measured, each marginal and each function with its share of the budget."""
    weights = workload.weights or (Fraction(1),) * len(workload.parts)
    asked: dict[Features, float] = {}
    functions: list[tuple[Queries, float]] = []
    for part, weight in zip(workload.parts, map(float, weights), strict=True):
        known = part.marginals if isinstance(part, Cells) else part
        if isinstance(known, Marginals):
            asked |= {features: max(weight, asked.get(features, 0.0)) for features in map(ordered, known.sets)}
        else:
            functions.append((part, weight * part.cells))
    taken = 0.0 if not functions else LARGEST if asked else 1 - singles
    shares = shared(inside(workload.sizes, asked), singles)
    by_share = itertools.groupby(sorted(shares, key=lambda f: (-shares[f], f)), key=shares.__getitem__)
    parts = [(Marginals(workload.sizes, tuple(sets)), (1 - taken) * share) for share, sets in by_share]
    whole = sum(weight for _, weight in functions)
    parts += [(part, taken * weight / whole / part.cells) for part, weight in functions]
    largest = max(share for _, share in parts)
    rounded = [Fraction(max(1, round(share / largest * RESOLUTION)), RESOLUTION) for _, share in parts]
    return Workload(tuple(part for part, _ in parts), weights=tuple(rounded), limit=workload.limit)


def ordered(features: Features) -> Features:
    """Returns a set of features in the order of the schema."""
    return tuple(sorted(features))


def inside(sizes: tuple[int, ...], asked: dict[Features, float]) -> list[dict[Features, float]]:
    """Returns the marginals inside those asked for, by order, each with the largest weight of those it is inside.

    Every column is there; the largest orders are left out while there are too many cells.
    """
    orders: list[dict[Features, float]] = [{(column,): 1.0 for column in range(len(sizes))}]
    cells = sum(sizes)
    for order in range(2, max(map(len, asked), default=1) + 1):
        found: dict[Features, float] = {}
        for features, weight in asked.items():
            for inner in itertools.combinations(features, order):
                found[inner] = max(weight, found.get(inner, 0.0))
                if len(found) > MOST_SETS:
                    return orders
        cells += sum(marginal_cells(sizes, features) for features in found)
        if cells > MOST_CELLS:
            return orders
        orders.append(found)
    return orders


def shared(orders: list[dict[Features, float]], singles: float) -> dict[Features, float]:
    """Returns the share of the budget of each marginal: those of an order share alike, but for their weights."""
    rest = {1: [1.0], 2: [singles, 1 - singles]}
    between = (1 - LARGEST) * (1 - singles) / max(len(orders) - 2, 1)
    parts = rest.get(len(orders), [singles, *[between] * (len(orders) - 2), LARGEST * (1 - singles)])
    return {
        features: part * weight / sum(found.values())
        for part, found in zip(parts, orders, strict=True)
        for features, weight in found.items()
    }
