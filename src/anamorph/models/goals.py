"""Goals: measurements in the fixed shapes that a fit compares answers with.

Marginals of one feature and single cells go to one gather, thresholds to one for each (k, r), whole marginals of more
features to tiles, and values of functions to the function. The number of queries and of tiles is rounded up, so that a
longer list of measurements seldom changes a shape and costs a compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from anamorph.curator.rowwise import RowFunction, Rowwise
from anamorph.curator.tallies import AtLeast, GroupBy, Special
from anamorph.errors import ParameterError
from anamorph.models.answers import no_residuals
from anamorph.models.functions import Functioned, functioned
from anamorph.models.products import Counted, Gathered, conjunction_factors, gather, simplest
from anamorph.models.simplex import Layout
from anamorph.models.tiles import Tiled, Whole, Windows, snug, tiled, windows, worthwhile
from anamorph.release import Measurement

LEAST = 256
"""The least number of single queries that a fit is compiled for."""

MOST_THRESHOLDS = 1 << 20
"""The most cells of blocks of thresholds, which are compared one by one."""


class Goals(NamedTuple):
    """All that a fit compares with."""

    gathered: tuple[Gathered, ...]
    """Cells of marginals, even if there are none; then thresholds, by (k, r)."""
    tiled: tuple[Tiled, ...]
    """Whole marginals, if there are any."""
    functioned: tuple[Functioned, ...] = ()
    """Values of functions, for each function."""


class Measured(NamedTuple):
    """One tally of a measurement, with its noisy answers."""

    tally: Counted | RowFunction
    values: NDArray[np.float64]
    precision: NDArray[np.float64]
    """The weight of half a squared residual in the loss, for each answer."""


class Singles(NamedTuple):
    """Single queries of one kind, with their noisy answers."""

    lines: NDArray[np.int32]
    values: NDArray[np.float64]
    precision: NDArray[np.float64]


def build(layout: Layout, measurements: Sequence[Measurement], *, last: bool = False) -> Goals:
    """Returns the goals of a list of measurements.

    If there will be no more of them, tiles and single queries are of the sizes that suit these best; else of those that
    suit all there may be, so that fits of each round have the same.
    """
    items = list(measured(measurements))
    if not items:
        raise ParameterError("measurements must be at least one")
    check_thresholds(items)
    counted = [item.tally for item in items if not isinstance(item.tally, RowFunction)]
    several = tuple(tally for tally in counted if isinstance(tally, GroupBy) and len(tally.features) > 1)
    chosen = snug(layout, several) if last else windows(layout)
    wholes, singles = parted(items, several, chosen)
    compared = [item.tally for item in singles if not isinstance(item.tally, RowFunction)] if last else counted
    factors = max([1, *map(conjunction_factors, compared)])
    return Goals(
        gathered_goals(layout, singles, factors),
        (tiled(layout, wholes, chosen),) if wholes else (),
        functioned_goals(items),
    )


def parted(
    items: Sequence[Measured], several: Sequence[GroupBy], chosen: Windows
) -> tuple[Sequence[Whole], Sequence[Measured]]:
    """Returns the marginals that are compared in tiles, and what else there is.

    Tiles are for marginals of several features, unless they are small and scattered.
    """
    found = {tally for tally, worth in zip(several, worthwhile(chosen, several), strict=True) if worth}
    wholes = [(item.tally, item.values, float(item.precision[0])) for item in items if item.tally in found]
    return wholes, [item for item in items if item.tally not in found]


def functioned_goals(items: Iterable[Measured]) -> tuple[Functioned, ...]:
    """Returns the values of functions: a goal for each function."""
    found: dict[Rowwise, list[tuple[NDArray, ...]]] = {}
    for item in items:
        if isinstance(item.tally, RowFunction):
            function, chosen = item.tally.function, item.tally.chosen
            places = np.arange(function.count) if chosen is None else chosen
            found.setdefault(function, []).append((places, item.values, item.precision))
    return tuple(
        functioned(function, *map(np.concatenate, zip(*parts, strict=True))) for function, parts in found.items()
    )


def check_thresholds(items: Iterable[Measured]) -> None:
    """Refuses blocks of thresholds with more cells than can be compared one by one."""
    cells = sum(item.tally.cells for item in items if isinstance(item.tally, AtLeast))
    if cells > MOST_THRESHOLDS:
        raise ParameterError(
            f"blocks of thresholds of {cells} cells together must have at most {MOST_THRESHOLDS} to be fitted: "
            "measure the marginals instead"
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
            if isinstance(piece.tally, Special):
                raise no_residuals()
            tally = piece.tally if isinstance(piece.tally, RowFunction) else simplest(piece.tally)
            yield Measured(tally, measurement.values[span], precision)


def gathered_goals(layout: Layout, items: Iterable[Measured], factors: int) -> tuple[Gathered, ...]:
    """Returns the queries that are answered one by one: cells of marginals, then thresholds of each kind."""
    cells: list[Singles] = []
    thresholds: dict[tuple[int, int], list[Singles]] = {}
    for item in items:
        if isinstance(item.tally, RowFunction):
            continue
        for queries in gather(layout, item.tally, factors):
            order, least = queries.lines.shape[1], queries.least
            kind = cells if least == order else thresholds.setdefault((order, least), [])
            kind.append(Singles(queries.lines, item.values[queries.places], item.precision[queries.places]))
    return (
        gathered_goal(layout, cells, factors, factors),
        *(gathered_goal(layout, thresholds[kind], *kind) for kind in sorted(thresholds)),
    )


def gathered_goal(layout: Layout, singles: Sequence[Singles], factors: int, least: int) -> Gathered:
    """Returns the queries of one kind, padded with queries of the line of zeros that weigh nothing."""
    size = sum(len(part.values) for part in singles)
    room = max(LEAST, power_of_two(size))
    lines = np.full((room, factors), layout.zero, np.int32)
    targets, precision = np.zeros(room, np.float32), np.zeros(room, np.float32)
    if singles:
        lines[:size], targets[:size], precision[:size] = map(np.concatenate, zip(*singles, strict=True))
    return Gathered(jnp.asarray(lines), jnp.asarray(targets), jnp.asarray(precision), least)


def power_of_two(size: int) -> int:
    """Returns the least power of two that is at least `size`, and at least 1."""
    return 1 << max(0, size - 1).bit_length()
