"""AIM: an adaptive and iterative mechanism that measures the marginals which matter most and are known least.

All one-way marginals are measured first. Then, round by round, one marginal r of the workload's downward closure is
selected privately, measured, and the graphical model fitted again. The score weighs what a measurement would mend,

    score(r) = w_r ( |M_r(D) - M_r(p)|_1 - sqrt(2 / pi) sigma_t n_r ),     w_r = sum over marginals s of c_s |r and s|,

with n_r the cells of r, so that sqrt(2 / pi) sigma_t n_r is the error of its measurement. Its sensitivity is that of
the L1 error times the largest w_r. Marginals are candidates while the junction tree stays within that share of
`model_size` which the budget used so far is of the whole.

Budget: a round has rho_t, the share a = `split` for its measurement and 1 - a for its selection; rho_1 = rho / T. If a
measurement changed the model by no more than its noise would, rho_t is too little to learn from, and the next round has
four times as much (sigma halved, epsilon doubled). When two more rounds do not fit, the next takes all that is left.

Reference: McKenna, Mullins, Sheldon & Miklau 2022, algorithms 2 (AIM), 3 (initialisation) and 4 (annealing); T = 16 d;
section 5: bounds.py.
Deviations: noise is discrete, on exact counts; where rows are replaced the L1 error has sensitivity 2, and a
marginal sqrt 2; the one-way marginals have at most a quarter of the budget, however few the rounds; weights are
rounded to 1/1024 of the largest; a candidate that leaves the tree no larger than it is always stays one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, NamedTuple

import numpy as np

from anamorph import progress
from anamorph.curator.budget import gaussian_sigma, gumbel_scale, proportional, rest
from anamorph.curator.curator import LARGEST_OFFSET, Curator, relative
from anamorph.curator.scores import GRID, L1Error
from anamorph.curator.tallies import marginal_cells
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.bounds import KEPT, Seen, tails
from anamorph.mechanisms.independent import BASE_BYTES, asked, estimator, marginals, one_way
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.graphical import Graphical, GraphicalModel, model_megabytes
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release

LARGEST_START = 0.25
"""The most that the one-way marginals may have of the budget."""

MOST_ROUNDS = 10_000
"""The most rounds: each has a fit, and a line in the plan."""

MOST_CANDIDATES = 1 << 20
"""The most marginals of a downward closure, counted as often as they are inside one of the workload."""

ANNEAL = 4
"""What the budget of a round is multiplied by after one that taught nothing."""

Weights = dict[tuple[int, ...], Fraction]
"""Candidates, each with its weight."""


@dataclass(frozen=True, kw_only=True)
class AIM(Graphical):
    """AIM's own parameters; the others are those of the fit."""

    name: ClassVar[str] = "aim"
    rounds: int = 0
    """T: a round begins with rho / T. 0 takes 16 for each column."""
    split: float = 0.9
    """a, the share of a round's budget that pays for the measurement."""
    model_size: float = 80.0
    """The most megabytes of the junction tree."""
    iterations: int = 500
    """The most steps of the fit of one round. (The paper's code: 1000.)"""
    tolerance: float = 3e-5
    """A fit stops when ten steps lower the loss by less than this fraction of itself; the last one at a tenth of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_growth(self.rounds, self.split, self.model_size)

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the first measurement, and the most rounds that there can be: annealing makes them fewer."""
        eligible = closure(workload, self.model_size)
        queries = one_way(workload.sizes)
        start, rounds = self.budgets(rho, len(workload.sizes))
        steps = (Step("measure", start, queries.blocks, queries.cells, workload=queries),)
        candidates = weighted(workload.sizes, eligible)
        for planned in rounds:
            selection, measurement = self.shares(planned)
            steps += (Step("select", selection, candidates.blocks, candidates.cells, 1),)
            steps += (Step("measure", measurement, 1, candidates.largest_block),)
        return steps

    def budgets(self, rho: float, columns: int) -> tuple[float, tuple[float, ...]]:
        """Returns the rho of the one-way marginals, and of every round if none is annealed."""
        count = self.rounds or 16 * columns
        share = min(self.split * columns / count, LARGEST_START)
        start, left = proportional(rho, (share, 1 - share))
        rounds: tuple[float, ...] = ()
        while left > 0:
            rounds += (affordable(left, rho / count),)
            left = rest(left, rounds[-1])
        return start, rounds

    def shares(self, rho: float) -> tuple[float, float]:
        """Returns the rho of a round's selection and of its measurement, together at most the round's."""
        selection = (1 - self.split) * rho
        return selection, rest(rho, selection)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the largest model and what a fit makes of it, and of the largest candidate."""
        eligible = closure(workload, self.model_size)
        largest = max(marginal_cells(workload.sizes, features) for features in eligible)
        return BASE_BYTES + int(self.model_size * 2**20) * (6 + KEPT) + 64 * largest

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the model fitted to the measurements of all rounds."""
        self.steps_for(workload, curator.budget.rho)
        sizes, whole, weights = curator.schema.sizes, curator.remaining, closure(workload, self.model_size)
        start, (planned, *_) = self.budgets(whole, len(sizes))
        log = (curator.measure(one_way(sizes), rho=start),)
        model = estimator(self).fit(self.init(sizes), log)
        last, seen = False, tuple[Seen, ...]()
        while not last:
            progress.report("budget", round(1000 * (1 - curator.remaining / whole)), 1000)
            planned = affordable(curator.remaining, planned)
            left = rest(curator.remaining, planned)
            last = left <= 0
            fitting = replace(estimator(self), iterations=2 * self.iterations, tolerance=self.tolerance / 10)
            limit = self.model_size * (1 - left / whole)
            found = grow(
                curator, weights, model, log, self.shares(planned), limit, fitting if last else estimator(self)
            )
            model, log, seen = found.model, found.log, (*seen, found.seen)[-KEPT:]
            planned *= 1 if found.learned else ANNEAL
        model = replace(model, bounds=tails(model, seen, rest(whole, start)))
        progress.report("budget", 1000, 1000)
        return release(self, curator, workload, model, log)


class Grown(NamedTuple):
    """A model after a round."""

    model: GraphicalModel
    log: tuple[Measurement, ...]
    learned: bool
    """Whether the measurement changed the model by more than its noise would."""
    seen: Seen


def check_growth(rounds: int, split: float, model_size: float) -> None:
    """Refuses parameters of a model that grows round by round."""
    if not isinstance(rounds, int) or not 0 <= rounds <= MOST_ROUNDS:
        raise ParameterError(f"rounds ({rounds!r}) must be a whole number from 0 to {MOST_ROUNDS}")
    if not 0 < split < 1:
        raise ParameterError(f"split ({split!r}) must be in (0, 1)")
    if not 0 < model_size <= 4096:
        raise ParameterError(f"model_size ({model_size!r}) must be above 0 and at most 4096 megabytes")


def affordable(left: float, rho: float) -> float:
    """Returns the rho of a round: all that is left where two such rounds do not fit."""
    return left if left <= 2 * rho else rho


def closure(workload: Workload, model_size: float) -> Weights:
    """Returns the candidates: all sets of columns inside one that is asked, unless they alone exceed the model."""
    sets, sizes = asked(workload), workload.sizes
    if sum(2 ** len(features) for features in sets) > MOST_CANDIDATES:
        raise WorkloadError("the workload must have fewer or smaller marginals: theirs are too many to select among")
    orders = ((features, range(1, len(features) + 1)) for features in sets)
    inner = itertools.chain.from_iterable(itertools.combinations(f, k) for f, order in orders for k in order)
    kept = [f for f in dict.fromkeys(inner) if len(f) == 1 or marginal_cells(sizes, f) * 8 <= model_size * 2**20]
    return {f: sum((c * len(set(f) & set(s)) for s, c in sets.items()), Fraction(0)) for f in kept}


def weighted(sizes: tuple[int, ...], weights: Weights) -> Workload:
    """Returns candidates as a workload: a part for each weight, in the order of the candidates sorted by it."""
    ordered = itertools.groupby(sorted(weights, key=weights.__getitem__), key=weights.__getitem__)
    groups = {weight: tuple(sets) for weight, sets in ordered}
    return Workload(tuple(Marginals(sizes, sets) for sets in groups.values()), weights=tuple(groups))


def grow(
    curator: Curator,
    weights: Weights,
    model: GraphicalModel,
    log: tuple[Measurement, ...],
    shares: tuple[float, float],
    limit: float,
    fitting: Graphical,
) -> Grown:
    """Selects one of the candidates that keep the model within its limit, measures it, and fits the model again."""
    sizes, (selection, measurement) = model.sizes, shares
    limit = max(limit, model.megabytes)
    held = [set(clique) for clique in model.tree.cliques]  # what the tree holds already does not make it larger

    def fits(features: tuple[int, ...]) -> bool:
        inside = any(clique.issuperset(features) for clique in held)
        return inside or model_megabytes(sizes, (*model.potentials, features)) <= limit

    fit = {features: weight for features, weight in weights.items() if fits(features)}
    queries = weighted(sizes, fit)
    noise = math.sqrt(2 / math.pi) * gaussian_sigma(2 if curator.neighbours == "replace" else 1, measurement)
    sets = [features for part in queries.parts if isinstance(part, Marginals) for features in part.sets]
    offset = {features: min(noise * marginal_cells(sizes, features), LARGEST_OFFSET) for features in sets}
    (index,) = curator.select(
        queries, model.answers(queries), rho=selection, score=L1Error(), offset=list(offset.values())
    )
    chosen = sets[index]
    log += (curator.measure(marginals(sizes, chosen), rho=measurement),)
    fitted, before = fitting.fit(model, log), model.marginal(chosen)
    change, error = (np.abs(now - before).sum() * curator.total for now in (fitted.marginal(chosen), log[-1].values))
    scores = compared(curator, fit, selection)
    seen = Seen(replace(model), *scores, offset, chosen, log[-1], float(error), selection + measurement)
    return Grown(fitted, log, bool(change > offset[chosen]), seen)


def compared(curator: Curator, weights: Weights, rho: float) -> tuple[dict[tuple[int, ...], int], float]:
    """Returns how a selection weighs its candidates, and the scale of its noise in counts: as the curator does."""
    shares = relative(weights.values())
    sensitivity = L1Error().sensitivity(curator.neighbours) * max(shares.values()) << GRID
    scale = max(gumbel_scale(sensitivity, 1, rho), 2.0) / (1 << GRID)
    return {features: shares[weight] for features, weight in weights.items()}, scale
