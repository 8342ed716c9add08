"""auto: the default. Measures the marginals inside the workload once, and projects with a penalty that fits the noise.

There is nothing to set. What is measured, and how well, follows from the workload alone; how much is shrunk, from the
noise that the budget leaves (models/shrinking.py). A user may say what matters: the largest error, the average one, or
both.

*What is measured.* All marginals inside those that are asked for, and every column of the schema. A pair is worth its
own measurement although a triple tells of it: it has far fewer cells to spread its noise over; but where noise fills
little of a marginal anyway, the largest tell all. With e the mean share of some marginals that noise would fill if they
had all of the budget, single columns have 0.4 sqrt(e), from 0.02 to 0.4; of the rest those inside others have
0.45 e / (1 + e), e of those inside no other, which have what is left. Where not even the cells of the latter could be
told from noise, because its sigma would be a part s of the rows, single columns have 2.5 s, up to 0.6: they are nearly
all that can be told. Within each of the three, marginals share alike, but for the weights of the workload. The largest
are left out while all have more than `MOST_CELLS` cells: what is inside them stands for them.

*Residuals.* Marginals that overlap tell the same of what they share again and again: all pairs of 16 columns tell 15
times of each. The same budget may go to residuals (queries/strategies.py), which tell everything once: what marginals
inside others have of it goes to what they tell, and what the largest have to what serves all of these best, as
ResidualPlanner has it. If that leaves at most `WORTH` of the variance of the cells asked for, residuals are measured,
and fitted as the marginals that follow from them by least squares; of columns with two values half of the variance
goes. Where rows are replaced, a marginal costs twice as much; residuals that overlap cost little more than that.

*Adaptivity.* Nothing is selected. A whole marginal costs the same however many cells it has, and a selection costs as
much as a measurement and gives no answer; whichever marginal a selection would name is measured here anyway, and the
penalty throws away what the noise says about those that did not deserve it.

*Native numbers* are cut into bands of equal width (queries/banding.py), up to `MOST_BANDS` and no more than noise lets
tell apart, or as the workload cuts them; then all is as with codes. Each number alone is measured in finer bands, too,
which tell where in its band it lies (models/banded.py). For halfspaces nothing is tried (models/trials.py): they are
sums of so many cells that what is shrunk adds up.

*Functions* of rows are measured as they are, with half of the budget, or all but that of single columns.

Budget: the share t_A of marginal A gives sigma_A = Delta / sqrt(2 rho t_A), Delta^2 = 1, or 2 where rows are replaced.

References: Aydore et al. 2021 (RAP, with one round); Xiao et al. 2023 (ResidualPlanner).
Deviations: all else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.budget import gaussian_sigma
from anamorph.curator.curator import Curator
from anamorph.curator.noise import LARGEST
from anamorph.curator.tallies import GroupBy, marginal_cells, squared_sensitivity
from anamorph.errors import ParameterError, require_positive
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.banded import BandedRows, Ruler, detailed, even
from anamorph.models.least_squares import as_marginals
from anamorph.models.relaxed import RelaxedRows
from anamorph.models.shrinking import Objective, ShrinkingProjection, most_rows
from anamorph.models.thinning import thinned
from anamorph.models.tiles import tile_bytes
from anamorph.models.trials import suited
from anamorph.queries.banding import Banding, Detail, banding
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.residuals import Residuals, free
from anamorph.queries.strategies import RESOLUTION, Design, Strategy
from anamorph.queries.workload import Queries, Workload
from anamorph.release import Measurement, Release
from anamorph.schema import Schema

Features = tuple[int, ...]
Reals = NDArray[np.float64]

FEWEST, MOST = 0.02, 0.4
"""The least and the largest share of the budget for single columns, by how crowded with noise they are."""

FAINT, MOST_FAINT = 2.5, 0.6
"""Their share for each part of the rows that the noise of the largest marginals is, and the largest such share."""

BETWEEN = 0.45
"""The largest share of the rest for marginals inside others."""

WORTH = 0.95
"""The most of the variance that residuals may leave, to be measured."""

MOST_INSIDE, MOST_RESIDUAL_CELLS = 1 << 13, 1 << 23
"""The most residuals of all marginals, each for itself, and the most cells of residuals."""

MOST_CELLS = 1 << 26
"""The most cells of all marginals that are measured."""

FEWEST_BANDS, MOST_BANDS = 16, 32
"""The fewest and the most bands that a number is cut into, unless the workload has others."""

BAND = 4.0
"""How many times the noise of a cell an average band of a number holds at least."""

BANDED_CELLS = 1 << 22
"""The most cells of marginals asked for that bands may lead to."""

MOST_EFFORT = 1e4
"""The most effort: a hundred times what is of use."""

MOST_SETS = 1 << 17
"""The most marginals that are measured."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The default mechanism."""

    name: ClassVar[str] = "auto"
    native: ClassVar[bool] = True
    objective: Objective = "balanced"
    """What matters: `max`, `average`, or `balanced`, which is both."""
    rows: int = 0
    """n', the number of relaxed rows; 0: as many as the noise lets them tell."""
    effort: float = 40.0
    """How many steps the fit takes, in relation to what the noise lets them tell."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ParameterError(f"objective ({self.objective!r}) must be one of {', '.join(get_args(Objective))}")
        if self.rows:
            require_positive("rows", self.rows)
        if not 0 < self.effort <= MOST_EFFORT:
            raise ParameterError(f"effort ({self.effort!r}) must be above 0 and at most {MOST_EFFORT}")

    def for_schema(self, schema: Schema) -> Auto:
        """Returns the mechanism that plans for a schema: one that knows which columns are numbers."""
        return AutoWithNumbers(**vars(self), limits=limits_of(schema)) if schema.numbers else self

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement."""
        queries = planned(workload)
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of what is measured, of its tiles, and of the rows with their optimiser and gradient."""
        codes, queries = sum(workload.sizes), planned(workload)
        table = 4 * codes * (self.rows or most_rows(codes))
        sets = tuple(features for part in queries.parts if isinstance(part, Marginals) for features in part.sets)
        held = 64 * min(workload.largest_block, workload.limit)
        return (600 << 20) + 16 * table + 48 * queries.cells + 3 * tile_bytes(workload.sizes, sets) + held

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns relaxed rows fitted to the measurement."""
        estimator = ShrinkingProjection(rows=self.rows, effort=self.effort, objective=self.objective)
        progress.report("measure", 0, 1)
        view = banded(curator, workload)
        asked, sizes = view.merge(workload), view.merged
        queries = chosen(curator, asked, split(curator, asked))
        log = (curator.measure(view.measured(queries), rho=curator.remaining),)
        progress.report("measure", 1, 1)
        seen = (view.seen(queries, log[0]),)
        if not any(map(is_halfspaces, workload.parts)):
            halves = (told(sizes, half) for half in thinned(seen, seed=seed))
            estimator = suited(estimator, asked, *halves, seed=seed)
        rows = estimator.fit(sizes, told(sizes, seen), seed=seed)
        model = ruled(view, rows, view.details(queries, log[0])) if view.cuts else rows
        return release(self, curator, workload, model, log)


@dataclass(frozen=True, kw_only=True)
class AutoWithNumbers(Auto):
    """`auto`, planning for a schema with native numbers."""

    limits: dict[int, int]
    """How many codes each number has without `missing`."""

    def view(self, workload: Workload) -> Banding:
        """Returns about how numbers will be cut."""
        return affordable_banding(workload, self.limits, MOST_BANDS)

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement."""
        view = self.view(workload)
        queries = view.measured(planned(view.merge(workload)))
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of a run over bands."""
        return super().memory(self.view(workload).merge(workload))


def limits_of(schema: Schema) -> dict[int, int]:
    """Returns how many codes each native number has without `missing`."""
    return {number: schema.columns[number].regular for number in schema.numbers}


def banded(curator: Curator, workload: Workload) -> Banding:
    """Returns how numbers are cut: into so many bands that an average one holds `BAND` times the noise of a cell."""
    limits = limits_of(curator.schema)
    if not limits:
        return Banding(workload.sizes, {}, {})
    fewest = banding(workload.sizes, limits, workload, FEWEST_BANDS).merge(workload)
    found = kinds(fewest.sizes, asked_for(fewest))
    heard = 1 / (BAND * faintness(curator, found.largest or found.singles))
    return affordable_banding(workload, limits, 2 ** math.floor(math.log2(max(heard, 1))))


def affordable_banding(workload: Workload, limits: dict[int, int], bands: int) -> Banding:
    """Returns how numbers are cut into so many bands, or fewer, so that there are no more than `BANDED_CELLS` cells."""
    most = min(max(bands, FEWEST_BANDS), MOST_BANDS)
    while True:
        view = banding(workload.sizes, limits, workload, most)
        if most <= FEWEST_BANDS or view.merge(workload).cells <= BANDED_CELLS:
            return view
        most //= 2


def ruled(view: Banding, rows: RelaxedRows, details: dict[int, list[Detail]]) -> BandedRows:
    """Returns banded rows, with what finer bands tell of the inside of bands."""
    rulers: dict[int, Ruler] = {}
    for number, levels in details.items():
        ruler, bands = even(view.cuts[number], view.sizes[number]), view.merged[number]
        masses = rows.answer(GroupBy(view.merged, (number,), 0, bands)).astype(np.float64)
        for level in levels:
            ruler, masses = detailed(ruler, masses, level.cuts, level.values, level.sigma)
        rulers[number] = ruler
    return BandedRows(view.sizes, rulers, rows)


class Kinds(NamedTuple):
    """Marginals that are measured, with weights."""

    singles: dict[Features, float]
    """Single columns."""
    between: dict[Features, float]
    """Larger ones that are inside others."""
    largest: dict[Features, float]
    """Those inside no other."""


class Split(NamedTuple):
    """How these share the budget."""

    singles: float = 0.1
    """The share of single columns."""
    between: float = BETWEEN
    """The share, of what is left, of marginals inside others."""


DEFAULT = Split()
"""Before the number of rows is known."""


def split(curator: Curator, workload: Workload) -> Split:
    """Returns the shares that suit a budget and a number of rows."""
    found = kinds(workload.sizes, asked_for(workload))
    first, last = (crowding(curator, workload.sizes, sets) for sets in (found.singles, found.largest or found.singles))
    crowded = float(np.clip(0.4 * math.sqrt(first), FEWEST, MOST))
    faint = min(FAINT * faintness(curator, found.largest), MOST_FAINT) if found.largest else 0.0
    return Split(max(crowded, faint), BETWEEN * last / (1 + last))


def crowding(curator: Curator, sizes: tuple[int, ...], sets: Collection[Features]) -> float:
    """Returns the mean share of some marginals that noise would fill if they had all of the budget."""
    cells = np.mean([marginal_cells(sizes, features) for features in sets])
    return float(cells) * faintness(curator, sets)


def faintness(curator: Curator, sets: Collection[Features]) -> float:
    """Returns the sigma of some marginals, as a part of the rows, if they had all of the budget."""
    squared = len(sets) * (2 if curator.neighbours == "replace" else 1)
    return gaussian_sigma(squared, curator.remaining) / max(curator.total, 1.0)


def is_halfspaces(part: Queries) -> bool:
    """Returns whether queries are halfspaces: sums of so many cells that what is shrunk from these adds up."""
    return isinstance(part, Tested) and part.tally.weights is not None


def asked_for(workload: Workload) -> dict[Features, float]:
    """Returns the marginals that a workload asks for, those of thresholds and single cells included, with weights."""
    weights = workload.weights or (Fraction(1),) * len(workload.parts)
    asked: dict[Features, float] = {}
    for part, weight in zip(workload.parts, map(float, weights), strict=True):
        known = part.marginals if isinstance(part, Cells) else part
        if isinstance(known, Marginals):
            asked |= {features: max(weight, asked.get(features, 0.0)) for features in map(ordered, known.sets)}
    return asked


def planned(workload: Workload, shares: Split = DEFAULT) -> Workload:
    """Returns marginals and functions to measure, each with its share of the budget."""
    weights = workload.weights or (Fraction(1),) * len(workload.parts)
    asked = asked_for(workload)
    functions = [
        (part, float(weight) * part.cells)
        for part, weight in zip(workload.parts, weights, strict=True)
        if not isinstance(part, Marginals | Cells)
    ]
    taken = 0.0 if not functions else 0.5 if asked else 1 - shares.singles
    found = shared(kinds(workload.sizes, asked), shares)
    by_share = itertools.groupby(sorted(found, key=lambda f: (-found[f], f)), key=found.__getitem__)
    parts = [(Marginals(workload.sizes, tuple(sets)), (1 - taken) * share) for share, sets in by_share]
    whole = sum(weight for _, weight in functions)
    parts += [(part, taken * weight / whole / part.cells) for part, weight in functions]
    largest = max(share for _, share in parts)
    rounded = [Fraction(max(1, round(share / largest * RESOLUTION)), RESOLUTION) for _, share in parts]
    return Workload(tuple(part for part, _ in parts), weights=tuple(rounded), limit=workload.limit)


def chosen(curator: Curator, workload: Workload, shares: Split) -> Workload:
    """Returns what is measured: residuals where they are worth it, else marginals."""
    return in_residuals(curator, workload, shares) or planned(workload, shares)


def told(sizes: tuple[int, ...], log: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    """Returns what the rows are fitted to: marginals, and functions."""
    residuals = any(isinstance(part, Residuals) for measurement in log for part in measurement.workload.parts)
    return (as_marginals(sizes, log),) if residuals else log


def in_residuals(curator: Curator, workload: Workload, shares: Split) -> Workload | None:
    """Returns the residuals to measure instead of marginals; None where that is not worth it, or not possible."""
    sizes, found = workload.sizes, kinds(workload.sizes, asked_for(workload))
    only_marginals = all(isinstance(part, Marginals | Cells) for part in workload.parts)
    columns = {feature for features in found.largest for feature in free(sizes, features)}
    inside = sum(2 ** len(features) for features in found.largest)
    bands = bool(curator.schema.numbers)  # these have no residuals
    if bands or not only_marginals or not columns or inside > MOST_INSIDE:
        return None
    design = Design(sizes, found.largest | dict.fromkeys(found.singles, 0.0))
    plain, known = precisions(design, found, shared(found, shares))
    matter = np.square(list(design.asked.values()))
    cells = np.array([marginal_cells(sizes, features) for features in design.sets])
    if cells.sum() > MOST_RESIDUAL_CELLS:
        return None
    queries = Strategy(sizes, dict(zip(design.sets, known.tolist(), strict=True)), residuals=True).workload()
    pieces = list(queries.pieces())
    cost = squared_sensitivity(
        [piece.tally for piece in pieces], curator.neighbours, [piece.weight for piece in pieces]
    )
    squared = float(cost) * known.max()
    noise = float(np.max(cells * np.sqrt(squared / (2 * curator.remaining * known))))
    dearer = squared / (2 if curator.neighbours == "replace" else 1)
    worth = dearer * (matter @ design.variances(known)) <= WORTH * (matter @ design.variances(plain))
    return queries if worth and noise <= LARGEST / 2 else None


def precisions(design: Design, found: Kinds, shares: dict[Features, float]) -> tuple[Reals, Reals]:
    """Returns how well residuals are known, at the same cost, by marginals, and if what the largest have goes to them.

    A share that grows with the weight is what the square of the weight makes of a residual that no other depends on.
    """
    place = {features: index for index, features in enumerate(design.sets)}
    largest, inner = np.zeros(len(place)), np.zeros(len(place))
    for features, share in shares.items():
        if known := free(design.sizes, features):
            (largest if features in found.largest else inner)[place[known]] += share
    best = design.residual_precisions(np.square(list(design.asked.values())))
    mixed = inner @ design.reach + sum(shares[features] for features in found.largest) * best
    return (largest + inner) @ design.reach, mixed / (mixed @ design.kappa)


def ordered(features: Features) -> Features:
    """Returns a set of features in the order of the schema."""
    return tuple(sorted(features))


def kinds(sizes: tuple[int, ...], asked: dict[Features, float]) -> Kinds:
    """Returns the marginals inside those asked for, each with the largest weight of those that it is inside.

    Every column is there, one that nobody asks for with the least weight.
    """
    least = min(asked.values(), default=1.0)
    found: dict[Features, float] = {(column,): least for column in range(len(sizes))}
    for order in range(1, max(map(len, asked), default=0) + 1):
        inner: dict[Features, float] = {}
        for features, weight in asked.items():
            for part in itertools.combinations(features, order):
                inner[part] = max(weight, inner.get(part, 0.0))
        if len(found | inner) > MOST_SETS:
            break
        found |= inner
    found = affordable(sizes, found)
    inside = {part for features in found for part in itertools.combinations(features, len(features) - 1)}
    several = {features: weight for features, weight in found.items() if len(features) > 1}
    return Kinds(
        {features: weight for features, weight in found.items() if len(features) == 1},
        {features: weight for features, weight in several.items() if features in inside},
        {features: weight for features, weight in several.items() if features not in inside},
    )


def affordable(sizes: tuple[int, ...], found: dict[Features, float]) -> dict[Features, float]:
    """Returns the smallest marginals that have at most `MOST_CELLS` cells together, but single columns always.

    What is inside a marginal has fewer cells, so it is there too.
    """
    cells, kept = 0, {}
    for features in sorted(found, key=lambda f: (marginal_cells(sizes, f), f)):
        cells += marginal_cells(sizes, features)
        if len(features) == 1 or cells <= MOST_CELLS:
            kept[features] = found[features]
    return kept


def shared(found: Kinds, shares: Split) -> dict[Features, float]:
    """Returns the share of the budget of each marginal: those of a kind share alike, but for their weights."""
    singles = shares.singles if found.largest else 1.0
    between = (1 - singles) * shares.between if found.between else 0.0
    parts = (singles, between, 1 - singles - between)
    return {
        features: part * weight / sum(kind.values())
        for part, kind in zip(parts, found, strict=True)
        for features, weight in kind.items()
    }
