"""What every mechanism must do, on every kind of workload: one row of a table buys all of these tests."""

from __future__ import annotations

import itertools
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from anamorph import archive
from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.ledger import Ledger
from anamorph.curator.tallies import count, grid
from anamorph.errors import AnamorphError, ParameterError, WorkloadError
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.all_zero import AllZero
from anamorph.mechanisms.auto import Auto
from anamorph.mechanisms.dp_merf import DPMERF
from anamorph.mechanisms.dqrs import DQRS
from anamorph.mechanisms.dual_query import DualQuery
from anamorph.mechanisms.fem import FEM
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.gem import GEM
from anamorph.mechanisms.hdmm import HDMM
from anamorph.mechanisms.independent import Independent
from anamorph.mechanisms.mechanism import NAMES, description, mechanism
from anamorph.mechanisms.mst import MST
from anamorph.mechanisms.mwem import MWEM
from anamorph.mechanisms.mwem_pgm import MWEMPGM
from anamorph.mechanisms.rap import RAP
from anamorph.mechanisms.rap_plus_plus import RAPPlusPlus
from anamorph.mechanisms.sep_fem import SepFEM
from anamorph.queries.bands import Banded
from anamorph.queries.custom import Recorded, custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SMALL = {"rows": 40, "steps": 30, "rate": 0.02}
NETWORK = {"latent": 4, "hidden": 16, "layers": 1}
# mechanism, whether it makes rows, whether its answers approach the truth as the budget grows
TABLE = {
    "all-zero": (AllZero(), False, False),
    "auto": (Auto(rows=40), True, True),
    "auto for the largest error": (Auto(rows=40, effort=2.0, objective="max"), True, False),
    "gaussian": (Gaussian(), False, True),
    "gaussian cells": (Gaussian(blocks=False), False, True),
    "rap cells": (RAP(rounds=3, per_round=4, **SMALL), True, False),
    "rap blocks": (RAP(rounds=2, per_round=1, blocks=True, **SMALL), True, False),
    "rap at once": (RAP(rounds=1, blocks=True, simplex="softmax", rows=60, steps=800, rate=0.05), True, True),
    "rap cells at once": (
        RAP(rounds=1, row_weights=True, simplex="softmax", penalty=1e-4, **SMALL),
        True,
        False,
    ),
    "rap++": (RAPPlusPlus(rounds=2, marginal_rounds=2, per_round=1, levels=2, **SMALL), True, False),
    "dp-merf": (DPMERF(features=20, **SMALL, **NETWORK), True, False),
    "gem blocks": (GEM(rounds=2, per_round=1, **SMALL, **NETWORK), True, False),
    "gem cells": (GEM(rounds=3, per_round=4, blocks=False, **SMALL, **NETWORK), True, False),
    "gem at once": (GEM(rounds=1, penalty=0.0, rows=60, steps=800, rate=0.01, latent=4, hidden=32), True, True),
    "hdmm": (HDMM(), False, True),
    "hdmm residuals": (HDMM(strategy="residuals"), False, True),
    "hdmm max": (HDMM(objective="max", strategy="residuals"), False, True),
    "hdmm local": (HDMM(inference="local", iterations=50), False, True),
    "hdmm graphical": (HDMM(inference="graphical", iterations=2000), True, True),
    "hdmm graphical residuals": (HDMM(inference="graphical", strategy="residuals", iterations=50), True, False),
    "independent": (Independent(), True, False),
    "mst": (MST(iterations=50), True, False),
    "mwem": (MWEM(rounds=12, history=100), True, True),
    "mwem cells": (MWEM(rounds=4, blocks=False), True, False),
    "mwem as printed": (MWEM(rounds=3, blocks=False, history=0, average=True, step="paper", split=0.5), True, False),
    "mwem-pgm": (MWEMPGM(rounds=2, iterations=50), True, False),
    "aim": (AIM(rounds=2, iterations=50), True, False),
    "fem": (FEM(eps0=0.1, samples=4), True, False),
    "sepfem": (SepFEM(eps0=0.1, samples=4), True, False),
    "dualquery": (DualQuery(rounds=12, samples=6), True, False),
    "dqrs": (DQRS(rounds=12, samples=6), True, False),
}
GAME = ("fem", "sepfem", "dualquery", "dqrs")
GRAPHICAL = ("independent", "mst", "mwem", "mwem cells", "mwem as printed", "mwem-pgm", "aim")
NOISY = [made for made, *_ in TABLE.values() if made.name != "all-zero"]
RELATIONS = ("replace", "add-remove")

SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate((3, 4, 2))), dataset="rows")
SPEC = "marginals:k=2"
_RANDOM = np.random.default_rng(5)
_FIRST = _RANDOM.integers(0, 3, 3000)
ROWS = np.stack([_FIRST, np.where(_RANDOM.random(3000) < 0.7, _FIRST, 3), _RANDOM.integers(0, 2, 3000)], axis=1)


def any_of(row):
    return 1 - (1 - row["c0"][0]) * (1 - row["c1"])


def halves(row):
    return jnp.stack([row["c2"][1] / 2, row["c0"][2] * row["c2"][0]])


WORKLOADS = {
    "marginals": parse_workload(SPEC, SCHEMA),
    "thresholds": parse_workload("thresholds:k=2,r=1; thresholds:k=3,r=2,weight=3", SCHEMA),
    "mixed": Workload(
        (
            Marginals(SCHEMA.sizes, ((0, 1), (1, 2))),
            custom(any_of, SCHEMA),
            Thresholds(SCHEMA.sizes, ((0, 1, 2),), 2),
            custom(halves, SCHEMA),
        ),
        "of many kinds",
        (Fraction(1), Fraction(1, 2), Fraction(3), Fraction(1)),
    ),
}
MATRIX = tuple(name for name in TABLE if name.startswith("hdmm"))
BLOCKS = ("gaussian", "gaussian cells", "rap blocks", "rap++", "dp-merf", "gem blocks")
REFUSED = {(name, "mixed") for name in (*BLOCKS, *GRAPHICAL, *MATRIX, *GAME)}
"""Noisy answers are kept of marginals and thresholds; only those are selected in whole blocks, have a graph, or are
known to an oracle."""
CASES = [(name, kind) for name in TABLE for kind in WORKLOADS if (name, kind) not in REFUSED]


def source() -> TableSource:
    return TableSource(Table(ROWS.astype(np.int32), SCHEMA.sizes), SCHEMA)


def release(made, relation="replace", epsilon=1.0, kind="marginals", **more):
    curator = Curator(source(), Budget(epsilon=epsilon, delta=1e-6), neighbours=relation, **more)
    return made(curator, WORKLOADS[kind], seed=3)


@cache
def made_once(name, kind, relation="replace"):
    """A release that several tests look at."""
    return release(TABLE[name][0], relation, kind=kind)


def answers(found, kind="marginals"):
    return np.concatenate([np.asarray(part) for part in found.model.answers(WORKLOADS[kind])])


def truth(kind="marginals"):
    tallies = [piece.tally for piece in WORKLOADS[kind].pieces()]
    return np.concatenate([count(tally, source()) / 2.0 ** grid(tally) for tally in tallies]) / 3000


@pytest.fixture(params=TABLE, name="row")
def _row(request):
    return TABLE[request.param]


@pytest.fixture(params=CASES, name="case", ids=" on ".join)
def _case(request):
    return request.param


def test_every_name_has_a_row():
    assert set(NAMES) <= {made.name for made, *_ in TABLE.values()}
    assert all(mechanism(name).name == name for name in NAMES)


@pytest.mark.parametrize("relation", RELATIONS)
def test_what_is_spent_is_within_the_budget_and_on_record(case, relation, tmp_path):
    made = TABLE[case[0]][0]
    ledger = Ledger(tmp_path / "ledger")
    found = release(made, relation, kind=case[1], ledger=ledger, terms=description(made))
    rho = Fraction(Budget(epsilon=1.0, delta=1e-6).rho)
    assert sum(Fraction(spend.rho) for spend in found.privacy.spends) <= rho
    entries = ledger.entries("rows")
    assert [(entry.kind, entry.rho) for entry in entries] == [(spend.kind, spend.rho) for spend in found.privacy.spends]
    if made.name != "all-zero":
        assert sum(Fraction(spend.rho) for spend in found.privacy.spends) > rho * Fraction(99, 100)


def test_the_plan_is_what_is_spent(case):
    name, kind = case
    budget = Budget(epsilon=1.0, delta=1e-6)
    planned = TABLE[name][0].steps_for(WORKLOADS[kind], budget.rho)
    found = made_once(name, kind)
    assert [step.kind for step in planned] == [spend.kind for spend in found.privacy.spends]
    assert [step.rho for step in planned] == pytest.approx([spend.rho for spend in found.privacy.spends])
    cells = [step.cells for step in planned if step.kind == "measure"]
    assert all(m.workload.cells <= most for m, most in zip(found.measurements, cells, strict=True))


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_release_survives_saving_and_loading(case, relation, tmp_path):
    found = made_once(*case, relation)
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release")
    assert np.allclose(answers(loaded, case[1]), answers(found, case[1]), atol=1e-6)
    assert loaded.privacy == found.privacy
    assert loaded.mechanism == found.mechanism
    for before, after in zip(found.measurements, loaded.measurements, strict=True):
        assert np.array_equal(before.values, after.values)
        assert np.array_equal(before.sigma, after.sigma)
        assert before.workload.weights == after.workload.weights
        assert (before.workload.blocks, before.workload.cells) == (after.workload.blocks, after.workload.cells)
        if not any(isinstance(part, Recorded) for part in after.workload.parts):  # functions are known by name alone
            assert before.workload.digest == after.workload.digest


@pytest.mark.parametrize(("name", "kind"), sorted(REFUSED))
@pytest.mark.parametrize("relation", RELATIONS)
def test_workloads_that_do_not_suit_are_refused_before_anything_is_spent(name, kind, relation):
    curator = Curator(source(), Budget(epsilon=1.0, delta=1e-6), neighbours=relation)
    with pytest.raises(WorkloadError, match=r"the workload must be of (whole )?marginals(,| and) thresholds"):
        TABLE[name][0](curator, WORKLOADS[kind], seed=0)
    assert curator.privacy().spends == ()


BANDS = Workload((Banded(SCHEMA.sizes, ((0, 1), (1, 2)), ((), (2,), ())),))


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name][0].name not in ("all-zero", "auto", "rap++")])
def test_bands_of_numbers_are_refused_before_anything_is_spent(name):
    """By all but the mechanisms for numbers, in the plan as in the run."""
    made, curator = TABLE[name][0], Curator(source(), Budget(epsilon=1.0, delta=1e-6))
    for refused in (lambda: made.steps_for(BANDS, 0.1), lambda: made(curator, BANDS, seed=0)):
        with pytest.raises(WorkloadError, match="must be"):
            refused()
    assert curator.privacy().spends == ()


def test_all_zero_answers_bands():
    found = AllZero()(Curator(source(), Budget(epsilon=1.0, delta=1e-6)), BANDS, seed=0)
    assert [answers.tolist() for answers in found.model.answers(BANDS)] == [[0.0] * 6, [0.0] * 4]


def test_rows_are_in_the_schema_or_refused(case):
    found = made_once(*case)
    if not TABLE[case[0]][1]:
        with pytest.raises(ParameterError, match="not rows"):
            found.model.sample(10, seed=0)
        return
    for rows in (1, 7, 500):
        table = found.model.sample(rows, seed=0)
        assert table.rows == rows
        assert np.all((table.codes >= 0) & (table.codes < SCHEMA.sizes))


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if TABLE[case[0]][2]])
def test_answers_approach_the_truth_as_the_budget_grows(name, kind):
    found = release(TABLE[name][0], epsilon=1e7, kind=kind)
    assert np.max(np.abs(answers(found, kind) - truth(kind))) < 0.01


@pytest.mark.parametrize("name", ["gaussian", "gaussian cells", "rap at once"])
def test_what_matters_more_is_measured_with_less_noise(name):
    (measurement,) = made_once(name, "thresholds").measurements
    weights = [piece.weight for piece in measurement.workload.pieces() for _ in range(piece.blocks)]
    assert set(weights) == {1, 3}
    assert measurement.sigma * np.sqrt(np.array(weights, float)) == pytest.approx(measurement.sigma.max())


@pytest.mark.parametrize("kind", WORKLOADS)
def test_answers_are_fractions(kind):
    found = answers(made_once("rap cells", kind), kind)
    assert np.all((found >= -1e-5) & (found <= 1 + 1e-5))
    assert found.size == WORKLOADS[kind].cells


@pytest.mark.parametrize("kind", WORKLOADS)
def test_adaptive_rounds_improve_on_the_start(kind):
    made = RAP(rounds=6, per_round=4, rows=40, steps=200, rate=0.02)
    start = made.projection().init(SCHEMA.sizes, seed=3)
    before = np.concatenate(list(start.answers(WORKLOADS[kind])))
    found = answers(release(made, epsilon=1e6, kind=kind), kind)
    assert np.max(np.abs(found - truth(kind))) < 0.25 * np.max(np.abs(before - truth(kind)))


@pytest.mark.parametrize("made", NOISY)
def test_two_runs_differ_but_a_seeded_one_repeats(made):
    seeded = [answers(release(made, unsafe_seed=1)) for _ in range(2)]
    assert np.array_equal(*seeded)
    assert not np.array_equal(*(what_noise_decides(made) for _ in range(2)))


def what_noise_decides(made):
    """All that was measured; where nothing is, answers with a budget so small that any query may be drawn.

    One count alone is the same in two runs every now and then: its noise is a whole number.
    """
    if made.name not in GAME:
        return np.concatenate([measurement.values for measurement in release(made).measurements])
    return answers(release(replace(made, eps0=0.0) if hasattr(made, "eps0") else made, epsilon=0.01))


@pytest.mark.parametrize("made", NOISY)
def test_the_exact_number_of_rows_stays_private_under_add_remove(made):
    totals = {release(made, "add-remove").total for _ in range(4)}
    assert len(totals) > 1
    assert release(made, "replace").total == 3000


def test_nothing_is_printed(row, capfd):
    release(row[0])
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""


def test_parameters_are_set_from_text(row):
    made = row[0]
    assert is_dataclass(made)
    settings = {field.name: str(getattr(made, field.name)) for field in fields(made)}
    assert mechanism(made.name, settings) == made
    with pytest.raises(ParameterError, match="must be one of"):
        mechanism(made.name, {"nonsense": "1"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": "0"}, r"rounds \(0\) must be a whole number of at least 1"),
        ({"rounds": "x"}, r"rounds \('x'\) must be a whole number"),
        ({"per_round": "-3"}, r"per_round \(-3\) must be"),
        ({"order": "-1"}, r"order \(-1\) must be at least 0"),
        ({"split": "1.4"}, r"split \(1.4\) must be in \(0, 1\)"),
        ({"blocks": "maybe"}, r"blocks \('maybe'\) must be true or false"),
        ({"rows": "0"}, r"rows \(0\) must be"),
        ({"steps": "0"}, r"steps \(0\) must be"),
        ({"rate": "nan"}, r"rate \(nan\) must be"),
        ({"penalty": "-1"}, r"penalty \(-1.0\) must be"),
        ({"simplex": "cube"}, r"simplex \('cube'\) must be sparsemax or softmax"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        mechanism("rap", settings)


@pytest.mark.parametrize("made", [RAP(rounds=100, per_round=100), RAP(rounds=2, per_round=2, blocks=True)])
def test_more_selections_than_queries_are_refused_before_anything_is_spent(made):
    curator = Curator(source(), Budget(epsilon=1.0, delta=1e-6))
    with pytest.raises(AnamorphError, match="rounds \\* per_round"):
        made(curator, WORKLOADS["marginals"], seed=0)
    assert curator.privacy().spends == ()


def test_history_is_measured_once_and_never_noised_again(monkeypatch):
    """The bug: every round re-noised all measurements so far, with the budget of the new ones."""
    seen = []
    made = RAP(rounds=4, per_round=3, **SMALL)
    fit = type(made.projection()).fit

    def watched(self, model, measurements, *, seed=0):
        seen.append([measurement.values for measurement in measurements])
        return fit(self, model, measurements, seed=seed)

    monkeypatch.setattr(type(made.projection()), "fit", watched)
    found = release(made)
    assert [len(log) for log in seen] == [1, 2, 3, 4]
    for earlier, later in itertools.pairwise(seen):
        assert all(a is b for a, b in zip(earlier, later, strict=False))
    chosen = np.concatenate([m.workload.parts[0].chosen for m in found.measurements])
    assert np.unique(chosen).size == chosen.size == 12
