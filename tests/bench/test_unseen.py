"""The made-up tables: how their columns depend on each other, and what runs on them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from anamorph.mechanisms.independent import Independent
from anamorph.models import shrinking
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


def test_trials_are_left_out_where_they_are_said_to_be(monkeypatch):
    rows = unseen.network(rows=200, columns=3, largest=4, parents=2, evenness=1.0)
    kept, seen = shrinking.FACTORS, []

    def spy(curator, workload, *, seed):
        seen.append(shrinking.FACTORS)
        return Independent()(curator, workload, seed=seed)

    monkeypatch.setattr(unseen, "MECHANISMS", dict.fromkeys(("auto", unseen.UNTRIED), spy))
    errors = [unseen.errors(rows, name, 1.0, 0) for name in ("auto", unseen.UNTRIED)]
    assert seen == [kept, (1.0,)]
    assert kept == shrinking.FACTORS
    assert errors[0] == errors[1]
    assert 0 < errors[0][0] < 1
