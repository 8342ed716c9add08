"""Where mixed rows begin: drawn from measured marginals of single columns, each with a label or alone.

Every row gets a value of the label, in the proportions measured. Its other coded columns have the noisy probabilities
given that value, a little apart from row to row; its numbers are evenly spaced quantiles of the noisy distribution
given it, in random order. So the columns are independent given the label, and what was measured is fitted already, but
for the number of rows.

A noisy table is projected onto the simplex first: to the nearest probabilities, which puts small cells at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from anamorph.models.annealing import MixedProjection, relaxed_part
from anamorph.models.mixed import MixedRows
from anamorph.models.relaxed import Parameters
from anamorph.models.simplex import NOWHERE
from anamorph.queries.bands import Banded, merged_sizes
from anamorph.queries.marginals import Marginals
from anamorph.release import Measurement

Reals = NDArray[np.float64]
Cuts = tuple[int, ...]

LEAST = 1e-4
"""The least probability of a code in a row, before they are made to sum to 1: a fit can raise it again."""

OWN = 0.98
"""The probability that a row has its own value of the label."""

SPREAD = 0.3
"""Logarithms of probabilities differ by up to this from row to row: rows that are alike have the same gradients, stay
alike, and answer as if columns were independent given the label."""


def started(
    made: MixedProjection, model: MixedRows, measurement: Measurement, label: int | None, *, seed: int
) -> MixedRows:
    """Returns rows drawn from marginals over (column, label), or over columns alone where there is no label.

    Columns that were not measured stay as they are in the model.
    """
    generator = np.random.default_rng((seed, 3))
    columns, found = model.columns, dict(tables(measurement, label))
    shares = np.mean([table.sum(axis=0) for table, _ in found.values()], axis=0)
    owners = np.searchsorted(np.cumsum(shares)[:-1], (np.arange(made.rows) + 0.5) / made.rows)
    reals, lines = model.reals.copy(), model.coded.probabilities.astype(np.float64)
    for column, (table, cuts) in found.items():
        given = table / np.maximum(table.sum(axis=0), 1e-12)
        if column in columns.numbers:
            index = columns.numbers.index(column)
            limit = columns.limits[index]
            inside = [cut for cut in cuts if cut < limit]
            if column in columns.flagged:
                first = model.starts[columns.place(column)]
                lines[first + 1] = given[len(inside) + 1 :].sum(axis=0)[owners]
                lines[first] = 1 - lines[first + 1]
            edges = np.array([0, *inside, limit]) / limit
            reals[index] = quantiles(given[: len(inside) + 1], edges, owners, generator)
        else:
            first = model.starts[columns.place(column)]
            spread = generator.uniform(-SPREAD, SPREAD, (len(given), made.rows))
            lines[first : first + len(given)] = given[:, owners] * np.exp(spread)
    if label is not None:
        first, width = model.starts[columns.place(label)], len(shares)
        lines[first : first + width] = (1 - OWN) / max(width - 1, 1)
        lines[first + owners, np.arange(made.rows)] = OWN
    logarithms = jnp.asarray(np.log(np.maximum(lines, LEAST)), jnp.float32)
    layout = model.coded.layout
    parameters = Parameters(layout.stack(logarithms, NOWHERE), jnp.zeros(made.rows))
    return replace(model, coded=relaxed_part(made).model(layout, parameters), reals=reals)


def tables(measurement: Measurement, label: int | None) -> Iterator[tuple[int, tuple[Reals, Cuts]]]:
    """Yields, for each column, the measured probabilities of its codes or bands with each value of the label."""
    first = 0
    for part in measurement.workload.parts:
        if not isinstance(part, Marginals | Banded):
            raise TypeError("rows begin with marginals only")
        cuts = part.cuts if isinstance(part, Banded) else ((),) * len(part.sizes)
        sizes = merged_sizes(part.sizes, cuts)
        for features in part.sets:
            shape = tuple(sizes[feature] for feature in features)
            values = measurement.values[first : first + int(np.prod(shape))]
            first += values.size
            other = next((feature for feature in features if feature != label), None)
            if other is None or (label is not None and label not in features):
                continue
            table = projected(values).reshape(shape)
            table = table[:, None] if len(features) == 1 else table if features[0] == other else table.T
            yield other, (table, cuts[other])


def projected(values: Reals) -> Reals:
    """Returns the nearest probabilities: max(v - tau, 0), with tau such that they sum to 1."""
    falling = np.sort(values)[::-1]
    levels = (np.cumsum(falling) - 1) / np.arange(1, values.size + 1)
    return np.maximum(values - levels[np.flatnonzero(falling > levels)[-1]], 0)


def quantiles(
    given: Reals, edges: Reals, owners: NDArray[np.integer], generator: np.random.Generator
) -> NDArray[np.float32]:
    """Returns a number for each row: evenly spaced quantiles of the bands given the row's label, in random order."""
    numbers = np.empty(owners.size, np.float32)
    for owner, known in enumerate(given.T):
        rows = np.flatnonzero(owners == owner)
        share = known if known.sum() > 0 else np.diff(edges)
        below = np.concatenate([[0.0], np.cumsum(share / share.sum())])
        places = (generator.permutation(rows.size) + 0.5) / max(rows.size, 1)
        kept = np.flatnonzero(share)  # the inverse is of bands that hold something
        numbers[rows] = np.interp(places, *staircase(below, edges, kept))
    return np.clip(numbers, 0, 1)


def staircase(below: Reals, edges: Reals, kept: NDArray[np.integer]) -> tuple[Reals, Reals]:
    """Returns the corners of the inverse of a piecewise linear distribution, empty bands left out."""
    across = np.stack([below[kept], below[kept + 1]], axis=1).ravel()
    up = np.stack([edges[kept], edges[kept + 1]], axis=1).ravel()
    return across, up
