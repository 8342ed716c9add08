"""Answers and losses of relaxed rows against brute force, whatever the shape of marginals and tiles."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator import tallies
from anamorph.curator.tallies import GroupBy, count
from anamorph.models import goals, products
from anamorph.models.simplex import Layout
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 31, 2, 16, 150, 6)
ROWS = 5
LAYOUT = Layout(SIZES)

TALLIES = {
    "one small": GroupBy(SIZES, (0,), 0, 3),
    "one large": GroupBy(SIZES, (4,), 0, 150),
    "two small": GroupBy(SIZES, (0, 2), 0, 3),
    "two, the larger last": GroupBy(SIZES, (1, 4), 0, 31),
    "two, the larger first": GroupBy(SIZES, (4, 1), 0, 150),
    "more rows than a tile": GroupBy(SIZES, (4, 3), 0, 150),
    "more columns than a tile": GroupBy(SIZES, (1, 3, 5, 2), 0, 31),
    "large tiles": GroupBy(SIZES, (1, 3, 4), 0, 31),
    "three, the largest in the middle": GroupBy(SIZES, (0, 4, 5), 0, 3),
    "four": GroupBy(SIZES, (0, 1, 2, 3), 0, 3),
    "a slab": GroupBy(SIZES, (1, 3), 7, 30),
    "a slab of the largest": GroupBy(SIZES, (4, 3), 100, 149),
    "a thin slab": GroupBy(SIZES, (1, 4), 30, 31),
    "single cells": tallies.Tests(
        SIZES,
        ((0, 4), (3,), (5, 1, 2)),
        np.array([0, 1, 2, 2, 0, 1]),
        np.array([0, 15, 371, 3, 449, 2]),
    ),
}


def relaxed(seed=0, *, one_hot=False):
    """Random relaxed rows: a line for each code, and weights."""
    generator = np.random.default_rng(seed)
    blocks = []
    for size in SIZES:
        block = generator.dirichlet(np.full(size, 0.3), ROWS).T
        blocks.append((block == block.max(axis=0)).astype(float) if one_hot else block)
    weights = generator.dirichlet(np.ones(ROWS))
    return np.concatenate(blocks), weights


def table_of(matrix):
    return LAYOUT.flatten(LAYOUT.stack(jnp.asarray(matrix, jnp.float32), 0.0))


def marginal(matrix, weights, features):
    """A whole marginal by einsum, in double precision."""
    firsts = np.cumsum((0, *SIZES[:-1]))
    letters = "abcdef"[: len(features)]
    lines = [matrix[firsts[f] : firsts[f] + SIZES[f]] for f in features]
    return np.einsum(",".join(f"{x}r" for x in letters) + f",r->{letters}", *lines, weights)


def expected(matrix, weights, tally):
    if isinstance(tally, GroupBy):
        return marginal(matrix, weights, tally.features)[tally.start : tally.stop].ravel()
    cells = [marginal(matrix, weights, features).ravel() for features in tally.sets]
    return np.array([cells[i][at] for i, at in zip(tally.which, tally.positions, strict=True)])


@pytest.mark.parametrize("name", TALLIES)
def test_answers_are_those_of_brute_force(name):
    matrix, weights = relaxed()
    found = products.answers(LAYOUT, table_of(matrix), jnp.asarray(weights, jnp.float32), TALLIES[name])
    assert found.shape == (TALLIES[name].cells,)
    np.testing.assert_allclose(found, expected(matrix, weights, TALLIES[name]), atol=1e-6)


@pytest.mark.parametrize("name", TALLIES)
def test_answers_of_certain_rows_are_counts(name):
    matrix, _ = relaxed(3, one_hot=True)
    firsts = np.cumsum((0, *SIZES[:-1]))
    codes = np.stack([matrix[f : f + s].argmax(axis=0) for f, s in zip(firsts, SIZES, strict=True)], axis=1)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    source = TableSource(Table(codes.astype(np.int32), SIZES), schema)
    found = products.answers(LAYOUT, table_of(matrix), jnp.full(ROWS, 1 / ROWS), TALLIES[name])
    np.testing.assert_allclose(found * ROWS, count(TALLIES[name], source), atol=1e-5)


def test_both_shapes_of_tiles_and_the_gather_are_tried():
    wholes = [tally for tally in TALLIES.values() if isinstance(tally, GroupBy)]
    large = [tally for tally in wholes if not products.small(tally)]
    assert 0 < len(large) < len(wholes)
    assert {products.tile_shape(products.tiling(tally)) for tally in large} == set(products.TILES)


@pytest.mark.parametrize("shape", products.TILES)
@pytest.mark.parametrize("name", [name for name, tally in TALLIES.items() if isinstance(tally, GroupBy)])
def test_tiles_cover_a_marginal_once(name, shape):
    matrix = products.tiling(TALLIES[name])
    covered = np.zeros((matrix.rows, matrix.columns), int)
    for cut in matrix.cuts(shape):
        covered[cut] += 1
    assert np.all(covered == 1)
    values = np.arange(TALLIES[name].cells, dtype=float)
    np.testing.assert_array_equal(matrix.as_values(matrix.as_matrix(values)), values)


def measured(asked, seed=1):
    """Noisy answers of tallies, each with a precision."""
    generator = np.random.default_rng(seed)
    for tally in asked:
        precision = np.full(tally.cells, generator.uniform(0.5, 2.0))
        yield goals.Measured(tally, generator.uniform(0, 0.1, tally.cells), precision)


def goal_of(names):
    items = list(measured([TALLIES[name] for name in names]))
    wholes = [item for item in items if isinstance(item.tally, GroupBy) and not products.small(item.tally)]
    singles = [item for item in items if not any(item is whole for whole in wholes)]
    factors = max(len(features) for item in items for features in item.tally.sets)
    tiled = tuple(goals.tiled_goal(LAYOUT, wholes, shape, factors - 1) for shape in products.TILES)
    return items, goals.Goals(goals.gathered_goal(LAYOUT, singles, factors), tiled)


def naive_loss(table, weights, items):
    """Half of chi^2 by products over listed cells, in plain jax."""
    total = 0.0
    for item in items:
        factors = max(map(len, item.tally.sets))
        lines = products.gather(LAYOUT, item.tally, factors).lines
        answers = jnp.prod(table[lines], axis=1) @ weights
        total += 0.5 * jnp.sum(item.precision * (answers - item.values) ** 2)
    return total


def loss(table, weights, goal):
    tiles = sum(products.tiled_loss(table, weights, tiled) for tiled in goal.tiled)
    return products.gathered_loss(table, weights, goal.gathered) + tiles


SELECTIONS = (
    ("two, the larger last", "more columns than a tile", "a slab of the largest"),
    ("large tiles", "one large", "more rows than a tile", "two small", "single cells"),
    ("four", "a slab", "a thin slab", "three, the largest in the middle", "two, the larger first"),
)


@pytest.mark.parametrize("names", SELECTIONS)
def test_losses_and_gradients_are_those_of_a_naive_loss(names):
    items, goal = goal_of(names)
    matrix, weights = relaxed(7)
    table, weights = table_of(matrix), jnp.asarray(weights, jnp.float32)
    value, slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(table, weights, goal)
    naive, wanted = jax.jit(jax.value_and_grad(lambda *at: naive_loss(*at, items), argnums=(0, 1)))(table, weights)
    assert float(value) == pytest.approx(float(naive), rel=1e-5)
    inside = LAYOUT.lines
    np.testing.assert_allclose(slopes[0][inside], wanted[0][inside], atol=2e-5, rtol=1e-3)
    np.testing.assert_allclose(slopes[1], wanted[1], atol=2e-5, rtol=1e-3)
    scaled = jax.jit(jax.grad(lambda p: 3 * loss(p, weights, goal)))(table)
    np.testing.assert_allclose(scaled[inside], 3 * np.asarray(slopes[0])[inside], rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences():
    items, goal = goal_of(SELECTIONS[2])
    matrix, weights = relaxed(9)
    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(table_of(matrix), jnp.asarray(weights, jnp.float32), goal)

    def exact(moved_matrix, moved_weights):
        parts = [
            (expected(moved_matrix, moved_weights, item.tally) - item.values) ** 2 @ item.precision for item in items
        ]
        return 0.5 * sum(parts)

    generator = np.random.default_rng(2)
    for _ in range(5):
        along, across = generator.normal(size=matrix.shape), generator.normal(size=weights.shape)
        step = 1e-5
        wanted = exact(matrix + step * along, weights + step * across) - exact(
            matrix - step * along, weights - step * across
        )
        found = np.sum(np.asarray(slopes[0])[LAYOUT.lines] * along) + np.dot(slopes[1], across)
        assert found == pytest.approx(wanted / (2 * step), rel=1e-3, abs=1e-4)


def test_unused_tiles_and_padded_queries_count_nothing():
    _, goal = goal_of(SELECTIONS[0])
    matrix, weights = relaxed(4)
    table, weights = table_of(matrix), jnp.asarray(weights, jnp.float32)
    tiled = max(goal.tiled, key=lambda item: item.left.shape[0])
    filled = products.Tiled(
        *(jnp.concatenate([part, part[:1]]) for part in (tiled.left, tiled.right, tiled.targets, tiled.precision)),
        tiled.used,
    )
    assert filled.left.shape[0] > int(filled.used)
    assert float(products.tiled_loss(table, weights, filled)) == pytest.approx(
        float(products.tiled_loss(table, weights, tiled)), rel=1e-6
    )
    empty = goals.gathered_goal(LAYOUT, [], 3)
    assert float(products.gathered_loss(table, weights, empty)) == 0


def test_a_workload_of_all_kinds_is_answered_piece_by_piece():
    matrix, weights = relaxed(11)
    workload = Workload((Marginals(SIZES, ((1, 3), (0,), (4, 5))),))
    table = table_of(matrix)
    pieces = [
        products.answers(LAYOUT, table, jnp.asarray(weights, jnp.float32), piece.tally)
        for piece in workload.pieces(300)
    ]
    wanted = [marginal(matrix, weights, features).ravel() for features in ((1, 3), (0,), (4, 5))]
    assert len(pieces) > 3
    np.testing.assert_allclose(np.concatenate(pieces), np.concatenate(wanted), atol=1e-6)
    assert math.isclose(sum(map(np.sum, pieces)), 3, rel_tol=1e-4)


def test_gathered_lines_are_those_of_each_cell():
    tally = TALLIES["a slab"]
    lines = products.gather(LAYOUT, tally, 3).lines
    cells = list(itertools.product(range(7, 30), range(16)))
    assert [tuple(line) for line in lines] == [
        (LAYOUT.offsets[1] + a, LAYOUT.offsets[3] + b, LAYOUT.one) for a, b in cells
    ]


def test_measurements_weigh_by_their_precision():
    workload = Workload((Marginals(SIZES, ((0,), (2,))),))
    measurement = Measurement(workload, np.zeros(5), np.array([0.1, 0.2]), 50.0)
    found = [item.precision.tolist() for item in goals.measured([measurement])]
    assert found[0] == pytest.approx([2.0] * 3)
    assert found[1] == pytest.approx([0.5] * 2)
