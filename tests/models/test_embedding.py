"""Rows with a given embedding: the loss by hand, the shares of labels, and how near a fit comes to the truth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator.tallies import count, scale
from anamorph.curator.where import Where
from anamorph.errors import ParameterError
from anamorph.models import embedding as module
from anamorph.models.embedding import EmbeddingProjection, build, circles, objective, reveal, shares
from anamorph.models.generator import scatter
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.simplex import Layout
from anamorph.queries.embeddings import Embedding, embedding, radians
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.residuals import Residuals
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 40, 2, 31)
"""c1 and c3 are numbers; c3 may be missing: its code is 30."""
COLUMNS = Columns(SIZES, (1, 3), (40, 30))
N = 4000
FREQUENCIES = np.random.default_rng(5).standard_normal((60, 2)) / np.geomspace(0.1, 1, 60)[:, None]
SMALL = EmbeddingProjection(rows=160, latent=6, hidden=48, layers=2, steps=600, rate=5e-3)


def table_rows():
    """Two humps of c1 by the label c2, c0 with the label, c3 skewed and missing more often with label 1."""
    random = np.random.default_rng(0)
    label = (random.random(N) < 0.3).astype(int)
    number = np.where(label == 1, random.normal(30, 3, N), random.normal(10, 4, N)).clip(0, 39).astype(int)
    coded = np.where(random.random(N) < 0.7, 2 * label, 1)
    skewed = (random.beta(1, 5, N) * 30).astype(int)
    skewed = np.where(random.random(N) < np.where(label == 1, 0.4, 0.1), 30, skewed)
    return np.stack([coded, number, label, skewed], axis=1).astype(np.int32)


ROWS = table_rows()


def queries(label) -> Workload:
    """What DP-MERF measures, made by hand."""
    given = () if label is None else (label,)
    sets = [(*given, column) for column in (0, 2) if column != label] + ([given] if given else [])
    present = Where(SIZES, given, (3,), (30,), np.array([[29]]))
    waves = embedding(SIZES, given, {1: 40, 3: 30}, FREQUENCIES)
    return Workload((Marginals(SIZES, tuple(sets)), NumberTests(present), waves))


def measured(workload, sigma=1e-3, rows=ROWS, sizes=SIZES) -> Measurement:
    """The truth, said to have noise of some size."""
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    source = TableSource(Table(rows, sizes), schema)
    tallies = [piece.tally for piece in workload.pieces()]
    values = np.concatenate([count(tally, source) / scale(tally) for tally in tallies]) / len(rows)
    return Measurement(workload, values, np.full(workload.blocks, sigma), float(len(rows)))


@pytest.fixture(scope="module", name="fitted", params=[2, None])
def _fitted(request) -> tuple[MixedRows, int | None]:
    return SMALL.fit(COLUMNS, request.param, measured(queries(request.param)), seed=1), request.param


def test_the_rows_have_the_shares_of_their_columns(fitted):
    model, _ = fitted
    for column in (0, 2):
        truth = np.bincount(ROWS[:, column], minlength=SIZES[column]) / N
        (found,) = model.answers(Workload((Marginals(SIZES, ((column,),)),)))
        np.testing.assert_allclose(found, truth, atol=0.01)


def test_the_numbers_have_their_distribution(fitted):
    model, _ = fitted
    bounds = np.arange(0, 40, 4)[:, None]
    (found,) = model.answers(Workload((NumberTests(Where(SIZES, (), (1,), (40,), bounds)),)))
    truth = np.mean(ROWS[:, 1] <= bounds, axis=1)
    np.testing.assert_allclose(found, truth, atol=0.05)
    bounds = np.arange(0, 30, 4)[:, None]
    (found,) = model.answers(Workload((NumberTests(Where(SIZES, (), (3,), (30,), bounds)),)))
    truth = np.mean((ROWS[:, 3] <= bounds) & (ROWS[:, 3] < 30), axis=1)
    np.testing.assert_allclose(found, truth, atol=0.05)


@pytest.mark.parametrize("fitted", [2], indirect=True)
def test_with_a_label_the_rows_know_what_goes_with_it(fitted):
    model, _ = fitted
    table = model.sample(8000, seed=0).codes
    gap = table[table[:, 2] == 1, 1].mean() - table[table[:, 2] == 0, 1].mean()
    missing = [np.mean(table[table[:, 2] == y, 3] == 30) for y in (0, 1)]
    assert gap == pytest.approx(20, abs=2)
    np.testing.assert_allclose(missing, [0.1, 0.4], atol=0.03)
    (found,) = model.answers(Workload((Marginals(SIZES, ((0, 2),)),)))
    truth = np.bincount(ROWS[:, 0] * 2 + ROWS[:, 2], minlength=6) / N
    np.testing.assert_allclose(found, truth, atol=0.01)


def test_every_row_has_one_label_and_each_label_its_share(fitted):
    model, label = fitted
    assert model.coded.weights.sum() == pytest.approx(1, abs=1e-5)
    assert not model.degraded
    if label is None:
        assert np.unique(model.coded.weights).size == 1
        return
    first = sum(COLUMNS.relaxed[: COLUMNS.place(2)])
    lines = model.coded.probabilities[first : first + 2]
    assert set(np.unique(lines)) == {0.0, 1.0}
    assert lines.sum(axis=1).tolist() == [80, 80]
    np.testing.assert_allclose(lines @ model.coded.weights, [np.mean(ROWS[:, 2] == y) for y in (0, 1)], atol=1e-4)
    again = MixedRows.from_arrays(SIZES, model.arrays())
    assert again.sample(50, seed=3).codes.tolist() == model.sample(50, seed=3).codes.tolist()


def by_hand(model, label, measurement, frequencies):
    """chi^2 / (2 n) of a model, row by row: every number present or missing, with its probability."""
    table = model.coded.probabilities.astype(float)
    starts = np.cumsum((0, *COLUMNS.relaxed))
    weights, found = model.coded.weights.astype(float), []
    given = np.ones((1, weights.size)) if label is None else table[starts[COLUMNS.place(label)] :][: SIZES[label]]
    for part in measurement.workload.parts:
        if isinstance(part, Marginals):
            for features in part.sets:
                lines = table[starts[COLUMNS.place(features[-1])] :][: SIZES[features[-1]]]
                # the label's own share is not fitted: it is read off
                found.append(given @ weights if features == (label,) else (given * weights) @ lines.T)
        elif isinstance(part, NumberTests):
            found.append((given * weights) @ table[starts[COLUMNS.place(3)]])
        else:
            present, x = table[starts[COLUMNS.place(3)]], model.reals.astype(float) - 0.5
            both = np.exp(1j * (frequencies @ x))
            alone = np.exp(1j * (frequencies[:, :1] @ x[:1]))
            expected = (present * both + (1 - present) * alone).T
            sums = (given * weights) @ expected
            found.append(np.stack([sums.real, sums.imag], axis=1))
    cells = [part.size for part in found]
    sigma = np.repeat(measurement.sigma, cells)
    wrong = (np.concatenate([part.ravel() for part in found]) - measurement.values) / sigma
    if label is not None:
        wrong[sum(cells[:1]) : sum(cells[:2])] = 0
    return np.sum(wrong**2) / (2 * measurement.total)


@pytest.mark.parametrize("label", [2, None])
def test_the_loss_is_chi_squared_by_hand(label):
    """With a network at random, blocks with noise of their own, and a number that may be missing."""
    sigma = np.linspace(0.01, 0.05, queries(label).blocks)
    measurement = replace(measured(queries(label)), sigma=sigma)
    layout = Layout(COLUMNS.relaxed)
    aims = build(SMALL, layout, COLUMNS, label, measurement, 4)
    lines = sum(COLUMNS.relaxed) + 2
    network = scatter(((9, len(aims.latents)), (lines, len(aims.latents) + 9)), 1.5, jax.random.key(0))
    expected = float(objective(SMALL, layout, network, aims))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "scatter", lambda *_: network)
        patch.setattr(module, "descend", lambda _problem, start, _aims: (start, True))
        model = SMALL.fit(COLUMNS, label, measurement, seed=4)
    assert expected == pytest.approx(by_hand(model, label, measurement, FREQUENCIES), rel=1e-3)
    assert expected > 0.1


def test_a_number_that_may_be_missing_counts_as_its_expectation():
    """Against all combinations of present and missing, of two numbers."""
    random = np.random.default_rng(2)
    columns = Columns((11, 21, 6), (0, 1, 2), (10, 20, 6))
    layout = Layout(columns.relaxed)
    frequencies = random.standard_normal((7, 3)) * 5
    part = embedding(columns.sizes, (), dict(zip(columns.numbers, columns.limits, strict=True)), frequencies)
    measurement = Measurement(Workload((part,)), np.zeros(14), np.array([0.1]), 100.0)
    aims = build(replace(SMALL, rows=9), layout, columns, None, measurement, 0)
    made = scatter(((7, len(aims.latents)),), 2.0, jax.random.key(1))
    table, reals = reveal(layout, made, aims.latents)
    found = np.asarray(circles(aims, table, reals))
    present = np.asarray(table)[layout.offsets]
    expected = np.zeros((7, 9), complex)
    for there in itertools.product((0, 1), repeat=2):
        chance = np.prod([present[i] if there[i] else 1 - present[i] for i in range(2)], axis=0)
        kept = np.array([*there, 1])[:, None] * (np.asarray(reals) - 0.5)
        expected += chance * np.exp(1j * radians(part.tally) @ kept)
    np.testing.assert_allclose(found, [expected.real, expected.imag], atol=1e-4)


def test_shares_are_the_mean_by_precision_and_never_below_0():
    workload = Workload((Marginals((3, 4, 40), ((0,), (0, 1))),))
    exact = np.array([0.5, 0.4, 0.1])
    alone, spread = exact + np.array([0.03, -0.03, 0.0]), np.repeat(exact, 4) / 4
    found = shares(0, Measurement(workload, np.concatenate([alone, spread]), np.array([0.02, 0.01]), 100.0))
    np.testing.assert_allclose(found, exact + np.array([0.015, -0.015, 0]), atol=1e-12)  # 4 cells: the same precision
    one = np.array([-0.1, 0.6, 0.6])
    below = Measurement(workload, np.concatenate([one, np.repeat(one, 4) / 4]), np.ones(2), 9.0)
    np.testing.assert_allclose(shares(0, below), [0, 0.5, 0.5])
    nothing = replace(below, values=np.full(15, -0.2))
    np.testing.assert_allclose(shares(0, nothing), np.full(3, 1 / 3))
    assert shares(None, below).tolist() == [1.0]


def test_a_label_of_more_values_than_rows_has_a_row_for_each():
    sizes = (50, 3)
    rows = np.stack([np.arange(500) % 50, np.arange(500) % 3], axis=1).astype(np.int32)
    made = replace(SMALL, rows=20, steps=5)
    workload = Workload((Marginals(sizes, ((0,), (0, 1))),))
    model = made.fit(Columns(sizes, (), ()), 0, measured(workload, rows=rows, sizes=sizes), seed=0)
    assert model.coded.weights.size == 50
    assert set(model.sample(2000, seed=0).codes[:, 0].tolist()) == set(range(50))


def test_numbers_alone_and_codes_alone():
    waves = Workload((embedding(SIZES[1:2], (), {0: 40}, FREQUENCIES[:, :1]),))
    model = SMALL.fit(Columns((40,), (0,), (40,)), None, measured(waves, rows=ROWS[:, 1:2], sizes=(40,)), seed=0)
    table = model.sample(5000, seed=0).codes[:, 0]
    assert table.mean() == pytest.approx(ROWS[:, 1].mean(), abs=0.7)
    assert table.std() == pytest.approx(ROWS[:, 1].std(), abs=0.7)
    sets = Workload((Marginals((3, 2), ((1,), (1, 0))),))
    model = SMALL.fit(Columns((3, 2), (), ()), 1, measured(sets, rows=ROWS[:, [0, 2]], sizes=(3, 2)), seed=0)
    (found,) = model.answers(Workload((Marginals((3, 2), ((0, 1),)),)))
    np.testing.assert_allclose(found, np.bincount(ROWS[:, 0] * 2 + ROWS[:, 2], minlength=6) / N, atol=0.005)


def test_the_same_seed_makes_the_same_rows_and_another_others():
    made = replace(SMALL, steps=20)
    same = [made.fit(COLUMNS, 2, measured(queries(2)), seed=7).reals for _ in range(2)]
    assert np.array_equal(*same)
    assert not np.array_equal(same[0], made.fit(COLUMNS, 2, measured(queries(2)), seed=8).reals)


def test_a_loss_that_is_no_number_is_said():
    wrong = measured(queries(2))
    wrong = replace(wrong, values=np.where(np.arange(wrong.values.size) == wrong.values.size - 1, np.nan, wrong.values))
    model = replace(SMALL, steps=20).fit(COLUMNS, 2, wrong, seed=0)
    assert model.degraded
    assert np.all(np.isfinite(model.reals))


def test_what_no_embedding_explains_is_refused():
    foreign = Workload((Residuals(SIZES, ((0, 2),)), *queries(2).parts))
    values = Measurement(foreign, np.zeros(foreign.cells), np.ones(foreign.blocks), 10.0)
    with pytest.raises(ParameterError, match="must be of marginals, tests of numbers and an embedding"):
        SMALL.fit(COLUMNS, 2, values, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, r"rows \(0\) must be"),
        ({"latent": 0}, r"latent \(0\) must be"),
        ({"hidden": -1}, r"hidden \(-1\) must be"),
        ({"layers": 1.5}, r"layers \(1.5\) must be"),
        ({"steps": 0}, r"steps \(0\) must be"),
        ({"rate": float("nan")}, r"rate \(nan\) must be a number from"),
        ({"tolerance": -1}, r"tolerance \(-1\) must be"),
        ({"start": 101}, r"start \(101\) must be"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        EmbeddingProjection(**settings)


def test_frequencies_are_told_in_radians():
    part = Embedding(embedding(SIZES, (), {1: 40, 3: 30}, FREQUENCIES).tally)
    np.testing.assert_allclose(radians(part.tally), FREQUENCIES, rtol=1e-9)
    assert jnp.asarray(radians(part.tally)).shape == (60, 2)
