"""Marginals and thresholds beside native columns: over the others, by the same rule as without them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from anamorph.columns import Codes, Datetime, Numeric
from anamorph.errors import WorkloadError
from anamorph.queries.spec import workload
from anamorph.schema import Schema

CODED = tuple(Codes(name=name, values=size) for name, size in (("a", 2), ("b", 3), ("c", 4), ("d", 5)))
PAY = Numeric(name="pay", lower=0, upper=1e6, native=True, transform="log")
WHEN = Datetime(name="when", lower="2020-01-01", upper="2021-01-01")
MIXED = Schema((PAY, CODED[0], CODED[1], WHEN, CODED[2], CODED[3]))
PLACES = (1, 2, 4, 5)


def sets(spec, schema=MIXED):
    return [features for part in workload(spec, schema).parts for features in part.sets]


def test_marginals_are_over_the_other_columns():
    assert sets("marginals:k=2") == list(itertools.combinations(PLACES, 2))
    assert sets("thresholds:k=4,r=2") == [PLACES]
    assert sets("marginals:of=d+a") == [(1, 5)]


def test_the_draw_is_that_of_the_schema_without_native_columns():
    for spec in ("marginals:k=2,count=4,seed=3", "thresholds:k=3,r=1,count=2,seed=1"):
        plain = [tuple(PLACES[i] for i in features) for features in sets(spec, Schema(CODED))]
        assert sets(spec) == plain
    every = list(itertools.combinations(PLACES, 2))
    drawn = np.random.default_rng(3).choice(every, 4, replace=False)
    assert sets("marginals:k=2,count=4,seed=3") == list(map(tuple, drawn.tolist()))


@pytest.mark.parametrize("spec", ["marginals:k=5", "marginals:k=5,count=1", "thresholds:k=6,r=2", "marginals:k=0"])
def test_an_order_beyond_the_other_columns_is_refused(spec):
    with pytest.raises(WorkloadError) as caught:
        workload(spec, MIXED)
    assert "must be from 1 to 4, the number of columns that are not native numbers: declare bins" in str(caught.value)


@pytest.mark.parametrize("spec", ["marginals:of=a+pay", "thresholds:of=when+a,r=1", "marginals:of=when"])
def test_a_native_column_has_no_marginal(spec):
    with pytest.raises(WorkloadError, match="must not be native in a marginal or threshold: declare bins") as caught:
        workload(spec, MIXED)
    assert "take a class of queries for numbers" in str(caught.value)


def test_a_schema_of_native_columns_alone():
    with pytest.raises(WorkloadError, match=r"k \(1\) must be from 1 to 0, the number of columns that are not native"):
        workload("marginals:k=1", Schema((PAY, WHEN)))
