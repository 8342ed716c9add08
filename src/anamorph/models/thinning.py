"""Thinning: one measurement made into two whose noise is independent, so that a fit to one is judged by the other.

A noisy answer is y = x + e with e ~ N(0, sigma^2). With z ~ N(0, sigma^2), drawn anew,

    y + z  and  y - z  have the noise  e + z  and  e - z,  each N(0, 2 sigma^2), and Cov(e + z, e - z) = 0:

being jointly normal, they are independent. For answers p that were made of the first alone, the expected chi^2 of the
second is a constant and what is wanted, the sum of ((p - x) / sigma)^2 / 2. It is made of public numbers, spends
nothing, and the measurement itself is left whole for the fit that counts.

Reference: Neufeld, Dharamshi, Gao & Witten 2024 (data thinning).
Deviations: the curator's noise is a discrete Gaussian, on counts; z is not. Where sigma is below a count or so the two
are not independent, but there is little noise to judge either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anamorph.release import Measurement

Log = tuple[Measurement, ...]


def thinned(measurements: Sequence[Measurement], *, seed: int) -> tuple[Log, Log]:
    """Returns measurements with noise that is independent, and of twice the variance, in the first and the second."""
    generator = np.random.default_rng((seed, 5))
    drawn = [spread(measurement) * generator.standard_normal(measurement.values.size) for measurement in measurements]
    first, second = (
        tuple(
            replace(measurement, values=measurement.values + sign * noise, sigma=measurement.sigma * np.sqrt(2))
            for measurement, noise in zip(measurements, drawn, strict=True)
        )
        for sign in (1, -1)
    )
    return first, second


def spread(measurement: Measurement) -> np.ndarray:
    """Returns the sigma of each answer."""
    pieces = measurement.workload.pieces()
    blocks = ((measurement.sigma[piece.first : piece.first + piece.blocks], piece.tally.cells) for piece in pieces)
    return np.concatenate([np.broadcast_to(sigma, cells) for sigma, cells in blocks])
