"""FEM: follow the perturbed leader with the exponential mechanism.

Each round, the data player finds s rows, each the best for the queries named so far and a perturbation of its own,

    x_j = argmax over rows x of   sum over i < t of q_i(x) - <one-hot(x), noise_j>,    noise_j ~ Exp(eta) per code,

and the query player names a query, or a negation, on which the private rows exceed these s rows, by the exponential
mechanism with eps0. The release is all rows of all rounds; with more rounds they approach an equilibrium of the game,
in which no query tells them from the private rows.

Privacy: a round is one draw, of rho = eps0^2 / 8 (bounded range; PROOFS.md, section 21), so there are 8 rho / eps0^2 of
them. The paper charges eps0^2 / 2: `accounting` "paper" makes as many rounds as it has, a fourth, and leaves the rest
of the budget unspent. The oracle sees public queries alone: however well it does, the promise holds.

Reference: Vietri, Tian, Bun, Steinke & Wu 2020, algorithms 1 and 2. Deviations: the accounting; a row has exactly one
code for each column; the score counts rows, and is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

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

Accounting = Literal["tight", "paper"]

ROUNDS = 100
"""How many rounds there are where eps0 is left open."""


@dataclass(frozen=True, kw_only=True)
class FEM(Player):
    """FEM's parameters."""

    name: ClassVar[str] = "fem"
    eps0: float = 0.0
    """epsilon_0, of the exponential mechanism of a round; 0 takes what makes ROUNDS of them."""
    eta: float = 2.0
    """The scale of the perturbation."""
    samples: int = 50
    """s, the rows that are found in a round."""
    accounting: Accounting = "tight"
    """Whether a round costs eps0^2 / 8, or eps0^2 / 2 as in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eps0 < math.inf:
            raise ParameterError(f"eps0 ({self.eps0!r}) must be a finite number of at least 0")
        if not 0 < self.eta < math.inf:
            raise ParameterError(f"eta ({self.eta!r}) must be a finite number above 0")
        require_positive("samples", self.samples)
        if self.accounting not in get_args(Accounting):
            raise ParameterError(f"accounting ({self.accounting!r}) must be one of {', '.join(get_args(Accounting))}")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the draw of each round."""
        queries = checked(workload)
        return tuple(Step("draw", each, queries.blocks, queries.cells, 1) for each in self.budgets(rho))

    def budgets(self, rho: float) -> tuple[float, ...]:
        """Returns the rho of each round: tight, all of it in equal parts."""
        paper = self.accounting == "paper"
        eps0 = self.eps0 or math.sqrt((2 if paper else 8) * rho / ROUNDS)
        rounds = math.floor(min((2 if paper else 8) * rho / eps0 / eps0 * (1 + 1e-12), MOST_ROUNDS + 1))
        if not 1 <= rounds <= MOST_ROUNDS:
            found = "more" if rounds else "none"
            raise ParameterError(
                f"eps0 ({eps0:.6g}) must leave from 1 to {MOST_ROUNDS} rounds, and leaves {found} of rho {rho:.6g}"
            )
        return (eps0**2 / 8,) * rounds if paper else proportional(rho, (1.0,) * rounds)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of a search for the rows of a round, and of the rows of the most rounds of the papers."""
        held = 8 * sum(workload.sizes) * self.samples * 4 + 4 * len(workload.sizes) * self.samples * 4096
        return BASE_BYTES + held + 64 * min(workload.largest_block, workload.limit)

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the rows of all rounds."""
        queries = checked(workload)
        budgets = self.budgets(curator.remaining)
        game, generator = Game(queries), np.random.default_rng((seed, 7))
        wanted, found = game.conjunctions(game.anything(1, generator)), []
        for step, rho in enumerate(budgets):
            progress.report("round", step, len(budgets))
            noise = self.perturbation(generator, (self.samples, sum(workload.sizes)))
            found.append(self.best(wanted, noise, seed + step))
            named = curator.draw(queries, public(found[-1], workload.sizes), rho=rho)
            wanted = game.agreed(wanted, named.tolist())
        progress.report("round", len(budgets), len(budgets))
        return release(self, curator, workload, ListedRows(Table(np.concatenate(found), workload.sizes)))

    def perturbation(self, generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """Returns what is added to the worth of each code: exponential noise is subtracted."""
        return -generator.exponential(self.eta, shape)
