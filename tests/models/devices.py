"""What `test_devices.py` runs in a process of its own, with three devices: tiles that they share, and steps of fits."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import jax
import numpy as np
from fits import COMPILED, chi_squared, measure
from test_tiles import SLOPES, check_like, dense, table_of

from anamorph.curator.tallies import GroupBy
from anamorph.models import shrinking, tiles
from anamorph.models.relaxed import RelaxedProjection
from anamorph.models.simplex import Layout
from anamorph.models.tiles import Share, Tail
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload

SIZES = (6, 40, 3, 7)
SINGLES = Marginals(SIZES, tuple((feature,) for feature in range(4)))
PAIRS = Marginals(SIZES, tuple(itertools.combinations(range(4), 2)))
TRIPLES = Marginals(SIZES, ((0, 1, 2), (1, 2, 3)))
ESTIMATOR = shrinking.ShrinkingProjection(rows=32)


def shared(least):
    """Tiles of at least so many cells are shared."""
    return mock.patch.object(tiles, "SHARED", least)


def goal_of(sets, sizes=SIZES):
    generator = np.random.default_rng(0)
    tallies = [GroupBy(sizes, features, 0, sizes[features[0]]) for features in sets]
    items = [(tally, generator.uniform(0.001, 0.1, tally.cells), 1.5) for tally in tallies]
    with shared(0):
        return Layout(sizes), items, tiles.tiled(Layout(sizes), items)


def losses_and_gradients_are_those_of_dense_sums():
    for sets in (((0, 1),), (*PAIRS.sets, *TRIPLES.sets), ((0, 1, 2, 3),)):
        layout, items, goal = goal_of(sets)
        table, weights = table_of(layout)
        assert goal.devices == 3
        assert {len(part.sharding.device_set) for part in (goal.targets, goal.pivots)} == {3}
        for tail in ((0.0, 1.0), (3.0, 0.02)):
            check_like(layout, SLOPES(table, weights, goal, Tail(*tail)), dense(layout, table, weights, items, tail))


def shares_are_the_whole_together():
    layout, items, goal = goal_of((*PAIRS.sets, *TRIPLES.sets, (0, 1, 2, 3)))
    table, weights = table_of(layout)
    assert int(goal.used) > 12
    parts = [SLOPES(table, weights, goal, Tail(), Share(part, 4)) for part in range(4)]
    mean = jax.tree.map(lambda *each: sum(each) / 4, *parts)
    check_like(layout, mean, dense(layout, table, weights, items))


def noisy(*parts, sigma=1e-3):
    """Measurements of a table whose columns depend on each other."""
    workload, generator = Workload(parts), np.random.default_rng(1)
    joint = generator.dirichlet(np.full(math.prod(SIZES), 0.02)).reshape(SIZES)
    blocks = [joint.sum(axis=tuple(set(range(4)) - set(features))) for part in parts for features in part.sets]
    values = np.concatenate([block.ravel() for block in blocks])
    return measure(workload, values + sigma * generator.standard_normal(values.size), sigma=sigma, total=1e4)


def steps_are_the_same_but_for_rounding():
    log, layout, found = (noisy(SINGLES, PAIRS),), Layout(SIZES), []
    for least in (0, math.inf):
        with shared(least):
            aims = ESTIMATOR.aims(layout, log)
        begin = tiles.beside(aims, ESTIMATOR.begin(layout, log, 0))
        state = shrinking.advance(layout, shrinking.start(begin), aims, 4)
        before = len(COMPILED)
        state = shrinking.advance(layout, state, aims, 5)
        assert len(COMPILED) == before, "compiled once"
        found.append((float(state.loss), *map(np.asarray, shrinking.reveal(layout, state.point))))
    for shared_ones, alone in zip(*found, strict=True):
        np.testing.assert_allclose(shared_ones, alone, rtol=1e-3, atol=1e-6)


def rows_go_on_from_one_device_to_many_and_back():
    estimator = RelaxedProjection(rows=16, steps=40, rate=0.05, simplex="softmax")
    model, log, left = estimator.init(SIZES, seed=0), (), []
    for least, part in ((math.inf, SINGLES), (math.inf, PAIRS), (0, TRIPLES), (math.inf, PAIRS)):
        log += (noisy(part),)
        with shared(least):
            model = estimator.fit(model, log)
        left.append(chi_squared(model, log[-1:]))
    assert np.all(np.isfinite(left))
    assert left[-1] < left[1]


if __name__ == "__main__":
    assert jax.device_count() == 3
    losses_and_gradients_are_those_of_dense_sums()
    shares_are_the_whole_together()
    steps_are_the_same_but_for_rounding()
    rows_go_on_from_one_device_to_many_and_back()
    print("all as on one device")
