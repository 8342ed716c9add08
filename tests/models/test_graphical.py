"""Graphical models: inference against the joint written out, fits against the truth and against mbi, rows."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models import junction
from anamorph.models.bounds import Tail
from anamorph.models.graphical import (
    Goal,
    Graphical,
    GraphicalModel,
    Target,
    deal,
    model_megabytes,
    noise_loss,
)
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema

SIZES = (3, 2, 4, 2, 3)
SHAPES = {
    "nothing": (),
    "independent": ((0,), (1,), (3,)),
    "chain": ((0, 1), (1, 2), (2, 3), (3, 4)),
    "star": ((0, 1), (0, 2), (0, 3), (4,)),
    "cycle": ((0, 1), (1, 2), (2, 3), (0, 3)),
    "triples": ((0, 1, 2), (2, 3, 4), (1, 3)),
    "two parts": ((0, 1), (2, 4), (3,)),
    "everything": ((0, 1, 2, 3, 4),),
}
SETS = [sets for k in (1, 2, 3) for sets in itertools.permutations(range(5), k)]


def field(shape, scale=1.5):
    generator = np.random.default_rng(len(shape))
    cliques = [junction.clique_of(SIZES, features) for features in shape]
    return GraphicalModel(SIZES, {c: scale * generator.normal(size=[SIZES[f] for f in c]) for c in cliques})


def joint(model):
    """The distribution, written out: an axis for each feature."""
    total = np.zeros(model.sizes)
    for clique, potential in model.potentials.items():
        order = np.argsort(clique)
        shape = [model.sizes[f] if f in clique else 1 for f in range(len(model.sizes))]
        total = total + potential.transpose(order).reshape(shape)
    found = np.exp(total - total.max())
    return found / found.sum()


def marginal(distribution, features):
    summed = distribution.sum(axis=tuple(f for f in range(distribution.ndim) if f not in features))
    kept = sorted(features)
    return summed.transpose([kept.index(f) for f in features]).ravel()


def all_answers(model, workload):
    return np.concatenate(list(model.answers(workload)))


@pytest.fixture(params=SHAPES, name="shape")
def _shape(request):
    return SHAPES[request.param]


def test_marginals_are_those_of_the_joint(shape):
    model = field(shape)
    workload = Workload((Marginals(SIZES, tuple(SETS)),))
    expected = np.concatenate([marginal(joint(model), features) for features in SETS])
    assert all_answers(model, workload) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_slabs_are_parts_of_the_whole(shape, limit):
    model = field(shape)
    parts = (Marginals(SIZES, ((2, 0, 4), (1, 3))), Thresholds(SIZES, ((0, 2, 3),), 2))
    assert all_answers(model, Workload(parts, limit=limit)) == pytest.approx(all_answers(model, Workload(parts)))


@pytest.mark.parametrize("least", [1, 2, 3])
def test_thresholds_and_single_cells(shape, least):
    model, features = field(shape), (4, 0, 2)
    cells = marginal(joint(model), features)
    codes = np.stack(np.unravel_index(np.arange(cells.size), [SIZES[f] for f in features]), axis=1)
    agree = (codes[:, None] == codes[None]).sum(axis=2) >= least
    workload = Workload((Thresholds(SIZES, (features,), least),))
    assert all_answers(model, workload) == pytest.approx(agree @ cells, abs=1e-12)
    chosen = np.array([5, 0, 17])
    assert all_answers(model, workload.by_cell().take(chosen)) == pytest.approx((agree @ cells)[chosen], abs=1e-12)


def test_functions_are_refused():
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
    with pytest.raises(ParameterError, match="must be of marginals and thresholds"):
        all_answers(field(()), Workload((custom(lambda row: row["c0"][0], schema),)))


def test_a_tree_has_every_clique_and_the_running_intersection(shape):
    tree = junction.junction_tree(SIZES, [junction.clique_of(SIZES, features) for features in shape])
    assert all(tree.home(features) >= 0 for features in shape)
    assert set(itertools.chain.from_iterable(tree.cliques)) == set(range(5))
    for feature in range(5):
        holders = [i for i, clique in enumerate(tree.cliques) if feature in clique]
        assert all(tree.parents[i] in holders for i in holders[1:])


def test_large_potentials_do_not_overflow():
    model = field(SHAPES["cycle"], scale=150.0)
    expected = np.concatenate([marginal(joint(model), features) for features in SETS])
    assert all_answers(model, Workload((Marginals(SIZES, tuple(SETS)),))) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("apart", [100.0, 742.0, 800.0, 1e6, 1e100])
def test_cliques_that_peak_far_apart_have_exact_marginals(apart):
    """The first value of column 1 costs `apart` in one clique, the second in the other: they cancel."""
    one, two = np.array([[-apart, 0.0], [-apart, 0.0]]), np.array([[0.0, -apart], [0.0, -apart]])
    model = GraphicalModel((2, 2, 2), {(0, 1): one, (1, 2): two.T})
    assert model.marginal((0, 1, 2)) == pytest.approx(np.full(8, 1 / 8))
    assert model.marginal((0, 2)) == pytest.approx(np.full(4, 1 / 4))


def measured(distribution, sets, sigma=1e-6, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    exact = np.concatenate([marginal(distribution, features) for features in sets])
    workload = Workload((Marginals(SIZES, tuple(sets)),))
    return Measurement(workload, exact + noise * random.normal(size=exact.size), np.full(len(sets), sigma), 1000.0)


def test_a_fit_approaches_the_truth(shape):
    truth = field(shape, scale=0.7)
    sets = [(2,), (4,), *shape]
    measurement = measured(joint(truth), list(dict.fromkeys(sets)))
    fitted = Graphical(iterations=3000, tolerance=1e-9).fit(Graphical().init(SIZES, seed=0), (measurement,), seed=0)
    assert joint(fitted) == pytest.approx(joint(truth), abs=1e-4)


def test_a_fit_takes_marginals_in_any_order_of_columns():
    truth = joint(field(SHAPES["chain"]))
    fitted = Graphical().fit(GraphicalModel(SIZES), (measured(truth, [(2, 0), (4, 2, 1)]),))
    for features in ((0, 2), (2, 0), (1, 2, 4)):
        assert fitted.marginal(features) == pytest.approx(marginal(truth, features), abs=1e-3)


def test_measurements_of_one_marginal_are_weighed_by_their_precision():
    ones = [np.array([0.5, 0.5]), np.array([0.8, 0.2])]
    workload = Workload((Marginals(SIZES, ((1,),)),))
    log = [Measurement(workload, v, np.array([s]), 100.0) for v, s in zip(ones, (0.01, 0.02), strict=True)]
    assert Graphical().fit(GraphicalModel(SIZES), log).marginal((1,))[0] == pytest.approx(0.56, abs=1e-4)


def test_a_warm_start_costs_few_steps():
    log = (measured(joint(field(SHAPES["cycle"])), SHAPES["cycle"], sigma=0.01, noise=0.01),)
    cold = Graphical(iterations=500).fit(GraphicalModel(SIZES), log)
    warm = Graphical(iterations=5).fit(cold, log)
    assert joint(warm) == pytest.approx(joint(cold), abs=1e-3)


def test_a_warm_start_keeps_rare_values():
    """Nearly constant columns let the step size grow: the first step on a new clique would then drown rare values."""
    common = np.array([0.997, 0.001, 0.001, 0.001])
    random, sigma = np.random.default_rng(0), 1e-4
    model, log = GraphicalModel((4, 4, 4)), ()
    for features in ((0, 1), (1, 2), (0, 2)):
        noisy = np.outer(common, common).ravel() + sigma * random.normal(size=16)
        log += (Measurement(Workload((Marginals((4, 4, 4), (features,)),)), noisy, np.array([sigma]), 1.0),)
        model = Graphical().fit(model, log)
        for feature in features:
            assert model.marginal((feature,)) == pytest.approx(common, abs=6 * sigma)


def test_a_fit_until_noise_stops_where_the_truth_would_be():
    """Independent columns, measured with much noise: a full fit follows it, one until noise stays nearer to them."""
    random, sizes, sets = np.random.default_rng(0), (30, 20, 25), ((0, 1), (1, 2))
    one = [random.dirichlet(np.ones(size)) for size in sizes]
    near = GraphicalModel(sizes, {(feature,): np.log(values) for feature, values in enumerate(one)})
    exact = np.concatenate([near.marginal(features) for features in sets])
    workload = Workload((Marginals(sizes, sets),))
    noisy = Measurement(workload, exact + 0.003 * random.normal(size=exact.size), np.full(2, 0.003), 1000.0)
    full, until = (Graphical().fit(near, (noisy,), until_noise=until) for until in (False, True))
    far, close = (np.abs(all_answers(model, workload) - exact).sum() for model in (full, until))
    assert close < 0.6 * far
    sure = Measurement(workload, exact, np.full(2, 1e-5), 1000.0)
    again = Graphical(iterations=3000, tolerance=0).fit(GraphicalModel(sizes), (sure,), until_noise=True)
    assert all_answers(again, workload) == pytest.approx(exact, abs=5e-5)


def test_the_loss_of_noise_is_half_of_the_numbers_measured():
    goals = {Target((0, 1), False): Goal(np.zeros((50, 40)), 1.0), Target((0, 2), True): Goal(np.zeros((50, 3)), 1.0)}
    numbers = 50 * 40 + 49 * 2
    assert noise_loss(goals) == pytest.approx(numbers / 2 - 2.5 * np.sqrt(numbers / 2))


def test_thresholds_are_not_fitted():
    workload = Workload((Thresholds(SIZES, ((0, 1),), 1),))
    with pytest.raises(ParameterError, match="whole marginals"):
        Graphical().fit(GraphicalModel(SIZES), (Measurement(workload, np.zeros(6), np.ones(1), 10.0),))


@pytest.mark.parametrize(("settings", "message"), [({"iterations": 0}, "iterations"), ({"tolerance": 1}, "tolerance")])
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=rf"{message} \({settings[message]}\) must be"):
        Graphical(**settings)


@pytest.mark.parametrize("rows", [1, 50, 4000])
def test_rows_follow_every_marginal_of_the_model(shape, rows):
    model = field(shape)
    table = model.sample(rows, seed=4)
    assert table.rows == rows
    assert np.all((table.codes >= 0) & (table.codes < SIZES))
    for features in SETS:
        expected = marginal(joint(model), features)
        found = np.bincount(table.cells(features), minlength=expected.size) / rows
        assert np.abs(found - expected).max() < 2.2 / np.sqrt(rows)


def test_rows_keep_the_dependence_of_columns_that_only_triangulation_joins():
    """The bug of the reference's sampler: given one neighbour alone, the far side of a cycle is lost."""
    eye = np.where(np.eye(2) > 0, 2.0, 0.0)
    model = GraphicalModel((2, 2, 2, 2), dict.fromkeys(((0, 1), (1, 2), (2, 3), (0, 3)), eye))
    table = model.sample(20_000, seed=0)
    for features in itertools.combinations(range(4), 3):
        expected = model.marginal(features)
        found = np.bincount(table.cells(features), minlength=8) / 20_000
        assert np.abs(found - expected).max() < 0.004


def test_counts_are_rounded_not_drawn():
    given = np.random.default_rng(0).dirichlet(np.ones(6), size=3)
    owner = np.repeat([0, 1, 2], [100, 37, 400])
    drawn = deal(given, owner, np.random.default_rng(1))
    for line in range(3):
        count = (owner == line).sum()
        assert np.abs(np.bincount(drawn[owner == line], minlength=6) - count * given[line]).max() <= 2
    assert np.abs(np.bincount(deal(given[:1], owner, np.random.default_rng(1))) - owner.size * given[0]).max() <= 1


def test_values_of_probability_zero_are_never_drawn():
    given = np.array([[0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    drawn = deal(given, np.random.default_rng(0).integers(0, 2, 5000), np.random.default_rng(1))
    assert set(drawn.tolist()) == {1, 3, 4}


def test_arrays_make_the_model_again(shape):
    model = field(shape)
    again = GraphicalModel.from_arrays(SIZES, model.arrays())
    assert joint(again) == pytest.approx(joint(model))


@pytest.mark.parametrize(
    "change",
    [
        {"potential.0": np.full(6, np.nan)},
        {"potential.0": np.full(6, 1e200)},
        {"potential.0": np.zeros(6, np.complex128)},
        {"features.0": np.array([1.0, 0.0])},
        {"potential.0": np.zeros(5)},
        {"features.0": np.array([0, 1])},  # not in the order of cliques
        {"features.0": np.array([1, 9])},
        {"features.0": np.array([0, 0])},
        {"features.1": np.array([1, 0]), "potential.1": np.zeros(6)},  # twice
        {"more": np.zeros(1)},
    ],
)
def test_arrays_that_are_no_model_are_refused(change):
    arrays = field(((0, 1), (1, 2))).arrays() | change
    with pytest.raises((CorruptionError, KeyError)):
        GraphicalModel.from_arrays(SIZES, arrays)


BOUNDED = GraphicalModel(SIZES, {(1, 0): np.zeros((2, 3))}, bounds={(1, 2): Tail(0.5, 0.1, 0.2, 0.3)})


def test_error_bounds_are_kept():
    model = replace(field(((0, 1), (1, 2))), bounds={(1, 0, 4): Tail(0.1, 0.2, 0.3, 1.0), (2,): Tail(-0.1, 0, 0, 0.5)})
    again = GraphicalModel.from_arrays(SIZES, model.arrays())
    assert again.bounds == {junction.clique_of(SIZES, clique): tail for clique, tail in model.bounds.items()}
    assert joint(again) == pytest.approx(joint(model))
    assert GraphicalModel.from_arrays(SIZES, BOUNDED.arrays()).bounds == BOUNDED.bounds


@pytest.mark.parametrize(
    "change",
    [
        {"bounds": np.array([[0.5, 0.1, 0.2, np.nan]])},
        {"bounds": np.array([[np.inf, 0.1, 0.2, 0.5]])},
        {"bounds": np.array([[0.5, -0.1, 0.2, 0.5]])},
        {"bounds": np.array([[0.5, 0.1, -0.2, 0.5]])},
        {"bounds": np.array([[0.5, 0.1, 0.2, 0.0]])},
        {"bounds": np.array([[0.5, 0.1, 0.2, 1.1]])},
        {"bounds": np.array([[0.5, 0.1, 0.2]])},
        {"bounds": np.array([0.5, 0.1, 0.2, 0.3])},
        {"bounds": np.array([[1, 0, 0, 1]])},
        {"bounds": np.zeros((2, 4))},
        {"bounded": np.array([[0, 1, 1, 0, 0]])},
        {"bounded": np.zeros((1, 5), bool)},
        {"bounded": np.ones((1, 4), bool)},
        {"bounded": np.ones((2, 5), bool), "bounds": np.full((2, 4), 0.5)},  # twice
        {"bounded": None},
        {"bounds": None},
    ],
)
def test_arrays_that_are_no_bounds_are_refused(change):
    arrays = {name: array for name, array in (BOUNDED.arrays() | change).items() if array is not None}
    with pytest.raises((CorruptionError, KeyError)):
        GraphicalModel.from_arrays(SIZES, arrays)


def test_a_model_too_large_to_use_is_not_loaded():
    sizes = (100,) * 6
    model = GraphicalModel(sizes, {pair: np.zeros((100, 100)) for pair in itertools.combinations(range(6), 2)})
    with pytest.raises(CorruptionError, match="at most 4096 MB"):
        GraphicalModel.from_arrays(sizes, model.arrays())


@pytest.fixture(name="mbi")
def _mbi():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("mbi")


def test_models_are_no_larger_than_those_of_mbi(mbi):
    random = np.random.default_rng(1)
    for _ in range(30):
        sizes = tuple(int(size) for size in random.integers(2, 30, 9))
        sets = [tuple(int(f) for f in random.choice(9, 2, replace=False)) for _ in range(10)]
        theirs = mbi.junction_tree.hypothetical_model_size(mbi.Domain(tuple(range(9)), sizes), sets)
        assert 0.5 * theirs <= model_megabytes(sizes, sets) <= 1.05 * theirs


def test_fits_agree_with_mbi(mbi):
    sets = SHAPES["cycle"]
    measurement = measured(joint(field(sets)), sets, sigma=0.02, noise=0.02)
    ours = Graphical(iterations=3000, tolerance=1e-10).fit(GraphicalModel(SIZES), (measurement,))
    cells, values = np.cumsum([0, *(SIZES[a] * SIZES[b] for a, b in sets)]), measurement.values
    log = [mbi.LinearMeasurement(values[cells[i] : cells[i + 1]], s, 0.02) for i, s in enumerate(sets)]
    domain = mbi.Domain(tuple(range(5)), SIZES)
    theirs = mbi.estimation.MirrorDescent().estimate(domain, log, known_total=1.0, iters=3000)
    for features in itertools.combinations(range(4), 2):
        expected = np.asarray(theirs.project(features).values).ravel()
        assert ours.marginal(features) == pytest.approx(expected, abs=1e-3)
