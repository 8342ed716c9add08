"""Simplices: the projection against a slow exact reference, and the layout of lines."""

from __future__ import annotations

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.models import simplex
from anamorph.models.simplex import NOWHERE, Layout, padded_size, softmax

sparsemax, step_back = jax.jit(simplex.sparsemax), jax.jit(simplex.step_back)

SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=6).map(tuple)
WIDTH = 8


def projected(numbers):
    """The projection of one fibre, exactly: sort, and take the largest support that keeps its threshold below."""
    exact = [Fraction(float(x)) for x in numbers]
    ordered = sorted(exact, reverse=True)
    for size in range(len(ordered), 0, -1):
        tau = (sum(ordered[:size]) - 1) / size
        if ordered[size - 1] > tau:
            return [float(max(x - tau, 0)) for x in exact]
    raise AssertionError


NUMBERS = st.lists(
    st.floats(-8, 8, width=32).map(lambda x: 0.0 if abs(x) < 1e-30 else x), min_size=WIDTH, max_size=WIDTH
)


@given(st.lists(NUMBERS, min_size=3, max_size=3))
@settings(deadline=None, max_examples=60)
def test_sparsemax_is_the_exact_projection(fibres):
    free = jnp.asarray(np.array(fibres, np.float32).T[None])
    points = np.asarray(sparsemax(free))
    expected = np.array([projected(fibre) for fibre in np.asarray(free)[0].T]).T
    np.testing.assert_allclose(points[0], expected, atol=3e-6)
    np.testing.assert_allclose(points.sum(axis=1), 1, atol=5e-6)
    assert points.min() >= 0
    np.testing.assert_allclose(np.asarray(sparsemax(jnp.asarray(points))), points, atol=3e-6)


@pytest.mark.parametrize(
    "fibre",
    [
        [0.0] * WIDTH,
        [1.0] + [0.0] * 7,
        [0.5, 0.5] + [-9.0] * 6,
        [5.0] * 4 + [4.0] * 4,
        [100.0, 99.5] + [0.0] * 6,
        [-50.0] * 8,
    ],
)
def test_sparsemax_at_ties_and_corners(fibre):
    points = np.asarray(sparsemax(jnp.asarray(np.array(fibre, np.float32).reshape(1, WIDTH, 1))))
    np.testing.assert_allclose(points[0, :, 0], projected(fibre), atol=1e-5)


@pytest.mark.parametrize("sizes", [(9, 2, 17, 3, 17), (33, 5), (2,)])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 10.0])
def test_a_step_back_is_the_projection(sizes, scale):
    layout = Layout(sizes)
    generator = np.random.default_rng(0)
    matrix = np.concatenate([generator.dirichlet(np.full(size, 0.3), 6).T for size in sizes]).astype(np.float32)
    moves = (scale * generator.normal(size=matrix.shape)).astype(np.float32)
    points, moved = layout.stack(jnp.asarray(matrix), 0.0), layout.stack(jnp.asarray(matrix + moves), 0.0)
    back = [np.asarray(step_back(*three)) for three in zip(points, moved, layout.masks, strict=True)]
    found = np.asarray(layout.flatten(tuple(map(jnp.asarray, back))))[layout.lines]
    firsts = np.cumsum((0, *sizes))
    for first, last in itertools.pairwise(firsts):
        for row in range(6):
            expected = projected((matrix + moves)[first:last, row])
            np.testing.assert_allclose(found[first:last, row], expected, atol=2e-5 * max(1, scale))
    for stack, mask in zip(back, layout.masks, strict=True):
        np.testing.assert_array_equal(stack[~np.broadcast_to(mask, stack.shape)], 0)


def test_softmax_is_what_it_says():
    free = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32) * 30
    exact = np.exp(free.astype(np.float64) - free.max(axis=1, keepdims=True))
    np.testing.assert_allclose(
        np.asarray(softmax(jnp.asarray(free))), exact / exact.sum(axis=1, keepdims=True), atol=1e-6
    )


@given(st.integers(1, 100_000))
def test_padding_adds_at_most_a_quarter(size):
    assert size <= padded_size(size) <= max(size * 1.25, size)
    assert padded_size(padded_size(size)) == padded_size(size)


def test_there_are_few_padded_sizes():
    assert len({padded_size(size) for size in range(1, 1025)}) <= 8 + 4 * 7 + 4


@given(SIZES)
@settings(deadline=None, max_examples=40)
def test_lines_are_those_of_each_code_and_no_other(sizes):
    layout = Layout(sizes)
    assert layout.lines.size == sum(sizes)
    assert np.unique(layout.lines).size == sum(sizes)
    assert layout.lines.max() < layout.height == layout.one == layout.zero - 1
    firsts = np.cumsum((0, *sizes[:-1]))
    assert layout.lines[firsts].tolist() == layout.offsets.tolist()
    assert sorted(feature for _, features in layout.stacks for feature in features) == list(range(len(sizes)))


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (9, 2, 17, 3, 17), (33, 5, 40, 2), (8, 64, 65)])
def test_stacking_and_flattening_keep_every_line(sizes):
    layout = Layout(sizes)
    matrix = np.random.default_rng(0).random((sum(sizes), 4), np.float32)
    stacks = layout.stack(jnp.asarray(matrix), -7.0)
    whole = np.asarray(layout.flatten(stacks))
    assert whole.shape == (layout.height + 2, 4)
    np.testing.assert_array_equal(whole[layout.lines], matrix)
    np.testing.assert_array_equal(whole[layout.one], 1)
    np.testing.assert_array_equal(whole[layout.zero], 0)
    padding = np.setdiff1d(np.arange(layout.height), layout.lines)
    np.testing.assert_array_equal(whole[padding], -7)
    for stack, mask in zip(stacks, layout.masks, strict=True):
        np.testing.assert_array_equal(np.asarray(stack) != -7, np.broadcast_to(mask, stack.shape))


@pytest.mark.parametrize("sizes", [(9, 2, 17, 3, 17), (33, 5)])
@pytest.mark.parametrize("project", [sparsemax, softmax])
def test_padding_has_probability_zero_exactly(sizes, project):
    layout = Layout(sizes)
    matrix = np.random.default_rng(0).normal(size=(sum(sizes), 4)).astype(np.float32)
    for stack, mask in zip(layout.stack(jnp.asarray(matrix), NOWHERE), layout.masks, strict=True):
        points = np.asarray(project(stack))
        np.testing.assert_array_equal(points[~np.broadcast_to(mask, points.shape)], 0)
        np.testing.assert_allclose(points.sum(axis=1), 1, atol=1e-5)
