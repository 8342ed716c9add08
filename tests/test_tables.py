"""Tables that people take away: rows, answers, and files that appear whole or not at all."""

from __future__ import annotations

import csv
import errno
import itertools
import os
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from anamorph import tables
from anamorph.columns import Categorical, Codes, Datetime, Numeric, Ordinal
from anamorph.curator.bands import Bands
from anamorph.curator.where import Where
from anamorph.errors import ParameterError, ResourceError, WorkloadError
from anamorph.models.answers import Answers, Zero
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import halfspaces
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Privacy, Release
from anamorph.schema import Schema
from anamorph.sources import encode
from anamorph.tables import answer_table, code_labels, query_texts, replace_file, sample_rows, write_table

SCHEMA = Schema(
    (
        Categorical(name="sex", categories=("F", "=M()"), other=True, missing=True),
        Numeric(name="age", lower=0, upper=9, bins=5, integer=True),
        Ordinal(name="level", categories=("-low", "high")),
        Codes(name="code", values=3, missing=True),
        Numeric(name="pay", lower=-1.5, upper=2.5, bins=4, missing=True),
    )
)
SIZES = SCHEMA.sizes


def release(total=50.0, model=None):
    generator = np.random.default_rng(0)
    matrix = np.concatenate([generator.dirichlet(np.ones(size), 6).T for size in SIZES]).astype(np.float32)
    rows = RelaxedRows(SIZES, matrix, np.full(6, 1 / 6, np.float32))
    return Release(SCHEMA, model or rows, (), Privacy("replace", 1.0, 1e-6, 0.1, ()), total)


def test_rows_are_as_many_as_asked_or_as_the_data_publicly_had():
    assert sample_rows(release(total=50.4)).num_rows == 50
    assert sample_rows(release(), 7).num_rows == 7
    assert sample_rows(release(), 7).column_names == list(SCHEMA.names)


def test_rows_are_those_of_the_seed():
    assert sample_rows(release(), seed=1).equals(sample_rows(release(), seed=1))
    assert not sample_rows(release(), seed=1).equals(sample_rows(release(), seed=2))
    table = release().model.sample(50, seed=3)
    np.testing.assert_array_equal(encode(sample_rows(release(), seed=3), SCHEMA).codes, table.codes)


@pytest.mark.parametrize("rows", [0, -1])
def test_no_rows_are_refused(rows):
    with pytest.raises(ParameterError, match=r"rows \((0|-1)\) must be (at least|from) 1"):
        sample_rows(release(), rows)
    with pytest.raises(ParameterError, match="holds answers, not rows"):
        sample_rows(release(model=Zero(SIZES)))


def test_answers_are_listed_cell_by_cell():
    values = np.random.default_rng(1).random(SIZES[0] * SIZES[2])
    model = Answers(SIZES, {(0, 2): values}, {(0, 2): 0.1})
    found = answer_table(release(model=model), "marginals:of=sex+level")
    labels = itertools.product(["F", "=M()", "other", "(missing)"], ["-low", "high"])
    assert found.column("values").to_pylist() == [" x ".join(pair) for pair in labels]
    assert set(found.column("columns").to_pylist()) == {"sex x level"}
    np.testing.assert_allclose(found.column("fraction"), values)
    np.testing.assert_allclose(found.column("count"), 50 * values)


def test_answers_have_the_ends_of_their_intervals():
    model = Answers(SIZES, {(0, 2): np.linspace(-0.1, 0.9, 8)}, {(0, 2): 0.1})
    found = answer_table(release(model=model), "marginals:of=sex+level; thresholds:of=sex+level,r=1")
    assert found.column_names == ["columns", "values", "fraction", "count", "low", "high"]
    fraction, low, high = (found.column(name).to_numpy() for name in ("fraction", "low", "high"))
    reach = 1.959963984540054 * 0.1 * np.sqrt(np.repeat([1, 4 + 2 - 1], 8))
    np.testing.assert_allclose(low, np.clip(fraction - reach, 0, 1))
    np.testing.assert_allclose(high, np.clip(fraction + reach, 0, 1))
    half = answer_table(release(model=model), "marginals:of=sex+level", confidence=0.5).column("high").to_numpy()
    np.testing.assert_allclose(half, np.clip(fraction[:8] + 0.6744897501960817 * 0.1, 0, 1))
    with pytest.raises(ParameterError, match="confidence"):
        answer_table(release(model=model), "marginals:of=sex+level", confidence=1.0)


def test_intervals_that_are_not_known_are_empty(tmp_path):
    """Of rows nothing is known but what was measured: level, and two cells of sex x age."""
    parts = (
        Marginals(SIZES, ((2,),)),
        *Workload((Marginals(SIZES, ((1, 0),)),)).by_cell().take([5, 0]).parts,
    )
    workload = Workload(parts)
    log = Measurement(workload, np.array([0.5, 0.5, 0.2, 0.3]), np.array([0.01, 0.02, 0.02]), 50.0)
    made = replace(release(), measurements=(log,))
    found = answer_table(made, "marginals:of=level; marginals:of=sex+age; marginals:of=code")
    low, high = (np.array(found.column(name).to_pylist(), object) for name in ("low", "high"))
    known = [0, 1, 2, 2 + 1 * 5 + 1]  # (age, sex) = (1, 1) and (0, 0)
    assert [i for i, end in enumerate(low) if end is not None] == known
    assert [i for i, end in enumerate(high) if end is not None] == known
    z = 1.959963984540054
    assert low[known].tolist() == pytest.approx([0.5 - z * 0.01 * 0.5**0.5] * 2 + [0.3 - z * 0.02, 0.2 - z * 0.02])
    assert high[known].tolist() == pytest.approx([0.5 + z * 0.01 * 0.5**0.5] * 2 + [0.3 + z * 0.02, 0.2 + z * 0.02])
    write_table(found, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert [i for i, row in enumerate(rows[1:]) if row[-1]] == known
    assert all(row[-2:] == ["", ""] for i, row in enumerate(rows[1:]) if i not in known)


def test_answers_of_several_marginals_follow_each_other():
    found = answer_table(release(), "marginals:k=1")
    assert found.num_rows == sum(SIZES)
    assert list(dict.fromkeys(found.column("columns").to_pylist())) == list(SCHEMA.names)
    assert sum(found.column("fraction").to_pylist()) == pytest.approx(5, abs=1e-4)


def test_thresholds_say_how_many_must_agree():
    found = answer_table(release(), "thresholds:of=sex+level,r=1;marginals:of=sex+level")
    cells = SIZES[0] * SIZES[2]
    assert found.column("columns").to_pylist() == ["at least 1 of sex x level"] * cells + ["sex x level"] * cells
    assert found.column("values").to_pylist()[:cells] == found.column("values").to_pylist()[cells:]
    some, all_of = np.split(found.column("fraction").to_numpy(), 2)
    both = all_of.reshape(SIZES[0], SIZES[2])
    either = both.sum(axis=1, keepdims=True) + both.sum(axis=0) - both
    np.testing.assert_allclose(some, either.ravel(), atol=1e-5)
    assert answer_table(release(), "thresholds:of=age,r=1").column("columns").to_pylist() == ["age"] * 5


def test_values_of_a_function_are_named_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table_queries.py").write_text("def own(row):\n    return row['age'][:, None] * row['level']\n")
    found = answer_table(release(), "custom:table_queries:own; marginals:of=age+level")
    monkeypatch.delitem(sys.modules, "table_queries")
    assert found.column("columns").to_pylist() == ["table_queries:own"] * 10 + ["age x level"] * 10
    assert found.column("values").to_pylist()[:10] == list(map(str, range(10)))
    own, cells = np.split(found.column("fraction").to_numpy(), 2)
    np.testing.assert_allclose(own, cells, atol=1e-5)
    with pytest.raises(ParameterError, match="must be one that was measured"):
        answer_table(release(model=Answers(SIZES, {}, {})), "custom:table_queries:own")


NATIVE = Schema(
    (
        Categorical(name="vote", categories=("no", "yes")),
        Numeric(name="age", lower=10, upper=19, integer=True, native=True),
        Numeric(name="pay", lower=-1.0, upper=3.0, native=True, missing=True),
        Datetime(name="day", lower="2020-01-01", upper="2020-01-31", date=True),
        Numeric(name="debt", lower=0, upper=10**6, integer=True, native=True, transform="log"),
    )
)


def test_prefixes_say_up_to_where_each_number_goes():
    """The last number that passes; of a real number, where those that fail begin."""
    half, last = 1 << 19, NATIVE.columns[4].bin(np.array([500.0]))[0]
    bounds = np.array([[3, half - 1, 4, last], [9, 2 * half - 1, 30, (1 << 20) - 1]])
    tally = Where(NATIVE.sizes, (0,), (1, 2, 3, 4), (10, 2 * half, 31, 2 * half), bounds)
    name, texts = query_texts(tally, NATIVE)
    assert name == "vote x age x pay x day x debt"
    first, second = "<= 13 x < 1 x <= 2020-01-05 x <= 500", "<= 19 x <= 3 x <= 2020-01-31 x <= 1000000"
    assert texts == [f"no x {first}", f"yes x {first}", f"no x {second}", f"yes x {second}"]
    assert query_texts(replace(tally, given=()), NATIVE) == ("age x pay x day x debt", [first, second])


BANDED = {
    "bands:of=age,bands=4": ("age", ["10 <= age < 13", "13 <= age < 15", "15 <= age < 18", "18 <= age <= 19"]),
    "bands:of=pay,bands=2": ("pay", ["-1 <= pay < 1", "1 <= pay <= 3", "(missing)"]),
    "bands:of=day,bands=3": (
        "day",
        ["2020-01-01 <= day < 2020-01-12", "2020-01-12 <= day < 2020-01-22", "2020-01-22 <= day <= 2020-01-31"],
    ),
    "bands:of=debt,bands=2": ("debt", ["0 <= debt < 1000", "1000 <= debt <= 1000000"]),
    "bands:of=vote+age,bands=2": (
        "vote x age",
        ["no x 10 <= age < 15", "no x 15 <= age <= 19", "yes x 10 <= age < 15", "yes x 15 <= age <= 19"],
    ),
}


@pytest.mark.parametrize("spec", BANDED)
def test_bands_say_from_where_to_where_a_number_goes(spec):
    (piece,) = parse_workload(spec, NATIVE).pieces()
    assert query_texts(piece.tally, NATIVE) == BANDED[spec]


def test_texts_of_bands_are_true_of_the_numbers_in_them():
    """Every whole number of a range, and dates, against the code that it has."""
    for feature in (1, 3, 4):
        grid = NATIVE.columns[feature].grid
        numbers = np.arange(int(grid.lower), int(grid.upper) + 1)[:: 1 if feature < 4 else 97]
        values = [NATIVE.columns[3].text(n) if feature == 3 else n for n in numbers.tolist()]
        for bands in (2, 3, 7, 31):
            (piece,) = parse_workload(f"bands:of={NATIVE.names[feature]},bands={bands}", NATIVE).pieces()
            _, texts = query_texts(piece.tally, NATIVE)
            owner = np.searchsorted(piece.tally.cuts[0], grid.bin(numbers.astype(float)), side="right")
            for band, text in enumerate(texts):
                low, _, _, sign, high = text.split()
                low, high = (low, high) if feature == 3 else (int(low), int(high))
                inside = [low <= v and (v <= high if sign == "<=" else v < high) for v in values]
                assert inside == (owner == band).tolist()


def test_bands_that_hold_the_missing_say_so():
    tally = Bands(NATIVE.sizes, (2,), ((1 << 19,),))
    assert query_texts(tally, NATIVE)[1] == ["-1 <= pay < 1", "1 <= pay <= 3 or (missing)"]
    with pytest.raises(ParameterError, match="column 'vote' must be numeric or datetime"):
        query_texts(Bands(NATIVE.sizes, (0,), ((1,),)), NATIVE)


def test_halfspaces_say_their_inequality_in_units_of_the_ranges():
    (part,) = halfspaces(NATIVE, count=40, seed=1, targets=("vote",))
    name, texts = query_texts(part.tally, NATIVE)
    assert name == "vote x age + pay + day + debt"
    limits = np.array(part.tally.limits)
    codes = np.random.default_rng(0).integers(0, limits, (200, 4))
    holds = part.tally.holds(codes.astype(np.float64), slice(None))
    assert 0.1 < holds.mean() < 0.9
    for test, text in enumerate(texts[::2]):
        label, _, inequality = text.partition(" x ")
        words = inequality.split()
        assert (label, words[1:8:2], words[8]) == ("no", ["age", "pay", "day", "debt"], "<=")
        slopes, bound = np.array([float(word) for word in words[0:8:2]]), float(words[9])
        assert np.linalg.norm(slopes) == pytest.approx(1, abs=1e-4)
        space = (codes + 0.5) / limits @ slopes - bound
        clear = np.abs(space) > 1e-4
        assert ((space <= 0) == holds[test])[clear].all()
        assert texts[2 * test + 1] == f"yes x {inequality}"


def test_blocks_in_several_pieces_are_listed_in_order(monkeypatch):
    whole = answer_table(release(), "thresholds:of=sex+age+level,r=2;marginals:k=2")
    for limit in (1, 3, 17):
        monkeypatch.setattr(tables, "parse_workload", lambda *given, n=limit: replace(parse_workload(*given), limit=n))
        cut = answer_table(release(), "thresholds:of=sex+age+level,r=2;marginals:k=2")
        assert cut.select(["columns", "values"]).equals(whole.select(["columns", "values"]))
        np.testing.assert_allclose(cut.column("fraction"), whole.column("fraction"), atol=1e-6)


def test_intervals_in_several_pieces_are_those_of_the_whole(monkeypatch):
    spec = "thresholds:of=sex+age+level,r=2; marginals:of=level+age+sex"
    sets = ((0, 1, 2), (1,))
    workload = Workload((Marginals(SIZES, sets),))
    values = np.random.default_rng(2).uniform(0, 0.1, workload.cells)
    made = replace(release(), measurements=(Measurement(workload, values, np.array([0.01, 0.02]), 50.0),))
    whole = answer_table(made, spec)
    for limit in (1, 3, 17):
        monkeypatch.setattr(tables, "parse_workload", lambda *given, n=limit: replace(parse_workload(*given), limit=n))
        cut = answer_table(made, spec)
        for name in ("low", "high"):
            np.testing.assert_allclose(cut.column(name), whole.column(name))


def test_too_many_answers_are_refused(monkeypatch):
    monkeypatch.setattr(tables, "LARGEST_ANSWERS", 20)
    with pytest.raises(ParameterError, match="must have at most 20"):
        answer_table(release(), "marginals:k=2")
    with pytest.raises(WorkloadError, match="k"):
        answer_table(release(), "marginals:k=9")


def test_every_code_has_a_label_of_its_own():
    assert code_labels(SCHEMA.columns[0]) == ["F", "=M()", "other", "(missing)"]
    assert code_labels(SCHEMA.columns[1]) == ["[0, 2)", "[2, 4)", "[4, 6)", "[6, 8)", "[8, 10)"]
    assert code_labels(SCHEMA.columns[3]) == ["0", "1", "2", "(missing)"]
    days = Datetime(name="x", lower="9999-12-01", upper="9999-12-31", bins=3, date=True, missing=True)
    ends = [("01", "11"), ("12", "21"), ("22", "31")]
    assert code_labels(days) == [*(f"[9999-12-{first}, 9999-12-{last}]" for first, last in ends), "(missing)"]
    log = Numeric(name="x", lower=0, upper=99, bins=2, transform="log")
    assert code_labels(log) == ["[0, 9)", "[9, 99)"]
    assert code_labels(SCHEMA.columns[4])[0] == "[-1.5, -0.5)"
    assert code_labels(SCHEMA.columns[4])[-1] == "(missing)"
    for lower, upper in ((1_000_000, 1_000_010), (0.1, 0.7), (1e-9, 3e-9), (20_000_000, 20_000_100)):
        column = Numeric(name="x", lower=lower, upper=upper, bins=10)
        assert len(set(code_labels(column))) == 10


@pytest.mark.parametrize("ending", ["csv", "parquet", "CSV"])
def test_written_rows_are_read_as_they_were(tmp_path, ending):
    table = sample_rows(release(), 80)
    path = tmp_path / f"rows.{ending}"
    write_table(table, path)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    if ending == "parquet":
        assert parquet.read_table(path).equals(table)
        return
    path = path.rename(tmp_path / "read.csv")
    np.testing.assert_array_equal(encode(path, SCHEMA).codes, encode(table, SCHEMA).codes)


def test_formulas_are_disarmed_in_csv(tmp_path):
    table = pa.table({"=name": ["=cmd|' /C calc'!A0", "plain", None, "@x"], "n": [-1, 2, 3, 4]})
    write_table(table, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["'=name", "n"], ["'=cmd|' /C calc'!A0", "-1"], ["plain", "2"], ["", "3"], ["'@x", "4"]]
    texts = pa.chunked_array([["=a"], [], ["b", "=a"]], pa.string())
    assert tables.guard_texts(pa.table({"x": texts})).column("x").to_pylist() == ["'=a", "b", "'=a"]


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.csv.gz"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ParameterError, match=r"must end in \.csv or \.parquet"):
        write_table(pa.table({"a": [1]}), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_is_replaced_only_when_told(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("precious")
    with pytest.raises(ParameterError, match="must not exist yet: name another, or add --overwrite"):
        write_table(pa.table({"a": [1]}), path)
    assert path.read_text() == "precious"
    write_table(pa.table({"a": [1]}), path, overwrite=True)
    assert path.read_text().split() == ['"a"', "1"]


def refuse(*_args, **_more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_earlier_file_as_it_was(tmp_path, monkeypatch, step):
    path = tmp_path / "x.csv"
    path.write_text("precious")
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    if step == "replace":
        monkeypatch.setattr(type(path), "replace", refuse)
    write = (
        (lambda fresh: (fresh.write_text("half"), refuse()))
        if step == "write"
        else (lambda fresh: fresh.write_text("new"))
    )
    with pytest.raises(ResourceError, match="No space left on device"):
        replace_file(path, overwrite=True, write=write)
    assert path.read_text() == "precious"
    assert [item.name for item in tmp_path.iterdir()] == ["x.csv"]


def test_a_directory_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ResourceError, match="cannot be written"):
        write_table(pa.table({"a": [1]}), tmp_path / "absent" / "x.csv")
    with pytest.raises(ResourceError, match="cannot be written"):
        write_table(pa.table({"a": [1]}), tmp_path / "absent" / "x.parquet")
