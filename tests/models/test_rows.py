"""The oracle against brute force: conjunctions, reduction, local search, and both integer programming solvers."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anamorph.errors import ParameterError, ResourceError
from anamorph.models import conjunctions as conjunctions_module
from anamorph.models import rows as oracle
from anamorph.models.rows import Conjunctions, best_rows, climbed, program_of, reduced

WIDE = (7, 2, 9, 5, 3, 2, 11, 4, 6, 2, 8, 3)
THOROUGH = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    features: list[np.ndarray]
    codes: list[np.ndarray]
    weights: np.ndarray
    linear: np.ndarray

    @property
    def conjunctions(self):
        return Conjunctions.of(self.sizes, self.features, self.codes, self.weights)

    def values(self, rows, linear):
        """The objective, from its definition."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        found = linear[rows + starts].sum(axis=1)
        for features, codes, weight in zip(self.features, self.codes, self.weights, strict=True):
            found = found + weight * (rows[:, features] == codes).all(axis=1)
        return found

    def everywhere(self):
        """The objective of every row, a line for each problem."""
        rows = np.array(list(itertools.product(*map(range, self.sizes))))
        return rows, np.array([self.values(rows, linear) for linear in self.linear])

    def optima(self):
        return self.everywhere()[1].max(axis=1)


def make(sizes, number, weights, linear, seed, problems=3):
    generator = np.random.default_rng(seed)
    orders = generator.integers(1, min(len(sizes), 5) + 1, number)
    features = [generator.choice(len(sizes), order, replace=False) for order in orders]
    codes = [generator.integers(np.take(sizes, chosen)) for chosen in features]
    total = (problems, sum(sizes))
    weighted = {
        "signs": lambda: generator.choice([-1.0, 1.0], number),
        "whole": lambda: generator.integers(-3, 4, number).astype(float),
        "real": lambda: generator.normal(size=number) * 10.0 ** generator.integers(-2, 3),
        "negative": lambda: -generator.exponential(size=number),
        "positive": lambda: generator.exponential(size=number),
    }[weights]()
    perturbed = {
        "zero": lambda: np.zeros(total),
        "ties": lambda: generator.integers(-1, 2, total).astype(float),
        "laplace": lambda: generator.laplace(size=total),
        "exponential": lambda: -generator.exponential(0.3, total),
        "large": lambda: generator.normal(size=total) * 100,
    }[linear]()
    return Case(tuple(sizes), features, codes, weighted, perturbed)


@st.composite
def cases(draw):
    sizes, points = [], 1
    for size in draw(st.lists(st.integers(1, 9), min_size=1, max_size=12)):
        if points * size <= 4096:
            sizes.append(size)
            points *= size
    weights = draw(st.sampled_from(["signs", "whole", "real", "negative", "positive"]))
    linear = draw(st.sampled_from(["zero", "ties", "laplace", "exponential", "large"]))
    return make(sizes, draw(st.integers(0, 60)), weights, linear, draw(st.integers(0, 2**32)))


def hard(number=200, problems=4, seed=0):
    """A case that the reduction does not decide."""
    return make(WIDE, number, "signs", "exponential", seed, problems)


@pytest.fixture(scope="module")
def highs():
    """Solves with HiGHS, in a process of its own: highspy and ortools cannot be loaded into one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda *arguments, **options: pool.submit(best_rows, *arguments, solver="highs", **options).result()


@pytest.fixture
def solvers(highs):
    return {"cp-sat": best_rows, "highs": highs}


def require_optimal(case, found):
    optima = case.optima()
    actual = np.array([case.values(row[None], linear)[0] for row, linear in zip(found.rows, case.linear, strict=True)])
    largest = max(1.0, np.abs(case.linear).max(), np.abs(case.weights).max(initial=0))
    assert found.proven.all()
    np.testing.assert_allclose(found.values, actual, rtol=0, atol=1e-9 * largest)
    np.testing.assert_allclose(actual, optima, rtol=0, atol=2e-6 * largest)


@THOROUGH
@given(case=cases())
def test_values_are_those_of_the_definition(case):
    rows, _ = case.everywhere()
    rows = rows[:: max(1, len(rows) // 100)]
    for linear in case.linear:
        np.testing.assert_allclose(case.conjunctions.values(rows, linear), case.values(rows, linear), atol=1e-8)
    many = np.repeat(rows, len(case.linear), axis=0)
    each = np.tile(case.linear, (len(rows), 1))
    expected = np.array([case.values(rows, linear) for linear in case.linear]).T.ravel()
    np.testing.assert_allclose(case.conjunctions.values(many, each), expected, atol=1e-8)


@THOROUGH
@given(case=cases())
def test_reduction_keeps_an_optimum(case):
    rows, values = case.everywhere()
    places = rows + np.cumsum([0, *case.sizes[:-1]])
    for linear, value in zip(case.linear, values, strict=True):
        left = reduced(case.conjunctions, linear)
        kept = left.kept[places].all(axis=1)
        np.testing.assert_allclose(value[kept].max(), value.max(), rtol=0, atol=1e-9 * (1 + np.abs(value).max()))
        rest = left.conjunctions.values(rows[kept], left.linear[:-1])  # the same objective, but for a constant
        np.testing.assert_allclose(np.ptp(rest - value[kept]), 0, atol=1e-9 * (1 + np.abs(value).max()))


def test_reduction_drops_codes_that_cannot_be_best():
    linear = np.array([0.0, 3.0, 1.0, 2.5, 0.0, 0.0])  # four codes, then two
    free = Conjunctions.of((4, 2), [[0, 1], [0, 1]], [[0, 1], [3, 1]], [5.0, 0.4])
    left = reduced(free, linear)
    assert np.flatnonzero(left.kept[:-1]).tolist() == [0, 5]  # code 1 of the second column cannot lose: then 5 > 3
    assert left.leading().tolist() == [0, 1]
    assert len(left.conjunctions) == 0
    torn = free.extended([[0, 1]], [[1, 0]], [2.0])
    assert np.flatnonzero(reduced(torn, linear).kept[:-1]).tolist() == [0, 1, 4, 5]  # code 3 can have 2.9 at most
    assert len(reduced(hard().conjunctions, hard().linear[0]).conjunctions) > 10


@THOROUGH
@given(case=cases())
def test_cp_sat_finds_what_brute_force_finds(case):
    require_optimal(case, best_rows(case.conjunctions, case.linear, solver="cp-sat", seconds=60, workers=2))


@THOROUGH
@given(case=cases())
def test_highs_finds_what_brute_force_finds(highs, case):
    require_optimal(case, highs(case.conjunctions, case.linear, seconds=60, workers=2))


@pytest.mark.parametrize("solver", ["cp-sat", "highs"])
def test_solvers_find_optima_that_their_start_misses(solvers, solver):
    case = make((3, 4, 2, 5, 3, 4, 2), 100, "signs", "exponential", 2, problems=40)
    start = climbed(case.conjunctions, case.linear)
    assert np.sum(start.values < case.optima() - 0.01) > 1
    require_optimal(case, solvers[solver](case.conjunctions, case.linear, seconds=60))


def test_both_solvers_agree_where_brute_force_is_out_of_reach(highs):
    case = hard(number=120)
    first = best_rows(case.conjunctions, case.linear, seconds=60)
    second = highs(case.conjunctions, case.linear, seconds=60)
    assert first.proven.all()
    assert second.proven.all()
    np.testing.assert_allclose(first.values, second.values, atol=2e-6)


def test_results_do_not_depend_on_the_number_of_workers():
    case = make((3, 2, 4, 3, 2, 5), 40, "signs", "ties", 5, problems=12)
    alone, together = (best_rows(case.conjunctions, case.linear, seconds=60, workers=workers) for workers in (1, 4))
    assert alone.proven.all()
    np.testing.assert_array_equal(alone.rows, together.rows)


@pytest.mark.parametrize("solver", ["cp-sat", "highs"])
@pytest.mark.parametrize("seconds", [0, 1e-9])
def test_no_time_gives_the_row_of_the_local_search(solvers, solver, seconds):
    case = hard()
    start = climbed(case.conjunctions, case.linear)
    found = solvers[solver](case.conjunctions, case.linear, seconds=seconds)
    assert not found.proven.any()
    assert (found.values >= start.values).all()
    assert ((found.rows >= 0) & (found.rows < case.sizes)).all()


def test_a_solver_that_finds_worse_rows_than_its_start_is_not_believed(monkeypatch):
    def poor(module, program, seconds):
        return np.array([min(group, key=lambda variable: program.worth[variable]) for group in program.groups]), False

    case = hard()
    monkeypatch.setitem(oracle.SOLVERS, "cp-sat", poor)
    start, found = climbed(case.conjunctions, case.linear), best_rows(case.conjunctions, case.linear)
    np.testing.assert_array_equal(found.rows, start.rows)
    np.testing.assert_array_equal(found.values, start.values)


def test_a_start_of_the_caller_is_never_lost():
    case = hard()
    optimal = best_rows(case.conjunctions, case.linear, seconds=60)
    again = best_rows(case.conjunctions, case.linear, seconds=0, rows=optimal.rows)
    np.testing.assert_allclose(again.values, optimal.values)
    assert not again.proven.any()


def test_a_hint_is_a_row_even_where_its_codes_were_dropped():
    case = hard()
    left = reduced(case.conjunctions, case.linear[0])
    slices = [slice(first, first + size) for first, size in zip(case.conjunctions.offsets, case.sizes, strict=True)]
    row = np.array([left.kept[part].argmin() for part in slices], np.int32)  # the first that is dropped, if any
    assert not left.kept[row + case.conjunctions.offsets].all()
    program = program_of(left, row)
    assert [int(program.hint[group].sum()) for group in program.groups] == [1] * len(program.groups)


@THOROUGH
@given(case=cases(), seed=st.integers(0, 100), restarts=st.integers(0, 12))
def test_local_search_is_between_its_start_and_the_optimum(case, seed, restarts):
    start = np.random.default_rng(seed).integers(case.sizes, size=(len(case.linear), len(case.sizes)))
    found = climbed(case.conjunctions, case.linear, seed=seed, restarts=restarts, rows=start)
    rounding = 1e-9 * (1 + np.abs(case.linear).max() + np.abs(case.weights).sum())
    assert (found.values <= case.optima() + rounding).all()
    assert (found.values >= case.conjunctions.values(start, case.linear)).all()
    np.testing.assert_array_equal(found.values, case.conjunctions.values(found.rows, case.linear))
    assert not found.proven.any()


@THOROUGH
@given(case=cases())
def test_no_single_column_can_improve_what_the_local_search_finds(case):
    found = climbed(case.conjunctions, case.linear, restarts=2)
    for row, value, linear in zip(found.rows, found.values, case.linear, strict=True):
        for column, size in enumerate(case.sizes):
            near = np.repeat(row[None], size, axis=0)
            near[:, column] = np.arange(size)
            assert case.values(near, linear).max() <= value + 1e-9 * (1 + abs(value))


def test_local_search_is_deterministic_for_a_seed():
    case = hard(problems=50)
    first, second, other = (climbed(case.conjunctions, case.linear, seed=seed, restarts=3) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.rows, second.rows)
    assert (first.rows != other.rows).any()
    drawn = climbed(case.conjunctions, case.linear, seed=np.random.default_rng(1), restarts=3)
    np.testing.assert_array_equal(first.rows, drawn.rows)


def test_local_search_adopts_what_no_single_column_can_reach():
    conjunctions = Conjunctions.of((2, 2, 2), [[0, 1, 2]], [[1, 1, 1]], [10.0])
    linear = np.array([[0.0, -1.0] * 3])
    assert climbed(conjunctions, linear, restarts=0).values.tolist() == [0.0]
    assert climbed(conjunctions, linear, restarts=1).values.tolist() == [7.0]


def test_local_search_finds_most_optima():
    case = make((3, 4, 2, 5, 3, 4, 2), 40, "signs", "exponential", 0, problems=100)
    found = climbed(case.conjunctions, case.linear, restarts=16).values
    assert np.mean(found >= case.optima() - 1e-9) >= 0.9


def test_batches_change_nothing_but_the_draws(monkeypatch):
    case = hard(problems=30)
    rows = climbed(case.conjunctions, case.linear, restarts=0)
    values = case.conjunctions.values(rows.rows, case.linear)
    monkeypatch.setattr(conjunctions_module, "CELLS", 1000)
    assert len(list(conjunctions_module.batches(30, len(case.conjunctions)))) > 5
    np.testing.assert_allclose(case.conjunctions.values(rows.rows, case.linear), values, rtol=1e-12)
    np.testing.assert_array_equal(climbed(case.conjunctions, case.linear, restarts=0).rows, rows.rows)
    assert (climbed(case.conjunctions, case.linear, restarts=5).values >= rows.values).all()


@pytest.mark.parametrize("solver", ["cp-sat", "highs", "climbed"])
def test_extremes(solver, solvers):
    solve = climbed if solver == "climbed" else solvers[solver]
    linear = np.array([[1.0, 3.0, 2.0, -1.0, -2.0], [0.0] * 5])
    none = solve(Conjunctions.none((3, 2)), linear)
    assert none.rows[0].tolist() == [1, 0]
    assert none.values.tolist() == [2.0, 0.0]
    one = solve(Conjunctions.of((3,), [[0], [0]], [[2], [1]], [1.5, -1.0]), linear[:, :3])
    assert one.rows[0].tolist() == [2]
    assert one.values.tolist() == [3.5, 1.5]
    apart = Conjunctions.of((3, 2), [[0, 1], [0, 1], [1, 0]], [[0, 0], [1, 1], [1, 2]], [2.0, 3.0, 4.0])
    assert solve(apart, linear).values.tolist() == [4.0, 4.0]  # the three contradict each other
    assert solve(apart, linear).rows[1].tolist() == [2, 1]
    assert solve(apart, np.empty((0, 5))).rows.shape == (0, 2)
    trivial = solve(Conjunctions.of((1, 1), [[0, 1]], [[0, 0]], [-2.0]), np.array([[1.0, 0.5]]))
    assert trivial.values.tolist() == [-0.5]


def test_equal_conjunctions_are_merged():
    merged = Conjunctions.of((2, 3, 4), [[0, 2], [2, 0], [1], [1], [0, 1, 2]], [[1, 3], [3, 1], [2], [2], [0, 0, 0]])
    assert len(merged) == 3
    assert sorted(merged.weights.tolist()) == [1.0, 2.0, 2.0]
    assert merged.values([[1, 2, 3], [0, 0, 0]], np.zeros(9)).tolist() == [4.0, 1.0]


def test_weights_of_zero_are_dropped():
    gone = Conjunctions.of((2, 3), [[0], [0, 1], [1]], [[1], [1, 2], [0]], [1.0, -1.0, 0.0])
    assert len(gone) == 2
    assert len(gone.extended([[1, 0], [0]], [[2, 1], [1]], [1.0, -1.0])) == 0


@THOROUGH
@given(case=cases(), cut=st.integers(0, 60))
def test_extending_is_the_same_as_starting_with_all(case, cut):
    parts = [
        [getattr(case, name)[half] for name in ("features", "codes", "weights")]
        for half in (slice(None, cut), slice(cut, None))
    ]
    grown = Conjunctions.none(case.sizes).extended(*parts[0]).extended(*parts[1])
    rows = np.array(list(itertools.islice(itertools.product(*map(range, case.sizes)), 50)))
    linear = case.linear[0]
    np.testing.assert_allclose(grown.values(rows, linear), case.conjunctions.values(rows, linear), atol=1e-8)
    lines = [tuple(line) for line in grown.tests.tolist()]
    assert len(set(lines)) == len(lines) == len(grown)
    assert (grown.weights != 0).all()


@pytest.mark.parametrize(
    ("features", "codes", "weights", "message"),
    [
        ([[0, 0]], [[1, 1]], [1.0], "column twice"),
        ([[2]], [[0]], [1.0], "features must be from 0 to 1"),
        ([[-1]], [[0]], [1.0], "features must be from 0 to 1"),
        ([[1]], [[3]], [1.0], "codes must be"),
        ([[1]], [[-1]], [1.0], "codes must be"),
        ([[]], [[]], [1.0], "at least one column"),
        ([[0, 1]], [[0]], [1.0], "one code for each"),
        ([[0]], [[0]], [np.nan], "finite"),
        ([[0]], [[0]], [1.0, 2.0], "equally many"),
    ],
)
def test_conjunctions_that_mean_nothing_are_refused(features, codes, weights, message):
    with pytest.raises(ParameterError, match=message):
        Conjunctions.of((2, 3), features, codes, weights)


@pytest.mark.parametrize("sizes", [(), (2, 0)])
def test_columns_without_codes_are_refused(sizes):
    with pytest.raises(ParameterError, match="sizes"):
        Conjunctions.none(sizes)


@pytest.mark.parametrize(
    ("linear", "options", "message"),
    [
        (np.zeros(5), {}, "linear"),
        (np.zeros((1, 4)), {}, "linear"),
        (np.full((1, 5), np.inf), {}, "finite"),
        (np.zeros((1, 5)), {"solver": "simplex"}, "solver .'simplex'. must be one of cp-sat, highs"),
        (np.zeros((1, 5)), {"seconds": -1}, "seconds"),
        (np.zeros((1, 5)), {"seconds": np.nan}, "seconds"),
        (np.zeros((1, 5)), {"workers": 0}, "workers"),
        (np.zeros((1, 5)), {"rows": [[0, 0], [0, 0]]}, "rows"),
        (np.zeros((1, 5)), {"rows": [[0, 3]]}, "rows"),
        (np.zeros((1, 5)), {"rows": [[-1, 0]]}, "rows"),
    ],
)
def test_parameters_outside_their_rule_are_refused(linear, options, message):
    with pytest.raises(ParameterError, match=message):
        best_rows(Conjunctions.none((2, 3)), linear, **options)


@pytest.mark.parametrize("restarts", [-1, 1.5, True])
def test_restarts_outside_their_rule_are_refused(restarts):
    with pytest.raises(ParameterError, match="restarts"):
        climbed(Conjunctions.none((2, 3)), np.zeros((1, 5)), restarts=restarts)


@pytest.mark.parametrize(
    ("solver", "module", "package"),
    [("cp-sat", "ortools.sat.python.cp_model", "ortools"), ("highs", "highspy", "highspy")],
)
def test_missing_packages_are_named(solver, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "highspy", None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ResourceError, match=rf"{package} must be installed .*: pip install 'anamorph\[oracle\]'"):
        best_rows(Conjunctions.none((2, 3)), np.zeros((1, 5)), solver=solver)


@pytest.mark.parametrize(("solver", "other"), [("cp-sat", "highspy"), ("highs", "ortools")])
def test_two_solvers_in_one_process_are_refused(solver, other, monkeypatch):
    monkeypatch.setitem(sys.modules, other, sys)
    with pytest.raises(ResourceError, match=f"where {other} is loaded"):
        best_rows(Conjunctions.none((2, 3)), np.zeros((1, 5)), solver=solver)
