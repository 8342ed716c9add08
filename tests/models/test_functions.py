"""Answers of relaxed rows to functions of one row, against brute force and against the sums of real rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.curator.rowwise import GRID, sums, trace
from anamorph.models import functions
from anamorph.models.functions import answers, functioned, functioned_loss, relaxed

NAMES, SIZES = ("sex", "race", "age"), (2, 3, 5)
STOPS = np.cumsum(SIZES)


def any_of(row):
    return 1 - jnp.einsum("i,j,k->ijk", 1 - row["sex"], 1 - row["race"], 1 - row["age"])


def score(row):
    risk = row["age"] @ jnp.linspace(0.1, 0.9, 5) * (0.2 + row["sex"][1])
    return jnp.concatenate([jax.nn.sigmoid(4 * risk * row["race"] - 1), jnp.stack([risk, risk**2])])


ANY_OF = trace(any_of, NAMES, SIZES, name="tests:any_of")
SCORE = trace(score, NAMES, SIZES, name="tests:score")


def table(rows, sizes=SIZES, seed=0, *, one_hot=False, spread=0.5):
    """Relaxed rows: a line for each code, and weights."""
    generator = np.random.default_rng(seed)
    parts = []
    for size in sizes:
        if one_hot:
            parts.append(np.eye(size)[generator.integers(0, size, rows)].T)
        else:
            parts.append(generator.dirichlet(np.full(size, spread), rows).T)
    return np.concatenate(parts).astype(np.float32), generator.dirichlet(np.ones(rows)).astype(np.float32)


@given(st.tuples(*[st.integers(1, 5)] * 3), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_answers_are_those_of_brute_force(sizes, rows, seed):
    function = trace(any_of, NAMES, sizes, name="tests:any_of")
    matrix, weights = table(rows, sizes, seed)
    blocks = np.split(1 - matrix.astype(float), np.cumsum(sizes)[:-1])
    expected = 1 - np.einsum("ir,jr,kr,r->ijk", *blocks, weights)
    np.testing.assert_allclose(answers(function, matrix, weights), expected.ravel(), atol=2e-6)


@pytest.mark.parametrize("function", [ANY_OF, SCORE])
def test_answers_of_certain_rows_are_their_sums(function):
    matrix, _ = table(20, one_hot=True)
    codes = np.stack([part.argmax(axis=0) for part in np.split(matrix, STOPS[:-1])], axis=1).astype(np.int32)
    found = answers(function, matrix, np.full(20, 1 / 20, np.float32))
    np.testing.assert_allclose(found, sums(function, [codes]) / (20 << GRID), atol=0.5 / (1 << GRID) + 1e-6)


def test_chosen_answers_are_answers():
    matrix, weights = table(7)
    chosen = jnp.array([3, 0, 29, 3])
    every = answers(ANY_OF, matrix, weights)
    np.testing.assert_allclose(answers(ANY_OF, matrix, weights, chosen), every[chosen], rtol=1e-6)


@pytest.mark.parametrize("held", [1, 30 * 3, 30 * 6])
def test_chunks_of_rows_give_the_same_answers_and_slopes(monkeypatch, held):
    matrix, weights = table(11)
    goal = functioned(ANY_OF, [2, 5, 28], [0.1, 0.4, 0.9], 2.0)
    slope = jax.value_and_grad(functioned_loss, argnums=(0, 1))
    whole = relaxed(ANY_OF, matrix, weights, None), slope(matrix, weights, goal)
    monkeypatch.setattr(functions, "HELD", held)
    cut = relaxed(ANY_OF, matrix, weights, None), slope(matrix, weights, goal)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), cut, whole)


def test_rows_that_fill_up_a_chunk_do_no_harm(monkeypatch):
    """A function that has no value and no slope at a row of zeros."""
    function = trace(lambda row: row["sex"] / jnp.sum(row["sex"]), NAMES, SIZES, name="tests:share")
    matrix, weights = table(5)
    monkeypatch.setattr(functions, "HELD", 4)
    goal = functioned(function, [0, 1], 0.0, 1.0)
    value, slopes = jax.value_and_grad(functioned_loss, argnums=(0, 1))(matrix, weights, goal)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(slope)) for slope in slopes)
    np.testing.assert_allclose(relaxed(function, matrix, weights, None), matrix[:2] @ weights, rtol=1e-5)


@pytest.mark.parametrize("function", [ANY_OF, SCORE])
def test_the_loss_and_its_gradient(function):
    matrix, weights = table(6, seed=3, spread=20.0)  # away from the bounds, where there are kinks
    generator = np.random.default_rng(1)
    chosen = generator.choice(function.count, 5, replace=False)
    targets, precision = generator.uniform(0, 1, 5), generator.uniform(1, 3, 5)
    goal = functioned(function, chosen, targets, precision)
    assert goal.chosen.shape == goal.targets.shape == goal.precision.shape == (8,)
    loss = jax.jit(functioned_loss)
    expected = 0.5 * np.sum(precision * (np.asarray(answers(function, matrix, weights))[chosen] - targets) ** 2)
    assert float(loss(matrix, weights, goal)) == pytest.approx(expected, rel=1e-5)
    slopes = jax.jit(jax.grad(functioned_loss, argnums=(0, 1)))(matrix, weights, goal)
    for _ in range(6):
        step = generator.normal(size=matrix.shape).astype(np.float32), generator.normal(size=6).astype(np.float32)
        ends = [loss(matrix + way * step[0], weights + way * step[1], goal) for way in (2e-3, -2e-3)]
        along = sum(float(jnp.vdot(slope, part)) for slope, part in zip(slopes, step, strict=True))
        assert float(ends[0] - ends[1]) / 4e-3 == pytest.approx(along, rel=2e-2, abs=2e-2)


def test_values_on_the_bounds_keep_their_slope_and_those_beyond_have_none():
    """Rows at the corners are the rule, not the exception; and a sum of probabilities may exceed 1 by rounding."""
    function = trace(lambda row: row["sex"] * (1 + 3e-7), NAMES, SIZES, name="tests:bounds")
    beyond = trace(lambda row: 3 * row["sex"] - 1, NAMES, SIZES, name="tests:beyond")
    matrix, weights = table(4, one_hot=True)
    slope = jax.grad(lambda at, asked: jnp.sum(relaxed(asked, at, weights, None)))
    np.testing.assert_allclose(slope(matrix, function)[:2], np.stack([weights, weights]), rtol=1e-5)
    assert np.all(slope(matrix, beyond) == 0)


def test_goals_go_through_compiled_functions():
    goal = functioned(SCORE, [1], 0.5, 1.0)
    moved = jax.jit(lambda it: jax.tree.map(lambda leaf: leaf + 1, it))(goal)
    assert moved.function == SCORE
    assert moved.chosen.tolist() == [2]
    assert functioned(SCORE, [], [], []).precision.tolist() == [0.0]
