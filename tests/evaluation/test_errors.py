"""True errors equal their definitions, for models and for rows."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from anamorph.columns import Codes
from anamorph.datasets import benchmark, benchmark_directory
from anamorph.errors import SchemaError
from anamorph.evaluation import errors as module
from anamorph.evaluation.errors import Counted, Errors, compare, dense_errors, merged, model_errors, row_errors
from anamorph.evaluation.scoring import score
from anamorph.models.answers import Zero
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.bands import Banded
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Privacy, Release
from anamorph.schema import Schema
from anamorph.sources import TableSource, open_source
from anamorph.table import Table

SIZES = (3, 4, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
RANDOM = np.random.default_rng(1)
WORKLOAD = Workload((Marginals(SIZES, ((0, 1), (1, 2))),))


def rows(n):
    codes = np.stack([RANDOM.integers(0, size, n) for size in SIZES], axis=1).astype(np.int32)
    return TableSource(Table(codes, SIZES), SCHEMA), codes


def fractions(codes, features):
    dense = np.zeros([SIZES[f] for f in features])
    np.add.at(dense, tuple(codes[:, f] for f in features), 1 / len(codes))
    return dense.ravel()


def test_the_errors_of_rows_are_their_definitions():
    (truth, real), (made, synthetic) = rows(70), rows(31)
    wrong = [np.abs(fractions(real, f) - fractions(synthetic, f)) for f in ((0, 1), (1, 2))]
    (found,) = row_errors(truth, made, WORKLOAD)
    assert found.queries == 20
    assert found.max_error == pytest.approx(np.max(np.concatenate(wrong)))
    assert found.mean_error == pytest.approx(np.mean(np.concatenate(wrong)))
    assert found.tv == pytest.approx(np.mean([w.sum() / 2 for w in wrong]))


def test_marginals_of_bands_have_a_total_variation():
    """They are the marginals of columns whose codes are the bands."""
    (truth, real), (made, synthetic) = rows(70), rows(31)
    bands = Workload((Banded(SIZES, ((0, 1), (1, 2)), ((), (1, 3), ())),))
    wrong = []
    for features in ((0, 1), (1, 2)):
        shape = [SIZES[f] for f in features]
        dense = (fractions(real, features) - fractions(synthetic, features)).reshape(shape)
        wrong.append(np.abs(np.add.reduceat(dense, [0, 1, 3], axis=features.index(1))))
    (found,) = row_errors(truth, made, bands)
    assert (found.queries, found.blocks) == (9 + 6, 2)
    assert found.mean_error == pytest.approx(sum(w.sum() for w in wrong) / 15)
    assert found.max_error == pytest.approx(max(w.max() for w in wrong))
    assert found.tv == pytest.approx(np.mean([w.sum() / 2 for w in wrong]))


def test_zero_is_off_by_half_in_total_variation():
    truth, real = rows(50)
    (found,) = model_errors(truth, Zero(SIZES), WORKLOAD)
    assert found.tv == pytest.approx(0.5)
    assert found.max_error == pytest.approx(max(fractions(real, f).max() for f in ((0, 1), (1, 2))))


def test_the_truth_has_no_error():
    truth, _ = rows(50)
    assert [part.max_error for part in row_errors(truth, truth, WORKLOAD)] == [0]


def test_answers_must_be_of_the_workload():
    truth, _ = rows(5)

    class Short:
        def answers(self, workload):
            yield from ()

    with pytest.raises(ValueError, match="zip"):
        compare(truth, Short(), WORKLOAD, None)


def test_a_release_is_scored_with_its_own_schema():
    other = Schema((Codes(name="x", values=3),))
    promise = Privacy("replace", 1.0, 1e-6, 0.01, ())
    release = Release(SCHEMA, Zero(SIZES), (), promise, 0.0)
    with pytest.raises(SchemaError, match="must be the one of the release"):
        score(release, rows(5)[0], other, "marginals:k=1")


def relaxed(sizes, n=6, seed=0, empty=0.3):
    """A relaxed table some of whose probabilities are 0."""
    generator = np.random.default_rng(seed)
    blocks = []
    for size in sizes:
        block = generator.dirichlet(np.full(size, 0.5), n).T
        block *= generator.random(block.shape) > empty
        block[0] += block.sum(axis=0) == 0
        blocks.append(block / block.sum(axis=0))
    return RelaxedRows(
        sizes, np.concatenate(blocks).astype(np.float32), generator.dirichlet(np.ones(n)).astype(np.float32)
    )


def close(found, wanted):
    assert (found.queries, found.blocks) == (wanted.queries, wanted.blocks)
    for name in ("max_error", "mean_error", "tv"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=2e-6), name


@pytest.mark.parametrize("seed", range(6))
def test_large_marginals_of_a_table_are_compared_on_their_supports(monkeypatch, seed):
    """By bounds and by the cells of rows alone, and it is as if all cells were."""
    generator = np.random.default_rng(seed)
    sizes = tuple(generator.integers(2, 9, 4).tolist())
    sets = ((0, 1), (3, 0, 2), (0, 1, 2, 3))
    n = int(generator.choice([1, 5, 80]))
    codes = np.stack([generator.integers(0, size, n) for size in sizes], axis=1).astype(np.int32)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    truth, made = TableSource(Table(codes, sizes), schema), relaxed(sizes, seed=seed)
    work = Workload((Marginals(sizes, sets[:2]), Marginals(sizes, sets[2:])), limit=int(generator.integers(1, 50)))
    dense = model_errors(truth, made, work)
    monkeypatch.setattr(module, "LARGE", 0)
    seen = []
    sparse_errors = module.sparse_errors
    monkeypatch.setattr(module, "sparse_errors", lambda *given: seen.append(1) or sparse_errors(*given))
    for found, wanted in zip(model_errors(truth, made, work), dense, strict=True):
        close(found, wanted)
    assert len(seen) == 3
    other = TableSource(Table(codes[generator.integers(0, n, 30)] % np.array(sizes), sizes), schema)
    for part, found in zip(work.parts, row_errors(truth, other, work), strict=True):
        alone = Workload((part,))
        close(found, dense_errors(truth, Counted(other).answers(alone), alone))
    assert len(seen) == 6


def test_against_no_rows_all_that_is_released_is_wrong():
    empty = TableSource(Table(np.zeros((0, 3), np.int32), SIZES), SCHEMA)
    made, _ = rows(30)
    (found,) = row_errors(empty, made, WORKLOAD)
    assert found.tv == pytest.approx(0.5)
    assert found.mean_error == pytest.approx(2 / 20)


def any_of(row):
    return 1 - (1 - row["c0"][1]) * (1 - row["c1"])


def halves(row):
    return jnp.stack([row["c2"][0] / 2, row["c0"][2] * row["c1"][3]])


MIXED = Workload(
    (
        Marginals(SIZES, ((0, 1), (1, 2))),
        Thresholds(SIZES, ((0, 1, 2), (2, 0, 1)), 2),
        custom(any_of, SCHEMA),
        custom(halves, SCHEMA),
    )
)


def exact(codes, part):
    """The fractions of each block, by definition."""
    if isinstance(part, Thresholds):
        found = []
        for features in part.sets:
            cells = np.stack(np.unravel_index(np.arange(24), [SIZES[f] for f in features]), axis=1)
            alike = np.sum(codes[:, None, list(features)] == cells[None], axis=2)
            found.append(np.mean(alike >= part.least, axis=0))
        return found
    if isinstance(part, Marginals):
        return [fractions(codes, features) for features in part.sets]
    function = any_of if part.function.name.endswith("any_of") else halves
    return [np.mean([np.asarray(function(row)).ravel() for row in one_hot(codes)], axis=0)]


def one_hot(codes):
    for row in codes:
        yield {f"c{i}": (np.arange(size) == row[i]).astype(np.float32) for i, size in enumerate(SIZES)}


@pytest.mark.parametrize("weights", [(), (1, 5, 2, 1)])
@pytest.mark.parametrize("limit", [5, 1 << 22])
def test_each_part_of_a_mixed_workload_has_its_errors(weights, limit):
    (truth, real), (made, synthetic) = rows(40), rows(23)
    found = row_errors(truth, made, replace(MIXED, weights=weights, limit=limit))
    every, distances = [], []
    for part, errors in zip(MIXED.parts, found, strict=True):
        wrong = [np.abs(a - b) for a, b in zip(exact(real, part), exact(synthetic, part), strict=True)]
        flat = np.concatenate(wrong)
        tv = np.mean([block.sum() / 2 for block in wrong]) if type(part) is Marginals else None
        distances += [block.sum() / 2 for block in wrong] if tv is not None else []
        close(errors, Errors(flat.size, flat.max(), flat.mean(), tv, len(wrong)))
        every += wrong
    flat = np.concatenate(every)
    close(merged(found), Errors(flat.size, flat.max(), flat.mean(), np.mean(distances), len(every)))


def test_single_queries_are_compared_at_once():
    truth, _ = rows(40)
    model = relaxed(SIZES)
    for whole, single in zip(
        model_errors(truth, model, MIXED), model_errors(truth, model, MIXED.by_cell()), strict=True
    ):
        close(replace(single, tv=whole.tv, blocks=whole.blocks), whole)
        assert single.blocks == whole.queries
        assert single.tv is None


def test_the_parts_of_a_mixed_workload_are_scored_by_name():
    truth, _ = rows(60)
    model = relaxed(SIZES)
    release = Release(SCHEMA, model, (), Privacy("replace", 1.0, 1e-6, 0.01, ()), 60.0)
    spec = "marginals:k=1; thresholds:k=2,r=1,weight=3"
    frame = pd.DataFrame(truth._table.codes, columns=list(SCHEMA.names))
    figures = score(release, frame, SCHEMA, spec)
    assert [part["workload"] for part in figures["parts"]] == ["marginals:k=1", "thresholds:k=2,r=1,weight=3"]
    assert sum(part["queries"] for part in figures["parts"]) == figures["queries"] == 9 + 26
    assert figures["max_error"] == max(part["max_error"] for part in figures["parts"])
    expected = [found.to_dict() for found in model_errors(truth, model, workload(spec, SCHEMA))]
    assert [{k: v for k, v in part.items() if k != "workload"} for part in figures["parts"]] == expected
    assert set(figures["rows"]) == {"count", "max_error", "mean_error", "tv"}
    assert "parts" not in score(release, frame, SCHEMA, "marginals:k=1")


def test_parts_have_numbers_where_a_column_has_a_semicolon(tmp_path):
    schema = Schema((Codes(name="a;b", values=2), Codes(name="c", values=3)))
    (tmp_path / "w.yaml").write_text("['marginals:of=a;b', 'marginals:of=c']")
    release = Release(schema, Zero((2, 3)), (), Privacy("replace", 1.0, 1e-6, 0.01, ()), 0.0)
    frame = pd.DataFrame({"a;b": [0, 1], "c": [2, 2]})
    figures = score(release, frame, schema, str(tmp_path / "w.yaml"))
    assert [(part["workload"], part["max_error"]) for part in figures["parts"]] == [("part 1", 0.5), ("part 2", 1.0)]


@pytest.mark.skipif(benchmark_directory() is None, reason="the public benchmark data is not here (ANAMORPH_DATA)")
def test_all_zero_has_the_known_error_on_adult():
    path, schema = benchmark("adult")
    with open_source(path, schema) as truth:
        (found,) = model_errors(truth, Zero(schema.sizes), workload("marginals:k=3,count=64,seed=0", schema))
    assert found.queries == 2_492_287
    assert found.max_error == pytest.approx(0.70746, abs=1e-5)
    assert found.mean_error == pytest.approx(2.57e-5, rel=0.01)
