"""True errors equal their definitions, for models and for rows."""

from __future__ import annotations

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.datasets import benchmark, benchmark_directory
from anamorph.errors import SchemaError
from anamorph.evaluation.errors import compare, model_errors, row_errors
from anamorph.evaluation.scoring import score
from anamorph.models.answers import Zero
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload
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
    found = row_errors(truth, made, WORKLOAD)
    assert found.queries == 20
    assert found.max_error == pytest.approx(np.max(np.concatenate(wrong)))
    assert found.mean_error == pytest.approx(np.mean(np.concatenate(wrong)))
    assert found.tv == pytest.approx(np.mean([w.sum() / 2 for w in wrong]))


def test_zero_is_off_by_half_in_total_variation():
    truth, real = rows(50)
    found = model_errors(truth, Zero(SIZES), WORKLOAD)
    assert found.tv == pytest.approx(0.5)
    assert found.max_error == pytest.approx(max(fractions(real, f).max() for f in ((0, 1), (1, 2))))


def test_the_truth_has_no_error():
    truth, _ = rows(50)
    assert row_errors(truth, truth, WORKLOAD).max_error == 0


def test_answers_must_be_of_the_workload():
    truth, _ = rows(5)
    with pytest.raises(ValueError, match="zip"):
        compare(truth, iter([np.zeros(12)]), WORKLOAD)


def test_a_release_is_scored_with_its_own_schema():
    other = Schema((Codes(name="x", values=3),))
    promise = Privacy("replace", 1.0, 1e-6, 0.01, ())
    release = Release(SCHEMA, Zero(SIZES), (), promise, 0.0)
    with pytest.raises(SchemaError, match="must be the one of the release"):
        score(release, rows(5)[0], other, "marginals:k=1")


@pytest.mark.skipif(benchmark_directory() is None, reason="the public benchmark data is not here (ANAMORPH_DATA)")
def test_all_zero_has_the_known_error_on_adult():
    path, schema = benchmark("adult")
    with open_source(path, schema) as truth:
        found = model_errors(truth, Zero(schema.sizes), workload("marginals:k=3,count=64,seed=0", schema))
    assert found.queries == 2_492_287
    assert found.max_error == pytest.approx(0.70746, abs=1e-5)
    assert found.mean_error == pytest.approx(2.57e-5, rel=0.01)
