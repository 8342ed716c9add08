"""The projection of `auto`: what it knows of the noise, where it begins, what it minimises; and it compiles once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import (
    COMPILED,
    PAIRS,
    SETS,
    SIZES,
    WHOLE,
    WIDE,
    answers,
    chi_squared,
    exact,
    measure,
    noisy,
    unrelated,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph import progress
from anamorph.columns import Codes
from anamorph.curator.budget import Budget, gaussian_sigma
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import GroupBy
from anamorph.models import shrinking
from anamorph.models.quieting import quieted
from anamorph.models.relaxed import Parameters, RelaxedRows
from anamorph.models.shrinking import (
    DISPATCH,
    STRENGTH,
    TAIL,
    Noise,
    ShrinkingProjection,
    counted,
    descend,
    fitting_rows,
    noise,
    objective,
    reveal,
)
from anamorph.models.simplex import Layout
from anamorph.models.tiles import NO_TAIL
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
ONES = Workload((Marginals(SIZES, ((0,), (1,), (2,))),))
SMALL = ShrinkingProjection(rows=40)

TILES = 4


def measured(workload, *sigmas, total=100.0):
    """A measurement of zeros, with a sigma in counts for each block."""
    return Measurement(workload, np.zeros(workload.cells), np.array(sigmas) / total, total)


def marginals(*sets, sizes=SIZES, **more):
    return Workload((Marginals(sizes, sets),), **more)


# --- what is known of the noise


def test_the_noise_of_several_marginals():
    found = noise([measured(marginals((0, 1), (0, 2)), 1.0, 2.0)])
    assert found.sigma == pytest.approx(((1 + 1 / 4) / 3 + 1 / 3 + (1 / 4) / 3) ** -0.5)
    assert found.crowding == pytest.approx((6 * 1 + 12 * 2) / 2 / 100)
    assert found.faintness == pytest.approx((1 + 2) / 2 / 100)


def test_a_marginal_that_is_measured_twice_is_known_better():
    pair = marginals((0, 1))
    found = noise([measured(pair, 1.0), measured(pair, 2.0)])
    assert found.sigma == pytest.approx(1.25**-0.5), "a column that nothing tells of has no part in it"
    assert found.crowding == pytest.approx(6 * 1.25**-0.5 / 100)
    assert found.faintness == pytest.approx(1.25**-0.5 / 100)


def test_single_columns_crowd_nothing_where_there_are_larger_marginals():
    found = noise([measured(Workload((*ONES.parts, Marginals(SIZES, ((0, 1),)))), 0.5, 0.5, 0.5, 3.0)])
    assert found.sigma == pytest.approx((((4 + 1 / 9) * 2 + 4) / 3) ** -0.5)
    assert (found.crowding, found.faintness) == (pytest.approx(6 * 3 / 100), pytest.approx(3 / 100))
    alone = noise([measured(ONES, 1.0, 2.0, 4.0)])
    assert alone.crowding == pytest.approx((3 * 1 + 2 * 2 + 4 * 4) / 3 / 100)


@pytest.mark.parametrize("limit", [1, 3, 5, 11])
def test_slabs_of_a_marginal_are_one_marginal(limit):
    sets, sigmas = ((0, 1), (1, 2), (2,), (0, 1, 2)), (1.0, 3.0, 2.0, 7.0)
    assert len(list(marginals(*sets, limit=limit).pieces())) > 4
    assert noise([measured(marginals(*sets, limit=limit), *sigmas)]) == noise([measured(marginals(*sets), *sigmas)])


@pytest.mark.parametrize("least", [1, 2])
def test_thresholds_are_as_noisy_as_their_marginals(least):
    blocks = Workload((Thresholds(SIZES, ((0, 1), (1, 2)), least),))
    assert noise([measured(blocks, 1.0, 3.0)]) == noise([measured(marginals((0, 1), (1, 2)), 1.0, 3.0)])


def test_the_noise_of_functions_alone_is_their_own():
    function = custom(lambda row: row["c0"], SCHEMA).by_cell()
    found = noise([measured(Workload((function,)), 1.0, 2.0, 9.0)])
    assert found == (pytest.approx(2.0), pytest.approx(2.0 / 100), pytest.approx(2.0 / 100))
    beside = noise([measured(Workload((function, Marginals(SIZES, ((0, 1),)))), 1.0, 2.0, 9.0, 5.0)])
    assert beside == (pytest.approx(5.0), pytest.approx(6 * 5 / 100), pytest.approx(5 / 100))


@pytest.mark.parametrize(("neighbours", "squared"), [("replace", 2), ("add-remove", 1)])
def test_the_noise_is_that_of_the_curator(neighbours, squared):
    source = TableSource(Table(np.zeros((500, 3), np.int32), SIZES), SCHEMA)
    curator = Curator(source, Budget(epsilon=1.0, delta=1e-6), neighbours=neighbours, unsafe_seed=1)
    rho = curator.remaining
    log = (curator.measure(PAIRS, rho=rho),)
    each = gaussian_sigma(3 * squared, rho)
    assert noise(log).sigma == pytest.approx(each / math.sqrt(2))
    assert noise(log).crowding == pytest.approx((6 + 12 + 8) / 3 * each / curator.total)
    assert (curator.total == 500) == (neighbours == "replace")


@pytest.mark.parametrize(
    ("sigma", "rows"),
    [
        *((1e9, 64), (16.0, 64), (15.9, 128), (4.0, 128), (3.9, 256), (1.0, 256), (0.9, 512), (0.25, 512)),
        *((0.24, 1024), (0.1, 1024), (1e-9, 1024)),
    ],
)
def test_there_are_as_many_rows_as_the_noise_lets_them_tell(sigma, rows):
    triple = marginals((0, 1, 2))
    heard = [measured(triple, sigma, total=4096.0)]
    assert fitting_rows(heard) == rows
    layout = Layout(SIZES)
    assert ShrinkingProjection().begin(layout, heard, 0).rows.shape == (rows,)
    assert ShrinkingProjection(rows=7).begin(layout, heard, 0).rows.shape == (7,)


@pytest.mark.parametrize(("room", "rows"), [(512 * 24, 512), (512 * 24 - 1, 256), (100 * 24, 64), (24, 64), (0, 64)])
def test_there_are_fewer_rows_where_cells_are_many(monkeypatch, room, rows):
    monkeypatch.setattr(shrinking, "ROOM", room)
    assert fitting_rows([measured(marginals((0, 1, 2)), 0.1, total=4096.0)]) == rows
    twice = [measured(marginals((0, 1), (2,)), 1.0, 1.0), measured(marginals((0, 2), (1,)), 0.1, 0.1, total=4096.0)]
    assert fitting_rows(twice) == rows, "10 and 14 cells"


@pytest.mark.parametrize(("total", "rows"), [(0.25, 1.0), (1.0, 1.0), (37.5, 37.5)])
def test_there_was_at_least_one_row(total, rows):
    assert counted([measured(PAIRS, 1.0, 1.0, 1.0, total=total)]) == rows


# --- penalty, reach and steps


def aims(sigma, total=100.0, **more):
    return replace(SMALL, **more).aims(Layout(SIZES), [measured(PAIRS, sigma, sigma, sigma, total=total)])


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 1e5), st.sampled_from([*STRENGTH]), st.sampled_from([1.0, 2**0.5, 2.0]))
def test_penalty_tail_and_steps_are_those_of_the_formulas(sigma, matters, firm):
    found = aims(sigma, objective=matters, firmness=firm)
    together, crowding = sigma / math.sqrt(2), 26 / 3 * sigma / 100
    drawn = (1 / crowding + crowding**-2.5) ** -0.1 * (1 + 50 * (sigma / 100) ** 2)
    penalty = firm * STRENGTH[matters] * drawn / (1 + together)
    assert float(found.penalty) == pytest.approx(penalty, rel=1e-5)
    assert float(found.tail.weight) == pytest.approx(firm**2 * TAIL[matters], rel=1e-6)
    reach = max(3.0 / math.sqrt(firm), math.sqrt(2 * math.log(1 + 20 * firm * crowding)))
    assert float(found.tail.reach) * 10 == pytest.approx(reach, rel=1e-5)
    assert int(found.steps) == pytest.approx(max(80 * (100 / together) ** 0.25, 100), abs=1)
    assert int(found.parts) == 1


def test_what_matters_sets_how_much_is_shrunk():
    penalties = [float(aims(1.0, objective=matters).penalty) for matters in ("max", "balanced", "average")]
    assert penalties[0] < penalties[1] < penalties[2]
    tails = [float(aims(1.0, objective=matters).tail.weight) for matters in ("max", "balanced", "average")]
    assert tails[0] > tails[1] > tails[2] == 0


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 1e4), st.floats(1.01, 100))
def test_more_noise_shrinks_more_counts_and_reaches_further_in_fewer_steps(sigma, times):
    low, high = aims(sigma), aims(sigma * times)
    assert float(high.penalty) * (sigma * times) ** 2 > float(low.penalty) * sigma**2
    assert float(high.tail.reach) >= float(low.tail.reach)
    assert int(high.steps) <= int(low.steps)


def test_many_tiles_are_compared_in_shares(monkeypatch):
    log = [measure(WHOLE, np.zeros(WHOLE.cells))]
    whole = SMALL.aims(Layout(WIDE), log)
    assert (int(whole.goals.tiled[0].used), int(whole.parts)) == (TILES, 1)
    for part, parts in ((1, 4), (2, 2), (3, 1), (4, 1)):
        monkeypatch.setattr(shrinking, "PART", part)
        found = SMALL.aims(Layout(WIDE), log)
        assert int(found.parts) == parts
        times = 2 if parts == 1 else (1 + parts) / 2
        assert int(found.steps) == pytest.approx(int(whole.steps) / 2 * times, abs=3)
    monkeypatch.setattr(shrinking, "PART", 1)
    monkeypatch.setattr(shrinking, "MOST_PARTS", 3)
    assert int(SMALL.aims(Layout(WIDE), log).parts) == 3


# --- the beginning


def begun(values, workload=ONES, seed=0, total=100.0, **more):
    """The logits that rows begin with, code by code, and the row weights."""
    layout = Layout(workload.sizes)
    log = [measure(workload, values, total=total)]
    point = replace(SMALL, **more).begin(layout, log, seed)
    return np.asarray(layout.flatten(point.free)[layout.lines]), point.rows


VALUES = np.array([0.5, 0.3, 0.2, 0.25, 0.75, 0.1, 0.2, 0.3, 0.4])


def leaning(rows):
    """Which rows begin at the columns: all but one in 16, which begins level."""
    return np.array([row % 16 != 15 for row in range(rows)])


@pytest.mark.parametrize("limit", [1 << 22, 2])
def test_rows_begin_at_the_measured_columns(limit):
    """Also where they are measured in slabs, and not in the order of the schema."""
    turned = marginals((2,), (0,), (1,), limit=limit)
    values = np.concatenate([VALUES[5:], VALUES[:5]])
    exact, rows = begun(values, turned, start=0.0)
    np.testing.assert_allclose(exact, np.log(VALUES)[:, None] * leaning(40), rtol=1e-5)
    np.testing.assert_array_equal(rows, np.zeros(40))
    spread, _ = begun(values, turned, rows=2000)
    moved = spread - np.log(VALUES)[:, None] * leaning(2000)
    assert np.abs(moved).max() == pytest.approx(2, abs=0.01)
    np.testing.assert_allclose(moved.mean(axis=1), 0, atol=0.15)
    np.testing.assert_allclose(moved.std(axis=1), 2 / math.sqrt(3), atol=0.1)
    np.testing.assert_allclose(np.corrcoef(moved), np.eye(9), atol=0.12)


def rare_kind(rows=50_000, rare=50):
    """The answers of rows of which few have codes in three columns that no others have there."""
    generator = np.random.default_rng(1)
    kind, is_rare = generator.integers(0, 30, rows), np.arange(rows) < rare
    codes = np.stack(
        [
            np.where(is_rare, generator.integers(0, 59, rows), 59),
            np.where(is_rare, 0, 69),
            np.where(is_rare, 64, kind * 7 % 64),
            np.where(generator.random(rows) < 0.3, generator.integers(0, 30, rows), kind * 11 % 30),
        ]
    )
    sets = [features for part in WHOLE.parts for features in part.sets]
    shapes = [[WIDE[feature] for feature in features] for features in sets]
    cells = [np.ravel_multi_index(codes[list(features)], shape) for features, shape in zip(sets, shapes, strict=True)]
    counts = [np.bincount(cell, minlength=math.prod(shape)) for cell, shape in zip(cells, shapes, strict=True)]
    return np.concatenate(counts) / rows


def test_a_rare_kind_of_rows_is_found(monkeypatch):
    """A thousandth of the rows, 14 sigmas: codes so rare together in all rows at first that no gradient leads there."""

    def share(seed):
        log = noisy(7e-5, values=rare_kind(), total=50_000.0)
        return float(SMALL.fit(WIDE, log, seed=seed).answer(GroupBy(WIDE, (1, 2), 0, WIDE[1]))[64])

    found = [share(seed) for seed in range(3)]
    np.testing.assert_allclose(found, 0.001, rtol=0.4)
    monkeypatch.setattr(shrinking, "LEVEL", 1 << 30)
    assert max(share(seed) for seed in range(3)) < 1e-4


@pytest.mark.parametrize(("total", "least"), [(100.0, 0.002), (0.5, 0.2)])
def test_a_code_begins_with_a_fifth_of_a_row_at_least(total, least):
    values = np.array([-0.4, 0.0, 0.9, 1e-9, 0.75, -3.0, least / 2, 0.3, 0.4])
    found, _ = begun(values, start=0.0, total=total)
    np.testing.assert_allclose(found[:, 0], np.log(np.maximum(values, least)), rtol=1e-5)
    assert np.exp(found).min() == pytest.approx(least, rel=1e-5)


def test_columns_that_are_not_measured_begin_uniform():
    found, _ = begun(np.concatenate([[0.2, 0.8], np.full(12, 0.5)]), marginals((1,), (0, 2)), start=0.0)
    np.testing.assert_allclose(np.exp(found[:, 0]), [1, 1, 1, 0.2, 0.8, 1, 1, 1, 1], rtol=1e-5)


def test_a_beginning_is_that_of_its_seed():
    first, again, other = (begun(VALUES, seed=seed)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.mean(np.abs(first - other) > 1e-3) > 0.98
    assert np.unique(first[0]).size == 40, "rows that are alike would stay alike"


# --- what is minimised


def numpy_objective(model, log, aimed):
    """chi^2 / (2 n), the tails beyond their reach, and the penalty, by their definitions."""
    (item,) = log
    sigma = np.concatenate([np.full(p.tally.cells, item.sigma[p.first]) for p in item.workload.pieces()])
    residuals = (answers(model, item.workload).astype(float) - item.values) / sigma
    beyond = np.maximum(np.abs(residuals) - float(aimed.tail.reach) * math.sqrt(item.total), 0)
    weights = model.weights.astype(float)
    carried = np.sum(weights * np.log(weights * weights.size))
    for block in np.split(model.probabilities.astype(float), np.cumsum(model.sizes)[:-1]):
        carried += np.sum(weights * block * np.log(block / (block @ weights)[:, None]))
    misfit, tails = np.sum(residuals**2), float(aimed.tail.weight) * np.sum(beyond**2)
    return misfit / (2 * item.total), tails / (2 * item.total), float(aimed.penalty) * carried


def some_point(layout):
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 1, (sum(layout.sizes), 40)).astype(np.float32)
    return Parameters(layout.stack(jnp.asarray(logits), -1e9), jnp.asarray(generator.normal(0, 0.5, 40), jnp.float32))


loss_of = jax.jit(objective, static_argnums=0)


def test_the_loss_is_that_of_the_formula():
    layout, generator = Layout(WIDE), np.random.default_rng(0)
    log = [replace(noisy(0.01, total=50.0)[0], sigma=generator.uniform(0.005, 0.02, WHOLE.blocks))]
    found = replace(SMALL, objective="max").aims(layout, log)._replace(penalty=jnp.float32(7.0))
    point = some_point(layout)
    model = RelaxedRows(WIDE, *map(np.asarray, reveal(layout, point)))
    misfit, tails, carried = numpy_objective(model, log, found)
    total = misfit + tails + carried
    assert min(misfit, tails, carried) > 0.01 * total
    assert float(loss_of(layout, point, found, jnp.int32(0))) == pytest.approx(total, rel=1e-4)


def test_shares_of_tiles_stand_for_all_of_them(monkeypatch):
    layout, point, log = Layout(WIDE), some_point(Layout(WIDE)), noisy(0.01)
    whole = float(loss_of(layout, point, SMALL.aims(layout, log), jnp.int32(5)))
    monkeypatch.setattr(shrinking, "PART", 1)
    cut = SMALL.aims(layout, log)
    parts = [float(loss_of(layout, point, cut, jnp.int32(step))) for step in range(2 * TILES)]
    assert np.mean(parts[:TILES]) == pytest.approx(whole, rel=1e-4)
    assert parts[TILES:] == parts[:TILES]
    assert len(set(parts)) == TILES


# --- fits


def off(model):
    return np.abs(answers(model, WHOLE) - exact())


def test_without_noise_the_marginals_are_recovered():
    model = SMALL.fit(WIDE, noisy(1e-6), seed=0)
    assert not model.degraded
    assert off(model).max() < 3e-3
    start = RelaxedRows(WIDE, *map(np.asarray, reveal(Layout(WIDE), SMALL.begin(Layout(WIDE), noisy(1e-6), 0))))
    assert off(start).max() > 10 * off(model).max()
    assert model.probabilities.shape == (sum(WIDE), 40)
    np.testing.assert_allclose(np.add.reduceat(model.probabilities, np.cumsum((0, *WIDE[:-1])), axis=0), 1, atol=1e-4)


def information_of_pairs(model):
    """The mutual information of each pair of columns."""
    found = []
    for pair in SETS:
        joint = answers(model, marginals(pair, sizes=WIDE)).reshape([WIDE[f] for f in pair]).astype(float)
        apart = np.outer(joint.sum(axis=1), joint.sum(axis=0))
        found.append(np.sum(np.where(joint > 0, joint * np.log(np.where(joint > 0, joint, 1) / apart), 0)))
    return np.array(found)


def test_noise_does_not_pass_for_dependence(monkeypatch):
    """The columns are independent; without the penalty rows would explain the noise."""
    uniform = np.concatenate([np.full(cells, 1 / cells) for part in WHOLE.parts for cells in part.block_cells])
    log = noisy(0.002, values=uniform)
    found = {matters: replace(SMALL, objective=matters).fit(WIDE, log, seed=0) for matters in STRENGTH}
    monkeypatch.setattr(shrinking, "STRENGTH", dict.fromkeys(STRENGTH, 0.0))
    free = information_of_pairs(SMALL.fit(WIDE, log, seed=0)).sum()
    left = {matters: information_of_pairs(model).sum() for matters, model in found.items()}
    assert left["average"] < left["balanced"] < left["max"] < free
    assert left["balanced"] < 0.5 * free
    assert left["average"] < 0.01 * free


def test_the_penalty_brings_answers_nearer_to_the_truth(monkeypatch):
    log = noisy(0.002)
    shrunk = off(SMALL.fit(WIDE, log, seed=0))
    monkeypatch.setattr(shrinking, "STRENGTH", dict.fromkeys(STRENGTH, 0.0))
    free = off(SMALL.fit(WIDE, log, seed=0))
    assert shrunk.mean() < 0.95 * free.mean()
    assert shrunk.mean() < 0.3 * np.abs(log[0].values - exact()).mean()


def test_shares_of_tiles_reach_what_all_tiles_do(monkeypatch):
    log = noisy(5e-4)
    whole = SMALL.fit(WIDE, log, seed=0)
    monkeypatch.setattr(shrinking, "PART", 1)
    assert int(SMALL.aims(Layout(WIDE), log).parts) == TILES
    cut = SMALL.fit(WIDE, log, seed=0)
    assert not np.array_equal(cut.probabilities, whole.probabilities)
    assert np.sqrt(np.mean(off(cut) ** 2)) < 1.15 * np.sqrt(np.mean(off(whole) ** 2))
    assert chi_squared(cut, log) < 1.15 * chi_squared(whole, log)


def test_a_fit_is_that_of_its_seed():
    log, few = noisy(5e-4), replace(SMALL, effort=2.0)
    first, again, other = (few.fit(WIDE, log, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.probabilities, again.probabilities)
    np.testing.assert_array_equal(first.weights, again.weights)
    assert not np.allclose(first.probabilities, other.probabilities, atol=1e-3)


def test_nothing_is_compiled_anew_for_other_numbers(monkeypatch):
    answers(SMALL.fit(WIDE, noisy(5e-4), seed=0), WHOLE)
    before = len(COMPILED)
    for sigma, seed, matters, effort in ((1e-5, 1, "max", 1.0), (0.5, 2, "average", 7.0), (0.01, 3, "balanced", 30.0)):
        estimator = replace(SMALL, objective=matters, effort=effort, rate=0.1 * seed, start=seed / 2)
        answers(estimator.fit(WIDE, noisy(sigma, seed), seed=seed), WHOLE)
    monkeypatch.setattr(shrinking, "PART", 1)
    SMALL.fit(WIDE, noisy(0.01), seed=0)
    assert len(COMPILED) == before


def test_progress_is_told_to_the_last_step():
    told, log = [], noisy(0.01)
    with progress.listening(lambda *what: told.append(what)):
        SMALL.fit(WIDE, log, seed=0)
    steps = int(SMALL.aims(Layout(WIDE), log).steps)
    assert told == [("project", done, steps) for done in (*range(0, steps, DISPATCH), steps)]


@pytest.mark.parametrize("effort", [1e-9, 0.02, 1e9])
def test_there_are_always_some_steps_and_never_too_many(effort):
    found = replace(SMALL, effort=effort).aims(Layout(WIDE), noisy(0.01))
    assert int(found.steps) == (100 if effort < 1 else 1_000_000)


@pytest.mark.parametrize("crowding", [0.0, 1e-130, 1e-9, 1e9, 1e200])
def test_the_shrinkage_is_a_number_however_little_or_much_noise_there_is(crowding):
    assert 0 < Noise(1.0, crowding, 0.1).shrinkage < 100


# --- how much is shrunk


def test_pairs_that_are_quiet_are_fitted_as_independent():
    log = noisy(2e-4, values=unrelated())
    found, expected = (
        estimator.fit(WIDE, heard, seed=0)
        for estimator, heard in ((replace(SMALL, loudness=2.0), log), (SMALL, quieted(log, 2.0)))
    )
    np.testing.assert_array_equal(found.probabilities, expected.probabilities)
    assert not np.array_equal(found.probabilities, SMALL.fit(WIDE, log, seed=0).probabilities)


def test_what_is_held_back_is_judged_by_chi_squared_alone():
    log, layout = noisy(0.01), Layout(WIDE)
    model = SMALL.fit(WIDE, log, seed=0)
    found = shrinking.unexplained(layout, model.parameters, shrinking.goals.build(layout, noisy(0.02, 5)), NO_TAIL)
    assert float(found) == pytest.approx(chi_squared(model, noisy(0.02, 5)), rel=1e-4)


# --- more rows where these do not explain


def grown(monkeypatch, losses, estimator=None, log=None, far=()):
    """The rows of each fit, where fits leave these means of squared residuals, and so much beyond what is far."""
    log = log or noisy(1e-3)
    rows, answered, left = [], sum(item.values.size for item in log), iter(losses)
    excess = itertools.chain(far, itertools.repeat(0.0))

    def descended(_layout, point, _aims, stage):
        assert stage == ("again" if rows else "project")
        rows.append(point.rows.size)
        return point, True

    monkeypatch.setattr(shrinking, "descend", descended)
    monkeypatch.setattr(shrinking, "unexplained", lambda *_what: next(left) * answered / (2 * log[0].total))
    monkeypatch.setattr(shrinking, "beyond", lambda *_what: next(excess))
    model = (estimator or ShrinkingProjection()).fit(log[0].workload.sizes, log, seed=0)
    assert model.weights.size == rows[-1]
    return rows


@pytest.mark.parametrize(
    ("losses", "rows"),
    [
        ([0.9], [256]),
        ([1.2], [256]),
        ([math.nan], [256]),
        ([math.inf], [256]),
        ([1.21, 1.1], [256, 512]),
        ([1.9, 1.3, 0.5], [256, 512, 1024]),
        ([2.1, 1.0], [256, 1024]),
        ([900.0, 900.0], [256, 4096]),
    ],
)
def test_there_are_more_rows_for_as_long_as_noise_does_not_explain_the_rest(monkeypatch, losses, rows):
    assert fitting_rows(noisy(1e-3)) == 256
    assert grown(monkeypatch, losses) == rows


@pytest.mark.parametrize(
    ("name", "limit", "most"),
    [
        ("LARGEST", 2048, 2048),
        ("LARGEST", 2047, 1024),
        ("LARGEST", 100, 512),
        ("LARGEST_TABLE", 300 * 1024, 1024),
        ("LARGEST_TABLE", 1, 512),
        ("LARGEST_WORK", 0, 256),
    ],
)
def test_there_are_no_more_rows_than_there_is_room_for(monkeypatch, name, limit, most):
    assert 150 < Layout(WIDE).height <= 300
    monkeypatch.setattr(shrinking, name, limit)
    assert grown(monkeypatch, [900.0] * 2)[-1] == most


@pytest.mark.parametrize(
    ("far", "rows"),
    [([9.9], [256]), ([10.1], [256, 512]), ([99.0, 11.0], [256, 512, 1024]), ([math.nan], [256]), ([1e9], [256, 512])],
)
def test_few_answers_that_are_far_off_take_twice_the_rows(monkeypatch, far, rows):
    assert grown(monkeypatch, [0.9] * 4, far=far) == rows


def test_millions_of_answers_may_be_far_off_by_noise(monkeypatch):
    monkeypatch.setattr(shrinking, "EXCESS", 1 / WHOLE.cells)
    assert grown(monkeypatch, [0.9] * 2, far=[11.9]) == [256]
    assert grown(monkeypatch, [0.9] * 2, far=[12.1]) == [256, 512]


def test_what_noise_leaves_beyond_what_is_far():
    heights = np.linspace(shrinking.FAR, 20, 200_001)
    density = np.exp(-(heights**2) / 2) / math.sqrt(2 * math.pi)
    assert pytest.approx(2 * np.trapezoid((heights - shrinking.FAR) ** 2 * density, heights)) == shrinking.EXCESS


def test_what_a_fit_leaves_beyond_what_is_far():
    model, layout = SMALL.fit(WIDE, noisy(0.01), seed=0), Layout(WIDE)
    values = answers(model, WHOLE).astype(float)
    values[[7, 300, 9000]] += np.array([5.0, -6.5, 4.4]) * 1e-4
    log = noisy(1e-4, values=values)
    sigmas = np.abs(log[0].values - answers(model, WHOLE)) / 1e-4
    wanted = float(np.sum(np.maximum(sigmas - shrinking.FAR, 0) ** 2))
    found = shrinking.beyond(layout, model.parameters, shrinking.goals.build(layout, log), log[0].total)
    assert wanted > 1
    assert found == pytest.approx(wanted, rel=1e-2)


def test_the_arithmetic_of_a_fit_is_limited(monkeypatch):
    aims = SMALL.aims(Layout(WIDE), noisy(1e-3))
    products = 6 * TILES * aims.goals.tiled[0].lines.shape[1] ** 2 * int(aims.steps)
    assert products < aims.work < 1.2 * products
    monkeypatch.setattr(shrinking, "LARGEST_WORK", 512 * aims.work)
    assert grown(monkeypatch, [900.0] * 2) == [256, 512]
    shared = aims._replace(parts=jnp.int32(2))
    assert aims.work - shared.work == products // 2


def test_rows_that_were_asked_for_are_no_more(monkeypatch):
    assert grown(monkeypatch, [], SMALL) == [SMALL.rows]


def test_functions_may_cost_anything_and_get_no_more_rows(monkeypatch):
    function = Workload((custom(lambda row: row["c0"], SCHEMA, name="mine:first"), *ONES.parts))
    log = [measure(function, np.full(function.cells, 0.2))]
    assert grown(monkeypatch, [900.0], log=log) == [fitting_rows(log)]


def test_columns_that_follow_from_each_other_are_told_with_enough_rows(monkeypatch):
    """In 60 kinds of rows, each code of one column goes with one of the others: no fewer rows can tell that."""
    kind = np.arange(60)
    codes = [kind, (kind * 7) % 70, (kind * 11) % 65, kind % 30]
    parts = [features for part in WHOLE.parts for features in part.sets]
    cells = [np.ravel_multi_index([codes[f] for f in features], [WIDE[f] for f in features]) for features in parts]
    shapes = [math.prod(WIDE[f] for f in features) for features in parts]
    truth = np.concatenate([np.bincount(cell, minlength=size) / 60 for cell, size in zip(cells, shapes, strict=True)])
    log = noisy(1e-4, values=truth, total=1e4)
    monkeypatch.setattr(shrinking, "fitting_rows", lambda _measurements: 16)
    monkeypatch.setattr(shrinking, "ANY_TABLE", 128)
    monkeypatch.setattr(shrinking, "LARGEST", 128)
    few, enough = (replace(SMALL, rows=rows).fit(WIDE, log, seed=0) for rows in (16, 0))
    assert few.weights.size == 16
    assert enough.weights.size == 128
    error, less = (np.abs(answers(model, WHOLE) - truth).max() for model in (few, enough))
    assert error > 10 * less


# --- numbers that are none


def test_an_answer_that_is_no_number_degrades_and_keeps_finite_rows():
    log = noisy(5e-4)
    values = np.where(np.arange(WHOLE.cells) == 500, np.nan, log[0].values)
    model = SMALL.fit(WIDE, [replace(log[0], values=values)], seed=0)
    assert model.degraded
    assert np.all(np.isfinite(model.probabilities))
    begun_with, _ = reveal(Layout(WIDE), SMALL.begin(Layout(WIDE), log, 0))
    np.testing.assert_allclose(model.probabilities, begun_with, atol=1e-6)


def no_loss(_layout, point, aims, step):
    """A loss that is no number at step number `parts`."""
    return jnp.sum(point.rows**2) + jnp.where(step == aims.parts, jnp.nan, 0.0)


def no_slope(_layout, point, aims, step):
    """A loss that is one, but has no slope at that step."""
    return jnp.sqrt(jnp.where(step == aims.parts, 0.0, 1.0) * jnp.sum(point.rows**2))


@pytest.mark.parametrize("broken", [no_loss, no_slope])
def test_the_last_point_that_was_a_number_is_kept(monkeypatch, broken):
    """Wherever the loss, or its slope alone, ceases to be a number: in a dispatch, at its end, or at the very end."""
    monkeypatch.setattr(shrinking, "objective", broken)
    layout, steps = Layout((2,)), 2 * DISPATCH + 1
    begin = Parameters(layout.stack(jnp.zeros((2, 3)), -1e9), jnp.ones(3))
    aimed = SMALL.aims(layout, [measure(marginals((0,), sizes=(2,)), [0.5, 0.5])])._replace(steps=jnp.int32(steps))
    shrinking.advance.clear_cache()
    for when in (0, 7, DISPATCH - 1, DISPATCH, 2 * DISPATCH - 1, 2 * DISPATCH):
        found, fine = descend(layout, begin, aimed._replace(parts=jnp.int32(when)))
        assert not fine
        assert np.all(np.isfinite(found.rows))
        assert (float(found.rows[0]) == 1.0) == (when < DISPATCH)
    found, fine = descend(layout, begin, aimed._replace(parts=jnp.int32(steps)))
    assert shrinking.advance._cache_size() == 1, "what steps return is of the types that they take"
    shrinking.advance.clear_cache()
    assert fine
    assert np.abs(found.rows).max() < 0.1
