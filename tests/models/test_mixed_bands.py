"""Bands of numbers in mixed rows: answers against counting, and the relaxed ones of a fit against these."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from fits import answers, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes, Numeric
from anamorph.curator.bands import Bands
from anamorph.curator.tallies import GroupBy, count
from anamorph.errors import AnamorphError, ParameterError
from anamorph.models.annealing import MixedProjection, Point, band_lines, build, grids_of, objective
from anamorph.models.answers import Answers, Zero
from anamorph.models.graphical import Graphical
from anamorph.models.least_squares import least_squares
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.bands import Banded, equal_cuts
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 10, 2, 9, 8)
COLUMNS = Columns(SIZES, (1, 3, 4), (10, 8, 7))
"""c3 and c4 may be missing: their codes are 8 and 7."""
CUTS = ((), (3, 4, 8), (), (2, 5, 8), (1, 7))
OTHER = ((), (5,), (), (4, 8), tuple(range(1, 8)))
SETS = ((1,), (3,), (0, 1), (3, 0), (4, 2, 3), (1, 3, 4), (2, 0))
QUERIES = Banded(SIZES, SETS, CUTS)
WORKLOAD = Workload((QUERIES, Banded(SIZES, SETS[:4], OTHER)))


def rows_of(columns=COLUMNS, rows=12, seed=0, *, sharp=False) -> MixedRows:
    """Random rows; if they are sharp every probability is 0 or 1, and all rows weigh alike."""
    random = np.random.default_rng(seed)
    parts = [random.dirichlet(np.full(size, 0.5), rows).T for size in columns.relaxed]
    if sharp:
        parts = [np.arange(len(part))[:, None] == part.argmax(axis=0) for part in parts]
    weights = np.full(rows, 1 / rows) if sharp else random.dirichlet(np.ones(rows))
    reals = random.random((len(columns.numbers), rows)).astype(np.float32)
    coded = RelaxedRows(columns.relaxed, np.concatenate(parts).astype(np.float32), weights.astype(np.float32))
    return MixedRows(columns, coded, reals)


def table_of(model) -> TableSource:
    """The rows of a sharp model, one by one."""
    columns = model.columns
    codes = np.empty((model.coded.weights.size, len(columns.sizes)), np.int32)
    starts = np.cumsum((0, *columns.relaxed))
    picked = [model.coded.probabilities[a:b].argmax(axis=0) for a, b in itertools.pairwise(starts)]
    for column in columns.coded:
        codes[:, column] = picked[columns.place(column)]
    for index, number in enumerate(columns.numbers):
        codes[:, number] = np.floor(model.reals[index].astype(float) * columns.limits[index])
        if number in columns.flagged:
            codes[picked[columns.place(number)] == 1, number] = columns.limits[index]
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(columns.sizes)))
    return TableSource(Table(codes, columns.sizes), schema)


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_a_sharp_model_answers_as_its_rows_are_counted(seed, rows):
    model = rows_of(rows=rows, seed=seed, sharp=True)
    for piece in WORKLOAD.pieces():
        exact = count(piece.tally, table_of(model)) / rows
        np.testing.assert_allclose(model.answer(piece.tally), exact, atol=1e-6)


def test_numbers_of_sharp_models_are_missing_somewhere():
    """What the test above would be nothing without."""
    codes = next(table_of(rows_of(rows=40, seed=1, sharp=True)).batches())
    assert 5 < np.sum(codes[:, 3] == 8) < 35
    assert 5 < np.sum(codes[:, 4] == 7) < 35


def test_a_number_without_cuts_has_a_band_for_every_code():
    model = rows_of(rows=30, seed=2, sharp=True)
    for features in ((1,), (3,), (0, 4)):
        tally = Bands(SIZES, features, ((),) * len(features))
        whole = GroupBy(SIZES, features, 0, SIZES[features[0]])
        np.testing.assert_allclose(model.answer(tally), count(whole, table_of(model)) / 30, atol=1e-6)


def test_rows_drawn_approach_the_answers():
    """40,000 rows: 4.5 deviations of a count are at most 0.012 of the rows; drawn in strata they are less."""
    model = rows_of(seed=6)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    drawn = TableSource(model.sample(40_000, seed=3), schema)
    for piece in WORKLOAD.pieces():
        found = model.answer(piece.tally)
        assert found.sum() == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(found, count(piece.tally, drawn) / 40_000, atol=0.012)


MADE = MixedProjection(rows=9, row_weights=True)


def fitting(workload, temperature, seed=3):
    """A model with numbers away from all cuts, random targets, and what a fit to them compares with."""
    model = MADE.begin(COLUMNS, seed=seed)
    limits = np.array(COLUMNS.limits)[:, None]
    codes = np.minimum(np.floor(model.reals * limits), limits - 1)
    model = replace(model, reals=((codes + 0.5) / limits).astype(np.float32))
    random = np.random.default_rng(1)
    values = random.random(workload.cells) / 4
    measurement = replace(measure(workload, values, total=50.0), sigma=random.uniform(0.05, 0.2, workload.blocks))
    aims = build(model.coded.layout, COLUMNS, [measurement])._replace(temperature=jnp.asarray(float(temperature)))
    return model, measurement, aims, Point(model.coded.parameters, jnp.asarray(model.reals))


def below(model, number, cut, temperature):
    """The relaxed probability, for each row, that a number is below a cut: a sigmoid, 1 at 0 and 0 at 1."""
    index = COLUMNS.numbers.index(number)
    place, ends = cut / COLUMNS.limits[index], [np.array([0.0]), np.array([1.0])]
    found, top, end = (
        (1 + np.tanh(temperature * (place - x) / 2)) / 2 for x in (model.reals[index].astype(float), *ends)
    )
    return (found - end) / (top - end)


def bands_by_hand(model, number, cuts, temperature):
    """The relaxed probability of each band in each row: bands by rows."""
    limit = COLUMNS.limits[COLUMNS.numbers.index(number)]
    inner = [cut for cut in cuts if cut < limit]
    rows = model.coded.weights.size
    ends = [np.zeros(rows), *(below(model, number, cut, temperature) for cut in inner), np.ones(rows)]
    found = np.diff(ends, axis=0)
    if number in COLUMNS.flagged:
        found = np.concatenate([found * model.flag(number), model.flag(number, missing=True)[None]])
    return found


def relaxed_answers(model, tally, temperature):
    """The relaxed answers of a marginal of bands, in double precision, from their definition."""
    factors = []
    for feature, cuts in zip(tally.features, tally.cuts, strict=True):
        if feature in COLUMNS.numbers:
            factors.append(bands_by_hand(model, feature, cuts, temperature))
        else:
            first = sum(COLUMNS.relaxed[: COLUMNS.place(feature)])
            factors.append(model.coded.probabilities[first : first + SIZES[feature]].astype(float))
    total = model.coded.weights.astype(float)[None]
    for factor in factors:
        total = (total[:, None] * factor[None]).reshape(-1, total.shape[1])
    return total.sum(axis=1)


@pytest.mark.parametrize("temperature", [2.0, 16.0])
def test_the_objective_is_chi_squared_of_relaxed_bands(temperature):
    """Of several grids of one number, beside plain marginals."""
    whole = Workload((*WORKLOAD.parts, Marginals(SIZES, ((2, 0),))))
    model, measurement, aims, point = fitting(whole, temperature)
    found = np.concatenate(
        [
            relaxed_answers(model, piece.tally, temperature)
            if isinstance(piece.tally, Bands)
            else model.answer(piece.tally)
            for piece in whole.pieces()
        ]
    )
    sigma = np.repeat(measurement.sigma, [piece.tally.cells for piece in whole.pieces()])
    expected = np.sum(((found - measurement.values) / sigma) ** 2) / (2 * 50.0)
    assert float(objective(MADE, model.coded.layout, point, aims)) == pytest.approx(expected, rel=1e-4)
    for other in (temperature * 1.3, 1e5):
        hotter = aims._replace(temperature=jnp.asarray(other))
        assert float(objective(MADE, model.coded.layout, point, hotter)) != pytest.approx(expected, rel=1e-3)


def test_relaxed_bands_become_the_hard_ones():
    model, _, aims, point = fitting(WORKLOAD, 1e5)
    grids = sorted({(n, cuts[n]) for cuts in (CUTS, OTHER) for n in (1, 3, 4) if cuts is CUTS or n != 4})
    found = np.asarray(band_lines(model.coded.table, point.reals, aims))
    hard = [bands_by_hand(model, number, cuts, 1e9) for number, cuts in grids]
    assert [len(part) for part in hard] == [len(cuts) + 1 for _, cuts in grids]
    np.testing.assert_allclose(found, np.concatenate(hard), atol=1e-6)
    for tally in (piece.tally for piece in WORKLOAD.pieces() if isinstance(piece.tally, Bands)):
        np.testing.assert_allclose(relaxed_answers(model, tally, 1e9), model.answer(tally), atol=1e-6)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Banded(SIZES, ((0, 1),), ((), (), (), (), ())), "must have all numbers cut into bands, and no other columns"),
        (Banded(SIZES, ((0, 1),), ((1,), (4,), (), (), ())), "must have all numbers cut into bands, and no other"),
        (Banded(SIZES, ((1, 4),), ((), (4,), (), (), ())), "must have all numbers cut"),
        (Marginals(SIZES, ((2, 1),)), "must have all numbers cut"),
        (Banded(SIZES, ((3, 0),), ((), (), (), (2, 5), ())), "may be missing must have a band for that"),
    ],
)
def test_bands_that_do_not_suit_the_numbers_are_refused(part, words):
    workload = Workload((QUERIES, part))
    with pytest.raises(ParameterError, match=words):
        grids_of(COLUMNS, [workload])
    with pytest.raises(ParameterError, match=words):
        MADE.fit(MADE.begin(COLUMNS, seed=0), [measure(workload, np.zeros(workload.cells))])


def test_grids_are_the_ways_in_which_numbers_are_cut():
    """Each once, however many blocks and workloads share it; columns that no block has do not count."""
    spare = Banded(SIZES, ((2, 0),), OTHER)
    found = grids_of(COLUMNS, [WORKLOAD, Workload((QUERIES, spare, Marginals(SIZES, ((0, 2),))))])
    assert found == ((1, CUTS[1]), (1, OTHER[1]), (3, CUTS[3]), (3, OTHER[3]), (4, CUTS[4]))


def test_bands_are_fitted():
    """To those of other rows, of which a third of the numbers is missing."""
    wanted = answers(rows_of(rows=5, seed=5), WORKLOAD)
    made = MixedProjection(rows=60, steps=40, levels=7, rate=0.05)
    start = made.begin(COLUMNS, seed=0)
    fitted = made.fit(start, [measure(WORKLOAD, wanted)])
    assert not fitted.degraded
    assert np.abs(answers(start, WORKLOAD) - wanted).max() > 0.2
    assert np.abs(answers(fitted, WORKLOAD) - wanted).mean() < np.abs(answers(start, WORKLOAD) - wanted).mean() / 4


def test_models_of_coded_columns_refuse_bands():
    """All but the one that answers 0 to everything."""
    whole = Workload((QUERIES,))
    assert not answers(Zero(SIZES), whole).any()
    uniform = np.concatenate([np.full((size, 2), 1 / size, np.float32) for size in SIZES])
    others = (
        Answers(SIZES, {(0, 1): np.zeros(30)}, {(0, 1): 0.1}),
        least_squares(SIZES, (measure(Workload((Marginals(SIZES, ((0, 1),)),)), np.zeros(30)),)),
        RelaxedRows(SIZES, uniform, np.full(2, 0.5, np.float32)),
        Graphical().init(SIZES),
    )
    for model in others:
        with pytest.raises(ParameterError, match="must be"):
            list(model.answers(whole))


def test_estimators_of_coded_columns_refuse_measurements_of_bands():
    measured = [measure(Workload((QUERIES,)), np.zeros(QUERIES.cells))]
    made = Graphical()
    with pytest.raises(AnamorphError, match="must be"):
        made.fit(made.init(SIZES), measured)


def test_bands_of_a_schema_are_answered():
    """Equal bands of columns as a schema declares them."""
    schema = Schema(
        (
            Numeric(name="x", lower=0, upper=99, integer=True, native=True, missing=True),
            Codes(name="a", values=3),
            Numeric(name="y", lower=0.0, upper=1.0, native=True),
        )
    )
    columns = Columns(schema.sizes, schema.numbers, tuple(schema.columns[n].regular for n in schema.numbers))
    model = rows_of(columns, rows=25, sharp=True)
    queries = Workload((Banded(schema.sizes, ((0,), (2, 0), (0, 1, 2)), equal_cuts(schema, 6)),))
    source = TableSource(Table(next(table_of(model).batches()), schema.sizes), schema)
    exact = np.concatenate([count(piece.tally, source) for piece in queries.pieces()]) / 25
    np.testing.assert_allclose(answers(model, queries), exact, atol=1e-6)
