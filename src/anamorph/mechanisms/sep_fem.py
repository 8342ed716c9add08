"""sepFEM: FEM with the perturbation of a separator set.

The rows of a round are those of FEM, but for the perturbation: queries of a separator set, which tells any two rows
apart, are added with random weights. For marginals that set is the codes of the columns, one query for each:

    x_j = argmax over rows x of   sum over i < t of q_i(x) + <one-hot(x), noise_j>,    noise_j ~ Laplace(eta) per code.

Privacy and all else: FEM's. Reference: Vietri et al. 2020, algorithms 1 and 3. Deviations: FEM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from anamorph.mechanisms.fem import FEM


@dataclass(frozen=True, kw_only=True)
class SepFEM(FEM):
    """FEM's parameters."""

    name: ClassVar[str] = "sepfem"

    def perturbation(self, generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """Returns what is added to the worth of each code: Laplace noise."""
        return generator.laplace(0.0, self.eta, shape)
