"""Listed rows against brute force: what they answer, what they sample, what they refuse."""

from __future__ import annotations

import itertools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models.listed import ListedRows
from anamorph.queries.bands import Banded
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.table import Table

SIZES = (4, 3, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
FUNCTION = custom(lambda row: jnp.outer(row["c0"], row["c1"]).ravel() * 0.75, SCHEMA, name="tests:listed")
SETS = ((0, 1), (2,), (1, 2, 0))


def some_rows(count, seed):
    return np.random.default_rng(seed).integers(0, SIZES, (count, 3)).astype(np.int32)


def model(count=17, seed=1):
    return ListedRows(Table(some_rows(count, seed), SIZES))


def found(listed, workload):
    return np.concatenate(list(listed.answers(workload)))


def by_hand(codes, sets, least=None):
    """The fraction of rows that agree in all, or in at least some, columns with each combination of codes."""
    answers = []
    for features in sets:
        for wanted in itertools.product(*(range(SIZES[feature]) for feature in features)):
            agree = [sum(row[f] == code for f, code in zip(features, wanted, strict=True)) for row in codes]
            answers.append(sum(number >= (least or len(features)) for number in agree) / len(codes))
    return np.array(answers)


# --- answers


@given(st.integers(1, 40), st.integers(0, 10**6), st.integers(1, 100))
@settings(deadline=None, max_examples=30)
def test_answers_are_fractions_of_the_rows(count, seed, limit):
    """However the workload is cut into pieces."""
    listed = model(count, seed)
    parts = (Marginals(SIZES, SETS), Thresholds(SIZES, ((0, 1, 2),), 2), Thresholds(SIZES, ((2, 0),), 1))
    expected = [
        by_hand(listed.table.codes, SETS),
        by_hand(listed.table.codes, ((0, 1, 2),), 2),
        by_hand(listed.table.codes, ((2, 0),), 1),
    ]
    assert found(listed, Workload(parts, limit=limit)) == pytest.approx(np.concatenate(expected))
    assert found(listed, Workload(parts, limit=limit).by_cell()) == pytest.approx(np.concatenate(expected))


@given(st.lists(st.integers(0, 37), min_size=1, max_size=30), st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_chosen_cells_are_answered_in_their_order(chosen, seed):
    listed = model(seed=seed)
    cells = Cells(Marginals(SIZES, SETS), np.array(chosen))
    assert found(listed, Workload((cells,))) == pytest.approx(by_hand(listed.table.codes, SETS)[chosen])
    chosen = [number % 24 for number in chosen]
    cells = Cells(Thresholds(SIZES, ((1, 2, 0),), 2), np.array(chosen))
    assert found(listed, Workload((cells,))) == pytest.approx(by_hand(listed.table.codes, ((1, 2, 0),), 2)[chosen])


def test_functions_are_answered_by_their_means():
    listed = model()
    assert found(listed, Workload((FUNCTION,))) == pytest.approx(0.75 * by_hand(listed.table.codes, ((0, 1),)))
    chosen = Workload((FUNCTION,)).by_cell().take([3, 11])
    assert found(listed, chosen) == pytest.approx(0.75 * by_hand(listed.table.codes, ((0, 1),))[[3, 11]])


@pytest.mark.parametrize("part", [Residuals(SIZES, ((0, 1),)), Banded(SIZES, ((0, 1),), ((), (2,), ()))])
def test_residuals_and_numbers_are_refused(part):
    with pytest.raises(ParameterError, match="no residuals, and no native numbers"):
        found(model(), Workload((part,)))


# --- rows


def occurrences(codes):
    return Counter(map(tuple, codes.tolist()))


@given(st.integers(1, 20), st.integers(0, 90), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_every_row_is_sampled_equally_often_up_to_one(count, rows, seed):
    listed = ListedRows(Table(np.stack([np.arange(count)] * 2, axis=1).astype(np.int32), (20, 20)))
    table = listed.sample(rows, seed=seed)
    assert table.rows == rows
    assert table.sizes == listed.sizes
    assert table.codes.dtype == np.int32
    times = occurrences(table.codes)
    assert set(times) <= {(i, i) for i in range(count)}
    assert {times[(i, i)] for i in range(count)} <= {rows // count, -(-rows // count)}


def test_rows_listed_twice_are_sampled_twice_as_often():
    listed = ListedRows(Table(np.array([[0, 0, 0], [1, 1, 1], [0, 0, 0]], np.int32), SIZES))
    assert occurrences(listed.sample(300, seed=0).codes) == {(0, 0, 0): 200, (1, 1, 1): 100}


def test_samples_depend_on_the_seed_alone():
    listed = model(50)
    first, again, other = (listed.sample(70, seed=seed).codes for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_rows_are_shuffled():
    """Neither whole rounds of the list nor what is left of it stay in their order."""
    listed = ListedRows(Table(np.arange(100, dtype=np.int32)[:, None], (100,)))
    places = listed.sample(230, seed=1).codes[:, 0]
    assert not np.array_equal(places[:100], np.arange(100))
    assert np.unique(places[:100]).size < 100, "the rounds are mixed"
    assert abs(np.corrcoef(places, np.arange(230))[0, 1]) < 0.25


def test_which_rows_come_once_more_is_random():
    listed = ListedRows(Table(np.arange(10, dtype=np.int32)[:, None], (10,)))
    chosen = Counter(int(code) for seed in range(400) for code in listed.sample(3, seed=seed).codes[:, 0])
    assert sum(chosen.values()) == 1200
    assert all(70 < chosen[code] < 170 for code in range(10))  # 120, of a deviation of 9


# --- arrays


@given(st.integers(1, 30), st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_arrays_say_all(count, seed):
    listed = model(count, seed)
    again = ListedRows.from_arrays(SIZES, listed.arrays())
    assert again.sizes == SIZES
    assert np.array_equal(again.table.codes, listed.table.codes)
    assert np.array_equal(again.sample(9, seed=1).codes, listed.sample(9, seed=1).codes)


GOOD = some_rows(5, 2)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"rows": GOOD},
        {"codes": GOOD, "weights": np.ones(5)},
        {"codes": GOOD[0]},
        {"codes": GOOD[None]},
        {"codes": np.int32(1)},
        {"codes": GOOD[:0]},
        {"codes": GOOD[:, :2]},
        {"codes": np.hstack([GOOD, GOOD])},
        {"codes": GOOD.astype(np.int64)},
        {"codes": GOOD.astype(np.float32)},
        {"codes": GOOD.astype(">i4")},
        {"codes": GOOD.astype(str)},
        {"codes": GOOD.astype(bool)},
        {"codes": np.vstack([GOOD, [[0, 0, -1]]]).astype(np.int32)},
        {"codes": np.vstack([GOOD, [[4, 0, 0]]]).astype(np.int32)},
        {"codes": np.vstack([[[0, 3, 0]], GOOD]).astype(np.int32)},
    ],
    ids=lambda arrays: ", ".join(f"{name} {np.shape(a)} {np.asarray(a).dtype}" for name, a in arrays.items()) or "none",
)
def test_arrays_that_are_no_rows_of_the_schema_are_refused(arrays):
    with pytest.raises(CorruptionError, match="rows must be codes of the columns of its schema"):
        ListedRows.from_arrays(SIZES, arrays)
