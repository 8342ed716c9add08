"""Tests of numbers: counts row by row, their sensitivity against every neighbour, and what a curator allows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import cache as cache_module
from anamorph.curator import curator as curator_module
from anamorph.curator import where as module
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable, RowTable
from anamorph.curator.scores import GRID, AbsoluteError, L1Error, MaxError
from anamorph.curator.tallies import GroupBy, check_tally, copied, count, squared_sensitivity
from anamorph.curator.where import LARGEST_SUM, Where, where_counts
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.piece import Piece
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SCORES = (AbsoluteError(), L1Error(), MaxError())
SIZES = (3, 7, 2, 6)
"""c1 has 7 codes; c3 has 5, and `missing`."""
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 400) for i, size in enumerate(SIZES)], axis=1)
BUDGET = Budget(epsilon=1.0, delta=1e-6)
HUGE = Budget(epsilon=1e9, delta=1e-6)
PREFIXES = Where(SIZES, (0,), (1, 3), (7, 5), np.array([[2, 4], [5, 1], [0, 0], [6, 3]]))
HALFSPACES = Where(SIZES, (2, 0), (3, 1), (5, 7), np.array([3, -4, 11]), np.array([[2, -1], [-3, 1], [5, 5]]))
SINGLE = Where(SIZES, (), (1,), (7,), np.array([[1], [4], [5]]))
MANY = (PREFIXES, HALFSPACES, SINGLE)


def source(rows=ROWS, sizes=SIZES) -> TableSource:
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="rows")
    return TableSource(Table(np.asarray(rows, np.int32).reshape(-1, len(sizes)), sizes), schema)


def by_hand(tally, rows):
    """Every row with every test, in Python's whole numbers."""
    numbers = np.zeros((tally.tests, tally.width), np.int64)
    for row in np.asarray(rows, np.int64).reshape(-1, len(tally.sizes)).tolist():
        codes = [row[number] for number in tally.numbers]
        if any(code >= limit for code, limit in zip(codes, tally.limits, strict=True)):
            continue
        cell = 0
        for feature in tally.given:
            cell = cell * tally.sizes[feature] + row[feature]
        for test in range(tally.tests):
            if tally.weights is None:
                passed = all(code <= int(bound) for code, bound in zip(codes, tally.bounds[test], strict=True))
            else:
                total = sum(int(w) * code for w, code in zip(tally.weights[test], codes, strict=True))
                passed = total <= int(tally.bounds[test])
            numbers[test, cell] += passed
    return numbers.ravel()


@st.composite
def wheres(draw, largest=5, most_tests=7):
    sizes = tuple(draw(st.lists(st.integers(2, largest), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(sizes))))
    width = draw(st.integers(1, len(sizes)))
    numbers, given_ = tuple(order[:width]), tuple(order[width : width + draw(st.integers(0, 2))])
    limits = tuple(max(1, sizes[number] - draw(st.integers(0, 1))) for number in numbers)
    tests = draw(st.integers(1, most_tests))
    whole = st.integers(-3, 25)
    if draw(st.booleans()):
        bounds = [[draw(st.integers(-1, largest)) for _ in numbers] for _ in range(tests)]
        return Where(sizes, given_, numbers, limits, np.array(bounds))
    weights = [[draw(st.integers(-6, 6)) for _ in numbers] for _ in range(tests)]
    bounds = [draw(whole) for _ in range(tests)]
    return Where(sizes, given_, numbers, limits, np.array(bounds), np.array(weights))


def rows_over(sizes, most=15):
    return st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), max_size=most)


@given(wheres(), st.data())
@settings(max_examples=150, deadline=None)
def test_counts_are_those_of_every_row_by_itself(tally, data):
    rows = data.draw(rows_over(tally.sizes))
    check_tally(tally, tally.sizes)
    numbers = count(tally, source(rows, tally.sizes))
    assert numbers.dtype == np.int64
    assert numbers.shape == (tally.cells,) == (tally.tests * tally.width,)
    assert numbers.tolist() == by_hand(tally, rows).tolist()


class Batches:
    """Rows in batches, cut anywhere."""

    def __init__(self, rows, cuts=()):
        self.rows, self.cuts, self.read = np.asarray(rows, np.int32), cuts, 0

    def batches(self):
        self.read += 1
        return iter(np.split(self.rows, self.cuts))


class Grouping(Batches):
    """Rows that count marginals over ranks too, one by one."""

    asked = 0

    def grouped(self, given, cuts):
        self.asked += 1
        assert all(np.all(np.diff(each) > 0) for each in cuts.values())
        found = {}
        for row in self.rows.tolist():
            ranks = [sum(cut < row[number] for cut in each) for number, each in cuts.items()]
            if all(rank < len(each) for rank, each in zip(ranks, cuts.values(), strict=True)):
                cell = 0
                for size, code in [(self.sizes[i], row[i]) for i in given] + [
                    (len(each), rank) for rank, each in zip(ranks, cuts.values(), strict=True)
                ]:
                    cell = cell * size + code
                found[cell] = found.get(cell, 0) + 1
        return np.array(list(found), np.int64), np.array(list(found.values()), np.int64)


LIMITS = {"ROWS": 6, "TESTS": 4, "PRODUCT": 30, "GRID": 60, "SPARSE": 9, "MOST_CUTS": 5, "LEAST_TESTS": 4}
"""Small ones, so that every way of counting is taken, and cut."""


@given(wheres(), st.fixed_dictionaries({name: st.integers(1, most) for name, most in LIMITS.items()}), st.data())
@settings(max_examples=300, deadline=None)
def test_counts_do_not_depend_on_how_they_are_counted(tally, limits, data):
    """By ranks or row by row, by the rows or by marginals over ranks, in pieces of any size."""
    rows = np.array(data.draw(rows_over(tally.sizes)), np.int32).reshape(-1, len(tally.sizes))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    grouping = Grouping(rows, cuts)
    grouping.sizes = tally.sizes
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(module, name, limit)
        found = [where_counts(tally, each) for each in (Batches(rows, cuts), grouping)]
    exact = by_hand(tally, rows).tolist()
    assert [each.tolist() for each in found] == [exact, exact]
    assert (grouping.read == 1) is (grouping.asked == 0)


@pytest.fixture
def ways(monkeypatch):
    """Records how tests are counted."""
    taken = []

    def recording(name):
        inner = getattr(module, name)

        def run(tally, *rest):
            taken.append((name, tally.tests))
            return inner(tally, *rest)

        return run

    for name in ("requested", "histogram", "compared"):
        monkeypatch.setattr(module, name, recording(name))
    return taken


def test_the_cheapest_way_is_taken(ways):
    """Few cells: the marginal over ranks. Many: row by row. A source that groups is asked, unless for little."""
    random = np.random.default_rng(5)
    sizes = (3, 90_000, 90_000, 90_000)
    rows = np.stack([random.integers(0, size, 50) for size in sizes], axis=1)
    plain, grouping = Batches(rows), Grouping(rows)
    grouping.sizes = sizes

    def taken(numbers, tests, where):
        bounds = random.integers(0, 90_000, (tests, numbers))
        tally = Where(sizes, (0,), (1, 2, 3)[:numbers], (90_000,) * numbers, bounds)
        ways.clear()
        assert where_counts(tally, where).tolist() == by_hand(tally, rows).tolist()
        return list(ways)

    assert taken(1, 3000, plain) == [("histogram", 3000)]
    assert taken(2, 40, plain) == [("histogram", 40)]
    assert taken(2, 2000, plain) == [("compared", 2000)]
    assert taken(3, 40, plain) == [("compared", 40)]
    assert taken(3, 40, grouping) == [("requested", 40)]
    assert [name for name, _ in taken(2, 2000, grouping)] == ["requested"] * 2
    assert taken(3, 400, grouping) == [("compared", 400)]


def test_more_bounds_than_two_bytes_tell_apart():
    """Ranks from 65,534 to 65,536, and one beyond, are told apart."""
    sizes, tests = (70_000,), np.arange(1, 65_538)[:, None]
    rows = np.arange(65_530, 65_545, dtype=np.int32)[:, None]
    for some in (tests[:65_535], tests[:65_536], tests):
        tally = Where(sizes, (), (0,), (69_999,), some)
        ranks = module.ranks_of(tally)
        expected = np.clip(some - 65_529, 0, 15).tolist()
        assert module.compared(tally, [rows], ranks).tolist() == expected
        assert module.gathered(module.histogram(tally, ranks, [rows]), ranks.places).tolist() == expected


def test_the_real_borders_of_rows_and_tests():
    random = np.random.default_rng(3)
    rows = np.stack([random.integers(0, size, module.ROWS + 3) for size in SIZES], axis=1)
    weights, bounds = random.integers(-5, 6, (module.TESTS + 2, 2)), random.integers(-9, 20, module.TESTS + 2)
    tally = Where(SIZES, (2,), (1, 3), (7, 5), bounds, weights)
    whole = where_counts(tally, Batches(rows)).reshape(-1, 2)
    for test in (0, module.TESTS - 1, module.TESTS, module.TESTS + 1):
        one = tally.taken(slice(test, test + 1))
        assert whole[test].tolist() == by_hand(one, rows).tolist()


@pytest.mark.parametrize("tally", MANY)
def test_a_missing_number_fails_every_test(tally):
    """Also tests that all numbers pass, and those that very small sums pass."""
    easy = replace(tally, bounds=np.full_like(tally.bounds, 1000))
    absent = ROWS.copy()
    absent[::3, 3] = 5
    missing = absent[:, 3] == 5 if 3 in tally.numbers else np.zeros(400, bool)
    found = count(easy, source(absent)).reshape(tally.tests, -1)
    assert found.sum(axis=1).tolist() == [int(np.sum(~missing))] * tally.tests
    lost = replace(tally, limits=(1,) * len(tally.numbers))  # codes above the limit are missing too
    assert count(lost, source(absent)).tolist() == by_hand(lost, absent).tolist()


def test_sums_near_the_largest_are_exact():
    """2^52 - 1 is told from 2^52 - 2: what rounding to 24 or even 51 digits would not."""
    sizes, limits = (3, 2), (3, 2)
    weights = np.array([[(LARGEST_SUM - 1 - 2) // 3, 1]])
    reach = int(weights[0, 0]) * 2 + 1
    for bound in (reach - 2, reach - 1, reach):
        tally = Where(sizes, (), (0, 1), limits, np.array([bound]), weights)
        check_tally(tally, sizes)
        rows = list(itertools.product(range(3), range(2)))
        assert count(tally, source(rows, sizes)).tolist() == by_hand(tally, rows).tolist()


def moves(tallies):
    """The largest squared change by one row added, and by one row replaced, over all rows there are."""
    sizes = tallies[0].sizes
    found = [
        np.concatenate([count(tally, source([row], sizes)) for tally in tallies])
        for row in itertools.product(*map(range, sizes))
    ]
    added = max(int(row @ row) for row in found)
    return added, max((int((a - b) @ (a - b)) for a, b in itertools.combinations(found, 2)), default=0)


@given(wheres(largest=3, most_tests=4))
@settings(max_examples=60, deadline=None)
def test_no_neighbour_moves_tests_by_more(tally):
    keys = list(tally.identities())
    if len(set(keys)) < len(keys):
        for relation in RELATIONS:
            with pytest.raises(WorkloadError, match="must be asked once"):
                squared_sensitivity([tally], relation)
        return
    added, replaced = moves([tally])
    assert added <= squared_sensitivity([tally], "add-remove") == tally.tests
    assert replaced <= squared_sensitivity([tally], "replace") == tally.tests * min(tally.width, 2)


def test_the_sensitivity_is_reached():
    """By a row that passes every test, in one cell; and by two of them in different cells."""
    easy = Where(SIZES, (0,), (1, 3), (7, 5), np.array([[2, 4], [5, 3], [6, 3]]))
    assert moves([easy]) == (3, 6)
    assert (squared_sensitivity([easy], "add-remove"), squared_sensitivity([easy], "replace")) == (3, 6)
    assert moves([SINGLE]) == (3, 3) == (len(SINGLE.bounds), squared_sensitivity([SINGLE], "replace"))
    both = [easy, HALFSPACES, GroupBy(SIZES, (0, 2), 0, 3)]
    for relation, most in zip(RELATIONS, (14, 7), strict=True):
        assert squared_sensitivity(both, relation) == most
    weights = [Fraction(2), Fraction(1, 3), Fraction(1)]
    assert squared_sensitivity(both, "replace", weights) == 2 * 6 + Fraction(6, 3) + 2


def test_tests_of_several_tallies_add_up_unless_one_is_asked_twice():
    alone = [replace(PREFIXES, bounds=PREFIXES.bounds[[i]]) for i in range(4)]
    for relation in RELATIONS:
        assert squared_sensitivity(alone, relation) == squared_sensitivity([PREFIXES], relation)
        for twice in ([*alone, alone[2]], [PREFIXES, alone[0]], [replace(SINGLE, bounds=SINGLE.bounds[[1, 1]])]):
            with pytest.raises(WorkloadError, match="must be asked once"):
                squared_sensitivity(twice, relation)


@pytest.mark.parametrize(
    "other",
    [
        replace(PREFIXES, given=(2,)),
        replace(PREFIXES, given=()),
        replace(PREFIXES, numbers=(3, 1), limits=(5, 7)),
        replace(PREFIXES, limits=(7, 6)),
        replace(PREFIXES, bounds=PREFIXES.bounds + 1),
        replace(PREFIXES, bounds=np.array([7]), weights=np.array([[2, 4]])),
    ],
)
def test_tests_are_told_apart_by_all_that_defines_them(other):
    assert not set(PREFIXES.identities()) & set(other.identities())
    assert len(set(PREFIXES.identities())) == PREFIXES.tests
    assert set(PREFIXES.identities()) == set(copied(PREFIXES).identities())


class Posing(Where):
    """One that says it has fewer tests than it has."""

    @property
    def tests(self):
        return 1


LEAST = np.iinfo(np.int64).min
FAULTY = [
    replace(PREFIXES, numbers=(1, 4)),
    replace(PREFIXES, numbers=(1, -1)),
    replace(PREFIXES, given=(4,)),
    replace(PREFIXES, given=(-1,)),
    replace(PREFIXES, given=(0, 0)),
    replace(PREFIXES, given=(1,)),
    replace(PREFIXES, numbers=(1, 1)),
    replace(PREFIXES, numbers=(), limits=(), bounds=np.zeros((4, 0), np.int64)),
    replace(PREFIXES, limits=(7,)),
    replace(PREFIXES, limits=(8, 5)),
    replace(PREFIXES, limits=(0, 5)),
    replace(PREFIXES, bounds=PREFIXES.bounds.astype(np.int32)),
    replace(PREFIXES, bounds=PREFIXES.bounds.astype(float)),
    replace(PREFIXES, bounds=PREFIXES.bounds.astype(">i8")),
    replace(PREFIXES, bounds=np.ma.masked_array(PREFIXES.bounds)),
    replace(PREFIXES, bounds=PREFIXES.bounds[:, :1]),
    replace(PREFIXES, bounds=PREFIXES.bounds[:, 0]),
    replace(PREFIXES, bounds=PREFIXES.bounds[:0]),
    replace(PREFIXES, sizes=SIZES[:3]),
    replace(HALFSPACES, bounds=HALFSPACES.bounds[:, None]),
    replace(HALFSPACES, bounds=HALFSPACES.bounds[:2]),
    replace(HALFSPACES, weights=HALFSPACES.weights[:, :1]),
    replace(HALFSPACES, weights=HALFSPACES.weights.astype(float)),
    replace(HALFSPACES, bounds=np.array([3, LARGEST_SUM, 11])),
    replace(HALFSPACES, bounds=np.array([3, -LARGEST_SUM, 11])),
    replace(HALFSPACES, bounds=np.array([3, LEAST, 11])),
    replace(HALFSPACES, weights=np.array([[2, -1], [LARGEST_SUM // 5 + 1, 0], [5, 5]])),
    replace(HALFSPACES, weights=np.array([[2, -1], [-(LARGEST_SUM // 10), LARGEST_SUM // 14 + 1], [5, 5]])),
    replace(HALFSPACES, weights=np.array([[2, -1], [LEAST, 0], [5, 5]])),
    replace(HALFSPACES, weights=np.array([[1 << 62, 0], [1 << 62, 1 << 62], [5, 5]])),
    Posing(SIZES, (0,), (1, 3), (7, 5), PREFIXES.bounds),
]


@pytest.mark.parametrize("tally", FAULTY, ids=range(len(FAULTY)))
def test_what_is_no_test_of_numbers_is_refused(tally):
    for sound in MANY:
        check_tally(sound, SIZES)
    with pytest.raises(WorkloadError, match="must be of tallies over the columns of this schema"):
        check_tally(tally, SIZES)


def test_a_copy_has_numbers_of_its_own():
    bounds, weights = HALFSPACES.bounds.copy(), HALFSPACES.weights.copy()
    plain = copied(replace(HALFSPACES, sizes=tuple(map(np.int64, SIZES)), bounds=bounds, weights=weights))
    bounds[:], weights[:] = 0, 0
    assert type(plain) is Where
    assert {type(number) for number in (*plain.sizes, *plain.given, *plain.numbers, *plain.limits)} == {int}
    assert list(plain.identities()) == list(HALFSPACES.identities())
    posing = Posing(SIZES, (0,), (1, 3), (7, 5), PREFIXES.bounds)
    assert copied(posing) is posing, "it stays what check_tally refuses"


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries that are what they are told to be."""

    listed: tuple
    streamed: tuple | None = None
    sizes: tuple = SIZES

    @property
    def blocks(self):
        return sum(piece.blocks for piece in self.listed)

    @property
    def cells(self):
        return sum(piece.tally.cells for piece in self.listed)

    @property
    def largest_block(self):
        return max(piece.tally.cells // piece.blocks for piece in self.listed)

    def pieces(self, limit):
        return iter(self.listed if limit > 1 << 40 or self.streamed is None else self.streamed)


def asked(tally, blocks) -> Workload:
    return Workload((Asked((Piece(tally, 0, blocks),)),))


WORKLOAD = Workload(tuple(map(NumberTests, MANY)))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("tally", MANY)
def test_a_measurement_has_the_noise_of_its_tests_however_it_is_divided(tally, relation):
    """One block, a block for each test, or single cells: the noise is the same, and enough."""
    for blocks in (1, tally.tests, tally.cells):
        curator = Curator(source(), HUGE, neighbours=relation)
        total = curator.total
        found = curator.measure(asked(tally, blocks), rho=0.5)
        expected = tally.tests * (1 if relation == "add-remove" else min(tally.width, 2))
        assert found.sigma.shape == (blocks,)
        assert found.sigma * total == pytest.approx(expected**0.5)
    curator = Curator(source(), HUGE, neighbours=relation)
    curator.total  # noqa: B018 - charged before the rest
    before = curator.privacy().spends
    with pytest.raises(WorkloadError, match="must be of single queries, or of one block"):
        curator.measure(asked(tally, tally.cells + 1), rho=0.5)
    assert curator.privacy().spends == before


@pytest.mark.parametrize("relation", RELATIONS)
def test_with_a_huge_budget_the_truth_is_measured(relation):
    curator = Curator(source(), HUGE, neighbours=relation)
    exact = np.concatenate([by_hand(tally, ROWS) for tally in MANY])
    found = curator.measure(WORKLOAD, rho=1e6)
    assert np.rint(found.values * curator.total).tolist() == exact.tolist()
    assert found.sigma.shape == (WORKLOAD.blocks,) == (10,)


def test_a_test_asked_twice_is_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    for twice in ((PREFIXES, PREFIXES), (SINGLE, replace(SINGLE, bounds=SINGLE.bounds[[2]]))):
        with pytest.raises(WorkloadError, match="must be asked once"):
            curator.measure(Workload(tuple(map(NumberTests, twice))), rho=0.001)
    assert curator.privacy().spends == ()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tally", [*MANY, replace(SINGLE, bounds=SINGLE.bounds[:2])])
def test_several_tests_that_pose_as_one_block_are_not_selected(tally, score):
    """A row would move the sum of their errors by as much as there are tests."""
    curator = Curator(source(), BUDGET)
    posing = asked(tally, 1)
    split = tuple(Piece(replace(tally, **halved(tally, i)), 0, 1) for i in range(tally.tests))
    streamed = Workload((Asked((Piece(tally, 0, 1),), split),))
    for workload in (posing, streamed):
        with pytest.raises(WorkloadError, match=r"a block (must be of one marginal|of several queries must be)"):
            curator.select(
                workload, [np.zeros(piece.tally.cells) for piece in workload.pieces()], rho=0.001, score=score
            )
    assert curator.privacy().spends == ()


def halved(tally, index):
    weights = None if tally.weights is None else tally.weights[[index]]
    return {"bounds": tally.bounds[[index]], "weights": weights}


def test_one_test_in_two_pieces_of_a_block_is_refused():
    """Counted twice, its error moves by twice as much."""
    one = replace(PREFIXES, bounds=PREFIXES.bounds[:1])
    workload = Workload((Asked((Piece(one, 0, 1),), (Piece(one, 0, 1), Piece(one, 0, 1))),))
    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError, match="must be asked once"):
        curator.select(workload, [np.zeros(3)] * 2, rho=0.001, score=L1Error())
    assert curator.privacy().spends == ()


def test_blocks_of_other_sizes_are_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    for blocks in (2, 3, 6):
        with pytest.raises(WorkloadError, match="must be of single queries, or of one block"):
            curator.select(asked(PREFIXES, blocks), [np.zeros(12)], rho=0.001, score=L1Error())
        mended = Workload((Asked((Piece(PREFIXES, 0, 4),), (Piece(PREFIXES, 0, blocks),)),))
        with pytest.raises(WorkloadError, match="must be of single queries, or of one block"):
            curator.select(mended, [np.zeros(12)], rho=0.001, score=L1Error())
    assert curator.privacy().spends == ()


@pytest.mark.parametrize("tests", [1, 4])
def test_tests_of_several_cells_have_no_absolute_error(tests):
    curator = Curator(source(), BUDGET)
    workload = Workload((NumberTests(replace(PREFIXES, bounds=PREFIXES.bounds[:tests])),))
    with pytest.raises(WorkloadError, match="must be selected by L1Error or MaxError"):
        curator.select(workload, [np.zeros(3 * tests)], rho=0.001, score=AbsoluteError())
    assert curator.privacy().spends == ()


UNIFORM = RelaxedTable(
    SIZES,
    np.concatenate([np.full((size, 2), 1 / size) for size in SIZES]).astype(np.float32),
    np.full(2, 0.5, np.float32),
)


@pytest.mark.parametrize("table", [UNIFORM, RowTable(Table(ROWS.astype(np.int32), SIZES), 400)])
def test_tests_are_not_selected_against_a_table(table):
    curator = Curator(source(), BUDGET)
    cells = Marginals(SIZES, ((0,),)).by_cell()
    for workload in (
        Workload((NumberTests(PREFIXES),)),
        Workload((NumberTests(SINGLE),)),
        Workload((cells, NumberTests(SINGLE))),
        asked(PREFIXES, PREFIXES.cells),
    ):
        with pytest.raises(WorkloadError, match="estimate must be arrays, not a table"):
            curator.select(workload, table, rho=0.001)
    assert curator.privacy().spends == ()


@pytest.fixture
def scores(monkeypatch):
    """Records the scores of a selection, and takes the largest without noise."""
    seen = []

    def best(chunks, k, beta, bits):
        found = np.concatenate(list(chunks))
        seen.append((found, beta))
        return np.argsort(-found, kind="stable")[:k]

    monkeypatch.setattr(curator_module, "top_k", best)
    return seen


@pytest.mark.parametrize("score", [L1Error(), MaxError()])
@pytest.mark.parametrize("limit", [1, 5, 12, 10**6])
@pytest.mark.parametrize("relation", RELATIONS)
def test_the_score_of_a_test_is_the_error_of_its_cells(scores, score, limit, relation):
    curator = Curator(source(), HUGE, neighbours=relation)
    workload = Workload((*WORKLOAD.parts, Marginals(SIZES, ((0, 1),))), limit=limit)
    guess = np.random.default_rng(1).random(workload.cells)
    cuts = np.cumsum([piece.tally.cells for piece in workload.pieces()])[:-1]
    chosen = curator.select(workload, np.split(guess, cuts), rho=0.1, k=3, score=score)
    exact = np.concatenate([*(by_hand(tally, ROWS) for tally in MANY), count(GroupBy(SIZES, (0, 1), 0, 3), source())])
    wrong = np.abs(exact - curator.total * guess)
    widths = np.repeat([3, 6, 1, 21], [4, 3, 3, 1])
    blocks = np.split(wrong, np.cumsum(widths)[:-1])
    expected = np.array([block.sum() if type(score) is L1Error else block.max() for block in blocks])
    ((found, beta),) = scores
    np.testing.assert_allclose(found / 2**GRID, expected, atol=25 * 2**-GRID)
    assert chosen.tolist() == np.argsort(-expected)[:3].tolist()
    assert beta / 2**GRID == pytest.approx(score.sensitivity(relation) * (3 / 0.2) ** 0.5, rel=1e-6)


def test_single_cells_of_tests_are_selected_one_by_one(scores):
    curator = Curator(source(), HUGE)
    guess = np.random.default_rng(2).random(12)
    for score in SCORES:
        curator.select(asked(PREFIXES, 12), [guess], rho=0.1, score=score)
        wrong = np.abs(by_hand(PREFIXES, ROWS) - 400 * guess)
        np.testing.assert_allclose(scores[-1][0] / 2**GRID, wrong, atol=2**-GRID)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_neighbour_moves_the_score_of_a_test_by_more(data):
    """Two tables of equal size that differ in a row: the scores of the blocks, in grid units."""
    tally = data.draw(wheres(largest=3, most_tests=3))
    rows = data.draw(rows_over(tally.sizes, most=6))
    row = data.draw(st.tuples(*(st.integers(0, size - 1) for size in tally.sizes)))
    other = data.draw(st.tuples(*(st.integers(0, size - 1) for size in tally.sizes)))
    guess = np.array(data.draw(st.lists(st.floats(0, 1), min_size=tally.cells, max_size=tally.cells)))
    for score in (L1Error(), MaxError()):
        found = []
        for table in ([*rows, row], [*rows, other]):
            curator = Curator(source(table, tally.sizes), HUGE)
            piece = Piece(tally, 0, tally.tests)
            made = curator._scores([piece], [guess], score, np.zeros(0, np.int64), {Fraction(1): 1})
            found.append(np.concatenate(list(made)))
        most = int(np.abs(found[0] - found[1]).max())
        assert most <= score.sensitivity("replace") << GRID


def test_what_is_excluded_is_not_selected():
    curator = Curator(source(), HUGE)
    guess = [np.full(piece.tally.cells, 5.0 if i == 0 else 0.5) for i, piece in enumerate(WORKLOAD.pieces())]
    taken: list[int] = []
    for _ in range(5):
        chosen = curator.select(WORKLOAD, guess, rho=1e3, k=2, score=L1Error(), exclude=taken)
        assert not set(chosen.tolist()) & set(taken)
        taken += chosen.tolist()
    assert sorted(taken) == list(range(10))
    assert sorted(taken[:4]) == [0, 1, 2, 3], "those that are answered worst come first"
    with pytest.raises(WorkloadError, match="the number of blocks left to select"):
        curator.select(WORKLOAD, guess, rho=1, score=L1Error(), exclude=taken)


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


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_counts_that_are_kept_are_those_that_are_counted(data):
    """After a selection, whatever is measured of it, in any order, is the truth; and rows are not read again."""
    counted = Counted()
    curator = Curator(counted, HUGE)
    tally = data.draw(st.sampled_from((PREFIXES, HALFSPACES, SINGLE)))
    whole = Workload((NumberTests(tally),))
    curator.select(whole, [np.zeros(tally.cells)], rho=1e6, score=L1Error())
    assert counted.read == 1
    exact = by_hand(tally, ROWS).reshape(tally.tests, -1)
    for _ in range(3):
        ids = data.draw(st.permutations(range(tally.tests)))[: data.draw(st.integers(1, tally.tests))]
        found = curator.measure(whole.take(ids), rho=1e6)
        assert np.rint(found.values * 400).tolist() == exact[list(ids)].ravel().tolist()
    assert counted.read == 1
    other = next(item for item in MANY if item is not tally)
    found = curator.measure(Workload((NumberTests(other), NumberTests(tally))), rho=1e6)
    assert np.rint(found.values * 400).tolist() == [*by_hand(other, ROWS).tolist(), *exact.ravel().tolist()]


def test_counts_are_not_kept_beyond_the_cap(monkeypatch):
    monkeypatch.setattr(cache_module, "CACHE_BYTES", -1)
    counted = Counted()
    curator = Curator(counted, HUGE)
    for reads in (1, 2):
        found = curator.measure(Workload((NumberTests(PREFIXES),)), rho=1e6)
        assert np.rint(found.values * 400).tolist() == by_hand(PREFIXES, ROWS).tolist()
        assert counted.read == reads
