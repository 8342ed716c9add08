"""DQRS: DualQuery with rejection sampling.

The weights of multiplicative weights change little from round to round, so most of the queries that were drawn from Q_t
can be taken as drawn from Q_t+1: query q is kept with probability

    exp(eta (q(D) - q(x_t)) - eta - gamma_t) <= exp(-gamma_t),    gamma_t = 1 / (2 t^(2/3)),

which is proportional to Q_t+1(q) / Q_t(q). Only s~_t = (2 gamma_t + 4 eta) s queries are drawn anew, and kept ones that
are too many are dropped at random. A draw from Q_t+1 costs (eta t / n)^2 / 2; to decide about a query that is at hand
costs (eta / n / (1 - exp(-gamma_t)))^2 / 8, which grows as t^(4/3) and not as t^2.

Privacy: PROOFS.md, sections 21 and 22. Every one of the s decisions of a round is charged. The budget is given: with
h = eta / n,

    rho = h^2 sum over t of (s~_t t^2 / 2 + s / (8 (1 - exp(-gamma_t))^2)),

and eta = h n follows. It is `rate`, planned beforehand, that says how many queries are drawn anew.

Lemma 8 takes x_t as given. It is the answer to the very queries that are kept or not, here as in the paper, so that the
distribution of those kept is Q_t+1 only nearly.

Reference: Vietri et al. 2020, algorithm 4, lemmas 8 and 9. Deviations: the accounting; eta follows from the budget;
none of the new queries is dropped; in a round that keeps so few that fewer than s are there, some are taken
twice, so that what a round costs does not depend on chance. All queries count the same, whatever their weights: `keep`
decides without them, and what it keeps would have another distribution than what is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.budget import proportional
from anamorph.curator.curator import Curator
from anamorph.curator.keeping import LARGEST_RATE, keeping_rho
from anamorph.errors import ParameterError
from anamorph.mechanisms.dual_query import DualQuery
from anamorph.mechanisms.game import Game, checked, public
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.listed import ListedRows
from anamorph.queries.workload import Workload
from anamorph.release import Release
from anamorph.table import Table


class Turn(NamedTuple):
    """What follows a row: queries that are kept by a margin, and new ones."""

    margin: float
    fresh: int
    keep_rho: float
    draw_rho: float


@dataclass(frozen=True, kw_only=True)
class DQRS(DualQuery):
    """DualQuery's parameters, and one more."""

    name: ClassVar[str] = "dqrs"
    rate: float = 0.05
    """The eta that the number of new queries is planned for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= 1:
            raise ParameterError(f"rate ({self.rate!r}) must be above 0 and at most 1")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns what each round keeps and draws."""
        queries, steps = checked(workload), ()
        for turn in self.turns(rho):
            steps += (Step("keep", turn.keep_rho, self.samples, self.samples, self.samples),)
            steps += (Step("draw", turn.draw_rho, queries.blocks, queries.cells, turn.fresh),)
        return steps

    def turns(self, rho: float) -> list[Turn]:
        """Returns what follows each row but the last."""
        margins = [1 / (2 * t ** (2 / 3)) for t in range(1, self.rounds)]
        fresh = [min(self.samples, math.ceil((2 * margin + 4 * self.rate) * self.samples)) for margin in margins]
        keeps = [self.samples / (8 * math.expm1(-margin) ** 2) for margin in margins]
        draws = [count * t * t / 2 for t, count in enumerate(fresh, start=1)]
        shares = proportional(rho, [*keeps, *draws])
        return [Turn(*turn) for turn in zip(margins, fresh, shares[: len(keeps)], shares[len(keeps) :], strict=True)]

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the rows of all rounds."""
        queries, sizes = replace(checked(workload), weights=()), workload.sizes
        game, generator = Game(queries), np.random.default_rng((seed, 8))
        named, rows = game.anything(self.samples, generator), np.zeros((0, len(sizes)), np.int32)
        turns = self.turns(curator.remaining)
        for step, turn in enumerate(turns):
            progress.report("round", step, self.rounds)
            rows = np.concatenate([rows, self.answer(game, named, seed + step)])
            stay = curator.keep(
                queries,
                public(rows[-1:], sizes),
                named,
                rate=affordable(turn, self.samples, curator.total),
                margin=turn.margin,
            )
            new = curator.draw(queries, public(rows, sizes), rho=turn.draw_rho, draws=turn.fresh)
            named = gathered(named[stay], new, self.samples, generator)
        progress.report("round", len(turns), self.rounds)
        rows = np.concatenate([rows, self.answer(game, named, seed + self.rounds)])
        progress.report("round", self.rounds, self.rounds)
        return release(self, curator, workload, ListedRows(Table(rows, sizes)))


def affordable(turn: Turn, samples: int, total: float) -> float:
    """Returns the largest eta, up to rounding, for which keeping some queries costs at most what a round has for it.

    Not more than the curator takes: by then a query is kept only if all private rows have it and the new row has not.
    """
    eta = total * -math.expm1(-turn.margin) * math.sqrt(8 * turn.keep_rho / samples) * (1 - 2.0**-40)
    eta = min(eta, LARGEST_RATE)
    assert keeping_rho(samples, eta, turn.margin, total) <= turn.keep_rho  # noqa: S101 - by the margin of 2^-40
    return eta


def gathered(
    stay: NDArray[np.int64], new: NDArray[np.int64], samples: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Returns as many queries as there should be: all new ones, and of those that stay as many as there is room for."""
    found = np.concatenate([new, generator.permutation(stay)])[:samples]
    return np.concatenate([found, generator.choice(found, samples - found.size)])
