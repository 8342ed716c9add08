"""Bounds on the errors of marginals that were not measured, as a mechanism knows them when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import CorruptionError
from anamorph.models.junction import Clique, clique_of

BOUNDED, BOUNDS = "bounded", "bounds"
"""The arrays of a release that hold error bounds: the columns of each marginal, and the numbers of its tail."""


class Tail(NamedTuple):
    """What the L1 error of a marginal hardly exceeds, as a fraction of the rows.

    It is base + normal sqrt(2 l) + exponential l, with l = ln(2 / (portion failure)).
    """

    base: float
    normal: float
    """The standard deviation of the Gaussian part."""
    exponential: float
    """The scale of the exponential part."""
    portion: float
    """The part of the failure probability that is meant for this bound, where several hold at once."""

    def at(self, failure: float) -> float:
        """Returns the bound that fails with at most this probability."""
        level = math.log(2 / (self.portion * failure))
        return self.base + self.normal * math.sqrt(2 * level) + self.exponential * level

    @property
    def sound(self) -> bool:
        """Whether it is one that a mechanism may have made."""
        return all(map(math.isfinite, self)) and min(self.normal, self.exponential) >= 0 and 0 < self.portion <= 1


def bounds_of(sizes: tuple[int, ...], arrays: Mapping[str, NDArray]) -> dict[Clique, Tail]:
    """Returns the error bounds of a release; refuses any but one for each of some sets of its columns."""
    if BOUNDED not in arrays and BOUNDS not in arrays:
        return {}
    columns, numbers = arrays[BOUNDED], arrays[BOUNDS]
    shaped = numbers.ndim == 2 and numbers.shape[1] == len(Tail._fields) and numbers.dtype == np.float64
    if not shaped or columns.dtype != np.bool_ or columns.shape != (len(numbers), len(sizes)):
        raise unbounded()
    cliques = [clique_of(sizes, np.flatnonzero(line).tolist()) for line in columns]
    found = {clique: Tail(*line) for clique, line in zip(cliques, numbers.tolist(), strict=True)}
    if len(found) != len(cliques) or not all(found) or not all(tail.sound for tail in found.values()):
        raise unbounded()
    return found


def unbounded() -> CorruptionError:
    """Returns the refusal of arrays that are not error bounds."""
    return CorruptionError("the model's bounds must be finite numbers, once for each of some marginals; they are not")
