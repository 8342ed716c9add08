"""Goals: every noisy answer is compared once, with its own weight, in shapes that seldom change."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anamorph.errors import ParameterError
from anamorph.models import goals
from anamorph.models.simplex import Layout
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
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
    for gathered in built.gathered:
        columns = map(np.asarray, (gathered.lines, gathered.targets, gathered.precision))
        found += [query for query in zip(*columns, strict=True) if query[2] > 0]
    for tiled in built.tiled:
        windows, left, right, pivots, targets, precision = (
            np.asarray(part)
            for part in (tiled.lines, tiled.left, tiled.right, tiled.pivots, tiled.targets, tiled.precision)
        )
        assert not np.any(precision[int(tiled.used) :])
        assert not np.any(targets[precision == 0])
        for i, a, b in np.argwhere(precision > 0):
            lines = np.array([windows[left[i], a], windows[right[i], b], *pivots[i]])
            found.append((lines, targets[i, a, b], precision[i, a, b]))
    assert not any(LAYOUT.zero in lines for lines, *_ in found)
    return Counter((frozenset(lines.tolist()) - {LAYOUT.one}, float(t), float(p)) for lines, t, p in found)


def listed(measurements):
    """The same, from the measurements."""
    found = []
    for item in measurements:
        first = 0
        for block, (features, cells) in enumerate(zip(SETS, item.workload.parts[0].block_cells, strict=True)):
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
    assert len(built.tiled) == 1
    assert compared(built) == listed(measurements)


def test_tiles_that_suit_what_is_measured_compare_the_same():
    measurements = [measurement(Workload((Marginals(SIZES, SETS),)))]
    built, last = (goals.build(LAYOUT, measurements, last=last) for last in (False, True))
    assert built.tiled[0].targets.shape != last.tiled[0].targets.shape
    assert compared(last) == compared(built) == listed(measurements)


def test_marginals_of_one_feature_small_scattered_ones_and_single_cells_are_gathered():
    workload = Workload((Marginals(SIZES, SETS),))
    built = goals.build(LAYOUT, [measurement(workload), measurement(workload.by_cell().take([700, 3, 4650, 1]))])
    scattered = sum(math.prod(SIZES[f] for f in features) for features in ((0,), (0, 2), (2, 5)))
    assert np.count_nonzero(built.gathered[0].precision) == scattered + 4
    assert np.count_nonzero(built.tiled[0].precision) == workload.cells - scattered


def test_factors_are_those_of_what_is_gathered_if_nothing_more_will_be():
    layout = Layout((2,) * 16)
    singles, pairs = (Marginals(layout.sizes, tuple(itertools.combinations(range(16), order))) for order in (1, 2))
    items = [measurement(Workload((singles, pairs)))]
    built, last = (goals.build(layout, items, last=last) for last in (False, True))
    assert (built.gathered[0].lines.shape[1], last.gathered[0].lines.shape[1]) == (2, 1)
    np.testing.assert_array_equal(last.gathered[0].targets, built.gathered[0].targets)


def test_small_marginals_that_share_tiles_are_tiled():
    layout = Layout((2,) * 16)
    pairs = Workload((Marginals(layout.sizes, tuple(itertools.combinations(range(16), 2))),))
    built = goals.build(layout, [measurement(pairs)])
    assert not np.any(built.gathered[0].precision)
    assert int(built.tiled[0].used) == 1
    few = goals.build(layout, [measurement(Workload((Marginals(layout.sizes, ((0, 1), (2, 3))),)))])
    assert few.tiled == ()
    assert np.count_nonzero(few.gathered[0].precision) == 8


def test_single_cells_are_compared_in_their_order():
    workload = Workload((Marginals(SIZES, SETS),)).by_cell().take([700, 3, 4650, 1])
    item = measurement(workload)
    built = goals.build(LAYOUT, [item])
    assert built.tiled == ()
    (gathered,) = built.gathered
    np.testing.assert_allclose(np.asarray(gathered.targets)[:4], item.values, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(gathered.precision)[:4], 1 / (100 * item.sigma**2), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(gathered.precision)[4:], 0)
    np.testing.assert_array_equal(np.asarray(gathered.lines)[4:], LAYOUT.zero)


@given(st.integers(0, 10**9))
def test_powers_of_two(size):
    room = goals.power_of_two(size)
    assert room & (room - 1) == 0
    assert room >= max(size, 1)
    assert room == 1 or room < 2 * size


@pytest.mark.parametrize(("cells", "room"), [(1, 256), (256, 256), (257, 512), (512, 512), (700, 1024)])
def test_the_room_for_single_cells_is_a_power_of_two(cells, room):
    workload = Workload((Marginals(SIZES, ((4, 1),)),)).by_cell().take(np.arange(cells))
    assert goals.build(LAYOUT, [measurement(workload)]).gathered[0].lines.shape == (room, 2)


@pytest.mark.parametrize(("cells", "room"), [(1, 256), (257, 512), (700, 1024)])
def test_thresholds_have_goals_of_their_own_kind(cells, room):
    pairs, triples = Thresholds(SIZES, ((4, 1), (3, 4)), least=1), Thresholds(SIZES, ((1, 3, 4),), least=2)
    both = Thresholds(SIZES, ((1, 5),), least=2)
    parts = [Workload((part,)).by_cell().take(np.arange(cells)) for part in (triples, pairs)]
    items = [measurement(part, seed=seed) for seed, part in enumerate(parts)]
    built = goals.build(LAYOUT, [*items, measurement(Workload((both,)).by_cell().take([7, 3]))])
    assert [(goal.lines.shape, goal.least) for goal in built.gathered] == [
        ((256, 2), 2),
        ((room, 2), 1),
        ((room, 3), 2),
    ]
    for goal, item in zip(built.gathered[1:], items[::-1], strict=True):
        np.testing.assert_allclose(np.asarray(goal.targets)[:cells], item.values, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(goal.precision)[:cells], 1 / (100 * item.sigma**2), rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(goal.precision)[cells:], 0)
        np.testing.assert_array_equal(np.asarray(goal.lines)[cells:], LAYOUT.zero)
    assert np.count_nonzero(built.gathered[0].precision) == 2


def test_the_goal_of_cells_is_there_even_if_only_thresholds_are_measured():
    built = goals.build(LAYOUT, [measurement(Workload((Thresholds(SIZES, ((4, 1, 0),), least=2),)))])
    assert [(goal.lines.shape, goal.least) for goal in built.gathered] == [((256, 1), 1), ((16384, 3), 2)]
    assert not np.any(built.gathered[0].precision)
    assert built.tiled == ()


@pytest.mark.parametrize("by_cell", [False, True])
@pytest.mark.parametrize("limit", [100, 10**6])
def test_a_block_of_thresholds_is_compared_cell_by_cell(by_cell, limit):
    whole = Workload((Thresholds(SIZES, ((4, 1), (0, 2, 5)), least=1),), limit=limit)
    whole = whole.by_cell() if by_cell else whole
    sigma = np.full(whole.blocks, 0.01)
    values = np.random.default_rng(0).random(whole.cells)
    listed = whole.by_cell().take(np.arange(whole.cells))
    found = goals.build(LAYOUT, [Measurement(whole, values, sigma, 10.0)])
    singly = goals.build(LAYOUT, [Measurement(listed, values, np.full(listed.blocks, 0.01), 10.0)])
    assert jax.tree.structure(found) == jax.tree.structure(singly)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(singly), strict=True):
        np.testing.assert_array_equal(one, other)


def test_too_many_thresholds_are_refused():
    sizes = (1025, 1024)
    workload = Workload((Thresholds(sizes, ((0, 1),), least=1),))
    with pytest.raises(ParameterError, match="measure the marginals instead"):
        goals.build(Layout(sizes), [measurement(workload)])
    goals.check_thresholds(goals.measured([measurement(workload.measured())]))


def test_no_measurements_are_refused():
    with pytest.raises(ParameterError, match="measurements must be at least one"):
        goals.build(LAYOUT, [])
