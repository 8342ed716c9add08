"""HDMM end to end: what it measures, what follows from it, and what it refuses."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from anamorph import archive
from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import count, marginal_cells
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.hdmm import HDMM
from anamorph.mechanisms.mechanism import mechanism
from anamorph.models.graphical import Graphical, GraphicalModel, model_megabytes
from anamorph.models.least_squares import LeastSquares, centred, least_squares
from anamorph.planning import plan
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SIZES = (3, 4, 2, 5)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
_RANDOM = np.random.default_rng(2)
_FIRST = _RANDOM.integers(0, 3, 2000)
CODES = np.stack(
    [_FIRST, np.where(_RANDOM.random(2000) < 0.8, _FIRST, 3), _FIRST // 2, _RANDOM.binomial(4, 0.1, 2000)], axis=1
).astype(np.int32)
SPEC = "marginals:k=2; thresholds:of=c0+c1+c2,r=2,weight=2; marginals:of=c2"
SPECS = ("marginals:k=2", "marginals:k=1,weight=9; marginals:k=3", SPEC)
BUDGET = Budget(epsilon=1.0, delta=1e-6)


def curator(relation="replace", epsilon=1.0, seed=None):
    source = TableSource(Table(CODES, SIZES), SCHEMA)
    return Curator(source, Budget(epsilon=epsilon, delta=1e-6), neighbours=relation, unsafe_seed=seed)


def release(made, spec=SPEC, **more):
    return made(curator(**more), parse_workload(spec, SCHEMA), seed=0)


def answers(found, spec=SPEC):
    return np.concatenate(list(found.model.answers(parse_workload(spec, SCHEMA))))


def truth(spec=SPEC):
    source = TableSource(Table(CODES, SIZES), SCHEMA)
    return np.concatenate([count(piece.tally, source) for piece in parse_workload(spec, SCHEMA).pieces()]) / 2000


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("inference", ["least-squares", "local", "graphical"])
@pytest.mark.parametrize("objective", ["total", "max"])
@pytest.mark.parametrize("strategy", ["marginals", "residuals"])
def test_without_noise_the_answers_are_the_truth(strategy, objective, inference, relation):
    made = HDMM(strategy=strategy, objective=objective, inference=inference, iterations=1500)
    found = release(made, relation=relation, epsilon=1e9)
    most = 2e-2 if inference == "graphical" else 1e-4  # a fit from the uniform distribution ends before the truth
    np.testing.assert_allclose(answers(found), truth(), atol=most)
    assert isinstance(found.model, GraphicalModel if inference == "graphical" else LeastSquares)
    (measurement,) = found.measurements
    kinds = {type(part) for part in measurement.workload.parts}
    assert kinds == {Residuals if strategy == "residuals" else Marginals}


@pytest.mark.parametrize("strategy", ["marginals", "residuals"])
def test_answers_are_least_squares_of_what_was_measured(strategy, tmp_path):
    found = release(HDMM(strategy=strategy))
    expected = least_squares(SIZES, found.measurements)
    for features in itertools.combinations(range(4), 2):
        np.testing.assert_array_equal(found.model.marginal(features), expected.marginal(features))
    archive.save(found, tmp_path / "r")
    again = archive.load(tmp_path / "r")
    assert isinstance(again.model, LeastSquares)
    np.testing.assert_array_equal(answers(again), answers(found))
    assert again.measurements[0].workload.digest == found.measurements[0].workload.digest


@pytest.mark.parametrize("strategy", ["marginals", "residuals"])
def test_local_answers_are_nowhere_below_zero(strategy):
    spec = "marginals:k=2"
    plain, local = (
        release(
            HDMM(strategy=strategy, inference=inference, tolerance=1e-4, iterations=3000), spec, seed=5, epsilon=0.3
        )
        for inference in ("least-squares", "local")
    )
    np.testing.assert_array_equal(plain.measurements[0].values, local.measurements[0].values)
    assert answers(plain, spec).min() < -0.005
    assert answers(local, spec).min() > -1e-5
    error, nearer = (np.mean((answers(found, spec) - truth(spec)) ** 2) for found in (plain, local))
    assert nearer < error
    assert all(local.model.marginal(f).sum() == pytest.approx(1) for f in itertools.combinations(range(4), 2))


def variances(found, spec):
    """The variance of every query, in counts."""
    model, every = least_squares(SIZES, found.measurements), []
    for part in parse_workload(spec, SCHEMA).parts:
        for features in part.sets:
            cell = np.zeros([SIZES[feature] for feature in features])
            cell.flat[0] = 1
            every += [(model.weighted(features, cell).sigma * found.total) ** 2] * cell.size
    return np.array(every)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_noise_is_less_than_that_of_the_workload_itself(relation):
    """Where a row is added or removed residuals are optimal; where one is replaced marginals are better here."""
    spec = "marginals:k=1; marginals:k=2; marginals:k=3"
    plain = variances(release(Gaussian(), spec, relation=relation), spec).sum()
    marginals = variances(release(HDMM(), spec, relation=relation), spec).sum()
    residuals = variances(release(HDMM(strategy="residuals"), spec, relation=relation), spec).sum()
    assert marginals < 0.9 * plain
    if relation == "add-remove":
        assert residuals < marginals
    else:
        assert residuals > marginals


@pytest.mark.parametrize("strategy", ["marginals", "residuals"])
def test_the_largest_variance_is_less_where_it_is_what_is_minimised(strategy):
    spec = "marginals:k=1; marginals:k=3"

    def largest(objective):
        made = HDMM(strategy=strategy, objective=objective)
        return variances(release(made, spec, relation="add-remove"), spec).max()

    assert largest("max") < 0.97 * largest("total")


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("objective", ["total", "max"])
@pytest.mark.parametrize("strategy", ["marginals", "residuals"])
def test_the_plan_is_what_a_run_spends(strategy, objective, spec, relation):
    made = HDMM(strategy=strategy, objective=objective)
    figures = plan(SCHEMA, spec, made, BUDGET, neighbours=relation, rows=2000)
    found = release(made, spec, relation=relation)
    spends = found.privacy.spends
    assert [step["kind"] for step in figures["steps"]] == [spend.kind for spend in spends]
    assert [step["rho"] for step in figures["steps"]] == pytest.approx([spend.rho for spend in spends])
    step = figures["steps"][-1]
    (measurement,) = found.measurements
    assert step["sigma_counts"] == pytest.approx(measurement.sigma.min() * found.total, rel=1e-12)
    assert f"sigma {step['sigma_counts']:.6g}" in spends[-1].what
    assert (step["blocks"], step["queries"]) == (measurement.workload.blocks, measurement.workload.cells)
    assert figures["memory_bytes"] > 8 * measurement.workload.cells
    assert sum(Fraction(spend.rho) for spend in spends) <= Fraction(BUDGET.rho)


def test_thresholds_count_as_their_marginals():
    sets = ((0, 1, 2), (1, 3))
    whole = Workload((Marginals(SIZES, sets),))
    some = Workload((Thresholds(SIZES, sets, 1),))
    assert HDMM().queries(some).digest == HDMM().queries(whole).digest
    found = HDMM()(curator(epsilon=1e9), some, seed=0)
    alike = np.concatenate(list(found.model.answers(some)))
    source = TableSource(Table(CODES, SIZES), SCHEMA)
    expected = np.concatenate([count(piece.tally, source) for piece in some.pieces()]) / 2000
    np.testing.assert_allclose(alike, expected, atol=1e-4)


def test_weights_of_the_workload_matter():
    plain = release(HDMM(), "marginals:of=c0; marginals:of=c3")
    heavy = release(HDMM(), "marginals:of=c0,weight=100; marginals:of=c3")

    def sigma(found, feature):
        cell = np.zeros(SIZES[feature])
        cell[0] = 1
        return found.model.weighted((feature,), cell).sigma

    assert sigma(heavy, 0) < sigma(plain, 0) / 1.2
    assert sigma(heavy, 3) > sigma(plain, 3) * 1.5


def test_columns_in_another_order_are_the_same_marginal():
    one = Workload((Marginals(SIZES, ((0, 3), (1, 2))),))
    other = Workload((Marginals(SIZES, ((3, 0), (2, 1))),))
    assert HDMM().queries(one).digest == HDMM().queries(other).digest
    found = HDMM(inference="local")(curator(epsilon=1e9), other, seed=0)
    table = np.zeros((5, 3))
    np.add.at(table, (CODES[:, 3], CODES[:, 0]), 1 / 2000)
    np.testing.assert_allclose(next(iter(found.model.answers(other)))[:15], table.ravel(), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "identity"}, r"strategy \('identity'\) must be one of marginals, residuals"),
        ({"objective": "mean"}, r"objective \('mean'\) must be one of total, max"),
        ({"inference": "rows"}, r"inference \('rows'\) must be one of least-squares, local, graphical"),
        ({"model_size": "0"}, r"model_size \(0.0\) must be above 0 and at most 4096"),
        ({"model_size": "5000"}, r"model_size \(5000.0\) must be"),
        ({"model_size": "nan"}, r"model_size \(nan\) must be"),
        ({"iterations": "0"}, r"iterations \(0\) must be"),
        ({"tolerance": "-1"}, r"tolerance \(-1.0\) must be"),
        ({"rounds": "3"}, "must be one of"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        mechanism("hdmm", settings)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("made", [HDMM(), HDMM(strategy="residuals"), HDMM(inference="graphical")])
def test_functions_are_refused_before_anything_is_spent(made, relation):
    workload = Workload((Marginals(SIZES, ((0, 1),)), custom(lambda row: row["c0"] / 2, SCHEMA, name="tests:half")))
    asked = curator(relation)
    with pytest.raises(WorkloadError, match="must be of marginals and thresholds: take auto for functions"):
        made(asked, workload, seed=0)
    assert asked.privacy().spends == ()


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_junction_tree_too_large_is_refused_before_anything_is_spent(relation):
    workload = parse_workload("marginals:k=2", SCHEMA)
    size = model_megabytes(SIZES, list(itertools.combinations(range(4), 2)))
    assert size == pytest.approx(8 * marginal_cells(SIZES, (0, 1, 2, 3)) / 2**20)
    asked = curator(relation)
    with pytest.raises(WorkloadError, match=r"junction tree of at most .* \(model_size\).*: take inference=local"):
        HDMM(inference="graphical", model_size=0.9 * size)(asked, workload, seed=0)
    assert asked.privacy().spends == ()
    HDMM(inference="graphical", model_size=1.1 * size, iterations=2)(asked, workload, seed=0)
    for inference in ("least-squares", "local"):
        HDMM(inference=inference, model_size=0.9 * size, iterations=2)(curator(relation), workload, seed=0)


def test_the_memory_of_a_graphical_model_is_counted():
    workload = parse_workload("marginals:k=2", SCHEMA)
    plain, tree = (HDMM(inference=inference, model_size=100).memory(workload) for inference in ("local", "graphical"))
    assert tree - plain == 6 * 100 << 20


def test_graphical_models_are_fitted_to_residuals():
    """A distribution with no cell near 0 reaches the least squares estimate itself."""
    generator = np.random.default_rng(4)
    cells = generator.dirichlet(np.full(15, 20.0)).reshape(3, 5)
    workload = Workload(
        (Residuals(SIZES, ((3, 0), (0,))), Residuals(SIZES, ((3,),))), weights=(Fraction(3), Fraction(1))
    )
    sigma = np.array([0.002, 0.001, 0.003])
    exact = [centred(cells.T).ravel(), centred(cells.sum(axis=1)), centred(cells.sum(axis=0))]
    noisy = [values + s * generator.normal(size=values.size) for values, s in zip(exact, sigma, strict=True)]
    log = (Measurement(workload, np.concatenate(noisy), sigma, 2000.0),)
    linear = least_squares(SIZES, log).marginal((0, 3))
    assert linear.min() > 0.01
    fitted = Graphical(iterations=5000, tolerance=1e-12).fit(GraphicalModel(SIZES), log)
    found = next(iter(fitted.answers(Workload((Marginals(SIZES, ((0, 3),)),)))))
    assert np.abs(linear - cells.ravel()).max() > 1e-3
    np.testing.assert_allclose(found, linear, atol=1e-5)
