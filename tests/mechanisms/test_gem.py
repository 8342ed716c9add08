"""GEM's own: what it measures and when, that it learns without noise, and that a release is what was fitted."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from anamorph import archive
from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError, WorkloadError
from anamorph.evaluation.errors import model_errors
from anamorph.mechanisms.gem import GEM
from anamorph.mechanisms.mechanism import mechanism
from anamorph.models.generator import Generator, GeneratorProjection
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (5, 3, 4, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
PAIRS = Workload((Marginals(SIZES, tuple(itertools.combinations(range(4), 2))),))
TINY = {"rows": 50, "latent": 4, "hidden": 16, "layers": 1, "rate": 0.01}
_RANDOM = np.random.default_rng(1)
_FIRST = _RANDOM.integers(0, 5, 4000)
CODES = np.stack([_FIRST, _FIRST % 3, _RANDOM.integers(0, 4, 4000), _FIRST > 2], axis=1).astype(np.int32)


def source():
    return TableSource(Table(CODES, SIZES), SCHEMA)


def fit(made, workload=PAIRS, epsilon=1.0, seed=0, **more):
    return made(Curator(source(), Budget(epsilon=epsilon, delta=1e-6), **more), workload, seed=seed)


def answers(model, workload=PAIRS):
    return np.concatenate(list(model.answers(workload)))


@pytest.mark.parametrize(
    "made",
    [
        GEM(rounds=5, per_round=1, steps=150, penalty=0.0, **TINY),
        GEM(rounds=10, per_round=6, blocks=False, steps=80, penalty=0.0, **TINY),
        GEM(rounds=5, per_round=9, steps=150, penalty=0.0, **TINY),
    ],
    ids=["blocks", "cells", "at once"],
)
def test_without_noise_the_truth_is_found(made):
    start = made.projection(1).init(SIZES, seed=0)
    (before,) = model_errors(source(), start, PAIRS)
    (after,) = model_errors(source(), fit(made, epsilon=1e8).model, PAIRS)
    assert after.max_error < 0.1 * before.max_error
    assert after.tv < 0.15 * before.tv


def test_a_saved_release_gives_the_same_answers_and_rows(tmp_path):
    found = fit(GEM(rounds=2, per_round=2, steps=20, **TINY))
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release").model
    assert isinstance(loaded, Generator)
    np.testing.assert_array_equal(answers(loaded), answers(found.model))
    for before, after in zip(
        (found.model.sample(300, seed=5), found.model.fresh(70, seed=6).sample(300, seed=7)),
        (loaded.sample(300, seed=5), loaded.fresh(70, seed=6).sample(300, seed=7)),
        strict=True,
    ):
        np.testing.assert_array_equal(before.codes, after.codes)


def test_the_public_seed_sets_the_network_and_nothing_of_the_noise():
    made = GEM(rounds=2, per_round=2, steps=20, **TINY)
    one, same, other = (fit(made, seed=seed, unsafe_seed=3) for seed in (0, 0, 1))
    np.testing.assert_array_equal(answers(one.model), answers(same.model))
    assert not np.array_equal(answers(one.model), answers(other.model))
    fresh = [fit(made, seed=0).measurements[0].values for _ in range(2)]
    assert not np.array_equal(*fresh)


def test_measurements_are_made_once_and_all_used(monkeypatch):
    seen = []
    plain = GeneratorProjection.fit

    def watched(self, model, measurements, *, seed=0):
        seen.append([measurement.values for measurement in measurements])
        return plain(self, model, measurements, seed=seed)

    monkeypatch.setattr(GeneratorProjection, "fit", watched)
    found = fit(GEM(rounds=4, per_round=3, blocks=False, steps=5, **TINY))
    assert [len(log) for log in seen] == [1, 2, 3, 4]
    for earlier, later in itertools.pairwise(seen):
        assert all(a is b for a, b in zip(earlier, later, strict=False))
    chosen = np.concatenate([m.workload.parts[0].chosen for m in found.measurements])
    assert np.unique(chosen).size == chosen.size == 12


def test_everything_is_measured_at_once_where_rounds_would_take_it_all():
    made = GEM(rounds=3, per_round=2, steps=7)
    (step,) = made.steps_for(PAIRS, 1.0)
    assert (step.kind, step.rho, step.blocks) == ("measure", 1.0, 6)
    assert made.schedule(PAIRS).steps == 21
    assert [step.kind for step in GEM(rounds=5, per_round=1).steps_for(PAIRS, 1.0)] == ["select", "measure"] * 5
    assert GEM(rounds=5, per_round=1, steps=7).schedule(PAIRS).steps == 7


def test_single_queries_and_smaller_marginals_may_be_measured():
    assert [type(part) for part in GEM(blocks=False).schedule(PAIRS).queries(PAIRS).parts] == [Cells]
    assert GEM(order=1).schedule(PAIRS).queries(PAIRS).parts[0].sets == ((0,), (1,), (2,), (3,))


def test_budgets_grow_and_never_exceed_the_whole():
    steps = GEM(rounds=5, per_round=1, growth=2.0, split=0.3).steps_for(PAIRS, 0.1)
    assert sum(Fraction(step.rho) for step in steps) <= Fraction(0.1)
    assert steps[-1].rho == pytest.approx(16 * steps[1].rho)
    assert steps[0].rho == pytest.approx(0.3 / 0.7 * steps[1].rho)


def test_whole_blocks_of_functions_are_not_selected():
    mixed = Workload((*PAIRS.parts, custom(lambda row: row["c1"], SCHEMA, name="mine:own")))
    with pytest.raises(WorkloadError, match="set blocks=false, or rounds=1"):
        GEM(rounds=2, per_round=1).steps_for(mixed, 1.0)
    assert GEM(rounds=1).steps_for(mixed, 1.0)[0].cells == PAIRS.cells + 3


def test_memory_grows_with_the_network_and_the_rows():
    needed = [made.memory(PAIRS) for made in (GEM(), GEM(hidden=1024), GEM(hidden=1024, rows=5000))]
    assert needed == sorted(set(needed))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": "0"}, r"rounds \(0\) must be a whole number of at least 1"),
        ({"per_round": "-3"}, r"per_round \(-3\) must be"),
        ({"blocks": "maybe"}, r"blocks \('maybe'\) must be true or false"),
        ({"order": "-1"}, r"order \(-1\) must be at least 0"),
        ({"split": "1.4"}, r"split \(1.4\) must be in \(0, 1\)"),
        ({"growth": "0.5"}, r"growth \(0.5\) must be in \[1, 10\]"),
        ({"prior": "1"}, r"prior \(1.0\) must be"),
        ({"rows": "0"}, r"rows \(0\) must be"),
        ({"steps": "0"}, r"steps \(0\) must be"),
        ({"latent": "0"}, r"latent \(0\) must be"),
        ({"hidden": "x"}, r"hidden \('x'\) must be a whole number"),
        ({"layers": "0"}, r"layers \(0\) must be"),
        ({"rate": "nan"}, r"rate \(nan\) must be"),
        ({"penalty": "-1"}, r"penalty \(-1.0\) must be"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        mechanism("gem", settings)
