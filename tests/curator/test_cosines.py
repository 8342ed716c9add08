"""Cosines: sums row by row, their sensitivity against every neighbour, and what a curator allows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import cosines as module
from anamorph.curator import curator as curator_module
from anamorph.curator.budget import Budget, gaussian_sigma
from anamorph.curator.cosines import UNIT, Cosines, circle, cosine_sums
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable
from anamorph.curator.scores import AbsoluteError, L1Error, MaxError
from anamorph.curator.tallies import GroupBy, check_tally, copied, count, scale, squared_sensitivity
from anamorph.errors import ParameterError, WorkloadError
from anamorph.queries.embeddings import Embedding, embedding, radians
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SIZES = (3, 7, 2, 6)
"""c1 has 7 codes; c3 has 5, and `missing`."""
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 400) for i, size in enumerate(SIZES)], axis=1)
BUDGET = Budget(epsilon=1.0, delta=1e-6)
HUGE = Budget(epsilon=1e9, delta=1e-6)
RADIANS = np.random.default_rng(7).standard_normal((20, 2)) * 6
LABELLED = embedding(SIZES, (0,), {1: 7, 3: 5}, RADIANS).tally
PLAIN = embedding(SIZES, (), {3: 5, 1: 7}, RADIANS).tally
TWO = embedding(SIZES, (2, 0), {1: 7}, RADIANS[:, :1]).tally
MANY = (LABELLED, PLAIN, TWO)
RIGHT = np.cos
whole = st.integers(-(1 << 63), (1 << 63) - 1)


def source(rows=ROWS, sizes=SIZES) -> TableSource:
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="rows")
    return TableSource(Table(np.asarray(rows, np.int32).reshape(-1, len(sizes)), sizes), schema)


def by_hand(tally, rows):
    """Every row with every frequency, in Python's whole numbers."""
    tables = [table.tolist() for table in circle()]
    sums = np.zeros((tally.width, 2, tally.count), np.int64)
    for row in np.asarray(rows, np.int64).reshape(-1, len(tally.sizes)).tolist():
        cell = 0
        for feature in tally.given:
            cell = cell * tally.sizes[feature] + row[feature]
        for index, frequency in enumerate(tally.frequencies.tolist()):
            angle = 0
            for turns, number, limit in zip(frequency, tally.numbers, tally.limits, strict=True):
                angle += turns * (2 * row[number] + 1 - limit) if row[number] < limit else 0
            for wave in (0, 1):
                sums[cell, wave, index] += tables[wave][(angle % (1 << 64)) >> 48]
    return sums.ravel()


def in_floats(tally, frequencies, rows):
    """The same as real numbers, by complex exponentials: what the tally is meant to be."""
    found = np.zeros((tally.width, tally.count), complex)
    for row in np.asarray(rows).reshape(-1, len(tally.sizes)):
        x = [
            (row[number] + 0.5) / limit - 0.5 if row[number] < limit else 0.0
            for number, limit in zip(tally.numbers, tally.limits, strict=True)
        ]
        cell = 0
        for feature in tally.given:
            cell = cell * tally.sizes[feature] + row[feature]
        found[cell] += np.exp(1j * frequencies @ x)
    return np.stack([found.real, found.imag], axis=1).ravel()


@st.composite
def tallies(draw, largest=5):
    sizes = tuple(draw(st.lists(st.integers(2, largest), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(sizes))))
    width = draw(st.integers(1, len(sizes)))
    numbers, given_ = tuple(order[:width]), tuple(order[width : width + draw(st.integers(0, 2))])
    limits = tuple(max(1, sizes[number] - draw(st.integers(0, 1))) for number in numbers)
    frequencies = draw(st.lists(st.lists(whole, min_size=width, max_size=width), min_size=1, max_size=5))
    return Cosines(sizes, given_, numbers, limits, np.array(frequencies, np.int64))


def rows_over(sizes, most=15):
    return st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), max_size=most)


@given(tallies(), st.data())
@settings(max_examples=150, deadline=None)
def test_sums_are_those_of_every_row_by_itself(tally, data):
    rows = data.draw(rows_over(tally.sizes))
    check_tally(tally, tally.sizes)
    numbers = count(tally, source(rows, tally.sizes))
    assert numbers.dtype == np.int64
    assert numbers.shape == (tally.cells,) == (2 * tally.count * tally.width,)
    assert numbers.tolist() == by_hand(tally, rows).tolist()


@pytest.mark.parametrize(("tally", "frequencies"), [(LABELLED, RADIANS), (PLAIN, RADIANS), (TWO, RADIANS[:, :1])])
def test_sums_are_cosines_and_sines(tally, frequencies):
    """Each within half a step of the table, and a unit."""
    assert radians(tally) == pytest.approx(frequencies, rel=1e-12)
    found = count(tally, source()) / scale(tally)
    np.testing.assert_allclose(found, in_floats(tally, frequencies, ROWS), atol=400 * (math.pi + 2) / 2**16)
    one = count(tally, source(ROWS[:1])) / scale(tally)
    np.testing.assert_allclose(one, in_floats(tally, frequencies, ROWS[:1]), atol=(math.pi + 2) / 2**16)


def test_native_numbers_of_many_codes_have_their_angle():
    size, frequencies = (1 << 20) + 1, np.array([[30.0], [-0.01], [2000.0]])
    tally = embedding((size,), (), {0: size - 1}, frequencies).tally
    rows = np.array([[0], [1], [1 << 19], [(1 << 20) - 1], [1 << 20]])
    for row in rows:
        found = count(tally, source([row], (size,))) / UNIT
        np.testing.assert_allclose(found, in_floats(tally, frequencies, [row]), atol=(math.pi + 2) / 2**16)


def test_frequencies_beyond_half_a_turn_are_the_same_function_of_codes():
    fast = np.array([[400.0, 3.0], [-123.0, 77.0]])
    tally = embedding(SIZES, (0,), {1: 7, 3: 5}, fast).tally
    assert np.all(np.abs(radians(tally)) <= 2 * math.pi * np.array([7, 5]))
    np.testing.assert_allclose(count(tally, source()) / UNIT, in_floats(tally, fast, ROWS), atol=0.05)
    edge = embedding((2,), (), {0: 2}, np.array([[4 * math.pi]])).tally  # half a turn for half a code
    np.testing.assert_allclose(count(edge, source([(0,), (1,)], (2,))) / UNIT, [-2, 0], atol=1e-3)


@given(tallies(), st.integers(1, 12), st.data())
@settings(max_examples=80, deadline=None)
def test_sums_do_not_depend_on_how_rows_are_cut(tally, entries, data):
    rows = np.array(data.draw(rows_over(tally.sizes)), np.int32).reshape(-1, len(tally.sizes))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ENTRIES", entries)
        found = cosine_sums(tally, np.split(rows, cuts))
    assert found.tolist() == by_hand(tally, rows).tolist()


@pytest.mark.parametrize("tally", [LABELLED, PLAIN])
def test_a_missing_number_lies_in_the_middle(tally):
    middle, missing = ROWS.copy(), ROWS.copy()
    middle[:, 3], missing[:, 3] = 2, 5
    assert count(tally, source(middle)).tolist() == count(tally, source(missing)).tolist()
    elsewhere = middle.copy()
    elsewhere[:, 3] = 0
    assert count(tally, source(middle)).tolist() != count(tally, source(elsewhere)).tolist()


def test_no_point_of_the_table_is_outside_of_the_circle():
    cosines, sines = circle()
    squares = [c * c + s * s for c, s in zip(cosines.tolist(), sines.tolist(), strict=True)]
    assert max(squares) <= UNIT * UNIT
    assert min(squares) > (UNIT - 3) ** 2
    assert cosines.dtype == sines.dtype == np.int64


@pytest.mark.parametrize(
    "wrong",
    [
        lambda angles: RIGHT(angles) + 0.3,
        lambda angles: np.where(np.arange(angles.size) % 7 == 0, np.nan, RIGHT(angles)),
        lambda angles: np.where(np.arange(angles.size) % 7 == 0, np.inf, RIGHT(angles)),
        lambda angles: np.where(np.arange(angles.size) % 5 == 0, -1e300, RIGHT(angles)),
        lambda angles: np.full(angles.size, 2.0**47),
        lambda angles: np.ones(angles.size) * (1 + 1e-4),
    ],
)
@pytest.mark.parametrize("wave", ["cos", "sin"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_bound_holds_whatever_the_library_returns(wave, wrong, monkeypatch):
    monkeypatch.setattr(module.np, wave, wrong)
    made = circle.__wrapped__()
    assert max(c * c + s * s for c, s in zip(*(table.tolist() for table in made), strict=True)) <= UNIT * UNIT


def moves(listed, rows):
    """The largest squared change by one row added, and by one row replaced, among some rows; in counts."""
    found = []
    for row in rows:
        parts = [count(tally, source([row], tally.sizes)) for tally in listed]
        scales = [scale(tally) for tally in listed]
        found.append([Fraction(int(n), s) for part, s in zip(parts, scales, strict=True) for n in part])
    added = max(sum(x * x for x in row) for row in found)
    pairs = itertools.combinations(found, 2)
    return added, max((sum((x - y) ** 2 for x, y in zip(*pair, strict=True)) for pair in pairs), default=0)


@given(tallies(largest=3))
@settings(max_examples=40, deadline=None)
def test_no_neighbour_moves_cosines_by_more(tally):
    """Every row there is, with every other, with frequencies of any kind."""
    added, replaced = moves([tally], itertools.product(*map(range, tally.sizes)))
    assert added <= squared_sensitivity([tally], "add-remove") == tally.count
    assert replaced <= squared_sensitivity([tally], "replace") == 4 * tally.count


def test_the_sensitivity_is_reached_by_opposite_rows():
    """Half a turn apart for every frequency: twice the length, if the label is the same, and sqrt 2 of it if not."""
    eighths = np.array(
        [[1 << 61], [3 << 61], [-(1 << 61)]]
    )  # of a turn for half a code: the rows are four of them apart
    tally = Cosines((2, 3), (0,), (1,), (3,), eighths)
    added, replaced = moves([tally], [(0, 0), (0, 2)])
    assert 3 * (1 - 1e-4) < added <= 3
    assert 12 * (1 - 1e-4) < replaced <= 12
    _, apart = moves([tally], [(0, 0), (1, 2)])
    assert 6 * (1 - 1e-4) < apart <= 6


def test_several_tallies_add_up_unless_one_is_asked_twice():
    both = [LABELLED, GroupBy(SIZES, (0, 2), 0, 3)]
    weights = [Fraction(1, 20), Fraction(1, 3)]
    assert squared_sensitivity(both, "replace") == 82
    assert squared_sensitivity(both, "add-remove") == 21
    assert squared_sensitivity(both, "replace", weights) == 4 + Fraction(2, 3)
    assert squared_sensitivity(both, "add-remove", weights) == 1 + Fraction(1, 3)
    assert squared_sensitivity([LABELLED, PLAIN], "replace") == 160
    for relation in RELATIONS:
        with pytest.raises(WorkloadError, match="must be asked once"):
            squared_sensitivity([LABELLED, copied(LABELLED)], relation)


@pytest.mark.parametrize(
    "other",
    [
        replace(LABELLED, given=(2,)),
        replace(LABELLED, given=()),
        replace(LABELLED, numbers=(3, 1), limits=(5, 7)),
        replace(LABELLED, limits=(7, 6)),
        replace(LABELLED, frequencies=LABELLED.frequencies + 1),
    ],
)
def test_tallies_are_told_apart_by_all_that_defines_them(other):
    assert other.identity != LABELLED.identity == copied(LABELLED).identity
    assert Workload((Embedding(other),)).digest != Workload((Embedding(LABELLED),)).digest


class Posing(Cosines):
    """One that says it has fewer frequencies than it has."""

    @property
    def count(self):
        return 1


FREQUENCIES = LABELLED.frequencies
FAULTY = [
    replace(LABELLED, numbers=(1, 4)),
    replace(LABELLED, numbers=(1, -1)),
    replace(LABELLED, numbers=(1, 1)),
    replace(LABELLED, numbers=(), limits=(), frequencies=np.zeros((20, 0), np.int64)),
    replace(LABELLED, given=(4,)),
    replace(LABELLED, given=(-1,)),
    replace(LABELLED, given=(2, 2)),
    replace(LABELLED, given=(1,)),
    replace(LABELLED, limits=(7,)),
    replace(LABELLED, limits=(8, 5)),
    replace(LABELLED, limits=(0, 5)),
    replace(LABELLED, frequencies=FREQUENCIES.astype(np.int32)),
    replace(LABELLED, frequencies=FREQUENCIES.astype(np.uint64)),
    replace(LABELLED, frequencies=FREQUENCIES.astype(float)),
    replace(LABELLED, frequencies=FREQUENCIES.astype(">i8")),
    replace(LABELLED, frequencies=np.ma.masked_array(FREQUENCIES)),
    replace(LABELLED, frequencies=FREQUENCIES[:, :1]),
    replace(LABELLED, frequencies=FREQUENCIES[:, 0]),
    replace(LABELLED, frequencies=FREQUENCIES[:0]),
    replace(LABELLED, frequencies=FREQUENCIES[None]),
    replace(LABELLED, frequencies=np.zeros(((1 << 20) + 1, 2), np.int64)),
    replace(LABELLED, sizes=SIZES[:3]),
    Posing(SIZES, (0,), (1, 3), (7, 5), FREQUENCIES),
]


@pytest.mark.parametrize("tally", FAULTY, ids=range(len(FAULTY)))
def test_what_are_no_cosines_is_refused(tally):
    for sound in MANY:
        check_tally(sound, SIZES)
    with pytest.raises(WorkloadError, match="must be of tallies over the columns of this schema"):
        check_tally(tally, SIZES)


def test_forged_cosines_are_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    for tally in FAULTY[-4:]:
        with pytest.raises(WorkloadError, match=r"must be of tallies|must be all of its queries"):
            curator.measure(Workload((Embedding(tally),)), rho=0.001)
    with pytest.raises(WorkloadError, match="must be asked once"):
        curator.measure(Workload((Embedding(LABELLED), Embedding(LABELLED))), rho=0.001)
    assert curator.privacy().spends == ()


def test_a_copy_has_numbers_of_its_own():
    frequencies = FREQUENCIES.copy()
    plain = copied(replace(LABELLED, sizes=tuple(map(np.int64, SIZES)), frequencies=frequencies))
    frequencies[:] = 0
    assert type(plain) is Cosines
    assert {type(number) for number in (*plain.sizes, *plain.given, *plain.numbers, *plain.limits)} == {int}
    assert plain.identity == LABELLED.identity
    posing = Posing(SIZES, (0,), (1, 3), (7, 5), FREQUENCIES)
    assert copied(posing) is posing, "it stays what check_tally refuses"


@pytest.mark.parametrize("score", [AbsoluteError(), L1Error(), MaxError()])
def test_cosines_are_not_selected(score):
    curator = Curator(source(), BUDGET)
    alone = Workload((Embedding(LABELLED),))
    beside = Workload((Marginals(SIZES, ((0,),)), Embedding(LABELLED)))
    for workload in (alone, beside):
        guess = [np.zeros(piece.tally.cells) for piece in workload.pieces()]
        with pytest.raises(WorkloadError, match="embeddings must be measured: they cannot be selected"):
            curator.select(workload, guess, rho=0.001, score=score)
    table = RelaxedTable(
        SIZES,
        np.concatenate([np.full((size, 2), 1 / size) for size in SIZES]).astype(np.float32),
        np.full(2, 0.5, np.float32),
    )
    cells = Workload((Marginals(SIZES, ((0,),)).by_cell(), Embedding(replace(TWO, frequencies=TWO.frequencies[:1]))))
    with pytest.raises(WorkloadError, match=r"embeddings must be measured|must be arrays, not a table"):
        curator.select(cells, table, rho=0.001)
    assert curator.privacy().spends == ()


@pytest.mark.parametrize("relation", RELATIONS)
def test_with_a_huge_budget_the_truth_is_measured(relation):
    curator = Curator(source(), HUGE, neighbours=relation)
    found = curator.measure(Workload((Embedding(LABELLED), Marginals(SIZES, ((0,),)), Embedding(PLAIN))), rho=1e8)
    exact = [by_hand(tally, ROWS) / UNIT for tally in (LABELLED, PLAIN)]
    np.testing.assert_allclose(found.values[:120] * found.total, exact[0], atol=0.01)
    np.testing.assert_allclose(found.values[123:] * found.total, exact[1], atol=0.01)
    assert found.sigma.shape == (3,)


@pytest.fixture
def drawn(monkeypatch):
    """Records the sigma of all noise that a curator draws, in units of the lattice, and draws none."""
    seen = []

    def none(count, sigma, bits):
        seen.append((count, sigma))
        return np.zeros(count, np.int64)

    monkeypatch.setattr(curator_module, "discrete_gaussian", none)
    return seen


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("rho", [0.3, 1e-3, 7.7])
def test_the_noise_is_that_of_the_bound_in_its_own_unit(drawn, relation, rho):
    curator = Curator(source(), HUGE, neighbours=relation)
    total = curator.total
    drawn.clear()
    weights = (Fraction(1, 20), Fraction(1, 3))
    found = curator.measure(Workload((Embedding(LABELLED), Marginals(SIZES, ((0,),))), weights=weights), rho=rho)
    squared = 1 + Fraction(1, 3) if relation == "add-remove" else 4 + Fraction(2, 3)
    (cells, sigma), (_, other) = drawn
    assert cells == LABELLED.cells
    assert Fraction(rho) * 2 * Fraction(sigma) ** 2 >= squared * 20 * UNIT**2, "rounded up, exactly"
    assert Fraction(rho) * 2 * Fraction(other) ** 2 >= squared * 3
    assert sigma == pytest.approx(UNIT * gaussian_sigma(squared * 20, rho))
    assert found.sigma * total == pytest.approx([sigma / UNIT, other])
    charged = sum(
        Fraction(most) / (2 * Fraction(s) ** 2)
        for most, s in ((squared_sensitivity([LABELLED], relation) * UNIT**2, sigma), (1, other))
    )
    assert charged <= Fraction(rho)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_noise_has_the_size_that_is_stated(relation):
    curator = Curator(source(), HUGE, neighbours=relation)
    wide = Embedding(embedding(SIZES, (0,), {1: 7}, np.random.default_rng(0).standard_normal((600, 1))).tally)
    found = curator.measure(Workload((wide,)), rho=0.5)
    noise = found.values * found.total - by_hand(wide.tally, ROWS) / UNIT
    stated = math.sqrt(600 * (1 if relation == "add-remove" else 4))
    assert found.sigma * found.total == pytest.approx(stated)
    assert noise.size == 3600
    assert 0.93 < np.std(noise) / stated < 1.07, "a right scale is accepted, and one that is 10% wrong would not be"
    assert abs(np.mean(noise)) < 5 * stated / 60


def test_noise_beyond_its_range_is_refused_before_the_charge():
    curator = Curator(source(), BUDGET)
    with pytest.raises(ParameterError):
        curator.measure(Workload((Embedding(LABELLED),)), rho=1e-14)
    assert curator.privacy().spends == ()


def test_an_embedding_is_one_block_and_taken_whole():
    part = Embedding(LABELLED)
    workload = Workload((Marginals(SIZES, ((0,), (1,))), part))
    assert (part.blocks, part.cells, part.largest_block, part.sizes) == (1, 120, 120, SIZES)
    assert [piece.tally for piece in part.pieces(1)] == [LABELLED], "whatever the limit"
    assert workload.take([2]).parts == (part,)
    assert workload.measured().parts[-1] is part
    for ids in ([2, 2], [1, 2, 2]):
        with pytest.raises(WorkloadError, match="an embedding must be taken whole, and once"):
            workload.take(ids)
    with pytest.raises(WorkloadError, match="an embedding must be measured whole"):
        workload.by_cell()
