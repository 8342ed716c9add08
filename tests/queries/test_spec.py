"""Workload specs: what they name, and the words in which faulty ones are refused."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.errors import UsageError, WorkloadError
from anamorph.queries import spec as module
from anamorph.queries.spec import workload
from anamorph.queries.thresholds import Thresholds
from anamorph.schema import Schema

ADULT = {
    "age": 85,
    "workclass": 9,
    "fnlwgt": 100,
    "education-num": 16,
    "marital-status": 7,
    "occupation": 15,
    "relationship": 6,
    "race": 5,
    "sex": 2,
    "capital-gain": 100,
    "capital-loss": 100,
    "hours-per-week": 99,
    "native-country": 42,
    "income>50K": 2,
}
SMALL = Schema(tuple(Codes(name=name, values=size) for name, size in (("a", 2), ("b", 3), ("c", 4), ("d", 5))))


WEIGHTS = (
    "",
    "0",
    "-1",
    "1e-7",
    "1e7",
    "nan",
    "inf",
    "two",
    "1/0",
    "1/",
    "0." + "9" * 20,
    "1e999999999999",
    "1e-99999999",
)
"""Those that are none."""


def sets(text, schema=SMALL):
    return [features for part in workload(text, schema).parts for features in part.sets]


def test_adult_has_the_known_number_of_queries():
    schema = Schema.from_dict(ADULT)
    found = workload("marginals:k=3,count=64,seed=0", schema)
    assert (found.blocks, found.cells) == (64, 2_492_287)
    assert (workload("marginals:k=3", schema).blocks, workload("marginals:k=3", schema).cells) == (364, 20_894_536)
    every = list(itertools.combinations(range(14), 3))
    drawn = np.random.default_rng(0).choice(every, 64, replace=False)
    assert sets("marginals:k=3,count=64,seed=0", schema) == list(map(tuple, drawn.tolist()))


def test_specs_name_what_they_say():
    assert sets("marginals:k=2") == list(itertools.combinations(range(4), 2))
    assert sets(" k = 2 ".join(["marginals:", ""])) == sets("marginals:k=2")
    assert sets("marginals:of=c+a") == [(0, 2)]
    assert sets("marginals:of= d ") == [(3,)]
    assert sets("marginals:k=2,count=3") == sets("marginals:k=2,count=3,seed=0")
    assert sets("marginals:k=2,count=6,seed=1") != sets("marginals:k=2,count=6,seed=2")
    assert Counter(sets("marginals:k=2,count=6,seed=1")) == Counter(sets("marginals:k=2"))
    assert workload("marginals:k=2", SMALL).spec == "marginals:k=2"


def test_thresholds_are_over_the_sets_of_marginals():
    for text in ("k=3", "k=3,count=2,seed=5", "of=d+a+b"):
        made = workload(f"thresholds:{text},r=2", SMALL)
        assert sets(f"thresholds:{text},r=2") == sets(f"marginals:{text}")
        assert [type(part) for part in made.parts] == [Thresholds]
        assert made.parts[0].least == 2
        assert made.cells == workload(f"marginals:{text}", SMALL).cells
    assert workload("thresholds: r = 1 , k = 2 ", SMALL).parts[0].least == 1
    assert workload("thresholds:of=a,r=1", SMALL).digest == workload("marginals:of=a", SMALL).digest


def test_several_specs_have_weights():
    made = workload("marginals:k=1; thresholds:k=2,r=1,weight=2.5;marginals:of=a+b,weight=1/3", SMALL)
    assert made.weights == (1, Fraction(5, 2), Fraction(1, 3))
    assert [piece.weight for piece in made.pieces()] == [1] * 4 + [Fraction(5, 2)] * 6 + [Fraction(1, 3)]
    assert workload(made.spec, SMALL).digest == made.digest
    assert workload("marginals:k=1,weight=7", SMALL).weights == ()
    assert workload("marginals:k=1,weight=7;marginals:k=2,weight=7.0", SMALL).weights == ()


MODULE = """
def share(row):
    return row["a"] @ row["a"]

def broken(row):
    return row["z"]
"""


@pytest.fixture
def module_of_mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec_queries.py").write_text(MODULE)
    yield
    sys.modules.pop("spec_queries", None)


def test_a_function_is_a_part_like_others(module_of_mine):
    made = workload("custom:spec_queries:share,weight=3; marginals:k=1", SMALL)
    assert (made.blocks, made.cells, made.weights) == (5, 15, (3, 1))
    assert made.parts[0].function.name == "spec_queries:share"
    assert workload(" custom: spec_queries:share ", SMALL).weights == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("custom", "must be named as module:function"),
        ("custom:", "must be named as module:function"),
        ("custom:spec_queries", "must be named as module:function"),
        ("custom:../spec_queries:share", "must be named as module:function"),
        ("custom:spec_queries:share;custom:spec_quieries:share", "module ('spec_quieries') must be one that"),
        ("custom:spec_queries:shore", "Did you mean 'share'"),
        ("custom:spec_queries:broken", "KeyError: 'z'"),
        ("custom:spec_queries:share,k=2", "option ('k=2') must be one of weight, as name=value"),
        ("custom:spec_queries:share,weight=0", "weight ('0') must be a number from 1e-6 to 1e6"),
        ("customs:spec_queries:share", "Did you mean 'custom'"),
    ],
)
def test_faulty_functions_are_refused_in_words(module_of_mine, text, words):
    with pytest.raises(WorkloadError) as caught:
        workload(text, SMALL)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with one of marginals"),
        ("marginal:k=2", "Did you mean 'marginals'?"),
        ("halfspace:count=3", "Did you mean 'halfspaces'?"),
        ("marginals", "must give k"),
        ("marginals:", "must give k"),
        ("marginals:count=3", "must give k"),
        ("marginals:k=0", "k (0) must be from 1 to 4, the number of columns"),
        ("marginals:k=5", "k (5) must be from 1 to 4, the number of columns"),
        ("marginals:k=-1", "k ('-1') must be a whole number of at least 0"),
        ("marginals:k=two", "k ('two') must be a whole number"),
        ("marginals:k=1.5", "k ('1.5') must be a whole number"),
        ("marginals:k=" + "9" * 5000, "must be a whole number"),
        ("marginals:k", "option ('k') must be one of k, count, seed, of, target, weight, as name=value"),
        ("marginals:k=2,cuont=3", "Did you mean 'count'?"),
        ("marginals:k=2,k=3", "k must be given once"),
        ("marginals:k=2,count=0", "count (0) must be at least 1"),
        ("marginals:k=2,count=7", "count (7) must be at most 6, the number of 2-way marginals"),
        ("marginals:k=2,seed=1", "seed must come with count"),
        ("marginals:k=2,count=2,seed=-1", "seed ('-1') must be a whole number"),
        ("marginals:of=a,k=1", "of must stand without k, count, seed and target"),
        ("marginals:of=a,r=1", "option ('r=1') must be one of k, count, seed, of, target, weight"),
        ("marginals:of=a,target=b", "of must stand without k, count, seed and target"),
        ("marginals:target=a", "must give k"),
        ("marginals:k=2,target=A", "Did you mean 'a'?"),
        ("marginals:k=5,target=a", "k (5) must be from 1 to 4"),
        ("marginals:k=2,target=a,count=0", "count (0) must be from 1 to 3, the marginals with this column"),
        ("marginals:k=2,target=a,count=4", "count (4) must be from 1 to 3, the marginals with this column"),
        ("marginals:k=2,target=a+b", "target must be one column"),
        ("marginals:k=2,target=a,seed=1", "seed must come with count"),
        ("marginals:of=a+A", "Did you mean 'a'?"),
        ("marginals:of=a+a", "of ('a+a') must name each column once"),
        ("marginals:of=", "column ('') must be in the schema"),
        ("absent.yaml", "must be a readable text file"),
        ("thresholds", "must give k"),
        ("threshold:k=2,r=1", "Did you mean 'thresholds'?"),
        ("thresholds:k=2", "must give r, how many of the columns must agree"),
        ("thresholds:of=a+b", "must give r"),
        ("thresholds:k=2,r=0", "r (0) must be from 1 to k"),
        ("thresholds:k=2,r=3", "r (3) must be from 1 to k, the number of columns of a threshold"),
        ("thresholds:of=a+b,r=3", "r (3) must be from 1 to k"),
        ("thresholds:k=2,r=-1", "r ('-1') must be a whole number of at least 0"),
        ("thresholds:k=2,r=one", "r ('one') must be a whole number"),
        ("thresholds:k=2,r=1,r=2", "r must be given once"),
        ("thresholds:k=5,r=2", "k (5) must be from 1 to 4"),
        ("thresholds:r=2,of=a+b,k=2", "of must stand without k, count, seed and target"),
        ("thresholds:k=2,r=2;marginals:of=b+a", "block a x b must be listed once"),
        ("thresholds:k=2,r=1;thresholds:of=a+b,r=1", "block a x b must be listed once"),
        ("thresholds:k=2,r=1;", "must begin with one of marginals, thresholds, bands, mixed, halfspaces, custom"),
        *((f"marginals:k=2,weight={text}", f"weight ({text!r}) must be a number from 1e-6 to 1e6") for text in WEIGHTS),
        ("marginals:k=2,weight=1,weight=1", "weight must be given once"),
    ],
)
def test_faulty_specs_are_refused_in_words(text, words):
    with pytest.raises(WorkloadError) as caught:
        workload(text, SMALL)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_lists_specs(tmp_path):
    for name, text in (
        ("w.yaml", "workload: ['marginals:k=1', 'marginals:of=a+b']"),
        ("w.YML", "- marginals:k=1\n- marginals:of=b+a"),
    ):
        (tmp_path / name).write_text(text)
        assert sets(str(tmp_path / name)) == [(0,), (1,), (2,), (3,), (0, 1)]
        assert workload(str(tmp_path / name), SMALL).blocks == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must list specs"),
        (b"workload: []", "must list specs"),
        (b"workload: marginals:k=2", "must"),
        (b"workload: [5]", "must list specs"),
        (b"worklod: ['marginals:k=2']", "must list specs"),
        (b"- [marginals:k=2]", "must list specs"),
        (b"\xff\xfe", "must be a readable text file"),
        (b"workload: [", "must be plain YAML"),
        (b"- !x y", "tags are not allowed"),
        (b"- &a x\n- *a", "aliases are not allowed"),
        (b"['marginals:k=2', 'marginals:of=a+b']", "block a x b must be listed once"),
        (b"['marginals:k=1', 'marginals:k=0']", "k (0) must be from 1"),
    ],
)
def test_faulty_files_are_refused_in_words(tmp_path, content, words):
    (tmp_path / "w.yaml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        workload(str(tmp_path / "w.yaml"), SMALL)
    assert words in str(caught.value)


def test_a_large_file_is_refused_and_never_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_FILE", 40)
    (tmp_path / "w.yaml").write_text("- marginals:of=a\n- marginals:of=b\n- marginals:of=c\n")
    with pytest.raises(WorkloadError, match="must be at most"):
        workload(str(tmp_path / "w.yaml"), SMALL)


def test_thresholds_and_marginals_over_one_set_are_different_queries():
    assert workload("thresholds:of=a+b+c,r=1;thresholds:of=a+b+c,r=2;marginals:of=a+b+c", SMALL).blocks == 3


def test_more_cells_than_atoms_names_the_block():
    schema = Schema(tuple(Codes(name=f"c{i}", values=10**6 + i) for i in range(6)))
    with pytest.raises(WorkloadError) as caught:
        workload("marginals:k=5", schema)
    message = str(caught.value)
    assert "block c0 x c1 x c2 x c3 x c4 has 1.00e+30 cells and must have at most 9.22e+18" in message
    assert "smaller k" in message


def test_cells_beyond_every_float_are_refused():
    schema = Schema(tuple(Codes(name=f"c{i}", values=2**31 - 2) for i in range(40)))
    with pytest.raises(WorkloadError, match=r"e\+373 cells"):
        workload("marginals:k=40", schema)


@pytest.mark.parametrize("kind", ["marginals", "thresholds:r=2,"])
def test_the_largest_block_has_positions_of_64_bits(kind):
    names = (("a", 2**31 - 2), ("b", 2**31 - 2), ("c", 2), ("d", 3))
    schema = Schema(tuple(Codes(name=name, values=size) for name, size in names))
    kind = kind if kind.endswith(",") else f"{kind}:"
    found = workload(f"{kind}of=a+b+c", schema)
    assert found.cells == found.largest_block == 2 * (2**31 - 2) ** 2 < 2**63
    with pytest.raises(WorkloadError, match=r"block a x b x d has 1\.38e\+19 cells and must have at most 9\.22e\+18"):
        workload(f"{kind}of=a+b+d", schema)
