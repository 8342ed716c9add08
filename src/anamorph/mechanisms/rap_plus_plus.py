"""RAP++: relaxed adaptive projection of rows with numbers, onto marginals and tests of numbers.

The workload has two classes: marginals of coded columns and of numbers cut into bands (CM in the paper), and tests of
numbers (LT, MM). First the marginal of every column, with the label, is measured with a share of the budget, and mixed
rows (models/mixed.py) are drawn from it. Then each class has rounds of its own: its K worst answered blocks are
selected privately, measured, and the rows fitted to all measurements so far, numbers by an annealed sigmoid.

    rho_t = (1 - o) rho / (T_CM + T_LT) a round, the share a for selection and 1 - a for measurement:
    Gumbel scale beta = Delta sqrt(K / (2 a rho_t)), noise sigma = Delta_2 sqrt(K / (2 (1 - a) rho_t)), in counts,

with Delta = 1 or 2 (L1 error), Delta_2 = 1 or sqrt 2 for a block, whole marginals and tests alike: a test comes with
all values of its label, of which a row has one. Labels are the targets of halfspaces, and the columns that all blocks
of a spec have in common.

Reference: Vietri et al. 2022, algorithm 2; T_LT = 50, K = 10, T_CM one less than the coded columns.
Deviations: the opening, without which the first rounds would go into what every block needs, and the bands; few rounds;
blocks, not single queries, are selected and measured, none twice, and none is measured anew in a later round (the
published code draws new noise for the whole history each round); rho follows from (epsilon, delta) by the tight
conversion; noise is discrete, on exact counts. With `opening=0`, `temperature=4`, `levels=10`, `rounds=50`,
`marginal_rounds=0`, `per_round=10` it is the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from anamorph import progress
from anamorph.curator.budget import proportional
from anamorph.curator.curator import Curator
from anamorph.curator.scores import L1Error
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.adaptive import Round
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.annealing import MixedProjection, grids_of
from anamorph.models.mixed import Columns
from anamorph.models.starting import started
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.workload import Queries, Workload, keys_of
from anamorph.release import Measurement, Release

WORTH = 4.0
"""How many times the noise a band of the opening should hold: finer ones would be noise."""
LEAST_BANDS = 8
"""The fewest bands, however small the budget."""

MARGINALS = Marginals | Banded
"""The parts of a workload that are marginals."""


@dataclass(frozen=True, kw_only=True)
class RAPPlusPlus(MixedProjection):
    """RAP++'s own parameters; the others are those of the projection."""

    name: ClassVar[str] = "rap++"
    native: ClassVar[bool] = True
    rounds: int = 3
    """T_LT, the rounds of tests."""
    marginal_rounds: int = 1
    """T_CM, the rounds of marginals; 0 takes one less than their columns."""
    per_round: int = 8
    """K, the blocks of a round; fewer where a class has not enough, all of them where it has one round."""
    split: float = 0.5
    """a, the share of a round's budget that pays for the selection."""
    opening: float = 0.6
    """o, the share of the budget for the marginals of single columns that rows begin with; 0: they begin at random."""
    bands: int = 64
    """Into how many bands numbers are cut for that, at most."""
    temperature: float = 256.0
    levels: int = 3
    gamma: float = 0.01
    until_noise: bool = True
    steps: int = 60
    rate: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rounds", 1), ("marginal_rounds", 0), ("per_round", 1), ("bands", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParameterError(f"{name} ({value!r}) must be a whole number of at least {least}")
        if not 0 < self.split < 1:
            raise ParameterError(f"split ({self.split!r}) must be in (0, 1)")
        if not 0 <= self.opening < 1:
            raise ParameterError(f"opening ({self.opening!r}) must be in [0, 1)")

    def first(self, workload: Workload, bands: int = 0) -> Workload | None:
        """Returns the marginals that are measured first: of every column of the workload, with each label."""
        if not self.opening:
            return None
        numbers, sizes = numbers_of(workload), workload.sizes
        pairs = {tuple(sorted({c, label})) for c in columns_of(workload) for label in labels_of(workload)}
        sets = sorted(pair for pair in pairs if len(pair) > 1) or [(column,) for column in columns_of(workload)]
        cuts = tuple(equal_bands(size, bands or self.bands) if c in numbers else () for c, size in enumerate(sizes))
        coded = Marginals(sizes, tuple(features for features in sets if not set(features) & numbers))
        mixed = Banded(sizes, tuple(features for features in sets if set(features) & numbers), cuts)
        return Workload(tuple(part for part in (coded, mixed) if part.blocks), limit=workload.limit)

    def affordable(self, blocks: int, rho: float, total: float) -> int:
        """Returns the bands, a power of two, of which an average one holds WORTH times the noise of a cell."""
        noise = math.sqrt(blocks / rho)  # sigma where rows are replaced
        least, most = (math.floor(math.log2(bands)) for bands in (LEAST_BANDS, self.bands))
        return 2 ** int(np.clip(math.floor(math.log2(max(total / (WORTH * noise), 1))), min(least, most), most))

    def classes(self, workload: Workload) -> list[tuple[Workload, int, int]]:
        """Returns the marginals and the tests of a workload, with the rounds and the blocks a round of each."""
        if not all(isinstance(part, MARGINALS | Tested) for part in workload.parts):
            raise WorkloadError("the workload must be of whole marginals, thresholds, bands and tests of numbers")
        first = self.first(workload)
        begun = {key for part in (first.parts if first else ()) for key in keys_of(part)}
        found = []
        for kind, rounds in ((MARGINALS, self.marginal_rounds), (Tested, self.rounds)):
            parts = tuple(part for part in workload.parts if isinstance(part, kind))
            whole = Workload(parts, limit=workload.limit).measured() if parts else None
            left = [key not in begun for part in (whole.parts if whole else ()) for key in keys_of(part)]
            if whole and any(left):
                queries = whole.take(np.flatnonzero(left))
                times = min(rounds or max(len(columns_of(queries)) - 1, 1), queries.blocks)
                most = queries.blocks if times == 1 else self.per_round
                found.append((queries, times, min(most, queries.blocks // times)))
        return found

    def plan(self, workload: Workload, rho: float) -> tuple[float, list[tuple[Workload, Round]]]:
        """Returns the budget of the opening, and the rounds, of marginals, then of tests: as much for each class."""
        found = self.classes(workload)
        share = self.opening if found else 1.0
        kinds = [(queries, k, (1 - share) / len(found) / times) for queries, times, k in found for _ in range(times)]
        parts = [part for *_, part in kinds]
        first, *later = proportional(rho, [share, *parts]) if share else (0.0, *proportional(rho, parts))
        rounds = [
            (queries, Round(rho=budget, k=k, split=self.split))
            for (queries, k, _), budget in zip(kinds, later, strict=True)
        ]
        return first, rounds

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the opening and the rounds; refuses queries of other classes."""
        budget, rounds = self.plan(workload, rho)
        first = self.first(workload)
        steps = (Step("measure", budget, first.blocks, first.cells, workload=first),) if first else ()
        for queries, planned in rounds:
            if planned.k == queries.blocks:
                steps += (Step("measure", planned.rho, queries.blocks, queries.cells, workload=queries),)
                continue
            selection, measurement = planned.shares()
            steps += (Step("select", selection, queries.blocks, queries.cells, planned.k),)
            steps += (Step("measure", measurement, planned.k, planned.k * queries.largest_block),)
        return steps

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of rows, of what is measured, and of counts and answers of a class."""
        measured = sum(step.cells for step in self.steps_for(workload, 1.0) if step.kind == "measure")
        held = max((queries.cells for queries, *_ in self.classes(workload)), default=0)
        return (
            (450 << 20) + 12 * 4 * self.rows * 4096 + 48 * measured + 8 * self.rows * min(measured, 1 << 16) + 64 * held
        )

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns mixed rows fitted to the measurements."""
        self.steps_for(workload, curator.budget.rho)
        schema = curator.schema
        columns = Columns(schema.sizes, schema.numbers, tuple(schema.columns[n].regular for n in schema.numbers))
        grids_of(columns, [workload])  # refuses numbers that are not cut before anything is spent
        estimator = projection(self)
        model = estimator.begin(columns, seed=seed)
        log: tuple[Measurement, ...] = ()
        budget, rounds = self.plan(workload, curator.remaining)
        first = self.first(workload)
        if first:
            first = self.first(workload, self.affordable(first.blocks, budget, curator.total)) or first
            log += (curator.measure(first, rho=budget),)
            model = started(estimator, model, log[0], next(iter(labels_of(workload)), None), seed=seed)
            model = model if rounds else estimator.fit(model, log)
        taken: dict[int, list[int]] = {}
        for step, (queries, planned) in enumerate(rounds):
            progress.report("round", step, len(rounds))
            if planned.k == queries.blocks:  # all of them: there is nothing to select
                log += (curator.measure(queries, rho=planned.rho),)
            else:
                selection, measurement = planned.shares()
                mine = taken.setdefault(id(queries), [])
                chosen = curator.select(
                    queries, model.answers(queries), rho=selection, k=planned.k, score=L1Error(), exclude=mine
                )
                log += (curator.measure(queries.take(np.sort(chosen)), rho=measurement),)
                mine += chosen.tolist()
            model = estimator.fit(model, log)
        progress.report("round", len(rounds), len(rounds))
        return release(self, curator, workload, model, log)


def projection(made: RAPPlusPlus) -> MixedProjection:
    """Returns the estimator alone."""
    values: dict[str, Any] = {item.name: getattr(made, item.name) for item in fields(MixedProjection)}
    return MixedProjection(**values)


def sets_of(part: Queries) -> list[set[int]]:
    """Returns the columns of each block of a part, or of all alike."""
    if isinstance(part, Tested):
        return [{*part.tally.given, *part.tally.numbers}]
    return [set(features) for features in part.sets] if isinstance(part, MARGINALS) else []


def columns_of(workload: Workload) -> list[int]:
    """Returns the columns that a workload asks about."""
    return sorted(set().union(*(columns for part in workload.parts for columns in sets_of(part))))


def numbers_of(workload: Workload) -> set[int]:
    """Returns those that it tests as numbers, or cuts into bands."""
    tested = {n for part in workload.parts if isinstance(part, Tested) for n in part.tally.numbers}
    banded = (part for part in workload.parts if isinstance(part, Banded))
    return tested | {f for part in banded for features in part.sets for f in features if part.cuts[f]}


def labels_of(workload: Workload) -> list[int]:
    """Returns the targets of halfspaces, and the coded columns that all blocks of a class have in common."""
    tested = [part for part in workload.parts if isinstance(part, Tested)]
    targets = {column for part in tested if part.tally.weights is not None for column in part.tally.given}
    prefixes = [columns for part in tested if part.tally.weights is None for columns in sets_of(part)]
    classes = [prefixes, *(sets_of(part) for part in workload.parts if isinstance(part, MARGINALS))]
    common = set().union(*(set.intersection(*sets) for sets in classes if len(sets) > 1))
    return sorted((targets | common) - numbers_of(workload)) if len(columns_of(workload)) > 1 else []


def equal_bands(size: int, bands: int) -> tuple[int, ...]:
    """Returns the cuts of codes into bands of equal width; the last, which may be `missing`, has one of its own."""
    last = size - 1
    inner = {-(-index * last // bands) for index in range(1, bands)} if last > bands else set(range(1, last))
    return tuple(sorted((inner | {last}) - {0}))
