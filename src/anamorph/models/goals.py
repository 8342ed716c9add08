"""Goals: measurements in the fixed shapes that a fit compares answers with.

Small marginals and single cells go to one gather, large marginals to tiles. The number of queries and of tiles is
rounded up to a power of two, so that a longer list of measurements seldom changes a shape and costs a compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import GroupBy, Tally
from anamorph.models.products import TILES, Gathered, Tiled, gather, small, tile_shape, tiling
from anamorph.models.simplex import Layout
from anamorph.release import Measurement

LEAST = 256
"""The least number of single queries that a fit is compiled for."""


class Goals(NamedTuple):
    """All that a fit compares with."""

    gathered: Gathered
    tiled: tuple[Tiled, ...]


class Measured(NamedTuple):
    """One tally of a measurement, with its noisy answers."""

    tally: Tally
    values: NDArray[np.float64]
    precision: NDArray[np.float64]
    """The weight of half a squared residual in the loss, for each answer."""


def build(layout: Layout, measurements: Sequence[Measurement]) -> Goals:
    """Returns the goals of a list of measurements."""
    tallies = list(measured(measurements))
    factors = max(len(features) for item in tallies for features in item.tally.sets)
    singles = [item for item in tallies if not isinstance(item.tally, GroupBy) or small(item.tally)]
    wholes = [item for item in tallies if isinstance(item.tally, GroupBy) and not small(item.tally)]
    return Goals(
        gathered_goal(layout, singles, factors),
        tuple(tiled_goal(layout, wholes, shape, factors - 1) for shape in TILES if wholes),
    )


def measured(measurements: Iterable[Measurement]) -> Iterator[Measured]:
    """Yields every tally that was measured.

    The loss is chi^2 / (2 n), with chi^2 the sum of ((answer - value) / sigma)^2: half a squared residual weighs
    1 / (n sigma^2), where answers, values and sigma are fractions of n.
    """
    for measurement in measurements:
        first = 0
        for piece in measurement.workload.pieces():
            span = slice(first, first + piece.tally.cells)
            first = span.stop
            sigma = measurement.sigma[piece.first : piece.first + piece.blocks]
            precision = np.broadcast_to(1 / (measurement.total * sigma**2), piece.tally.cells)
            yield Measured(piece.tally, measurement.values[span], precision)


def gathered_goal(layout: Layout, items: list[Measured], factors: int) -> Gathered:
    """Returns the queries that are answered one by one."""
    size = sum(item.tally.cells for item in items)
    room = max(LEAST, power_of_two(size))
    lines = np.full((room, factors), layout.zero, np.int32)
    targets, precision = np.zeros(room, np.float32), np.zeros(room, np.float32)
    if items:
        lines[:size] = np.concatenate([gather(layout, item.tally, factors).lines for item in items])
        targets[:size] = np.concatenate([item.values for item in items])
        precision[:size] = np.concatenate([item.precision for item in items])
    return Gathered(jnp.asarray(lines), jnp.asarray(targets), jnp.asarray(precision))


def tiled_goal(layout: Layout, items: list[Measured], shape: tuple[int, int], factors: int) -> Tiled:
    """Returns the marginals for which tiles of this shape are the best."""
    left, right, targets, precision = [], [], [], []
    for item in items:
        matrix = tiling(item.tally)  # pyright: ignore[reportArgumentType] - wholes are GroupBy
        if tile_shape(matrix) != shape:
            continue
        values = matrix.as_matrix(item.values)
        for cut in matrix.cuts(shape):
            tile = np.zeros(shape, np.float32)
            part = values[cut]
            tile[: part.shape[0], : part.shape[1]] = part
            lines = matrix.lines(layout, cut, shape, max(1, factors))
            left.append(lines[0])
            right.append(lines[1])
            targets.append(tile)
            precision.append(item.precision[0])
    used, room = len(left), power_of_two(len(left))
    blank = (
        np.zeros(shape[0], np.int32),
        np.zeros((max(1, factors), shape[1]), np.int32),
        np.zeros(shape, np.float32),
        0.0,
    )
    spare = [[filler] * (room - used) for filler in blank]
    return Tiled(
        jnp.asarray(np.stack(left + spare[0])),
        jnp.asarray(np.stack(right + spare[1])),
        jnp.asarray(np.stack(targets + spare[2])),
        jnp.asarray(np.array(precision + spare[3], np.float32)),
        jnp.asarray(used, jnp.int32),
    )


def power_of_two(size: int) -> int:
    """Returns the least power of two that is at least `size`, and at least 1."""
    return 1 << max(0, size - 1).bit_length()
