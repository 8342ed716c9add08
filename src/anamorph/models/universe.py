"""A distribution over every possible row, as a product of components, and the multiplicative weights that fit it.

The columns are divided into the connected components of the marginals asked for (columns that no marginal has are
components of their own). The model holds a probability for every combination of a component's values, its universe:

    p(x) = product over components c of p_c(x_c),

so a marginal within a component is a sum, and one across several the outer product of what each has of it. Nothing is
lost to the product: a marginal that was asked for is never across components, and updates of one component leave the
others as they are.

Fitting is multiplicative weights. For a measured marginal, fractions m_y of its cells y, against the model's p_y,

    p(x)  <-  p(x) exp(eta (m_y - p_y)) / Z,    y the cell of x,

and for a single query q, a sum of cells, p(x) <- p(x) exp(eta q(x) (m - p.q)) / Z. The step eta is 1/2 in the paper:
right for answers that may be as large as 1, and slow for those of a marginal with many cells. The step "scaled" is

    eta = 1 / (2 b),     b = the largest of all |m_y| and p_y.

Why this is safe: then u = eta (m_y - p_y) is at most 1, e^u <= 1 + u + u^2, and log Z <= sum of p_y (u + u^2). So if m
are the answers of a distribution, its relative entropy to p falls by at least

    eta |m - p|^2 - eta^2 sum of p_y (m_y - p_y)^2  >=  eta |m - p|^2 (1 - eta b)  =  |m - p|^2 / (4 b),

which for b = 1 is the paper's bound. A fit starts from the model of the round before, and sweeps through all
measurements so far, the newest last, until the squared differences that a sweep meets sum to no more than noise alone
would make, or hardly fall any more; `history` times at most.

Rows are drawn component by component, each by systematic sampling of its universe, and dealt to one another at random;
with `keep` they are polished (polishing.py), with the model's own columns to draw values from.

Reference: Hardt, Ligett & McSherry 2012, algorithm 1 and its variations (all measurements again in each round), and the
scalable implementation, a product too.
Deviations: the components are those of the workload, known from the start, not of what was measured so far; whole
marginals as measurements; the scaled step; cells are kept above 1e-100, from where they can come back.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.tallies import (
    AtLeast,
    GroupBy,
    RowFunction,
    Special,
    Tally,
    Tests,
    codes_of,
    is_set,
    marginal_cells,
)
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models.answers import no_residuals
from anamorph.models.least_squares import readings
from anamorph.polishing import polished
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.rounding import copies
from anamorph.table import Table

Features = tuple[int, ...]
Reals = NDArray[np.float64]

LEAST = 1e-100
"""The least probability after a fit: as good as none, and a later measurement can still raise it."""

SLOW = 0.001
"""Sweeps end when one lowers the sum of squared differences by less than this part of it."""

PAPER = 0.5
"""The paper's eta, for answers of at most 1."""


def connected(sizes: tuple[int, ...], sets: Iterable[Sequence[int]]) -> tuple[Features, ...]:
    """Returns the columns in components, each sorted: those that some set has together are in one."""
    owner = list(range(len(sizes)))

    def root(column: int) -> int:
        while owner[column] != column:
            owner[column] = owner[owner[column]]
            column = owner[column]
        return column

    for features in sets:
        for other in features[1:]:
            owner[root(other)] = root(features[0])
    found: dict[int, list[int]] = {}
    for column in range(len(sizes)):
        found.setdefault(root(column), []).append(column)
    return tuple(tuple(columns) for columns in found.values())


def leading(shape: Sequence[int]) -> int:
    """Returns how many leading axes have about the root of all cells: what is left of them are runs that are long."""
    cells = itertools.accumulate(shape, operator.mul, initial=1)
    return next(axis for axis, before in enumerate(cells) if before * before >= math.prod(shape))


def folded(values: Reals, kept: Sequence[int]) -> Reals:
    """Returns the sum over all axes but those kept, which stay in their order.

    Leading axes are summed first, over long runs of the others: many times faster than all at once where axes are
    short.
    """
    head = leading(values.shape)
    first = tuple(axis for axis in range(head) if axis not in kept)
    rest = tuple(axis - len(first) for axis in range(head, values.ndim) if axis not in kept)
    return values.sum(axis=first).sum(axis=rest)


def multiply(values: Reals, factor: Reals, axes: Sequence[int]) -> None:
    """Multiplies an array, in place, by one over some of its axes, in order; repeats that one, too, over long runs."""
    head, kept = leading(values.shape), set(axes)
    shape = [size if axis in kept else 1 for axis, size in enumerate(values.shape)]
    values *= np.broadcast_to(factor.reshape(shape), (*shape[:head], *values.shape[head:])).copy()


@dataclass(frozen=True, eq=False)
class Universe:
    """A product of explicit distributions over the universes of components."""

    sizes: tuple[int, ...]
    components: Mapping[Features, Reals]
    """The probabilities of each component, an axis for each of its features, which are sorted."""

    @classmethod
    def uniform(cls, sizes: tuple[int, ...], sets: Iterable[Sequence[int]]) -> Self:
        """Returns the uniform distribution, with the components of some marginals."""
        parts = connected(sizes, sets)
        return cls(sizes, {c: np.full([sizes[f] for f in c], 1 / marginal_cells(sizes, c)) for c in parts})

    @property
    def cells(self) -> int:
        """How many probabilities the model holds."""
        return sum(values.size for values in self.components.values())

    def marginal(self, features: Features) -> Reals:
        """Returns a marginal, in C order of the features."""
        return self.slab(GroupBy(self.sizes, features, 0, self.sizes[features[0]]))

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields the model's answers of each piece of a workload."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> Reals:
        """Returns the model's answers of one tally."""
        if isinstance(tally, RowFunction):
            raise ParameterError("the workload must be of marginals and thresholds: a universe has no functions")
        if isinstance(tally, Special):
            raise no_residuals()
        if isinstance(tally, AtLeast):
            return tally.broadcast(self.slab, np.float64)
        return self.tests(tally) if isinstance(tally, Tests) else self.slab(tally)

    def slab(self, slab: GroupBy) -> Reals:
        """Returns a slab of a marginal: the outer product of what each component has of it."""
        spans = zip(slab.features, slab.starts, slab.shape, strict=True)
        ranges = {feature: slice(start, start + size) for feature, start, size in spans}
        total, order = np.ones(()), []
        for component, mine in self.split(slab.features):
            narrow = self.components[component][tuple(ranges.get(feature, slice(None)) for feature in component)]
            total = np.multiply.outer(total, folded(narrow, [component.index(feature) for feature in mine]))
            order += mine
        return total.transpose([order.index(feature) for feature in slab.features]).ravel()

    def split(self, features: Features) -> Iterator[tuple[Features, Features]]:
        """Yields the components that have some of the features, and which of them, sorted."""
        for component in self.components:
            if mine := tuple(feature for feature in component if feature in features):
                yield component, mine

    def tests(self, tally: Tests) -> Reals:
        """Returns the answers of single cells, and of single thresholds as sums of cells of sub-marginals."""
        found = np.zeros(tally.cells)
        for index, features in enumerate(tally.sets):
            codes, mine = tally.codes(index), tally.which == index
            whole = GroupBy(self.sizes, features, 0, self.sizes[features[0]])
            for axes, coefficient in AtLeast(whole, tally.needed(index)).terms():
                inner = tuple(features[axis] for axis in axes)
                found[mine] += coefficient * self.looked_up(inner, codes[:, axes])
        return found

    def looked_up(self, features: Features, codes: NDArray[np.int64]) -> Reals:
        """Returns the probabilities of some cells of a marginal, given as cells by features, without the others."""
        found = np.ones(len(codes))
        for component, mine in self.split(features):
            marginal = folded(self.components[component], [component.index(feature) for feature in mine])
            found *= marginal[tuple(codes[:, features.index(feature)] for feature in mine)]
        return found

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows drawn from each component by systematic sampling, their marginals over `keep` polished."""
        generator = np.random.default_rng(seed)
        codes = np.zeros((rows, len(self.sizes)), np.int32)
        for index, (component, values) in enumerate(self.components.items()):
            progress.report("sample", index, len(self.components))
            drawn = np.repeat(np.arange(values.size), copies(values.ravel(), rows, generator))
            codes[:, component] = codes_of(self.sizes, component, generator.permutation(drawn))
        progress.report("sample", 1, 1)
        if keep:
            single = np.concatenate([self.marginal((feature,)) for feature in range(len(self.sizes))])[:, None]
            targets = {features: self.marginal(features) for features in keep}
            codes = polished(codes, np.zeros(rows, np.int64), single, self.sizes, targets, seed=seed)
        return Table(codes, self.sizes)

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps: the features and the probabilities of each component."""
        kept: dict[str, NDArray] = {}
        for index, (component, values) in enumerate(self.components.items()):
            kept[f"features.{index}"] = np.array(component, np.int64)
            kept[f"probabilities.{index}"] = values.ravel()
        return kept

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses anything but distributions over a division of its columns."""
        components: dict[Features, Reals] = {}
        parts = range(len(arrays) // 2)
        if set(arrays) != {f"{name}.{index}" for name in ("features", "probabilities") for index in parts}:
            raise CorruptionError("the model must hold features and probabilities of components; it does not")
        for index in parts:
            features, values = arrays[f"features.{index}"], arrays[f"probabilities.{index}"]
            component = tuple(features.tolist())
            sound = features.dtype == np.int64 and is_set(component, sizes) and component == tuple(sorted(component))
            sound = sound and values.dtype == np.float64 and values.shape == (marginal_cells(sizes, component),)
            if not sound or not np.all(values >= 0) or not math.isclose(values.sum(), 1, abs_tol=1e-6):
                raise CorruptionError("the model must hold distributions over columns of its schema; it does not")
            components[component] = values.reshape([sizes[feature] for feature in component])
        divided = sorted(feature for component in components for feature in component) == list(range(len(sizes)))
        if not divided or len(components) < len(parts):
            raise CorruptionError("the model must hold every column in one component; it does not")
        return cls(sizes, components)


class Goal(NamedTuple):
    """A measured marginal, or a single query that is the sum of some cells of one, within a component."""

    component: Features
    axes: Features
    """Which of the component's axes the marginal has, in its own order."""
    values: Reals
    """The noisy fractions: an axis for each of the axes, or a single number."""
    noise: float
    """What is expected of the sum of squares of their noise."""
    chosen: NDArray[np.bool_] | None = None
    """The cells that a single query is the sum of, in the same shape."""


def goals(model: Universe, measurements: Sequence[Measurement]) -> list[Goal]:
    """Returns what was measured, marginals whole and single queries one by one, in the order of the measurements."""
    found: list[Goal] = []
    cells = 0
    for tally, values, sigma in readings(measurements):
        if isinstance(tally, Tests):
            found += single_goals(model, tally, values, sigma)
        elif isinstance(tally, GroupBy) and tally.cells == marginal_cells(model.sizes, tally.features):
            noise = tally.cells * sigma**2
            found.append(Goal(*placed(model, tally.features), values.reshape(tally.shape), noise))
        else:
            continue
        cells += tally.cells
    if cells < sum(measurement.workload.cells for measurement in measurements):
        raise ParameterError("measurements must be of whole marginals or of single queries, and not of functions")
    return found


def single_goals(model: Universe, tally: Tests, values: Reals, sigma: float) -> Iterator[Goal]:
    """Yields single queries: the cells that agree with the one asked for in enough features."""
    for which, position, value in zip(tally.which.tolist(), tally.positions.tolist(), values, strict=True):
        features, alike = tally.sets[which], np.array(0)
        codes = codes_of(model.sizes, features, np.array([position]))[0]
        for feature, code in zip(features, codes, strict=True):
            alike = np.add.outer(alike, np.arange(model.sizes[feature]) == code)
        yield Goal(*placed(model, features), np.array(value), sigma**2, alike >= tally.needed(which))


def placed(model: Universe, features: Features) -> tuple[Features, Features]:
    """Returns the component of a marginal and the axes of its features there; refuses one across components."""
    for component in model.components:
        if set(features) <= set(component):
            return component, tuple(component.index(feature) for feature in features)
    raise ParameterError("measurements must be of marginals within one component: begin with a model that joins them")


def step_size(values: Reals, answer: Reals, step: str) -> float:
    """Returns eta."""
    return PAPER if step == "paper" else PAPER / float(max(np.abs(values).max(), answer.max(), LEAST))


def update(probabilities: Reals, goal: Goal, step: str) -> float:
    """Brings a component nearer to what was measured, in place; returns how far it was, the sum of squares.

    One multiplicative step, normalised. The sum after the step follows from the marginal alone, so the universe is
    read once and written once.
    """
    order = np.argsort(goal.axes)
    marginal = folded(probabilities, goal.axes).transpose(np.argsort(order))
    answer = marginal if goal.chosen is None else np.array(marginal[goal.chosen].sum())
    exponent = step_size(goal.values, answer, step) * (goal.values - answer)
    factor = np.exp(exponent if goal.chosen is None else exponent * goal.chosen)
    factor /= np.vdot(factor, marginal)
    multiply(probabilities, factor.transpose(order), goal.axes)
    return float(np.sum(np.square(goal.values - answer)))


@dataclass(frozen=True, kw_only=True)
class MultiplicativeWeights:
    """The estimator of explicit distributions."""

    history: int = 1000
    """The most sweeps of a fit through all measurements; 0: one, and through the newest alone, as algorithm 1 does."""
    step: Literal["scaled", "paper"] = "scaled"
    """eta: as long as the marginal allows, or 1/2."""

    def __post_init__(self) -> None:
        if not isinstance(self.history, int) or self.history < 0:
            raise ParameterError(f"history ({self.history!r}) must be a whole number of at least 0")
        if self.step not in ("scaled", "paper"):
            raise ParameterError(f"step ({self.step!r}) must be scaled or paper")

    def init(self, sizes: tuple[int, ...], *, seed: int = 0) -> Universe:
        """Returns the uniform distribution with all columns in one component; the seed is not used."""
        return Universe.uniform(sizes, [range(len(sizes))])

    def fit(self, model: Universe, measurements: Sequence[Measurement], *, seed: int = 0) -> Universe:
        """Returns the model after the sweeps; it has no randomness of its own, so the seed is not used."""
        wanted = goals(model, measurements if self.history else measurements[-1:])
        components = {component: values.copy() for component, values in model.components.items()}
        before, noise = math.inf, sum(goal.noise for goal in wanted)
        for sweep in range(max(self.history, 1)):
            progress.report("fit", sweep, max(self.history, 1))
            far = sum(update(components[goal.component], goal, self.step) for goal in wanted)
            if far <= noise or far > (1 - SLOW) * before:
                break
            before = far
        progress.report("fit", 1, 1)
        for component in {goal.component for goal in wanted}:
            values = components[component]
            np.maximum(values, LEAST, out=values)
            values /= values.sum()
        return Universe(model.sizes, components)
