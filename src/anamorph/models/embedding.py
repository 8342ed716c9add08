"""Rows with a given kernel mean embedding: a generator network, and the least squares that fit it (DP-MERF).

The network maps a latent vector and a label to a row: a probability vector for each coded column, a unit real for each
native one, and (present, missing) for those that may be missing. The label of a row is given, not made: each has the
same number of rows, and its share of the table, p_y, is read off the measurement.

    minimise over the network    sum over labels y of  | p_y mean over its rows of phi(row)  -  measured_y |^2,

with phi the cosines and sines of all frequencies over sqrt(D), and the one-hot vectors of the coded columns over the
root of their number (a row's expectation of them: its probabilities). Noise is the same for all coordinates on this
scale, so this is chi^2; it is minimised by Adam, over a fixed batch of latent vectors. What is returned is the batch
of rows (mixed.py), not the network.

A number that may be missing counts as the middle of its range where it is, as in the tally (curator/cosines.py); a row
that has it with probability q has the expectation q e^(i w x) + (1 - q) in the product over its numbers.

Reference: Harder, Adamczewski & Park 2021, sections 3.2 and 4, with the layers of generator.py.
Deviations: a fixed batch instead of fresh latent vectors in every step; layers are not normalised over the batch; rows
are probabilities and not argmaxes; the best network seen is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from anamorph.errors import ParameterError, require_positive
from anamorph.models.descent import Problem, descend
from anamorph.models.generator import Network, draw, outputs, scatter
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.models.simplex import NOWHERE, Layout, softmax
from anamorph.queries.embeddings import Embedding, radians
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.workload import Queries
from anamorph.release import Measurement

Reals = NDArray[np.float64]


class Aims(NamedTuple):
    """What a fit is given: latent vectors with their labels, and what to compare the rows made of them with."""

    latents: Array
    """Latent numbers and one-hot labels, by rows: those of the first label come first."""
    shares: Array
    """p_y, the share of each label."""
    targets: Array
    """What was measured of each line of the table with each label: lines by labels."""
    precision: Array
    """The weight of half a squared residual: lines by labels, 0 where nothing was measured."""
    frequencies: Array
    """In radians over the range of a number: frequencies by numbers."""
    unsure: Array
    """The numbers that may be missing."""
    present: Array
    """The line of the table that says, for each of these, how probably it is present."""
    waves: Array
    """The measured embedding: cosine or sine, by frequencies, by labels."""
    sharpness: Array
    """The weight of half a squared residual of it."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingProjection:
    """The estimator of rows with an embedding."""

    rows: int = 1000
    """The number of rows, those of all labels together; each label has as many, and at least one."""
    latent: int = 16
    """The length of a latent vector."""
    hidden: int = 128
    """The width of a hidden layer."""
    layers: int = 2
    """The number of hidden layers."""
    steps: int = 1000
    """The most Adam steps."""
    rate: float = 3e-3
    """Adam's learning rate."""
    tolerance: float = 0.0
    """The fit stops when the loss changes by less than this fraction of itself from one step to the next."""
    start: float = 1.0
    """The standard deviation of the network's outputs before the first step."""

    def __post_init__(self) -> None:
        for name in ("rows", "latent", "hidden", "layers", "steps"):
            require_positive(name, getattr(self, name))
        for name, least, most in (("rate", 1e-12, 100), ("tolerance", 0, 1), ("start", 0, 100)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value <= most:
                raise ParameterError(f"{name} ({value!r}) must be a number from {least} to {most}")

    def fit(self, columns: Columns, label: int | None, measurement: Measurement, *, seed: int) -> MixedRows:
        """Returns rows whose embedding is nearest to the one measured.

        Measured are marginals of the label with each coded column, the numbers that are present with each label, and
        an embedding; any of them may be absent.
        """
        layout = Layout(columns.relaxed)
        aims = build(self, layout, columns, label, measurement, seed)
        widths = (*itertools.repeat(self.hidden, self.layers), sum(columns.relaxed) + len(columns.numbers))
        shapes = tuple((width, len(aims.latents) + i * self.hidden) for i, width in enumerate(widths))
        network = scatter(shapes, self.start, jax.random.key(seed))
        best, finite = descend(Problem(self, layout, objective), network, aims)
        table, reals = map(np.asarray, reveal(layout, best, aims.latents))
        table = table[layout.lines]
        rows = aims.latents.shape[1]
        if label is not None:
            first, width = sum(columns.relaxed[: columns.place(label)]), columns.sizes[label]
            table[first : first + width] = np.repeat(np.eye(width, dtype=np.float32), rows // width, axis=1)
        each = rows // aims.shares.size
        weights = np.repeat(np.asarray(aims.shares) / each, each).astype(np.float32)
        return MixedRows(columns, RelaxedRows(columns.relaxed, table, weights, degraded=not finite), reals)


def build(
    made: EmbeddingProjection,
    layout: Layout,
    columns: Columns,
    label: int | None,
    measurement: Measurement,
    seed: int,
) -> Aims:
    """Returns what a fit compares with."""
    labels = 1 if label is None else columns.sizes[label]
    targets, precision = np.zeros((2, layout.height, labels))
    waves, frequencies = np.zeros((2, 0, labels)), np.zeros((0, len(columns.numbers)))
    sharpness = 0.0
    for part, features, values, sigma in blocks_of(measurement):
        if isinstance(part, Embedding):
            waves = values.reshape(labels, 2, -1).transpose(1, 2, 0)
            frequencies = radians(part.tally)
            sharpness = 1 / (measurement.total * sigma**2)
        elif features != (label,):
            column = features[-1]
            first = layout.offsets[columns.place(column)]
            lines = slice(first, first + values.size // labels)
            targets[lines] = values.reshape(labels, -1).T
            precision[lines] = 1 / (measurement.total * sigma**2)
    each = max(1, made.rows // labels)
    given = np.repeat(np.eye(labels, dtype=np.float32), each, axis=1)
    latents = np.concatenate([draw(seed, made.latent, labels * each), given])
    unsure = [columns.numbers.index(number) for number in columns.flagged]
    present = [layout.offsets[columns.place(number)] for number in columns.flagged]
    return Aims(
        jnp.asarray(latents),
        single(shares(label, measurement)),
        single(targets),
        single(precision),
        single(frequencies),
        jnp.asarray(unsure, jnp.int32),
        jnp.asarray(present, jnp.int32),
        single(waves),
        single(sharpness),
    )


def single(numbers: Reals | float) -> Array:
    """Returns numbers in single precision, where fits compute."""
    return jnp.asarray(numbers, jnp.float32)


def blocks_of(measurement: Measurement) -> Iterator[tuple[Queries, tuple[int, ...], Reals, float]]:
    """Yields each block: the part it is of, its columns, its noisy answers and their noise."""
    first, block = 0, 0
    for part in measurement.workload.parts:
        if isinstance(part, Marginals):
            blocks = tuple(zip(part.sets, part.block_cells, strict=True))
        elif isinstance(part, Embedding | Tested):
            blocks = (((*part.tally.given, *part.tally.numbers), part.largest_block),) * part.blocks
        else:
            raise ParameterError("measurements must be of marginals, tests of numbers and an embedding")
        for features, cells in blocks:
            yield part, features, measurement.values[first : first + cells], float(measurement.sigma[block])
            first, block = first + cells, block + 1


def shares(label: int | None, measurement: Measurement) -> Reals:
    """Returns the share of each label: the mean of what its marginals say, by their precision, and never below 0."""
    if label is None:
        return np.ones(1)
    total, weight = np.zeros(measurement.workload.sizes[label]), 0.0
    for part, features, values, sigma in blocks_of(measurement):
        if isinstance(part, Marginals) and features[0] == label:
            each = values.reshape(total.size, -1)
            total += each.sum(axis=1) / (each.shape[1] * sigma**2)
            weight += 1 / (each.shape[1] * sigma**2)
    found = np.maximum(total / weight, 0)
    return found / found.sum() if found.sum() else np.full(total.size, 1 / total.size)


def rows_of(layout: Layout, network: Network, latents: Array) -> tuple[Array, Array]:
    """Returns the rows that a network makes: the lines of the table, and a unit real for each number."""
    made = outputs(network, latents)
    height = sum(layout.sizes)
    return layout.flatten(tuple(map(softmax, layout.stack(made[:height], NOWHERE)))), jax.nn.sigmoid(made[height:])


@partial(jax.jit, static_argnums=0)
def reveal(layout: Layout, network: Network, latents: Array) -> tuple[Array, Array]:
    """Returns the rows that a network makes."""
    return rows_of(layout, network, latents)


def circles(aims: Aims, table: Array, reals: Array) -> Array:
    """Returns the expected cosine and sine of each row: cosine or sine, by frequencies, by rows."""
    x = reals - 0.5
    angles = aims.frequencies.at[:, aims.unsure].set(0.0) @ x
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    for place in range(aims.unsure.size):
        angles = aims.frequencies[:, aims.unsure[place], None] * x[aims.unsure[place]]
        present = table[aims.present[place]]
        real, imaginary = present * jnp.cos(angles) + 1 - present, present * jnp.sin(angles)
        cosine, sine = cosine * real - sine * imaginary, cosine * imaginary + sine * real
    return jnp.stack([cosine, sine])


def objective(_made: EmbeddingProjection, layout: Layout, network: Network, aims: Aims) -> Array:
    """Returns chi^2 / (2 n)."""
    table, reals = rows_of(layout, network, aims.latents)
    labels = aims.shares.size

    def by_label(lines: Array) -> Array:
        return lines.reshape(*lines.shape[:-1], labels, lines.shape[-1] // labels).mean(axis=-1) * aims.shares

    coded = aims.precision * (by_label(table[: layout.height]) - aims.targets) ** 2
    waves = aims.sharpness * (by_label(circles(aims, table, reals)) - aims.waves) ** 2
    return (jnp.sum(coded) + jnp.sum(waves)) / 2
