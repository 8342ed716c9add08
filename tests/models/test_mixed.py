"""Mixed rows: answers by hand, rows drawn from them, gradients, and what annealing is for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import COMPILED, answers, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import AtLeast, GroupBy, count
from anamorph.curator.tallies import Tests as SingleCells
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models import annealing, mixed
from anamorph.models.annealing import MixedProjection, Point, build, objective, settle
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 10, 2, 9)
COLUMNS = Columns(SIZES, (1, 3), (10, 8))
"""c3 may be missing: its code is 8."""
PREFIXES = Where(SIZES, (2, 0), (1, 3), (10, 8), np.array([[2, 7], [9, 3], [5, 5], [0, 7], [-1, 4]]))
HALFSPACES = Where(SIZES, (0,), (3, 1), (8, 10), np.array([30, -8, 11]), np.array([[4, 3], [-3, 1], [2, -5]]))
SINGLE = Where(SIZES, (), (1,), (10,), np.array([[1], [4], [8]]))
TALLIES = (PREFIXES, HALFSPACES, SINGLE)
WORKLOAD = Workload(tuple(map(NumberTests, TALLIES)))


def random_rows(columns=COLUMNS, rows=12, seed=0, concentration=0.5) -> MixedRows:
    random = np.random.default_rng(seed)
    probabilities = [random.dirichlet(np.full(size, concentration), rows).T for size in columns.relaxed]
    weights = random.dirichlet(np.ones(rows))
    reals = random.random((len(columns.numbers), rows)).astype(np.float32)
    coded = RelaxedRows(columns.relaxed, np.concatenate(probabilities).astype(np.float32), weights.astype(np.float32))
    return MixedRows(columns, coded, reals)


def lines(model, column):
    """The probabilities of a coded column, or of the flag of a number: codes by rows."""
    columns = model.columns
    place = columns.place(column)
    first = sum(columns.relaxed[:place])
    return model.coded.probabilities[first : first + columns.relaxed[place]].astype(float)


def by_hand(model, tally):
    columns, found = model.columns, []
    for test in range(tally.tests):
        for cell in itertools.product(*(range(tally.sizes[feature]) for feature in tally.given)):
            total = 0.0
            for row, weight in enumerate(model.coded.weights):
                codes = [
                    min(int(float(model.reals[columns.numbers.index(n), row]) * limit), limit - 1)
                    for n, limit in zip(tally.numbers, tally.limits, strict=True)
                ]
                if tally.weights is None:
                    passed = all(code <= bound for code, bound in zip(codes, tally.bounds[test], strict=True))
                else:
                    passed = int(tally.weights[test] @ np.array(codes)) <= tally.bounds[test]
                chance = float(weight) * passed
                for number in tally.numbers:
                    chance *= lines(model, number)[0, row] if number in columns.flagged else 1
                for feature, code in zip(tally.given, cell, strict=True):
                    chance *= lines(model, feature)[code, row]
                total += chance
            found.append(total)
    return np.array(found)


@given(st.integers(0, 10**6), st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_tests_are_answered_row_by_row_with_hard_thresholds(seed, rows):
    model = random_rows(rows=rows, seed=seed)
    for tally in TALLIES:
        np.testing.assert_allclose(model.answer(tally), by_hand(model, tally), atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_tests_are_answered_alike_however_many_at_a_time(monkeypatch, at_once):
    model = random_rows(seed=4)
    whole = [model.answer(tally) for tally in TALLIES]
    monkeypatch.setattr(mixed, "TESTS", at_once)
    for tally, expected in zip(TALLIES, whole, strict=True):
        np.testing.assert_allclose(model.answer(tally), expected, rtol=1e-12)
        assert model.answer(tally).shape == (tally.cells,)
    np.testing.assert_allclose(answers(model, replace(WORKLOAD, limit=7)), np.concatenate(whole), rtol=1e-12)


def test_a_real_at_either_end_has_a_code():
    model = random_rows(rows=4)
    model = replace(model, reals=np.array([[0, 1, 0.0999, 0.1001], [1, 0, 0.5, 0.125]], np.float32))
    assert model.codes.T.tolist() == [[0, 9, 0, 1], [7, 0, 4, 1]]


def test_coded_columns_are_answered_as_relaxed_rows_answer_them():
    model = random_rows(seed=2)
    alone = RelaxedRows((3, 2), model.coded.probabilities[:5], model.coded.weights)
    inner, positions = (3, 2), np.array([5, 0, 2, 1])
    pairs = [
        (GroupBy(SIZES, (0,), 0, 3), GroupBy(inner, (0,), 0, 3)),
        (GroupBy(SIZES, (2, 0), 0, 2), GroupBy(inner, (1, 0), 0, 2)),
        (GroupBy(SIZES, (0, 2), 1, 2, (2,)), GroupBy(inner, (0, 1), 1, 2, (2,))),
        (AtLeast(GroupBy(SIZES, (2, 0), 0, 2), 1), AtLeast(GroupBy(inner, (1, 0), 0, 2), 1)),
        (
            SingleCells(SIZES, ((2, 0),), np.zeros(4, np.int64), positions),
            SingleCells(inner, ((1, 0),), np.zeros(4, np.int64), positions),
        ),
    ]
    for tally, plain in pairs:
        np.testing.assert_allclose(model.answer(tally), alone.answer(plain), atol=1e-6)


@pytest.mark.parametrize(
    "tally",
    [
        GroupBy(SIZES, (1,), 0, 10),
        GroupBy(SIZES, (0, 3), 0, 3),
        AtLeast(GroupBy(SIZES, (0, 1), 0, 3), 1),
        SingleCells(SIZES, ((3,),), np.zeros(1, np.int64), np.zeros(1, np.int64)),
        Residual(SIZES, (0, 2)),
    ],
)
def test_numbers_have_no_marginals(tally):
    with pytest.raises(ParameterError, match="no native numbers"):
        random_rows().answer(tally)


def source(table, sizes):
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    return TableSource(table, schema)


def test_rows_drawn_approach_the_answers():
    """40,000 rows: 4.5 deviations of a count are at most 0.012 of the rows; drawn in strata they are less."""
    model = random_rows(seed=6)
    table = model.sample(40_000, seed=3)
    assert np.all((table.codes >= 0) & (table.codes < SIZES))
    for tally in (*TALLIES, GroupBy(SIZES, (2, 0), 0, 2)):
        found = count(tally, source(table, SIZES)) / 40_000
        np.testing.assert_allclose(found, model.answer(tally), atol=0.012)
    absent = lines(model, 3)[1] @ model.coded.weights
    assert np.mean(table.codes[:, 3] == 8) == pytest.approx(absent, abs=0.012)
    assert 0.1 < absent < 0.9
    np.testing.assert_array_equal(table.codes, model.sample(40_000, seed=3).codes)
    assert not np.array_equal(table.codes, model.sample(40_000, seed=4).codes)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_any_number_of_rows_is_drawn(rows):
    assert random_rows().sample(rows, seed=0).codes.shape == (rows, 4)


ODD = {
    "only numbers": Columns((10, 9), (0, 1), (10, 8)),
    "only numbers, none missing": Columns((10, 8), (0, 1), (10, 8)),
    "no numbers": Columns((3, 2), (), ()),
    "one number, last": Columns((2, 7), (1,), (7,)),
}


@pytest.mark.parametrize("columns", ODD.values(), ids=ODD)
def test_tables_of_one_kind_are_sampled_answered_and_kept(columns):
    model = random_rows(columns, rows=5)
    table = model.sample(2000, seed=0)
    assert np.all((table.codes >= 0) & (table.codes < columns.sizes))
    loaded = MixedRows.from_arrays(columns.sizes, model.arrays())
    tallies: list = [GroupBy(columns.sizes, columns.coded, 0, columns.sizes[columns.coded[0]])] if columns.coded else []
    if columns.numbers:
        limits = np.array(columns.limits)
        bounds = np.stack([limits // 2, limits - 1])
        tallies += [Where(columns.sizes, (), columns.numbers, columns.limits, bounds)]
        np.testing.assert_allclose(model.answer(tallies[-1]), by_hand(model, tallies[-1]), atol=1e-6)
    for tally in tallies:
        np.testing.assert_allclose(loaded.answer(tally), model.answer(tally), atol=1e-7)
        found = count(tally, source(table, columns.sizes)) / 2000
        np.testing.assert_allclose(found, model.answer(tally), atol=0.05)


@pytest.mark.parametrize("columns", ODD.values(), ids=ODD)
def test_tables_of_one_kind_are_fitted(columns):
    made = MixedProjection(rows=20, steps=10, levels=8, rate=0.05)
    parts: tuple = ()
    if columns.numbers:
        bounds = np.array(columns.limits)[None] // 2
        parts += (NumberTests(Where(columns.sizes, columns.coded, columns.numbers, columns.limits, bounds)),)
    if columns.coded:
        parts += (Marginals(columns.sizes, (columns.coded,)),)
    workload = Workload(parts)
    wanted = answers(random_rows(columns, rows=3, seed=5), workload)
    start = made.begin(columns, seed=0)
    fitted = made.fit(start, [measure(workload, wanted)])
    assert not fitted.degraded
    assert np.sum((answers(fitted, workload) - wanted) ** 2) < 0.7 * np.sum((answers(start, workload) - wanted) ** 2)


def test_marginals_are_fitted_before_any_test_is_measured():
    """The numbers have no gradient then: that must not end the fit of the others."""
    workload = Workload((Marginals(SIZES, ((0, 2),)),))
    wanted = answers(random_rows(rows=3, seed=5), workload)
    made = MixedProjection(rows=20, steps=40, levels=3, rate=0.05)
    start = made.begin(COLUMNS, seed=0)
    fitted = made.fit(start, [measure(workload, wanted)])
    assert np.abs(answers(start, workload) - wanted).max() > 0.1
    np.testing.assert_allclose(answers(fitted, workload), wanted, atol=0.01)
    np.testing.assert_array_equal(fitted.reals, start.reals)


def test_arrays_are_kept():
    model = random_rows(seed=1)
    loaded = MixedRows.from_arrays(SIZES, model.arrays())
    assert loaded.columns == model.columns
    for name, array in model.arrays().items():
        np.testing.assert_array_equal(loaded.arrays()[name], array)
    np.testing.assert_array_equal(answers(loaded, WORKLOAD), answers(model, WORKLOAD))
    np.testing.assert_array_equal(loaded.sample(50, seed=1).codes, model.sample(50, seed=1).codes)
    with pytest.raises(ParameterError, match="a loaded release cannot be fitted further"):
        MixedProjection().fit(loaded, [measure(WORKLOAD, np.zeros(WORKLOAD.cells))])


def without(arrays, name):
    return {key: array for key, array in arrays.items() if key != name}


FORGED = [
    lambda arrays: arrays | {"numbers": np.array([[1, 1], [10, 10]])},
    lambda arrays: arrays | {"numbers": np.array([[1, 4], [10, 8]])},
    lambda arrays: arrays | {"numbers": np.array([[1, -1], [10, 8]])},
    lambda arrays: arrays | {"numbers": np.array([[1, 3], [10, 7]])},
    lambda arrays: arrays | {"numbers": np.array([[1, 3], [11, 8]])},
    lambda arrays: arrays | {"numbers": np.array([[1, 3], [9, 8]])},
    lambda arrays: arrays | {"numbers": np.array([[1], [10]])},
    lambda arrays: arrays | {"numbers": np.array([[1.0, 3], [10, 8]])},
    lambda arrays: arrays | {"numbers": np.array([1, 3])},
    lambda arrays: arrays | {"numbers": np.zeros((3, 2), np.int64)},
    lambda arrays: arrays | {"reals": arrays["reals"][:1]},
    lambda arrays: arrays | {"reals": arrays["reals"][:, :-1]},
    lambda arrays: arrays | {"reals": arrays["reals"][0]},
    lambda arrays: arrays | {"reals": arrays["reals"] + 1},
    lambda arrays: arrays | {"reals": -arrays["reals"]},
    lambda arrays: arrays | {"reals": arrays["reals"] * np.nan},
    lambda arrays: arrays | {"probabilities": arrays["probabilities"][:-1]},
    lambda arrays: arrays | {"probabilities": arrays["probabilities"] * 1.1},
    lambda arrays: arrays | {"weights": arrays["weights"] * 2},
    lambda arrays: arrays | {"more": np.zeros(3)},
]


@pytest.mark.parametrize("change", FORGED, ids=range(len(FORGED)))
def test_arrays_that_are_no_mixed_rows_are_refused(change):
    with pytest.raises(CorruptionError):
        MixedRows.from_arrays(SIZES, change(random_rows().arrays()))


def held_by_hand(theta, tau, reals, temperature):
    """A sigmoid of each row, stretched to be 1 where theta . x is least and 0 where it is most."""
    low, high = np.minimum(theta, 0).sum(), np.maximum(theta, 0).sum()
    if not low < tau < high:
        return np.full(reals.shape[1], float(tau >= high))
    places = np.concatenate([theta @ reals, [low, high]])
    *found, top, end = (1 + np.tanh(temperature * (tau - places) / 2)) / 2
    return (np.array(found) - end) / (top - end)


def relaxed_answers(model, tally, temperature):
    """The answers of tests with sigmoids, in double precision, from their definition."""
    limits = np.array(tally.limits, float)
    reals = np.array([model.reals[model.columns.numbers.index(n)] for n in tally.numbers], float)
    found = []
    for test in range(tally.tests):
        if tally.weights is None:
            theta, tau = np.eye(len(limits)), (tally.bounds[test] + 1) / limits
        else:
            scaled = tally.weights[test] * limits
            length = np.linalg.norm(scaled)
            theta, tau = scaled[None] / length, np.array([tally.bounds[test] + tally.weights[test].sum() / 2]) / length
        passed = np.prod([held_by_hand(a, b, reals, temperature) for a, b in zip(theta, tau, strict=True)], axis=0)
        for number in tally.numbers:
            passed = passed * (lines(model, number)[0] if number in model.columns.flagged else 1)
        for cell in itertools.product(*(range(tally.sizes[feature]) for feature in tally.given)):
            chance = passed * model.coded.weights
            for feature, code in zip(tally.given, cell, strict=True):
                chance = chance * lines(model, feature)[code]
            found.append(chance.sum())
    return np.array(found)


MADE = MixedProjection(rows=9, row_weights=True)
PAIR = Workload((Marginals(SIZES, ((0, 2),)), *WORKLOAD.parts, Thresholds(SIZES, ((0, 2),), 1)))


STEP = 2e-3


def fitting(temperature):
    model = MADE.begin(COLUMNS, seed=3)
    random = np.random.default_rng(1)
    values = random.random(PAIR.cells) / 4
    measurement = replace(measure(PAIR, values, total=50.0), sigma=random.uniform(0.05, 0.2, PAIR.blocks))
    aims = build(model.coded.layout, COLUMNS, [measurement])
    aims = aims._replace(temperature=jnp.asarray(float(temperature)))
    return model, measurement, aims, Point(model.coded.parameters, jnp.asarray(model.reals))


@pytest.mark.parametrize("halfspaces", [1.0, 0.25])
@pytest.mark.parametrize("temperature", [2.0, 16.0])
def test_the_objective_is_chi_squared_of_sigmoids(temperature, halfspaces):
    """Halfspaces have a temperature of their own."""
    model, measurement, aims, point = fitting(temperature)
    found = np.concatenate(
        [
            model.answer(piece.tally)
            if not isinstance(piece.tally, Where)
            else relaxed_answers(model, piece.tally, temperature * (1.0 if piece.tally.weights is None else halfspaces))
            for piece in PAIR.pieces()
        ]
    )
    sigma = np.repeat(measurement.sigma, [6, *[6] * 5, *[3] * 3, *[1] * 3, 6])
    expected = np.sum(((found - measurement.values) / sigma) ** 2) / (2 * 50.0)
    made = replace(MADE, halfspaces=halfspaces)
    assert float(objective(made, model.coded.layout, point, aims)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("temperature", [2.0, 16.0])
def test_the_gradient_is_that_of_finite_differences(temperature):
    model, _, aims, point = fitting(temperature)
    loss = jax.jit(partial(objective, MADE, model.coded.layout))
    gradient = jax.grad(loss)(point, aims)
    for direction in range(4):
        random = np.random.default_rng(direction)
        move = jax.tree.map(lambda leaf, r=random: jnp.asarray(r.standard_normal(leaf.shape), leaf.dtype), point)
        if direction == 3:  # numbers alone
            move = move._replace(coded=jax.tree.map(jnp.zeros_like, move.coded))
        ahead, behind = (
            float(loss(jax.tree.map(lambda leaf, by, s=sign: leaf + s * STEP * by, point, move), aims))
            for sign in (1, -1)
        )
        slope = sum(float(jnp.sum(a * b)) for a, b in zip(*map(jax.tree.leaves, (gradient, move)), strict=True))
        assert (ahead - behind) / (2 * STEP) == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_answers_of_sigmoids_become_those_of_thresholds():
    model = random_rows(seed=8)
    for tally in (PREFIXES, SINGLE):
        # reals that are not near an edge of a code
        inside = (model.reals * np.array([[10], [8]])) % 1
        assert inside.min() > 0.02
        np.testing.assert_allclose(relaxed_answers(model, tally, 1e5), model.answer(tally), atol=1e-6)


def table_of_numbers(rows=2000):
    """Numbers with steps and a hole, that depend on a coded column; some of c3 are missing."""
    random = np.random.default_rng(0)
    label = random.integers(0, 3, rows)
    x = np.where(random.random(rows) < 0.7, label, 8 - label)
    y = np.where(random.random(rows) < 0.2, 8, np.where(label == 2, 6, random.integers(0, 3, rows)))
    return np.stack([label, x, random.integers(0, 2, rows), y], axis=1).astype(np.int32)


def every_prefix():
    pairs = np.array(list(itertools.product(range(10), range(8))))[::5]
    alone = np.arange(9)[:, None]
    return Workload(
        (
            NumberTests(Where(SIZES, (0,), (1, 3), (10, 8), pairs)),
            NumberTests(Where(SIZES, (0,), (1,), (10,), alone)),
            Marginals(SIZES, ((0, 2),)),
        )
    )


def test_annealing_finds_what_one_temperature_does_not():
    """Without noise: annealed, the answers become the truth; a blunt sigmoid stays far, a sharp one hardly moves."""
    workload = every_prefix()
    rows = source(Table(table_of_numbers(), SIZES), SIZES)
    truth = np.concatenate([count(piece.tally, rows) for piece in workload.pieces()]) / 2000
    log = [measure(workload, truth, sigma=0.002, total=2000.0)]
    annealed = MixedProjection(rows=100, steps=40, levels=8, rate=0.02)
    errors = {}
    for name, made in {
        "annealed": annealed,
        "blunt": replace(annealed, levels=1, steps=320),
        "sharp": replace(annealed, levels=1, steps=320, temperature=512.0),
    }.items():
        start = made.begin(COLUMNS, seed=0)
        fitted = made.fit(start, log)
        assert np.all((fitted.reals >= 0) & (fitted.reals <= 1))
        assert not fitted.degraded
        errors[name] = np.abs(answers(fitted, workload) - truth).mean()
        errors["start"] = np.abs(answers(start, workload) - truth).mean()
    assert errors["annealed"] < 0.005
    assert errors["annealed"] < 0.1 * errors["start"]
    assert errors["annealed"] < 0.5 * min(errors["blunt"], errors["sharp"])


def test_a_temperature_ends_when_its_gradient_has_fallen(monkeypatch):
    """With a large gamma every level ends at its first step; with gamma 0 none does before its last."""
    workload, seen = every_prefix(), []
    real = annealing.descend

    def watched(problem, point, aims):
        seen.append((float(aims.temperature), float(aims.floor)))
        return real(problem, point, aims)

    monkeypatch.setattr(annealing, "descend", watched)
    log = [measure(workload, np.full(workload.cells, 0.05))]
    made = MixedProjection(rows=10, steps=6, levels=3, gamma=2.0, temperature=3.0)
    start = made.begin(COLUMNS, seed=0)
    still = made.fit(start, log)
    np.testing.assert_array_equal(still.reals, start.reals)
    assert [temperature for temperature, _ in seen] == [3.0, 6.0, 12.0]
    assert all(floor > 0 for _, floor in seen)
    moved = replace(made, gamma=0.0).fit(start, log)
    assert not np.array_equal(moved.reals, start.reals)


@pytest.mark.parametrize("temperature", [0.5, 16.0, 1e4])
def test_numbers_move_as_far_as_sigmoids_are_wide_and_stay_between_0_and_1(temperature):
    """Whatever the rate; what is coded moves as Adam says."""
    made = MixedProjection(rows=9, rate=0.07, reach=0.3)
    model = made.begin(COLUMNS, seed=0)
    aims = build(model.coded.layout, COLUMNS, [])._replace(temperature=jnp.asarray(temperature))
    before = Point(model.coded.parameters, jnp.asarray(model.reals))
    signs = np.sign(np.random.default_rng(0).standard_normal(model.reals.shape))
    moved = Point(jax.tree.map(lambda leaf: leaf + 1, before.coded), before.reals + made.rate * signs)
    after = settle(made, model.coded.layout, aims, before, moved)
    wanted = np.clip(model.reals + signs * made.reach / temperature, 0, 1)
    np.testing.assert_allclose(after.reals, wanted, atol=1e-6)
    assert after.coded is moved.coded


@pytest.mark.parametrize("reach", [0.0, 0.5])
def test_a_step_of_a_fit_moves_numbers_by_at_most_their_reach(reach):
    """The point kept is that before the last of two steps: one step of Adam away, which is the rate at first."""
    workload = every_prefix()
    made = MixedProjection(rows=30, steps=2, levels=1, temperature=8.0, rate=0.01, reach=reach)
    start = made.begin(COLUMNS, seed=0)
    fitted = made.fit(start, [measure(workload, np.full(workload.cells, 0.01))])
    assert np.all((fitted.reals >= 0) & (fitted.reals <= 1))
    assert np.abs(fitted.reals - start.reals).max() == pytest.approx(reach / 8, rel=1e-3)


def test_rounds_compile_nothing_after_the_first():
    """As long as what is measured has few cells, of the kinds that the first round has."""
    made = MixedProjection(rows=11, steps=3, levels=2)
    workload = Workload((NumberTests(PREFIXES), Marginals(SIZES, ((0, 2), (0,), (2,)))))
    model, log, new = made.begin(COLUMNS, seed=0), [], []
    for taken in ([0, 5], [1, 6], [2, 3, 7], [4]):
        before = len(COMPILED)
        answers(model, workload)
        part = workload.take(taken)
        log.append(measure(part, np.full(part.cells, 0.1)))
        model = made.fit(model, log)
        new.append(len(COMPILED) - before)
    assert new[0] > 0
    assert new[1:] == [0, 0, 0]


def test_other_measurements_are_refused():
    made = MixedProjection(rows=5, steps=2, levels=1)
    start = made.begin(COLUMNS, seed=0)
    for queries in (Residuals(SIZES, ((0, 2),)), Marginals(SIZES, ((0, 2),)).by_cell()):
        workload = Workload((queries,))
        with pytest.raises(ParameterError, match="must be of whole marginals, thresholds, bands and tests of numbers"):
            made.fit(start, [measure(workload, np.zeros(workload.cells))])


def test_a_start_is_repeated_by_its_seed():
    one, same, other = (MADE.begin(COLUMNS, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.reals, same.reals)
    np.testing.assert_array_equal(one.coded.probabilities, same.coded.probabilities)
    assert not np.array_equal(one.reals, other.reals)
