"""GEM: generative networks with the exponential mechanism.

The rounds are RAP's: in each of T rounds the K worst answered marginals, or single queries, are selected privately and
measured. What is fitted to all measurements so far is not a table of relaxed rows but a network that makes them, of a
fixed batch of Gaussian latent vectors; it goes on from the network of the round before.

    G_theta : z -> relaxed row,    answer(q) = mean over the batch of q(G_theta(z)),
    theta = argmin  chi^2 / (2 n) + penalty * I     (models/generator.py),
    rho_t proportional to g^t, the share a for selection and 1 - a for measurement:
    Gumbel scale beta = Delta sqrt(K / (2 a rho_t)), noise sigma = Delta_2 / sqrt(2 (1 - a) rho_t), in counts.

Where T K blocks are all that the workload has, nothing is left to select: they are measured at once.

Reference: Liu, Vietri & Wu 2021 (Iterative methods for private synthetic data: unifying framework and new methods), the
algorithm GEM.
Deviations: whole marginals are selected, by L1 error, and measured (`blocks=false`: single queries, as in the paper);
K blocks a round, by one-shot selection, no block twice; the loss is chi^2 with the information penalty, over all
measurements, not L1 over those that are still far off; layers are not normalised over the batch; the best network of
the last round is released, not a moving average; latent vectors have 16 numbers, not 128; rho follows from
(epsilon, delta) by the tight conversion; noise is discrete, on exact counts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from anamorph.curator.curator import Curator
from anamorph.mechanisms.mechanism import Step, release
from anamorph.mechanisms.rap import RAP
from anamorph.models.generator import GeneratorProjection
from anamorph.queries.workload import Workload
from anamorph.release import Release

SHARED = ("rounds", "per_round", "blocks", "order", "split", "growth", "prior", "rows", "steps")
"""The parameters that rounds have whatever is fitted in them."""


@dataclass(frozen=True, kw_only=True)
class GEM(GeneratorProjection):
    """GEM's own parameters; the others are those of the projection."""

    name: ClassVar[str] = "gem"
    rounds: int = 16
    """T."""
    per_round: int = 3
    """K; not used when T = 1, or when T K is all there is."""
    blocks: bool = True
    """Whether whole marginals are selected and measured, or single queries."""
    order: int = 0
    """The most columns of a marginal that is measured whole; those of larger blocks are replaced by theirs. 0: any."""
    split: float = 0.2
    """a, the share of a round's budget that pays for the selection."""
    growth: float = 1.0
    """g, the budget of a round over that of the round before; beyond 16 rounds it grows more slowly, as much in all."""
    prior: float = 0.5
    """p, how much the selection of single queries leans to combinations of values that the table holds popular."""
    steps: int = 60
    """The most Adam steps of one round; where T K is all there is, the one fit takes those of all rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schedule()

    def schedule(self, workload: Workload | None = None) -> RAP:
        """Returns the rounds: RAP's, or a single one where they would take all blocks of the workload."""
        made = RAP(**{name: getattr(self, name) for name in SHARED})
        if workload is None or self.rounds == 1:
            return made
        at_once = self.rounds * self.per_round >= made.queries(workload).blocks
        return replace(made, rounds=1, steps=self.rounds * self.steps) if at_once else made

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the rounds; refuses functions of rows among whole blocks."""
        return self.schedule(workload).steps_for(workload, rho)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the rows and of what is measured, as RAP's; of the network, and of its layers' rows."""
        width = self.latent + self.layers * self.hidden
        network = self.hidden * self.layers * width + sum(workload.sizes) * width
        return self.schedule(workload).memory(workload) + 4 * (6 * network + 6 * width * self.rows)

    def projection(self, steps: int) -> GeneratorProjection:
        """Returns the estimator alone, so that runs that differ in T and K share its compiled steps."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(GeneratorProjection)}
        return GeneratorProjection(**values | {"steps": steps})

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns a generator fitted to the measurements."""
        self.steps_for(workload, curator.budget.rho)
        rounds = self.schedule(workload)
        model, log = rounds.run(curator, workload, self.projection(rounds.steps), seed=seed)
        return release(self, curator, workload, model, log)
