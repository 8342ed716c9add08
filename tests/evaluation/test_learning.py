"""What rows teach a model: figures equal their definitions, features are the same for all rows, tests are honest."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv
from sklearn.metrics import accuracy_score, f1_score

from anamorph.columns import Categorical, Codes, Datetime, Numeric
from anamorph.errors import DataError, ParameterError, ResourceError, SchemaError
from anamorph.evaluation.features import Design, examples
from anamorph.evaluation.learning import LEARNERS, figures, learn, parse_target, usefulness
from anamorph.evaluation.splitting import parts, split, write_split
from anamorph.release import Privacy, Release
from anamorph.schema import Schema
from anamorph.sources import encode

SCHEMA = Schema(
    (
        Numeric(name="age", lower=0, upper=100, bins=4, integer=True),
        Numeric(name="pay", lower=-1, upper=1, bins=2, missing=True),
        Categorical(name="town", categories=("Ayr", "Bonn", "Cork"), other=True, missing=True),
        Categorical(name="sex", categories=("F", "M")),
        Codes(name="kind", values=3, missing=True),
    )
)


def people(rows, seed=0):
    """Rows in which kind follows from age and town, and sex from pay."""
    random = np.random.default_rng(seed)
    age, pay, town = random.integers(0, 101, rows), random.uniform(-1, 1, rows), random.integers(0, 3, rows)
    return pa.table(
        {
            "age": age,
            "pay": pay,
            "town": np.array(["Ayr", "Bonn", "Cork"])[town],
            "sex": np.where(pay + random.normal(scale=0.2, size=rows) > 0, "M", "F"),
            "kind": np.where(age > 60, 2, np.where(town == 1, 1, 0)),
        }
    )


def targets(*texts):
    return [parse_target(text, SCHEMA) for text in texts]


def changed(table, **columns):
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, [values])
    return table


@dataclass(frozen=True)
class Fixed:
    """A model whose rows are these."""

    table: pa.Table

    def sample(self, rows, *, seed, keep=()):
        places = np.random.default_rng(seed).integers(0, self.table.num_rows, rows)
        return encode(self.table.take(pa.array(places)), SCHEMA)


def release(table):
    return Release(SCHEMA, Fixed(table), (), Privacy("replace", 1.0, 1e-6, 0.01, ()), table.num_rows)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_figures_are_those_of_scikit_learn(classes):
    random = np.random.default_rng(classes)
    truth = random.integers(0, classes, 200)
    guess = np.where(random.random(200) < 0.7, truth, random.integers(0, classes, 200))
    f1, accuracy = figures(truth, guess)
    assert f1 == pytest.approx(f1_score(truth, guess, average="macro"))
    assert accuracy == accuracy_score(truth, guess)


def test_a_class_that_the_truth_lacks_counts_as_an_error_alone():
    assert figures(np.array([0, 0, 1, 1]), np.array([0, 5, 1, 1])) == (pytest.approx((2 / 3 + 1) / 2), 0.75)


def test_numbers_are_read_as_they_are_and_clamped():
    table = pa.table(
        {"age": ["33", "170", "", "x"], "pay": [0.123456, None, -7.0, 1.0]}
        | {"town": ["Ayr", "Oz", None, "Cork"], "sex": list("FMFM"), "kind": [0, None, 2, 9]}
    )
    found = examples(table, SCHEMA)
    np.testing.assert_array_equal(found.numbers["age"], [33, 100, np.nan, np.nan])
    np.testing.assert_allclose(found.numbers["pay"], [0.123456, np.nan, -1, 1], atol=2e-6)
    assert found.codes["town"].tolist() == [0, 3, 4, 2]
    assert found.codes["kind"].tolist() == [0, 3, 2, 2]
    assert found.rows == 4


def test_moments_are_numbers_and_transforms_are_none_of_a_learners_business():
    schema = Schema(
        (
            Datetime(name="day", lower="1970-01-01", upper="1979-12-31", bins=2, date=True),
            Numeric(name="gain", lower=0, upper=1000, integer=True, native=True, transform="log"),
            Categorical(name="sex", categories=("F", "M")),
        )
    )
    table = pa.table({"day": ["1970-01-03", "1999-01-01", ""], "gain": [0, 999, 7], "sex": list("FMF")})
    found = examples(table, schema)
    np.testing.assert_array_equal(found.numbers["day"], [2, 3651, np.nan])
    np.testing.assert_array_equal(found.numbers["gain"], [0, 999, 7])


def test_linear_features_are_one_hot_beside_standardised_numbers():
    found = examples(changed(people(40), pay=pa.array([None, *np.linspace(-1, 1, 39)])), SCHEMA)
    design = Design.of(found, ("age", "pay", "town"))
    matrix = design.linear(found).toarray()
    assert matrix.shape == (40, 1 + 2 + 5)
    assert matrix[:, 0].mean() == pytest.approx(0)
    assert matrix[:, 0].std() == pytest.approx(1)
    assert matrix[0, 1:3].tolist() == [0, 1]
    assert matrix[1:, 2].sum() == 0
    np.testing.assert_array_equal(matrix[:, 3:], np.eye(5)[found.codes["town"]])


def test_the_training_rows_alone_decide_the_scale():
    low, high = examples(people(50), SCHEMA), examples(changed(people(50), age=pa.array([100] * 50)), SCHEMA)
    design = Design.of(low, ("age",))
    expected = (100 - np.mean(low.numbers["age"])) / np.std(low.numbers["age"])
    np.testing.assert_allclose(design.linear(high).toarray()[:, 0], expected)
    assert Design.of(high, ("age",)).linear(high).toarray().tolist() == [[0]] * 50  # a constant is no division by 0


@pytest.mark.parametrize("learner", LEARNERS)
def test_real_rows_are_worth_what_real_rows_are(learner):
    train, test = examples(people(400), SCHEMA), examples(people(200, seed=1), SCHEMA)
    for found in usefulness(train, train, test, targets("kind", "sex"), learner=learner):
        assert found.ratio == 1
        assert (found.f1, found.accuracy) == (found.f1_real, found.accuracy_real)
        assert found.f1 > 0.85


@pytest.mark.parametrize("learner", LEARNERS)
def test_rows_that_say_nothing_teach_nothing(learner):
    train, test = people(400), examples(people(200, seed=1), SCHEMA)
    noise = changed(train, kind=train["kind"].take(pa.array(np.random.default_rng(2).permutation(400))))
    (found,) = usefulness(examples(noise, SCHEMA), examples(train, SCHEMA), test, targets("kind"), learner=learner)
    assert found.classes == 3
    assert found.f1 < 0.6
    assert found.f1_real > 0.9
    assert found.ratio == pytest.approx(found.f1 / found.f1_real)


@pytest.mark.parametrize("learner", LEARNERS)
def test_rows_of_one_class_give_a_constant_answer(learner):
    train, test = examples(people(200), SCHEMA), people(100, seed=1)
    constant = examples(changed(people(50), sex=pa.array(["M"] * 50)), SCHEMA)
    (found,) = usefulness(constant, train, examples(test, SCHEMA), targets("sex"), learner=learner)
    truth = np.array(test["sex"].to_pylist()) == "M"
    assert found.accuracy == pytest.approx(truth.mean())
    assert found.f1 == pytest.approx(f1_score(truth, np.ones(100), average="macro"))


def test_a_target_is_no_feature_of_another():
    table = people(400)
    copied = changed(table, town=pa.array(np.where(np.array(table["sex"]) == "M", "Ayr", "Bonn")), pay=table["age"])
    rows = examples(copied, SCHEMA)
    (alone,) = usefulness(rows, rows, rows, targets("sex"))
    together, _ = usefulness(rows, rows, rows, targets("sex", "town"))
    assert alone.f1 == 1
    assert together.f1 < 0.7


def test_a_group_is_one_class_against_the_others():
    rows = examples(people(300), SCHEMA)
    (target,) = targets("town:Ayr+Cork")
    assert target.labels(rows).tolist() == [int(code in (0, 2)) for code in rows.codes["town"]]
    (found,) = usefulness(rows, rows, rows, [target])
    assert (found.target, found.classes) == ("town:Ayr+Cork", 2)


def test_rows_without_a_target_are_left_out():
    table = people(200)
    holes = changed(table, kind=pa.array([None, 1, 2, *[None] * 97, *table["kind"].to_pylist()[100:]]))
    rest = pa.concat_tables([holes.slice(1, 2), holes.slice(100)])
    (target,) = targets("kind")
    assert target.known(examples(holes, SCHEMA)).rows == 102
    whole, part = examples(holes, SCHEMA), examples(rest, SCHEMA)
    assert usefulness(whole, whole, whole, [target]) == usefulness(part, part, part, [target])


@pytest.mark.parametrize(
    ("text", "group"),
    [("a:b", ()), ("a:b:x", (0,)), ("a:b:x+y", (0, 1)), ("a:b:p+q", (2,)), ("a:b:p+q+x", (0, 2)), ("a:b:other", (3,))],
)
def test_names_and_categories_may_hold_the_marks(text, group):
    column = Categorical(name="a:b", categories=("x", "y", "p+q"), other=True)
    found = parse_target(text, Schema((column, Codes(name="c", values=2))))
    assert (found.column, found.group) == (column, group)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("twn", SchemaError, "column ('twn') must be in the schema. Did you mean 'town'?"),
        ("twn:Ayr", SchemaError, "Did you mean 'town'?"),
        ("age", ParameterError, "target ('age') must be categorical, ordinal or codes: it is numeric"),
        ("town:Bon", ParameterError, "category ('Bon') must be one of column 'town'. Did you mean 'Bonn'?"),
        ("town:", ParameterError, "category ('') must be one of column 'town'"),
        ("kind:3", ParameterError, "category ('3') must be one of column 'kind'"),
        ("sex:F+M", ParameterError, "must leave a category to the other class"),
    ],
)
def test_targets_that_cannot_be(text, error, words):
    with pytest.raises(error) as caught:
        parse_target(text, SCHEMA)
    assert words in str(caught.value)


def test_rows_that_cannot_teach_or_test_are_refused():
    full, empty = examples(people(30), SCHEMA), examples(people(30).slice(0, 0), SCHEMA)
    for rows, words in [
        ((full, full, empty), "test"),
        ((empty, full, full), "synthetic"),
        ((full, empty, full), "real"),
    ]:
        with pytest.raises(DataError, match=f"the {words}.*rows must hold 'sex'"):
            usefulness(*rows, targets("sex"))
    one = Schema((Categorical(name="sex", categories=("F", "M")),))
    lone = examples(people(30), one)
    with pytest.raises(ParameterError, match="leave at least one column"):
        usefulness(lone, lone, lone, [parse_target("sex", one)])


def test_the_learner_must_be_known_and_installed(monkeypatch):
    with pytest.raises(ParameterError, match=r"must be logistic or boosting\. Did you mean 'logistic'"):
        learn(release(people(30)), people(30), SCHEMA, ["sex"], learner="logistics")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ResourceError, match=r"pip install 'anamorph\[eval\]'"):
        learn(release(people(30)), people(30), SCHEMA, ["sex"])


def test_a_release_is_scored_and_marked():
    found = learn(release(people(300, seed=2)), people(300), SCHEMA, ["sex", "kind"])
    assert found["private"] is False
    assert found["notice"].startswith("NOT PRIVATE")
    assert (found["train_rows"], found["test_rows"], found["synthetic_rows"]) == (240, 60, 300)
    assert found["test_rows_in_fit"] is True
    assert "part of the fit" in found["remark"]
    assert [item["target"] for item in found["ml"]] == ["sex", "kind"]
    assert all(item["ratio"] > 0.8 for item in found["ml"])
    again = learn(release(people(300, seed=2)), people(300), SCHEMA, ["sex", "kind"])
    assert again == found


def test_test_rows_of_their_own_leave_all_others_for_training():
    train, test = split(people(300), SCHEMA)
    found = learn(release(train), train, SCHEMA, ["sex"], test=test)
    assert (found["train_rows"], found["test_rows"], found["test_rows_in_fit"]) == (240, 60, False)
    assert "remark" not in found
    assert found["ml"][0]["f1_real"] == learn(release(train), people(300), SCHEMA, ["sex"])["ml"][0]["f1_real"]


def test_the_schema_must_be_that_of_the_release():
    with pytest.raises(SchemaError, match="the one of the release"):
        learn(release(people(30)), people(30), Schema(SCHEMA.columns[1:]), ["sex"])


def test_parts_are_all_of_the_rows_once():
    train, test = parts(101)
    assert (len(train), len(test)) == (81, 20)
    assert sorted([*train, *test]) == list(range(101))
    assert not np.array_equal(parts(101, seed=1)[0], train)
    with pytest.raises(ParameterError, match="fraction"):
        parts(10, fraction=1)
    with pytest.raises(DataError, match="two parts"):
        parts(1)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_split_files_hold_the_cells_as_they_were(tmp_path, ending):
    lines = [f" {i},-{i / 100},{'Ayr' if i % 2 else '=Oz'},F,\n" for i in range(50)]
    (tmp_path / "data.csv").write_text("age,pay,town,sex,kind\n" + "".join(lines))
    paths = tmp_path / f"train.{ending}", tmp_path / f"test.{ending}"
    write_split(str(tmp_path / "data.csv"), SCHEMA, *paths, overwrite=False)
    both = [examples(str(path), SCHEMA) for path in paths]
    assert [part.rows for part in both] == [40, 10]
    whole = examples(str(tmp_path / "data.csv"), SCHEMA)
    for name, values in (whole.numbers | whole.codes).items():
        found = np.concatenate([(part.numbers | part.codes)[name] for part in both])
        np.testing.assert_array_equal(np.sort(found), np.sort(values))
    if ending == "csv":
        cells = {cell for path in paths for cell in csv.read_csv(path)["town"].to_pylist()}
        assert cells == {"Ayr", "=Oz"}


def test_split_refuses_what_it_would_harm(tmp_path):
    data = tmp_path / "data.csv"
    csv.write_csv(people(20), data)
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    with pytest.raises(ParameterError, match="two files"):
        write_split(str(data), SCHEMA, train, train, overwrite=False)
    with pytest.raises(ParameterError, match=r"must end in \.csv"):
        write_split(str(data), SCHEMA, train, tmp_path / "test.txt", overwrite=False)
    test.write_text("mine")
    with pytest.raises(ParameterError, match="must not exist yet"):
        write_split(str(data), SCHEMA, train, test, overwrite=False)
    assert not train.exists()
    write_split(str(data), SCHEMA, train, test, overwrite=True)
    assert examples(str(test), SCHEMA).rows == 4
    with pytest.raises(ParameterError, match="must be a file or a frame"):
        split("duckdb:///a.db#t", SCHEMA)
    data.write_text("age,pay,town,sex,kind\n1,2\n")
    with pytest.raises(DataError, match="as many fields"):
        split(str(data), SCHEMA)
