"""DP-MERF on a small table with two numbers: what it measures, its release, and how near it comes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import save as encode

from anamorph import _console, archive
from anamorph.cli import invoke
from anamorph.columns import Codes, Numeric
from anamorph.curator.budget import Budget, gaussian_sigma
from anamorph.curator.cosines import Cosines
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import squared_sensitivity
from anamorph.errors import CorruptionError, ParameterError, WorkloadError
from anamorph.mechanisms.dp_merf import DPMERF, label_of, planned
from anamorph.mechanisms.mechanism import mechanism
from anamorph.models.mixed import Columns, MixedRows
from anamorph.planning import plan
from anamorph.queries.embeddings import Embedding, radians
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
SMALL = DPMERF(features=80, rows=100, steps=400, rate=5e-3, latent=6, hidden=48, length=0.1)
SPECS = {
    "label": "marginals:k=2,target=b; halfspaces:count=5,target=b",
    "none": "marginals:k=1; mixed:k=2,count=12,seed=1",
    "numbers": "mixed:k=1,count=6,seed=0",
    "thresholds": "thresholds:k=2,r=1,target=b",
}
WORKLOADS = {kind: parse_workload(spec, SCHEMA) for kind, spec in SPECS.items()}


def table_rows():
    random = np.random.default_rng(0)
    a = random.choice(3, N, p=[0.6, 0.3, 0.1])
    x = np.where(random.random(N) < 0.8, 6 * a + random.integers(0, 3, N), random.integers(0, 20, N))
    y = (random.beta(2, 8, N) * (1 << 20)).astype(np.int64)
    return np.stack([a, x, (x > 8) * 1, np.where(random.random(N) < 0.1, 1 << 20, y)], axis=1).astype(np.int32)


ROWS = table_rows()
COLUMNS = Columns(SCHEMA.sizes, (1, 3), (20, 1 << 20))


def release(made=SMALL, kind="label", relation="replace", epsilon=1.0, **more):
    source = TableSource(Table(ROWS, SCHEMA.sizes), SCHEMA)
    curator = Curator(source, Budget(epsilon=epsilon, delta=1e-6), neighbours=relation, **more)
    return made(curator, WORKLOADS[kind], seed=3)


@cache
def made_once(kind, relation="replace", epsilon=1.0):
    return release(kind=kind, relation=relation, epsilon=epsilon)


def test_the_label_is_the_column_that_all_queries_share():
    assert {kind: label_of(workload) for kind, workload in WORKLOADS.items()} == {
        "label": 2,
        "none": None,
        "numbers": None,
        "thresholds": 0,  # of one block: the first of its columns
    }


@pytest.mark.parametrize("relation", RELATIONS)
def test_one_measurement_of_the_whole_budget_is_all(relation):
    found = made_once("label", relation)
    assert [spend.kind for spend in found.privacy.spends] == ["total"] * (relation == "add-remove") + ["measure"]
    assert len(found.measurements) == 1
    assert isinstance(found.model, MixedRows)
    marginals, present, waves = found.measurements[0].workload.parts
    assert isinstance(marginals, Marginals)
    assert marginals.sets == ((2,), (2, 0))
    assert isinstance(present, NumberTests)
    assert (present.tally.given, present.tally.numbers) == ((2,), (3,))
    assert present.tally.bounds.tolist() == [[(1 << 20) - 1]], "every number passes"
    assert isinstance(waves, Embedding)
    assert (waves.tally.given, waves.tally.numbers, waves.tally.limits) == ((2,), (1, 3), (20, 1 << 20))
    assert waves.cells == 2 * 2 * 80


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("coded", [1.0, 0.25])
def test_the_noise_is_the_same_on_the_scale_of_the_embedding(relation, coded):
    """Over sqrt D for cosines, over sqrt d for one-hot vectors: sigma^2 = (1 + a) / (2 rho), or (4 + 2 a)."""
    found = release(replace(SMALL, coded=coded, steps=1), relation=relation)
    (measured,) = found.measurements
    rho = found.privacy.spends[-1].rho
    squared = (1 + coded) if relation == "add-remove" else 4 + 2 * coded
    counts = measured.sigma * measured.total
    assert counts[-1] / np.sqrt(80) == pytest.approx(np.sqrt(squared / (2 * rho)))
    assert counts[:-1] * np.sqrt(coded / 3) == pytest.approx(np.full(3, np.sqrt(squared / (2 * rho))))
    pieces = list(measured.workload.pieces())
    exact = squared_sensitivity([piece.tally for piece in pieces], relation, [piece.weight for piece in pieces])
    assert exact == Fraction(squared)


def test_frequencies_have_lengths_between_the_shortest_and_the_longest():
    made = DPMERF(features=4000, length=0.05, longest=2.0)
    part = made.queries(COLUMNS, None, seed=0).parts[-1]
    assert isinstance(part, Embedding)
    found = radians(replace(part.tally, frequencies=part.tally.frequencies[:, 1:], numbers=(3,), limits=(1 << 20,)))
    for index, length in ((slice(0, 400), 0.06), (slice(1800, 2200), 0.05**0.5 * 2**0.5), (slice(3600, 4000), 1.67)):
        assert np.std(found[index]) * length == pytest.approx(1, abs=0.15)
    assert np.corrcoef(radians(part.tally).T)[0, 1] == pytest.approx(0, abs=0.08)
    single = replace(made, length=0.3, longest=0.3).queries(COLUMNS, None, seed=0).parts[-1]
    assert isinstance(single, Embedding)
    assert np.std(radians(single.tally)[:, 1]) == pytest.approx(1 / 0.3, rel=0.05)


def test_frequencies_follow_the_seed_and_not_the_rows():
    tallies = [SMALL.queries(COLUMNS, 2, seed=seed).parts[-1] for seed in (3, 3, 4)]
    digests = [Workload((part,)).digest for part in tallies]
    assert digests[0] == digests[1] != digests[2]
    assert Workload(made_once("label").measurements[0].workload.parts[-1:]).digest == digests[0]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_with_hardly_any_noise_columns_come_to_the_truth(kind, relation):
    found = made_once(kind, relation, 1e7)
    table = found.model.sample(20_000, seed=0).codes
    for column in (0, 2):
        truth = np.bincount(ROWS[:, column], minlength=3) / N
        np.testing.assert_allclose(np.bincount(table[:, column], minlength=3) / 20_000, truth, atol=0.02)
    missing = table[:, 3] == 1 << 20
    assert missing.mean() == pytest.approx(np.mean(ROWS[:, 3] == 1 << 20), abs=0.02)
    assert table[:, 1].mean() == pytest.approx(ROWS[:, 1].mean(), abs=0.5)
    present = ROWS[ROWS[:, 3] < 1 << 20, 3] / (1 << 20)
    assert np.mean(table[~missing, 3] / (1 << 20)) == pytest.approx(present.mean(), abs=0.02)
    for level in (0.1, 0.5, 0.9):
        assert np.quantile(table[~missing, 3] / (1 << 20), level) == pytest.approx(
            np.quantile(present, level), abs=0.05
        )


def test_with_a_label_numbers_and_codes_go_with_it():
    table = made_once("label", "replace", 1e7).model.sample(20_000, seed=0).codes
    for y in (0, 1):
        real, made = ROWS[ROWS[:, 2] == y], table[table[:, 2] == y]
        assert made[:, 1].mean() == pytest.approx(real[:, 1].mean(), abs=0.5)
        truth = np.bincount(real[:, 0], minlength=3) / len(real)
        np.testing.assert_allclose(np.bincount(made[:, 0], minlength=3) / len(made), truth, atol=0.03)


@pytest.mark.parametrize("kept", [(0, 2), (1, 3), (1,), (3, 2)])
def test_codes_alone_numbers_alone_and_a_label_with_a_number(kept):
    schema = Schema(tuple(SCHEMA.columns[i] for i in kept), dataset="rows")
    spec = "marginals:k=1" if 2 in kept else "mixed:k=1,count=4"
    curator = Curator(TableSource(Table(ROWS[:, kept], schema.sizes), schema), Budget(epsilon=1e7, delta=1e-6))
    workload = parse_workload(spec, schema)
    found = SMALL(curator, workload, seed=0)
    table = found.model.sample(10_000, seed=1).codes
    for place, column in enumerate(kept):
        real = ROWS[:, column]
        if column in (1, 3):
            limit = (20, 1 << 20)[column == 3]
            assert np.mean(table[:, place] == limit) == pytest.approx(np.mean(real == limit), abs=0.02)
            means = [np.mean(codes[codes < limit]) / limit for codes in (table[:, place], real)]
            assert means[0] == pytest.approx(means[1], abs=0.03)
        else:
            truth = np.bincount(real, minlength=3) / N
            np.testing.assert_allclose(np.bincount(table[:, place], minlength=3) / 10_000, truth, atol=0.02)


@pytest.mark.parametrize("kind", SPECS)
def test_the_plan_is_what_is_measured(kind):
    (step,) = SMALL.steps_for(WORKLOADS[kind], 0.1)
    (measured,) = made_once(kind).measurements
    assert measured.workload.cells <= step.cells
    figures = plan(SCHEMA, SPECS[kind], SMALL, Budget(epsilon=1.0, delta=1e-6), neighbours="replace", rows=N)
    (planned_step,) = figures["steps"]
    assert planned_step["rho"] == made_once(kind).privacy.spends[0].rho
    heaviest = max(measured.workload.weights)
    sigma = measured.sigma[int(np.argmax([piece.weight == heaviest for piece in measured.workload.pieces()]))] * N
    if kind != "thresholds":  # which tells nothing of the numbers
        assert planned_step["sigma_counts"] == pytest.approx(sigma)
    assert figures["memory_bytes"] > 400 << 20


def test_columns_that_a_workload_tells_nothing_of_are_guessed_by_their_size():
    sizes = (3, 2000, 2, 1025)
    only = Workload((Marginals(sizes, ((0,), (3,))),))
    assert planned(only).numbers == (1,)
    tested = planned(WORKLOADS["label"])
    assert tested.numbers == (1, 3)
    assert planned(Workload((Marginals((3, 4), ((0,),)),))).numbers == ()


def test_a_budget_is_spent_in_full():
    budget = Budget(epsilon=1.0, delta=1e-6)
    found = made_once("label")
    assert found.privacy.spent == budget.rho
    (measured,) = found.measurements
    assert measured.sigma[-1] * N == pytest.approx(gaussian_sigma(6 * 80, budget.rho))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "0"}, r"features \(0\) must be"),
        ({"features": "x"}, r"features \('x'\) must be a whole number"),
        ({"length": "0"}, r"length \(0.0\) must be a number from"),
        ({"length": "nan"}, r"length \(nan\) must be"),
        ({"length": "2"}, r"longest \(1.0\) must be at least length \(2.0\)"),
        ({"longest": "inf"}, r"longest \(inf\) must be"),
        ({"coded": "-1"}, r"coded \(-1.0\) must be"),
        ({"rows": "0"}, r"rows \(0\) must be"),
        ({"steps": "0"}, r"steps \(0\) must be"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        mechanism("dp-merf", settings)


def test_single_queries_are_refused_before_anything_is_spent():
    single = Workload((Marginals(SCHEMA.sizes, ((0,),)).by_cell(),))
    with pytest.raises(WorkloadError, match="the workload must be of whole marginals, thresholds and tests of numbers"):
        SMALL.steps_for(single, 0.1)


@pytest.fixture(name="saved")
def _saved(tmp_path):
    archive.save(made_once("label"), tmp_path / "r")
    return tmp_path / "r"


def test_a_release_comes_back_whole(saved):
    before, after = made_once("label"), archive.load(saved)
    (old,), (new,) = before.measurements, after.measurements
    assert old.workload.digest == new.workload.digest
    assert old.workload.weights == new.workload.weights
    assert np.array_equal(old.values, new.values)
    assert np.array_equal(old.sigma, new.sigma)
    assert type(new.workload.parts[-1].tally) is Cosines
    assert before.model.sample(40, seed=0).codes.tolist() == after.model.sample(40, seed=0).codes.tolist()


def rewrite(directory, change):
    header = json.loads((directory / archive.HEADER).read_bytes())
    del header["checksum"]
    change(header)
    (directory / archive.HEADER).write_bytes(archive.render(header))


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": [1]},
        {"numbers": [1, 4]},
        {"numbers": [1, -1]},
        {"numbers": [1, 2]},
        {"numbers": [1, 1]},
        {"numbers": [1.0, 3]},
        {"numbers": ["1", 3]},
        {"numbers": 1},
        {"given": []},
        {"given": [0]},
        {"given": [True]},
        {"given": [2, 2]},
        {"given": None},
        {"limits": [20]},
        {"limits": [21, 1 << 20]},
        {"limits": [0, 1 << 20]},
        {"limits": [20.0, 1 << 20]},
        {"else": 1},
    ],
)
def test_headers_of_embeddings_that_are_none_are_refused(saved, change):
    rewrite(saved, lambda header: header["measurements"][0]["parts"][-1]["embedding"].update(change))
    with pytest.raises(CorruptionError):
        archive.load(saved)


@pytest.mark.parametrize("described", [None, 1, [], {}, {"given": [2], "numbers": [1, 3]}])
def test_what_describes_no_embedding_is_refused(saved, described):
    rewrite(saved, lambda header: header["measurements"][0]["parts"][-1].update(embedding=described))
    with pytest.raises(CorruptionError):
        archive.load(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        lambda array: array[:-1],
        lambda array: array[:, :1],
        lambda array: array.ravel(),
        lambda array: array.astype(np.float64),
        lambda array: array.astype(np.int32),
        lambda array: array[:0],
    ],
)
def test_frequencies_that_are_none_are_refused(saved, change):
    name = archive.ARRAYS[1]
    arrays = archive.decode((saved / name).read_bytes(), saved)
    changed = change(arrays.pop("frequencies.0.2"))
    content = encode(arrays if changed is None else arrays | {"frequencies.0.2": np.ascontiguousarray(changed)})
    (saved / name).write_bytes(content)
    rewrite(saved, lambda header: header["files"].update({name: hashlib.sha256(content).hexdigest()}))
    with pytest.raises(CorruptionError):
        archive.load(saved)


def run(capsys, *arguments):
    capsys.readouterr()
    code = _console.guarded(lambda: invoke(list(arguments)), debug=False)
    return code, capsys.readouterr()


def test_the_command_line_makes_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    lines = [
        f"{'yes' if label else 'no'},{'' if absent else 20 + 50 * label + random.integers(10)},{random.integers(3)}"
        for label, absent in zip(random.random(800) < 0.4, random.random(800) < 0.2, strict=True)
    ]
    (tmp_path / "data.csv").write_text("\n".join(["sold,price,kind", *lines]) + "\n")
    (tmp_path / "schema.yaml").write_text(
        "dataset: shop\ncolumns:\n"
        "  sold: {type: categorical, categories: ['no', 'yes']}\n"
        "  price: {type: numeric, lower: 0, upper: 100, integer: true, native: true, missing: true}\n"
        "  kind: {type: codes, values: 3}\n"
    )
    small = ["--set", "rows=100", "--set", "steps=300", "--set", "features=60", "--set", "rate=0.01"]
    spec = ["--schema", "schema.yaml", "--workload", "marginals:k=2,target=sold", "--mechanism", "dp-merf"]
    budget = ["--epsilon", "20", "--delta", "1e-6"]
    code, said = run(capsys, "plan", *spec[1:], *budget, *small, "--json")
    assert code == 0, said.err
    assert json.loads(said.out)["steps"][0]["kind"] == "measure"
    code, said = run(capsys, "fit", "data.csv", *spec, *budget, *small, "-o", "out")
    assert code == 0, said.err
    code, said = run(capsys, "sample", "out", "--rows", "500", "-o", "rows.csv")
    assert code == 0, said.err
    head, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert head.replace('"', "") == "sold,price,kind"
    cells = [row.replace('"', "").split(",") for row in rows]
    prices = {label: [float(c[1]) for c in cells if c[0] == label and c[1]] for label in ("no", "yes")}
    assert len(rows) == 500
    assert {c[2] for c in cells} == {"0", "1", "2"}
    assert 0.1 < np.mean([c[1] == "" for c in cells]) < 0.3
    assert np.median(prices["no"]) == pytest.approx(24.5, abs=8)
    assert np.median(prices["yes"]) == pytest.approx(74.5, abs=8)
    code, said = run(capsys, "query", "out", "sold = 'yes'", "--json")
    assert code == 0, said.err
