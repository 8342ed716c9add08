"""A generator: a network that turns Gaussian noise into relaxed rows, and the projection that fits it (GEM).

The network maps a latent vector z to a relaxed row, a point on the simplex of each feature. As in CTGAN's generator,
every hidden layer keeps its input beside what it makes of it:

    x <- ( relu(A x + b), x ),      P = softmax, feature by feature, of  A x + b.

A batch of B fixed latent vectors stands for the table: its answers are those of the B relaxed rows (relaxed.py).
Fitting minimises over the network's numbers, by Adam,

    chi^2 / (2 n)  +  penalty * I,      chi^2 = sum over measured answers of ((answer - noisy answer) / sigma)^2,

with I the information that the rows carry beyond independence. Rows share the network, so what one of them learns all
do: few steps suffice, and other latent vectors become rows of nearly the same distribution (`Generator.fresh`).

References: Liu, Vietri & Wu 2021 (Iterative methods for private synthetic data), the section on generative networks;
Xu et al. 2019 (CTGAN) for the layers.
Deviations: layers are not normalised over the batch; the loss is chi^2, not L1, and has a penalty; the best network
seen is returned, where the paper averages those of the later rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from anamorph.curator.estimates import RelaxedTable
from anamorph.errors import CorruptionError, ParameterError, require_positive
from anamorph.models import goals
from anamorph.models.descent import Problem, descend
from anamorph.models.relaxed import RelaxedRows, table_loss
from anamorph.models.simplex import NOWHERE, Layout, Stacks, softmax
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.table import Table

CHUNK = 1024
"""How many fresh latent vectors are turned into rows at a time."""


class Layer(NamedTuple):
    """A x + b."""

    matrix: Array
    bias: Array


Network = tuple[Layer, ...]
"""Hidden layers, and the last one, whose outputs are a number for each code of each feature."""


class Aims(NamedTuple):
    """What a fit is given: the latent vectors, and what to compare the rows made of them with."""

    latents: Array
    goals: goals.Goals


@dataclass(frozen=True, eq=False)
class Generator:
    """A network, and the latent vectors that it was fitted on."""

    sizes: tuple[int, ...]
    latents: NDArray[np.float32]
    """A column for each row."""
    network: Network
    degraded: bool = False
    """Whether a fit met a loss that was not a number and fell back to the best network before it."""

    @cached_property
    def rows(self) -> RelaxedRows:
        """The relaxed rows of the latent vectors that the network was fitted on."""
        return self._rows(self.latents)

    def fresh(self, rows: int, *, seed: int) -> RelaxedRows:
        """Returns relaxed rows of latent vectors drawn anew: any number of them, and less accurate ones."""
        require_positive("rows", rows)
        return self._rows(draw(seed, len(self.latents), rows))

    def answers(self, workload: Workload) -> Iterator[NDArray[np.float32]]:
        """Yields the relaxed answers of each piece of a workload."""
        return self.rows.answers(workload)

    def estimate(self, workload: Workload) -> RelaxedTable:
        """Returns the table for a curator to compare with, and its answers to the functions of a workload."""
        return self.rows.estimate(workload)

    def popular(self) -> NDArray[np.float64]:
        """Returns the one-way answers of every feature: a number for each line."""
        return self.rows.popular()

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns rows rounded at random from the relaxed ones that were fitted."""
        return self.rows.sample(rows, seed=seed, keep=keep)

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps."""
        layers = list(enumerate(self.network))
        matrices = {f"matrix.{index}": np.asarray(layer.matrix) for index, layer in layers}
        biases = {f"bias.{index}": np.asarray(layer.bias) for index, layer in layers}
        return {"latents": self.latents} | matrices | biases

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses anything but the finite numbers of a network that fits together."""
        count = len(arrays) // 2
        names = {"latents", *(f"{part}.{index}" for part in ("matrix", "bias") for index in range(count))}
        if set(arrays) != names or not all(a.dtype == np.float32 and np.all(np.isfinite(a)) for a in arrays.values()):
            raise CorruptionError("the model must hold latent vectors and layers of finite numbers; it does not")
        network = tuple(
            Layer(jnp.asarray(arrays[f"matrix.{index}"]), jnp.asarray(arrays[f"bias.{index}"]))
            for index in range(count)
        )
        if not fits_together(sizes, arrays["latents"], network):
            raise CorruptionError("the model's layers must make rows of the schema; they do not")
        return cls(sizes, arrays["latents"], network)

    def _rows(self, latents: NDArray[np.float32]) -> RelaxedRows:
        layout, rows = Layout(self.sizes), latents.shape[1]
        made = np.empty((sum(self.sizes), rows), np.float32)
        for first in range(0, rows, CHUNK):
            part = latents[:, first : first + CHUNK]
            padded = np.pad(part, ((0, 0), (0, CHUNK - part.shape[1])))  # so that it is compiled once
            made[:, first : first + CHUNK] = np.asarray(reveal(layout, self.network, padded))[:, : part.shape[1]]
        return RelaxedRows(self.sizes, made, np.full(rows, 1 / rows, np.float32))


@dataclass(frozen=True, kw_only=True)
class GeneratorProjection:
    """The estimator of generators."""

    rows: int = 500
    """B, the number of latent vectors, and so of relaxed rows."""
    latent: int = 16
    """The length of a latent vector."""
    hidden: int = 256
    """The width of a hidden layer."""
    layers: int = 2
    """The number of hidden layers."""
    steps: int = 300
    """The most Adam steps of one fit."""
    rate: float = 3e-3
    """Adam's learning rate."""
    tolerance: float = 1e-7
    """A fit stops when the loss changes by less than this fraction of itself from one step to the next."""
    start: float = 0.3
    """The standard deviation of the numbers whose softmax the first rows are."""
    penalty: float = 0.005
    """The weight of the information penalty."""

    def __post_init__(self) -> None:
        for name in ("rows", "latent", "hidden", "layers", "steps"):
            require_positive(name, getattr(self, name))
        for name, least, most in (("rate", 1e-12, 100), ("tolerance", 0, 1), ("start", 0, 100), ("penalty", 0, 1e9)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value <= most:
                raise ParameterError(f"{name} ({value!r}) must be a number from {least} to {most}")

    def init(self, sizes: tuple[int, ...], *, seed: int) -> Generator:
        """Returns a network at random, with latent vectors at random."""
        outputs = (*itertools.repeat(self.hidden, self.layers), sum(sizes))
        shapes = tuple((output, self.latent + i * self.hidden) for i, output in enumerate(outputs))
        network = scatter(shapes, self.start, jax.random.key(seed))
        return Generator(sizes, draw(seed, self.latent, self.rows), network)

    def fit(self, model: Generator, measurements: Sequence[Measurement], *, seed: int = 0) -> Generator:
        """Returns the network whose rows best explain all measurements, starting from the model's.

        The fit has no randomness of its own, so the seed is not used.
        """
        layout = Layout(model.sizes)
        aims = Aims(jnp.asarray(model.latents), goals.build(layout, measurements))
        best, finite = descend(Problem(self, layout, objective), model.network, aims)
        return replace(model, network=best, degraded=model.degraded or not finite)


def draw(seed: int, latent: int, rows: int) -> NDArray[np.float32]:
    """Returns standard normal latent vectors, a column for each row. They are public: no privacy rests on them."""
    return np.random.default_rng(seed).standard_normal((latent, rows), np.float32)


@partial(jax.jit, static_argnums=(0, 1))
def scatter(shapes: tuple[tuple[int, int], ...], start: float, key: Array) -> Network:
    """Returns layers at random, of these numbers of outputs and inputs; those of the last have deviation `start`."""
    gains = (*itertools.repeat(2**0.5, len(shapes) - 1), start)
    made = zip(shapes, gains, jax.random.split(key, len(shapes)), strict=True)
    return tuple(
        Layer(jax.random.normal(one, shape) * (gain / shape[1] ** 0.5), jnp.zeros(shape[0]))
        for shape, gain, one in made
    )


def generate(layout: Layout, network: Network, latents: Array) -> Stacks:
    """Returns the relaxed rows that a network makes of latent vectors."""
    return tuple(map(softmax, layout.stack(outputs(network, latents), NOWHERE)))


def outputs(network: Network, latents: Array) -> Array:
    """Returns what the last layer gives: a line for each output, a column for each latent vector."""
    *hidden, last = network
    x = latents
    for layer in hidden:
        x = jnp.concatenate([jax.nn.relu(layer.matrix @ x + layer.bias[:, None]), x])
    return last.matrix @ x + last.bias[:, None]


@partial(jax.jit, static_argnums=0)
def reveal(layout: Layout, network: Network, latents: Array) -> Array:
    """Returns the probabilities of the rows, a line for each code."""
    return layout.flatten(generate(layout, network, latents))[layout.lines]


def objective(estimator: GeneratorProjection, layout: Layout, network: Network, aims: Aims) -> Array:
    """Returns chi^2 / (2 n) plus the information penalty."""
    rows = aims.latents.shape[1]
    weights = jnp.full(rows, 1 / rows, aims.latents.dtype)
    return table_loss(layout, generate(layout, network, aims.latents), weights, aims.goals, estimator.penalty)


def fits_together(sizes: tuple[int, ...], latents: NDArray, network: Network) -> bool:
    """Returns whether each layer takes what those before it give, and the last gives a number for each code."""
    if latents.ndim != 2 or not latents.size:
        return False
    width, given = len(latents), 0
    for layer in network:
        width += given
        if layer.matrix.ndim != 2 or layer.matrix.shape[1] != width or layer.bias.shape != layer.matrix.shape[:1]:
            return False
        given = len(layer.bias)
    return given == sum(sizes)
