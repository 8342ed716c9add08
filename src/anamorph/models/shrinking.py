"""The projection of `auto`: relaxed rows that explain the measurements and are otherwise as plain as they can be.

It minimises, by Adam steps on the logits of all probabilities and of the row weights,

    chi^2 / (2 n)  +  tail  +  penalty * I

with chi^2 / (2 n) and the information I of relaxed.py. Four things are new, and all follow from public numbers,
or from the noisy answers themselves.

*The penalty.* It acts like a soft threshold: an answer that differs from what independence says is drawn towards it by
about penalty * sigma^2 counts, whatever its size; so penalty = c / sigma draws it by c sigmas. What all marginals
together tell about a feature has the noise

    sigma^-2 = mean over features f of sum over measured marginals A with f of sigma_A^-2,

and the more of their cells are empty, the more noise must be thrown away to tell it from the signal. With the
*crowding* e, the mean over marginals of cells * sigma_A / n, the share of a marginal that noise alone would fill, and
the *faintness* s, the mean of sigma_A / n,

    penalty = strength * (1/e + 1/e^(5/2))^(-1/10) * (1 + 50 s^2) / (1 + sigma),   strength 0.22,

gave the best answers or nearly so in trials from e = 0.001 to 1000: c grows as e^(1/4) where noise leaves few cells in
doubt, as e^(1/10) where it fills them all; where sigma is no small part of the rows, not even the largest cells can
be told from noise, and all is drawn to independence; where it is below a row there is little noise to throw away, and
c falls with it.

*How dependent the columns are* no public number tells: how *firmly* to shrink beyond that, whether what stands out of
noise counts for more (weighing.py), and what to tell as plainly as noise allows, is tried (trials.py).

*The tail.* A soft threshold leaves the largest answers c sigmas short. Residuals beyond `reach` sigmas are therefore
pulled harder: half their squared excess weighs `tail` more. Noise leaves some residuals there too, the more the more
cells are empty; reach = max(3, sqrt(2 ln(1 + 20 e))) leaves few beside those that matter. Rows that are f times as
firm leave more that matter, nearer by: the tail is f^2 times as heavy, and reach = max(3 / sqrt(f),
sqrt(2 ln(1 + 20 f e))).

*The steps.* Rows begin at the measured one-way marginals, each logit moved at random by up to `start`: rows that are
alike have the same gradients, and stay alike. One row in `LEVEL` begins level instead, with all codes about as likely:
rare codes that go together, as those of missing values do, are so rare together in all other rows that nothing draws
them there. Adam forgets fast (its second moment keeps 0.95), its rate is large and falls to almost 0 along a cosine.
The less noise there is, the more there is to fit: effort * (n / sigma)^(1/4) steps, twice as many where they cost
little. Where there are many tiles, a step compares with a share of them: more steps for the same arithmetic.

*The rows.* The more can be told from noise, the more rows it takes to tell it: n' is the power of two at or above
4 sqrt(n / sigma), from 64 to 1,024. With fewer, errors grow where there is little noise; more mostly change little. But
columns that follow from each other take many: a row tells of one code of each. Such a fit leaves residuals that noise
does not explain. If chi^2 is beyond 1.2 for each answer, as many times the rows are fitted anew, up to 4,096 and
`LARGEST_WORK`. Among millions of answers that are nearly all noise a few that are far off do not show in chi^2; noise
leaves, beyond r = 4.5 sigmas, a squared excess of

    E (|z| - r)+^2 = 2 ((1 + r^2) Q(r) - r phi(r)),   Q(r) = P(z > r),   phi the density of z ~ N(0, 1),

for each, and if there is twice that and `SURPRISE` more, twice the rows are fitted. Where rows times cells would be
beyond `ROOM` there are fewer: the arithmetic of a step is their product.

References: the penalty, Vietri et al. 2022 and maximum entropy (McKenna et al. 2019) are kin to it; the universal
threshold, Donoho & Johnstone 1994; Adam, Kingma & Ba 2015, with a falling rate, Loshchilov & Hutter 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from anamorph import progress
from anamorph.curator.tallies import AtLeast, GroupBy, marginal_cells
from anamorph.models import goals
from anamorph.models.quieting import quieted
from anamorph.models.relaxed import Parameters, RelaxedRows, information, lines_loss
from anamorph.models.simplex import NOWHERE, Layout, softmax
from anamorph.models.tiles import NO_TAIL, Share, Tail, beside
from anamorph.models.weighing import weighed
from anamorph.release import Measurement

Objective = Literal["balanced", "max", "average"]

STRENGTH: dict[Objective, float] = {"balanced": 0.22, "max": 0.1, "average": 0.28}
"""How much is shrunk, by what matters."""

FAINT = 50.0
"""How much more is shrunk where sigma is as large as the number of rows."""

TAIL: dict[Objective, float] = {"balanced": 5.0, "max": 10.0, "average": 0.0}
"""How much harder residuals beyond the noise are pulled."""

LEAST_REACH = 3.0
"""The fewest sigmas that count as beyond the noise."""

RARE = 20.0
"""How much rarer than all cells those that noise alone leaves beyond the reach are."""

FEWEST_ROWS, MOST_ROWS = 64, 1024
"""The fewest and the most relaxed rows, where their number follows from the noise."""

UNEXPLAINED = 1.2
"""Above how many times what noise would leave of chi^2 a fit has too few rows."""

FAR, SURPRISE = 4.5, 10.0
"""How many sigmas are far, and by how much the squared excess over them may be more than twice that of noise."""

EXCESS = (1 + FAR**2) * math.erfc(FAR / math.sqrt(2)) - FAR * math.sqrt(2 / math.pi) * math.exp(-(FAR**2) / 2)
"""The squared excess over them that noise leaves of each answer, in expectation."""

LARGEST, LARGEST_TABLE, ANY_TABLE = 4096, 1 << 23, 512
"""The most relaxed rows of a fit that takes more of them, the most rows times codes, and the rows that any table may
have."""

LARGEST_WORK = 1 << 45
"""The most floating-point operations of such a fit: some minutes on two cores."""

GATHERING = 32
"""As how many operations the gathering of a factor of a single query counts."""

ROOM = 1 << 35
"""The most rows times cells: minutes on two cores."""

LEAST_SHARE = 0.2
"""The fewest rows that a code begins with."""

LEVEL = 16
"""Of how many relaxed rows one begins with all codes about as likely."""

PART = 96
"""About how many tiles a step compares with."""

MOST_PARTS = 8
"""The most shares that tiles are cut into."""

FEWEST_STEPS, MOST_STEPS = 100, 1_000_000
"""The fewest steps, in which rows come back from where they begin, and the most."""

DISPATCH = 50
"""Steps between two returns to Python, so that progress shows and an interrupt is heard."""

FORGET = 0.95
"""What Adam's second moment keeps from step to step."""

FLOOR = 0.002
"""The rate at the end, as a part of that at the beginning: with ten times it, large cells still sway."""


class Noise(NamedTuple):
    """What is known beforehand of the noise of measurements."""

    sigma: float
    """Of what they together say about a feature, in counts."""
    crowding: float
    """The mean share of a marginal that noise alone would fill."""
    faintness: float
    """The mean sigma of a marginal, as a share of the rows."""

    @property
    def shrinkage(self) -> float:
        """How many sigmas should be shrunk by, up to a constant."""
        crowding = min(max(self.crowding, 1e-12), 1e12)
        crowded = (crowding**-1 + crowding**-2.5) ** -0.1
        return crowded * (1 + FAINT * self.faintness**2)


class Aims(NamedTuple):
    """What a fit compares with, and how far it goes: data, so that nothing is compiled anew for other numbers."""

    goals: goals.Goals
    penalty: Array
    tail: Tail
    parts: Array
    steps: Array
    rate: Array

    @property
    def work(self) -> int:
        """About how many floating-point operations a fit takes for each of its rows; functions are not counted."""
        tiles = sum(6 * int(tiled.used) * tiled.lines.shape[1] ** 2 for tiled in self.goals.tiled)
        single = sum(GATHERING * gathered.lines.size for gathered in self.goals.gathered)
        return int(self.steps) * (tiles // int(self.parts) + single)


class State(NamedTuple):
    """A descent under way."""

    point: Parameters
    optimiser: optax.OptState
    step: Array
    loss: Array


@dataclass(frozen=True, kw_only=True)
class ShrinkingProjection:
    """The estimator of `auto`."""

    rows: int = 0
    """n', the number of relaxed rows; 0: as many as the noise lets them tell."""
    effort: float = 40.0
    """How many steps there are, in relation to what the noise lets them tell."""
    rate: float = 0.2
    """Adam's rate in the beginning."""
    start: float = 2.0
    """How far logits begin from the one-way marginals, at most."""
    objective: Objective = "balanced"
    """What matters: the largest error, the average one, or both."""
    loudness: float = 0.0
    """How loud an interaction must be not to be told as plain; 0: all are told as they were measured."""
    firmness: float = 1.0
    """How many times the penalty is what follows from the noise; above 1 the tail is heavier, and begins nearer by."""
    weighing: bool = False
    """Whether what stands out of the noise counts for more than what does not."""

    def fit(self, sizes: tuple[int, ...], measurements: Sequence[Measurement], *, seed: int) -> RelaxedRows:
        """Returns the rows that explain the measurements: more of them for as long as noise does not explain the rest.

        Each time they begin anew. Rows that begin where fewer have ended, two for one, end far behind these.
        """
        layout, rows, stage = Layout(sizes), self.rows or fitting_rows(measurements), "project"
        aims = self.aims(layout, measurements)
        whole = aims._replace(goals=goals.build(layout, measurements, last=True)) if self.weighing else aims
        while True:
            begin = replace(self, rows=rows).begin(layout, measurements, seed)
            point, finite = descend(layout, begin, aims, stage)
            wanted = rows if self.rows or not finite else explaining_rows(layout, point, whole, measurements)
            if wanted <= rows:
                break
            rows, stage = wanted, "again"
        return replace(revealed(layout, point), degraded=not finite)

    def aims(self, layout: Layout, measurements: Sequence[Measurement]) -> Aims:
        """Returns the goals, and what follows from the noise."""
        told = quieted(measurements, self.loudness) if self.loudness else measurements
        built = goals.build(layout, weighed(told) if self.weighing else told, last=True)
        heard, total = noise(measurements), counted(measurements)
        tiles = int(built.tiled[0].used) if built.tiled else 1
        parts = min(MOST_PARTS, max(1, tiles // PART))
        rare = RARE * self.firmness * heard.crowding
        reach = max(LEAST_REACH / math.sqrt(self.firmness), math.sqrt(2 * math.log1p(rare)))
        heavy = TAIL[self.objective] * self.firmness**2
        tail = Tail(jnp.float32(heavy), jnp.float32(reach / math.sqrt(total)))
        penalty = self.firmness * STRENGTH[self.objective] * heard.shrinkage / (1 + heard.sigma)
        steps = self.effort * (total / heard.sigma) ** 0.25 * (2 if parts == 1 else (1 + parts) / 2)
        steps = int(np.clip(steps, FEWEST_STEPS, MOST_STEPS))
        return Aims(built, jnp.float32(penalty), tail, jnp.int32(parts), jnp.int32(steps), jnp.float32(self.rate))

    def begin(self, layout: Layout, measurements: Sequence[Measurement], seed: int) -> Parameters:
        """Returns logits around those of the measured one-way marginals; of some rows, around 0."""
        logits = np.zeros(sum(layout.sizes))
        ends = np.cumsum(layout.sizes)
        for tally, values, _ in whole_marginals(measurements):
            if len(tally.features) == 1:
                (feature,) = tally.features
                first = ends[feature] - layout.sizes[feature] + tally.start
                least = LEAST_SHARE / counted(measurements)
                logits[first : first + tally.cells] = np.log(np.maximum(values, least))
        rows = self.rows or fitting_rows(measurements)
        spread = np.random.default_rng((seed, 4)).uniform(-self.start, self.start, (logits.size, rows))
        leaning = (np.arange(rows) + 1) % LEVEL > 0
        free = layout.stack(jnp.asarray(logits[:, None] * leaning + spread, jnp.float32), NOWHERE)
        return Parameters(free, jnp.zeros(rows))


def fitting_rows(measurements: Sequence[Measurement]) -> int:
    """Returns how many relaxed rows suit the noise of measurements: a power of two, so that few sizes are compiled."""
    wanted = math.ceil(math.log2(4 * math.sqrt(counted(measurements) / noise(measurements).sigma)))
    room = ROOM // sum(measurement.workload.cells for measurement in measurements)
    most = min(MOST_ROWS, most_rows(sum(measurements[-1].workload.sizes)), room)
    return 1 << max(min(wanted, most.bit_length() - 1), FEWEST_ROWS.bit_length() - 1)


def most_rows(codes: int) -> int:
    """Returns the most rows that there may be of so many codes."""
    return max(ANY_TABLE, min(LARGEST, LARGEST_TABLE // codes))


def explaining_rows(layout: Layout, point: Parameters, aims: Aims, measurements: Sequence[Measurement]) -> int:
    """Returns how many rows should explain what these do not: chi^2 falls about as fast as rows grow.

    They are no more than there is room for. What functions cost is not known: where there are some, it is these rows.
    """
    rows, answers = point.rows.size, sum(measurement.values.size for measurement in measurements)
    if aims.goals.functioned:
        return rows
    left = 2 * counted(measurements) * float(unexplained(layout, point, aims.goals, NO_TAIL)) / answers
    if UNEXPLAINED < left < math.inf:
        times = math.ceil(math.log2(left))
    else:
        times = int(beyond(layout, point, aims.goals, counted(measurements)) > 2 * answers * EXCESS + SURPRISE)
    room = min(most_rows(layout.height), LARGEST_WORK // aims.work)
    most = 1 << max(room.bit_length() - 1, 0)
    return max(rows, min(rows << times, most))


def beyond(layout: Layout, point: Parameters, measured: goals.Goals, total: float) -> float:
    """Returns the sum of the squared excess of all residuals over `FAR` sigmas, in sigmas."""
    heavy = 1e6  # so that single precision does not lose it among all residuals
    tails = (Tail(heavy, FAR / math.sqrt(total)), NO_TAIL)
    both, near = (float(unexplained(layout, point, measured, tail)) for tail in tails)
    return 2 * total * (both - near) / heavy


def counted(measurements: Sequence[Measurement]) -> float:
    """Returns the public number of rows; a noisy one may be anything, but at least one row there was."""
    return max(measurements[-1].total, 1.0)


def whole_marginals(measurements: Sequence[Measurement]) -> Iterator[tuple[GroupBy, NDArray[np.float64], float]]:
    """Yields the slabs of whole marginals that were measured, with their noisy answers and sigma, as fractions."""
    for measurement in measurements:
        first = 0
        for piece in measurement.workload.pieces():
            span = slice(first, first + piece.tally.cells)
            first = span.stop
            if isinstance(piece.tally, GroupBy):
                yield piece.tally, measurement.values[span], float(measurement.sigma[piece.first])


def noise(measurements: Sequence[Measurement]) -> Noise:
    """Returns the noise of measurements: public numbers, whatever was measured."""
    total, heard = counted(measurements), {}
    for measurement in measurements:
        for piece in measurement.workload.pieces():
            tally = piece.tally.slab if isinstance(piece.tally, AtLeast) else piece.tally
            if isinstance(tally, GroupBy):
                known = heard.setdefault(tally.features, {})
                known[id(measurement)] = (float(measurement.sigma[piece.first]) * total) ** -2
    if not heard:
        sigma = float(np.median(measurements[-1].sigma)) * total
        return Noise(sigma, sigma / total, sigma / total)
    sizes = measurements[-1].workload.sizes
    precision = {features: sum(known.values()) for features, known in heard.items()}
    telling = np.zeros(len(sizes))
    for features, known in precision.items():
        telling[list(features)] += known
    several = [features for features in precision if len(features) > 1] or list(precision)
    faint = np.array([precision[features] ** -0.5 for features in several]) / total
    crowding = np.mean(faint * [marginal_cells(sizes, features) for features in several])
    return Noise(float(np.mean(telling[telling > 0])) ** -0.5, float(crowding), float(np.mean(faint)))


def descend(layout: Layout, point: Parameters, aims: Aims, stage: str = "project") -> tuple[Parameters, bool]:
    """Returns where a descent ends, and whether its loss stayed a number; if not, the last point where it was one."""
    state, steps = start(beside(aims, point)), int(aims.steps)
    for done in range(0, steps, DISPATCH):
        progress.report(stage, done, steps)
        moved = advance(layout, state, aims, min(done + DISPATCH, steps))
        if not bool(finite(moved)):
            return state.point, False
        state = moved
    progress.report(stage, steps, steps)
    return state.point, True


def adam() -> optax.GradientTransformation:
    """Returns the directions of the steps."""
    return optax.scale_by_adam(b2=FORGET)


@jax.jit
def start(point: Parameters) -> State:
    """Returns the state before the first step."""
    # Of the types that steps return: others would compile them twice.
    return State(point, adam().init(point), jnp.int32(0), jnp.float32(jnp.inf))


@jax.jit
def finite(state: State) -> Array:
    """Returns whether the loss, which is that before the last step, and the point after it are numbers."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in (state.loss, *jax.tree.leaves(state.point))]))


@partial(jax.jit, static_argnums=0)
def advance(layout: Layout, state: State, aims: Aims, until: int) -> State:
    """Returns the state after the steps up to number `until`."""
    slope = jax.value_and_grad(partial(objective, layout))

    def step(now: State) -> State:
        loss, gradient = slope(now.point, aims, now.step)
        directions, optimiser = adam().update(gradient, now.optimiser)
        falling = (1 + jnp.cos(jnp.pi * now.step / aims.steps)) / 2
        rate = aims.rate * (FLOOR + (1 - FLOOR) * falling)
        moved = jax.tree.map(lambda value, direction: value - rate * direction, now.point, directions)
        return State(moved, optimiser, now.step + 1, loss)

    return jax.lax.while_loop(lambda now: (now.step < until) & ~jnp.isnan(now.loss), step, state)


def objective(layout: Layout, point: Parameters, aims: Aims, step: Array) -> Array:
    """Returns the loss of a step: chi^2 / (2 n) of its share of what was measured, with the tail, and the penalty."""
    probabilities, weights = shares(point)
    share = Share(step % aims.parts, aims.parts)
    loss = lines_loss(layout, layout.flatten(probabilities), weights, aims.goals, aims.tail, share)
    return loss + aims.penalty * information(probabilities, weights)


@partial(jax.jit, static_argnums=0)
def unexplained(layout: Layout, point: Parameters, measured: goals.Goals, tail: Tail) -> Array:
    """Returns chi^2 / (2 n), and a tail if there is one: of what was fitted, or of what was held back."""
    probabilities, weights = shares(point)
    return lines_loss(layout, layout.flatten(probabilities), weights, measured, tail)


def shares(point: Parameters) -> tuple[tuple[Array, ...], Array]:
    """Returns the probabilities and the row weights that logits stand for."""
    return tuple(map(softmax, point.free)), jax.nn.softmax(point.rows)


def revealed(layout: Layout, point: Parameters) -> RelaxedRows:
    """Returns the rows that logits stand for."""
    lines, weights = map(np.asarray, reveal(layout, point))
    return RelaxedRows(layout.sizes, lines, weights, point)


@partial(jax.jit, static_argnums=0)
def reveal(layout: Layout, point: Parameters) -> tuple[Array, Array]:
    """Returns the probabilities, a line for each code, and the row weights."""
    probabilities, weights = shares(point)
    return layout.flatten(probabilities)[layout.lines], weights
