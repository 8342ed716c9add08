"""Rows drawn from measured marginals: their answers, their numbers, and the projection of noisy tables."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fits import answers, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.tallies import count
from anamorph.curator.where import Where
from anamorph.models.annealing import MixedProjection
from anamorph.models.mixed import Columns
from anamorph.models.starting import projected, quantiles, started, tables
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 40, 2, 33, 4)
COLUMNS = Columns(SIZES, (1, 3), (40, 32))
"""c3 may be missing: its code is 32."""
CUTS = ((), (5, 10, 20, 39), (), (4, 8, 16, 24, 32), ())
ALONE = Workload((Marginals(SIZES, ((0,), (2,), (4,))), Banded(SIZES, ((1,), (3,)), CUTS)))
WITH_LABEL = Workload((Marginals(SIZES, ((0, 2), (2, 4))), Banded(SIZES, ((1, 2), (2, 3)), CUTS)))
LATER_LABEL = Workload((Marginals(SIZES, ((0, 2), (0, 4))), Banded(SIZES, ((0, 1), (0, 3)), CUTS)))
BEGUN = {None: ALONE, 2: WITH_LABEL, 0: LATER_LABEL}
MADE = MixedProjection(rows=200)


def rows_of(rows=4000, seed=0, *, empty=False):
    """Columns that depend on c0 and c2; a fifth of c3 is missing, more where c2 is 1; c0 is never 1 if `empty`."""
    random = np.random.default_rng(seed)
    first = random.choice(3, rows, p=[0.7, 0.0, 0.3] if empty else [0.5, 0.3, 0.2])
    second = (random.random(rows) < 0.2 + 0.3 * first) * 1
    x = np.minimum((random.beta(1 + 2 * second, 3, rows) * 40).astype(int), 39)
    y = np.minimum((random.beta(2, 2 + 3 * first, rows) * 32).astype(int), 31)
    y = np.where(random.random(rows) < 0.1 + 0.2 * second, 32, y)
    fourth = (first + random.integers(0, 2, rows)) % 4
    return np.stack([first, x, second, y, fourth], axis=1).astype(np.int32)


def exact(workload, rows):
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    source = TableSource(Table(rows, SIZES), schema)
    return np.concatenate([count(piece.tally, source) for piece in workload.pieces()]) / len(rows)


def begun(label, values, made=MADE, seed=0):
    return started(made, made.begin(COLUMNS, seed=seed), measure(BEGUN[label], values), label, seed=seed)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("label", BEGUN)
def test_rows_drawn_from_exact_marginals_answer_them(label, empty):
    """A label is a row's own with probability 0.98, and there are 200 rows."""
    values = exact(BEGUN[label], rows_of(empty=empty))
    before = np.abs(answers(MADE.begin(COLUMNS, seed=0), BEGUN[label]) - values)
    wrong = np.abs(answers(begun(label, values), BEGUN[label]) - values)
    assert wrong.max() < 0.02
    assert wrong.mean() < 0.1 * before.mean()


def test_a_label_without_rows_has_next_to_none():
    model = begun(0, exact(LATER_LABEL, rows_of(empty=True)))
    found = answers(model, Workload((Marginals(SIZES, ((0,),)),)))
    np.testing.assert_allclose(found, [0.7, 0.0, 0.3], atol=0.025)


def test_values_of_the_label_have_their_own_distributions():
    """The share missing is 0.1 where c2 is 0, and 0.3 where it is 1; given in either order of the columns."""
    rows = rows_of()
    model = begun(2, exact(WITH_LABEL, rows))
    one = model.coded.probabilities[model.starts[COLUMNS.place(2)] + 1] > 0.5
    assert one.mean() == pytest.approx(np.mean(rows[:, 2] == 1), abs=0.006)
    for where, code in ((~one, 0), (one, 1)):
        there = rows[rows[:, 2] == code]
        assert model.flag(3, missing=True)[where].mean() == pytest.approx(np.mean(there[:, 3] == 32), abs=0.005)
        known = there[there[:, 3] < 32, 3]
        for number, codes in ((0, there[:, 1]), (1, known)):
            inside = [cut for cut in CUTS[COLUMNS.numbers[number]] if cut < COLUMNS.limits[number]]
            found = np.searchsorted(inside, model.codes[where, number], side="right")
            wanted = np.bincount(np.searchsorted(inside, codes, side="right"), minlength=len(inside) + 1)
            found = np.bincount(found, minlength=len(inside) + 1) / where.sum()
            np.testing.assert_allclose(found, wanted / len(codes), atol=1.5 / where.sum())


def test_a_noisy_table_is_made_one_of_probabilities():
    """Cells below 0 included: no row is in them, and the answers are those of the projected table."""
    random = np.random.default_rng(2)
    values = exact(LATER_LABEL, rows_of(empty=True)) + random.normal(0, 0.01, LATER_LABEL.cells)
    assert values.min() < -0.01
    model = begun(0, values)
    for array in (model.coded.probabilities, model.coded.weights, model.reals):
        assert np.all(np.isfinite(array))
        assert np.all((array >= 0) & (array <= 1))
    sums = np.add.reduceat(model.coded.probabilities, model.starts, axis=0)
    np.testing.assert_allclose(sums, 1, atol=1e-5)
    first = 0
    for piece in LATER_LABEL.pieces():
        cells = piece.tally.cells
        wanted = projected(values[first : first + cells])
        np.testing.assert_allclose(model.answer(piece.tally), wanted, atol=0.03)
        first += cells


def test_a_table_of_nothing_but_missing_numbers_leaves_them_anywhere():
    rows = rows_of()
    rows[:, 3] = 32
    model = begun(2, exact(WITH_LABEL, rows))
    assert model.flag(3, missing=True).min() > 0.999
    assert np.ptp(model.reals[1]) > 0.9


def test_columns_that_were_not_measured_stay():
    start = MADE.begin(COLUMNS, seed=4)
    part = Workload((Marginals(SIZES, ((0, 2),)), Banded(SIZES, ((2, 3),), CUTS)))
    model = started(MADE, start, measure(part, exact(part, rows_of())), 2, seed=4)
    np.testing.assert_array_equal(model.reals[0], start.reals[0])
    assert not np.array_equal(model.reals[1], start.reals[1])
    first = start.starts[COLUMNS.place(4)]
    span = slice(first, first + SIZES[4])
    np.testing.assert_allclose(model.coded.probabilities[span], start.coded.probabilities[span], atol=1e-5)


def test_rows_that_share_a_label_are_not_alike():
    """Rows that are would have the same gradients, and stay so."""
    for label, workload in BEGUN.items():
        model = begun(label, exact(workload, rows_of()))
        lines = model.coded.probabilities[model.starts[COLUMNS.place(4)] :][: SIZES[4]]
        assert all(len(np.unique(line)) > 100 for line in lines)


def test_a_start_is_repeated_by_its_seed():
    values = exact(WITH_LABEL, rows_of())
    one, same, other = (begun(2, values, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.reals, same.reals)
    np.testing.assert_array_equal(one.coded.probabilities, same.coded.probabilities)
    assert not np.array_equal(one.reals, other.reals)


def test_a_start_is_fitted_further():
    """Toward a pair of columns that was not measured first; numbers and row weights too."""
    rows, made = rows_of(), MixedProjection(rows=60, steps=15, levels=3, temperature=64.0, rate=0.05, row_weights=True)
    values = exact(WITH_LABEL, rows)
    model = started(made, made.begin(COLUMNS, seed=0), measure(WITH_LABEL, values), 2, seed=0)
    more = Workload((Marginals(SIZES, ((0, 4),)), Banded(SIZES, ((0, 3),), CUTS)))
    log = [measure(WITH_LABEL, values), measure(more, exact(more, rows))]
    fitted = made.fit(model, log)
    assert not fitted.degraded
    before, after = (np.abs(answers(each, more) - log[1].values).mean() for each in (model, fitted))
    assert after < 0.5 * before


def test_only_marginals_have_tables():
    part = Workload((NumberTests(Where(SIZES, (), (1,), (40,), np.array([[7]]))),))
    with pytest.raises(TypeError, match="marginals only"):
        list(tables(measure(part, [0.5]), None))


def test_tables_are_oriented_by_column_then_label():
    values = np.arange(WITH_LABEL.cells, dtype=float)
    values /= values.sum()
    found = dict(tables(measure(WITH_LABEL, values), 2))
    assert {column: table.shape for column, (table, _) in found.items()} == {0: (3, 2), 4: (4, 2), 1: (5, 2), 3: (6, 2)}
    for column, (table, cuts) in found.items():
        assert cuts == CUTS[column]
        assert table.sum() == pytest.approx(1)
    np.testing.assert_allclose(found[0][0].ravel(), projected(values[:6]))
    np.testing.assert_allclose(found[4][0].T.ravel(), projected(values[6:14]))


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_projection_is_the_nearest_probability_vector(numbers):
    """It is p, nearest to v, if and only if (v - p) . (q - p) <= 0 for every vertex q of the simplex."""
    values = np.array(numbers)
    found = projected(values)
    assert np.all(found >= 0)
    assert found.sum() == pytest.approx(1)
    gap = values - found
    assert gap.max() - gap @ found <= 1e-9


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_quantiles_are_in_their_bands_in_the_right_proportions(seed, bands, rows):
    """The count of a band is its share of the rows, to within one; empty bands have none; within it they are even."""
    random = np.random.default_rng(seed)
    share = random.dirichlet(np.ones(bands)) * (random.random(bands) < 0.7)
    edges = np.array([0.0, *np.sort(random.random(bands - 1)), 1.0])
    found = quantiles(share[:, None], edges, np.zeros(rows, int), random).astype(float)
    share = share if share.any() else np.diff(edges)
    wanted = share / share.sum() * rows
    for band, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = np.sort(found[(found > low - 1e-6) & (found < high + 1e-6)])
        assert inside.size >= wanted[band] - 1 - 1e-6
        strictly = np.sum((found > low + 1e-6) & (found < high - 1e-6))
        assert strictly <= wanted[band] + 1 + 1e-6
        if share[band] == 0:
            assert strictly == 0
        elif inside.size > 2 and strictly == inside.size:
            np.testing.assert_allclose(np.diff(inside), (high - low) / wanted[band], rtol=1e-3, atol=1e-6)


def test_quantiles_are_in_random_order():
    numbers = quantiles(np.ones((1, 1)), np.array([0.0, 1.0]), np.zeros(300, int), np.random.default_rng(0))
    assert abs(np.corrcoef(numbers, np.arange(300))[0, 1]) < 0.2
    np.testing.assert_allclose(np.sort(numbers), (np.arange(300) + 0.5) / 300, atol=1e-6)


def test_rows_of_one_row_and_of_a_label_of_one_value():
    made, sizes = replace(MADE, rows=1), (1, 40)
    columns = Columns(sizes, (1,), (40,))
    part = Workload((Banded(sizes, ((0, 1),), ((), (20, 39))),))
    model = started(made, made.begin(columns, seed=0), measure(part, [0.1, 0.8, 0.1]), 0, seed=0)
    assert answers(model, part) == pytest.approx([0.0, 1.0, 0.0])
