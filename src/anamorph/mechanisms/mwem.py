"""MWEM: multiplicative weights with the exponential mechanism, over an explicit distribution on all possible rows.

The model starts uniform. In each of T rounds one block of the workload, a marginal r or a single query q, is selected
privately by its error, measured, and the model updated by multiplicative weights (models/universe.py):

    score(r) = c_r ( |M_r(D) - M_r(p)|_1 - sqrt(2 / pi) sigma n_r ),     score(q) = c_q |q(D) - q(p)|,
    p(x)  <-  p(x) exp(eta (m_y - p_y)) / Z,    y the cell of x, in sweeps through all measurements so far,
    rho / T a round, the share a of it to measure: sigma = Delta_2 / sqrt(2 a rho / T) in counts, and
    1 - a to select: Gumbel scale beta = Delta sqrt(T / (2 (1 - a) rho)).

The model is a product over the connected components of the workload, each with a probability for every combination of
its columns' values, so a component must be small; among distributions that explain the measurements as well,
multiplicative weights keep near the one of largest entropy, as the graphical model of mwem-pgm does: which needs no
universe, and no limit but the junction tree's. What is released is the last distribution, or the average of those after
each round.

Reference: Hardt, Ligett & McSherry 2012, algorithm 1 (`blocks=false`, `history=0`, `average=true`, `step=paper`,
`split=0.5`), and the improvements it names: the last distribution, and all measurements in every round.
Deviations: whole marginals by default, with AIM's bias term; the scaled step; components of the workload; noise is
discrete, on exact counts, and Gaussian, not Laplace's; zCDP, where the paper adds epsilons; the average is over those
after each round, without the uniform one before the first, and is taken in each component; thresholds count as the
marginals that they are sums of where whole marginals are selected; weights are rounded to 1/1024 of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import ClassVar

import numpy as np

from anamorph import progress
from anamorph.curator.budget import gaussian_sigma, proportional, rest
from anamorph.curator.curator import LARGEST_OFFSET, Curator
from anamorph.curator.scores import AbsoluteError, L1Error
from anamorph.curator.tallies import marginal_cells
from anamorph.errors import ParameterError, WorkloadError, require_positive
from anamorph.mechanisms.aim import MOST_ROUNDS, weighted
from anamorph.mechanisms.independent import BASE_BYTES, asked
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.universe import Features, MultiplicativeWeights, Reals, Universe, connected
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release

LARGEST_UNIVERSE = 1 << 32
"""The most cells that `universe` may allow: 32 GiB of probabilities."""

PER_COLUMN = 4
"""How many rounds each column makes for, where their number is not given."""

NAMED = 8
"""How many columns of a component a message names."""


@dataclass(frozen=True, kw_only=True)
class MWEM(MultiplicativeWeights):
    """MWEM's own parameters; the others are those of the updates."""

    name: ClassVar[str] = "mwem"
    rounds: int = 0
    """T. 0 takes four for each column, and no more than there are blocks."""
    blocks: bool = True
    """Whether whole marginals are selected and measured, or single queries."""
    split: float = 0.8
    """a, the share of a round's budget that pays for the measurement."""
    average: bool = False
    """Whether the average of the distributions after each round is released, or the last one."""
    universe: int = 1 << 22
    """The most cells of a component: of all combinations of the values of columns that the workload connects."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rounds, int) or not 0 <= self.rounds <= MOST_ROUNDS:
            raise ParameterError(f"rounds ({self.rounds!r}) must be a whole number from 0 to {MOST_ROUNDS}")
        if not 0 < self.split < 1:
            raise ParameterError(f"split ({self.split!r}) must be in (0, 1)")
        require_positive("universe", self.universe)
        if self.universe > LARGEST_UNIVERSE:
            raise ParameterError(f"universe ({self.universe}) must be at most {LARGEST_UNIVERSE} cells")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the rounds; refuses a workload that connects columns to a universe of too many cells."""
        self.check_universe(workload)
        queries = self.queries(workload)
        steps: tuple[Step, ...] = ()
        for selection, measurement in self.budgets(rho, queries):
            steps += (Step("select", selection, queries.blocks, queries.cells, 1),)
            steps += (Step("measure", measurement, 1, queries.largest_block),)
        return steps

    def check_universe(self, workload: Workload) -> None:
        """Refuses a component of more cells than `universe`."""
        sizes = workload.sizes
        largest = max(connected(sizes, asked(workload)), key=lambda component: marginal_cells(sizes, component))
        cells = marginal_cells(sizes, largest)
        if cells > self.universe:
            raise WorkloadError(
                f"the workload must connect no columns with more than {self.universe} combinations of values "
                f"(universe); it connects {len(largest)} columns, at positions {listed(largest)}, with "
                f"{Decimal(cells):.4g}: take auto or mwem-pgm, which list no combinations, or ask for fewer marginals"
            )

    def budgets(self, rho: float, queries: Workload) -> tuple[tuple[float, float], ...]:
        """Returns the rho of the selection and of the measurement of each round."""
        whole = proportional(rho, [1] * (self.rounds or min(PER_COLUMN * len(queries.sizes), queries.blocks)))
        return tuple(((1 - self.split) * budget, rest(budget, (1 - self.split) * budget)) for budget in whole)

    def queries(self, workload: Workload) -> Workload:
        """Returns the workload in the blocks that are selected and measured."""
        return weighted(workload.sizes, asked(workload)) if self.blocks else workload.by_cell()

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the model, the one it is fitted from, the average, an update; of a piece of answers."""
        sizes, sets = workload.sizes, asked(workload)
        cells = sum(marginal_cells(sizes, component) for component in connected(sizes, sets))
        largest = max(marginal_cells(sizes, features) for features in sets)
        answers = min(self.queries(workload).cells, 4 * workload.limit)
        return BASE_BYTES + 8 * cells * (3 + self.average) + 40 * largest + 64 * answers

    def weights(self) -> MultiplicativeWeights:
        """Returns the estimator alone."""
        return MultiplicativeWeights(**{item.name: getattr(self, item.name) for item in fields(MultiplicativeWeights)})

    def offset(self, queries: Workload, curator: Curator, rho: float) -> list[float] | None:
        """Returns the expected L1 error of the measurement of each marginal, in counts; single queries have none."""
        if not self.blocks:
            return None
        noise = math.sqrt(2 / math.pi) * gaussian_sigma(2 if curator.neighbours == "replace" else 1, rho)
        cells = (cells for part in queries.parts if isinstance(part, Marginals) for cells in part.block_cells)
        return [min(noise * count, LARGEST_OFFSET) for count in cells]

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the distribution that the rounds lead to, or their average."""
        self.steps_for(workload, curator.budget.rho)
        queries, score = self.queries(workload), L1Error() if self.blocks else AbsoluteError()
        model = Universe.uniform(workload.sizes, asked(workload))
        total: dict[Features, Reals] = {}
        log: tuple[Measurement, ...] = ()
        rounds = self.budgets(curator.remaining, queries)
        for step, (selection, measurement) in enumerate(rounds):
            progress.report("round", step, len(rounds))
            offset = self.offset(queries, curator, measurement)
            chosen = curator.select(queries, model.answers(queries), rho=selection, score=score, offset=offset)
            log += (curator.measure(queries.take(chosen), rho=measurement),)
            model = self.weights().fit(model, log)
            if self.average:
                accumulate(total, model.components)
        progress.report("round", len(rounds), len(rounds))
        if self.average:
            model = Universe(model.sizes, {component: sums / len(rounds) for component, sums in total.items()})
        return release(self, curator, workload, model, log)


def accumulate(total: dict[Features, Reals], components: Mapping[Features, Reals]) -> None:
    """Adds distributions to their sums, in place."""
    for component, values in components.items():
        total[component] = np.add(total[component], values, out=total[component]) if component in total else +values


def listed(columns: Features) -> str:
    """Returns the positions of columns, the first of many."""
    named = ", ".join(map(str, columns[:NAMED]))
    return named if len(columns) <= NAMED else f"{named} and {len(columns) - NAMED} more"
