"""Queries of native numbers: what is drawn, how halfspaces are rounded, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes, Numeric
from anamorph.curator.tallies import check_tally
from anamorph.curator.where import LARGEST_SUM, Where
from anamorph.errors import SchemaError, WorkloadError
from anamorph.queries.marginals import Marginals, target_marginals
from anamorph.queries.numbers import MOST_QUERIES, halfspaces, limits_of, mixed_marginals, rounded
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.spec import workload
from anamorph.queries.workload import Workload
from anamorph.schema import Schema

SCHEMA = Schema(
    (
        Codes(name="a", values=3),
        Numeric(name="x", lower=0, upper=9, integer=True, native=True),
        Codes(name="b", values=2),
        Numeric(name="y", lower=-1.0, upper=1.0, native=True, missing=True),
    )
)
PLAIN = Schema((Codes(name="a", values=3), Codes(name="b", values=2)))
ONLY = Schema(SCHEMA.columns[1::2])


def described(parts):
    return [
        (part.tally.given, part.tally.numbers, part.tally.bounds.tolist(), np.array(part.tally.weights).tolist())
        for part in parts
    ]


@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_mixed_marginals_are_of_the_sets_they_may_be_of(k, count, seed):
    parts = mixed_marginals(SCHEMA, k, count=count, seed=seed)
    assert sum(part.blocks for part in parts) == count
    sets = [tuple(sorted((*part.tally.given, *part.tally.numbers))) for part in parts]
    every = [columns for columns in itertools.combinations(range(4), k) if set(columns) & {1, 3}]
    assert sets == sorted(set(sets))
    assert set(sets) <= set(every)
    for part, columns in zip(parts, sets, strict=True):
        check_tally(part.tally, SCHEMA.sizes)
        assert part.tally.numbers == tuple(column for column in columns if column in (1, 3))
        limits = np.array([{1: 10, 3: 1 << 20}[number] for number in part.tally.numbers])
        assert part.tally.limits == tuple(limits.tolist())
        assert np.all((part.tally.bounds >= 0) & (part.tally.bounds < limits))
    assert described(parts) == described(mixed_marginals(SCHEMA, k, count=count, seed=seed))


def test_sets_and_thresholds_are_drawn_uniformly():
    """6000 draws of 5 sets and of 10 thresholds: 4.5 deviations of a count are 10 or 17 percent."""
    parts = mixed_marginals(SCHEMA, 2, count=6000, seed=1)
    assert [part.blocks for part in parts] == pytest.approx([1200] * 5, abs=4.5 * (6000 * 0.2 * 0.8) ** 0.5)
    bounds = Counter(mixed_marginals(Schema(SCHEMA.columns[:2]), 1, count=6000, seed=2)[0].tally.bounds.ravel())
    assert [bounds[code] for code in range(10)] == pytest.approx([600] * 10, abs=4.5 * (6000 * 0.1 * 0.9) ** 0.5)


def test_seeds_and_targets_matter():
    assert described(mixed_marginals(SCHEMA, 2, count=9, seed=0)) != described(
        mixed_marginals(SCHEMA, 2, count=9, seed=1)
    )
    for part in mixed_marginals(SCHEMA, 3, count=30, seed=0, target="b"):
        assert 2 in part.tally.given
    one = halfspaces(SCHEMA, count=9, seed=4, targets=("a",))
    assert described(one) == described(halfspaces(SCHEMA, count=9, seed=4, targets=("a",)))
    assert described(one) != described(halfspaces(SCHEMA, count=9, seed=5, targets=("a",)))
    both = halfspaces(SCHEMA, count=200, seed=4, targets=("b", "a"))
    assert [part.tally.given for part in both] == [(2,), (0,)]
    assert sum(part.blocks for part in both) == 200
    assert min(part.blocks for part in both) > 60
    assert all(part.tally.numbers == (1, 3) for part in both)


def test_without_coded_columns_nothing_is_given():
    (part,) = mixed_marginals(ONLY, 2, count=5, seed=0)
    assert (part.tally.given, part.tally.numbers, part.largest_block, part.cells) == ((), (0, 1), 1, 5)


@given(
    st.lists(st.integers(2, 1 << 20), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.sampled_from([0.01, 1.0, 50.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_rounded_halfspace_is_that_of_the_reals(limits, seed, size):
    """Except within rounding of the boundary: half a weight for each code, and the bound."""
    random = np.random.default_rng(seed)
    theta, tau = random.standard_normal((5, len(limits))) * size, random.standard_normal(5) * size
    weights, bounds = rounded(theta, tau, tuple(limits))
    sizes = tuple(limits)
    tally = Where(sizes, (), tuple(range(len(limits))), sizes, bounds, weights)
    check_tally(tally, sizes)
    codes = np.stack([random.integers(0, limit, 200) for limit in limits], axis=1)
    holds = tally.holds(codes.astype(float), slice(None))
    margin = tau[:, None] - theta @ ((codes + 0.5) / np.array(limits)).T
    # S is at least 2^50 over the largest sum, at most 2^40; a code below 2^20 times half a unit, for each number
    largest = max(np.abs(theta).sum(axis=1).max(), np.abs(tau).max(), 1.0)
    precision = min(2.0**39, LARGEST_SUM / 8 / largest)
    near = (np.sum(limits) / 2 + 2) / precision
    sure = np.abs(margin) > near
    assert np.array_equal(holds[sure], margin[sure] >= 0)
    assert near < 2.0**-15
    reach = np.abs(weights).astype(object) @ np.array(limits, object)
    assert all(int(value) < LARGEST_SUM for value in reach)


def test_halfspaces_have_the_paper_s_distribution():
    """Theta of variance 1 / d, tau of variance 1: each known to 4.5 in sqrt(2 * 4000)."""
    (part,) = halfspaces(SCHEMA, count=4000, seed=3, targets=("a",))
    limits = np.array(part.tally.limits)
    scaled = part.tally.weights * limits  # S theta
    tau = part.tally.bounds + part.tally.weights.sum(axis=1) / 2  # S tau
    unit = 2.0**40
    assert (scaled / unit).std(axis=0) == pytest.approx([0.5**0.5] * 2, rel=4.5 / 8000**0.5)
    assert (tau / unit).std() == pytest.approx(1, rel=4.5 / 8000**0.5)
    assert abs((tau / unit).mean()) < 4.5 / 4000**0.5


def test_limits_leave_missing_out():
    assert limits_of(SCHEMA, (1, 3)) == (10, 1 << 20)
    assert SCHEMA.sizes == (3, 10, 2, (1 << 20) + 1)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: mixed_marginals(PLAIN, 1, count=3, seed=0), "must leave a set of columns with a native number"),
        (lambda: mixed_marginals(SCHEMA, 0, count=3, seed=0), "k (0) must be from 1 to 4, the number of columns"),
        (lambda: mixed_marginals(SCHEMA, 5, count=3, seed=0), "k (5) must be from 1 to 4, the number of columns"),
        (lambda: mixed_marginals(SCHEMA, 1, count=3, seed=0, target="a"), "must leave a set of columns"),
        (lambda: mixed_marginals(SCHEMA, 2, count=3, seed=0, target="x"), "target ('x') must have categories"),
        (lambda: mixed_marginals(SCHEMA, 2, count=0, seed=0), "count (0) must be from 1 to"),
        (lambda: mixed_marginals(SCHEMA, 2, count=MOST_QUERIES + 1, seed=0), "must be from 1 to 10000000"),
        (lambda: mixed_marginals(SCHEMA, 2, count=3, seed=0, target="B"), "Did you mean 'b'?"),
        (lambda: halfspaces(PLAIN, count=3, seed=0, targets=("a",)), "must have a target and native numbers"),
        (lambda: halfspaces(SCHEMA, count=3, seed=0, targets=()), "must have a target and native numbers"),
        (lambda: halfspaces(SCHEMA, count=3, seed=0, targets=("a", "y")), "target ('y') must have categories"),
        (lambda: halfspaces(SCHEMA, count=0, seed=0, targets=("a",)), "count (0) must be from 1 to"),
    ],
)
def test_faulty_draws_are_refused_in_words(made, words):
    with pytest.raises((WorkloadError, SchemaError)) as caught:
        made()
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mixed:k=2", "must give count"),
        ("mixed:count=2", "must give k"),
        ("mixed:k=2,count=2,target=a+b", "target must be one column"),
        ("mixed:k=2,count=2,target=y", "target ('y') must have categories"),
        ("mixed:k=2,count=two", "count ('two') must be a whole number"),
        ("mixed:k=2,count=2,r=1", "option ('r=1') must be one of k, count, seed, target, weight"),
        ("mixed:k=9,count=2", "k (9) must be from 1 to 4, the number of columns"),
        ("halfspaces:target=a", "must give count"),
        ("halfspaces:count=3", "must have a target"),
        ("halfspaces:count=3,target=z", "column ('z') must be in the schema"),
        ("halfspaces:count=3,target=a,k=2", "option ('k=2') must be one of count, seed, target, weight"),
        ("marginals:of=a+x", "column ('x') must not be native in a marginal or threshold"),
        ("marginals:k=2,target=x", "column ('x') must not be native"),
        ("marginals:k=3", "k (3) must be from 1 to 2, the number of columns that are not native numbers"),
        ("thresholds:of=x,r=1", "column ('x') must not be native"),
    ],
)
def test_faulty_specs_are_refused_in_words(text, words):
    with pytest.raises((WorkloadError, SchemaError)) as caught:
        workload(text, SCHEMA)
    assert words in str(caught.value)


def test_specs_name_what_they_say():
    made = workload("mixed:k=3,count=12,seed=7,target=b; halfspaces:count=5,target=a+b,weight=2; marginals:k=2", SCHEMA)
    tested = [part for part in made.parts if isinstance(part, NumberTests)]
    expected = (
        *mixed_marginals(SCHEMA, 3, count=12, seed=7, target="b"),
        *halfspaces(SCHEMA, count=5, seed=0, targets=("a", "b")),
    )
    assert described(tested) == described(expected)
    assert made.blocks == 12 + 5 + 1
    assert [weight == 2 for weight in made.weights] == [len(np.shape(part.tally.weights)) > 0 for part in tested] + [
        False
    ]
    assert made.parts[-1] == Marginals(SCHEMA.sizes, ((0, 2),))
    assert workload(made.spec, SCHEMA).digest == made.digest


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 100), st.data())
@settings(max_examples=50, deadline=None)
def test_marginals_of_a_target_hold_it(k, target, seed, data):
    schema = Schema(tuple(Codes(name=f"c{i}", values=i + 2) for i in range(5)))
    every = [features for features in itertools.combinations(range(5), k) if target in features]
    found = target_marginals(schema, k, target)
    assert sorted(found.sets) == every
    count = data.draw(st.integers(1, len(every)))
    drawn = target_marginals(schema, k, target, count=count, seed=seed)
    assert len(set(drawn.sets)) == len(drawn.sets) == count
    assert set(drawn.sets) <= set(every)
    assert drawn == target_marginals(schema, k, target, count=count, seed=seed)
    for wrong in (0, len(every) + 1):
        with pytest.raises(WorkloadError, match="the marginals with this column"):
            target_marginals(schema, k, target, count=wrong)


def test_marginals_of_a_target_leave_numbers_out():
    assert target_marginals(SCHEMA, 2, 2).sets == ((0, 2),)
    assert target_marginals(SCHEMA, 1, 2).sets == ((2,),)


def test_a_test_drawn_twice_is_measured_once():
    """Few codes make few tests: random ones repeat, and a test asked twice would be refused when it is measured."""
    small = Schema((Codes(name="a", values=2), Numeric(name="x", lower=0, upper=2, integer=True, native=True)))
    made = workload("mixed:k=1,count=20,weight=1/2; mixed:k=2,count=20,seed=1; mixed:k=1,count=9,seed=5", small)
    assert made.blocks == 49
    measured = made.measured()
    keys = [key for part in measured.parts for key in part.tally.identities()]
    assert len(keys) == len(set(keys)) == 3 + 3
    assert set(keys) == {key for part in made.parts for key in part.tally.identities()}
    assert sorted(measured.weights) == [1, 1], "each with the largest weight that it has"
    assert measured.measured().digest == measured.digest
    plain = Workload(halfspaces(SCHEMA, count=20, seed=0, targets=("a", "b")))
    assert plain.measured().digest == plain.digest
