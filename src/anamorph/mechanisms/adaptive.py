"""The select-measure-project loop that the adaptive mechanisms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anamorph import progress
from anamorph.curator.budget import rest
from anamorph.curator.candidates import Prior
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import Estimate
from anamorph.curator.scores import Score
from anamorph.models.model import Estimator, ModelT
from anamorph.queries.workload import Workload
from anamorph.release import Measurement


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: k blocks are selected with the share `split` of rho and measured with the rest."""

    rho: float
    k: int
    split: float = 0.5

    def shares(self) -> tuple[float, float]:
        """Returns the rho of the selection and of the measurement, together at most the round's."""
        selection = self.split * self.rho
        return selection, rest(self.rho, selection)


def adaptive(
    curator: Curator,
    workload: Workload,
    estimator: Estimator[ModelT],
    rounds: Sequence[Round],
    *,
    score: Score,
    seed: int,
    compare: Callable[[ModelT], tuple[Estimate, Prior | None]] | None = None,
) -> tuple[ModelT, tuple[Measurement, ...]]:
    """Selects the worst answered blocks, measures them, projects; repeats. Returns the model and the measurements.

    Every block is measured at most once, and a fit uses all measurements so far, none drawn anew. A selection compares
    with the model's answers; or with the table, and under the public prior, that `compare` makes of the model.
    """
    model = estimator.init(curator.schema.sizes, seed=seed)
    log: tuple[Measurement, ...] = ()
    taken = np.zeros(0, np.int64)
    for step, round_ in enumerate(rounds):
        progress.report("round", step, len(rounds))
        selection, measurement = round_.shares()
        guess, prior = (model.answers(workload), None) if compare is None else compare(model)
        chosen = curator.select(workload, guess, rho=selection, k=round_.k, score=score, exclude=taken, prior=prior)
        log += (curator.measure(workload.take(chosen), rho=measurement),)
        taken = np.concatenate([taken, chosen])
        model = estimator.fit(model, log, seed=seed + step)
    progress.report("round", len(rounds), len(rounds))
    return model, log
