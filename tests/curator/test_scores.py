"""Scores are exact integers, and no neighbour moves one by more than its sensitivity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.curator.scores import GRID, LARGEST, AbsoluteError, L1Error, MaxError, errors
from anamorph.errors import ParameterError

UNIT = 1 << GRID
counts_of = st.lists(st.integers(0, 50), min_size=2, max_size=6)


def marginal(counts, estimate, score):
    return score.merge(errors(np.array(counts), np.array(estimate), float(sum(counts))), 0)


@given(counts_of, st.data())
@settings(max_examples=300)
def test_replacing_a_row_moves_a_score_by_at_most_its_sensitivity(counts, data):
    cells = len(counts)
    taken = data.draw(st.integers(0, cells - 1))
    given_to = data.draw(st.integers(0, cells - 1))
    estimate = np.array(data.draw(st.lists(st.floats(-1, 2), min_size=cells, max_size=cells)))
    if counts[taken] == 0:
        return
    other = list(counts)
    other[taken] -= 1
    other[given_to] += 1
    for score in (L1Error(), MaxError()):
        moved = abs(marginal(counts, estimate, score) - marginal(other, estimate, score))
        assert moved <= score.sensitivity("replace") * UNIT


@given(counts_of, st.data())
@settings(max_examples=300)
def test_adding_a_row_moves_a_score_by_at_most_its_sensitivity(counts, data):
    cells = len(counts)
    estimate = np.array(data.draw(st.lists(st.floats(-1, 2), min_size=cells, max_size=cells)))
    other = np.array(counts)
    other[data.draw(st.integers(0, cells - 1))] += 1
    public_total = 77.3  # under add-remove the total is public and noisy, the same for both neighbours
    before = errors(np.array(counts), estimate, public_total)
    after = errors(other, estimate, public_total)
    for score in (L1Error(), MaxError()):
        assert abs(score.merge(after, 0) - score.merge(before, 0)) <= score.sensitivity("add-remove") * UNIT
    assert np.max(np.abs(after - before)) <= AbsoluteError().sensitivity("add-remove") * UNIT


def test_the_l1_score_reaches_two_where_a_row_is_replaced():
    zero = np.zeros(2)
    assert marginal([2, 0], zero, L1Error()) == 2 * UNIT
    far = np.array([1.0, 0.0])  # the estimate says all rows are in cell 0
    moved = marginal([1, 1], far, L1Error()) - marginal([2, 0], far, L1Error())
    assert moved == 2 * UNIT == L1Error().sensitivity("replace") * UNIT


def test_errors_are_exact_for_large_counts():
    counts = np.array([2**45 + 1, 2**45])
    found = errors(counts, np.array([0.5, 0.5]), float(2**46))
    assert found.tolist() == [UNIT, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_estimate_must_be_finite(bad):
    with pytest.raises(ParameterError, match="finite"):
        errors(np.array([1]), np.array([bad]), 10.0)


def test_single_errors_do_not_merge():
    assert AbsoluteError().merge(np.array([7]), 0) == 7
    for errors_of_block, before in ((np.array([1, 2]), 0), (np.array([1]), 5)):
        with pytest.raises(ParameterError, match="L1Error or MaxError"):
            AbsoluteError().merge(errors_of_block, before)


def test_the_l1_score_does_not_overflow():
    """The bug: with absurd estimates the sum of four errors wrapped to a negative number."""
    estimate = np.array([1e30, -1e30, 1e30, -1e30])
    for counts in ([51, 0, 49, 0], [50, 0, 50, 0]):
        assert marginal(counts, estimate, L1Error()) == LARGEST
