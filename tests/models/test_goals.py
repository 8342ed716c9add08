"""Goals: every noisy answer is compared once, with its own weight, in shapes that seldom change."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anamorph.models import goals
from anamorph.models.simplex import Layout
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement

SIZES = (3, 31, 2, 16, 150, 6)
SETS = ((0,), (4, 1), (2, 5), (1, 3, 5, 2), (3, 4), (1, 3, 4), (0, 2))
LAYOUT = Layout(SIZES)


def measurement(workload, total=100.0, seed=0):
    generator = np.random.default_rng(seed)
    sigma = generator.uniform(0.01, 0.02, workload.blocks)
    return Measurement(workload, generator.random(workload.cells), sigma, total)


def compared(built):
    """Every query that a goal compares, as (lines of its factors, target, precision), however it is stored."""
    found = []
    for lines, target, precision in zip(*map(np.asarray, vars(built.gathered).values()), strict=True):
        if precision > 0:
            found.append((lines, target, precision))
    for tiled in built.tiled:
        left, right, targets, precision = (
            np.asarray(part) for part in (tiled.left, tiled.right, tiled.targets, tiled.precision)
        )
        for i in range(int(tiled.used)):
            for a, b in np.ndindex(*targets[i].shape):
                lines = np.array([left[i, a], *right[i, :, b]])
                if layout_zero(lines):
                    assert targets[i, a, b] == 0
                else:
                    found.append((lines, targets[i, a, b], precision[i]))
    return Counter((frozenset(lines.tolist()) - {LAYOUT.one}, float(t), float(p)) for lines, t, p in found)


def layout_zero(lines):
    return LAYOUT.zero in lines


def listed(measurements):
    """The same, from the measurements."""
    found = []
    for item in measurements:
        first = 0
        for block, (features, cells) in enumerate(zip(SETS, item.workload.block_cells, strict=True)):
            shape = [SIZES[f] for f in features]
            codes = np.stack(np.unravel_index(np.arange(cells), shape), axis=1) + LAYOUT.offsets[list(features)]
            precision = np.float32(1 / (item.total * item.sigma[block] ** 2))
            values = item.values[first : first + cells].astype(np.float32)
            found += [
                (frozenset(code), float(v), float(precision)) for code, v in zip(codes.tolist(), values, strict=True)
            ]
            first += cells
    return Counter(found)


def test_every_cell_is_compared_once_with_its_weight():
    measurements = [measurement(Workload((Marginals(SIZES, SETS),)), seed=seed) for seed in (1,)]
    built = goals.build(LAYOUT, measurements)
    assert all(int(tiled.used) > 0 for tiled in built.tiled)
    assert compared(built) == listed(measurements)


def test_single_cells_are_compared_in_their_order():
    workload = Workload((Marginals(SIZES, SETS),)).by_cell().take([700, 3, 4650, 1])
    item = measurement(workload)
    built = goals.build(LAYOUT, [item])
    assert built.tiled == ()
    np.testing.assert_allclose(np.asarray(built.gathered.targets)[:4], item.values, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(built.gathered.precision)[:4], 1 / (100 * item.sigma**2), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(built.gathered.precision)[4:], 0)
    np.testing.assert_array_equal(np.asarray(built.gathered.lines)[4:], LAYOUT.zero)


@given(st.integers(0, 10**9))
def test_powers_of_two(size):
    room = goals.power_of_two(size)
    assert room & (room - 1) == 0
    assert room >= max(size, 1)
    assert room == 1 or room < 2 * size


@pytest.mark.parametrize(("cells", "room"), [(1, 256), (256, 256), (257, 512), (512, 512), (700, 1024)])
def test_the_room_for_single_cells_is_a_power_of_two(cells, room):
    workload = Workload((Marginals(SIZES, ((4, 1),)),)).by_cell().take(np.arange(cells))
    assert goals.build(LAYOUT, [measurement(workload)]).gathered.lines.shape == (room, 2)
