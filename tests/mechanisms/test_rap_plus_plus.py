"""RAP++ on a small table with two numbers: its plan, its measurements, its release, and how near it comes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph import archive
from anamorph.columns import Codes, Numeric
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import count
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms.mechanism import NAMES, mechanism
from anamorph.mechanisms.rap_plus_plus import RAPPlusPlus, projection
from anamorph.models.mixed import MixedRows
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SCHEMA = Schema(
    (
        Codes(name="a", values=3),
        Numeric(name="x", lower=0, upper=19, integer=True, native=True),
        Codes(name="b", values=2),
        Numeric(name="y", lower=0.0, upper=1.0, native=True, missing=True),
    ),
    dataset="rows",
)
N = 3000
SMALL = RAPPlusPlus(rounds=4, marginal_rounds=2, per_round=3, rows=60, steps=15, levels=6, rate=0.05)
SPECS = {
    "both": "marginals:k=1; mixed:k=2,count=30,seed=1; halfspaces:count=10,target=a+b",
    "marginals": "marginals:k=1; marginals:k=2",
    "thresholds": "thresholds:k=2,r=1; mixed:k=1,count=12,seed=0",
    "mixed": "mixed:k=3,count=25,seed=2",
    "halfspaces": "halfspaces:count=20,target=b",
}
WORKLOADS = {kind: parse_workload(spec, SCHEMA) for kind, spec in SPECS.items()}


def table_rows():
    random = np.random.default_rng(0)
    a = random.choice(3, N, p=[0.6, 0.3, 0.1])
    x = np.where(random.random(N) < 0.8, 6 * a + random.integers(0, 3, N), random.integers(0, 20, N))
    y = (random.beta(2, 8, N) * (1 << 20)).astype(np.int64)
    return np.stack([a, x, (x > 8) * 1, np.where(random.random(N) < 0.1, 1 << 20, y)], axis=1).astype(np.int32)


ROWS = table_rows()


def source() -> TableSource:
    return TableSource(Table(ROWS, SCHEMA.sizes), SCHEMA)


def release(made, kind="both", relation="replace", epsilon=1.0, **more):
    curator = Curator(source(), Budget(epsilon=epsilon, delta=1e-6), neighbours=relation, **more)
    return made(curator, WORKLOADS[kind], seed=3)


@cache
def made_once(kind, relation="replace", epsilon=1.0):
    return release(SMALL, kind, relation, epsilon)


def answers(model, workload):
    return np.concatenate([np.asarray(part) for part in model.answers(workload)])


def truth(workload):
    return np.concatenate([count(piece.tally, source()) for piece in workload.pieces()]) / N


@pytest.mark.parametrize("kind", ["both", "mixed", "halfspaces"])
def test_with_a_huge_budget_errors_are_small(kind):
    """Tests that are measured, and those that are not."""
    workload = WORKLOADS[kind]
    made = replace(SMALL, rounds=3, per_round=8, rows=100, steps=30, levels=8)
    found = answers(release(made, kind, epsilon=1e6).model, workload)
    start = projection(made).begin(release_columns(), seed=3)
    before = np.abs(answers(start, workload) - truth(workload)).mean()
    assert np.abs(found - truth(workload)).mean() < min(0.012, 0.15 * before)


@cache
def release_columns():
    return made_once("both").model.columns


def blocks_of(found):
    """What every block that was measured is: a set of features, or a test."""
    for measurement in found.measurements:
        for part in measurement.workload.parts:
            yield from part.sets if isinstance(part, Marginals) else part.tally.identities()


@pytest.mark.parametrize("kind", WORKLOADS)
def test_no_block_is_measured_twice(kind):
    found = list(blocks_of(made_once(kind)))
    assert len(found) == len(set(found))
    planned = SMALL.plan(WORKLOADS[kind], 1.0)
    assert len(found) == sum(round_.k for _, round_ in planned)
    measured = made_once(kind).measurements
    assert [m.workload.blocks for m in measured] == [round_.k for _, round_ in planned]


def test_nothing_is_noised_again(monkeypatch):
    """The bug of the published code: every round drew new noise for the whole history."""
    seen, kind = [], type(projection(SMALL))
    fit = kind.fit

    def watched(self, model, measurements, *, seed=0):
        seen.append([measurement.values for measurement in measurements])
        return fit(self, model, measurements, seed=seed)

    monkeypatch.setattr(kind, "fit", watched)
    release(SMALL, "both")
    assert [len(log) for log in seen] == list(range(1, len(seen) + 1))
    for earlier, later in itertools.pairwise(seen):
        assert all(a is b for a, b in zip(earlier, later, strict=False))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_plan_is_what_is_spent(kind, relation):
    found = made_once(kind, relation)
    spends = [spend for spend in found.privacy.spends if spend.kind != "total"]
    rho = Budget(epsilon=1.0, delta=1e-6).rho
    left = rho - sum(spend.rho for spend in found.privacy.spends if spend.kind == "total")
    planned = SMALL.steps_for(WORKLOADS[kind], left)
    assert [(step.kind, pytest.approx(step.rho)) for step in planned] == [(spend.kind, spend.rho) for spend in spends]
    assert sum(Fraction(spend.rho) for spend in found.privacy.spends) <= Fraction(rho)
    assert sum(spend.rho for spend in found.privacy.spends) == pytest.approx(rho)
    cells = [step.cells for step in planned if step.kind == "measure"]
    assert all(m.workload.cells <= most for m, most in zip(found.measurements, cells, strict=True))


@given(st.integers(1, 60), st.integers(0, 9), st.integers(1, 20), st.floats(1e-6, 10), st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_rounds_share_the_budget_and_take_no_more_than_there_is(rounds, marginal_rounds, per_round, rho, split):
    made = RAPPlusPlus(rounds=rounds, marginal_rounds=marginal_rounds, per_round=per_round, split=split)
    for workload in WORKLOADS.values():
        plan = made.plan(workload, rho)
        budgets = [round_.rho for _, round_ in plan]
        assert sum(map(Fraction, budgets)) <= Fraction(rho)
        assert budgets == pytest.approx([rho / len(plan)] * len(plan))
        for part, times, k in made.classes(workload):
            assert 1 <= k <= per_round
            assert times * k <= part.blocks
            kinds = {isinstance(item, NumberTests) for item in part.parts}
            assert len(kinds) == 1
            assert sum(queries is part or queries.digest == part.digest for queries, _ in plan) == times
            assert times == min(rounds if kinds == {True} else marginal_rounds or 1, part.blocks)


def test_rounds_of_marginals_follow_the_coded_columns():
    schema = Schema(tuple(Codes(name=f"c{i}", values=2) for i in range(6)))
    ((_, times, k),) = RAPPlusPlus().classes(parse_workload("marginals:k=2", schema))
    assert (times, k) == (5, 3)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", ["both", "thresholds"])
def test_a_release_saved_and_loaded_answers_the_same(kind, relation, tmp_path):
    found = made_once(kind, relation)
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release")
    assert isinstance(loaded.model, MixedRows)
    assert loaded.model.columns == found.model.columns
    for workload in WORKLOADS.values():
        np.testing.assert_allclose(answers(loaded.model, workload), answers(found.model, workload), atol=1e-6)
    for before, after in zip(found.measurements, loaded.measurements, strict=True):
        assert before.workload.digest == after.workload.digest
        np.testing.assert_array_equal(before.values, after.values)
        np.testing.assert_array_equal(before.sigma, after.sigma)
    np.testing.assert_array_equal(loaded.model.sample(99, seed=1).codes, found.model.sample(99, seed=1).codes)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_rows_are_in_the_schema_and_decode(kind):
    table = made_once(kind).model.sample(500, seed=0)
    assert np.all((table.codes >= 0) & (table.codes < SCHEMA.sizes))
    decoded = SCHEMA.decode(table, np.random.default_rng(0))
    x, y = (decoded.column(name).to_numpy(zero_copy_only=False) for name in ("x", "y"))
    assert np.all((x >= 0) & (x <= 19) & (x == np.floor(x)))
    known = y[~np.isnan(y)]
    assert np.all((known >= 0) & (known <= 1))


@pytest.mark.parametrize("relation", RELATIONS)
def test_noise_is_that_of_the_blocks(relation):
    """Delta_2 sqrt(K / (2 (1 - a) rho_t)), with Delta_2^2 = 1 or 2; 1 for blocks of a single cell."""
    found = made_once("halfspaces", relation)
    squared = 2 if relation == "replace" else 1
    spends = [spend for spend in found.privacy.spends if spend.kind == "measure"]
    for measurement, spend in zip(found.measurements, spends, strict=True):
        expected = np.sqrt(squared * SMALL.per_round / (2 * spend.rho))
        assert measurement.sigma * found.total == pytest.approx(expected)


def halves(row):
    return row["a"] * 0.5


def test_functions_and_single_cells_are_refused_before_anything_is_spent():
    plain = Schema((Codes(name="a", values=3), Codes(name="b", values=2)), dataset="rows")
    rows = TableSource(Table(ROWS[:, ::2].copy(), plain.sizes), plain)
    marginals = Marginals(plain.sizes, ((0, 1),))
    for parts in ((custom(halves, plain),), (marginals, custom(halves, plain)), (marginals.by_cell(),)):
        curator = Curator(rows, Budget(epsilon=1.0, delta=1e-6))
        with pytest.raises(WorkloadError, match="must be of whole marginals, thresholds and tests of numbers"):
            SMALL(curator, Workload(parts), seed=0)
        assert curator.privacy().spends == ()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"rap++", "all-zero"}))
@pytest.mark.parametrize("kind", ["both", "mixed", "halfspaces"])
def test_other_mechanisms_refuse_numbers_before_anything_is_spent(name, kind):
    rows = {"rap": [{}, {"rounds": "1"}, {"blocks": "true"}], "gem": [{}, {"rounds": "1"}, {"blocks": "false"}]}
    for options in rows.get(name, [{}]):
        curator = Curator(source(), Budget(epsilon=1.0, delta=1e-6))
        with pytest.raises(WorkloadError, match="the workload must be of"):
            mechanism(name, options)(curator, WORKLOADS[kind], seed=0)
        assert curator.privacy().spends == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, r"rounds \(0\) must be a whole number of at least 1"),
        ({"rounds": True}, r"rounds \(True\) must be"),
        ({"marginal_rounds": -1}, r"marginal_rounds \(-1\) must be a whole number of at least 0"),
        ({"per_round": 0}, r"per_round \(0\) must be"),
        ({"split": 1.0}, r"split \(1.0\) must be in \(0, 1\)"),
        ({"rows": 0}, r"rows \(0\) must be"),
        ({"levels": 0}, r"levels \(0\) must be"),
        ({"levels": 2.5}, r"levels \(2.5\) must be"),
        ({"temperature": 0.0}, r"temperature \(0.0\) must be"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be"),
        ({"gamma": -0.1}, r"gamma \(-0.1\) must be"),
        ({"gamma": float("inf")}, r"gamma \(inf\) must be"),
    ],
)
def test_bad_parameters_are_refused(options, words):
    with pytest.raises(ParameterError, match=words):
        RAPPlusPlus(**options)


def test_memory_grows_with_rows_and_with_what_is_held():
    small, large = (parse_workload(f"mixed:k=2,count={count}", SCHEMA) for count in (20, 20_000))
    assert SMALL.memory(large) > SMALL.memory(small)
    assert replace(SMALL, rows=5000).memory(small) > SMALL.memory(small)


def test_a_seeded_run_repeats_and_two_others_differ():
    one, same = (release(SMALL, "mixed", unsafe_seed=1) for _ in range(2))
    np.testing.assert_array_equal(answers(one.model, WORKLOADS["mixed"]), answers(same.model, WORKLOADS["mixed"]))
    fresh = [release(SMALL, "mixed").measurements[0].values for _ in range(2)]
    assert not np.array_equal(*fresh)


def test_tests_that_repeat_in_the_workload_are_measured_once():
    """Few codes make few distinct tests: 60 draws of at most 20."""
    workload = parse_workload("mixed:k=1,count=60,seed=0", Schema(SCHEMA.columns[:2], dataset="rows"))
    schema = Schema(SCHEMA.columns[:2], dataset="rows")
    rows = TableSource(Table(ROWS[:, :2].copy(), schema.sizes), schema)
    curator = Curator(rows, Budget(epsilon=1.0, delta=1e-6))
    found = list(blocks_of(SMALL(curator, workload, seed=0)))
    assert len(found) == len(set(found)) == 12
