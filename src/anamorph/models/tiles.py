"""Whole marginals of relaxed rows as square tiles of matrix products: where a fit spends its time.

All lines of the table of probabilities (simplex.py) are covered by a few *windows* of T neighbouring lines. For two
windows A and B, and a line p,

    A diag(w * p) B^T

holds, for every code in A and every code in B, the answer of the cell of these two and of the code of p: a tile of
T x T answers. With the line of ones for p it is part of the Gram matrix of the table: all 2-way marginals of features
in A and B at once. With a line for each code of a third feature it holds all 3-way marginals of that feature with those
in A and B; for more features, p is a product of lines. A marginal thus is a choice of *pivots*, the features whose
lines are multiplied, and marginals that share pivots and windows share tiles. So

- a tile is three products of T x n' by n' x T matrices, forwards and backwards, and little else: no gathers;
- all tiles have one shape, whatever the marginals: a fit compiles once;
- cells that nobody measured weigh nothing; a cell that was measured twice weighs both, at their mean.

Costs, for n' rows: 6 T^2 n' flops a tile. On a CPU tiles are formed one after the other, which keeps a tile in cache;
elsewhere `BATCH` at a time, since a device waits for kernels longer than it computes one tile.

Several devices share the tiles, dealt like cards: each forms its own, and the gradients are added up once a pass. So
do the cores of a CPU, each a device (processors.py): products of this size are too small for two cores to share one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from anamorph.curator.tallies import GroupBy
from anamorph.models.simplex import Layout, padded_size

HEIGHTS = tuple(range(16, 129, 16))
"""The heights that windows may have."""

OVERHEAD = 900
"""What a tile costs beside its arithmetic, as cells."""

BATCH = 64
"""How many tiles are formed at a time where there is a device."""

SHARED = 1 << 18
"""The fewest cells of tiles that several devices share: of fewer, one is as fast, and compiles sooner."""

HAND = 8
"""How many neighbouring tiles a device is dealt at a time. A step compares with every so-many-th tile; dealt one by
one, it would compare with neighbours, which are alike, and fits would end with errors a tenth larger."""

AXIS = "devices"
"""What the devices that share tiles are called."""

EXACT = jax.lax.Precision.HIGHEST
"""Products in single precision everywhere: some devices would round their factors to fewer bits."""

Reals = NDArray[np.float32]

Point = TypeVar("Point")
"""What a descent moves: a tree of arrays."""

Whole = tuple[GroupBy, NDArray[np.floating], float]
"""A measured marginal, or a slab of one: its noisy answers and their precision."""


@dataclass(frozen=True)
class Windows:
    """Windows that cover all lines of a layout, and every feature with as few as possible."""

    layout: Layout
    height: int

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first line of each window, rising."""
        starts: list[int] = []
        for feature in np.argsort(self.layout.offsets):
            first, size = int(self.layout.offsets[feature]), self.layout.widths[feature]
            for line in range(first, first + size, self.height):
                if not starts or min(line + self.height, first + size) > starts[-1] + self.height:
                    starts.append(line)
        return np.array(starts)

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        """The lines of each window; beyond the last line of the table, the line of zeros."""
        lines = self.starts[:, None] + np.arange(self.height)
        return np.where(lines < self.layout.end, lines, self.layout.zero)

    def where(self, lines: NDArray[np.int64]) -> Iterator[tuple[int, slice, NDArray[np.int64]]]:
        """Yields (window, span, slots) for each window that holds some of these neighbouring lines.

        `span` tells which of the lines are in the window, `slots` at which places of it. A line is always found in the
        last window that begins at or before it.
        """
        first, last = np.searchsorted(self.starts, (lines[0], lines[-1]), side="right") - 1
        edges = [0, *(self.starts[first + 1 : last + 1] - lines[0]).tolist(), lines.size]
        for window, span in enumerate(itertools.starmap(slice, itertools.pairwise(edges)), start=int(first)):
            yield window, span, lines[span] - self.starts[window]

    @property
    def cost(self) -> int:
        """What all tiles of two windows would cost, as cells."""
        return len(self.starts) ** 2 * (self.height**2 + OVERHEAD)


@lru_cache(maxsize=64)
def windows(layout: Layout) -> Windows:
    """Returns the windows that suit a layout best."""
    return min((Windows(layout, height) for height in HEIGHTS), key=lambda found: found.cost)


@dataclass(frozen=True)
class Tiled:
    """Noisy answers of whole marginals, as tiles; the first `used` of them count."""

    lines: Array
    """The lines of each window."""
    left: Array
    """The window of each tile's rows."""
    right: Array
    """The window of each tile's columns."""
    pivots: Array
    """The lines that are multiplied: tiles by factors."""
    targets: Array
    precision: Array
    """The weight of half a squared residual in the loss, for each cell; 0 where nothing was measured."""
    used: Array
    apart: Array
    """How far apart answers of the same cells are: the misfit that is left where a table agrees with their mean."""
    devices: int = 1
    """How many devices they are dealt to, `HAND` at a time."""


DEALT = ("left", "right", "pivots", "targets", "precision")
"""What each device has of its own tiles alone."""

FIELDS = ("lines", *DEALT, "used", "apart")

jax.tree_util.register_dataclass(Tiled, data_fields=FIELDS, meta_fields=["devices"])


class Tail(NamedTuple):
    """How residuals beyond the noise are pulled: half their squared excess over `reach` sigmas weighs `weight` more."""

    weight: Array | float = 0.0
    reach: Array | float = 1.0
    """In units of sqrt(n) sigmas, above 0: an answer of precision p may be off by reach / sqrt(p)."""


class Share(NamedTuple):
    """Which tiles a step compares with: every `parts`-th, from number `part` on."""

    part: Array | int = 0
    parts: Array | int = 1


NO_TAIL = Tail()
ALL = Share()


def misfit(residuals: Array, precision: Array, tail: Tail) -> tuple[Array, Array]:
    """Returns half the sum of squared residuals in units of sigma, with their tails, and its gradient."""
    allowed = tail.reach * jax.lax.rsqrt(precision)
    beyond = residuals - jnp.clip(residuals, -allowed, allowed)
    pull = precision * (residuals + tail.weight * beyond)
    return 0.5 * jnp.sum(precision * (residuals**2 + tail.weight * beyond**2)), pull


@jax.custom_vjp
def tiled_loss(table: Array, weights: Array, goal: Tiled, tail: Tail = NO_TAIL, share: Share = ALL) -> Array:
    """Returns the misfit of whole marginals; that of a share of the tiles, times the number of shares.

    The gradient is found in the same pass, so that a tile is formed once: with s = w * p, L = A diag(s), and the pull
    G of the residuals of L B^T,

        dB = G^T L,   dA = (G B) diag(s),   ds = column sums of (G B) * A.
    """
    return _forward(table, weights, goal, tail, share)[0]


Swept = tuple[Array, tuple[Array, Array]]
"""A loss, and its gradients by table and by row weights."""


class Sums(NamedTuple):
    """The loss so far, and its gradient by windows, by lines that are pivots, and by row weights."""

    loss: Array
    windows: Array
    pivots: Array
    weights: Array


def _forward(table: Array, weights: Array, goal: Tiled, tail: Tail, share: Share) -> Swept:
    if goal.devices == 1:
        found = swept(table, weights, goal, tail, share)
    else:
        whole, dealt = PartitionSpec(), PartitionSpec(AXIS)
        parts = [dealt if name in DEALT else whole for name in FIELDS]
        specs = (whole, whole, jax.tree.unflatten(jax.tree.structure(goal), parts), whole, whole)
        together = jax.shard_map(
            swept_together, mesh=mesh(goal.devices), in_specs=specs, out_specs=whole, check_vma=False
        )
        found = together(table, weights, goal, tail, share)
    loss, gradients = jax.tree.map(lambda part: share.parts * part, found)
    return loss + goal.apart, gradients


def swept_together(table: Array, weights: Array, goal: Tiled, tail: Tail, share: Share) -> Swept:
    """Returns the loss and the gradients of the tiles of all devices, of which this one has its own."""
    rounds, rest = jnp.divmod(goal.used, HAND * goal.devices)
    last = jnp.clip(rest - HAND * jax.lax.axis_index(AXIS), 0, HAND)
    mine = replace(goal, used=HAND * rounds + last)
    return jax.lax.psum(swept(table, weights, mine, tail, share), AXIS)


def swept(table: Array, weights: Array, goal: Tiled, tail: Tail, share: Share) -> Swept:
    """Returns the loss of a share of the tiles, and its gradients by table and by row weights."""
    batch = 1 if jax.default_backend() == "cpu" else BATCH
    panels, factors = table[goal.lines], goal.pivots.shape[1]

    def add(turn: Array, sums: Sums) -> Sums:
        ids = share.part + (turn * batch + jnp.arange(batch)) * share.parts
        live = (ids < goal.used).astype(table.dtype)
        ids = jnp.minimum(ids, goal.used - 1)
        left, right, lines = goal.left[ids], goal.right[ids], goal.pivots[ids]
        multiplied = [table[lines[:, factor]] for factor in range(factors)]
        product = math.prod(multiplied[1:], start=multiplied[0])
        scale = weights * product
        rows, columns = panels[left], panels[right]
        scaled = rows * scale[:, None]
        residuals = jnp.einsum("gar,gbr->gab", scaled, columns, precision=EXACT) - goal.targets[ids]
        loss, pull = misfit(residuals, goal.precision[ids] * live[:, None, None], tail)
        back = jnp.einsum("gab,gbr->gar", pull, columns, precision=EXACT)
        by_scale = jnp.einsum("a,gar->gr", jnp.ones(back.shape[1], back.dtype), back * rows)
        found = added(sums.windows, right, jnp.einsum("gab,gar->gbr", pull, scaled, precision=EXACT))
        found = added(found, left, back * scale[:, None])
        by_pivots = sums.pivots
        for factor in range(factors):
            others = math.prod(multiplied[:factor] + multiplied[factor + 1 :], start=weights * by_scale)
            by_pivots = added(by_pivots, lines[:, factor], others)
        return Sums(sums.loss + loss, found, by_pivots, sums.weights + jnp.sum(by_scale * product, axis=0))

    start = Sums(jnp.zeros((), table.dtype), jnp.zeros_like(panels), jnp.zeros_like(table), jnp.zeros_like(weights))
    turns = -(-(goal.used - share.part) // (share.parts * batch))
    sums = jax.lax.fori_loop(0, turns, add, start)
    return sums.loss, (sums.pivots.at[goal.lines].add(sums.windows), sums.weights)


def added(sums: Array, places: Array, parts: Array) -> Array:
    """Returns sums with each part added at its place; the order of additions, and so the result, is always the same."""
    if places.shape[0] == 1:
        return jax.lax.dynamic_update_index_in_dim(sums, sums[places[0]] + parts[0], places[0], 0)
    chosen = (places[None, :] == jnp.arange(sums.shape[0])[:, None]).astype(parts.dtype)
    return sums + jnp.tensordot(chosen, parts, axes=1, precision=EXACT)


def _backward(gradients: tuple[Array, Array], pulled: Array) -> tuple[Array, Array, None, None, None]:
    return pulled * gradients[0], pulled * gradients[1], None, None, None


tiled_loss.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Group:
    """Tiles of two windows, one for each combination of codes of the pivots."""

    first: int
    """The number of the first tile."""
    left: int
    right: int
    pivots: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A measured marginal, and its pivots, as places among its features."""

    tally: GroupBy
    values: NDArray[np.floating] = field(default_factory=lambda: np.empty(0))
    precision: float = 1.0
    pivots: tuple[int, ...] = ()

    def lines(self, layout: Layout, place: int) -> NDArray[np.int64]:
        """Returns the lines of the codes of the feature at a place."""
        tally = self.tally
        return layout.offsets[tally.features[place]] + tally.starts[place] + np.arange(tally.shape[place])

    @property
    def sides(self) -> tuple[int, int]:
        """The places of the two features that are not pivots, in the order of the features."""
        first, second = (place for place in places(self.tally) if place not in self.pivots)
        return first, second


@dataclass(frozen=True)
class Packing:
    """How marginals are packed into tiles."""

    windows: Windows
    groups: dict[tuple[tuple[int, ...], int, int], Group] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        if not self.groups:
            return 0
        last = next(reversed(self.groups.values()))
        return last.first + self.size(last.pivots)

    def size(self, pivots: tuple[int, ...]) -> int:
        """Returns the number of combinations of codes of pivots."""
        return math.prod(self.windows.layout.widths[feature] for feature in pivots)

    def pairs(self, item: Placed) -> Iterator[tuple[int, int]]:
        """Yields the windows of a marginal's rows and columns, the lower first."""
        left, right = (
            [window for window, *_ in self.windows.where(item.lines(self.windows.layout, place))]
            for place in item.sides
        )
        yield from {(min(pair), max(pair)): None for pair in itertools.product(left, right)}

    def missing(self, item: Placed) -> int:
        """Returns how many tiles a marginal needs that are not there."""
        pivots = features(item)
        return self.size(pivots) * sum((pivots, *pair) not in self.groups for pair in self.pairs(item))

    def place(self, item: Placed) -> Placed:
        """Returns the marginal with the pivots that need the fewest new tiles, and makes room for these."""
        choices = itertools.combinations(places(item.tally), len(item.tally.features) - 2)
        placed = min((Placed(item.tally, item.values, item.precision, pivots) for pivots in choices), key=self.missing)
        for pair in self.pairs(placed):
            key = (features(placed), *pair)
            if key not in self.groups:
                self.groups[key] = Group(self.tiles, *pair, features(placed))
        return placed


def places(tally: GroupBy) -> list[int]:
    """Returns the places of a marginal's features in the order of the features, however they are listed."""
    return sorted(range(len(tally.features)), key=lambda place: tally.features[place])


def features(item: Placed) -> tuple[int, ...]:
    """Returns the features that are pivots of a marginal."""
    return tuple(item.tally.features[place] for place in item.pivots)


def by_size(tallies: Iterable[GroupBy]) -> list[GroupBy]:
    """Returns marginals in the order in which they are placed: the largest first."""
    return sorted(tallies, key=lambda tally: -tally.cells)


@lru_cache(maxsize=64)
def snug(layout: Layout, tallies: tuple[GroupBy, ...]) -> Windows:
    """Returns the windows that suit some marginals best.

    High windows hold many features: well where most of these are measured together, else they are nearly empty.
    """

    def cost(chosen: Windows) -> int:
        packing = Packing(chosen)
        for tally in by_size(tallies):
            packing.place(Placed(tally))
        return packing.tiles * (chosen.height**2 + OVERHEAD)

    return min((Windows(layout, height) for height in HEIGHTS), key=cost)


def tiled(layout: Layout, items: Sequence[Whole], chosen: Windows | None = None) -> Tiled:
    """Returns measured marginals of two features or more, each with its noisy answers and their precision, as tiles."""
    packing = Packing(chosen or windows(layout))
    ordered = sorted(items, key=lambda item: -item[0].cells)
    placed = [packing.place(Placed(*item)) for item in ordered]
    factors = max([1, *(len(item.pivots) for item in placed)])
    height = packing.windows.height
    devices = jax.local_device_count() if packing.tiles * height**2 >= SHARED else 1
    room = rooms(packing.tiles)
    room += -room % (HAND * devices) if devices > 1 else 0
    targets, precision = np.zeros((room, height, height), np.float32), np.zeros((room, height, height), np.float32)
    apart = sum(fill(packing, item, targets, precision) for item in placed)
    left, right = np.zeros(room, np.int32), np.zeros(room, np.int32)
    pivots = np.full((room, factors), layout.one, np.int32)
    for group in packing.groups.values():
        span = slice(group.first, group.first + packing.size(group.pivots))
        left[span], right[span] = group.left, group.right
        codes = np.unravel_index(np.arange(span.stop - span.start), [layout.widths[f] for f in group.pivots] or [1])
        for factor, feature in enumerate(group.pivots):
            pivots[span, factor] = layout.offsets[feature] + codes[factor]
    return Tiled(
        jnp.asarray(packing.windows.lines),
        *(deal(part, devices) for part in (left, right, pivots, targets, precision)),
        used=jnp.int32(max(1, packing.tiles)),
        apart=jnp.float32(apart),
        devices=devices,
    )


def deal(parts: NDArray, devices: int) -> Array:
    """Returns the parts, dealt to some devices: an array whose order is that of the devices."""
    if devices == 1:
        return jnp.asarray(parts)
    hands = parts.reshape(-1, devices, HAND, *parts.shape[1:])
    held = [
        jax.device_put(hands[:, turn].reshape(-1, *parts.shape[1:]), device)
        for turn, device in enumerate(jax.local_devices()[:devices])
    ]
    placed = NamedSharding(mesh(devices), PartitionSpec(AXIS))
    return jax.make_array_from_single_device_arrays(parts.shape, placed, held)


def beside(goals: object, point: Point) -> Point:
    """Returns arrays on the devices that goals are dealt to: steps that find them elsewhere would be compiled twice."""
    arrays = (part for part in jax.tree.leaves(goals) if isinstance(part, Array))
    devices = max((len(part.sharding.device_set) for part in arrays), default=1)
    return jax.device_put(point, NamedSharding(mesh(devices), PartitionSpec())) if devices > 1 else point


def mesh(devices: int) -> Mesh:
    """Returns some devices, in a row."""
    return Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))


def fill(packing: Packing, item: Placed, targets: Reals, precision: Reals) -> float:
    """Writes the noisy answers of a marginal where its tiles are; returns how far apart they are from earlier ones.

    A cell that has an answer already gets the mean of both, weighed by their precisions p and q: then
    p (x - a)^2 + q (x - b)^2 = (p + q) (x - mean)^2 + p q / (p + q) (a - b)^2.
    """
    layout, tally = packing.windows.layout, item.tally
    pivots = [tally.starts[place] + np.arange(tally.shape[place]) for place in item.pivots]
    sizes = [layout.widths[feature] for feature in features(item)]
    codes = np.ravel_multi_index(np.meshgrid(*pivots, indexing="ij"), sizes).ravel() if pivots else np.zeros(1, int)
    values = item.values.reshape(tally.shape).transpose(*item.pivots, *item.sides)
    values = values.reshape(codes.size, *values.shape[len(item.pivots) :])
    first, second = (list(packing.windows.where(item.lines(layout, place))) for place in item.sides)
    apart = 0.0
    for (left, rows, down), (right, columns, across) in itertools.product(first, second):
        group = packing.groups[features(item), min(left, right), max(left, right)]
        part = values[:, rows, columns]
        if left > right:
            part, down, across = part.swapaxes(1, 2), across, down  # noqa: PLW2901 - the tile is turned
        place = np.ix_(group.first + codes, down, across)
        total, change = precision[place] + np.float32(item.precision), part - targets[place]
        # An answer that weighs nothing leaves what is there: its share of nothing would be no number.
        share = np.float32(item.precision) / np.where(total > 0, total, 1)
        apart += 0.5 * float(np.sum(share * precision[place] * change**2))
        targets[place] += change * share
        precision[place] = total
    return apart


def worthwhile(chosen: Windows, tallies: Sequence[GroupBy]) -> list[bool]:
    """Returns for each marginal whether tiles suit it: whether those it is in hold enough cells that were measured.

    Scattered small marginals need a tile for a few cells; to gather the lines of each cell is cheaper then.
    """
    packing, held = Packing(chosen), Counter[tuple[tuple[int, ...], int, int]]()
    placed = [packing.place(Placed(tally)) for tally in by_size(tallies)]
    keys = {item.tally: [(features(item), *pair) for pair in packing.pairs(item)] for item in placed}
    for tally, mine in keys.items():
        held.update(dict.fromkeys(mine, tally.cells / len(mine)))
    enough = packing.windows.height**2 / 72 + 10

    def density(tally: GroupBy) -> float:
        return max(held[key] / packing.size(key[0]) for key in keys[tally])

    return [density(tally) >= enough for tally in tallies]


@lru_cache(maxsize=16)
def tile_bytes(sizes: tuple[int, ...], sets: tuple[tuple[int, ...], ...]) -> int:
    """Returns the bytes of the tiles of some marginals: of their targets and of the precision of these."""
    packing = Packing(windows(Layout(sizes)))
    for tally in by_size(GroupBy(sizes, features, 0, sizes[features[0]]) for features in sets if len(features) > 1):
        packing.place(Placed(tally))
    return 8 * rooms(packing.tiles) * packing.windows.height**2


def rooms(tiles: int) -> int:
    """Returns the number of tiles that a fit is compiled for: a power of two, or some sizes in between from 256 on."""
    power = 1 << max(0, tiles - 1).bit_length()
    return power if power <= 256 else padded_size(tiles)
