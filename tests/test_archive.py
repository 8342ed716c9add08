"""Release directories: what is saved is what is loaded, and anything else is refused; nothing earlier is harmed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save as tensors

from anamorph import archive
from anamorph.archive import ARRAYS, HEADER, check_target, digest, load, save
from anamorph.columns import Categorical, Codes
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError, ParameterError, ResourceError, WorkloadError
from anamorph.models.answers import Answers, Zero
from anamorph.models.banded import BandedRows, Ruler
from anamorph.models.least_squares import least_squares
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.bands import Banded
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.residuals import Residuals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement, Privacy, Release, Spend
from anamorph.schema import Schema

SCHEMA = Schema((Codes(name="a", values=3), Categorical(name="é😀", categories=("x", "y"), other=True)), dataset="d")
SIZES = SCHEMA.sizes
MARGINALS = Workload((Marginals(SIZES, ((0, 1), (1,))),))
PREFIXES = NumberTests(Where(SIZES, (0,), (1,), (2,), np.array([[1], [0]])))
HALFSPACES = NumberTests(Where(SIZES, (), (1, 0), (2, 3), np.array([4, -1, 0]), np.array([[3, -1], [0, 2], [-5, 1]])))
THRESHOLDS = Workload((Thresholds(SIZES, ((0, 1), (1, 0)), 1),))
WORKLOADS = {
    "marginals": MARGINALS,
    "cells": MARGINALS.by_cell(),
    "chosen": MARGINALS.by_cell().take([4, 0, 11]),
    "parts": Workload(
        (Marginals(SIZES, ((1,),)), *MARGINALS.by_cell().take([2, 1]).parts, Marginals(SIZES, ((1, 0),)))
    ),
    "thresholds": THRESHOLDS,
    "single thresholds": THRESHOLDS.by_cell(),
    "chosen thresholds": THRESHOLDS.by_cell().take([8, 3]),
    "weights": Workload((*THRESHOLDS.parts, *MARGINALS.parts), weights=(Fraction(5, 2), Fraction(1, 3))),
    "residuals": Workload(
        (Residuals(SIZES, ((1, 0), (0,))), *MARGINALS.parts, Residuals(SIZES, ((1,),))),
        weights=(Fraction(5, 2), Fraction(1, 3), Fraction(7)),
    ),
    "tests": Workload((PREFIXES, *MARGINALS.parts, HALFSPACES)),
    "bands": Workload((Banded(SIZES, ((1,), (0, 1), (0,)), ((), (1, 2))), *MARGINALS.parts)),
}
FUNCTION = custom(lambda row: row["a"] / 2, SCHEMA, name="my_queries:half")
FUNCTIONS = {
    "function": Workload((FUNCTION, *MARGINALS.parts)),
    "values": Workload((*MARGINALS.parts, FUNCTION.by_cell())),
    "chosen values": Workload((FUNCTION,)).by_cell().take([2, 0]),
    "weighted function": Workload((FUNCTION, *THRESHOLDS.parts), weights=(Fraction(2), Fraction(1))),
}
ALL = (HEADER, *ARRAYS)


def relaxed():
    generator = np.random.default_rng(0)
    matrix = np.concatenate([generator.dirichlet(np.ones(size), 4).T for size in SIZES]).astype(np.float32)
    return RelaxedRows(SIZES, matrix, np.full(4, 0.25, np.float32))


def measured(workload, *, varied=False):
    generator = np.random.default_rng(1)
    sigma = generator.uniform(0.1, 0.2, workload.blocks) if varied else np.full(workload.blocks, 0.1)
    return Measurement(workload, generator.normal(size=workload.cells), sigma, 40.0)


MODELS = {
    "relaxed": relaxed(),
    "answers": Answers(SIZES, {(0, 1): np.arange(9.0), (1,): np.arange(3.0) / 7}, {(0, 1): 0.1, (1,): 0.3}),
    "zero": Zero(SIZES),
    "mixed": MixedRows(
        Columns(SIZES, (1,), (2,)),
        RelaxedRows((3, 2), np.full((5, 4), [[1 / 3]] * 3 + [[1 / 2]] * 2, np.float32), np.full(4, 0.25, np.float32)),
        np.array([[0.0, 0.3, 0.9, 1.0]], np.float32),
    ),
    "banded": BandedRows(
        SIZES,
        {1: Ruler(np.array([0, 1, 2, 3]), np.array([0.0, 0.7, 1.0, 2.0]))},
        RelaxedRows((3, 2), np.full((5, 4), [[1 / 3]] * 3 + [[1 / 2]] * 2, np.float32), np.full(4, 0.25, np.float32)),
    ),
    "least-squares": least_squares(SIZES, (measured(WORKLOADS["residuals"], varied=True),)),
}


def release(model="relaxed", workloads=("marginals", "chosen"), **changes):
    every = WORKLOADS | FUNCTIONS
    measurements = tuple(measured(every[name], varied=i == 0) for i, name in enumerate(workloads))
    privacy = Privacy("replace", 1.0, 1e-6, 0.1 / 3, (Spend("select", 0.01, "a"), Spend("measure", 0.02, "b")))
    made = Release(SCHEMA, MODELS[model], measurements, privacy, 40.0, {"name": model, "rows": 4}, "marginals:k=2")
    return replace(made, **changes)


@pytest.fixture
def saved(tmp_path):
    save(release(), tmp_path / "r")
    return tmp_path / "r"


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rewrite(directory, change):
    """Changes the header and makes its checksum right again: a forger's work, or a bug's."""
    header = json.loads((directory / HEADER).read_bytes())
    header.pop("checksum")
    change(header)
    (directory / HEADER).write_bytes(archive.render(header))


def reseal(directory, name, content):
    """Changes a file of arrays and writes its hash into the header."""
    (directory / name).write_bytes(content)
    rewrite(directory, lambda header: header["files"].update({name: hashlib.sha256(content).hexdigest()}))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workloads", [(), ("marginals",), ("cells", "chosen"), tuple(WORKLOADS)])
def test_a_release_comes_back_as_it_was(tmp_path, model, workloads):
    made = release(model, workloads, degraded=True)
    identity = save(made, tmp_path / "r")
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == sorted(ALL)
    assert identity == digest(tmp_path / "r") == hashlib.sha256((tmp_path / "r" / HEADER).read_bytes()).hexdigest()
    again = load(tmp_path / "r")
    for name in ("schema", "privacy", "total", "mechanism", "workload", "degraded"):
        assert getattr(again, name) == getattr(made, name)
    assert type(again.model) is type(made.model)
    for name, array in made.model.arrays().items():
        np.testing.assert_array_equal(again.model.arrays()[name], array)
    assert len(again.measurements) == len(made.measurements)
    for found, wanted in zip(again.measurements, made.measurements, strict=True):
        assert found.workload.digest == wanted.workload.digest
        assert found.workload.weights == wanted.workload.weights
        assert found.workload.blocks == wanted.workload.blocks
        np.testing.assert_array_equal(found.values, wanted.values)
        np.testing.assert_array_equal(found.sigma, wanted.sigma)
        assert found.total == wanted.total


def test_functions_come_back_by_name_alone(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a release must not make Python import anything")

    monkeypatch.setattr("importlib.import_module", refuse)
    made = release("zero", tuple(FUNCTIONS))
    save(made, tmp_path / "r")
    again = load(tmp_path / "r")
    for found, wanted in zip(again.measurements, made.measurements, strict=True):
        np.testing.assert_array_equal(found.values, wanted.values)
        np.testing.assert_array_equal(found.sigma, wanted.sigma)
        for name in ("weights", "blocks", "cells", "largest_block", "sizes", "firsts"):
            assert getattr(found.workload, name) == getattr(wanted.workload, name)
        with pytest.raises(WorkloadError, match=r"function \('my_queries:half'\) must be given to compute"):
            list(found.workload.pieces())
    save(again, tmp_path / "s")
    assert contents(tmp_path / "s") == contents(tmp_path / "r")


OTHER = ("single thresholds", "weights", "chosen values", "weighted function", "residuals", "tests", "bands")


@pytest.mark.parametrize(
    ("measurement", "change"),
    [
        (0, lambda item: item["parts"][0].update(least=0)),
        (0, lambda item: item["parts"][0].update(least=3)),
        (0, lambda item: item["parts"][0].update(least="1")),
        (0, lambda item: item["parts"][0].update(least=1.5)),
        (0, lambda item: item["parts"][0].update(least=None)),
        (0, lambda item: item["parts"][0].update(sets=[[0, 1], [1]])),
        (1, lambda item: item.update(weights=[[1, 1]])),
        (1, lambda item: item.update(weights=[[1, 1], [0, 1]])),
        (1, lambda item: item.update(weights=[[1, 1], [-1, 2]])),
        (1, lambda item: item.update(weights=[[1, 1], [1, 0]])),
        (1, lambda item: item.update(weights=[[1, 1], [1.5, 1]])),
        (1, lambda item: item.update(weights=["1", "1e999999999"])),
        (1, lambda item: item.update(weights=5)),
        (2, lambda item: item["parts"][0].update(values=2)),
        (2, lambda item: item["parts"][0].pop("values")),
        (3, lambda item: item["parts"][0].update(values=4)),
        (3, lambda item: item["parts"][0].update(values=0)),
        (3, lambda item: item["parts"][0].update(values=-3)),
        (3, lambda item: item["parts"][0].update(values=10**40)),
        (3, lambda item: item["parts"][0].update(values="many")),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0], [0, 1]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 1], [0]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 2], [0]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0], [-2]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0], [0], []])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0], ["0"]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0], [0.0]])),
        (4, lambda item: item["parts"][0].update(residuals=[[1, 0], 0])),
        (4, lambda item: item["parts"][0].update(residuals=2)),
        (4, lambda item: item["parts"][0].update(residuals=[])),
        (4, lambda item: item["parts"][2].update(residuals=[[0], [1]])),
        (5, lambda item: item["parts"][0].update(numbers=[2])),
        (5, lambda item: item["parts"][0].update(numbers=[0])),
        (5, lambda item: item["parts"][0].update(numbers=[1.0])),
        (5, lambda item: item["parts"][0].update(numbers=["1"])),
        (5, lambda item: item["parts"][0].update(numbers=1)),
        (5, lambda item: item["parts"][0].update(numbers=[])),
        (5, lambda item: item["parts"][0].update(given=[])),
        (5, lambda item: item["parts"][0].update(given=[-1])),
        (5, lambda item: item["parts"][0].update(limits=[4])),
        (5, lambda item: item["parts"][0].update(limits=[0])),
        (5, lambda item: item["parts"][0].update(limits=[2, 2])),
        (5, lambda item: item["parts"][0].pop("limits")),
        (5, lambda item: item["parts"][1].update(numbers=[1], given=[0], limits=[2])),
        (5, lambda item: item["parts"][2].update(numbers=[1], limits=[2])),
        (5, lambda item: item["parts"].reverse()),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, 1]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, 1], [1], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, 0], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, 2], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, -1], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, True], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, 1.0], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, "1"], [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], [0, 1], [False]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=[[1], 5, [0]])),
        (6, lambda item: item["parts"][0]["bands"].update(sets=5)),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [2, 1]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [1, 1]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [0, 2]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [1, 3]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [1]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [1.0, 2]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [True, 2]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], ["1", "2"]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[1, 2]])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[[], [1, 2], []])),
        (6, lambda item: item["parts"][0]["bands"].update(cuts=[None, [1, 2]])),
        (6, lambda item: item["parts"][0]["bands"].update(least=1)),
        (6, lambda item: item["parts"][0]["bands"].pop("cuts")),
        (6, lambda item: item["parts"][0].update(bands=[])),
        (6, lambda item: item["parts"][1].update(bands={"sets": [[0]], "cuts": [[], []]})),
    ],
)
def test_queries_that_are_none_are_refused(tmp_path, measurement, change):
    save(release("zero", OTHER), tmp_path / "r")
    load(tmp_path / "r")
    rewrite(tmp_path / "r", lambda header: change(header["measurements"][measurement]))
    with pytest.raises(CorruptionError):
        load(tmp_path / "r")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("bounds.0.0", None),
        ("bounds.0.0", np.array([[1], [0], [1]])),
        ("bounds.0.0", np.array([1, 0])),
        ("bounds.0.0", np.array([[1.0], [0.0]])),
        ("bounds.0.0", np.array([[1], [0]], np.int32)),
        ("weights.0.0", np.array([[1], [0]])),
        ("weights.0.2", None),
        ("weights.0.2", np.array([[3, -1], [0, 2]])),
        ("weights.0.2", np.array([[3, -1], [0, 2], [1 << 52, 0]])),
        ("weights.0.2", np.array([[3.0, -1], [0, 2], [-5, 1]])),
    ],
)
def test_tests_of_numbers_that_are_none_are_refused(tmp_path, name, array):
    save(release("mixed", ("tests",)), tmp_path / "r")
    arrays = archive.decode((tmp_path / "r" / ARRAYS[1]).read_bytes(), tmp_path)
    changed = {key: value for key, value in arrays.items() if key != name} | ({} if array is None else {name: array})
    reseal(tmp_path / "r", ARRAYS[1], tensors(changed))
    with pytest.raises(CorruptionError):
        load(tmp_path / "r")


def test_what_cannot_be_described_is_refused_before_it_is_written(tmp_path):
    @dataclass(frozen=True)
    class Foreign:
        sizes = SIZES
        blocks = cells = largest_block = 1

    with pytest.raises(ParameterError, match="must be of marginals, thresholds or functions to be saved"):
        save(release(measurements=(measured(Workload((Foreign(),))),)), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_saved_release_says_what_it_promises(saved):
    header = json.loads((saved / HEADER).read_text())
    assert header["private"] is True
    assert "(1, 1e-06)-differentially private" in header["statement"]
    save(release(privacy=replace(release().privacy, private=False)), saved, overwrite=True)
    header = json.loads((saved / HEADER).read_text())
    assert header["private"] is False
    assert header["statement"].startswith("NOT PRIVATE")


@pytest.mark.parametrize("name", ALL)
def test_a_changed_byte_is_refused_wherever_it_is(saved, name):
    content = (saved / name).read_bytes()
    for place in np.linspace(0, len(content) - 1, 60).astype(int):
        for flip in (1, 0x20):
            changed = bytearray(content)
            changed[place] ^= flip
            (saved / name).write_bytes(bytes(changed))
            with pytest.raises(CorruptionError):
                load(saved)
    for changed in (content[:-1], content + b" ", b"", content[: len(content) // 2]):
        (saved / name).write_bytes(changed)
        with pytest.raises(CorruptionError):
            load(saved)
    (saved / name).write_bytes(content)
    load(saved)


@pytest.mark.parametrize("name", ALL)
def test_a_missing_file_a_link_and_a_directory_are_refused(saved, tmp_path, name):
    (saved / name).rename(tmp_path / "moved")
    with pytest.raises(CorruptionError, match=f"must hold the file {name}"):
        load(saved)
    (saved / name).symlink_to(tmp_path / "moved")
    with pytest.raises(CorruptionError, match=f"must hold the file {name}"):
        load(saved)
    (saved / name).unlink()
    (saved / name).mkdir()
    with pytest.raises(CorruptionError, match=f"must hold the file {name}"):
        load(saved)


class Exploit:
    """What a pickle may do."""

    def __reduce__(self):
        return (os.mkdir, ("pickled",))


def test_a_pickle_is_never_read(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ARRAYS:
        save(release(), saved, overwrite=True)
        reseal(saved, name, pickle.dumps(Exploit()))
        with pytest.raises(CorruptionError, match=r"must be .*safetensors"):
            load(saved)
    assert not Path("pickled").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"[]", "must be one that anamorph wrote"),
        (b"{}", "must be one that anamorph wrote"),
        (b'{"format": "something"}', "must be one that anamorph wrote"),
        (b'{"format": "anamorph release", "files": {}}', "version (None) must be 1"),
        (b'{"format": "anamorph release", "files": {}, "version": 2}', "version (2) must be 1"),
        (b'{"format": "anamorph release", "files": {}, "version": 1}', "must be as it was written"),
        (b'{"format": "anamorph release", "format": "x"}', "duplicate keys"),
        (b'{"format": "anamorph release", "version": NaN}', "NaN"),
        (b'{"format": "anamorph release", "version": Infinity}', "NaN"),
        (b"[" * 100_000, "must be JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "must be JSON"),
    ],
)
def test_foreign_headers_are_refused(saved, content, words):
    (saved / HEADER).write_bytes(content)
    with pytest.raises(CorruptionError) as caught:
        load(saved)
    assert words in str(caught.value)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("schema"),
        lambda header: header.pop("files"),
        lambda header: header.update(files=[]),
        lambda header: header.update(files=5),
        lambda header: header.update(schema={"columns": {}}),
        lambda header: header.update(model="pickle"),
        lambda header: header.update(model=["relaxed"]),
        lambda header: header.update(model="answers"),
        lambda header: header.update(model="zero"),
        lambda header: header.update(model="least-squares"),
        lambda header: header.update(total="many"),
        lambda header: header["privacy"].pop("rho"),
        lambda header: header["privacy"].update(more=1),
        lambda header: header["privacy"].update(spends=5),
        lambda header: header["privacy"].update(epsilon="1"),
        lambda header: header["privacy"].update(epsilon=-3),
        lambda header: header["privacy"].update(epsilon=5.0),
        lambda header: header["privacy"].update(delta=None),
        lambda header: header["privacy"].update(rho=[1]),
        lambda header: header["privacy"].update(private="no"),
        lambda header: header["privacy"].update(neighbours=3),
        lambda header: header["privacy"]["spends"][0].update(rho="1"),
        lambda header: header["privacy"]["spends"][0].update(more=1),
        lambda header: header.update(private=not header["private"]),
        lambda header: header.update(statement="This release is perfectly private."),
        lambda header: header.update(total=True),
        lambda header: header["measurements"][0].update(total=-5),
        lambda header: header.update(measurements=5),
        lambda header: header["measurements"].append(header["measurements"][0]),
        lambda header: header["measurements"][0].update(parts=[]),
        lambda header: header["measurements"][0]["parts"][0].update(sets=[[0, 1], [2]]),
        lambda header: header["measurements"][0]["parts"][0].update(sets=[[0, 1], [-1]]),
        lambda header: header["measurements"][0]["parts"][0].update(sets=[[0, 1], ["1"]]),
        lambda header: header["measurements"][0]["parts"][0].update(sets=[[0, 0], [1]]),
        lambda header: header["measurements"][0]["parts"][0].update(sets=[[0, 1], []]),
        lambda header: header["measurements"][0]["parts"][0].update(sets=[[0, 1]]),
        lambda header: header["measurements"][1]["parts"][0].update(sets=[[1]]),
        lambda header: header["schema"]["columns"]["a"].update(values=4),
    ],
)
def test_headers_that_describe_no_release_are_refused(saved, change):
    rewrite(saved, change)
    with pytest.raises(CorruptionError):
        load(saved)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("probabilities", np.full((6, 4), 0.5, np.float32)),
        ("probabilities", np.full((5, 4), 1 / 3, np.float32)),
        ("probabilities", np.full((6, 4), np.nan, np.float32)),
        ("weights", np.full(4, 0.5, np.float32)),
        ("weights", np.full(3, 1 / 3, np.float32)),
        ("weights", None),
    ],
)
def test_models_that_are_no_probabilities_are_refused(saved, name, array):
    arrays = {key: value for key, value in relaxed().arrays().items() if key != name}
    arrays |= {} if array is None else {name: array}
    reseal(saved, "model.safetensors", tensors(arrays))
    with pytest.raises(CorruptionError):
        load(saved)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("values.0", np.zeros(5)),
        ("values.0", np.full(12, np.nan)),
        ("sigma.0", np.full(2, np.inf)),
        ("sigma.0", np.ones(3)),
        ("chosen.1.0", np.array([4, 0, 12])),
        ("chosen.1.0", np.array([4, 0, -1])),
        ("chosen.1.0", np.array([4.0, 0, 1])),
        ("chosen.1.0", np.array([4, 0])),
        ("values.1", None),
        ("sigma.1", None),
        ("chosen.1.0", None),
    ],
)
def test_measurements_that_do_not_fit_are_refused(saved, name, array):
    arrays, _ = archive.plain_measurements(release().measurements)
    reseal(saved, "measurements.safetensors", tensors(arrays))
    load(saved)
    arrays.pop(name)
    arrays |= {} if array is None else {name: array}
    reseal(saved, "measurements.safetensors", tensors(arrays))
    with pytest.raises(CorruptionError):
        load(saved)


def test_what_is_no_directory_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="must be a directory made by `anamorph fit`"):
        load(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ParameterError, match="must be a directory"):
        load(tmp_path / "file")


def test_an_earlier_output_is_overwritten_only_when_told(saved):
    before = contents(saved)
    with pytest.raises(ParameterError, match="must not exist yet: name another, or add --overwrite"):
        save(release("zero"), saved)
    assert contents(saved) == before
    save(release("zero"), saved, overwrite=True)
    assert isinstance(load(saved).model, Zero)
    assert [path.name for path in saved.parent.iterdir()] == ["r"]


def test_targets_are_checked_before_anything_is_spent(tmp_path, saved):
    check_target(tmp_path / "new", overwrite=False)
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", overwrite=True)
    check_target(saved, overwrite=True)
    for overwrite, target, kind, words in (
        (False, saved, ParameterError, "must not exist yet"),
        (False, tmp_path / "empty", ParameterError, "must not exist yet"),
        (False, tmp_path / "absent" / "r", ResourceError, "cannot be written"),
    ):
        with pytest.raises(kind, match=words):
            check_target(target, overwrite=overwrite)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ParameterError, match="must be a release to be overwritten"):
        check_target(tmp_path / "file", overwrite=True)
    (saved / "rows.csv").write_text("precious")
    with pytest.raises(ParameterError, match="it holds other files"):
        check_target(saved, overwrite=True)
    assert (saved / "rows.csv").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "r"]


def full(*_args, **_more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing:
    """A function that fails at its n-th call, and works before and after."""

    def __init__(self, function, at, error=full):
        self.function, self.at, self.error, self.calls = function, at, error, 0

    def __call__(self, *args, **more):
        self.calls += 1
        return self.error() if self.calls == self.at else self.function(*args, **more)

    def as_method(self):
        """A plain function, which a class binds."""

        def call(*args, **more):
            return self(*args, **more)

        return call


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("error", [full, interrupt])
def test_a_failure_at_any_write_harms_nothing(tmp_path, monkeypatch, exists, error):
    target = tmp_path / "r"
    if exists:
        save(release("answers"), target)
    before = contents(target) if exists else None
    failed = 0
    for name, owner in (("fsync", os), ("rename", Path), ("mkdir", Path), ("open", Path)):
        for at in range(1, 12):
            plain = getattr(owner, name)
            failing = Failing(plain, at, error)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing.as_method())
                done = failing_save(target)
            if done:
                assert isinstance(load(target).model, RelaxedRows)
                break
            failed += 1
            assert (contents(target) if target.exists() else None) == before
            assert [path.name for path in tmp_path.iterdir()] == (["r"] if exists else [])
        restore(target, exists)
    assert failed >= 8


def failing_save(target):
    """Whether saving went well; a failure must be in the right words."""
    try:
        save(release("relaxed"), target, overwrite=True)
    except ResourceError as error:
        return "No space left" not in str(error)
    except KeyboardInterrupt:
        return False
    return True


def restore(target, exists):
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    if exists:
        save(release("answers"), target)
