"""Questions against a database that holds every cell of the release, spread over its bins, with its weight."""

from __future__ import annotations

import datetime
import itertools
import math
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Categorical, Codes, Numeric, Ordinal
from anamorph.errors import ParameterError, SchemaError, UsageError
from anamorph.models.answers import Answers, Zero
from anamorph.models.least_squares import least_squares
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.workload import Workload
from anamorph.questions import LONGEST, ask
from anamorph.ranges import Datetime
from anamorph.release import Measurement, Privacy, Release, Spend
from anamorph.schema import Schema

SCHEMA = Schema(
    (
        Categorical(name="sex", categories=("F", "M"), other=True, missing=True),
        Ordinal(name="level", categories=("a", "b", "c"), missing=True),
        Numeric(name="age", lower=-2, upper=9, bins=4, integer=True, missing=True),
        Numeric(name="pay", lower=0, upper=8, bins=4),
        Codes(name="code", values=3, missing=True),
    )
)
SIZES = SCHEMA.sizes
CELLS = np.random.default_rng(0).dirichlet(np.full(math.prod(SIZES), 0.2))
PRIVACY = Privacy("replace", 1.0, 1e-6, 0.1, ())
Z = 1.959963984540054


def release(model, schema=SCHEMA, total=200.0):
    return Release(schema, model, (), PRIVACY, total)


EXACT = release(Answers(SIZES, {tuple(range(5)): CELLS}, {tuple(range(5)): 0.01}))


@pytest.fixture(scope="module")
def database():
    """Every cell as rows: its values, each number of a bin of whole ones, eight points of a bin of others."""
    points, whole = [0.125 + 0.25 * i for i in range(8)], range(3)
    rows = {name: [] for name in (*SCHEMA.names, "weight")}
    for cell, weight in zip(itertools.product(*map(range, SIZES)), CELLS, strict=True):
        for step, point in itertools.product(whole, points):
            values = (
                ["F", "M", "other", None][cell[0]],
                ["a", "b", "c", None][cell[1]],
                None if cell[2] == 4 else -2 + 3 * cell[2] + step,
                2.0 * cell[3] + point,
                [0, 1, 2, None][cell[4]],
                weight / 24,
            )
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
    connection = duckdb.connect()
    connection.register("cells", pa.table(rows))
    connection.execute("create table t as select * from cells")
    yield connection
    connection.close()


ORDERS = st.sampled_from(["<", "<=", ">", ">=", "=", "<>"])
WHOLE = st.integers(-4, 12).map(str)
HALVES = st.integers(-16, 96).map(lambda n: str(n / 8))
QUARTERS = st.integers(-4, 40).map(lambda n: str(n / 4))
LEVELS, SEXES = st.sampled_from(["'a'", "'b'", "'c'"]), st.sampled_from(["'F'", "'M'", "'other'"])
COLUMNS = {"age": st.one_of(WHOLE, HALVES), "pay": QUARTERS, "code": WHOLE, "level": LEVELS}


def joined(texts):
    return f"({', '.join(texts)})"


@st.composite
def simple(draw):
    name = draw(st.sampled_from([*COLUMNS, "sex"]))
    negated = draw(st.sampled_from(["", "not "]))
    kind = draw(st.sampled_from(["compare", "in", "between", "null"]))
    if kind == "null":
        return f"{name} is {negated}null"
    if name == "sex":
        if kind == "in":
            return f"sex {negated}in {joined(draw(st.lists(SEXES, min_size=1, max_size=2)))}"
        return f"sex {draw(st.sampled_from(['=', '<>']))} {draw(SEXES)}"
    values = COLUMNS[name]
    if kind == "in":
        return f"{name} {negated}in {joined(draw(st.lists(values, min_size=1, max_size=3)))}"
    if kind == "between":
        return f"{name} {negated}between {draw(values)} and {draw(values)}"
    return f"{name} {draw(ORDERS)} {draw(values)}"


CONDITIONS = st.recursive(
    simple(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda part: f"not ({part})"),
    ),
    max_leaves=5,
)


@given(condition=CONDITIONS)
@settings(deadline=None, max_examples=250)
def test_answers_are_those_of_the_database(database, condition):
    expected = database.execute(f"select coalesce(sum(weight), 0) from t where {condition}").fetchone()[0]
    found = ask(EXACT, condition)
    assert found.fraction == pytest.approx(expected, abs=1e-9)
    assert found.count == pytest.approx(200 * expected, abs=1e-6)
    assert found.question == condition


def test_a_missing_value_is_in_neither_a_condition_nor_its_negation():
    parts = [ask(EXACT, text).fraction for text in ("age < 3", "not age < 3", "age is null")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(1)


def test_rows_answer_as_their_cells_do():
    codes = np.random.default_rng(1).integers(0, SIZES, (30, 5))
    firsts = np.cumsum((0, *SIZES[:-1]))
    matrix = np.zeros((sum(SIZES), 30), np.float32)
    for row, code in enumerate(codes):
        matrix[firsts + code, row] = 1
    model = RelaxedRows(SIZES, matrix, np.full(30, 1 / 30, np.float32))
    found = ask(release(model), "sex = 'F' and code in (0, 2)")
    assert found.fraction == pytest.approx(np.mean((codes[:, 0] == 0) & np.isin(codes[:, 4], (0, 2))), abs=1e-6)
    assert found.sigma is found.low is found.high is None
    assert ask(release(Zero(SIZES)), "sex = 'F'").fraction == 0


def test_the_other_of_an_ordered_list_has_no_rank():
    schema = Schema((Ordinal(name="x", categories=("low", "high"), other=True, missing=True),))
    exact = release(Answers(schema.sizes, {(0,): np.array([0.1, 0.2, 0.3, 0.4])}, {(0,): 0.1}), schema)
    expected = {
        "x = 'other'": 0.3,
        "x <> 'other'": 0.3,
        "x is null": 0.4,
        "x is not null": 0.6,
        "x >= 'low'": 0.3,
        "x > 'low'": 0.2,
        "not x > 'low'": 0.1,
        "x between 'low' and 'high'": 0.3,
        "x in ('low', 'other')": 0.4,
        "x <> 'low'": 0.5,
    }
    for question, fraction in expected.items():
        assert ask(exact, question).fraction == pytest.approx(fraction), question
    with pytest.raises(ParameterError, match="must not order 'x' by 'other'"):
        ask(exact, "x < 'other'")


def test_wide_bins_of_whole_numbers_are_not_listed():
    column = Numeric(name="x", lower=0, upper=2**50 - 1, bins=2, integer=True)
    exact = release(Answers((2,), {(0,): np.array([0.25, 0.75])}, {(0,): 0.1}), Schema((column,)))
    assert ask(exact, f"x < {2**48}").fraction == pytest.approx(0.125)
    assert ask(exact, f"x >= {2**49 + 2**48}").fraction == pytest.approx(0.375)
    assert ask(exact, "x = 5").fraction == pytest.approx(0.25 / 2**49)
    assert ask(exact, "x <> 5").fraction == pytest.approx(1)


DAYS = Datetime(name="x", lower="2020-01-30", upper="2020-03-02", bins=5, date=True, missing=True)
SECONDS = Datetime(name="x", lower="2020-02-28T23:59:00", upper="2020-03-01T00:00:59", bins=7)


@pytest.mark.parametrize("column", [DAYS, SECONDS], ids=["days", "seconds"])
@pytest.mark.parametrize(
    "condition",
    [
        "x < '2020-02-29'",
        "x <= '2020-02-29'",
        "x > '2020-02-29T12:30:00'",
        "x >= '2020-02-29 12:30'",
        "x = '2020-02-29'",
        "x <> '2020-02-29'",
        "x between '2020-02-01' and '2020-02-29T06:00:00Z'",
        "x in ('2020-02-28', '2020-03-01')",
        "x < '1990-01-01' or x > '2090-01-01'",
        "not x < date '2020-02-29' and x is not null",
        "x >= timestamp '2020-02-29 01:02:03.5'",
    ],
)
def test_moments_are_compared_as_numbers(column, condition):
    share = np.random.default_rng(5).dirichlet(np.ones(column.size))
    exact = release(Answers((column.size,), {(0,): share}, {(0,): 0.1}), Schema((column,)))
    lower, upper = column.numbers
    unit = "days" if column.date else "seconds"
    start = datetime.datetime(1970, 1, 1)
    moments = [start + datetime.timedelta(**{unit: number}) for number in range(lower, upper + 1)]
    codes = column.grid.bin(np.arange(lower, upper + 1, dtype=np.float64))
    weights = (share[: column.regular] / np.bincount(codes))[codes]
    with duckdb.connect() as connection:
        rows = pa.table({"x": pa.array(moments, pa.timestamp("us")), "weight": weights})
        connection.register("rows", rows)
        found = connection.execute(f"select coalesce(sum(weight), 0) from rows where {condition}").fetchone()
    assert ask(exact, condition).fraction == pytest.approx(found[0], abs=1e-9)


@pytest.mark.parametrize("value", ["5", "'x'", "'2019-02-29'", "'2020'", "true"])
def test_a_moment_must_be_one(value):
    exact = release(Answers((7,), {(0,): np.full(7, 1 / 7)}, {(0,): 0.1}), Schema((SECONDS,)))
    with pytest.raises(ParameterError, match="must be a moment such as '2020-01-31': 'x' holds moments"):
        ask(exact, f"x < {value}")


def test_a_name_that_sql_reserves_needs_no_quotes():
    schema = Schema((replace(SECONDS, name="when"), Codes(name="case", values=2), Codes(name="and", values=2)))
    cells = np.random.default_rng(0).dirichlet(np.ones(28)).reshape(7, 2, 2)
    exact = release(Answers(schema.sizes, {(0, 1, 2): cells.ravel()}, {(0, 1, 2): 0.1}), schema)
    expected = cells[:, 1, 1].sum()
    for question in ("case = 1 and \"and\" = 1 and when > '1990-01-01'", '"case" = 1 and "and" = 1'):
        assert ask(exact, question).fraction == pytest.approx(expected)
    assert ask(exact, "when < '2020-01-01'").fraction == 0
    with pytest.raises(ParameterError, match="must be a condition such as"):
        ask(exact, "case = 1 and and = 1")


def test_a_bin_of_a_transformed_number_is_cut_where_its_rows_are():
    column = Numeric(name="x", lower=0, upper=math.e**4 - 1, bins=2, transform="log")
    exact = release(Answers((2,), {(0,): np.array([0.25, 0.75])}, {(0,): 0.1}), Schema((column,)))
    assert ask(exact, f"x < {math.e - 1!r}").fraction == pytest.approx(0.125)
    assert ask(exact, f"x >= {math.e**3 - 1!r}").fraction == pytest.approx(0.375)
    whole = Numeric(name="x", lower=0, upper=255, bins=16, integer=True, transform="log")
    share = np.random.default_rng(0).dirichlet(np.ones(16))
    exact = release(Answers((16,), {(0,): share}, {(0,): 0.1}), Schema((whole,)))
    drawn = np.asarray(whole.decode(np.repeat(np.arange(16), 5000), np.random.default_rng(1)))
    weights = np.repeat(share / 5000, 5000)
    for cut in (0, 1, 2, 3, 7, 100, 255):
        assert ask(exact, f"x <= {cut}").fraction == pytest.approx(weights[drawn <= cut].sum(), abs=0.01)
        assert ask(exact, f"x = {cut}").fraction == pytest.approx(weights[drawn == cut].sum(), abs=0.01)
    assert ask(exact, "x >= 0").fraction == pytest.approx(1)


def test_categories_are_found_by_their_spellings():
    schema = Schema(
        (
            Categorical(name="x", categories=(1, 2.5, True, "it's")),
            Codes(name='odd "name"', values=2),
            Categorical(name="é😀", categories=("=a", "b")),
        )
    )
    cells = np.random.default_rng(3).dirichlet(np.ones(16)).reshape(4, 2, 2)
    exact = release(Answers(schema.sizes, {(0, 1, 2): cells.ravel()}, {(0, 1, 2): 0.1}), schema)
    questions = {"x = 1": 0, "x = 1.0": 0, "x = '1'": 0, "x = 2.5": 1, "x = true": 2, "x = 'true'": 2, "x = 'it''s'": 3}
    for question, code in questions.items():
        assert ask(exact, question).fraction == pytest.approx(cells[code].sum())
    assert ask(exact, '"odd ""name""" = 1').fraction == pytest.approx(cells[:, 1].sum())
    assert ask(exact, "\"é😀\" = '=a'").fraction == pytest.approx(cells[:, :, 0].sum())


def test_the_noise_is_that_of_the_cells_that_are_summed():
    model = Answers(SIZES, {(0, 1): np.full(16, 1 / 16), (3,): np.full(4, 0.25)}, {(0, 1): 0.1, (3,): 0.2})
    noisy = release(model)
    expected = {
        "sex = 'F' and level = 'a'": 0.1,
        "sex = 'F'": 0.2,
        "sex in ('F', 'M')": 0.1 * math.sqrt(8),
        "pay < 2": 0.2,
        "pay < 1": 0.1,
        "pay < 3": 0.2 * math.sqrt(1.25),
        "pay < -1": 0.0,
    }
    for question, sigma in expected.items():
        assert ask(noisy, question).sigma == pytest.approx(sigma), question
    with pytest.raises(ParameterError, match="must be one that was measured"):
        ask(noisy, "code = 1")


def test_the_interval_is_around_what_was_measured():
    """Of a bin cut in two, half of its noise; a private number of rows moves a noisy answer, too."""
    model = Answers(SIZES, {(3,): np.array([0.4, 0.3, 0.2, 0.1])}, {(3,): 0.02})
    found = ask(release(model), "pay < 3")
    sigma = 0.02 * math.sqrt(1.25)
    assert found.fraction == pytest.approx(0.55)
    assert (found.sigma, found.low, found.high) == pytest.approx((sigma, 0.55 - Z * sigma, 0.55 + Z * sigma))
    wide = ask(release(model), "pay < 3", confidence=0.999)
    assert (wide.fraction, wide.sigma) == (found.fraction, found.sigma)
    assert wide.high - wide.low == pytest.approx(2 * 3.290526731 * sigma)
    private = replace(release(model), privacy=replace(PRIVACY, spends=(Spend("total", 0.005, "rows"),)))
    assert ask(private, "pay < 3").sigma == pytest.approx(math.hypot(sigma, 10 / 200 * 0.55))
    sure = ask(release(model), "pay >= -5")
    assert (sure.low, sure.high) == pytest.approx((1 - Z * 0.04, 1))
    for confidence in (0, 1, 95):
        with pytest.raises(ParameterError, match="confidence"):
            ask(release(model), "pay < 3", confidence=confidence)


def test_the_interval_of_a_model_is_that_of_its_measurements():
    """Whatever the model answers: sex was measured, with 4 values, and level was not."""
    workload = Workload((Marginals(SIZES, ((0,),)),))
    values = np.array([0.3, 0.3, 0.2, 0.3])
    made = replace(release(Zero(SIZES)), measurements=(Measurement(workload, values, np.array([0.02]), 200.0),))
    found = ask(made, "sex in ('F', 'M')")
    middle, sigma = 0.55, 0.02 * math.sqrt(2 - 4 / 4)
    assert found.fraction == found.count == 0
    assert (found.sigma, found.low, found.high) == pytest.approx((sigma, middle - Z * sigma, middle + Z * sigma))
    for question in ("level = 'a'", "sex = 'F' and level = 'a'"):
        unknown = ask(made, question)
        assert (unknown.sigma, unknown.low, unknown.high) == (None, None, None)


def test_a_linear_model_answers_in_the_middle_of_its_intervals():
    generator = np.random.default_rng(6)
    workload = Workload((Marginals(SIZES, ((4, 0), (3,))), Residuals(SIZES, ((0,),))))
    log = Measurement(workload, generator.uniform(0, 0.1, workload.cells), np.array([0.001, 0.002, 0.003]), 200.0)
    made = replace(release(least_squares(SIZES, (log,))), measurements=(log,))
    for question in ("sex = 'F' and code in (0, 2)", "pay < 3", "code = 1", "sex <> 'F'"):
        found = ask(made, question)
        assert (found.low + found.high) / 2 == pytest.approx(found.fraction)
        assert 0 < found.sigma < 0.01
        assert found.high - found.low == pytest.approx(2 * Z * found.sigma)
    with pytest.raises(ParameterError, match="must be one that was measured"):
        ask(made, "level = 'a'")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("", "must be a condition such as"),
        ("age <", "must be a condition such as"),
        ("age < 3; drop table t", "must be a condition such as"),
        ("select 1", "must"),
        ("1 = 1", "must name a column"),
        ("true", "must name a column"),
        ("agee < 3", "Did you mean 'age'?"),
        ("AGE < 3", "Did you mean 'age'?"),
        ("age", "must"),
        ("3 < age", "must compare a column with values"),
        ("age + 1 < 3", "must compare a column with values"),
        ("lower(sex) = 'f'", "must compare a column with values"),
        ("age < pay", "must be a number or a text in single quotes"),
        ("age < null", "must be a number or a text in single quotes"),
        ("age < 'x'", "value ('x') must be a number: 'age' holds numbers"),
        ("age < true", "value (True) must be a number"),
        ("sex < 'F'", "must not order 'sex'"),
        ("sex between 'F' and 'M'", "must not order 'sex'"),
        ("sex = 'f'", "Did you mean 'F'?"),
        ("sex = 5", "value (5) must be a category of 'sex'"),
        ("level > 'd'", "must be a category of 'level'"),
        ("sex like 'F%'", "must be =, <>, <, <=, >, >=, in, between or is null"),
        ("age is true", "must be =, <>"),
        ("age in (select age from t)", "must be =, <>"),
        ("age < 3 and true", "must compare a column"),
        ("not " * 3000 + "age < 3", "must"),
        ("age < 3" + " and age < 3" * 1300, "must"),
        ("age < 3 " + " " * LONGEST, f"must have at most {LONGEST}"),
    ],
)
def test_what_is_no_question_is_refused_in_words(question, words):
    with pytest.raises(UsageError) as caught:
        ask(EXACT, question)
    assert words in str(caught.value)
    assert isinstance(caught.value, ParameterError | SchemaError)


@pytest.mark.parametrize(("bound", "fraction"), [("9" * 400, 1), ("-" + "9" * 5000, 0), ("1e400", 1), ("1e-400", None)])
def test_bounds_of_any_size_are_numbers(bound, fraction):
    found = ask(EXACT, f"pay < {bound}").fraction
    assert found == pytest.approx(fraction if fraction is not None else 0)


def test_too_many_cells_are_refused_before_they_are_made():
    schema = Schema(tuple(Codes(name=name, values=2**31 - 2) for name in "abc"))
    for question in ("a = 1", "a = 1 and b = 1 and c = 1"):
        with pytest.raises(ParameterError, match="ask about fewer columns"):
            ask(release(Zero(schema.sizes), schema), question)
