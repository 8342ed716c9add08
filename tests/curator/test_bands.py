"""Marginals of bands: counts row by row, their sensitivity against every neighbour, and what a curator allows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import bands as module
from anamorph.curator import cache as cache_module
from anamorph.curator.bands import MOST_CELLS, Bands, band_counts
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RowTable
from anamorph.curator.scores import AbsoluteError, L1Error, MaxError
from anamorph.curator.tallies import GroupBy, check_tally, copied, count, squared_sensitivity
from anamorph.errors import WorkloadError
from anamorph.queries.bands import Banded
from anamorph.queries.marginals import Marginals
from anamorph.queries.piece import Piece
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource, open_source, sql
from anamorph.sources import engine as engine_module
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SIZES = (3, 7, 2, 6)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 400) for i, size in enumerate(SIZES)], axis=1)
BUDGET = Budget(epsilon=1.0, delta=1e-6)
HUGE = Budget(epsilon=1e9, delta=1e-6)
CUTS = ((), (2, 3, 6), (), (5,))
QUERIES = Banded(SIZES, ((1, 0), (3,), (0, 3, 1)), CUTS)
PAIR, ALONE, THREE = map(QUERIES.tally, range(3))
MANY = (PAIR, ALONE, THREE)
WORKLOAD = Workload((QUERIES,))


def source(rows=ROWS, sizes=SIZES) -> TableSource:
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="rows")
    return TableSource(Table(np.asarray(rows, np.int32).reshape(-1, len(sizes)), sizes), schema)


def by_hand(tally, rows):
    """Every row with every cell: a band is from one cut to before the next."""
    edges = [
        list(itertools.pairwise((0, *cuts, tally.sizes[f]) if cuts else range(tally.sizes[f] + 1)))
        for f, cuts in zip(tally.features, tally.cuts, strict=True)
    ]
    return [
        sum(
            all(low <= row[f] < high for f, (low, high) in zip(tally.features, cell, strict=True))
            for row in np.asarray(rows).reshape(-1, len(tally.sizes)).tolist()
        )
        for cell in itertools.product(*edges)
    ]


@st.composite
def tallies(draw, largest=6):
    sizes = tuple(draw(st.lists(st.integers(2, largest), min_size=1, max_size=4)))
    features = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, min(3, len(sizes))))])
    cuts = tuple(tuple(sorted(draw(st.sets(st.integers(1, sizes[f] - 1))))) for f in features)
    return Bands(sizes, features, cuts)


def rows_over(sizes, most=15):
    return st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), max_size=most)


@given(tallies(), st.data())
@settings(max_examples=150, deadline=None)
def test_counts_are_those_of_every_row_by_itself(tally, data):
    rows = data.draw(rows_over(tally.sizes))
    check_tally(tally, tally.sizes)
    numbers = count(tally, source(rows, tally.sizes))
    assert numbers.dtype == np.int64
    assert numbers.tolist() == by_hand(tally, rows)
    assert numbers.sum() == len(rows), "every row is in one cell"
    uncut = replace(tally, cuts=((),) * len(tally.features))
    whole = GroupBy(tally.sizes, tally.features, 0, tally.sizes[tally.features[0]])
    assert count(uncut, source(rows, tally.sizes)).tolist() == count(whole, source(rows, tally.sizes)).tolist()


class Batches:
    """Rows in batches, cut anywhere."""

    def __init__(self, rows, cuts=()):
        self.rows, self.cuts = np.asarray(rows, np.int32), cuts

    def batches(self):
        return iter(np.split(self.rows, self.cuts))


def test_batches_of_any_size_add_up():
    for cuts in ((), (0,), (1, 1, 399), (200,), (400,)):
        for tally in MANY:
            assert band_counts(tally, Batches(ROWS, cuts)).tolist() == by_hand(tally, ROWS)


@given(tallies(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_engine_counts_what_the_rows_do(tally, data):
    """Inside of it: no row comes out. Cut features may stand before the others, or there may be none."""
    rows = data.draw(rows_over(tally.sizes))
    codes = np.array(rows, np.int64).reshape(-1, len(tally.sizes))
    frame = pa.table({f"c{i}": codes[:, i] for i in range(len(tally.sizes))})
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(tally.sizes)))
    with pytest.MonkeyPatch.context() as patch, open_source(frame, schema) as engine:
        patch.setattr(engine_module.EngineSource, "batches", None)
        patch.setattr(sql, "FEW_CUTS", data.draw(st.sampled_from([0, 2, 128])))
        assert band_counts(tally, engine).tolist() == by_hand(tally, rows)
    with open_source(frame, schema) as engine:  # a cap on cuts that all reach: the rows are read
        most = max(map(len, tally.cuts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MOST_CUTS", most)
            patch.setattr(engine_module.EngineSource, "grouped", None if not most else lambda *_: 1 / 0)
            assert band_counts(tally, engine).tolist() == by_hand(tally, rows)


def moves(asked):
    """The largest squared change by one row added, and by one row replaced, over all rows there are."""
    sizes = asked[0].sizes
    found = [
        np.concatenate([count(tally, source([row], sizes)) for tally in asked])
        for row in itertools.product(*map(range, sizes))
    ]
    added = max(int(row @ row) for row in found)
    return added, max((int((a - b) @ (a - b)) for a, b in itertools.combinations(found, 2)), default=0)


@given(tallies(largest=3))
@settings(max_examples=60, deadline=None)
def test_no_neighbour_moves_a_marginal_of_bands_by_more(tally):
    """And some move it by as much."""
    added, replaced = moves([tally])
    assert added == squared_sensitivity([tally], "add-remove") == 1
    assert replaced == squared_sensitivity([tally], "replace") == 2


def test_several_add_up_unless_one_is_asked_twice():
    """The same features cut elsewhere are another block, which pays as well; so do weights."""
    other = replace(PAIR, cuts=((4,), ()))
    plain = GroupBy(SIZES, (1, 0), 0, 7)
    turned = replace(PAIR, features=(0, 1), cuts=((), PAIR.cuts[0]))
    for asked in ([PAIR, ALONE], [PAIR, other], [PAIR, plain], [PAIR, turned], [replace(PAIR, cuts=((), ())), plain]):
        assert (
            (squared_sensitivity(asked, "add-remove"), squared_sensitivity(asked, "replace")) == (2, 4) == moves(asked)
        )
    assert squared_sensitivity([PAIR, ALONE], "replace", [Fraction(3), Fraction(1, 2)]) == 7
    for relation in RELATIONS:
        with pytest.raises(WorkloadError, match="must be asked once"):
            squared_sensitivity([PAIR, ALONE, copied(PAIR)], relation)


class Posing(Bands):
    """One that says it has one cell."""

    @property
    def cells(self):
        return 1


FAULTY = [
    replace(PAIR, cuts=((3, 2, 6), ())),
    replace(PAIR, cuts=((2, 2, 6), ())),
    replace(PAIR, cuts=((0, 2), ())),
    replace(PAIR, cuts=((-1, 2), ())),
    replace(PAIR, cuts=((2, 7), ())),
    replace(PAIR, cuts=((2, 3, 6), (3,))),
    replace(PAIR, cuts=((2, 3, 6),)),
    replace(PAIR, cuts=((2, 3, 6), (), ())),
    replace(PAIR, cuts=()),
    replace(PAIR, cuts=((2.0, 3), ())),
    replace(PAIR, cuts=((True, 3), ())),
    replace(PAIR, cuts=((np.int64(2), 3), ())),
    replace(PAIR, features=(1, 1)),
    replace(PAIR, features=(1, 4)),
    replace(PAIR, features=(1, -1)),
    replace(PAIR, features=(1, False)),
    replace(PAIR, features=(1.0, 0)),
    replace(PAIR, features=(), cuts=()),
    replace(PAIR, sizes=SIZES[:2]),
    Bands(SIZES[:2], (3,), ((),)),
    replace(PAIR, sizes=(3, 8, 2, 6)),
    Posing(SIZES, PAIR.features, PAIR.cuts),
]


@pytest.mark.parametrize("tally", FAULTY, ids=range(len(FAULTY)))
def test_what_is_no_marginal_of_bands_is_refused(tally):
    for sound in MANY:
        check_tally(sound, SIZES)
    with pytest.raises(WorkloadError, match="must be of tallies over the columns of this schema"):
        check_tally(tally, SIZES)


def test_too_many_cells_are_refused():
    sizes = (1 << 12, 1 << 13, 3)
    check_tally(Bands(sizes, (0, 1), (tuple(range(1, 1 << 11)), ())), sizes)
    for large in (Bands(sizes, (0, 1), ((), ())), Bands(sizes, (0, 1, 2), (tuple(range(1, 1 << 11)), (), ()))):
        assert large.cells > MOST_CELLS
        with pytest.raises(WorkloadError, match="must be of tallies"):
            check_tally(large, sizes)


def test_a_copy_is_of_plain_integers():
    given_ = Bands(tuple(map(np.int64, SIZES)), (np.int64(1),), ([np.int64(2), np.int32(4)],))
    plain = copied(given_)
    assert plain == Bands(SIZES, (1,), ((2, 4),))
    assert {type(number) for number in (*plain.sizes, *plain.features, *plain.cuts[0])} == {int}
    check_tally(plain, SIZES)
    posing = Posing(SIZES, PAIR.features, PAIR.cuts)
    assert copied(posing) is posing, "it stays what check_tally refuses"


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_measurement_is_the_truth_with_the_noise_of_marginals(relation):
    curator = Curator(source(), HUGE, neighbours=relation)
    total = curator.total
    found = curator.measure(WORKLOAD, rho=1e6)
    exact = [number for tally in MANY for number in by_hand(tally, ROWS)]
    assert np.rint(found.values * total).tolist() == exact
    plain = curator.measure(Workload((Marginals(SIZES, ((0, 1), (2,), (0, 2, 1))),)), rho=1e6)
    assert found.sigma.tolist() == plain.sigma.tolist()
    assert found.sigma[0] * total == pytest.approx((3 * (2 if relation == "replace" else 1) / 2e6) ** 0.5)


def test_what_is_asked_twice_is_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    for twice in (WORKLOAD.take([0, 1, 0]), Workload((QUERIES, QUERIES.take([2])))):
        with pytest.raises(WorkloadError, match="must be asked once"):
            curator.measure(twice, rho=0.001)
    assert curator.privacy().spends == ()


@pytest.mark.parametrize("score", [L1Error(), MaxError()])
def test_the_worst_block_is_selected(score):
    """A block with the truth for an estimate has no error; ids are those of the workload."""
    exact = [np.array(by_hand(tally, ROWS)) / 400 for tally in MANY]
    for worst in range(3):
        estimate = [answers + (index == worst) * 0.05 for index, answers in enumerate(exact)]
        assert Curator(source(), HUGE).select(WORKLOAD, estimate, rho=1e6, score=score).tolist() == [worst]
    found = Curator(source(), HUGE).select(WORKLOAD, [a + 0.1 for a in exact], rho=1e6, k=2, score=L1Error())
    assert found.tolist() == [2, 0], "the sum of errors is as large as there are cells"


def test_a_selection_that_its_sensitivity_does_not_cover_is_refused():
    curator, estimate = Curator(source(), BUDGET), [np.zeros(tally.cells) for tally in MANY]
    table = RowTable(Table(ROWS.astype(np.int32), SIZES), 400)
    with pytest.raises(WorkloadError, match="must be selected by L1Error or MaxError"):
        curator.select(WORKLOAD, estimate, rho=0.001, score=AbsoluteError())
    with pytest.raises(WorkloadError, match="must be arrays, not a table"):
        curator.select(WORKLOAD, table, rho=0.001, score=L1Error())
    with pytest.raises(WorkloadError, match="where numbers are tested or cut into bands"):
        curator.select(Workload((Asked(),)), table, rho=0.001)
    assert curator.privacy().spends == ()


class Asked:
    """A marginal of bands whose cells pose as blocks: each is a counting query."""

    sizes, blocks, cells, largest_block = SIZES, 2, 2, 1

    def pieces(self, _limit):
        return iter([Piece(ALONE, 0, 2)])


class Counted:
    """A source that counts how often its rows are read."""

    def __init__(self):
        self.inner, self.schema, self.read = source(), SCHEMA, 0

    def rows(self):
        return self.inner.rows()

    def counts(self, sets):
        return self.inner.counts(sets)

    def batches(self):
        self.read += 1
        return self.inner.batches()


@pytest.mark.parametrize(("cap", "reads"), [(1 << 20, 3), (-1, 6)])
def test_counts_are_kept_up_to_the_cap(monkeypatch, cap, reads):
    monkeypatch.setattr(cache_module, "CACHE_BYTES", cap)
    counted = Counted()
    curator = Curator(counted, HUGE)
    curator.select(WORKLOAD, [np.zeros(tally.cells) for tally in MANY], rho=1e6, score=L1Error())
    found = curator.measure(WORKLOAD.take([2, 0, 1]), rho=1e6)
    exact = [by_hand(tally, ROWS) for tally in (THREE, PAIR, ALONE)]
    assert np.rint(found.values * 400).tolist() == list(itertools.chain(*exact))
    assert counted.read == reads
