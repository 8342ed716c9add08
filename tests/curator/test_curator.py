"""The curator charges first, counts exactly, adds the right noise, and never does it twice."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator import curator as curator_module
from anamorph.curator.budget import Budget
from anamorph.curator.curator import TOTAL_SHARE, Curator
from anamorph.curator.ledger import Ledger
from anamorph.curator.scores import GRID, AbsoluteError, L1Error, MaxError
from anamorph.curator.tallies import GroupBy
from anamorph.errors import BudgetError, DataError, ParameterError, SchemaError, WorkloadError
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.piece import Piece
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (4, 3, 5)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 400) for i, size in enumerate(SIZES)], axis=1)
PAIRS = Workload((Marginals(SIZES, ((0, 1), (0, 2), (1, 2))),))
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
    assert scales["sigma"] == [pytest.approx(math.sqrt(cells.cells / (2 * rho)))]


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


def test_blocks_in_several_pieces_have_one_score(monkeypatch, scales):
    estimate = [np.zeros(cells) for cells in PAIRS.block_cells]
    whole = Curator(source(), HUGE).select(PAIRS, iter(estimate), rho=1.0, k=3, score=L1Error())
    monkeypatch.setattr(Workload, "pieces", lambda self, limit=4, cut=Workload.pieces: cut(self, 4))
    slabs = [np.zeros(piece.tally.cells) for piece in PAIRS.pieces()]
    assert len(slabs) > 3
    assert np.array_equal(Curator(source(), HUGE).select(PAIRS, iter(slabs), rho=1.0, k=3, score=L1Error()), whole)


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


def test_a_block_that_is_not_one_marginal_is_refused():
    class Lump:
        """A query class that lies: two marginals as one block."""

        blocks, cells, block_cells = 1, 7, (7,)

        def pieces(self, limit):
            return iter([Piece(GroupBy(SIZES, (0,), 0, 4), 0, 1), Piece(GroupBy(SIZES, (1,), 0, 3), 0, 1)])

    with pytest.raises(WorkloadError, match="one marginal"):
        Curator(source(), BUDGET).select(Workload((Lump(),)), iter([]), rho=0.001, score=L1Error())


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


def test_a_prior_is_added_to_the_scores_and_changes_no_scale(monkeypatch):
    seen = {}

    def keep(scores, k, scale, bits):
        seen["scores"], seen["scale"] = np.concatenate(list(scores)), scale
        return np.arange(k)

    monkeypatch.setattr(curator_module, "top_k", keep)
    cells, found = PAIRS.by_cell(), []
    lean = [np.linspace(-3, 3, piece.tally.cells) for piece in cells.pieces()]
    for prior in (None, iter(lean)):
        Curator(source(), BUDGET).select(cells, zeros(cells), rho=0.001, k=2, exclude=[4], prior=prior)
        found.append(dict(seen))
    assert found[0]["scale"] == found[1]["scale"]
    added = found[1]["scores"] - found[0]["scores"]
    others = np.arange(added.size) != 4
    assert np.allclose(added[others], np.rint(np.concatenate(lean) * found[0]["scale"])[others])
    assert found[1]["scores"][4] == curator_module.EXCLUDED


def test_a_prior_draws_in_proportion_to_its_weights():
    """With no error anywhere, the first of the ordered ids is drawn by the weights alone."""
    one = Workload((Marginals((3,), ((0,),)),)).by_cell()
    schema = Schema((Codes(name="a", values=3),))
    rows = TableSource(Table(np.zeros((4, 1), np.int32), (3,)), schema)
    curator, weights = Curator(rows, HUGE), np.array([0.1, 0.2, 0.7])
    truth_itself = [np.array([1.0, 0.0, 0.0])]
    drawn = [
        int(curator.select(one, iter(truth_itself), rho=1e-3, prior=iter([np.log(weights)]))[0]) for _ in range(3000)
    ]
    shares = np.bincount(drawn, minlength=3) / 3000
    assert np.all(np.abs(shares - weights) < 6 * np.sqrt(weights * (1 - weights) / 3000))


@pytest.mark.parametrize("bad", [np.full(47, np.nan), np.full(47, 1e9), np.zeros(3)])
def test_a_prior_must_be_finite_and_fit(bad):
    cells = PAIRS.by_cell()
    with pytest.raises((ParameterError, ValueError)):
        Curator(source(), BUDGET).select(cells, zeros(cells), rho=0.001, prior=iter([bad]))
    with pytest.raises(WorkloadError, match="single queries"):
        Curator(source(), BUDGET).select(PAIRS, zeros(PAIRS), rho=0.001, score=L1Error(), prior=iter([bad]))
