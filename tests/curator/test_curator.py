"""The curator charges first, counts exactly, adds the right noise, and never does it twice."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator import curator as curator_module
from anamorph.curator.budget import Budget
from anamorph.curator.candidates import Prior
from anamorph.curator.contest import Pool
from anamorph.curator.curator import FINEST, TOTAL_SHARE, WHOLE, Curator, relative
from anamorph.curator.estimates import RelaxedTable, RowTable
from anamorph.curator.ledger import Ledger
from anamorph.curator.scores import GRID, AbsoluteError, L1Error, MaxError
from anamorph.curator.tallies import GroupBy, scale, squared_sensitivity
from anamorph.errors import BudgetError, DataError, ParameterError, SchemaError, WorkloadError
from anamorph.queries.custom import Custom, custom
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.piece import Piece
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (4, 3, 5)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 400) for i, size in enumerate(SIZES)], axis=1)
PAIRS = Workload((Marginals(SIZES, ((0, 1), (0, 2), (1, 2))),))
THRESHOLDS = Workload((Thresholds(SIZES, ((0, 1, 2), (2, 0, 1)), 2),))
FUNCTION = custom(lambda row: jnp.outer(row["c0"], row["c1"]).ravel() * 0.75, SCHEMA, name="tests:function")
UNIFORM = RelaxedTable(
    SIZES,
    np.concatenate([np.full((size, 2), 1 / size) for size in SIZES]).astype(np.float32),
    np.full(2, 0.5, np.float32),
)
BUDGET = Budget(epsilon=1.0, delta=1e-6)
HUGE = Budget(epsilon=1e9, delta=1e-6)


class Watched(TableSource):
    """A source that remembers how often it was asked."""

    asked = 0

    def counts(self, sets):
        self.asked += 1
        return super().counts(sets)


def source(rows=ROWS) -> Watched:
    return Watched(Table(rows.astype(np.int32), SIZES), SCHEMA)


def truth(workload, rows=ROWS):
    found = []
    for piece in workload.pieces():
        for features in piece.tally.sets:
            dense = np.zeros([SIZES[f] for f in features], np.int64)
            np.add.at(dense, tuple(rows[:, f] for f in features), 1)
            found.append(dense.ravel())
    return np.concatenate(found)


@pytest.fixture
def scales(monkeypatch):
    """Records the noise that is asked for, and makes none."""
    seen = {"sigma": [], "beta": []}

    def gaussian(size, sigma, bits):
        seen["sigma"].append(sigma)
        return np.zeros(size, np.int64)

    def largest(scores, k, scale, bits):
        seen["beta"].append(scale / (1 << GRID))
        return np.argsort(-np.concatenate(list(scores)).astype(float), kind="stable")[:k]

    monkeypatch.setattr(curator_module, "discrete_gaussian", gaussian)
    monkeypatch.setattr(curator_module, "top_k", largest)
    return seen


@pytest.mark.parametrize(("relation", "squared"), [("replace", 2 * 3), ("add-remove", 3)])
def test_measuring_marginals_has_the_noise_of_their_joint_sensitivity(scales, relation, squared):
    curator = Curator(source(), BUDGET, neighbours=relation)
    total, rho = curator.total, 0.01
    measurement = curator.measure(PAIRS, rho=rho)
    assert scales["sigma"][-1] == pytest.approx(math.sqrt(squared / (2 * rho)), rel=1e-12)
    assert np.array_equal(np.rint(measurement.values * total), truth(PAIRS))
    assert measurement.sigma == pytest.approx(np.full(3, scales["sigma"][-1] / total))


def test_by_block_every_cell_costs_a_composition(scales):
    cells, rho = PAIRS.by_cell(), 0.01
    Curator(source(), BUDGET).measure(cells, rho=rho, compose="by block")
    assert scales["sigma"] == [pytest.approx(math.sqrt(cells.cells / (2 * rho)))] * 3


@pytest.mark.parametrize(
    ("workload", "score", "relation", "sensitivity"),
    [
        (PAIRS.by_cell(), AbsoluteError(), "replace", 1),
        (PAIRS.by_cell(), AbsoluteError(), "add-remove", 1),
        (PAIRS, L1Error(), "replace", 2),
        (PAIRS, L1Error(), "add-remove", 1),
        (PAIRS, MaxError(), "replace", 1),
    ],
)
def test_selection_has_the_scale_of_its_score(scales, workload, score, relation, sensitivity):
    curator = Curator(source(), BUDGET, neighbours=relation)
    zeros = (np.zeros(piece.tally.cells) for piece in workload.pieces())
    curator.select(workload, zeros, rho=0.005, k=2, score=score)
    assert scales["beta"] == [pytest.approx(sensitivity * math.sqrt(2 / (2 * 0.005)))]


def test_selected_ids_are_ids_into_the_full_workload(scales):
    """The bug: an index into a vector shortened by what was taken, used on the full one."""
    cells, curator = PAIRS.by_cell(), Curator(source(), HUGE)
    expected, taken = np.argsort(-truth(PAIRS), kind="stable"), np.zeros(0, np.int64)
    for _ in range(4):
        zeros = (np.zeros(piece.tally.cells) for piece in cells.pieces())
        chosen = curator.select(cells, zeros, rho=1.0, k=3, exclude=taken)
        measured = curator.measure(cells.take(chosen), rho=1.0)
        assert np.array_equal(np.rint(measured.values * 400), truth(PAIRS)[chosen])
        taken = np.concatenate([taken, chosen])
    assert np.array_equal(taken, expected[:12])


def test_blocks_in_several_pieces_have_one_score(scales):
    for workload, score in ((PAIRS, L1Error()), (PAIRS, MaxError()), (THRESHOLDS, MaxError())):
        found = []
        for limit in (1 << 22, 7, 4, 1):
            cut = replace(workload, limit=limit)
            assert limit > 7 or len(list(cut.pieces())) > 3
            picked = Curator(source(), HUGE).select(cut, zeros(cut), rho=1.0, k=workload.blocks, score=score)
            found.append(picked.tolist())
        assert found == [found[0]] * 4


def test_the_noise_is_fresh_each_time_and_of_the_right_size():
    many = Workload((Marginals((50, 50), ((0, 1),)),))
    schema = Schema((Codes(name="a", values=50), Codes(name="b", values=50)))
    rows = TableSource(Table(np.zeros((10, 2), np.int32), (50, 50)), schema)
    curator = Curator(rows, HUGE)
    first, second = (curator.measure(many, rho=1e-4).values[1:] * 10 for _ in range(2))
    sigma = math.sqrt(2 / (2 * 1e-4))
    assert not np.array_equal(first, second)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
    for drawn in (first, second):
        assert 0.9 * sigma < drawn.std() < 1.1 * sigma  # sigma / sqrt 2 and 2 sigma are far outside


def test_selection_and_measurement_never_share_random_words(monkeypatch):
    drawn = []
    words = curator_module.SystemBits.words
    monkeypatch.setattr(curator_module.SystemBits, "words", lambda self, n: drawn.append(words(self, n)) or drawn[-1])
    cells, curator = PAIRS.by_cell(), Curator(source(), HUGE)
    for _ in range(3):
        zeros = (np.zeros(piece.tally.cells) for piece in cells.pieces())
        curator.measure(cells.take(curator.select(cells, zeros, rho=0.1, k=4)), rho=0.1)
    together = np.concatenate(drawn)
    assert together.size > 100
    assert np.unique(together).size == together.size


def test_budget_is_charged_before_rows_are_counted():
    class Broken(Watched):
        def counts(self, sets):
            raise RuntimeError("the engine broke")

    curator = Curator(Broken(Table(ROWS.astype(np.int32), SIZES), SCHEMA), BUDGET)
    before = curator.remaining
    with pytest.raises(RuntimeError):
        curator.measure(PAIRS, rho=before / 2)
    assert curator.remaining <= before / 2


def test_a_refused_step_counts_nothing():
    rows = source()
    curator = Curator(rows, BUDGET)
    with pytest.raises(BudgetError):
        curator.measure(PAIRS, rho=BUDGET.rho * 1.0001)
    assert rows.asked == 0
    curator.measure(PAIRS, rho=curator.remaining)
    with pytest.raises(BudgetError):
        curator.measure(PAIRS, rho=1e-12)


@pytest.mark.parametrize("rho", [0.0, -1.0, math.nan, math.inf])
def test_rho_must_be_positive(rho):
    with pytest.raises(ParameterError):
        Curator(source(), BUDGET).measure(PAIRS, rho=rho)


def test_under_add_remove_the_number_of_rows_is_measured_and_charged():
    curator = Curator(source(), BUDGET, neighbours="add-remove")
    assert curator.remaining == pytest.approx(BUDGET.rho * (1 - TOTAL_SHARE))
    assert curator.privacy().spends[0].kind == "total"
    totals = {Curator(source(), BUDGET, neighbours="add-remove").total for _ in range(8)}
    assert len(totals) > 1  # the exact number would be one
    sigma = 1 / math.sqrt(2 * BUDGET.rho * TOTAL_SHARE)
    assert all(total == 1 or abs(total - 400) < 8 * sigma for total in totals)


def test_no_rows_are_refused_under_replace_and_served_under_add_remove():
    nobody = np.zeros((0, 3), np.int32)
    with pytest.raises(DataError, match="at least one row"):
        Curator(source(nobody), BUDGET)
    measurement = Curator(source(nobody), BUDGET, neighbours="add-remove").measure(PAIRS, rho=0.001)
    assert np.all(np.isfinite(measurement.values))


def test_values_read_from_the_data_are_refused():
    leaky = Schema((Codes(name="a", values=4, source="data"),))
    with pytest.raises(SchemaError, match="declared"):
        Curator(TableSource(Table(np.zeros((3, 1), np.int32), (4,)), leaky), BUDGET)


@pytest.mark.parametrize("k", [0, 4, 10**9])
def test_k_must_be_among_the_blocks_left(k):
    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError, match="must be from 1 to 3"):
        curator.select(PAIRS, iter([]), rho=0.001, k=k, score=L1Error())
    assert curator.privacy().spends == ()


def test_a_resumed_run_reuses_every_answer_and_counts_nothing(tmp_path):
    terms = {"mechanism": "test"}

    def talk(curator):
        zeros = (np.zeros(piece.tally.cells) for piece in PAIRS.pieces())
        chosen = curator.select(PAIRS, zeros, rho=curator.remaining / 4, score=L1Error())
        return chosen, curator.measure(PAIRS.take(chosen), rho=curator.remaining / 2).values

    def curator(rows, **more):
        ledger = Ledger(tmp_path / "ledger")
        return Curator(rows, BUDGET, neighbours="add-remove", ledger=ledger, terms=terms, **more)

    first = talk(curator(source()))
    rows = source()
    again = talk(curator(rows, resume=True))
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert rows.asked == 0
    account = Ledger(tmp_path / "ledger").account("rows")
    assert account is not None
    assert account.remaining == 0
    with pytest.raises(BudgetError):
        curator(source())


def test_a_seeded_run_is_marked_and_touches_no_ledger(tmp_path):
    made = [
        Curator(source(), BUDGET, ledger=Ledger(tmp_path / "ledger"), unsafe_seed=7).measure(PAIRS, rho=0.001).values
        for _ in range(2)
    ]
    assert np.array_equal(*made)
    assert not (tmp_path / "ledger").exists()
    promise = Curator(source(), BUDGET, unsafe_seed=7).privacy()
    assert not promise.private
    assert "NOT PRIVATE" in promise.statement()


def zeros(workload):
    return (np.zeros(piece.tally.cells) for piece in workload.pieces())


def test_a_block_measured_twice_at_once_is_refused_before_it_is_charged():
    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError, match="once"):
        curator.measure(PAIRS.take([0, 0]), rho=0.001)
    assert curator.privacy().spends == ()


@pytest.mark.parametrize(
    ("workload", "score"),
    [
        (PAIRS, AbsoluteError()),
        (PAIRS, "L1Error"),
        (THRESHOLDS, L1Error()),
        (THRESHOLDS, AbsoluteError()),
        (Workload((FUNCTION,)), L1Error()),
        (Workload((FUNCTION,)), AbsoluteError()),
        (Workload((Marginals((9, 9), ((0, 1),)),)), L1Error()),
    ],
)
def test_selections_that_the_sensitivity_does_not_cover_are_refused_before_the_charge(workload, score):
    curator = Curator(source(), BUDGET)
    with pytest.raises((WorkloadError, ParameterError)):
        curator.select(workload, zeros(workload), rho=0.001, score=score)
    assert curator.privacy().spends == ()


def test_a_foreign_score_is_never_shown_an_error():
    class SpyError(L1Error):
        def merge(self, errors, before):
            raise AssertionError("a foreign score saw private errors")

    with pytest.raises(ParameterError, match="score must be one of"):
        Curator(source(), BUDGET).select(PAIRS, zeros(PAIRS), rho=0.001, score=SpyError())


class Lump:
    """A query class that lies where it is streamed: two marginals as one block, or a tally of its own."""

    sizes, blocks, largest_block, least = SIZES, 1, 60, None

    def __init__(self, *pieces, whole=True):
        self.lies, self.whole = pieces, whole

    @property
    def cells(self):
        return 60 if self.whole else sum(piece.tally.cells for piece in self.lies)

    def pieces(self, limit):
        honest = [Piece(GroupBy(SIZES, (0, 1, 2), 0, 4), 0, 1)]
        return iter(honest if limit == WHOLE and self.whole else self.lies)


class ForeignTally(GroupBy):
    """A tally of another type, which would see what is counted."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(GroupBy(SIZES, (0,), 0, 4), 0, 1), Piece(GroupBy(SIZES, (1,), 0, 3), 0, 1)],
        [Piece(GroupBy(SIZES, (0, 1), 0, 2), 0, 1), Piece(GroupBy(SIZES, (1, 0), 0, 2), 0, 1)],
        [Piece(ForeignTally(SIZES, (0, 1, 2), 0, 4), 0, 1)],
        [Piece(GroupBy((9, 9), (0, 1), 0, 9), 0, 1)],
        [Piece(GroupBy(SIZES, (0, 1), 0, 4), 1, 1)],
        [Piece(GroupBy(SIZES, (0, 1), 0, 4), 0, 2)],
    ],
)
def test_a_block_that_is_not_what_it_says_is_refused_before_the_charge(pieces, whole):
    """Also one that is honest when it is looked at as a whole, and lies when it is streamed."""
    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError, match=r"one marginal|in the order of their ids|columns of this schema"):
        curator.select(Workload((Lump(*pieces, whole=whole),)), iter([]), rho=0.001, score=L1Error())
    assert curator.privacy().spends == ()


def test_what_is_streamed_is_asked_for_once():
    """The bug: pieces were checked, and then asked for again."""

    class Fickle(Lump):
        asked = 0

        def pieces(self, limit):
            self.asked += limit != WHOLE
            return super().pieces(WHOLE if self.asked <= 1 else limit)

    lie = Fickle(Piece(GroupBy(SIZES, (0,), 0, 4), 0, 1), Piece(GroupBy(SIZES, (1,), 0, 3), 0, 1))
    assert Curator(source(), HUGE).select(
        Workload((lie,)), iter([np.zeros(60)]), rho=0.1, score=L1Error()
    ).tolist() == [0]
    assert lie.asked == 1


def test_marginals_and_cells_in_one_workload_keep_their_ids(scales):
    """The bug: single cells were passed on before the pending marginal, so that ids were shifted."""
    mixed = Workload((Marginals(SIZES, ((0, 1),)), Cells(Marginals(SIZES, ((0, 2),)), np.array([3, 0, 7]))))
    curator = Curator(source(), HUGE)
    chosen = curator.select(mixed, zeros(mixed), rho=1.0, k=4, score=L1Error())
    cells = truth(Workload((Marginals(SIZES, ((0, 2),)),)))[[3, 0, 7]]
    assert chosen[0] == 0
    assert np.array_equal(chosen[1:], 1 + np.argsort(-cells, kind="stable"))
    assert 0 not in curator.select(mixed, zeros(mixed), rho=1.0, k=3, score=L1Error(), exclude=[0])


@pytest.mark.parametrize("exclude", [[-1], [3]])
def test_excluded_ids_are_ids_of_the_workload(exclude):
    with pytest.raises(WorkloadError, match="exclude"):
        Curator(source(), BUDGET).select(PAIRS, zeros(PAIRS), rho=0.001, score=L1Error(), exclude=exclude)


def test_noise_beyond_its_range_is_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    with pytest.raises(ParameterError):
        curator.measure(PAIRS, rho=1e-30)
    assert curator.privacy().spends == ()


def test_under_add_remove_the_first_step_may_take_all_that_is_left(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    curator = Curator(source(), BUDGET, neighbours="add-remove", ledger=ledger)
    with pytest.raises(BudgetError):
        curator.measure(PAIRS, rho=BUDGET.rho)
    curator.select(PAIRS, zeros(PAIRS), rho=curator.remaining, score=L1Error())
    assert [entry.kind for entry in ledger.entries("rows")] == ["total", "select"]


def test_a_resumed_run_states_no_smaller_epsilon_than_it_began_with(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    Curator(source(), Budget(epsilon=10.0, delta=1e-6), ledger=ledger)
    with pytest.raises(BudgetError, match="larger"):
        Curator(source(), Budget(epsilon=0.1, delta=1e-6), ledger=ledger, resume=True)


def test_a_budget_cannot_be_copied():
    with pytest.raises(TypeError):
        copy.deepcopy(Curator(source(), BUDGET))


# Weights, thresholds and functions

WEIGHTS = (Fraction(1), Fraction(1, 4), Fraction(2, 3))
WEIGHTED = Workload((Marginals(SIZES, ((0, 1),)), Thresholds(SIZES, ((0, 1, 2),), 2), FUNCTION), weights=WEIGHTS)


def counted(workload):
    """The exact answers of marginals, thresholds and the function, slowly."""
    found = []
    for piece in workload.pieces(WHOLE):
        tally = piece.tally
        if hasattr(tally, "function"):
            found.append(truth(Workload((Marginals(SIZES, ((0, 1),)),))) * 0.75)
            continue
        slab, least = (tally.slab, tally.least) if hasattr(tally, "slab") else (tally, len(tally.features))
        cells = itertools.product(*(range(SIZES[feature]) for feature in slab.features))
        found.append([np.sum((ROWS[:, slab.features] == cell).sum(axis=1) >= least) for cell in cells])
    return np.concatenate(found)


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
def test_a_heavier_part_has_less_noise_and_the_whole_costs_no_more_than_rho(scales, relation):
    curator, rho = Curator(source(), BUDGET, neighbours=relation), 0.01
    total = curator.total
    scales["sigma"].clear()
    measurement = curator.measure(WEIGHTED, rho=rho)
    sigmas = np.array(scales["sigma"]) / [scale(piece.tally) for piece in WEIGHTED.pieces()]
    assert sigmas * np.sqrt(np.array(WEIGHTS, float)) == pytest.approx(np.full(3, sigmas[0]))
    assert measurement.sigma == pytest.approx(sigmas / total)
    pieces = list(WEIGHTED.pieces())
    alone = [squared_sensitivity([piece.tally], relation) for piece in pieces]
    most = 2 if relation == "replace" else 1
    assert alone == [most, most * (1 + 3 + 2 + 4), 12]
    cost = sum(part / (2 * Fraction(float(sigma)) ** 2) for part, sigma in zip(alone, sigmas, strict=True))
    assert cost <= Fraction(rho)
    assert float(cost) == pytest.approx(rho, rel=1e-12)
    assert measurement.values * total == pytest.approx(counted(WEIGHTED), abs=1e-9)


def test_by_block_every_block_costs_its_weight(scales):
    cells, rho = WEIGHTED.by_cell(), 0.01
    Curator(source(), BUDGET).measure(cells, rho=rho, compose="by block")
    sizes = [piece.tally.cells for piece in cells.pieces()]
    squared = sum(weight * size for weight, size in zip(WEIGHTS, sizes, strict=True))
    units = [scale(piece.tally) for piece in cells.pieces()]
    assert units == [1, 1, 1 << GRID]
    expected = [unit * math.sqrt(squared / weight / (2 * rho)) for unit, weight in zip(units, WEIGHTS, strict=True)]
    assert scales["sigma"] == pytest.approx(expected)


def test_without_functions_the_noise_is_in_whole_rows(scales):
    Curator(source(), BUDGET).measure(THRESHOLDS, rho=0.01)
    assert scales["sigma"] == [pytest.approx(math.sqrt(2 * 2 * (1 + 3 + 2 + 4) / (2 * 0.01)))] * 2


@pytest.mark.parametrize("rho", [1e6, 0.02])
def test_functions_are_measured_with_noise_on_their_grid(rho):
    """Its unit is 2^-12 of a row, its size that of the sensitivity in rows."""
    curator = Curator(source(), HUGE)
    workload = Workload((FUNCTION, Marginals(SIZES, ((0, 1),))))
    repeats = [curator.measure(workload, rho=rho) for _ in range(40)]
    noise = np.stack([found.values * 400 - counted(workload) for found in repeats])
    units = noise * (1 << GRID)
    assert np.allclose(units, np.rint(units), atol=1e-5)
    sigma = math.sqrt((12 + 2) / (2 * rho))
    assert repeats[0].sigma == pytest.approx([sigma / 400] * 2)
    of_function, of_marginal = np.split(noise, [12], axis=1)
    assert 0.9 * sigma < of_function.std() < 1.1 * sigma
    assert np.any(np.rint(units) % 64)
    assert np.allclose(of_marginal, np.rint(of_marginal), atol=1e-5), "counts have noise in whole rows"


def test_thresholds_are_measured_by_block_and_by_cell(scales):
    ids = [3, 100, 59, 60]
    blocks = Curator(source(), BUDGET).measure(THRESHOLDS, rho=0.01)
    cells = Curator(source(), BUDGET).measure(THRESHOLDS.by_cell().take(ids), rho=0.01)
    assert np.array_equal(np.rint(blocks.values * 400), counted(THRESHOLDS))
    assert np.array_equal(np.rint(cells.values * 400), counted(THRESHOLDS)[ids])
    assert blocks.sigma.shape == (2,)
    assert cells.sigma == pytest.approx(np.full(4, math.sqrt(4 / (2 * 0.01)) / 400))


def test_weights_of_selections_are_relative_to_the_largest():
    assert relative([Fraction(3)] * 5) == {Fraction(3): 1}
    assert relative([Fraction(3), Fraction(1), Fraction(3, 2)]) == {
        3: FINEST,
        1: round(FINEST / 3),
        Fraction(3, 2): 512,
    }
    assert relative([Fraction(1, 10**9), Fraction(10**9)]) == {Fraction(1, 10**9): 1, 10**9: FINEST}


@pytest.fixture
def seen(monkeypatch):
    """Records the scores and the scale of a selection, and selects nothing."""
    found = {}

    def keep(scores, k, scale, bits):
        found["scores"], found["scale"] = np.concatenate(list(scores)), scale
        return np.arange(k)

    def draw(self, k, scale, bits):
        found["pool"], found["scale"] = self, scale
        return np.arange(k)

    monkeypatch.setattr(curator_module, "top_k", keep)
    monkeypatch.setattr(Pool, "draw", draw)
    return found


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
def test_weights_multiply_scores_and_their_sensitivity(seen, relation):
    curator = Curator(source(), BUDGET, neighbours=relation)
    curator.select(WEIGHTED, zeros(WEIGHTED), rho=0.001, k=2, score=MaxError())
    errors = [part.max() for part in np.split(counted(WEIGHTED), np.cumsum([12, 60]))]
    shares = [FINEST, FINEST // 4, round(FINEST * 2 / 3)]
    assert seen["scores"].tolist() == [int(e * (1 << GRID)) * share for e, share in zip(errors, shares, strict=True)]
    assert seen["scale"] == pytest.approx((FINEST << GRID) * math.sqrt(2 / (2 * 0.001)))
    cells = WEIGHTED.by_cell()
    curator.select(cells, zeros(cells), rho=0.001, k=2, exclude=[70])
    expected = counted(WEIGHTED) * (1 << GRID) * np.repeat(shares, [12, 60, 12])
    expected[70] = curator_module.EXCLUDED
    assert np.array_equal(seen["scores"], expected)
    table = replace(UNIFORM, functions={FUNCTION.function: np.zeros(12)})
    curator.select(cells, table, rho=0.001, k=2)
    assert seen["scale"] == pytest.approx((FINEST << GRID) * math.sqrt(2 / (2 * 0.001)))
    curator.select(PAIRS.by_cell(), UNIFORM, rho=0.001, k=2)
    assert seen["scale"] == pytest.approx((1 << GRID) * math.sqrt(2 / (2 * 0.001)))


@pytest.mark.parametrize("workload", [WEIGHTED.by_cell(), WEIGHTED], ids=["cells", "blocks"])
def test_absurd_estimates_do_not_overflow(seen, workload):
    """The bug: the product of a score and its share wrapped around, and one row could move it by 2^63."""
    score = MaxError() if workload is WEIGHTED else AbsoluteError()
    for size in (1e300, -1e300, 2.0**50, 2.0**41, 2.0**40):
        found = []
        for rows in (ROWS, np.concatenate([ROWS[:-1], ROWS[:1]])):
            guess = (np.full(piece.tally.cells, size) for piece in workload.pieces())
            Curator(source(rows), BUDGET).select(workload, guess, rho=0.001, score=score)
            found.append(seen["scores"])
        assert min(found[0].min(), found[1].min()) >= 0
        assert np.abs(found[0] - found[1]).max() <= FINEST << GRID


def test_functions_and_thresholds_are_selected_by_their_largest_error(scales):
    workload = Workload((Marginals(SIZES, ((0, 1),)), Thresholds(SIZES, ((0, 1, 2),), 1), FUNCTION))
    chosen = Curator(source(), HUGE).select(workload, zeros(workload), rho=1.0, k=3, score=MaxError())
    errors = [part.max() for part in np.split(counted(workload), np.cumsum([12, 60]))]
    assert np.array_equal(chosen, np.argsort(errors)[::-1])


# Tables


class SpyTable(RelaxedTable):
    """A table of another type."""

    def side(self, sizes, features, total):
        raise AssertionError("a foreign table was asked for cells")


class SpyPrior(Prior):
    """A prior of another type."""

    def tickets(self, sizes, features, mean):
        raise AssertionError("a foreign prior was asked for tickets")


FITTING = Prior(0.5, np.concatenate([np.full(size, 1 / size) for size in SIZES]))
CELLS = PAIRS.by_cell()


@pytest.mark.parametrize(
    ("workload", "estimate", "more"),
    [
        (PAIRS, UNIFORM, {"score": L1Error()}),
        (PAIRS, UNIFORM, {}),
        (CELLS, UNIFORM, {"score": MaxError()}),
        (CELLS, [np.zeros(12), np.zeros(20), np.zeros(15)], {"prior": FITTING}),
        (CELLS, UNIFORM, {"prior": Prior(0.5, np.full(11, 1 / 3))}),
        (CELLS, UNIFORM, {"prior": Prior(0.5, np.full(12, 0.9))}),
        (CELLS, UNIFORM, {"prior": SpyPrior(0.5, FITTING.popular)}),
        (CELLS, SpyTable(SIZES, UNIFORM.lines, UNIFORM.weights), {}),
        (CELLS, RelaxedTable((3, 4, 5), UNIFORM.lines, UNIFORM.weights), {}),
        (CELLS, UNIFORM, {"exclude": [47]}),
        (CELLS, UNIFORM, {"k": 48}),
        (Workload((FUNCTION,)).by_cell(), UNIFORM, {}),
        (Workload((FUNCTION,)).by_cell(), RowTable(source(), 400), {}),
        (Workload((FUNCTION,)).by_cell(), replace(UNIFORM, functions={FUNCTION.function: np.zeros(3)}), {}),
    ],
)
def test_selections_that_a_table_does_not_cover_are_refused_before_the_charge(workload, estimate, more):
    curator = Curator(source(), BUDGET)
    with pytest.raises((WorkloadError, ParameterError)):
        curator.select(workload, estimate, rho=0.001, **more)
    assert curator.privacy().spends == ()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_table_must_be_of_numbers(wrong):
    lines = UNIFORM.lines.copy()
    lines[3, 1] = wrong
    if math.isnan(wrong):
        with pytest.raises(ParameterError, match="finite"):
            RelaxedTable(SIZES, lines, UNIFORM.weights)
    else:
        assert RelaxedTable(SIZES, lines, UNIFORM.weights).lines[3, 1] == (wrong > 0)
    lines = UNIFORM.lines
    for shapes in ((lines[1:], UNIFORM.weights), (lines, UNIFORM.weights[:1]), (lines.T, UNIFORM.weights)):
        with pytest.raises(ParameterError, match="a line for each code"):
            RelaxedTable(SIZES, *shapes)


def test_a_table_keeps_its_own_probabilities():
    """Numbers that rounding has moved past 1 are cut, and what the owner changes later is not seen."""
    lines = UNIFORM.lines.copy()
    lines[0, 0], lines[1, 0] = 1 + 1e-6, -1e-9
    table = RelaxedTable(SIZES, lines, UNIFORM.weights)
    lines[:] = 7.0
    assert table.lines[:2, 0].tolist() == [1.0, 0.0]
    assert table.lines.max() == 1.0


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
def test_selection_by_a_table_is_charged_stored_and_resumed(tmp_path, relation):
    def chosen(rows, **more):
        ledger = Ledger(tmp_path / "ledger")
        curator = Curator(rows, BUDGET, neighbours=relation, ledger=ledger, **more)
        return curator.select(CELLS, UNIFORM, rho=curator.remaining / 4, k=3, prior=FITTING).tolist()

    first, rows = chosen(source()), source()
    assert chosen(rows, resume=True) == first
    assert rows.asked == 0
    assert [entry.kind for entry in Ledger(tmp_path / "ledger").entries("rows")][-1] == "select"


def test_selection_by_a_table_is_charged_before_rows_are_counted():
    class Broken(Watched):
        def counts(self, sets):
            raise RuntimeError("the engine broke")

    curator = Curator(Broken(Table(ROWS.astype(np.int32), SIZES), SCHEMA), BUDGET)
    with pytest.raises(RuntimeError):
        curator.select(CELLS, UNIFORM, rho=0.001)
    assert [spend.kind for spend in curator.privacy().spends] == ["select"]


def test_more_queries_than_can_be_listed():
    """10^16 marginal cells and as many thresholds, of which two and 80 000 have an error."""
    sizes = (10_000,) * 4
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    rows = TableSource(Table(np.full((1000, 4), 7, np.int32), sizes), schema)
    everywhere = Workload((Marginals(sizes, ((0, 1, 2, 3),)), Thresholds(sizes, ((3, 1, 0, 2),), 3))).by_cell()
    lines = np.zeros((40_000, 3), np.float32)
    lines[np.arange(4) * 10_000 + 9] = 1
    table = RelaxedTable(sizes, lines, np.full(3, 1 / 3, np.float32))
    popular = np.where(np.arange(40_000) % 10_000 < 10, 0.1, 0.0)
    assert everywhere.cells == 2 * 10**16
    for prior in (None, Prior(0.5, popular)):
        for chosen in Curator(rows, HUGE).select(everywhere, table, rho=1.0, k=9, prior=prior).tolist():
            block, cell = divmod(chosen, 10**16)
            codes = np.array(np.unravel_index(cell, sizes))
            assert max(np.sum(codes == 7), np.sum(codes == 9)) >= (4 if block == 0 else 3)


def test_custom_blocks_are_of_one_function():
    assert isinstance(FUNCTION, Custom)
    assert Curator(source(), HUGE).select(
        Workload((FUNCTION,)), iter([np.zeros(12)]), rho=0.1, score=MaxError()
    ).tolist() == [0]


@pytest.mark.parametrize(
    "rows",
    [
        source(),
        Table(np.full((400, 3), -1, np.int32), SIZES),
        Table(np.full((400, 3), 9, np.int32), SIZES),
        Table(np.zeros((400, 3), np.int32), (3, 4, 6)),
        Table(np.zeros((399, 3), np.int32), SIZES),
    ],
)
def test_rows_to_compare_with_must_be_plain_and_fit(rows):
    """Counts below 0, or of an object that tells when it is asked, would void the bounds or carry what was asked."""
    curator = Curator(source(), BUDGET)
    with pytest.raises(ParameterError):
        curator.select(CELLS, RowTable(rows, 400), rho=0.001)
    assert curator.privacy().spends == ()


def test_a_table_keeps_numbers_of_its_own():
    lines, answers = np.array(UNIFORM.lines), {FUNCTION.function: np.zeros(FUNCTION.function.count)}
    table = RelaxedTable(SIZES, lines, UNIFORM.weights, answers)
    lines[:] = 0.9
    answers[FUNCTION.function][:] = 0.9
    answers.clear()
    assert np.array_equal(table.lines, UNIFORM.lines)
    assert not np.any(table.functions[FUNCTION.function])


class Shifty(Workload):
    """NOT a workload: it asks for one cell many times once its sensitivity is known."""

    @property
    def digest(self):
        for part in self.parts:
            part.chosen[:] = 0
        return "shifty"


def test_what_is_counted_is_what_was_checked():
    chosen = np.arange(8)
    workload = Shifty((Cells(Marginals(SIZES, ((0, 1),)), chosen),))
    budget = Budget(epsilon=1e6, delta=1e-6)
    measured = Curator(source(), budget, unsafe_seed=1).measure(workload, rho=budget.rho)
    assert not np.any(chosen)
    assert np.ptp(measured.values) > 0.01


@pytest.mark.parametrize("weight", [1.0, 2, Fraction(0), Fraction(-1)])
def test_a_weight_must_be_an_exact_number(weight):
    class Odd(Workload):
        def pieces(self, limit=None):
            return (replace(piece, weight=weight) for piece in super().pieces(limit))

    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError):
        curator.measure(Odd(CELLS.parts), rho=0.001)
    assert curator.privacy().spends == ()


def test_a_budget_too_small_for_a_table_is_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    with pytest.raises(ParameterError, match="must be larger"):
        curator.select(CELLS, UNIFORM, rho=1e-40)
    assert curator.privacy().spends == ()
