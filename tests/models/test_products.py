"""Answers and losses of relaxed rows against brute force, whatever the shape of marginals and tiles."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import tallies
from anamorph.curator.tallies import AtLeast, GroupBy, count
from anamorph.models import goals, products, tiles
from anamorph.models.simplex import Layout
from anamorph.queries.marginals import Marginals, slabs
from anamorph.queries.thresholds import Thresholds
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
    "a prefix": GroupBy(SIZES, (1, 3, 4), 2, 11, (30,)),
    "a prefix before the largest": GroupBy(SIZES, (1, 3, 4), 20, 150, (7, 15)),
    "a prefix of the largest": GroupBy(SIZES, (4, 1, 3), 0, 31, (149,)),
    "a small prefix": GroupBy(SIZES, (3, 0, 2), 1, 3, (9,)),
    "one of one": AtLeast(GroupBy(SIZES, (1,), 2, 20), 1),
    "one of two": AtLeast(GroupBy(SIZES, (4, 1), 0, 150), 1),
    "two of two": AtLeast(GroupBy(SIZES, (1, 4), 0, 31), 2),
    "one of three, small": AtLeast(GroupBy(SIZES, (0, 2, 5), 0, 3), 1),
    "two of three, small": AtLeast(GroupBy(SIZES, (2, 5, 0), 0, 2), 2),
    "one of three": AtLeast(GroupBy(SIZES, (1, 3, 0), 0, 31), 1),
    "two of three": AtLeast(GroupBy(SIZES, (4, 5, 3), 0, 150), 2),
    "three of four": AtLeast(GroupBy(SIZES, (0, 1, 2, 3), 0, 3), 3),
    "two of four, a slab": AtLeast(GroupBy(SIZES, (3, 1, 2, 5), 4, 11), 2),
    "one of four, a prefix": AtLeast(GroupBy(SIZES, (3, 4, 0, 5), 20, 110, (2,)), 1),
    "two of three, two fixed": AtLeast(GroupBy(SIZES, (3, 1, 4), 20, 110, (2, 30)), 2),
    "single cells": tallies.Tests(
        SIZES,
        ((0, 4), (3,), (5, 1, 2)),
        np.array([0, 1, 2, 2, 0, 1]),
        np.array([0, 15, 371, 3, 449, 2]),
    ),
    "single thresholds": tallies.Tests(
        SIZES,
        ((0, 4), (5, 1, 2), (3, 1, 5), (4, 1), (2, 3)),
        np.array([4, 0, 1, 2, 2, 0, 3, 1, 3, 4]),
        np.array([31, 0, 371, 2975, 3, 449, 2, 17, 4649, 0]),
        (1, 2, 2, 2, 2),
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


def threshold(matrix, weights, features, least, sizes=SIZES):
    """All thresholds of a set of features: the sum over which of them agree, in double precision."""
    firsts = np.cumsum((0, *sizes[:-1]))
    lines = [matrix[firsts[f] : firsts[f] + sizes[f]] for f in features]
    letters = "abcdef"[: len(features)]
    sums = ",".join(f"{x}r" for x in letters) + f",r->{letters}"
    patterns = [agree for agree in itertools.product((0, 1), repeat=len(features)) if sum(agree) >= least]
    chosen = ([p if a else 1 - p for p, a in zip(lines, agree, strict=True)] for agree in patterns)
    return sum(np.einsum(sums, *factors, weights) for factors in chosen)


def expected(matrix, weights, tally):
    if isinstance(tally, tallies.Tests):
        kinds = [threshold(matrix, weights, f, tally.needed(i)).ravel() for i, f in enumerate(tally.sets)]
        return np.array([kinds[i][at] for i, at in zip(tally.which, tally.positions, strict=True)])
    slab, least = (tally.slab, tally.least) if isinstance(tally, AtLeast) else (tally, len(tally.features))
    spans = tuple(slice(start, start + size) for start, size in zip(slab.starts, slab.shape, strict=True))
    return threshold(matrix, weights, slab.features, least)[spans].ravel()


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


def test_all_shapes_of_tiles_and_the_gather_are_tried():
    wholes = [tally for tally in TALLIES.values() if isinstance(tally, GroupBy)]
    large = [tally for tally in wholes if not products.small(tally)]
    assert 0 < len(large) < len(wholes)
    assert {products.tile_shape(products.tiling(tally)) for tally in large} == set(products.TILES)


@pytest.mark.parametrize("few", [0, 1 << 40])
@pytest.mark.parametrize("name", TALLIES)
def test_tiles_and_single_cells_answer_alike(monkeypatch, few, name):
    """Every block in tiles, however small; then every block cell by cell."""
    monkeypatch.setattr(products, "FEW", few)
    monkeypatch.setattr(products, "FEW_ELSEWHERE", few)
    tally, (matrix, weights) = TALLIES[name], relaxed(5)
    assert isinstance(tally, tallies.Tests) or products.small(tally) == (few > 0)
    found = products.answers(LAYOUT, table_of(matrix), jnp.asarray(weights, jnp.float32), tally)
    np.testing.assert_allclose(found, expected(matrix, weights, tally), atol=1e-6)


def test_small_blocks_are_larger_where_tiles_wait(monkeypatch):
    block = GroupBy(SIZES, (3, 5), 0, 16)
    assert products.FEW < block.cells * 2 <= products.FEW_ELSEWHERE
    for backend, small in (("cpu", False), ("gpu", True)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert products.small(block) == small


@pytest.mark.parametrize("shape", [*products.TILES, (192, 512)])
@pytest.mark.parametrize("name", [name for name, tally in TALLIES.items() if isinstance(tally, GroupBy)])
def test_tiles_cover_a_marginal_once(name, shape):
    """The lines of a tile's cells tell which cells of the marginal they are; the rest have a line of zeros."""
    tally = TALLIES[name]
    matrix = products.tiling(tally)
    assert matrix.rows == max(tally.shape)
    left, right = matrix.lines(LAYOUT, shape, max(1, len(matrix.rest)))
    assert len(left) == len(right) == np.prod(matrix.grid(shape))
    rows, *columns = np.broadcast_arrays(left[:, :, None], *right.swapaxes(0, 1)[:, :, None])
    lines = np.stack([rows, *columns], axis=-1)
    (cells,) = products.gather(LAYOUT, tally, lines.shape[-1])
    values = np.arange(1.0, 1 + tally.cells)
    known = dict(zip(keys_of(cells.lines).tolist(), values, strict=True))
    padded = np.any(lines == LAYOUT.zero, axis=-1)
    tiles = np.zeros(padded.shape, np.float32)
    tiles[~padded] = [known[key] for key in keys_of(lines[~padded]).tolist()]
    assert np.sort(tiles[~padded]).tolist() == values.tolist()
    np.testing.assert_array_equal(matrix.as_values(tiles), values)


def keys_of(lines):
    """A number for each cell, given its lines in any order."""
    return np.sort(lines.astype(np.int64), axis=-1) @ ((LAYOUT.zero + 1) ** np.arange(lines.shape[-1]))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((300, 60, 200), (320, 512)),
        ((60, 200, 300), (320, 512)),
        ((1000, 40, 40), (512, 512)),
        ((1025, 40, 40), (384, 512)),
        ((128, 128, 128), (128, 512)),
        ((8,) * 7, (32, 128)),
        ((300, 60), (32, 128)),
    ],
)
def test_large_slabs_are_answered_in_tiles_as_tall_as_themselves(sizes, shape):
    matrix = products.tiling(GroupBy(sizes, tuple(range(len(sizes))), 0, sizes[0]))
    assert products.answer_shape(matrix) == shape
    assert products.tile_shape(matrix) in products.TILES


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 73, 200])
def test_runs_answer_every_part_once_in_few_sizes(size):
    seen = []

    def doubled(part, other):
        seen.append(len(part))
        return jnp.asarray(2 * part + other)

    found = products.in_runs(doubled, np.arange(size), np.ones(size, int))
    np.testing.assert_array_equal(found, 2 * np.arange(size) + 1)
    assert set(seen) <= set(products.RUNS)
    assert len(seen) <= 7 + 7 + size // 64


def test_large_slabs_are_those_of_brute_force(monkeypatch):
    monkeypatch.setattr(products, "LARGE", 1)
    matrix, weights = relaxed(5)
    for name in ("large tiles", "a prefix before the largest", "three, the largest in the middle", "two of three"):
        found = products.answers(LAYOUT, table_of(matrix), jnp.asarray(weights, jnp.float32), TALLIES[name])
        np.testing.assert_allclose(found, expected(matrix, weights, TALLIES[name]), atol=1e-6)


def measured(asked, seed=1):
    """Noisy answers of tallies, each with a precision."""
    generator = np.random.default_rng(seed)
    for tally in asked:
        precision = np.full(tally.cells, generator.uniform(0.5, 2.0))
        yield goals.Measured(products.simplest(tally), generator.uniform(0, 0.1, tally.cells), precision)


def goal_of(names):
    items = list(measured([TALLIES[name] for name in names]))
    several = [isinstance(item.tally, GroupBy) and len(item.tally.features) > 1 for item in items]
    wholes = [(item.tally, item.values, item.precision[0]) for item, tile in zip(items, several, strict=True) if tile]
    singles = [item for item, tile in zip(items, several, strict=True) if not tile]
    factors = max(1, *(products.conjunction_factors(item.tally) for item in items))
    tiled = (tiles.tiled(LAYOUT, wholes),) if wholes else ()
    return items, goals.Goals(goals.gathered_goals(LAYOUT, singles, factors), tiled)


def naive_loss(table, weights, items, tail=tiles.NO_TAIL):
    """Half of chi^2, and its tail, by sums over which factors of listed cells agree, in plain jax."""
    total = 0.0
    for item in items:
        for queries in products.gather(LAYOUT, item.tally, max(1, products.conjunction_factors(item.tally))):
            chances = table[queries.lines]
            patterns = itertools.product((0, 1), repeat=queries.lines.shape[1])
            wanted = [jnp.array(agree) for agree in patterns if sum(agree) >= queries.least]
            agreeing = sum(jnp.prod(jnp.where(a[:, None], chances, 1 - chances), axis=1) for a in wanted)
            residuals = agreeing @ weights - item.values[queries.places]
            precision = item.precision[queries.places]
            beyond = jnp.maximum(jnp.abs(residuals) - tail.reach / np.sqrt(precision), 0)
            total += 0.5 * jnp.sum(precision * (residuals**2 + tail.weight * beyond**2))
    return total


def loss(table, weights, goal, tail=tiles.NO_TAIL):
    wholes = sum(tiles.tiled_loss(table, weights, tiled, tail) for tiled in goal.tiled)
    return sum(products.gathered_loss(table, weights, gathered, tail) for gathered in goal.gathered) + wholes


SELECTIONS = (
    ("two, the larger last", "more columns than a tile", "a slab of the largest", "a prefix of the largest"),
    ("large tiles", "one large", "more rows than a tile", "two small", "single cells", "two, the larger first"),
    ("four", "a slab", "a thin slab", "three, the largest in the middle"),
    ("single thresholds", "one of three, small", "two of three, small", "two of four, a slab"),
    ("single thresholds", "a prefix", "one of one", "two of two", "a small prefix"),
)
"""No two blocks of one selection have a cell in common: of such a cell, tiles would pull the tail of the mean."""


@pytest.mark.parametrize("names", SELECTIONS)
def test_losses_and_gradients_are_those_of_a_naive_loss(names):
    items, goal = goal_of(names)
    matrix, weights = relaxed(7)
    table, weights = table_of(matrix), jnp.asarray(weights, jnp.float32)
    slopes_of = jax.jit(jax.value_and_grad(lambda *at: 3 * loss(*at), argnums=(0, 1)))
    naive_of = jax.jit(jax.value_and_grad(lambda p, w, tail: 3 * naive_loss(p, w, items, tail), argnums=(0, 1)))
    values, inside = [], LAYOUT.lines
    for tail in (tiles.NO_TAIL, tiles.Tail(2.0, 0.05)):
        value, slopes = slopes_of(table, weights, goal, tail)
        naive, wanted = naive_of(table, weights, tail)
        assert float(value) == pytest.approx(float(naive), rel=1e-5)
        np.testing.assert_allclose(slopes[0][inside], wanted[0][inside], atol=2e-5, rtol=1e-3)
        np.testing.assert_allclose(slopes[1], wanted[1], atol=2e-5, rtol=1e-3)
        values.append(float(value))
    assert values[1] > 1.01 * values[0]


@pytest.mark.parametrize("names", [SELECTIONS[0], *SELECTIONS[2:]])
def test_the_gradient_is_that_of_finite_differences(names):
    items, goal = goal_of(names)
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
    (tiled,) = goal.tiled
    names = ("left", "right", "pivots", "targets", "precision")
    parts = {name: getattr(tiled, name) for name in names}
    filled = replace(
        tiled, **{name: jnp.concatenate([part[: int(tiled.used)], part[:3]]) for name, part in parts.items()}
    )
    assert filled.left.shape[0] == int(filled.used) + 3
    assert np.any(filled.precision[-3:])
    found, wanted = (jax.value_and_grad(tiles.tiled_loss)(table, weights, goal) for goal in (filled, tiled))
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5, atol=1e-6)
    for least in (1, 2, 3):
        empty = goals.gathered_goal(LAYOUT, [], 3, least)
        assert float(products.gathered_loss(table, weights, empty)) == 0
        np.testing.assert_array_equal(products.gather_answers(table, weights, empty.lines, least), 0)


def test_a_workload_of_all_kinds_is_answered_piece_by_piece():
    matrix, weights = relaxed(11)
    workload = Workload((Marginals(SIZES, ((1, 3), (0,), (4, 5))),))
    table = table_of(matrix)
    pieces = [
        products.answers(LAYOUT, table, jnp.asarray(weights, jnp.float32), piece.tally)
        for piece in workload.pieces(300)
    ]
    wanted = [threshold(matrix, weights, f, len(f)).ravel() for f in ((1, 3), (0,), (4, 5))]
    assert len(pieces) > 3
    np.testing.assert_allclose(np.concatenate(pieces), np.concatenate(wanted), atol=1e-6)
    assert math.isclose(sum(map(np.sum, pieces)), 3, rel_tol=1e-4)


def test_gathered_lines_are_those_of_each_cell():
    tally = TALLIES["a slab"]
    (queries,) = products.gather(LAYOUT, tally, 3)
    lines = queries.lines
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


FEW = ((3, 5, 2, 4, 7, 6), (2, 2, 3, 2, 9, 2))
"""Sizes of small tables, on which everything can be listed."""


@st.composite
def blocks(draw):
    """Sizes, a set of one to five features, how many must agree, and a seed."""
    sizes = draw(st.sampled_from(FEW))
    features = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, 5))])
    return sizes, features, draw(st.integers(1, len(features))), draw(st.integers(0, 99))


def small_table(sizes, seed, rows=4):
    """Relaxed rows of other sizes: layout, table, weights, and both in double precision."""
    generator = np.random.default_rng(seed)
    matrix = np.concatenate([generator.dirichlet(np.full(size, 0.5), rows).T for size in sizes])
    weights = generator.dirichlet(np.ones(rows))
    layout = Layout(sizes)
    table = layout.flatten(layout.stack(jnp.asarray(matrix, jnp.float32), 0.0))
    return (layout, table, jnp.asarray(weights, jnp.float32)), matrix, weights


def agreeing_rows(codes, features, least, sizes):
    """For each cell the rows that agree with it in enough features, one by one."""
    cells = itertools.product(*(range(sizes[feature]) for feature in features))
    return np.array([((codes[:, features] == cell).sum(axis=1) >= least).sum() for cell in cells])


@given(blocks(), st.integers(1, 400))
@settings(deadline=None, max_examples=40)
def test_thresholds_on_relaxed_rows_are_expectations_over_draws(block, limit):
    sizes, features, least, seed = block
    model, matrix, weights = small_table(sizes, seed)
    wanted = threshold(matrix, weights, features, least, sizes).ravel()
    workload = Workload((Thresholds(sizes, (features,), least=least),))
    (whole,) = (products.answers(*model, piece.tally) for piece in workload.pieces())
    np.testing.assert_allclose(whole, wanted, atol=2e-6)
    ids = np.random.default_rng(seed).permutation(workload.cells)[:limit]
    (some,) = (products.answers(*model, piece.tally) for piece in workload.by_cell().take(ids).pieces())
    np.testing.assert_allclose(some, wanted[ids], atol=1e-6)


@given(blocks())
@settings(deadline=None, max_examples=40)
def test_thresholds_on_rows_are_counts_of_rows_that_agree(block):
    sizes, features, least, seed = block
    rows = 8
    codes = np.stack([np.random.default_rng([seed, s]).integers(0, s, rows) for s in sizes], axis=1)
    wanted = agreeing_rows(codes, list(features), least, sizes)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    source = TableSource(Table(codes.astype(np.int32), sizes), schema)
    matrix = np.concatenate([np.eye(size)[:, column] for size, column in zip(sizes, codes.T, strict=True)])
    layout = Layout(sizes)
    table = layout.flatten(layout.stack(jnp.asarray(matrix, jnp.float32), 0.0))
    whole = Workload((Thresholds(sizes, (features,), least=least),))
    for workload in (whole, whole.by_cell().take(np.arange(whole.cells))):
        for piece in workload.pieces():
            np.testing.assert_array_equal(count(piece.tally, source), wanted)
            found = products.answers(layout, table, jnp.full(rows, 1 / rows), piece.tally)
            np.testing.assert_allclose(found * rows, wanted, atol=1e-5)


@given(blocks(), st.integers(1, 300), st.booleans())
@settings(deadline=None, max_examples=30)
def test_slabs_are_slices_of_the_whole(block, limit, thresholds):
    sizes, features, least, seed = block
    model, matrix, weights = small_table(sizes, seed)
    least = least if thresholds else len(features)
    wanted = threshold(matrix, weights, features, least, sizes).ravel()
    cut = list(slabs(sizes, features, limit))
    for slab in cut[:: max(1, len(cut) // 6)]:
        tally = AtLeast(slab, least) if thresholds else slab
        found = products.answers(*model, tally)
        np.testing.assert_allclose(found, wanted[slab.offset : slab.offset + slab.cells], atol=2e-6)


@jax.jit
def plain_products(table, weights, lines):
    product = table[lines[:, 0]]
    for factor in range(1, lines.shape[1]):
        product = product * table[lines[:, factor]]
    return product @ weights


@pytest.mark.parametrize("order", range(1, 6))
def test_thresholds_at_their_ends_are_conjunctions_and_disjunctions(order):
    matrix, weights = relaxed(13)
    table, weights = table_of(matrix), jnp.asarray(weights, jnp.float32)
    lines = np.random.default_rng(0).choice(LAYOUT.lines, (500, order))
    every = products.gather_answers(table, weights, lines, order)
    np.testing.assert_array_equal(every, plain_products(table, weights, lines))
    chances = np.asarray(table, np.float64)[lines]
    some = (1 - np.prod(1 - chances, axis=1)) @ np.asarray(weights, np.float64)
    np.testing.assert_allclose(products.gather_answers(table, weights, lines, 1), some, atol=5e-7, rtol=1e-6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.data())
@settings(deadline=None, max_examples=100)
def test_the_tail_is_a_sum_over_which_events_happen(chances, data):
    least = data.draw(st.integers(1, len(chances)))
    patterns = [happens for happens in itertools.product((0, 1), repeat=len(chances)) if sum(happens) >= least]
    wanted = math.fsum(
        math.prod(p if one else 1 - p for p, one in zip(chances, happens, strict=True)) for happens in patterns
    )
    found = products.at_least(chances, least)
    assert found == pytest.approx(wanted, rel=1e-14, abs=1e-300)
    assert 0 <= found <= 1 + 1e-15


def test_the_tail_costs_no_more_than_its_entries():
    """At most k r steps, fewer where r is near to 1 or k: not one for each of 2^k outcomes."""
    for order, least in itertools.product(range(1, 13), range(1, 13)):
        if least <= order:
            made = jax.make_jaxpr(lambda *p, least=least: products.at_least(p, least))(*[0.5] * order)
            assert len(made.eqns) <= 4 * least * (order - least + 1)


def test_small_answers_of_rare_thresholds_keep_their_digits():
    """Nothing cancels: answers far below the precision of 1 are right to six digits."""
    chances = np.array([1e-4, 2e-5, 3e-6, 5e-5, 1e-5], np.float32)
    table, weights = jnp.asarray(chances[:, None]), jnp.ones(1)
    found = float(products.gather_answers(table, weights, np.arange(5)[None], 3)[0])
    assert found == pytest.approx(float(products.at_least(chances.astype(float).tolist(), 3)), rel=1e-6)
    assert found < 1e-12
