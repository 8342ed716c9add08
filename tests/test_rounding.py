"""Rounding: expected answers are kept, any number of rows is right, and nothing impossible is drawn."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph import rounding
from anamorph.rounding import copies, invert, round_rows, strata

SIZES = (3, 2, 5)
FIRSTS = np.cumsum((0, *SIZES[:-1]))


def relaxed(rows=7, seed=0, *, weighted=True):
    generator = np.random.default_rng(seed)
    matrix = np.concatenate([generator.dirichlet(np.full(size, 0.5), rows).T for size in SIZES]).astype(np.float32)
    weights = generator.dirichlet(np.ones(rows)) if weighted else np.full(rows, 1 / rows)
    return matrix, weights.astype(np.float32)


def drawn(rows, seeds, matrix, weights):
    return np.stack([round_rows(matrix, weights, SIZES, rows=rows, seed=seed).codes for seed in seeds])


@pytest.mark.parametrize("rows", [1, 3, 7, 10, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_expected_answers_are_kept(rows, weighted):
    matrix, weights = relaxed(weighted=weighted)
    seeds = 60_000 // (rows + 20)
    codes = drawn(rows, range(seeds), matrix, weights)
    for features in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]:
        for cell in itertools.product(*(range(SIZES[f]) for f in features)):
            lines = [matrix[FIRSTS[f] + code].astype(float) for f, code in zip(features, cell, strict=True)]
            expected = math.prod(lines) @ weights.astype(float)
            hits = np.all(codes[:, :, features] == cell, axis=2).mean(axis=1)
            bound = 5.5 * hits.std() / math.sqrt(seeds) + 6 / (rows * seeds)
            assert abs(hits.mean() - expected) < bound


def test_rounded_answers_are_nearer_than_independent_draws_would_be():
    matrix, weights = relaxed(weighted=False)
    codes = drawn(35, range(400), matrix, weights)
    expected = matrix[0].astype(float) @ weights
    spread = np.var((codes[:, :, 0] == 0).mean(axis=1))
    independent = np.mean(matrix[0].astype(float) * (1 - matrix[0])) / 35
    assert np.mean((codes[:, :, 0] == 0).mean(axis=1)) == pytest.approx(expected, abs=0.01)
    assert spread < 0.6 * independent


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None)
def test_any_number_of_rows_is_drawn_and_weights_are_kept_within_one(rows, parts, seed):
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.full(parts, 0.4)).astype(np.float32)
    weights[generator.random(parts) < 0.2] = 0
    weights[0] += weights.sum() == 0
    found = copies(weights, rows, generator)
    assert found.sum() == rows
    assert found.min() >= 0
    wanted = rows * weights.astype(float) / weights.astype(float).sum()
    assert np.all(np.abs(found - wanted) < 1 + 1e-6)
    assert np.all(found[weights == 0] == 0)


def test_copies_follow_the_weights_on_average():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    found = np.mean([copies(weights, 7, np.random.default_rng(seed)) for seed in range(4000)], axis=0)
    np.testing.assert_allclose(found, 7 * weights, atol=0.05)


def test_strata_of_one_owner_are_distinct_and_uniform():
    owner = np.repeat([0, 1, 4], [5, 1, 3])
    found = np.stack([strata(owner, np.random.default_rng(seed)) for seed in range(2000)])
    assert np.all((found >= 0) & (found <= 1))
    for first, last in ((0, 5), (5, 6), (6, 9)):
        places = np.sort(np.floor(found[:, first:last] * (last - first)), axis=1)
        np.testing.assert_array_equal(places, np.broadcast_to(np.arange(last - first), places.shape))
    np.testing.assert_allclose(found.mean(axis=0), 0.5, atol=5 / math.sqrt(12 * 2000))


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.25, 0.5, 1.0]), min_size=2, max_size=7), st.integers(1, 50))
@settings(deadline=None)
def test_a_code_of_probability_zero_is_never_drawn(numbers, seed):
    numbers[seed % len(numbers)] += 0.1
    line = np.array(numbers, np.float32)[:, None]
    matrix = line / line.sum()
    table = round_rows(matrix, np.ones(1, np.float32), (len(numbers),), rows=40, seed=seed)
    assert np.all(matrix[table.codes[:, 0], 0] > 0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1, 0), 1.0])
@pytest.mark.parametrize(
    "line", [[0, 1, 0, 0], [0.3, 0, 0.7, 0], [0, 0, 0.1, 0.2, 0], [1 / 3, 0, 1 / 3, 0, 1 / 3, 0], [5e-324, 0]]
)
def test_numbers_at_the_ends_draw_possible_codes(line, uniform):
    cumulated = np.cumsum(np.array([line]), axis=1)
    code = int(invert(cumulated, np.zeros(1, int), np.array([uniform]))[0])
    assert line[code] > 0
    if uniform == 1.0:
        assert code == max(np.flatnonzero(line))


def test_chunks_draw_what_the_whole_does(monkeypatch):
    matrix, weights = relaxed(rows=20)
    whole = round_rows(matrix, weights, SIZES, rows=333, seed=5).codes
    monkeypatch.setattr(rounding, "ENTRIES", 16)
    np.testing.assert_array_equal(round_rows(matrix, weights, SIZES, rows=333, seed=5).codes, whole)
    monkeypatch.setattr(rounding, "ENTRIES", 1)
    np.testing.assert_array_equal(round_rows(matrix, weights, SIZES, rows=333, seed=5).codes, whole)


def test_the_seed_alone_decides():
    matrix, weights = relaxed()
    first, again, other = (round_rows(matrix, weights, SIZES, rows=50, seed=seed).codes for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.dtype == np.int32


def test_the_order_of_rows_carries_nothing():
    matrix = np.zeros((sum(SIZES), 3), np.float32)
    matrix[FIRSTS] = 1
    matrix[[0, 1, 2], [0, 1, 2]] = 1
    matrix[0, 1:] = 0
    weights = np.array([0.5, 0.3, 0.2], np.float32)
    places = np.concatenate([np.flatnonzero(drawn(10, [seed], matrix, weights)[0][:, 0] == 2) for seed in range(3000)])
    counts = np.bincount(places, minlength=10)
    expected = counts.sum() / 10
    assert np.sum((counts - expected) ** 2 / expected) < 35


def test_certain_rows_are_drawn_as_they_are():
    codes = np.random.default_rng(0).integers(0, SIZES, (6, 3))
    matrix = np.zeros((sum(SIZES), 6), np.float32)
    for row, code in enumerate(codes):
        matrix[FIRSTS + code, row] = 1
    table = round_rows(matrix, np.full(6, 1 / 6, np.float32), SIZES, rows=12, seed=0)
    assert sorted(map(tuple, table.codes.tolist())) == sorted(map(tuple, np.repeat(codes, 2, axis=0).tolist()))
