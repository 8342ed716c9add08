"""MWEM+PGM: multiplicative weights with the exponential mechanism, its table replaced by a graphical model.

In each of T rounds one marginal of the workload is selected privately by its error, measured, and the model fitted to
all measurements so far. The model starts uniform; nothing is measured before the first round.

    score(r) = c_r ( |M_r(D) - M_r(p)|_1 - sqrt(2 / pi) sigma n_r ),    rho / T a round, the share a of it to measure.

Marginals are candidates while the junction tree stays within `model_size` t / T in round t.

References: Hardt, Ligett & McSherry 2012, algorithm 1; McKenna, Sheldon & Miklau 2019, section 5 (MWEM+PGM).
Deviations: whole marginals are selected and measured, as in McKenna et al., and one may be measured again; the score
has AIM's bias term, the expected error of the measurement, where McKenna's code subtracts n_r; noise is discrete;
weights are rounded to 1/1024 of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anamorph import progress
from anamorph.curator.budget import proportional, rest
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import marginal_cells
from anamorph.errors import WorkloadError
from anamorph.mechanisms.aim import Weights, check_growth, grow, weighted
from anamorph.mechanisms.independent import BASE_BYTES, asked, estimator
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.graphical import Graphical, model_megabytes
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release


@dataclass(frozen=True, kw_only=True)
class MWEMPGM(Graphical):
    """MWEM+PGM's own parameters; the others are those of the fit."""

    name: ClassVar[str] = "mwem-pgm"
    rounds: int = 0
    """T. 0 takes one for each column."""
    split: float = 0.9
    """a, the share of a round's budget that pays for the measurement."""
    model_size: float = 25.0
    """The most megabytes of the junction tree."""
    iterations: int = 200
    """The most steps of the fit of one round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_growth(self.rounds, self.split, self.model_size)

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the rounds; refuses a workload none of whose marginals fits the model of the first."""
        queries = weighted(workload.sizes, self.candidates(workload))
        steps: tuple[Step, ...] = ()
        for selection, measurement in self.budgets(rho, len(workload.sizes)):
            steps += (Step("select", selection, queries.blocks, queries.cells, 1),)
            steps += (Step("measure", measurement, 1, queries.largest_block),)
        return steps

    def budgets(self, rho: float, columns: int) -> tuple[tuple[float, float], ...]:
        """Returns the rho of the selection and of the measurement of each round."""
        whole = proportional(rho, [1] * (self.rounds or columns))
        return tuple(((1 - self.split) * budget, rest(budget, (1 - self.split) * budget)) for budget in whole)

    def candidates(self, workload: Workload) -> Weights:
        """Returns the marginals of the workload that may enter the model, with their weights."""
        sizes = workload.sizes
        kept = {f: c for f, c in asked(workload).items() if model_megabytes(sizes, [f]) <= self.model_size}
        first = self.model_size / (self.rounds or len(sizes))
        if not any(model_megabytes(sizes, [features]) <= first for features in kept):
            raise WorkloadError(
                f"model_size ({self.model_size:g}) must leave {first:.3g} MB for a marginal of the workload in the "
                "first round; none is so small: set a larger one, or fewer rounds"
            )
        return kept

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the largest model and what a fit makes of it, and of the largest candidate."""
        largest = max(marginal_cells(workload.sizes, features) for features in self.candidates(workload))
        return BASE_BYTES + int(self.model_size * 2**20) * 6 + 64 * largest

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the model fitted to the measurements of all rounds."""
        self.steps_for(workload, curator.budget.rho)
        weights, model = self.candidates(workload), self.init(curator.schema.sizes)
        log: tuple[Measurement, ...] = ()
        rounds = self.budgets(curator.remaining, len(model.sizes))
        for step, shares in enumerate(rounds):
            progress.report("round", step, len(rounds))
            limit = self.model_size * (step + 1) / len(rounds)
            model, log, *_ = grow(curator, weights, model, log, shares, limit, estimator(self))
        progress.report("round", len(rounds), len(rounds))
        return release(self, curator, workload, model, log)
