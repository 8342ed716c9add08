"""DualQuery: the query player follows multiplicative weights, the data player answers with the best row.

Q_1 is uniform over queries and negations, and after rows x_1 ... x_t

    Q_t+1(q) proportional to exp(eta * sum over i <= t of (q(D) - q(x_i))).

Round t takes s queries from Q_t and finds the row that agrees with most of them; the release is the T rows.

Privacy: a query from Q_t+1 is a draw of the exponential mechanism whose score is n (q(D) - mean of q over the t rows),
in counts, with beta = n / (eta t) (PROOFS.md, section 21): rho = (eta t / n)^2 / 2 for each of s. What rounds cost
grows as t^2; here the budget is given, the round after t rows has t^2 / (1 + 4 + ... + (T-1)^2) of it, and eta follows,

    eta = n sqrt(2 rho / (s sum of t^2)).

Reference: Gaboardi, Gallego Arias, Hsu, Roth & Wu 2014, algorithm 1; Vietri et al. 2020, section 5. Deviations: the
accounting, by bounded range; rounds and samples are given, and eta follows from the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anamorph import progress
from anamorph.curator.budget import proportional
from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError, require_positive
from anamorph.mechanisms.game import BASE_BYTES, MOST_ROUNDS, Game, Player, checked, public
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.listed import ListedRows
from anamorph.queries.workload import Workload
from anamorph.release import Release
from anamorph.table import Table


@dataclass(frozen=True, kw_only=True)
class DualQuery(Player):
    """DualQuery's parameters."""

    name: ClassVar[str] = "dualquery"
    rounds: int = 100
    """T, the number of rows."""
    samples: int = 50
    """s, the queries that a row is the answer to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("samples", self.samples)
        if not 2 <= self.rounds <= MOST_ROUNDS:
            raise ParameterError(f"rounds ({self.rounds}) must be from 2 to {MOST_ROUNDS}: the first looks at nothing")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the draws of each round but the first."""
        queries = checked(workload)
        return tuple(Step("draw", each, queries.blocks, queries.cells, self.samples) for each in self.budgets(rho))

    def budgets(self, rho: float) -> tuple[float, ...]:
        """Returns the rho of each round but the first."""
        return proportional(rho, [float(t * t) for t in range(1, self.rounds)])

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the queries of a round and of a search for its row."""
        return BASE_BYTES + 1024 * self.samples + 64 * min(workload.largest_block, workload.limit)

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the rows of all rounds."""
        queries, sizes = checked(workload), workload.sizes
        game, generator = Game(queries), np.random.default_rng((seed, 8))
        budgets = self.budgets(curator.remaining)
        named, rows = game.anything(self.samples, generator), np.zeros((0, len(sizes)), np.int32)
        for step, rho in enumerate((*budgets, 0.0)):
            progress.report("round", step, self.rounds)
            rows = np.concatenate([rows, self.answer(game, named, seed + step)])
            if rho:
                named = curator.draw(queries, public(rows, sizes), rho=rho, draws=self.samples)
        progress.report("round", self.rounds, self.rounds)
        return release(self, curator, workload, ListedRows(Table(rows, sizes)))

    def answer(self, game: Game, named: np.ndarray, seed: int) -> np.ndarray:
        """Returns the row that agrees with most of the queries named; a little noise decides where they say nothing."""
        sizes, generator = game.workload.sizes, np.random.default_rng((seed, 9))
        noise = generator.uniform(0, TIES * min(game.shares) / len(sizes), (1, sum(sizes)))
        return self.best(game.conjunctions(named.tolist()), noise, seed)


TIES = 1e-2
"""What noise may add to a row, all columns together: far below what the lightest query counts."""
