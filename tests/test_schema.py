"""Schemas: what is accepted, what is refused and in which words, and that decoding and encoding are inverse."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.column import LARGEST_NAME
from anamorph.columns import Categorical, Codes, Datetime, Numeric, Ordinal, guarded, label
from anamorph.errors import ParameterError, SchemaError, require_positive
from anamorph.schema import LARGEST_FILE, Schema, parse
from anamorph.sources import encode
from anamorph.table import Table

LETTERS = st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Co"))
NAMES = st.text(LETTERS, min_size=1, max_size=8).filter(lambda text: text.strip() != "")
PROVENANCES = st.sampled_from(["declared", "public", "dp", "data"])
TEXTS = st.text(LETTERS, min_size=1, max_size=6).filter(lambda text: text.strip(" \t\r\n") != "")
CATEGORIES = st.one_of(
    st.lists(TEXTS, min_size=2, max_size=5, unique_by=label),
    st.lists(st.integers(-(2**70), 2**70), min_size=2, max_size=5, unique=True),
    st.lists(st.floats(-1e9, 1e9, allow_nan=False).map(lambda x: x + 0.0), min_size=2, max_size=5, unique_by=label),
    st.just([False, True]),
    st.lists(st.one_of(TEXTS, st.integers(-9, 9), st.booleans()), min_size=2, max_size=5, unique_by=label),
)


@st.composite
def columns(draw, name="a"):
    """A column of any kind."""
    common = {"name": name, "missing": draw(st.booleans()), "source": draw(PROVENANCES)}
    kind = draw(st.sampled_from([Categorical, Ordinal, Numeric, Codes, Datetime]))
    if kind is Datetime:
        lower, days = draw(st.dates(datetime.date(1, 1, 1), datetime.date(9000, 1, 1))), draw(st.integers(1, 10**5))
        bins = draw(st.none() | st.integers(2, min(64, days + 1)))
        upper = lower + datetime.timedelta(days=days)
        return Datetime(lower=lower, upper=upper, bins=bins, date=draw(st.booleans()), **common)
    if kind is Codes:
        return Codes(values=draw(st.integers(2, 40)), **common)
    if kind is Numeric:
        whole = draw(st.booleans())
        lower = draw(st.integers(-1000, 1000) if whole else st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))
        width = draw(st.integers(1, 500) if whole else st.floats(1e-2, 1e6).map(lambda x: round(x, 3)))
        most = min(64, width + 1) if whole else 64
        bins = draw(st.just({"native": True}) | st.integers(2, most).map(lambda bins: {"bins": bins}))
        return Numeric(lower=lower, upper=lower + width, integer=whole, **bins, **common)
    categories = tuple(draw(CATEGORIES))
    other = draw(st.booleans()) and "other" not in map(label, categories)
    return kind(categories=categories, other=other, **common)


@st.composite
def schemas(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    return Schema(tuple(draw(columns(name)) for name in names), dataset=draw(st.sampled_from(["d", "a b", "ünï"])))


@given(schemas())
@settings(deadline=None, max_examples=150)
def test_a_schema_survives_yaml_and_json(schema):
    for text in (schema.to_yaml(), json.dumps(schema.to_dict())):
        again = Schema.from_dict(parse(text, "here"))
        assert again == schema
        assert again.fingerprint == schema.fingerprint


def test_long_and_odd_names_survive_yaml(tmp_path):
    names = (
        "x" * 5000,
        'a"; DROP TABLE x; --',
        "`é`",
        "yes",
        "1",
        "null",
        "<b>",
        "\x1b[31m",
        "=cmd",
        "1e3",
        "~",
    )
    odd = (
        "NO",
        "2020-01-01",
        "0x1f",
        "1_000",
        "on",
        "#",
        ": ",
        "- ",
        "!tag",
        "&a",
        "*a",
        "\u2028",
        "\x85x",
        "12:30",
    )
    schema = Schema(tuple(Categorical(name=name, categories=odd) for name in names))
    (tmp_path / "s.yaml").write_bytes(schema.to_yaml().encode())
    assert Schema.load(tmp_path / "s.yaml") == replace(schema, dataset="dataset")


def test_mbi_json_is_a_schema_of_codes(tmp_path):
    (tmp_path / "adult.v2.json").write_text('{"age": 85, "sex": 2}')
    schema = Schema.load(tmp_path / "adult.v2.json")
    assert schema.columns == (Codes(name="age", values=85), Codes(name="sex", values=2))
    assert schema.dataset == "adult"
    assert schema.sizes == (85, 2)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    (tmp_path / "s.yaml").write_bytes(b"\xef\xbb\xbf" + b"a: 2\nb: 3\n")
    assert Schema.load(tmp_path / "s.yaml").names == ("a", "b")


CODES = "columns:\n  a: {type: codes, values: 2}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping"),
        ("[]", "must be a mapping"),
        ("{}", "must be a mapping"),
        ("7", "must be a mapping"),
        ("a: {type: codes", "line 1 must be plain YAML"),
        ("a: b: c", "must be plain YAML"),
        ("a: 2\n\tb: 3", "must be plain YAML"),
        ("a: !!python/object/apply:os.system ['true']", "tags are not allowed"),
        ("a: !!int '2'", "tags are not allowed"),
        ("!x a: 2", "tags are not allowed"),
        ("a: &x [1]\nb: *x", "aliases are not allowed"),
        ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]", "aliases are not allowed"),
        ("a: 2\n<<: {b: 3}", "must be"),
        ("a: 2\na: 3", "key 'a' stands twice"),
        ('{"a": 2, "a": 3}', "key 'a' stands twice"),
        ("columns: {a: {type: codes, values: 2, values: 3}}", "key 'values' stands twice"),
        ("? [a, b]\n: 2", "keys must be plain"),
        ("a: 2\n---\nb: 2", "must be plain YAML"),
        ("[" * 5000, "must be plain YAML"),
        ("a: \x00", "must be plain YAML"),
        ("a: " + "9" * 5000, "must be plain YAML"),
        ("columns: []", "columns must be a mapping"),
        ("columns: {}", "columns must be a mapping"),
        ("colums:\n  a: {type: codes, values: 2}", "Did you mean 'columns'?"),
        (CODES + "datset: x", "Did you mean 'dataset'?"),
        ("columns: {a: codes}", "column 'a' must be a mapping with `type`"),
        ("columns: {a: {values: 2}}", "type (None) must be one of categorical, ordinal, numeric, codes"),
        ("columns: {a: {type: [codes], values: 2}}", "type (['codes']) must be one of"),
        ("columns: {a: {type: categoric, categories: [x, y]}}", "Did you mean 'categorical'?"),
        (
            "columns: {a: {type: codes, value: 2}}",
            "key ('value') must be one of missing, source, values. Did you mean 'values'?",
        ),
        ("columns: {a: {type: numeric, lower: 0, uper: 1}}", "Did you mean 'upper'?"),
        ("columns: {a: {type: codes, 5: 2}}", "key (5) must be one of"),
        ("columns: {a: {type: numeric, lower: 0}}", "a numeric column must declare lower and upper"),
        ("columns: {a: {type: ordinal}}", "a ordinal column must declare categories"),
        ("columns: {a: {type: codes}}", "a codes column must declare values"),
        ("columns: {a: {type: numeric, lower: , upper: 1}}", "column 'a': lower must be filled in"),
        ("columns: {a: {type: categorical, categories: null}}", "column 'a': categories must be filled in"),
        (
            "columns: {a: {type: categorical, categories: [x, null]}}",
            "category (None) must be a text or a finite number",
        ),
        (
            "columns: {a: {type: categorical, categories: [x, .nan]}}",
            "category (nan) must be a text or a finite number",
        ),
        ("columns: {a: {type: numeric, lower: .nan, upper: 1}}", "lower (nan) must be a finite number"),
        ("columns: {a: {type: numeric, lower: 0, upper: .inf}}", "upper (inf) must be a finite number"),
        ("columns: {a: {type: numeric, lower: 0, upper: 1" + "0" * 400 + "}}", "upper"),
        (
            "columns: {1: {type: codes, values: 2}, '1': {type: codes, values: 2}}",
            "column '1' must be declared once",
        ),
        (CODES + "dataset: ../../etc/passwd", "dataset ('../../etc/passwd') must be a name"),
        (CODES + "dataset: 5", "dataset (5) must be a name"),
        (CODES + "dataset: null", "dataset (None) must be a name"),
    ],
)
def test_a_faulty_file_is_refused_in_words(tmp_path, text, words):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(SchemaError) as caught:
        Schema.load(path)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"\xff\xfea\x00", "a: 2".encode("utf-16"), b"a: \xe9"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path, content):
    (tmp_path / "s.yaml").write_bytes(content)
    with pytest.raises(SchemaError, match="must be UTF-8 text"):
        Schema.load(tmp_path / "s.yaml")


def test_a_missing_a_large_and_a_directory_are_refused(tmp_path):
    with pytest.raises(SchemaError, match="cannot be read"):
        Schema.load(tmp_path / "absent.yaml")
    with pytest.raises(SchemaError, match="cannot be read"):
        Schema.load(tmp_path)
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(SchemaError, match="at most 16 MiB"):
        Schema.load(tmp_path / "large.yaml")


def test_truth_values_are_true_and_false_alone():
    schema = Schema.from_dict(parse("columns: {a: {type: categorical, categories: [NO, on, true, 2020-01-01]}}", ""))
    assert schema.columns[0].categories == ("NO", "on", True, "2020-01-01")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "a\nb", "a\x00", "x" * 201, "\x1b[0m"])
def test_a_dataset_name_is_no_path(name):
    with pytest.raises(SchemaError, match=r"dataset \("):
        Schema((Codes(name="a", values=2),), dataset=name)


CATEGORY_FAULTS = [
    ({"categories": ()}, "a list that is not empty"),
    ({"categories": "ab"}, "a list that is not empty"),
    ({"categories": ("x",)}, "at least 2 values"),
    ({"categories": ("x", "x")}, "category ('x') must be listed once"),
    ({"categories": ("x", " x\t")}, "category ('x') must be listed once"),
    ({"categories": ("\u00e9", "e\u0301")}, "must be listed once"),
    ({"categories": (7, "7")}, "category ('7') must be listed once"),
    ({"categories": (7, 7.0)}, "category ('7') must be listed once"),
    ({"categories": (True, "true")}, "category ('true') must be listed once"),
    ({"categories": ("other", "x"), "other": True}, "category ('other') must be listed once"),
    ({"categories": ("x", "  ")}, "must not be blank; use `missing: true`"),
    ({"categories": ("x", math.inf)}, "must be a text or a finite number"),
    ({"categories": ("x", ("y",))}, "must be a text or a finite number"),
    ({"categories": ("x", "y"), "other": 1}, "other (1) must be true or false"),
    ({"categories": ("x", "y"), "missing": "yes"}, "missing ('yes') must be true or false"),
    ({"categories": ("x", "y"), "source": "guess"}, "source ('guess') must be declared, public, dp or data"),
    ({"categories": ("x", "y"), "source": ["dp"]}, "must be declared, public, dp or data"),
    ({"categories": ("x", "y"), "name": " "}, "column name (' ') must be a text that is not empty"),
    ({"categories": ("x", "y"), "name": 5}, "column name (5) must be a text"),
    ({"categories": ("x", "y"), "name": "n" * (LARGEST_NAME + 1)}, f"must be at most {LARGEST_NAME}"),
]


@pytest.mark.parametrize("kind", [Categorical, Ordinal])
@pytest.mark.parametrize(("fields", "words"), CATEGORY_FAULTS)
def test_faulty_categories_are_refused(kind, fields, words):
    with pytest.raises(SchemaError) as caught:
        kind(**{"name": "a"} | fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lower": 1, "upper": 1}, "lower (1) must be below upper (1)"),
        ({"lower": 2, "upper": 1}, "lower (2) must be below upper (1)"),
        ({"lower": math.nan, "upper": 1}, "lower (nan) must be a finite number"),
        ({"lower": 0, "upper": math.inf}, "upper (inf) must be a finite number"),
        ({"lower": -math.inf, "upper": 1}, "lower (-inf) must be a finite number"),
        ({"lower": "0", "upper": 1}, "lower ('0') must be a finite number"),
        ({"lower": False, "upper": 1}, "lower (False) must be a finite number"),
        ({"lower": 0, "upper": 10**400}, "must be below 1.8e308"),
        ({"lower": -1e308, "upper": 1e308}, "the range overflows"),
        ({"lower": 0, "upper": 1e308, "bins": 32}, "times the range it overflows"),
        ({"lower": 0, "upper": 1, "bins": 0}, "bins (0) must be a whole number from 1"),
        ({"lower": 0, "upper": 1, "bins": 2.0}, "bins (2.0) must be a whole number"),
        ({"lower": 0, "upper": 1, "bins": True}, "bins (True) must be a whole number"),
        ({"lower": 0, "upper": 1, "bins": 2**21}, "bins (2097152) must be a whole number from 1 to 1048576"),
        ({"lower": 0, "upper": 1, "bins": 1}, "at least 2 values"),
        (
            {"lower": 0, "upper": 9, "bins": 11, "integer": True},
            "bins (11) must be a whole number from 1 to 10",
        ),
        ({"lower": 0, "upper": 2**50, "bins": 2**21, "integer": True}, "from 1 to 1048576"),
        ({"lower": 0.5, "upper": 9, "bins": 2, "integer": True}, "must be whole"),
        ({"lower": 0, "upper": 2**53, "bins": 2, "integer": True}, "below 2^53"),
        ({"lower": 0, "upper": 9, "integer": 1}, "integer (1) must be true or false"),
    ],
)
def test_faulty_ranges_are_refused(fields, words):
    with pytest.raises(SchemaError) as caught:
        Numeric(**{"name": "a"} | fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("values", [0, 1, -3, 2**31, 2.0, True, "2"])
def test_faulty_codes_are_refused(values):
    with pytest.raises(SchemaError, match=r"values|domain"):
        Codes(name="a", values=values)


def test_one_value_and_missing_are_two():
    assert Codes(name="a", values=1, missing=True).size == 2
    assert Categorical(name="a", categories=("x",), missing=True).size == 2
    assert Categorical(name="a", categories=("x",), other=True).size == 2
    assert Numeric(name="a", lower=0, upper=1, bins=1, missing=True).size == 2


def test_an_empty_schema_and_repeated_names_are_refused():
    with pytest.raises(SchemaError, match="columns must not be empty"):
        Schema(())
    with pytest.raises(SchemaError, match="column 'a' must be declared once"):
        Schema((Codes(name="a", values=2), Codes(name="a", values=3)))


def test_an_unknown_column_gets_a_suggestion():
    schema = Schema((Codes(name="Age", values=2), Codes(name="sex", values=2)))
    assert schema.index("sex") == 1
    for near in ("age", " Age ", "Ages"):
        with pytest.raises(SchemaError, match="Did you mean 'Age'"):
            schema.index(near)
    with pytest.raises(SchemaError) as caught:
        schema.index("zzz")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_other_then_missing_follow_the_regular_codes(other, missing):
    column = Categorical(name="a", categories=("x", "y", "z"), other=other, missing=missing)
    assert column.size == 3 + other + missing
    assert column.empty_code == column.size - 1
    assert column.unseen_code == (3 if other or missing else 2)
    expected = ["x", "y", "z"] + ["other"] * other + [None] * missing
    decoded = column.decode(np.arange(column.size), np.random.default_rng(0))
    assert decoded.to_pylist() == expected


@given(columns(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=120)
def test_encoding_undoes_decoding(column, seed):
    schema = Schema((column,))
    generator = np.random.default_rng(seed)
    ends = np.concatenate([np.arange(min(column.size, 1000)), [column.size - 1]])
    codes = np.concatenate([ends, generator.integers(0, column.size, 200)]).astype(np.int32)
    rows = schema.decode(Table(codes[:, None], schema.sizes), generator)
    assert encode(rows, schema).codes[:, 0].tolist() == codes.tolist()


@given(st.integers(0, 300), st.integers(0, 200), st.data())
@settings(deadline=None, max_examples=200)
def test_every_whole_number_of_a_bin_is_drawn(lower, width, data):
    bins = data.draw(st.integers(1, width + 1))
    column = Numeric(name="a", lower=lower, upper=lower + width + 1, bins=bins, integer=True, missing=True)
    whole = np.arange(lower, lower + width + 2)
    codes = column.bin(whole.astype(np.float64))
    drawn = np.asarray(column.decode(np.repeat(np.arange(bins), 400), np.random.default_rng(0)))
    assert np.array_equal(column.bin(drawn.astype(np.float64)), np.repeat(np.arange(bins), 400))
    few = np.bincount(codes, minlength=bins).max() <= 20
    assert column.firsts.tolist() == [*whole[np.searchsorted(codes, np.arange(bins))].tolist(), lower + width + 2]
    assert set(drawn.tolist()) <= set(whole.tolist())
    assert not few or set(drawn.tolist()) == set(whole.tolist())


def test_numbers_are_drawn_uniformly_from_their_bin():
    column = Numeric(name="a", lower=-3.0, upper=5.0, bins=4)
    drawn = np.asarray(column.decode(np.full(4000, 1), np.random.default_rng(0)))
    assert drawn.min() >= -1
    assert drawn.max() < 1
    assert abs(drawn.mean()) < 5 * 2 / math.sqrt(12 * 4000)
    assert np.unique(drawn).size > 3900


def test_decoded_kinds_are_the_original_ones():
    kinds = {
        (1, 2): "int64",
        (0.5, 1.5): "double",
        (False, True): "bool",
        ("x", "y"): "string",
        (1, "y"): "string",
    }
    for categories, kind in kinds.items():
        column = Categorical(name="a", categories=categories, missing=True)
        assert str(column.decode(np.array([0, 2]), np.random.default_rng(0)).type) == kind
    assert str(Codes(name="a", values=2).decode(np.array([0, 1]), np.random.default_rng(0)).type) == "int64"


def test_columns_read_from_the_data_are_named():
    plain = Codes(name="a", values=2)
    schema = Schema((plain, replace(plain, name="b", source="data"), replace(plain, name="c", source="dp")))
    assert schema.from_data() == ("b",)
    assert plain.source == "declared"


def test_the_fingerprint_changes_with_anything():
    a = Categorical(name="a", categories=("x", "y"))
    b = Numeric(name="b", lower=0, upper=8, bins=4)
    others = [
        replace(a, name="c"),
        replace(a, categories=("y", "x")),
        replace(a, categories=("x", "z")),
        replace(a, categories=("x", "y", "z")),
        replace(a, missing=True),
        replace(a, other=True),
        replace(a, source="public"),
        Ordinal(name="a", categories=("x", "y")),
        Codes(name="a", values=2),
    ]
    ranges = [replace(b, lower=1), replace(b, upper=9), replace(b, bins=5), replace(b, integer=True)]
    made = [Schema((a, b)), Schema((b, a)), Schema((a,)), Schema((a, b), dataset="x")]
    made += [Schema((other, b)) for other in others] + [Schema((a, other)) for other in ranges]
    assert len({schema.fingerprint for schema in made}) == len(made)
    assert Schema((a, b)).fingerprint == Schema((replace(a), replace(b))).fingerprint


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)", "\tx", "\rx"])
def test_a_formula_is_guarded_and_read_back(text):
    assert guarded(text) == f"'{text}"
    column = Categorical(name="a", categories=("plain", text.strip()))
    if text.strip() == text:
        assert column.spellings[guarded(text)] == 1


def test_plain_text_is_not_guarded():
    for text in ("", "a=b", "'=x", "1", "\N{MINUS SIGN}1", "ünï"):
        assert guarded(text) == text


def test_a_category_that_looks_like_a_guarded_one_keeps_its_own_code():
    column = Categorical(name="a", categories=("=x", "'=x"))
    assert column.spellings == {"=x": 0, "'=x": 1}


def test_spellings_and_numbers_of_categories():
    column = Categorical(name="a", categories=(7, "07", True, "x", 2.5, "1e3"))
    assert column.spellings["7.0"] == 0
    assert column.spellings["TRUE"] == 2
    assert column.numbers == {7: 0, 2.5: 4, 1000.0: 5}


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_counts_are_whole_and_positive(value):
    with pytest.raises(ParameterError, match=r"rounds \(.*\) must be a whole number of at least 1"):
        require_positive("rounds", value)


def test_numbers_of_a_file_are_those_of_json():
    texts = ["007", "0x1f", "1_000", "12:30", "0b1", "1e", "e3", "0o7", "."]
    numbers = {"1e3": 1000.0, "1e-05": 1e-5, "-.5": -0.5, "5.": 5.0, "0": 0, "-12": -12, "+3": 3, "1E6": 1e6}
    found = parse(f"[{', '.join([*texts, *numbers])}]", "here")
    assert found == [*texts, *numbers.values()]
    assert [type(value) for value in found[-8:]] == [type(value) for value in numbers.values()]
