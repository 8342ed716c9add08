"""Weighing: what stands out of the noise, and with what precision it is told."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fits import WHOLE, WIDE, answers, exact, measure, noisy

from anamorph.columns import Codes
from anamorph.models import weighing
from anamorph.models.least_squares import LEAST, least_squares
from anamorph.models.quieting import dimensions, surplus
from anamorph.models.relaxed import RelaxedRows
from anamorph.models.shrinking import ShrinkingProjection
from anamorph.models.simplex import Layout
from anamorph.models.weighing import standing_out, weighed, weights
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema

SMALL = ShrinkingProjection(rows=40)
SIZES = (6, 9, 4)


def told(measurements):
    """The precision of each marginal that is told."""
    sets = [features for part in measurements[0].workload.parts for features in part.sets]
    return dict(zip(sets, measurements[0].sigma ** -2, strict=True))


FIRST = slice(sum(WIDE), sum(WIDE) + WIDE[0] * WIDE[1])
"""Where the answers of the first pair are."""


@cache
def related():
    """The answers of columns of which the first two depend on each other, and no others."""
    generator = np.random.default_rng(3)
    lines = [generator.dirichlet(np.full(size, 0.3), 5).T for size in WIDE]
    lines[2:] = [np.repeat(line.mean(axis=1, keepdims=True), 5, axis=1) for line in lines[2:]]
    kinds = np.concatenate(lines).astype(np.float32)
    return answers(RelaxedRows(WIDE, kinds, np.full(5, 0.2, np.float32)), WHOLE).astype(float)


def one_pair(seed=0):
    return noisy(2e-4, seed, values=related())


# --- what stands out


@pytest.mark.parametrize("shape", [(2, 2), (2, 9), (12, 15), (4, 5, 6)])
def test_noise_hardly_stands_out(shape):
    generator = np.random.default_rng(4)
    found = []
    for _ in range(200):
        values = generator.standard_normal(shape)
        for axis in range(len(shape)):
            values = values - values.mean(axis=axis, keepdims=True)
        found.append(standing_out(values))
    assert abs(np.median(found)) < 0.6
    assert np.mean(found) < 0.6


def test_what_stands_out_does_so_all_over_or_in_a_few_cells():
    quiet = np.zeros((20, 30))
    free = 19 * 29
    assert dimensions(quiet) == free
    assert standing_out(quiet) == -1
    assert standing_out(np.full((20, 30), 2.0)) == pytest.approx(4 * 600 / free - 1)
    quiet[3, 4] = 12
    assert standing_out(quiet) == pytest.approx(144 / (2 * math.log(2 * free)) - 1)


def test_weights_are_those_of_the_formula():
    known = least_squares(WIDE, one_pair())
    found = weights(known)
    assert set(found) == set(known.parts)
    for features, part in known.parts.items():
        strength = standing_out(surplus(known, features) / math.sqrt(part.variance)) if len(features) > 1 else 0
        assert found[features] == pytest.approx(max(0.2, strength / (strength + 2)))
    assert found[0, 1] > 0.5
    assert all(weight == 0.2 for features, weight in found.items() if features != (0, 1))


# --- what is told


def test_the_pair_that_stands_out_is_told_as_measured_and_others_with_less_precision():
    log = one_pair()
    before, after, found = told(log), told(weighed(log)), weights(least_squares(WIDE, log))
    for features in before:
        if len(features) == 2:
            assert after[features] == pytest.approx(found[features] * before[features])
    assert all(after[feature,] < 0.25 * before[feature,] for feature in range(4))


def test_what_is_told_is_the_least_squares_estimate():
    log = one_pair()
    (found,), known = weighed(log), least_squares(WIDE, log)
    values = np.concatenate([known.marginal(features) for features in found.workload.parts[0].sets])
    np.testing.assert_allclose(found.values, values, atol=1e-12)
    assert found.total == log[0].total


def test_a_single_column_keeps_enough_to_begin_at():
    known = least_squares(WIDE, one_pair())
    precisions = told(weighed(one_pair()))
    for feature in range(4):
        assert precisions[feature,] >= 0.99 * LEAST * weighing.LEAST / known.parts[feature,].variance


def test_pairs_of_triples_that_do_not_stand_out_are_told_by_themselves():
    """A triple that tells much of its pairs is noise: they keep what was known of them."""
    generator = np.random.default_rng(1)
    first = generator.dirichlet(np.ones(6), 1)[0]
    second, third = (generator.dirichlet(np.full(size, 0.5), before) for size, before in ((9, 6), (4, 9)))
    joint = np.einsum("a,ab,bc->abc", first, second, third)
    sets = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
    workload = Workload((Marginals(SIZES, sets),))
    values = np.concatenate([joint.sum(axis=tuple(set(range(3)) - set(features))).ravel() for features in sets])
    sigma = np.repeat([1e-3, 1e-3, 2e-4], [3, 3, 1])
    spread = np.concatenate([np.full(math.prod(SIZES[f] for f in s), x) for s, x in zip(sets, sigma, strict=True)])
    log = Measurement(workload, values + spread * generator.standard_normal(values.size), sigma, 1e4)
    found, before = weights(least_squares(SIZES, [log])), told([log])
    after = told(weighed([log]))
    assert found[0, 1, 2] < 0.5
    assert min(found[0, 1], found[1, 2]) > 0.8
    assert after[0, 1, 2] == pytest.approx(found[0, 1, 2] * before[0, 1, 2])
    assert after[0, 1] > 2 * before[0, 1], "it no longer has what the triple told of it"


@pytest.mark.parametrize("last", [True, False])
def test_functions_and_thresholds_count_as_they_were_measured(last):
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    function = custom(lambda row: row["c0"] > 1, schema).by_cell()
    others = (function, Thresholds(SIZES, ((0, 1),), 1))
    whole = Marginals(SIZES, ((0,), (1,), (0, 1)))
    parts = (*others, whole) if last else (others[0], whole, others[1])
    workload = Workload(parts)
    values = np.random.default_rng(0).random(workload.cells)
    sigma = np.arange(1.0, 1 + workload.blocks) / 100
    first, second = weighed([Measurement(workload, values, sigma, 300.0)])
    assert all(type(part) is Marginals for part in first.workload.parts)
    assert second.workload.parts == others
    assert (first.total, second.total) == (300.0, 300.0)
    places = {id(part): place for place, part in zip(np.cumsum([0, *(p.cells for p in parts)]), parts, strict=False)}
    expected = [values[places[id(part)] : places[id(part)] + part.cells] for part in others]
    np.testing.assert_array_equal(second.values, np.concatenate(expected))
    blocks = {id(part): place for place, part in zip(np.cumsum([0, *(p.blocks for p in parts)]), parts, strict=False)}
    expected = [sigma[blocks[id(part)] : blocks[id(part)] + part.blocks] for part in others]
    np.testing.assert_array_equal(second.sigma, np.concatenate(expected))


def test_without_whole_marginals_nothing_is_weighed():
    log = [measure(Workload((Thresholds(SIZES, ((0, 1),), 1),)), np.full(54, 0.5))]
    assert weighed(log) is log


def test_several_measurements_are_told_as_one():
    log = one_pair()
    found = weighed([*log, *one_pair(seed=1)])
    assert len(found) == 1
    assert told(found)[0, 1] == pytest.approx(2 * told(weighed(log))[0, 1], rel=0.2)


# --- what becomes of a fit


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_drawn_far_and_what_stands_out_is_left(seed):
    values, log = related(), one_pair(seed)
    alike, by_weight = (
        np.abs(answers(each.fit(WIDE, log, seed=seed), WHOLE) - values)
        for each in (SMALL, replace(SMALL, weighing=True, firmness=0.7))
    )
    assert by_weight[FIRST].sum() < 1.1 * alike[FIRST].sum()
    assert by_weight.sum() < 0.75 * alike.sum()


def test_penalty_and_tail_follow_from_the_noise_that_was_measured():
    before, after = (each.aims(Layout(WIDE), one_pair()) for each in (SMALL, replace(SMALL, weighing=True)))
    assert float(before.penalty) == float(after.penalty)
    assert [float(part) for part in before.tail] == [float(part) for part in after.tail]
    assert not np.array_equal(before.goals.tiled[0].precision, after.goals.tiled[0].precision)


def test_rows_are_more_where_the_measurement_itself_is_not_explained(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "anamorph.models.shrinking.explaining_rows", lambda _layout, _point, aims, _log: compared.append(aims) or 0
    )
    log = noisy(2e-4, values=exact())
    for by_weight in (True, False):
        ShrinkingProjection(weighing=by_weight, effort=1.0).fit(WIDE, log, seed=0)
    first, second = (np.asarray(aims.goals.tiled[0].precision) for aims in compared)
    np.testing.assert_array_equal(first, second)
