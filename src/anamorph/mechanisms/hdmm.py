"""HDMM: the matrix mechanism for marginals. What to measure is optimised, and measured once; least squares answers.

    minimise over strategies    sum over queries of Var(answer),     at a cost of rho,

where a strategy is a precision for every marginal inside one that is asked (`strategy` "marginals", the paper's OPT_M),
or for every residual (`strategy` "residuals": ResidualPlanner, optimal where one row is added or removed; where rows
are replaced a marginal costs twice as much, and residuals twice to four times). See queries/strategies.py.

Answers, by `inference`: "least-squares", unbiased, with known noise, and no rows; "local" (HDMM+LLS), where in addition
no cell is below 0; "graphical" (HDMM+PGM), a graphical model, with rows, if the junction tree of the workload is small.

References: McKenna, Miklau, Hay & Machanavajjhala 2018, sections 6.3 and 7; +LLS and +PGM: McKenna, Sheldon & Miklau
2019; Xiao, He, Zhang & Kifer 2023.
Deviations: those of queries/strategies.py; noise is discrete; thresholds count as the marginals they are sums of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from anamorph import progress
from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.independent import BASE_BYTES, answer_bytes, asked, estimator
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.graphical import Graphical, model_megabytes
from anamorph.models.least_squares import least_squares, nonnegative
from anamorph.models.model import Model
from anamorph.queries.strategies import Objective, maximal, strategy
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Release


@dataclass(frozen=True, kw_only=True)
class HDMM(Graphical):
    """HDMM's own parameters; the others are those of a graphical model's fit, and of the local one."""

    name: ClassVar[str] = "hdmm"
    native: ClassVar[bool] = True
    strategy: Literal["marginals", "residuals"] = "marginals"
    """What is measured."""
    objective: Objective = "total"
    """What is minimised: the total squared error of all queries, or the largest variance."""
    inference: Literal["least-squares", "local", "graphical"] = "least-squares"
    """How answers are made of the measurements."""
    model_size: float = 500.0
    """The most megabytes of the junction tree."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("strategy", self.strategy, ("marginals", "residuals"))
        check_choice("objective", self.objective, get_args(Objective))
        check_choice("inference", self.inference, ("least-squares", "local", "graphical"))
        if not 0 < self.model_size <= 4096:
            raise ParameterError(f"model_size ({self.model_size!r}) must be above 0 and at most 4096 megabytes")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement; refuses a workload whose graphical model would be too large."""
        queries = self.queries(workload)
        sets = list(asked(workload))
        if self.inference == "graphical" and (size := model_megabytes(workload.sizes, sets)) > self.model_size:
            raise WorkloadError(
                f"the workload must have a junction tree of at most {self.model_size:g} megabytes (model_size), and "
                f"has one of {size:.3g}: take inference=local"
            )
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def queries(self, workload: Workload) -> Workload:
        """Returns what is measured."""
        wanted = {features: float(weight) for features, weight in asked(workload).items()}
        residuals = self.strategy == "residuals"
        return strategy(workload.sizes, wanted, residuals=residuals, objective=self.objective).workload()

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of counts, noise, noisy answers and residuals, and of a graphical model."""
        tree = int(6 * self.model_size * 2**20) if self.inference == "graphical" else 0
        return BASE_BYTES + 12 * 8 * self.queries(workload).cells + answer_bytes(workload) + tree

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the answers that follow from the measurement."""
        self.steps_for(workload, curator.budget.rho)
        progress.report("measure", 0, 1)
        log = (curator.measure(self.queries(workload), rho=curator.remaining),)
        progress.report("measure", 1, 1)
        return release(self, curator, workload, self.inferred(workload, log), log)

    def inferred(self, workload: Workload, log: tuple[Measurement, ...]) -> Model:
        """Returns the model that `inference` asks for."""
        if self.inference == "graphical":
            return estimator(self).fit(self.init(workload.sizes), log)
        found = least_squares(workload.sizes, log)
        if self.inference == "least-squares":
            return found
        tops = sorted(maximal(list(asked(workload))))
        return nonnegative(found, tops, steps=self.iterations, tolerance=self.tolerance)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value that is not one of some."""
    if value not in choices:
        raise ParameterError(f"{name} ({value!r}) must be one of {', '.join(choices)}")
