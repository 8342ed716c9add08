"""MWEM: against the paper's algorithm in plain numpy, against the truth, and what it refuses."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anamorph import archive
from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.residuals import Residual
from anamorph.curator.tallies import count
from anamorph.errors import CorruptionError, ParameterError, WorkloadError
from anamorph.mechanisms.mwem import MWEM
from anamorph.models import universe
from anamorph.models.universe import MultiplicativeWeights, Universe, connected, folded, multiply
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4, 2, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
RANDOM = np.random.default_rng(8)
PRODUCT = np.stack([RANDOM.choice(s, 4000, p=np.arange(1, s + 1) / (s * (s + 1) / 2)) for s in SIZES], axis=1)
CORRELATED = PRODUCT.copy()
CORRELATED[:, 1] = np.where(RANDOM.random(4000) < 0.8, PRODUCT[:, 0] % 2, PRODUCT[:, 1])
CORRELATED[:, 4] = np.where(RANDOM.random(4000) < 0.7, PRODUCT[:, 2] // 2, PRODUCT[:, 4])
DATA = {"product": PRODUCT, "correlated": CORRELATED}
WORKLOADS = {
    "one component": parse_workload("marginals:k=2", SCHEMA),
    "two components": Workload((Marginals(SIZES, ((1, 0), (4, 2))),)),
    "overlapping": Workload((Marginals(SIZES, ((0, 1), (1, 2), (3, 2), (4,))),)),
    "thresholds": Workload((Thresholds(SIZES, ((0, 1, 3), (2, 4)), 1),)),
}
ROWS = np.array(list(itertools.product(*map(range, SIZES))))
"""Every possible row."""


def source(rows):
    return TableSource(Table(rows.astype(np.int32), SIZES), SCHEMA)


def release(made, kind="one component", rows="correlated", epsilon=1.0, seed=0):
    curator = Curator(source(DATA[rows]), Budget(epsilon=epsilon, delta=1e-6), unsafe_seed=seed)
    return made(curator, WORKLOADS[kind], seed=seed)


def truth(workload, rows):
    return np.concatenate([count(piece.tally, source(rows)) for piece in workload.pieces()]) / len(rows)


def answers(model, workload):
    return np.concatenate(list(model.answers(workload)))


def joint(model):
    """The probability of every possible row."""
    return model.marginal(tuple(range(len(SIZES))))


def wanted(workload):
    """A 0/1 array for each query of a workload, over every possible row, by the definition of the query."""
    for part in workload.parts:
        marginals, chosen = (part.marginals, part.chosen) if isinstance(part, Cells) else (part, None)
        queries = []
        for features in marginals.sets:
            least = getattr(marginals, "least", len(features))
            for codes in itertools.product(*(range(SIZES[feature]) for feature in features)):
                queries.append(((ROWS[:, features] == codes).sum(axis=1) >= least).astype(float))
        yield from queries if chosen is None else [queries[position] for position in chosen]


def printed(measurements, sweeps):
    """Algorithm 1 given what was measured: the distribution after each round; with sweeps, the second improvement."""
    weights, past, rounds = np.full(len(ROWS), 1 / len(ROWS)), [], []
    for measurement in measurements:
        queries = np.array(list(wanted(measurement.workload)))
        past = [*past, (queries, measurement.values)] if sweeps else [(queries, measurement.values)]
        for _ in range(max(sweeps, 1)):
            for asked, noisy in past:
                weights = weights * np.exp(asked.T @ (noisy - asked @ weights) / 2)
                weights = weights / weights.sum()
        rounds.append(weights)
    return rounds


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("history", [0, 1, 3])
@pytest.mark.parametrize("kind", ["one component", "overlapping", "thresholds"])
def test_rounds_are_those_of_the_paper(kind, history, blocks):
    made = MWEM(rounds=5, blocks=blocks, history=history, step="paper", split=0.5)
    found = release(made, kind)
    assert len(found.measurements) == 5
    expected = printed(found.measurements, history)
    assert joint(found.model) == pytest.approx(expected[-1], abs=1e-12)
    assert np.abs(expected[-1] - 1 / len(ROWS)).max() > 1e-3


def test_the_average_is_that_of_the_rounds():
    made = MWEM(rounds=4, history=2, step="paper", average=True)
    found = release(made)
    expected = printed(found.measurements, 2)
    assert joint(found.model) == pytest.approx(np.mean(expected, axis=0), abs=1e-12)
    assert np.abs(np.mean(expected, axis=0) - expected[-1]).max() > 1e-3


def test_the_average_over_components_has_the_average_answers():
    queries = WORKLOADS["two components"]
    found = release(MWEM(rounds=4, history=1, average=True), "two components")
    model, each = Universe.uniform(SIZES, ((0, 1), (2, 4))), []
    for step in range(4):
        model = MultiplicativeWeights(history=1).fit(model, found.measurements[: step + 1])
        each.append(answers(model, queries))
    assert answers(found.model, queries) == pytest.approx(np.mean(each, axis=0))


@pytest.mark.parametrize("rows", DATA)
@pytest.mark.parametrize("kind", WORKLOADS)
def test_with_a_huge_budget_it_comes_to_the_truth(kind, rows):
    workload = WORKLOADS[kind]
    found = release(MWEM(rounds=3 * len(SIZES), history=100), kind, rows, epsilon=1e7)
    assert np.abs(answers(found.model, workload) - truth(workload, DATA[rows])).max() < 2e-3
    start = answers(Universe.uniform(SIZES, ()), workload)
    assert np.abs(start - truth(workload, DATA[rows])).max() > 0.1


def test_single_queries_come_to_the_truth_too():
    workload = WORKLOADS["overlapping"]
    found = release(MWEM(rounds=40, history=20, blocks=False), "overlapping", epsilon=1e7)
    assert np.abs(answers(found.model, workload) - truth(workload, CORRELATED)).max() < 5e-3


def test_product_data_stays_a_product():
    """Of all that explain the measurements, multiplicative weights come to the distribution of largest entropy."""
    single = Workload((Marginals(SIZES, tuple((i,) for i in range(len(SIZES)))),))
    exact = Measurement(single, truth(single, PRODUCT), np.full(5, 1e-9), 4000.0)
    model = MultiplicativeWeights(history=200).fit(MultiplicativeWeights().init(SIZES), (exact,))
    singles = [truth(Workload((Marginals(SIZES, ((i,),)),)), PRODUCT) for i in range(len(SIZES))]
    outer = singles[0]
    for other in singles[1:]:
        outer = np.multiply.outer(outer, other)
    assert joint(model) == pytest.approx(outer.ravel(), abs=1e-6)


@given(st.data())
def test_the_scaled_step_lowers_the_relative_entropy(data):
    """By at least |m - p|^2 / (4 b), whatever the distributions."""
    numbers = st.lists(st.floats(1e-6, 1), min_size=6, max_size=6)
    goal, start = (np.array(data.draw(numbers)).reshape(3, 2) for _ in range(2))
    goal, start = goal / goal.sum(), start / start.sum()
    features = data.draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
    marginals = Marginals((3, 2), (features,))
    whole = Universe((3, 2), {(0, 1): goal}).marginal(features)
    ids = [data.draw(st.integers(0, whole.size - 1))] if data.draw(st.booleans()) else None
    part = marginals if ids is None else Cells(marginals).take(ids)
    values = whole if ids is None else whole[ids]
    before = Universe((3, 2), {(0, 1): start})
    answered = answers(before, Workload((part,)))
    after = MultiplicativeWeights(history=1).fit(before, (Measurement(Workload((part,)), values, np.ones(1), 1.0),))

    def entropy(model):
        return float((goal * np.log(goal / model.components[0, 1])).sum())

    fall = np.square(values - answered).sum() / (4 * max(values.max(), answered.max()))
    assert entropy(before) - entropy(after) >= fall - 1e-12


@given(st.data())
def test_components_are_those_that_the_sets_connect(data):
    """Two columns are in one component if and only if a path of sets leads from one to the other."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=8)))
    columns = st.integers(0, len(sizes) - 1)
    sets = data.draw(st.lists(st.lists(columns, min_size=1, max_size=4, unique=True), max_size=6))
    found = connected(sizes, sets)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(sizes)))
    assert all(list(component) == sorted(component) for component in found)
    reach = np.eye(len(sizes), dtype=bool)
    for features in sets:
        for a, b in itertools.product(features, repeat=2):
            reach[a, b] = True
    for _ in sizes:
        reach = reach @ reach
    together = {(a, b) for component in found for a, b in itertools.product(component, repeat=2)}
    assert together == set(zip(*np.nonzero(reach), strict=True))


@given(st.data())
def test_folding_is_summing_and_multiplying_is_broadcasting(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    values = np.random.default_rng(0).random(shape)
    kept = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    expected = values.sum(axis=tuple(axis for axis in range(len(shape)) if axis not in kept))
    assert folded(values, kept) == pytest.approx(expected)
    multiplied, axes = values.copy(), "abcdef"[: len(shape)]
    multiply(multiplied, expected, kept)
    inner = "".join(axes[axis] for axis in kept)
    assert multiplied == pytest.approx(np.einsum(f"{axes},{inner}->{axes}", values, expected))


def random_model():
    parts = ((0, 2), (1,), (3,), (4,))
    drawn = {part: RANDOM.random([SIZES[feature] for feature in part]) for part in parts}
    return Universe(SIZES, {part: values / values.sum() for part, values in drawn.items()})


@pytest.mark.parametrize(
    "part",
    [
        Marginals(SIZES, ((0, 1), (2, 0), (4, 2, 3, 0), (1,))),
        Cells(Marginals(SIZES, ((2, 1, 0), (3, 4)))),
        Cells(Marginals(SIZES, ((2, 1, 0), (3, 4))), np.array([23, 0, 25, 7])),
        Thresholds(SIZES, ((0, 1, 2), (4, 0, 3)), 2),
        Cells(Thresholds(SIZES, ((0, 1, 2), (4, 0, 3)), 1), np.array([3, 17, 24])),
    ],
    ids=lambda part: type(part).__name__,
)
@pytest.mark.parametrize("limit", [3, 1000])
def test_answers_are_those_of_all_rows(part, limit):
    """Against the definition of each query, with slabs cut anywhere, within components and across."""
    model, queries = random_model(), Workload((part,), limit=limit)
    probabilities = np.ones(len(ROWS))
    for features, values in model.components.items():
        probabilities = probabilities * values[tuple(ROWS[:, features].T)]
    expected = [probabilities @ query for query in wanted(queries)]
    assert answers(model, queries) == pytest.approx(expected)


def test_what_has_no_cells_is_not_answered():
    model = random_model()
    with pytest.raises(ParameterError, match="no residuals"):
        model.answer(Residual(SIZES, (0, 1)))


def test_measurements_that_do_not_fit_are_refused():
    model, weights = random_model(), MultiplicativeWeights()
    across = Workload((Marginals(SIZES, ((0, 1),)),))
    with pytest.raises(ParameterError, match="within one component"):
        weights.fit(model, (Measurement(across, np.zeros(6), np.ones(1), 1.0),))
    thresholds = Workload((Thresholds(SIZES, ((0, 2),), 1),))
    with pytest.raises(ParameterError, match="whole marginals or of single queries"):
        weights.fit(model, (Measurement(thresholds, np.zeros(12), np.ones(1), 1.0),))


def test_sweeps_end_where_noise_explains_the_rest_or_they_gain_no_more():
    queries = Workload((Marginals((2, 3), ((0, 1),)),))
    values = np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    once, loud, quiet = (
        MultiplicativeWeights(history=history).fit(
            Universe.uniform((2, 3), ((0, 1),)), (Measurement(queries, values, np.array([sigma]), 100.0),)
        )
        for history, sigma in ((1, 1e-9), (1000, 1.0), (1000, 1e-9))
    )
    assert loud.marginal((0, 1)).tolist() == once.marginal((0, 1)).tolist()
    assert np.abs(once.marginal((0, 1)) - values).max() > 0.05
    assert quiet.marginal((0, 1)) == pytest.approx(values, abs=1e-2)


def test_a_few_marginals_of_many_cells_are_fitted():
    """The bug: after five sweeps marginals of a hundred cells stood nearer to uniform than to what was measured."""
    sizes = (12, 12, 12)
    generator = np.random.default_rng(5)
    first = generator.choice(12, 5000, p=0.6 ** np.arange(12) / np.sum(0.6 ** np.arange(12)))
    codes = np.stack([(first + generator.integers(0, 2, 5000) * column) % 12 for column in range(3)], axis=1)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="wide")
    rows = TableSource(Table(codes.astype(np.int32), sizes), schema)
    workload = Workload((Marginals(sizes, ((0, 1), (1, 2))),))
    told = Curator(rows, Budget(epsilon=1e4, delta=1e-6), unsafe_seed=1)
    found = MWEM(rounds=4)(told, workload, seed=0)
    exact = np.concatenate([count(piece.tally, rows) for piece in workload.pieces()]) / 5000
    assert np.abs(answers(found.model, workload) - exact).max() < 0.01


def test_a_cell_measured_below_zero_can_come_back(monkeypatch):
    monkeypatch.setattr(universe, "SLOW", -1.0)  # sweeps to the last
    queries = Workload((Marginals((2,), ((0,),)),))
    below, above = (Measurement(queries, np.array([x, 1 - x]), np.full(1, 1e-9), 1.0) for x in (-0.5, 0.5))
    weights = MultiplicativeWeights(history=2000)
    model = weights.fit(Universe.uniform((2,), ()), (below,))
    assert model.components[0,].tolist() == [1e-100, 1]
    assert weights.fit(model, (above,)).components[0,] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("kind", "cells", "connects"),
    [
        ("one component", 96, "5 columns, at positions 0, 1, 2, 3, 4, with 96"),
        ("overlapping", 48, "4 columns, at positions 0, 1, 2, 3, with 48"),
        ("two components", 8, "2 columns, at positions 2, 4, with 8"),
    ],
)
def test_a_universe_that_is_too_large_is_refused_with_its_size(kind, cells, connects):
    curator = Curator(source(PRODUCT), Budget(epsilon=1.0, delta=1e-6))
    with pytest.raises(
        WorkloadError, match=rf"no columns with more than {cells - 1} .* {connects}: take auto or mwem-"
    ):
        MWEM(universe=cells - 1)(curator, WORKLOADS[kind], seed=0)
    assert curator.privacy().spends == ()
    assert len(MWEM(universe=cells, rounds=3).steps_for(WORKLOADS[kind], 1.0)) == 6


def test_a_universe_of_any_size_is_refused_at_once():
    sizes = (100,) * 60
    wide = Workload((Marginals(sizes, tuple(itertools.combinations(range(60), 2))),))
    with pytest.raises(WorkloadError, match=r"60 columns, at positions 0, .*, 7 and 52 more, with 1\.000e\+120: take"):
        MWEM().steps_for(wide, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, r"rounds \(-1\) must be a whole number from 0"),
        ({"split": 1.0}, r"split \(1.0\) must be in \(0, 1\)"),
        ({"history": -1}, r"history \(-1\) must be a whole number of at least 0"),
        ({"step": "long"}, r"step \('long'\) must be scaled or paper"),
        ({"universe": 0}, r"universe \(0\) must be a whole number of at least 1"),
        ({"universe": 1 << 40}, r"universe \(1099511627776\) must be at most 4294967296"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        MWEM(**settings)


def test_memory_grows_with_the_universe():
    small, large = (Workload((Marginals((2,) * n, (tuple(range(n)),)),), limit=1 << 10) for n in (12, 22))
    assert MWEM().memory(large) - MWEM().memory(small) >= 8 * 8 * ((1 << 22) - (1 << 12))
    assert MWEM(average=True).memory(large) - MWEM().memory(large) == 8 << 22


def test_what_weighs_more_is_selected():
    rows = Marginals(SIZES, ((0, 1), (2, 4)))
    for first in (0, 1):
        weights = (Fraction(9), Fraction(1))
        workload = Workload((rows.take([first]), rows.take([1 - first])), weights=weights)
        curator = Curator(source(CORRELATED), Budget(epsilon=1e4, delta=1e-6), unsafe_seed=0)
        found = MWEM(rounds=1)(curator, workload, seed=0)
        (part,) = found.measurements[0].workload.parts
        assert part.sets == (tuple(sorted(rows.sets[first])),)


def test_rows_follow_the_model():
    model = release(MWEM(rounds=8), "two components").model
    table = model.sample(50_000, seed=1)
    assert table.sizes == SIZES
    for component, values in model.components.items():
        found = np.bincount(table.cells(component), minlength=values.size)
        assert np.abs(found - 50_000 * values.ravel()).max() <= 1 + 1e-6
    across = np.bincount(table.cells((0, 4)), minlength=6) / 50_000
    assert np.abs(across - model.marginal((0, 4))).max() < 6 * math.sqrt(0.25 / 50_000)
    assert np.array_equal(table.codes, model.sample(50_000, seed=1).codes)
    assert not np.array_equal(table.codes, model.sample(50_000, seed=2).codes)


def test_rows_keep_what_is_asked_of_them():
    sizes = (2,) * 12
    values = np.random.default_rng(3).random(sizes) ** 4
    model = Universe(sizes, {tuple(range(12)): values / values.sum()})
    keep = ((0, 1), (3, 7), (9, 11))

    def error(table):
        return max(np.abs(np.bincount(table.cells(f), minlength=4) - 500 * model.marginal(f)).max() for f in keep)

    assert error(model.sample(500, seed=0, keep=keep)) <= 1 < error(model.sample(500, seed=0))


@pytest.mark.parametrize("average", [True, False])
def test_a_release_survives_saving_and_loading(average, tmp_path):
    found = release(MWEM(rounds=3, average=average), "two components")
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release").model
    assert isinstance(loaded, Universe)
    assert list(loaded.components) == [(0, 1), (2, 4), (3,)]
    assert np.array_equal(joint(loaded), joint(found.model))


@pytest.mark.parametrize(
    "change",
    [
        {"features.0": np.array([2, 0])},
        {"features.0": np.array([0, 2], np.int32)},
        {"features.0": np.array([0, 0])},
        {"features.0": np.array([0, 9])},
        {"features.0": np.array([], np.int64)},
        {"features.1": np.array([4])},
        {"probabilities.0": np.full(6, 1 / 6)},
        {"probabilities.0": np.full(12, 1 / 12, np.float32)},
        {"probabilities.0": np.full((3, 4), 1 / 12)},
        {"probabilities.0": np.full(12, 1 / 11)},
        {"probabilities.0": np.r_[-1 / 10, np.full(11, 1.1 / 11)]},
        {"probabilities.0": np.full(12, np.nan)},
        {"probabilities.4": np.ones(1), "features.4": np.array([3])},
        {"probabilities.9": np.ones(1)},
        {"features.2": None, "probabilities.2": None},
        {"features.3": None, "probabilities.3": None},
    ],
)
def test_arrays_that_are_not_a_model_are_refused(change):
    arrays = random_model().arrays()
    assert joint(Universe.from_arrays(SIZES, arrays)).sum() == pytest.approx(1)
    changed = {name: array for name, array in (arrays | change).items() if array is not None}
    with pytest.raises(CorruptionError, match="the model must hold"):
        Universe.from_arrays(SIZES, changed)
