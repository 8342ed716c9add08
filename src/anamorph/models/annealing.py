"""The fit of mixed rows: relaxed projection with an annealed sigmoid (RAP++, algorithm 1).

To fit numbers, an inequality is relaxed to a sigmoid of inverse temperature s,

    f(u) = (S(s (tau - u)) - S(s (tau - high))) / (S(s (tau - low)) - S(s (tau - high))),    u = theta . x,

S(v) = 1 / (1 + exp(-v)), low and high the least and the largest u of the unit cube. A small s has gradients everywhere
and answers that are wrong near the threshold, a large one the reverse; so s is annealed: it starts small and is doubled
whenever the gradient of the numbers has fallen below `gamma` of what it was at this temperature, or `steps` steps have
passed. Halfspaces may have another s than prefixes (`halfspaces`); answers of coded columns have none. The probability
of a band (curator/bands.py) is the difference of two such sigmoids.

Reference: Vietri, Archambeau, Aydore, Brown, Kearns, Roth, Siva, Tang & Wu 2022 (RAP++), section 3 and algorithm 1.
Deviations: the sigmoid is scaled to be 1 and 0 at the ends of the range; with the plain one, rows at the end of a range
miss the thresholds near it, so all rows crowd there at small s and cannot leave later. Adam's steps of numbers are as
long as the sigmoid is wide (`reach` / s). gamma is relative, and a level has a most number of steps; thresholds are
where codes end, so that the answers of the model, which are not relaxed, are those of the rows sampled from it; numbers
are clipped to [0, 1] after each step; a residual weighs 1 / sigma^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.tallies import codes_of
from anamorph.curator.where import Where
from anamorph.errors import ParameterError
from anamorph.models import goals, relaxed
from anamorph.models.descent import Problem, descend
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import Parameters, RelaxedProjection
from anamorph.models.simplex import Layout
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.workload import Workload
from anamorph.release import Measurement

CERTAIN = 1e9
"""The bound of an inequality that always holds: padding."""

LEAST = 64
"""The least number of tests, and of their cells, that a fit is compiled for."""


class Point(NamedTuple):
    """What Adam moves."""

    coded: Parameters
    reals: Array


class Cells(NamedTuple):
    """Measured cells of tests."""

    slopes: Array
    """theta: tests by inequalities by numbers."""
    bounds: Array
    """tau: tests by inequalities."""
    halfspace: Array
    """Which tests are halfspaces."""
    test: Array
    """The test of each cell."""
    lines: Array
    """The lines of the table that a cell multiplies."""
    targets: Array
    precision: Array


class Slices(NamedTuple):
    """The bands into which measurements cut numbers: each has a line of probabilities in the table of a fit."""

    number: Array
    """The number that each cut is of."""
    cut: Array
    """Its place, from 0 to 1."""
    lower: Array
    """For each line, the cut at which its band begins; two more stand for never and for always."""
    upper: Array
    """The cut at which it ends."""
    factor: Array
    """The line of the table that says whether the number is there."""


class Aims(NamedTuple):
    """All that a fit compares with, and at which temperature."""

    coded: goals.Goals
    slices: Slices
    cells: Cells
    temperature: Array
    floor: Array
    """The norm of the gradient of the numbers at which this temperature has done its work."""
    noise: Array
    """The loss at which a fit ends: what the true answers would have, by the noise alone."""


@dataclass(frozen=True, kw_only=True)
class MixedProjection(RelaxedProjection):
    """The estimator of mixed rows; `steps` are for each temperature."""

    steps: int = 40
    """The most Adam steps of one temperature."""
    rate: float = 0.02
    simplex: str = "softmax"  # pyright: ignore[reportIncompatibleVariableOverride]
    tolerance: float = 0.0
    temperature: float = 4.0
    """The first inverse temperature s."""
    levels: int = 10
    """How many temperatures there are, each twice the one before."""
    reach: float = 3.0
    """Adam's learning rate for numbers, as a part of the width 1 / s of a sigmoid."""
    halfspaces: float = 1.0
    """The inverse temperature of halfspaces, relative to that of prefixes and bands."""
    until_noise: bool = False
    """Whether a fit ends where chi^2 is the number of answers, as it is for the true ones."""
    gamma: float = 0.05
    """A temperature ends when the gradient of the numbers is this fraction of what it was when it began."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.levels, int) or isinstance(self.levels, bool) or self.levels < 1:
            raise ParameterError(f"levels ({self.levels!r}) must be a whole number of at least 1")
        if self.simplex != "softmax":
            raise ParameterError(f"simplex ({self.simplex!r}) must be softmax where rows have numbers")
        for name, least in (("temperature", 1e-6), ("halfspaces", 1e-6), ("reach", 0), ("gamma", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < np.inf:
                raise ParameterError(f"{name} ({value!r}) must be a finite number of at least {least}")

    def begin(self, columns: Columns, *, seed: int) -> MixedRows:
        """Returns rows started at random: probabilities near uniform, numbers uniform."""
        coded = relaxed_part(self).init(columns.relaxed, seed=seed)
        reals = np.random.default_rng((seed, 2)).random((len(columns.numbers), self.rows), np.float32)
        return MixedRows(columns, coded, reals)

    def fit(self, model: MixedRows, measurements: Sequence[Measurement], *, seed: int = 0) -> MixedRows:  # pyright: ignore
        """Returns the rows that best explain all measurements, starting from the model's rows."""
        layout, columns = model.coded.layout, model.columns
        if model.coded.parameters is None:
            raise ParameterError("model must come from begin or fit: a loaded release cannot be fitted further")
        aims = build(layout, columns, measurements)
        if self.until_noise:
            noise = sum(measurement.workload.cells / (2 * measurement.total) for measurement in measurements)
            aims = aims._replace(noise=jnp.asarray(noise))
        point, finite = Point(model.coded.parameters, jnp.asarray(model.reals)), True
        problem = Problem(self, layout, objective, settle=settle, enough=settled)
        for level in range(self.levels):
            progress.report("temperature", level, self.levels)
            aims = aims._replace(temperature=jnp.asarray(self.temperature * 2.0**level))
            begun = steepness(self, layout, point, aims)
            point, sound = descend(problem, point, aims._replace(floor=self.gamma * begun))
            finite = finite and sound
        coded = replace(relaxed_part(self).model(layout, point.coded), degraded=model.degraded or not finite)
        return MixedRows(columns, coded, np.asarray(point.reals))


def relaxed_part(made: MixedProjection) -> RelaxedProjection:
    """Returns the estimator of the coded columns alone."""
    values: dict[str, Any] = {item.name: getattr(made, item.name) for item in fields(RelaxedProjection)}
    return RelaxedProjection(**values)


Grid = tuple[int, tuple[int, ...]]
"""A number, and where it is cut."""


@dataclass(frozen=True)
class Extended(Layout):
    """A layout with lines for the bands of numbers, after all others: more features than have sizes."""

    bands: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """The line of code 0 of each feature, and of the first band of each grid."""
        return np.concatenate([Layout(self.sizes).offsets, self.height + 2 + np.cumsum((0, *self.bands[:-1]))])

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of lines of each feature and of each grid."""
        return (*self.sizes, *self.bands)

    @property
    def end(self) -> int:
        """The number of lines of the whole matrix, bands included."""
        return self.height + 2 + sum(self.bands)


def build(layout: Layout, columns: Columns, measurements: Sequence[Measurement]) -> Aims:
    """Returns what a fit compares with."""
    grids = grids_of(columns, [measurement.workload for measurement in measurements])
    found = [inner_measurement(columns, grids, measurement) for measurement in measurements]
    coded = [measurement for measurement in found if measurement is not None]
    wide = Extended(layout.sizes, tuple(len(cuts) + 1 for _, cuts in grids)) if grids else layout
    aims = goals.build(wide, coded) if coded else goals.Goals((goals.gathered_goal(layout, (), 1, 1),), ())
    zero, never = jnp.zeros(()), jnp.array(-jnp.inf)
    return Aims(aims, slices_of(layout, columns, grids), cells_of(layout, columns, measurements), zero, zero, never)


def grids_of(columns: Columns, workloads: Sequence[Workload]) -> tuple[Grid, ...]:
    """Returns all ways in which marginals cut numbers; refuses those of numbers that are not cut."""
    parts = [part for workload in workloads for part in workload.parts if isinstance(part, Marginals | Banded)]
    used = ((f, part) for part in parts for features in part.sets for f in features)
    cut = {(f, part.cuts[f] if isinstance(part, Banded) else ()) for f, part in used}
    limits = dict(zip(columns.numbers, columns.limits, strict=True))
    if any(bool(cuts) != (column in limits) for column, cuts in cut):
        raise ParameterError("marginals must have all numbers cut into bands, and no other columns")
    if any(limits[column] not in cuts for column, cuts in cut if column in columns.flagged):
        raise ParameterError("a number that may be missing must have a band for that")
    return tuple(sorted((column, cuts) for column, cuts in cut if cuts))


def slices_of(layout: Layout, columns: Columns, grids: Sequence[Grid]) -> Slices:
    """Returns the bands of all grids."""
    inner = sum(len(cuts) for _, cuts in grids)
    never, always = inner, inner + 1
    number, cut, lower, upper, factor = [], [], [], [], []
    for column, cuts in grids:
        index = columns.numbers.index(column)
        limit, flagged = columns.limits[index], column in columns.flagged
        present = int(layout.offsets[columns.place(column)]) if flagged else layout.one
        ends = [never, *range(len(cut), len(cut) + len(cuts)), always]
        number += [index] * len(cuts)
        cut += [code / limit for code in cuts]
        if flagged:
            ends[-2] = always
        lower += ends[:-1]
        upper += ends[1:]
        factor += [present] * (len(cuts) + 1)
        if flagged:
            lower[-1], factor[-1] = never, present + 1
    whole = [jnp.asarray(np.array(array, np.int32)) for array in (number, lower, upper, factor)]
    return Slices(whole[0], jnp.asarray(np.array(cut, np.float32)), *whole[1:])


def inner_measurement(columns: Columns, grids: Sequence[Grid], measurement: Measurement) -> Measurement | None:
    """Returns what was measured of marginals, over the relaxed features and the bands; none if nothing was."""
    parts, weights, values, sigma, first, block = [], [], [], [], 0, 0
    places = {grid: len(columns.relaxed) + index for index, grid in enumerate(grids)}
    sizes = (*columns.relaxed, *(len(cuts) + 1 for _, cuts in grids))
    for index, part in enumerate(measurement.workload.parts):
        if isinstance(part, Marginals | Banded):
            cuts = part.cuts if isinstance(part, Banded) else ((),) * len(columns.sizes)
            sets = tuple(
                tuple(places[f, cuts[f]] if f in columns.numbers else columns.place(f) for f in features)
                for features in part.sets
            )
            whole = part.merged if isinstance(part, Banded) else part
            parts.append(replace(whole, sizes=sizes, sets=sets))
            weights.append(measurement.workload.weights[index] if measurement.workload.weights else Fraction(1))
            values.append(measurement.values[first : first + part.cells])
            sigma.append(measurement.sigma[block : block + part.blocks])
        elif not isinstance(part, Tested):
            raise ParameterError("measurements must be of whole marginals, thresholds, bands and tests of numbers")
        first, block = first + part.cells, block + part.blocks
    if not parts:
        return None
    workload = Workload(tuple(parts), weights=tuple(weights))
    return Measurement(workload, np.concatenate(values), np.concatenate(sigma), measurement.total)


def cells_of(layout: Layout, columns: Columns, measurements: Sequence[Measurement]) -> Cells:
    """Returns the measured cells of all tests, padded to few shapes."""
    found = list(tested_parts(measurements))
    most = max((len(tally.given) + len(tally.numbers) for tally, *_ in found), default=1)
    sides = max((1 if tally.weights is not None else len(tally.numbers) for tally, *_ in found), default=1)
    tests = max(LEAST, goals.power_of_two(sum(tally.tests for tally, *_ in found)))
    cells = max(LEAST, goals.power_of_two(sum(tally.cells for tally, *_ in found)))
    slopes, bounds = np.zeros((tests, sides, len(columns.numbers))), np.full((tests, sides), CERTAIN)
    test, lines = np.zeros(cells, np.int32), np.full((cells, most), layout.zero, np.int32)
    targets, precision, halfspace = np.zeros(cells), np.zeros(cells), np.zeros(tests, np.bool_)
    first, cell = 0, 0
    for tally, values, weight in found:
        theta, tau = inequalities(columns, tally)
        slopes[first : first + tally.tests, : theta.shape[1]] = theta
        bounds[first : first + tally.tests, : tau.shape[1]] = tau
        halfspace[first : first + tally.tests] = tally.weights is not None
        span = slice(cell, cell + tally.cells)
        test[span] = first + np.repeat(np.arange(tally.tests), tally.width)
        lines[span] = np.tile(given_lines(layout, columns, tally, most), (tally.tests, 1))
        targets[span], precision[span] = values, weight
        first, cell = first + tally.tests, span.stop
    single = [jnp.asarray(array, jnp.float32) for array in (slopes, bounds, targets, precision)]
    whole = [jnp.asarray(array) for array in (halfspace, test, lines)]
    return Cells(single[0], single[1], whole[0], whole[1], whole[2], single[2], single[3])


def tested_parts(measurements: Sequence[Measurement]) -> Iterator[tuple[Where, NDArray, NDArray]]:
    """Yields the tests that were measured, their noisy answers, and the weight of half a squared residual of each."""
    for measurement in measurements:
        first, block = 0, 0
        for part in measurement.workload.parts:
            if isinstance(part, Tested):
                sigma = np.repeat(measurement.sigma[block : block + part.blocks], part.largest_block)
                values = measurement.values[first : first + part.cells]
                yield part.tally, values, 1 / (measurement.total * sigma**2)
            first, block = first + part.cells, block + part.blocks


def inequalities(columns: Columns, tally: Where) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns theta (tests by inequalities by numbers, of length 1) and tau for unit reals.

    A code is at most its bound where x < (bound + 1) / limit; in a weighted sum it counts as the middle of its step.
    """
    places = [columns.numbers.index(number) for number in tally.numbers]
    limits = np.array(tally.limits, np.float64)
    if tally.weights is None:
        theta = np.zeros((tally.tests, len(places), len(columns.numbers)))
        theta[:, np.arange(len(places)), places] = 1
        return theta, (tally.bounds + 1) / limits
    scaled = tally.weights * limits
    length = np.maximum(np.linalg.norm(scaled, axis=1), 1e-30)
    theta = np.zeros((tally.tests, 1, len(columns.numbers)))
    theta[:, 0, places] = scaled / length[:, None]
    return theta, ((tally.bounds + tally.weights.sum(axis=1) / 2) / length)[:, None]


def given_lines(layout: Layout, columns: Columns, tally: Where, most: int) -> NDArray[np.int32]:
    """Returns, for each cell of the features given, the lines of the table that it multiplies."""
    lines = np.full((tally.width, most), layout.one, np.int32)
    if tally.given:
        codes = codes_of(tally.sizes, tally.given, np.arange(tally.width))
        offsets = layout.offsets[[columns.place(column) for column in tally.given]]
        lines[:, : len(tally.given)] = offsets + codes
    flags = [layout.offsets[columns.place(number)] for number in tally.numbers if number in columns.flagged]
    lines[:, len(tally.given) : len(tally.given) + len(flags)] = flags
    return lines


def objective(made: MixedProjection, layout: Layout, point: Point, aims: Aims) -> Array:
    """Returns chi^2 / (2 n) of marginals, relaxed bands and relaxed tests, plus the information penalty."""
    probabilities = relaxed.points(made, point.coded.free)
    weights = relaxed.row_weights(made, point.coded.rows)
    cells, table = aims.cells, layout.flatten(probabilities)
    sums = jnp.einsum("tjk,kr->tjr", cells.slopes, point.reals)
    low, high = (jnp.sum(part, axis=2) for part in (jnp.minimum(cells.slopes, 0), jnp.maximum(cells.slopes, 0)))
    temperature = aims.temperature * jnp.where(cells.halfspace, made.halfspaces, 1.0)[:, None]
    passed = jnp.prod(held(sums, cells.bounds, low, high, temperature), axis=1)
    products = passed[cells.test]
    for factor in range(cells.lines.shape[1]):
        products = products * table[cells.lines[:, factor]]
    wrong = products @ weights - cells.targets
    lines = jnp.concatenate([table, band_lines(table, point.reals, aims)])
    loss = relaxed.lines_loss(layout, lines, weights, aims.coded) + jnp.sum(cells.precision * wrong**2) / 2
    return loss + made.penalty * relaxed.information(probabilities, weights) if made.penalty else loss


def held(sums: Array, bounds: Array, low: Array, high: Array, temperature: Array) -> Array:
    """Returns how far sums between low and high are at most their bounds: a sigmoid that is 1 at low and 0 at high.

    The last axis of the sums is that of rows.
    """
    top, end = (jax.nn.sigmoid(temperature * (bounds - place)) for place in (low, high))
    within = (bounds > low) & (bounds < high)
    scale = jnp.where(within, 1 / jnp.where(within, top - end, 1.0), 0.0)
    raised = jax.nn.sigmoid(jnp.asarray(temperature)[..., None] * (bounds[..., None] - sums)) - end[..., None]
    return raised * scale[..., None] + jnp.where(bounds >= high, 1.0, 0.0)[..., None]


def band_lines(table: Array, reals: Array, aims: Aims) -> Array:
    """Returns the relaxed probability of each band in each row: differences of sigmoids."""
    slices = aims.slices
    below = held(reals[slices.number], slices.cut, jnp.zeros(()), jnp.ones(()), aims.temperature)
    ends = jnp.stack([jnp.zeros_like(table[0]), jnp.ones_like(table[0])])
    cumulated = jnp.concatenate([below, ends])
    return (cumulated[slices.upper] - cumulated[slices.lower]) * table[slices.factor]


def settle(made: MixedProjection, _layout: Layout, aims: Aims, before: Point, moved: Point) -> Point:
    """Returns the point with steps of numbers as long as its sigmoids are wide, and numbers between 0 and 1."""
    step = made.reach / (made.rate * aims.temperature)
    reals = before.reals + step * (moved.reals - before.reals)
    return moved._replace(reals=jnp.clip(reals, 0.0, 1.0))


def settled(_made: MixedProjection, loss: Array, gradient: Point, aims: Aims) -> Array:
    """Returns whether the loss is that of noise alone, or the gradient of the numbers as small as it need be.

    That never holds where the gradient was 0 from the start.
    """
    return (loss <= aims.noise) | (jnp.linalg.norm(gradient.reals) < aims.floor)


@partial(jax.jit, static_argnums=(0, 1))
def steepness(made: MixedProjection, layout: Layout, point: Point, aims: Aims) -> Array:
    """Returns the norm of the gradient of the numbers."""
    return jnp.linalg.norm(jax.grad(partial(objective, made, layout))(point, aims).reals)
