"""Measured answers as a model: no rows, only what was measured, and what follows from it by summation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import (
    AtLeast,
    GroupBy,
    RowFunction,
    Special,
    Tally,
    Tests,
    is_set,
    marginal_cells,
)
from anamorph.errors import CorruptionError, ParameterError
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.table import Table


@dataclass(frozen=True, eq=False)
class Zero:
    """The model that answers 0 to everything: the baseline of the papers (All-0)."""

    sizes: tuple[int, ...]

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields zeros."""
        for piece in workload.pieces():
            yield np.zeros(piece.tally.cells, np.float32)

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Refuses."""
        raise no_rows()

    def arrays(self) -> dict[str, NDArray]:
        """Returns nothing: there is nothing to keep."""
        return {}

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model; refuses arrays, of which it has none."""
        if arrays:
            raise CorruptionError("the model must hold no arrays; it does")
        return cls(sizes)


Block = tuple[tuple[int, ...], int]
"""Features, and how many of them must agree."""


class Noisy(NamedTuple):
    """Noisy fractions, in C order, and the standard deviation of each."""

    values: NDArray[np.float64]
    sigma: float


@dataclass(frozen=True, eq=False)
class Answers:
    """Noisy marginals as they were measured, and noisy thresholds."""

    sizes: tuple[int, ...]
    marginals: dict[tuple[int, ...], NDArray[np.float64]]
    """The noisy fractions of each marginal, in C order."""
    sigma: dict[tuple[int, ...], float]
    """The standard deviation of each of them."""
    thresholds: dict[Block, Noisy] = field(default_factory=dict)
    """What was measured for blocks with which fewer than all features must agree."""

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields what was measured, or sums of it; refuses what does not follow from it."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> NDArray[np.float64]:
        """Returns the answers of one tally."""
        if isinstance(tally, RowFunction | Special):
            raise not_measured()
        if isinstance(tally, Tests):
            values = np.zeros(tally.cells)
            for index, features in enumerate(tally.sets):
                mine = tally.which == index
                values[mine] = self.block(features, tally.needed(index))[tally.positions[mine]]
            return values
        slab, least = slab_of(tally)
        return self.block(slab.features, least)[slab.offset : slab.offset + slab.cells]

    def block(self, features: tuple[int, ...], least: int) -> NDArray[np.float64]:
        """Returns the answers of a whole block: of cells with which at least `least` features must agree."""
        if least == len(features):
            return self.marginal(features)
        if (features, least) in self.thresholds:
            return self.thresholds[features, least].values
        return self.threshold(features, least)

    def threshold(self, features: tuple[int, ...], least: int) -> NDArray[np.float64]:
        """Returns thresholds as sums of cells of one measured marginal.

        Each is a sum of sub-marginals with signs; taken from one marginal their noise cancels as the cells do.
        """
        over = self.best(features)
        alone = replace(self, marginals={over: self.marginals[over]})
        whole = AtLeast(GroupBy(self.sizes, features, 0, self.sizes[features[0]]), least)
        return whole.broadcast(alone.answer, np.float64)

    def marginal(self, features: tuple[int, ...]) -> NDArray[np.float64]:
        """Returns a marginal, summed from the measured one that gives it with the least noise."""
        over = self.best(features)
        if over == features:
            return self.marginals[over]
        shaped = self.marginals[over].reshape([self.sizes[feature] for feature in over])
        summed = shaped.sum(axis=tuple(i for i, feature in enumerate(over) if feature not in features))
        kept = [feature for feature in over if feature in features]
        return summed.transpose([kept.index(feature) for feature in features]).ravel()

    def best(self, features: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the measured marginal from which another follows with the least variance."""
        covering = [over for over in self.marginals if set(features) <= set(over)]
        if not covering:
            raise not_measured()
        return min(covering, key=lambda over: self.sigma[over] ** 2 * marginal_cells(self.sizes, over))

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Refuses."""
        raise no_rows()

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps: features, values and sigma of each block, and for thresholds the least."""
        kept: dict[str, NDArray] = {}
        blocks = {(features, len(features)): Noisy(v, self.sigma[features]) for features, v in self.marginals.items()}
        for index, ((features, least), (values, sigma)) in enumerate((blocks | self.thresholds).items()):
            kept[f"features.{index}"] = np.array(features, np.int64)
            kept[f"values.{index}"] = values
            kept[f"sigma.{index}"] = np.array([sigma])
            if least < len(features):
                kept[f"least.{index}"] = np.array([least], np.int64)
        return kept

    @classmethod
    def of(cls, sizes: tuple[int, ...], blocks: dict[Block, Noisy]) -> Self:
        """Returns the model of measured blocks, marginals told from thresholds."""
        marginals = {features: noisy for (features, least), noisy in blocks.items() if least == len(features)}
        return cls(
            sizes,
            {features: noisy.values for features, noisy in marginals.items()},
            {features: noisy.sigma for features, noisy in marginals.items()},
            {block: noisy for block, noisy in blocks.items() if block[1] < len(block[0])},
        )

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses blocks that the schema does not have."""
        blocks: dict[Block, Noisy] = {}
        count = sum(not name.startswith("least.") for name in arrays)
        for index in range(-(-count // 3)):
            features = tuple(arrays[f"features.{index}"].tolist())
            values, sigma = arrays[f"values.{index}"], float(arrays[f"sigma.{index}"][0])
            least = int(arrays.get(f"least.{index}", [len(features)])[0])
            known = is_set(features, sizes) and 1 <= least <= len(features) and 0 < sigma < math.inf
            if not known or values.shape != (marginal_cells(sizes, features),) or not np.all(np.isfinite(values)):
                raise foreign()
            blocks[features, least] = Noisy(values, sigma)
        found = cls.of(sizes, blocks)
        if len(found.arrays()) != len(arrays):
            raise foreign()
        return found


def slab_of(tally: GroupBy | AtLeast) -> tuple[GroupBy, int]:
    """Returns the slab of a tally, and how many of its features must agree."""
    return (tally.slab, tally.least) if isinstance(tally, AtLeast) else (tally, len(tally.features))


def from_measurements(sizes: tuple[int, ...], measurements: Sequence[Measurement]) -> Answers:
    """Returns the model of marginals and thresholds that were measured whole, by block or cell by cell."""
    blocks: dict[Block, Noisy] = {}
    for measurement in measurements:
        first = 0
        for piece in measurement.workload.pieces():
            if not isinstance(piece.tally, GroupBy | AtLeast):
                raise ParameterError("measurements must be of whole marginals or thresholds")
            slab, least = slab_of(piece.tally)
            block = (slab.features, least)
            whole = blocks[block].values if block in blocks else np.zeros(marginal_cells(sizes, slab.features))
            whole[slab.offset : slab.offset + slab.cells] = measurement.values[first : first + slab.cells]
            blocks[block] = Noisy(whole, float(measurement.sigma[piece.first]))
            first += slab.cells
    return Answers.of(sizes, blocks)


def not_measured() -> ParameterError:
    """Returns the refusal of what does not follow from what was measured."""
    return ParameterError(
        "the workload must be one that was measured: this release holds noisy answers, not a model of rows"
    )


def no_residuals() -> ParameterError:
    """Returns the refusal of a model to answer, or to be fitted to, residuals or tests of numbers."""
    return ParameterError(
        "queries must be of marginals, thresholds or functions: this model has no residuals, and no native numbers"
    )


def foreign() -> CorruptionError:
    """Returns the refusal of arrays that are not measured blocks."""
    return CorruptionError("the release's answers must be marginals of its schema; they are not")


def no_rows() -> ParameterError:
    """Returns the refusal of a model without rows."""
    return ParameterError("this release holds answers, not rows: use a mechanism that makes rows, such as rap")
