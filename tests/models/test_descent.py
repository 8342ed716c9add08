"""Where a descent ends by itself."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import pytest

from anamorph.models.descent import WARM, Problem, advance, start
from anamorph.models.simplex import Layout


class Settings(NamedTuple):
    steps: int
    rate: float
    tolerance: float


def flat(_settings, _layout, point, level):
    """A loss that no step changes."""
    return jnp.sum(0 * point) + level


def steps_taken(tolerance, level, steps=3 * WARM):
    problem = Problem(Settings(steps, 0.1, tolerance), Layout((2,)), flat)
    return int(advance(problem, start(problem, jnp.zeros(3)), jnp.float32(level), steps).step)


@pytest.mark.parametrize("tolerance", [1e-7, 0.5])
def test_a_loss_that_stays_ends_a_descent(tolerance):
    assert steps_taken(tolerance, 1.0) == WARM + 1


def test_without_tolerance_two_equal_losses_end_nothing():
    assert steps_taken(0.0, 1.0) == 3 * WARM


def test_nothing_is_left_below_a_loss_of_0():
    assert steps_taken(0.0, 0.0) == WARM + 1
