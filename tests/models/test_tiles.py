"""Tiles: every measured cell stands in one tile, and losses and gradients are those of dense sums, however packed."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.curator.tallies import GroupBy
from anamorph.models import tiles
from anamorph.models.annealing import Extended
from anamorph.models.simplex import Layout
from anamorph.models.tiles import Share, Tail
from anamorph.queries.marginals import slabs

ROWS = 3
SLOPES = jax.value_and_grad(tiles.tiled_loss, argnums=(0, 1))

sizes_of_all_kinds = st.lists(st.integers(1, 9) | st.integers(1, 200), min_size=1, max_size=7).map(tuple)


@st.composite
def layouts(draw, least=1):
    """Layouts of at least so many features; of some, the last features are bands of numbers."""
    sizes = draw(sizes_of_all_kinds.filter(lambda sizes: len(sizes) >= least))
    numbers = draw(st.integers(0, len(sizes) - 1))
    return Extended(sizes[: len(sizes) - numbers], sizes[len(sizes) - numbers :]) if numbers else Layout(sizes)


@st.composite
def some_features(draw, sizes):
    """A set of two to five features, in any order, that has few cells."""
    ordered, chosen = draw(st.permutations(range(len(sizes)))), []
    for feature in ordered[: draw(st.integers(2, 5))]:
        if len(chosen) < 2 or math.prod(sizes[other] for other in (*chosen, feature)) <= 5000:
            chosen.append(feature)
    return tuple(chosen)


@st.composite
def some_slab(draw, sizes, features):
    """A whole marginal, or a part of it: some leading codes fixed, a range of the next."""
    fixed = draw(st.sampled_from((0, 0, 0, *range(len(features)))))
    prefix = tuple(draw(st.integers(0, sizes[feature] - 1)) for feature in features[:fixed])
    size = sizes[features[fixed]]
    start = draw(st.just(0) | st.integers(0, size - 1))
    return GroupBy(sizes, features, start, draw(st.just(size) | st.integers(start + 1, size)), prefix)


@st.composite
def measured(draw, most=4):
    """A layout, and marginals of different sets of features: each with noisy answers and their precision."""
    layout = draw(layouts(2))
    sizes = layout.widths
    sets = draw(st.lists(some_features(sizes), min_size=1, max_size=most, unique_by=frozenset))
    chosen = [draw(some_slab(sizes, features)) for features in sets]
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    return layout, [
        (tally, generator.uniform(0.001, 0.1, tally.cells), float(generator.uniform(0.5, 2))) for tally in chosen
    ]


def table_of(layout, seed=0):
    """Random relaxed rows, padded, and weights."""
    generator = np.random.default_rng(seed)
    table = np.zeros((layout.end, ROWS), np.float32)
    for offset, size in zip(layout.offsets, layout.widths, strict=True):
        table[offset : offset + size] = generator.dirichlet(np.full(size, 0.5), ROWS).T
    table[layout.one] = 1
    return jnp.asarray(table), jnp.asarray(generator.dirichlet(np.ones(ROWS)), jnp.float32)


def keys_of(layout, lines):
    """A number for each cell, given its lines: the same however they are ordered, and however many are of ones."""
    ordered = np.sort(np.concatenate([lines, np.full((len(lines), 5 - lines.shape[1]), layout.one)], axis=1), axis=1)
    assert np.all((np.diff(ordered, axis=1) > 0) | (ordered[:, 1:] == layout.one))
    return ordered @ (layout.end ** np.arange(5))


def cells_listed(layout, items):
    """Every cell of measured marginals, one after the other: its key, noisy answer and precision."""
    keys, values, precision = [], [], []
    for tally, noisy, weight in items:
        codes = np.array(list(np.ndindex(*tally.shape)))
        keys.append(keys_of(layout, codes + tally.starts + layout.offsets[list(tally.features)]))
        values.append(noisy)
        precision.append(np.full(tally.cells, weight))
    return map(np.concatenate, (keys, values, precision))


def dense(layout, table, weights, items, tail=(0.0, 1.0)):
    """The loss, and its gradient by lines and by weights, of sums over rows in double precision."""
    table, weights = np.asarray(table, np.float64), np.asarray(weights, np.float64)
    loss, by_lines, by_weights = 0.0, np.zeros_like(table), np.zeros_like(weights)
    for tally, values, precision in items:
        firsts = layout.offsets[list(tally.features)] + tally.starts
        spans = [slice(first, first + size) for first, size in zip(firsts, tally.shape, strict=True)]
        letters = "abcde"[: len(spans)]
        terms, factors = [*(f"{letter}r" for letter in letters), "r"], [*(table[span] for span in spans), weights]
        answers = np.einsum(f"{','.join(terms)}->{letters}", *factors, optimize=True)
        residuals = answers - values.reshape(tally.shape)
        beyond = np.sign(residuals) * np.maximum(np.abs(residuals) - tail[1] / np.sqrt(precision), 0)
        loss += 0.5 * np.sum(precision * (residuals**2 + tail[0] * beyond**2))
        pull = precision * (residuals + tail[0] * beyond)
        for i, term in enumerate(terms):
            others = ",".join([letters, *terms[:i], *terms[i + 1 :]])
            slope = np.einsum(f"{others}->{term}", pull, *factors[:i], *factors[i + 1 :], optimize=True)
            if term == "r":
                by_weights += slope
            else:
                by_lines[spans[i]] += slope
    return loss, by_lines, by_weights


def every_line(layout):
    """The line of every code: the lines of ones and zeros, and padding, left out."""
    return np.concatenate([first + np.arange(size) for first, size in zip(layout.offsets, layout.widths, strict=True)])


def check_like(layout, found, wanted):
    """Compares a loss and its gradient to the accuracy of single precision."""
    loss, (by_lines, by_weights) = found
    assert float(loss) == pytest.approx(wanted[0], rel=1e-5)
    inside = every_line(layout)
    for slopes, exact in ((np.asarray(by_lines)[inside], wanted[1][inside]), (by_weights, wanted[2])):
        np.testing.assert_allclose(slopes, exact, rtol=1e-4, atol=3e-6 * np.abs(exact).max())


def cells_tiled(layout, goal):
    """Every cell of tiles that weighs something: its key, target and precision. The others have no target."""
    windows, left, right, pivots, targets, precision = map(
        np.asarray, (goal.lines, goal.left, goal.right, goal.pivots, goal.targets, goal.precision)
    )
    assert not precision[int(goal.used) :].any()
    assert not targets[precision == 0].any()
    tile, a, b = np.nonzero(precision)
    lines = np.column_stack([windows[left[tile], a], windows[right[tile], b], pivots[tile]])
    return keys_of(layout, lines.astype(np.int64)), targets[tile, a, b], precision[tile, a, b]


@given(measured())
@settings(deadline=None, max_examples=40)
def test_every_cell_of_every_marginal_is_in_one_tile(drawn):
    layout, items = drawn
    found, wanted = cells_tiled(layout, tiles.tiled(layout, items)), list(cells_listed(layout, items))
    order, other = np.argsort(found[0]), np.argsort(wanted[0])
    assert np.all(np.diff(wanted[0][other]) > 0)
    for part, exact in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(part[order], exact[other].astype(part.dtype))


@given(measured(most=2), st.data())
@settings(deadline=None, max_examples=40)
def test_a_cell_that_was_measured_twice_weighs_both_at_their_mean(drawn, data):
    """Whatever order the features are listed in, and whatever slabs overlap."""
    layout, items = drawn
    for tally, *_ in list(items):
        again = data.draw(some_slab(layout.widths, data.draw(st.permutations(tally.features).map(tuple))))
        items.append((again, np.linspace(0, 0.1, again.cells), 3.0))
    keys, values, precision = cells_listed(layout, items)
    distinct, places = np.unique(keys, return_inverse=True)
    total = np.bincount(places, precision)
    found = cells_tiled(layout, tiles.tiled(layout, items))
    order = np.argsort(found[0])
    np.testing.assert_array_equal(found[0][order], distinct)
    np.testing.assert_allclose(found[1][order], np.bincount(places, precision * values) / total, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found[2][order], total, rtol=1e-6)


def test_the_loss_of_a_marginal_that_was_measured_twice_is_that_of_both():
    sizes = (5, 40, 3, 7)
    layout = Layout(sizes)
    generator = np.random.default_rng(0)
    sets = ((0, 1), (1, 0), (0, 1, 2), (2, 0, 1), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1))
    tallies = [GroupBy(sizes, features, 0, sizes[features[0]]) for features in sets]
    tallies += [GroupBy(sizes, (1, 0), 11, 25), GroupBy(sizes, (0, 2, 1), 2, 3, (4,))]
    items = [(tally, generator.uniform(0, 0.1, tally.cells), generator.uniform(0.1, 9)) for tally in tallies]
    table, weights = table_of(layout)
    goal = tiles.tiled(layout, items)
    found = jax.jit(SLOPES)(table, weights, goal)
    check_like(layout, found, dense(layout, table, weights, items))
    assert 0.01 * float(found[0]) < float(goal.apart) < float(found[0])


@given(measured(), st.sampled_from(((0.0, 1.0), (0.7, 0.02), (30.0, 0.01))))
@settings(deadline=None, max_examples=5)
def test_losses_and_gradients_are_those_of_dense_sums(drawn, tail):
    layout, items = drawn
    table, weights = table_of(layout)
    found = jax.jit(SLOPES)(table, weights, tiles.tiled(layout, items), Tail(*tail))
    check_like(layout, found, dense(layout, table, weights, items, tail))


LAYOUTS = {
    "one window": (3, 2, 4, 2, 1),
    "ones only": (1, 1, 1, 1, 1),
    "larger than every window": (200, 3, 150, 2, 129),
    "as large as a window": (128, 16, 64, 2, 8),
    "many windows": (60, 70, 9, 90, 2),
}
SETS = ((1, 0), (2, 4), (0, 3), (3, 1, 2), (4, 0, 3), (4, 3, 1, 0), (1, 4, 3, 2, 0))


def goal_of(sizes, seed=0):
    """Marginals of all orders, of some only a few slabs: as they are, and as tiles."""
    generator = np.random.default_rng(seed)
    items = []
    for features in SETS:
        cells = math.prod(sizes[feature] for feature in features)
        if cells <= 50_000:
            cut = list(slabs(sizes, features, cells // 4 if len(features) == 3 else cells))[::2]
            items += [(tally, generator.uniform(0, 0.1, tally.cells), generator.uniform(0.5, 2)) for tally in cut]
    return items, tiles.tiled(Layout(sizes), items)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradients_of_structurally_different_tables(name):
    """Among them: both features of a tile in one window, features cut by windows, and features of one code."""
    sizes = LAYOUTS[name]
    layout, (items, goal) = Layout(sizes), goal_of(sizes)
    table, weights = table_of(layout)
    slopes = jax.jit(SLOPES)
    for tail in ((0.0, 1.0), (5.0, 0.03)):
        check_like(layout, slopes(table, weights, goal, Tail(*tail)), dense(layout, table, weights, items, tail))


def test_the_gradient_is_scaled_by_what_is_done_with_the_loss():
    sizes = LAYOUTS["one window"]
    layout, (items, goal) = Layout(sizes), goal_of(sizes)
    at = table_of(layout)
    loss, *wanted = dense(layout, *at, items)
    found = jax.jit(jax.value_and_grad(lambda *at: 3 * tiles.tiled_loss(*at, goal), argnums=(0, 1)))(*at)
    check_like(layout, found, (3 * loss, *(3 * part for part in wanted)))


def compiled(*at):
    """Loss and gradient, compiled anew: for the backend that there seems to be."""
    slopes = jax.value_and_grad(tiles.tiled_loss, argnums=(0, 1))
    return jax.jit(slopes).lower(*at, Tail(), Share()).compile()


@pytest.mark.parametrize("name", ["one window", "many windows"])
def test_batches_of_tiles_are_compared_like_one_tile_after_the_other(monkeypatch, name):
    """Devices other than a CPU form tiles in batches, and add them up by products."""
    sizes = LAYOUTS[name]
    layout, (_, goal) = Layout(sizes), goal_of(sizes)
    table, weights = table_of(layout)
    sums = []
    monkeypatch.setattr(tiles, "added", lambda *at, added=tiles.added: sums.append(at[1].shape[0]) or added(*at))
    singly = compiled(table, weights, goal)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tiles, "BATCH", 8)
    batched = compiled(table, weights, goal)
    assert set(sums) == {1, 8}
    for tail, share in itertools.product((Tail(), Tail(3.0, 0.02)), (Share(), Share(2, 3), Share(9, 99))):
        (one, slopes), (other, wanted) = (compare(table, weights, goal, tail, share) for compare in (batched, singly))
        assert float(one) == pytest.approx(float(other), rel=1e-5)
        for slope, exact in zip(slopes, wanted, strict=True):
            np.testing.assert_allclose(slope, exact, rtol=1e-4, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("sizes", [(3, 2), LAYOUTS["many windows"]])
def test_shares_are_the_whole_on_average(sizes):
    """Whether or not the number of shares divides that of tiles, or is larger."""
    layout = Layout(sizes)
    every = [features for order in (2, 3) for features in itertools.combinations(range(len(sizes)), order)]
    wholes = [GroupBy(sizes, features, 0, sizes[features[0]]) for features in every[:12]]
    goal = tiles.tiled(layout, [(tally, np.linspace(0, 0.1, tally.cells), 1.5) for tally in wholes])
    table, weights = table_of(layout)
    slopes, tail = jax.jit(SLOPES), Tail(2.0, 0.02)
    loss, whole = slopes(table, weights, goal, tail, Share(0, 1))
    used = int(goal.used)
    for parts in sorted({1, 2, 3, 4, 5, used, used + 3}):
        shares = [slopes(table, weights, goal, tail, Share(part, parts)) for part in range(parts)]
        assert np.mean([share[0] for share in shares]) == pytest.approx(float(loss), rel=1e-5)
        for place, wanted in enumerate(whole):
            mean = np.mean([share[1][place] for share in shares], axis=0)
            np.testing.assert_allclose(mean, wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())
        beyond = slopes(table, weights, goal, tail, Share(used, parts))
        assert not any(np.any(part) for part in jax.tree.leaves(beyond))


def test_a_share_is_that_of_its_own_tiles():
    """Every third tile, from the second on: three times what these weigh, and nothing of the others."""
    sizes = (9, 5, 4)
    layout, tally = Layout(sizes), GroupBy(sizes, (0, 1, 2), 0, 9)
    values = np.linspace(0, 0.1, tally.cells)
    table, weights = table_of(layout)
    goal = tiles.tiled(layout, [(tally, values, 2.0)])
    assert int(goal.used) == 4
    found = jax.jit(SLOPES)(table, weights, goal, Tail(), Share(1, 2))
    slab = [GroupBy(sizes, (2, 0, 1), code, code + 1) for code in (1, 3)]
    parts = [(part, values.reshape(tally.shape)[:, :, part.start].ravel(), 4.0) for part in slab]
    check_like(layout, found, dense(layout, table, weights, parts))


@given(layouts(), st.sampled_from(tiles.HEIGHTS), st.data())
@settings(deadline=None, max_examples=60)
def test_each_line_is_in_its_window_and_a_feature_in_as_few_as_can_be(layout, height, data):
    windows = data.draw(st.sampled_from((tiles.Windows(layout, height), tiles.windows(layout))))
    assert windows.lines.shape == (len(windows.starts), windows.height)
    assert windows.lines.max() < layout.end
    for offset, size in zip(layout.offsets, layout.widths, strict=True):
        start = data.draw(st.just(0) | st.integers(0, size - 1))
        lines = offset + np.arange(start, data.draw(st.just(size) | st.integers(start + 1, size)))
        found = list(windows.where(lines))
        assert [window for window, *_ in found] == sorted({window for window, *_ in found})
        np.testing.assert_array_equal(np.concatenate([lines[span] for _, span, _ in found]), lines)
        for window, span, slots in found:
            assert slots.size > 0
            assert slots.min() >= 0
            np.testing.assert_array_equal(windows.lines[window, slots], lines[span])
        assert len(list(windows.where(offset + np.arange(size)))) == -(-size // windows.height)


@given(layouts())
@settings(deadline=None, max_examples=50)
def test_windows_are_few_and_the_cheapest(layout):
    best = tiles.windows(layout)
    assert np.all(np.diff(best.starts) > 0)
    # A window that begins with a feature that would have fit into the one before is not needed.
    for offset, size in zip(layout.offsets, layout.widths, strict=True):
        (before,) = [*best.starts[best.starts < offset][-1:], -best.height][:1]
        assert offset not in best.starts or offset + size > before + best.height
    assert set(best.starts) <= set(every_line(layout))
    for height in tiles.HEIGHTS:
        other = tiles.Windows(layout, height)
        assert best.cost <= other.cost == len(other.starts) ** 2 * (height**2 + tiles.OVERHEAD)


def cost_of(layout, sets, chosen):
    """What the tiles of whole marginals cost, as cells."""
    return used_by(layout.sizes, sets, chosen) * (chosen.height**2 + tiles.OVERHEAD)


@pytest.mark.parametrize("sizes", [(2,) * 30, (18,) * 8, (40, 27, 45, 11, 11, 30, 5, 3, 2, 2, 9, 3, 24, 7, 12)])
@pytest.mark.parametrize("sets", [((0, 1), (2, 3)), ((0, 4, 7), (1, 2, 3), (5, 6, 0)), ((3, 4, 5, 6),)])
def test_windows_are_the_cheapest_for_what_is_measured(sizes, sets):
    layout = Layout(sizes)
    costs = {height: cost_of(layout, sets, tiles.Windows(layout, height)) for height in tiles.HEIGHTS}
    chosen = tiles.snug(layout, tuple(GroupBy(sizes, features, 0, sizes[features[0]]) for features in sets))
    assert costs[chosen.height] == min(costs.values()) < max(costs.values())


def test_scattered_triples_need_lower_windows_than_all_pairs():
    layout = Layout((18,) * 16)
    triples = tuple(itertools.islice(itertools.combinations(range(16), 3), 0, None, 9))
    chosen = tiles.snug(layout, tuple(GroupBy(layout.sizes, features, 0, 18) for features in triples))
    assert chosen.height < tiles.windows(layout).height
    assert cost_of(layout, triples, chosen) < 0.7 * cost_of(layout, triples, tiles.windows(layout))


@given(st.integers(0, 10**6))
def test_rooms_are_large_enough_and_seldom_change(count):
    room = tiles.rooms(count)
    assert room >= max(1, count)
    assert room < 2 * count or room == 1
    assert room <= 256 or room <= 1.25 * count
    assert tiles.rooms(room) == room


def test_rooms_are_few():
    assert len({tiles.rooms(count) for count in range(257)}) == 9
    rooms = [tiles.rooms(count) for count in range(1 << 12)]
    assert rooms == sorted(rooms)
    assert len(set(rooms)) == 9 + 4 * 4


def used_by(sizes, sets, chosen=None):
    """The number of tiles of whole marginals."""
    wholes = [GroupBy(sizes, features, 0, sizes[features[0]]) for features in sets]
    return int(tiles.tiled(Layout(sizes), [(tally, np.zeros(tally.cells), 1.0) for tally in wholes], chosen).used)


def tiles_needed(sizes, *sets):
    """The number of tiles of whole marginals, in the windows of their layout."""
    return used_by(sizes, sets)


def test_marginals_that_share_windows_and_pivots_share_tiles():
    sizes = (4, 5, 5, 5)
    pairs, triples = (tuple(itertools.combinations(range(4), order)) for order in (2, 3))
    assert tiles_needed(sizes, pairs[0]) == tiles_needed(sizes, *pairs) == 1
    # The largest needs a tile for each code of a pivot; the others have one of its features as their pivot too.
    assert tiles_needed(sizes, (0, 1, 2)) == 4
    assert tiles_needed(sizes, (1, 2, 3)) == tiles_needed(sizes, (0, 1, 2), (1, 2, 3)) == 5
    assert tiles_needed(sizes, *triples) <= 5 + 4
    assert tiles_needed(sizes, *pairs, *triples) == 1 + tiles_needed(sizes, *triples)


@pytest.mark.parametrize("turned", list(itertools.permutations(range(4))))
def test_features_may_be_listed_in_any_order(turned):
    """The tiles are the same: pivots are the two smallest features, for each combination of their codes."""
    sizes = (2, 3, 40, 50)
    assert tiles_needed(sizes, (0, 1, 2, 3), turned) == tiles_needed(sizes, (0, 1, 2, 3)) == 6


def test_goals_of_one_room_run_through_one_trace():
    sizes = LAYOUTS["many windows"]
    layout, traces = Layout(sizes), []
    table, weights = table_of(layout)
    losses = jax.jit(lambda *at: traces.append(1) or tiles.tiled_loss(*at))
    rooms = set()
    for number, features in enumerate(((0, 1), (2, 3), (3, 4), (2, 4, 0), (4, 3, 2))):
        tally = GroupBy(sizes, features, 0, sizes[features[0]])
        goal = tiles.tiled(layout, [(tally, np.zeros(tally.cells), 1.0)])
        rooms.add((goal.left.size, goal.pivots.shape[1]))
        assert float(losses(table, weights, goal, Tail(number, 0.1), Share(number % 2, number + 1))) >= 0
    assert len(traces) == len(rooms) == 2


def test_no_marginals_are_a_tile_that_weighs_nothing():
    layout = Layout((3, 20))
    goal = tiles.tiled(layout, [])
    assert goal.targets.shape[0] == 1
    found = jax.jit(SLOPES)(*table_of(layout), goal, Tail(5.0, 1e-6))
    assert not any(np.any(part) for part in jax.tree.leaves(found))


@pytest.mark.parametrize("precision", [1e-30, 1.0, 1e25])
def test_an_answer_that_weighs_nothing_is_no_answer(precision):
    """Not where nothing else was measured, nor before or after another answer of the cell; however precise that is."""
    sizes = (4, 7)
    layout, whole, part = Layout(sizes), GroupBy(sizes, (0, 1), 0, 4), GroupBy(sizes, (0, 1), 1, 3)
    answer = (part, np.linspace(0, 1, part.cells), precision)
    nothing = (whole, np.full(whole.cells, 0.5), 0.0)
    wanted = tiles.tiled(layout, [answer])
    for items in ([nothing, answer], [answer, nothing], [nothing, answer, nothing]):
        found = tiles.tiled(layout, items)
        measured = np.asarray(wanted.precision) > 0
        np.testing.assert_array_equal(found.precision, wanted.precision)
        np.testing.assert_array_equal(np.asarray(found.targets)[measured], np.asarray(wanted.targets)[measured])
        assert np.all(np.isfinite(found.targets))
    slopes = jax.jit(SLOPES)
    table, weights = table_of(layout)
    tail = (2.0, 0.1 * math.sqrt(precision))
    check_like(layout, slopes(table, weights, found, Tail(*tail)), dense(layout, table, weights, [answer], tail))


@jax.jit
def misfits(residuals, precision, tail):
    """The misfit, what it pulls with, and its derivative by residuals."""
    slope = jax.grad(lambda at: tiles.misfit(at, precision, tail)[0])(residuals)
    return *tiles.misfit(residuals, precision, tail), slope


@given(st.lists(st.floats(-2, 2, width=32), min_size=8, max_size=8), st.floats(0.1, 9), st.floats(0, 50))
@settings(deadline=None, max_examples=50)
def test_the_misfit_pulls_as_its_derivative(residuals, precision, weight):
    """By the formula; nothing where nothing was measured, as in the last of these cells."""
    weights = np.array([precision] * 7 + [0])
    loss, *pulls = misfits(jnp.asarray(residuals), jnp.asarray(weights, jnp.float32), Tail(weight, 0.7))
    beyond = np.maximum(np.abs(residuals) - 0.7 / math.sqrt(precision), 0)
    wanted = 0.5 * np.sum(weights * (np.square(residuals) + weight * beyond**2))
    assert float(loss) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    for pull in pulls:
        exact = weights * (residuals + weight * np.sign(residuals) * beyond)
        np.testing.assert_allclose(pull, exact, rtol=1e-4, atol=1e-4)
        assert pull[-1] == 0
