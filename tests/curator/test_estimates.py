"""Public tables: answers against brute force, no cell above a bound missed, and every answer its own cell's alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selections import KINDS, Rows, cells_of, relaxed_answers, some_rows, some_table

from anamorph.curator import estimates as module
from anamorph.curator.estimates import SAFETY, Merge, RelaxedTable, RowTable, Support, tail

seeds = st.integers(0, 2**32)
shapes = st.lists(st.integers(2, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def sides(draw, total=1000.0):
    """One side of a comparison over all its features, and its exact answers for every r."""
    sizes, seed = draw(shapes), draw(seeds)
    features = tuple(draw(st.permutations(range(len(sizes)))))
    if draw(st.booleans()):
        table = some_table(sizes, draw(st.integers(1, 40)), seed, kind=draw(st.sampled_from(KINDS)))
        answers = {least: relaxed_answers(table, features, least) for least in range(1, len(sizes) + 1)}
    else:
        rows = some_rows(sizes, draw(st.integers(0, 40)), seed, most=draw(st.sampled_from([1, 9])))
        table = RowTable(rows, rows.total)
        answers = {least: rows.every(features, least) / max(rows.total, 1) for least in range(1, len(sizes) + 1)}
    return table.side(sizes, features, total), answers


@given(sides())
@settings(max_examples=60, deadline=None)
def test_fractions_equal_brute_force(given_side):
    side, answers = given_side
    cells = np.arange(math.prod(side.shape))
    for least, expected in answers.items():
        np.testing.assert_allclose(side.fractions(cells, least), expected, rtol=1e-12, atol=SAFETY / 10)
        assert side.fractions(cells[:0], least).size == 0


def numbers_of(side, answers):
    """The whole marginal of a side, in rows."""
    return (answers[len(side.shape)] * side.total).reshape(side.shape)


def close(found, expected, side):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=SAFETY / 10 * side.total)


@given(sides())
@settings(max_examples=60, deadline=None)
def test_one_way_answers_equal_brute_force(given_side):
    """Of the definition: they follow from the whole marginal only where probabilities sum to 1."""
    side, _ = given_side
    for axis, single in enumerate(side.singles()):
        if isinstance(side, Support):
            expected = [side.counts[side.codes[:, axis] == code].sum() * side.scale for code in range(side.shape[axis])]
        else:
            expected = side.blocks[axis].astype(np.float64) @ side.weights.astype(np.float64) * side.total
        close(single, expected, side)


@given(sides(), st.data())
@settings(max_examples=60, deadline=None)
def test_merged_codes_are_sums(given_side, data):
    """Whole marginals and all smaller ones, in slices of the first feature, as sums over the codes of each class."""
    side, answers = given_side
    whole, order, merges = numbers_of(side, answers), len(side.shape), []
    for axis, size in enumerate(side.shape):
        members = np.array(data.draw(st.permutations(range(size))))
        cuts = data.draw(st.lists(st.integers(1, size - 1), unique=True))
        merges.append(Merge(members, np.array([0, *sorted(cuts)])))
        groups = np.split(members, sorted(cuts))
        assert [merges[-1].coarse[group].tolist() for group in groups] == [[i] * len(g) for i, g in enumerate(groups)]
        whole = np.stack([whole.take(group, axis).sum(axis) for group in groups], axis)
    found = side.merged(merges)
    assert tuple(found.shape) == whole.shape
    assert found.total == side.total
    close(found.dense(range(order), slice(0, found.shape[0])), whole, side)
    for start in range(found.shape[0]):
        close(found.dense(range(order), slice(start, start + 1)), whole[start : start + 1], side)
    for axis, single in enumerate(found.singles()):
        close(found.dense((axis,), slice(0, found.shape[axis])), single, side)
        coarse = [side.singles()[axis][merges[axis].coarse == code].sum() for code in range(found.shape[axis])]
        close(single, coarse, side)


@given(sides(), st.data())
@settings(max_examples=100, deadline=None)
def test_no_cell_above_a_bound_is_missing(given_side, data):
    """The bound may be as near to a cell's number as a float can be."""
    side, answers = given_side
    numbers = numbers_of(side, answers).ravel()
    at = float(data.draw(st.sampled_from(sorted(set(numbers.tolist())))))
    bound = max(at * data.draw(st.sampled_from([1 - 1e-12, 1.0, 1 + 1e-12, 0.5, 0.9])), 1e-6)
    found = side.above(bound)
    assert np.array_equal(found, np.unique(found))
    assert set(np.flatnonzero(numbers > bound * (1 + 1e-13)).tolist()) <= set(found.tolist())
    assert np.all(numbers[found] > bound * (1 - 1e-4))


def test_the_largest_cell_is_found_at_its_own_number():
    """Sums of a thousand products in single precision, where a bound without a margin would lose some."""
    for seed in range(30):
        table = some_table((3, 3, 3), 1000, seed, spread=4.0)
        side, answers = table.side((3, 3, 3), (0, 1, 2), 1e6), relaxed_answers(table, (0, 1, 2), 3) * 1e6
        for cell in np.argsort(answers)[-3:]:
            assert cell in side.above(answers[cell] * (1 - 1e-13))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 129, 1000])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_estimate_is_the_same_bits_whatever_cells_are_asked_with_it(kind, rows, order, monkeypatch):
    sizes, generator = (3, 4, 2, 3), np.random.default_rng(rows)
    made = some_table(sizes, rows, 5, kind=kind)
    table = RelaxedTable(sizes, np.asarray(made.lines, order=order), made.weights)
    side = table.side(sizes, (2, 0, 3), 1.0)
    cells = np.arange(math.prod(side.shape))
    for least in (1, 2, 3):
        alone = np.concatenate([side.fractions(cells[i : i + 1], least) for i in cells])
        for entries in (module.ENTRIES, 3 * rows, 1):
            monkeypatch.setattr(module, "ENTRIES", entries)
            for asked in (cells, cells[::-1], generator.choice(cells, 50), np.repeat(cells, 9)):
                assert np.array_equal(side.fractions(asked, least), alone[asked])


@pytest.mark.parametrize("least", [1, 2, 3])
def test_a_table_of_one_hot_rows_is_a_table_of_rows(least):
    sizes = (3, 4, 5)
    table = some_table(sizes, 40, 1, kind="sparse")
    table = RelaxedTable(sizes, table.lines, np.full(40, 1 / 32, np.float32))
    rows = Rows(np.stack([block.argmax(axis=0) for block in table.blocks], axis=1), sizes)
    cells = np.arange(math.prod(sizes))
    relaxed, counted = table.side(sizes, (0, 1, 2), 1.0), RowTable(rows, 32).side(sizes, (0, 1, 2), 1.0)
    assert np.array_equal(relaxed.fractions(cells, least), counted.fractions(cells, least))


def test_no_rows_have_no_answers():
    side = RowTable(Rows(np.zeros((0, 2)), (3, 2)), 0).side((3, 2), (0, 1), 5.0)
    assert side.fractions(np.arange(6), 1).tolist() == side.fractions(np.arange(6), 2).tolist() == [0.0] * 6
    assert side.above(0.0).size == 0
    assert [single.tolist() for single in side.singles()] == [[0.0] * 3, [0.0] * 2]
    assert side.dense((0, 1), slice(0, 3)).tolist() == [[0.0, 0.0]] * 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
@settings(max_examples=100, deadline=None)
def test_a_tail_is_that_of_independent_events(chances, data):
    least = data.draw(st.integers(1, len(chances)))
    ways = cells_of([2] * len(chances))
    expected = math.fsum(
        math.prod(p if way else 1 - p for p, way in zip(chances, row, strict=True))
        for row in ways
        if row.sum() >= least
    )
    found = tail([np.array([[p, 0.5]]) for p in chances], least)
    assert found.shape == (1, 2)
    assert found[0, 0] == pytest.approx(expected, abs=1e-14)
    assert found[0, 1] == sum(math.comb(len(chances), u) for u in range(least, len(chances) + 1)) / 2 ** len(chances)
