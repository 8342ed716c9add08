"""Workload specs: what they name, and the words in which faulty ones are refused."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.errors import UsageError, WorkloadError
from anamorph.queries import spec as module
from anamorph.queries.spec import workload
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with one of marginals"),
        ("marginal:k=2", "Did you mean 'marginals'?"),
        ("halfspaces:count=3", "must begin with one of marginals"),
        ("marginals", "must give k"),
        ("marginals:", "must give k"),
        ("marginals:count=3", "must give k"),
        ("marginals:k=0", "k (0) must be from 1 to 4, the number of columns"),
        ("marginals:k=5", "k (5) must be from 1 to 4, the number of columns"),
        ("marginals:k=-1", "k ('-1') must be a whole number of at least 0"),
        ("marginals:k=two", "k ('two') must be a whole number"),
        ("marginals:k=1.5", "k ('1.5') must be a whole number"),
        ("marginals:k=" + "9" * 5000, "must be a whole number"),
        ("marginals:k", "option ('k') must be one of k, count, seed, of, as name=value"),
        ("marginals:k=2,cuont=3", "Did you mean 'count'?"),
        ("marginals:k=2,k=3", "k must be given once"),
        ("marginals:k=2,count=0", "count (0) must be at least 1"),
        ("marginals:k=2,count=7", "count (7) must be at most 6, the number of 2-way marginals"),
        ("marginals:k=2,seed=1", "seed must come with count"),
        ("marginals:k=2,count=2,seed=-1", "seed ('-1') must be a whole number"),
        ("marginals:of=a,k=1", "of must stand alone"),
        ("marginals:of=a+A", "Did you mean 'a'?"),
        ("marginals:of=a+a", "of ('a+a') must name each column once"),
        ("marginals:of=", "column ('') must be in the schema"),
        ("absent.yaml", "must be a readable text file"),
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
        (b"['marginals:k=2', 'marginals:of=a+b']", "marginal a x b must be listed once"),
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


def test_more_cells_than_atoms_names_the_largest_marginal_and_its_bytes():
    schema = Schema(tuple(Codes(name=f"c{i}", values=10**6 + i) for i in range(6)))
    with pytest.raises(WorkloadError) as caught:
        workload("marginals:k=5", schema)
    message = str(caught.value)
    assert "marginal c1 x c2 x c3 x c4 x c5 has 1.00e+30 cells and would need 8.00e+30 bytes" in message
    assert "smaller k" in message


def test_cells_beyond_every_float_are_refused():
    schema = Schema(tuple(Codes(name=f"c{i}", values=2**31 - 2) for i in range(40)))
    with pytest.raises(WorkloadError, match=r"e\+373 cells"):
        workload("marginals:k=40", schema)


def test_the_largest_marginal_that_is_counted():
    schema = Schema((Codes(name="a", values=2**16), Codes(name="b", values=2**17), Codes(name="c", values=2**17 + 1)))
    assert workload("marginals:of=a+b", schema).cells == 2**33
    with pytest.raises(WorkloadError, match="marginal a x c has"):
        workload("marginals:of=a+c", schema)
