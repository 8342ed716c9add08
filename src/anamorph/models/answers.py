"""Measured answers as a model: no rows, only what was measured, and what follows from it by summation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import GroupBy, Tally, marginal_cells
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

    def sample(self, rows: int, *, seed: int) -> Table:
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


@dataclass(frozen=True, eq=False)
class Answers:
    """Noisy marginals as they were measured."""

    sizes: tuple[int, ...]
    marginals: dict[tuple[int, ...], NDArray[np.float64]]
    """The noisy fractions of each marginal, in C order."""
    sigma: dict[tuple[int, ...], float]
    """The standard deviation of each of them."""

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields what was measured, or sums of it; refuses what does not follow from it."""
        for piece in workload.pieces():
            yield self.answer(piece.tally)

    def answer(self, tally: Tally) -> NDArray[np.float64]:
        """Returns the answers of one tally."""
        if isinstance(tally, GroupBy):
            return self.marginal(tally.features)[tally.offset : tally.offset + tally.cells]
        values = np.zeros(tally.cells)
        for index, features in enumerate(tally.sets):
            mine = tally.which == index
            values[mine] = self.marginal(features)[tally.positions[mine]]
        return values

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
            raise ParameterError(
                "the workload must be one that was measured: this release holds noisy answers, not a model of rows"
            )
        return min(covering, key=lambda over: self.sigma[over] ** 2 * marginal_cells(self.sizes, over))

    def sample(self, rows: int, *, seed: int) -> Table:
        """Refuses."""
        raise no_rows()

    def arrays(self) -> dict[str, NDArray]:
        """Returns what a release keeps: features, values and sigma of each marginal."""
        kept: dict[str, NDArray] = {}
        for index, (features, values) in enumerate(self.marginals.items()):
            kept[f"features.{index}"] = np.array(features, np.int64)
            kept[f"values.{index}"] = values
            kept[f"sigma.{index}"] = np.array([self.sigma[features]])
        return kept

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model of a release; refuses marginals that the schema does not have."""
        marginals, sigma = {}, {}
        for index in range(-(-len(arrays) // 3)):
            features = tuple(arrays[f"features.{index}"].tolist())
            values = arrays[f"values.{index}"]
            known = all(0 <= feature < len(sizes) for feature in features)
            if not known or values.shape != (marginal_cells(sizes, features),) or not np.all(np.isfinite(values)):
                raise CorruptionError("the release's answers must be marginals of its schema; they are not")
            marginals[features] = values
            sigma[features] = float(arrays[f"sigma.{index}"][0])
        return cls(sizes, marginals, sigma)


def from_measurements(sizes: tuple[int, ...], measurements: Sequence[Measurement]) -> Answers:
    """Returns the model of marginals that were measured whole, by block or cell by cell."""
    marginals: dict[tuple[int, ...], NDArray[np.float64]] = {}
    sigma: dict[tuple[int, ...], float] = {}
    for measurement in measurements:
        first = 0
        for piece in measurement.workload.pieces():
            tally = piece.tally
            if not isinstance(tally, GroupBy):
                raise ParameterError("measurements must be of whole marginals")
            whole = marginals.setdefault(tally.features, np.zeros(marginal_cells(sizes, tally.features)))
            whole[tally.offset : tally.offset + tally.cells] = measurement.values[first : first + tally.cells]
            sigma[tally.features] = float(measurement.sigma[piece.first])
            first += tally.cells
    return Answers(sizes, marginals, sigma)


def no_rows() -> ParameterError:
    """Returns the refusal of a model without rows."""
    return ParameterError("this release holds answers, not rows: use a mechanism that makes rows, such as rap")
