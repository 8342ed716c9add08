"""Knots by a charged estimate: near the true quantiles, in order, on record, and the same account after it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes, Numeric
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.ledger import Ledger
from anamorph.errors import BudgetError, DataError, ParameterError, ResourceError, SchemaError
from anamorph.evaluation.scoring import require_schema
from anamorph.fitting import Estimation, Fit, estimate, run
from anamorph.mechanisms.mechanism import mechanism
from anamorph.models.answers import Zero
from anamorph.planning import plan
from anamorph.quantiles import Quantiles
from anamorph.release import Privacy, Release
from anamorph.schema import Schema, parse
from anamorph.sources import TableSource, encode
from anamorph.table import Table

N = 20_000
SCHEMA = Schema(
    (
        Codes(name="kind", values=2),
        Numeric(name="pay", lower=0, upper=1e6, native=True, transform="quantile", missing=True),
        Numeric(name="age", lower=0, upper=120, bins=8, integer=True, transform="quantile"),
        Numeric(name="share", lower=0, upper=1, native=True),
    ),
    dataset="people",
)


def frame(rows=N, seed=0):
    generator = np.random.default_rng(seed)
    pay = generator.lognormal(8, 1.2, rows)
    return pa.table(
        {
            "kind": generator.integers(0, 2, rows),
            "pay": pa.array(pay, mask=generator.random(rows) < 0.2),
            "age": generator.integers(18, 90, rows),
            "share": generator.random(rows),
        }
    )


FRAME = frame()
SOURCE = TableSource(encode(FRAME, Quantiles().prepared(SCHEMA)), Quantiles().prepared(SCHEMA))


def curator(epsilon=1.0, delta=1e-6, source=SOURCE, **more):
    return Curator(source, Budget(epsilon=epsilon, delta=delta), **more)


def ranks(column, values):
    """The shares of the values that lie below, and not above, each inner knot."""
    known = np.sort(np.asarray(values.drop_null(), np.float64))
    knots = np.array(column.knots[1:-1])
    return np.searchsorted(known, knots) / known.size, np.searchsorted(known, knots, side="right") / known.size


def worst(column, values, knots):
    """How far the wanted shares are from those of the knots, at the worst."""
    below, until = ranks(column, values)
    wanted = np.arange(1, knots - 1) / (knots - 1)
    assert len(below) == len(wanted)
    return float(np.max(np.maximum(below - wanted, wanted - until)))


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
@pytest.mark.parametrize("knots", [3, 9, 16])
def test_with_a_huge_budget_the_knots_are_the_quantiles(relation, knots):
    made = Quantiles(knots=knots)(curator(1e5, neighbours=relation))
    pay, age = made.columns[1], made.columns[2]
    values = FRAME["pay"].combine_chunks()
    assert worst(pay, values, knots) < 1e-3  # of 2^20 equal steps of the range
    assert worst(age, FRAME["age"].combine_chunks(), knots) <= 1e-9
    assert (pay.source, age.source, made.columns[3]) == ("dp", "dp", SCHEMA.columns[3])
    assert (pay.knots[0], pay.knots[-1], age.knots[0], age.knots[-1]) == (0, 1e6, 0, 120)
    assert all(isinstance(knot, int) for knot in age.knots)
    assert made.pending == ()
    assert made.fingerprint == SCHEMA.fingerprint


def test_with_a_small_budget_they_are_near():
    """A test has sigma = sqrt(tests / (2 rho)); the last turn of a search is right within a few of them."""
    asked, budget = Quantiles(columns=("pay",), knots=9), Budget(epsilon=0.1, delta=1e-6)
    made = asked(curator(0.1)).columns[1]
    sigma = math.sqrt(sum(asked.tests(SOURCE.schema)) / (2 * budget.rho)) / (0.8 * N)
    assert 0.01 < sigma < 0.05
    below, until = ranks(made, FRAME["pay"].combine_chunks())
    wanted = np.arange(1, 8) / 8
    assert len(below) <= 7
    for knot_below, knot_until in zip(below, until, strict=True):
        assert np.min(np.maximum(knot_below - wanted, wanted - knot_until)) < 6 * sigma
    assert np.max(np.abs(below[:, None] - wanted).min(axis=0)) < 6 * sigma + 0.125 * (len(below) < 7)


def test_noise_of_the_planned_size_is_added():
    """At a tiny budget the estimate is anywhere; at a large one it is not: the budget is what makes it good."""
    spread = [Quantiles(columns=("pay",), knots=3)(curator(1e-4)).columns[1].knots[1:-1] for _ in range(12)]
    assert len(set(spread)) > 6
    exact = [Quantiles(columns=("pay",), knots=3)(curator(1e5)).columns[1].knots[1:-1] for _ in range(3)]
    assert len(set(exact)) == 1


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
def test_the_plan_is_what_is_spent_and_stands_in_the_ledger(tmp_path, relation):
    asked, rho = Quantiles(knots=6), Budget(epsilon=1.0, delta=1e-6).rho
    book = Ledger(tmp_path / "ledger")
    talked = curator(neighbours=relation, ledger=book, terms={"estimate": "quantiles"})
    asked(talked)
    entries = book.entries("people")
    spends = [entry for entry in entries if entry.kind == "measure"]
    total = sum((Fraction(entry.rho) for entry in entries), start=Fraction(0))
    assert total <= Fraction(rho)
    assert float(total) == pytest.approx(rho, rel=1e-9)
    assert len(spends) == 20  # of 2^20 steps; the 121 ages need 7 of them
    assert [entry.kind for entry in entries if entry.kind != "measure"] == ["total"] * (relation == "add-remove")
    tests = asked.tests(SOURCE.schema)
    assert tests == [3, 4, 8, 8, 8, 8, 8, *[4] * 13]
    left = float(total) - sum(entry.rho for entry in entries if entry.kind == "total")
    assert [entry.rho for entry in spends] == pytest.approx([left * t / sum(tests) for t in tests])
    assert spends[0].what.startswith("3 queries in 3 blocks")
    for entry, most in zip(spends, tests, strict=True):
        asked_now = int(entry.what.split()[0])
        assert asked_now <= most
        assert float(entry.what.split()[-1]) == pytest.approx(math.sqrt(asked_now / (2 * entry.rho)), rel=1e-5)


ODD = {
    "all missing": [None] * 50,
    "all equal": [7.0] * 50,
    "all at the lower end": [0.0] * 50,
    "all at the upper end": [1e6] * 50,
    "all out of range": [-5.0, 1e30] * 25,
    "two values": [1.0] * 25 + [999.0] * 25,
    "one row": [3.0],
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("epsilon", [0.01, 1e5])
@pytest.mark.parametrize("kind", ODD)
def test_odd_columns_have_knots_too(kind, epsilon, missing):
    column = Numeric(name="x", lower=0, upper=1e6, native=True, transform="quantile", missing=missing)
    schema = Schema((column,))
    values = pa.array(ODD[kind], pa.float64())
    source = TableSource(encode(pa.table({"x": values}), schema), schema)
    found = Quantiles(knots=8)(curator(epsilon, source=source)).columns[0]
    assert 2 <= len(found.knots) <= 8
    assert (found.knots[0], found.knots[-1]) == (0, 1e6)
    if epsilon > 1 and kind == "all equal":
        assert found.knots == pytest.approx((0, 7, 1e6), abs=1e6 / 2**20)


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40),
    st.integers(3, 12),
    st.booleans(),
    st.sampled_from([(-1000, 1000), (0, 3), (999, 1000), (-(2**40), 2**40)]),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_an_estimate_is_always_a_schema(values, knots, native, bounds, integer):
    """Whatever the noise: increasing knots that doubles can tell apart, and files hold the same."""
    bins = {} if native else {"bins": 2}
    column = Numeric(
        name="x", lower=bounds[0], upper=bounds[1], native=native, transform="quantile", integer=integer, **bins
    )
    schema = Schema((column,))
    source = TableSource(encode(pa.table({"x": values}), schema), schema)
    made = Quantiles(knots=knots)(curator(0.5, source=source))
    assert 2 <= len(made.columns[0].knots) <= knots
    assert Schema.from_dict(parse(made.to_yaml(), "here")) == made
    assert made.fingerprint == schema.fingerprint


def request(tmp_path, **more):
    usual = {"data": FRAME, "schema": SCHEMA, "quantiles": Quantiles(knots=5), "ledger": tmp_path / "ledger"}
    usual |= {"budget": Budget(epsilon=0.1, delta=1e-6), "output": tmp_path / "s.yaml"}
    return Estimation(**usual | more)


def fit(tmp_path, schema, **more):
    usual = {"data": FRAME, "workload": "marginals:k=1", "mechanism": mechanism("gaussian"), "output": None}
    return Fit(schema=schema, budget=Budget(epsilon=0.1, delta=1e-6), ledger=tmp_path / "ledger", **usual | more)


def test_an_estimate_and_a_fit_share_an_account(tmp_path):
    total = Budget(epsilon=1.0, delta=1e-6)
    terms = {"epsilon": total.epsilon, "delta": total.delta, "rho": total.rho}
    book = Ledger(tmp_path / "ledger")
    book.open(dataset="people", relation="replace", schema=SCHEMA.fingerprint, **terms)
    found, promise = estimate(request(tmp_path))
    text = (tmp_path / "s.yaml").read_text()
    assert "(0.1, 1e-06)-differentially private" in promise
    assert text.startswith('# knots of ["pay", "age"]: (0.1, 1e-06)-differentially private, rho ')
    assert Schema.load(tmp_path / "s.yaml") == found
    spent = book.account("people").spent
    assert spent == pytest.approx(Budget(epsilon=0.1, delta=1e-6).rho)
    run(fit(tmp_path, found))
    account = book.account("people")
    assert account.spent == pytest.approx(2 * spent)
    assert {entry.run for entry in book.entries("people")} != {book.entries("people")[0].run}
    with pytest.raises(BudgetError, match="another schema"):
        run(fit(tmp_path, replace(found, columns=found.columns[1:])))
    assert book.account("people") == account


def test_a_run_with_other_knots_is_not_resumed(tmp_path, monkeypatch):
    columns = SCHEMA.columns
    known = [
        replace(SCHEMA, columns=(columns[0], replace(columns[1], knots=(0, middle, 1e6)), columns[3]))
        for middle in (5, 50)
    ]
    assert known[0].fingerprint == known[1].fingerprint
    terms = [fit(tmp_path, schema).terms for schema in known]
    assert terms[0] != terms[1]
    assert "knots" not in fit(tmp_path, replace(SCHEMA, columns=columns[3:])).terms
    with monkeypatch.context() as dying:
        dying.setattr(Curator, "finish", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            run(fit(tmp_path, known[0]))
    with pytest.raises(ParameterError, match="no unfinished run of these terms to resume"):
        run(fit(tmp_path, known[1], resume=True))
    run(fit(tmp_path, known[0], resume=True))


def test_an_estimate_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    measure, calls = Curator.measure, []

    def dying(self, workload, **more):
        calls.append(measure(self, workload, **more))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(Curator, "measure", dying)
    with pytest.raises(KeyboardInterrupt):
        estimate(request(tmp_path))
    assert not (tmp_path / "s.yaml").exists()
    found, _ = estimate(request(tmp_path, resume=True))
    for before, after in zip(calls[:5], calls[5:10], strict=True):
        assert before.values.tolist() == after.values.tolist()
    spent = Ledger(tmp_path / "ledger").account("people").spent
    assert spent == pytest.approx(Budget(epsilon=0.1, delta=1e-6).rho)
    assert Schema.load(tmp_path / "s.yaml") == found


PLAIN = replace(SCHEMA, columns=(SCHEMA.columns[0], SCHEMA.columns[3]))
LOG = replace(SCHEMA, columns=(replace(SCHEMA.columns[1], transform="log"),))


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"schema": PLAIN}, SchemaError, "a column must declare `transform: quantile`, without knots"),
        ({"quantiles": Quantiles(columns=("share",))}, SchemaError, "'share' must declare `transform: quantile` for"),
        ({"quantiles": Quantiles(columns=("kind",))}, SchemaError, "'kind' must declare `transform: quantile`"),
        ({"quantiles": Quantiles(columns=("agee",))}, SchemaError, "Did you mean 'age'?"),
        ({"schema": LOG, "quantiles": Quantiles(columns=("pay",))}, SchemaError, "'pay' must declare"),
        ({"neighbours": "other"}, ParameterError, "neighbours ('other') must be replace or add-remove"),
        ({"budget": Budget(epsilon=1e-12, delta=1e-12)}, ParameterError, "epsilon must be larger"),
        ({"output": "."}, ParameterError, "must not exist yet"),
        ({"output": "s.yaml/none/x.yaml"}, ResourceError, "cannot be written"),
        ({"output": "ledger"}, ParameterError, "must not be the ledger"),
        ({"data": FRAME.drop_columns(["pay"])}, DataError, "column 'pay' of the schema must be in the data"),
        ({"data": FRAME.slice(0, 0)}, DataError, "at least one row where rows are replaced"),
        ({"resume": True}, ParameterError, "must have a run to resume"),
    ],
)
def test_refusals_come_before_anything_is_spent(tmp_path, more, error, words):
    if "output" in more:
        more = more | {"output": tmp_path / more["output"]}
    with pytest.raises(error) as caught:
        estimate(request(tmp_path, **more))
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("knots", [0, 2, 1025, -1, 2.5, True, "9"])
def test_a_wrong_number_of_knots_is_refused(knots):
    with pytest.raises(ParameterError, match="must be a whole number from 3 to 1024"):
        Quantiles(knots=knots)


def test_without_knots_nothing_is_fitted_or_planned(tmp_path):
    words = "columns 'pay', 'age': knots must be declared .* `anamorph schema quantiles DATA"
    with pytest.raises(SchemaError, match=words):
        run(fit(tmp_path, SCHEMA))
    budget = Budget(epsilon=0.1, delta=1e-6)
    with pytest.raises(SchemaError, match=words):
        plan(SCHEMA, "marginals:k=1", mechanism("gaussian"), budget, neighbours="replace", rows=None)
    assert list(tmp_path.iterdir()) == []


def test_a_release_is_not_evaluated_by_other_knots():
    schemas = [Schema((replace(SCHEMA.columns[1], knots=knots),)) for knots in ((0, 5, 1e6), (0, 6, 1e6), None)]
    release = Release(schemas[0], Zero(schemas[0].sizes), (), Privacy("replace", 1.0, 1e-6, 0.1, ()), 9.0)
    require_schema(release, Schema.from_dict(parse(schemas[0].to_yaml(), "here")))
    for other in schemas[1:]:
        with pytest.raises(SchemaError, match="must be the one of the release"):
            require_schema(release, other)


def test_knots_are_estimated_anew_on_the_plain_grid():
    """A column that has knots is counted without them, so that the estimate does not depend on them."""
    before = replace(SCHEMA, columns=(replace(SCHEMA.columns[1], knots=(0, 1, 2, 1e6)),))
    asked = Quantiles(columns=("pay",), knots=5)
    prepared = asked.prepared(before)
    assert prepared.pending == ("pay",)
    source = TableSource(encode(FRAME.select(["pay"]), prepared), prepared)
    made = asked(curator(1e5, source=source))
    assert worst(made.columns[0], FRAME["pay"].combine_chunks(), 5) < 1e-3


@pytest.mark.parametrize("size", [2, 3, 5, 64, 100])
def test_small_ranges_of_whole_numbers_are_searched_to_the_end(size):
    schema = Schema((Numeric(name="x", lower=0, upper=size - 1, integer=True, native=True, transform="quantile"),))
    codes = np.random.default_rng(size).integers(0, size, (200, 1)).astype(np.int32)
    found = Quantiles(knots=4)(curator(1e5, source=TableSource(Table(codes, schema.sizes), schema)))
    expected = {int(np.quantile(codes, share, method="inverted_cdf")) for share in (1 / 3, 2 / 3)}
    assert found.columns[0].knots == tuple(sorted(expected | {0, size - 1}))
