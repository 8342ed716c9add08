"""The made-up tables: how their columns depend on each other, and what runs on them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from anamorph.mechanisms.independent import Independent
from anamorph.models import trials
from bench import unseen


def dependence(rows, first, second):
    """The tv of a pair from independence."""
    codes, sizes = rows.table.codes, rows.schema.sizes
    counts = np.zeros((sizes[first], sizes[second]))
    np.add.at(counts, (codes[:, first], codes[:, second]), 1 / rows.rows())
    return np.abs(counts - np.outer(counts.sum(axis=1), counts.sum(axis=0))).sum() / 2


@pytest.mark.parametrize("title", unseen.TABLES)
def test_codes_are_those_of_the_schema_and_tables_always_the_same(title):
    rows, again = unseen.TABLES[title](), unseen.TABLES[title]()
    assert np.all((rows.table.codes >= 0) & (rows.table.codes < rows.schema.sizes))
    np.testing.assert_array_equal(rows.table.codes, again.table.codes)


def test_columns_depend_on_as_many_as_is_said():
    for evenness, least in ((0.3, 0.3), (3.0, 0.1)):
        rows = unseen.network(rows=5000, columns=3, largest=6, parents=1, evenness=evenness)
        assert max(dependence(rows, *pair) for pair in itertools.combinations(range(3), 2)) > least
    even = unseen.network(rows=5000, columns=3, largest=6, parents=1, evenness=1e4)
    assert max(dependence(even, *pair) for pair in itertools.combinations(range(3), 2)) < 0.05


def test_a_visit_that_has_ended_does_not_go_on():
    codes = unseen.sessions(rows=3000).table.codes
    ended = np.maximum.accumulate(codes == 0, axis=1)
    assert not np.any(codes[ended])
    assert np.all(codes[:, 0] > 0)
    assert 0.1 < np.mean(ended) < 0.99


@pytest.mark.parametrize(("first", "second", "least"), [(2, 3, 1.0), (0, 4, 0.95), (5, 6, 1.0), (0, 1, 0.85)])
def test_places_largely_follow_from_each_other(first, second, least):
    codes = unseen.places(rows=20_000).table.codes
    most = [np.bincount(codes[codes[:, first] == code, second]).max() for code in np.unique(codes[:, first])]
    assert sum(most) >= least * len(codes)


def test_the_numbers_of_a_trip_rise_together():
    rows = unseen.trips(rows=5000)
    distance, minutes, fare, tip, total = rows.table.codes[:, 4:9].T
    for one, other, least in ((distance, minutes, 0.7), (distance, fare, 0.9), (fare, total, 0.9)):
        assert np.corrcoef(one, other)[0, 1] > least
    assert not np.any(tip[rows.table.codes[:, 2] > 0])


def test_trials_are_left_out_where_they_are_said_to_be(monkeypatch):
    rows = unseen.network(rows=200, columns=3, largest=4, parents=2, evenness=1.0)
    kept, seen = trials.ROOM, []

    def spy(curator, workload, *, seed):
        seen.append(trials.ROOM)
        return Independent()(curator, workload, seed=seed)

    monkeypatch.setattr(unseen, "MECHANISMS", dict.fromkeys(("auto", unseen.UNTRIED), spy))
    errors = [unseen.errors(rows, unseen.WORKLOADS[0], name, 1.0, 0) for name in ("auto", unseen.UNTRIED)]
    assert seen == [kept, 0]
    assert kept == trials.ROOM
    assert errors[0] == errors[1]
    assert 0 < errors[0][0] < 1
