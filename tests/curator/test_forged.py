"""Objects that say one thing when they are checked and another when rows are counted: none gets less noise, or rows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from anamorph.columns import Codes, Numeric
from anamorph.curator import curator as curator_module
from anamorph.curator.bands import Bands
from anamorph.curator.budget import Budget
from anamorph.curator.cosines import Cosines, circle
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable, RowTable
from anamorph.curator.ledger import Ledger
from anamorph.curator.residuals import Residual
from anamorph.curator.scores import L1Error
from anamorph.curator.tallies import GroupBy
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError, WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.piece import Piece
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 7, 2, 6)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 200) for i, size in enumerate(SIZES)], axis=1)
BUDGET = Budget(epsilon=1.0, delta=1e-6)
MARGINAL = GroupBy(SIZES, (2,), 0, 2)
PREFIXES = Where(SIZES, (0,), (1, 3), (7, 5), np.array([[2, 4], [5, 1]]))
HALFSPACES = Where(SIZES, (2,), (3, 1), (5, 7), np.array([3, -4]), np.array([[2, -1], [-3, 1]]))
COSINES = Cosines(SIZES, (0,), (1, 3), (7, 5), np.array([[1 << 60, 5], [7, -(1 << 61)]]))
SPECIAL = (PREFIXES, HALFSPACES, COSINES, Residual(SIZES, (0, 2)), Bands(SIZES, (3, 0), ((2, 4), ())))


class Pieces:
    """A workload of any pieces; those that are streamed may be others."""

    digest = "pieces"

    def __init__(self, *pieces, streamed=None):
        self.whole, self.streamed = pieces, pieces if streamed is None else streamed
        self.blocks, self.cells = pieces[-1].first + pieces[-1].blocks, sum(piece.tally.cells for piece in pieces)

    def pieces(self, limit=None):
        return iter(self.streamed if limit is None else self.whole)


def curator() -> Curator:
    return Curator(TableSource(Table(ROWS.astype(np.int32), SIZES), SCHEMA), BUDGET)


@pytest.fixture
def scales(monkeypatch):
    """Records the noise that is asked for, and makes none."""
    seen = []

    def gaussian(size, sigma, bits):
        seen.append(sigma)
        return np.zeros(size, np.int64)

    def largest(scores, k, scale, bits):
        seen.append(scale)
        return np.argsort(-np.concatenate(list(scores)), kind="stable")[:k]

    monkeypatch.setattr(curator_module, "discrete_gaussian", gaussian)
    monkeypatch.setattr(curator_module, "top_k", largest)
    return seen


def plain(tally):
    return Piece(tally, 1, getattr(tally, "tests", 1))


@pytest.mark.parametrize("tally", SPECIAL, ids=lambda tally: type(tally).__name__)
def test_methods_of_an_object_are_not_asked(scales, tally):
    """What an object carries under the name of a method would be found before the method of its class."""
    honest = curator().measure(Pieces(Piece(MARGINAL, 0, 1), plain(tally)), rho=0.01)
    forged, called = type(tally)(**vars(tally)), []
    for name in ("copied", "identities", "holds", "taken", "angles", "replaced", "centred"):
        vars(forged)[name] = lambda *_, name=name: called.append(name) or forged
    measured = curator().measure(Pieces(Piece(MARGINAL, 0, 1), plain(forged)), rho=0.01)
    assert called == []
    assert scales[:2] == scales[2:]
    assert measured.values.tolist() == honest.values.tolist()


class Sly(Piece):
    """A piece that has another tally when it is asked often."""

    patience = 0

    def __getattribute__(self, name):
        if name == "tally":
            type(self).patience -= 1
            if type(self).patience < 0:
                return GroupBy(SIZES, (0, 1, 2, 3), 0, 3)
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("patience", [2, 4])  # one of them is ours: Pieces counts the cells
def test_a_piece_is_read_once(scales, monkeypatch, patience):
    monkeypatch.setattr(Sly, "patience", patience)
    expected = curator().measure(Pieces(Piece(MARGINAL, 0, 1), plain(PREFIXES)), rho=0.01)
    measured = curator().measure(Pieces(Sly(MARGINAL, 0, 1), plain(PREFIXES)), rho=0.01)
    assert measured.values.tolist() == expected.values.tolist()
    assert scales[:2] == scales[2:]


def test_a_score_is_the_curators_own(scales):
    workload = Workload((Marginals(SIZES, ((0,), (1, 2))),))
    guess, told, forged = [np.zeros(3), np.zeros(14)], [], L1Error()
    vars(forged)["sensitivity"] = lambda _: 1
    vars(forged)["merge"] = lambda errors, before: told.append(errors) or 0
    honest, chosen = (curator().select(workload, guess, rho=0.01, score=score) for score in (L1Error(), forged))
    assert told == []
    assert scales[0] == scales[1]
    assert honest.tolist() == chosen.tolist()


def relaxed() -> RelaxedTable:
    lines = np.concatenate([np.full((size, 2), 1 / size) for size in SIZES]).astype(np.float32)
    return RelaxedTable(SIZES, lines, np.full(2, 0.5, np.float32))


def test_a_table_is_asked_by_nothing_of_the_callers():
    """Which cells of it are looked at depends on the rows."""
    asked, cells = [], Workload((Marginals(SIZES, ((0, 1), (1, 3))),)).by_cell()

    def side(*_):
        asked.append("side")
        return relaxed().side(SIZES, (0, 1), 200.0)

    def counts(*_):
        asked.append("counts")
        return iter(((np.array([0]), np.array([1])),))

    rows = Table(ROWS[:5].astype(np.int32), SIZES)
    by_rows, by_lines = RowTable(rows, 5), relaxed()
    vars(rows)["counts"], vars(by_rows)["side"], vars(by_lines)["side"], vars(by_lines)["blocks"] = (
        counts,
        side,
        side,
        0,
    )
    for table in (by_rows, by_lines):
        assert curator().select(cells, table, rho=0.01, k=3).size == 3
    assert asked == []


@pytest.mark.parametrize(
    "streamed",
    [
        [],
        [Piece(MARGINAL, 0, 1)],
        [Piece(MARGINAL, 0, 1), plain(PREFIXES), Piece(MARGINAL, 3, 1)],
        [Piece(MARGINAL, 0, 1, Fraction(2)), plain(PREFIXES)],
    ],
)
def test_other_blocks_or_weights_in_a_stream_are_refused_before_the_charge(streamed):
    mine, guess = curator(), [np.zeros(piece.tally.cells) for piece in streamed]
    with pytest.raises(WorkloadError, match="the same blocks and weights however it is cut into pieces"):
        mine.select(
            Pieces(Piece(MARGINAL, 0, 1), plain(PREFIXES), streamed=streamed), guess, rho=0.01, k=2, score=L1Error()
        )
    assert mine.privacy().spends == ()


@pytest.mark.parametrize(
    "tally",
    [
        Where(SIZES, (0,), (1,), (7,), np.array([[2.5]])),
        Where(SIZES, (0,), (1,), (7,), np.array([[np.nan]])),
        Where(SIZES, (0,), (1,), (7,), np.array([[True]])),
        Where(SIZES, (0,), (1,), (7,), np.array([3]), np.array([[0.5]])),
        Where(SIZES, (0,), (1,), (7,), np.array([[1 << 63]], np.uint64)),
        Cosines(SIZES, (0,), (1,), (7,), np.array([[0.5]])),
        Cosines(SIZES, (0,), (1,), (7,), np.array([[1 << 63]], np.uint64)),
    ],
)
def test_numbers_that_are_not_whole_are_refused_and_not_rounded(tally):
    """Else the answer would be that of another question."""
    mine = curator()
    with pytest.raises(WorkloadError, match="must be of tallies over the columns"):
        mine.measure(Pieces(Piece(tally, 0, 1)), rho=0.01)
    assert mine.privacy().spends == ()


def test_a_marginal_of_too_many_cells_is_refused_before_the_charge():
    """Every source refuses it, but after the charge."""
    sizes = (1000,) * 7
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="rows")
    mine = Curator(TableSource(Table(np.zeros((3, 7), np.int32), sizes), schema), BUDGET)
    with pytest.raises(WorkloadError, match=r"fewer than 2\^63 cells"):
        mine.measure(Pieces(Piece(GroupBy(sizes, tuple(range(7)), 0, 1, (0,) * 6), 0, 1)), rho=0.01)
    assert mine.privacy().spends == ()
    assert mine.measure(Pieces(Piece(GroupBy(sizes, tuple(range(6)), 0, 1, (0,) * 5), 0, 1)), rho=0.01).values.size == 1


def test_the_table_of_cosines_cannot_be_changed():
    """It is kept for all tallies; their sensitivity is that of its entries."""
    for table in circle():
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1 << 40


def test_an_answer_is_not_taken_for_that_of_another_encoding(tmp_path):
    """The account is the same for all knots, and terms are the caller's: the request itself tells them apart."""
    rows, workload = np.zeros((9, 1), np.int32), Workload((Marginals((8,), ((0,),)),))
    schemas = [
        Schema((Numeric(name="x", lower=0, upper=10, bins=8, transform="quantile", knots=(0, knot, 10)),), dataset="d")
        for knot in (2, 7)
    ]
    assert schemas[0].fingerprint == schemas[1].fingerprint

    def begun(schema, resume):
        source = TableSource(Table(rows, (8,)), schema)
        return Curator(source, BUDGET, ledger=Ledger(tmp_path / "ledger"), resume=resume)

    first = begun(schemas[0], resume=False).measure(workload, rho=0.001)
    again = begun(schemas[0], resume=True).measure(workload, rho=0.001)
    assert first.values.tolist() == again.values.tolist()
    with pytest.raises(CorruptionError, match="charged for another request"):
        begun(schemas[1], resume=True).measure(workload, rho=0.001)
