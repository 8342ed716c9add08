"""The protocols of models and estimators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from anamorph.queries.workload import Workload
from anamorph.table import Table

if TYPE_CHECKING:
    from anamorph.release import Measurement


class Model(Protocol):
    """Public knowledge of a table: it answers workloads, and some models sample rows."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def answers(self, workload: Workload) -> Iterator[NDArray[np.floating]]:
        """Yields the answers of each piece of the workload, as fractions of the rows."""
        ...

    def sample(self, rows: int, *, seed: int, keep: Sequence[tuple[int, ...]] = ()) -> Table:
        """Returns synthetic rows; a model that has none raises ParameterError.

        Some models bring the marginals of the rows over the sets of columns in `keep` near their own answers.
        """
        ...

    def arrays(self) -> dict[str, NDArray]:
        """Returns the arrays that a release keeps."""
        ...

    @classmethod
    def from_arrays(cls, sizes: tuple[int, ...], arrays: dict[str, NDArray]) -> Self:
        """Returns the model that a release kept; refuses arrays that are not one."""
        ...


ModelT = TypeVar("ModelT", bound=Model)


class Estimator(Protocol[ModelT]):
    """Turns measurements into a model, from scratch or from the model of the round before."""

    def init(self, sizes: tuple[int, ...], *, seed: int) -> ModelT: ...
    def fit(self, model: ModelT, measurements: Sequence[Measurement], *, seed: int) -> ModelT: ...
