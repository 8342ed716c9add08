"""Banding: where numbers are cut, which marginals of bands tell what is asked, and that they are those of the rows."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes, Numeric
from anamorph.curator.bands import MOST_CELLS
from anamorph.curator.tallies import count
from anamorph.errors import WorkloadError
from anamorph.queries.banding import FINER, FINEST, Banding, banding, divided
from anamorph.queries.bands import Banded
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SCHEMA = Schema(
    (
        Codes(name="a", values=3),
        Numeric(name="x", lower=0, upper=99, integer=True, native=True),
        Codes(name="b", values=2),
        Numeric(name="y", lower=-1.0, upper=1.0, native=True, missing=True),
        Numeric(name="z", lower=0.0, upper=1.0, native=True),
    )
)
LIMITS = {1: 100, 3: 1 << 20, 4: 1 << 20}
QUARTERS = tuple(quarter << 18 for quarter in (1, 2, 3))


def cut(spec, bands=4):
    return banding(SCHEMA.sizes, LIMITS, workload(spec, SCHEMA), bands)


def merged(spec, bands=4):
    return [set(part.sets) for part in cut(spec, bands).merge(workload(spec, SCHEMA)).parts]


@given(st.integers(1, 500), st.integers(1, 300), st.lists(st.integers(1, 499), max_size=6))
@settings(deadline=None)
def test_bands_are_divided_into_as_many_of_equal_width(limit, bands, cuts):
    own = sorted({each for each in cuts if each < limit})
    found = divided(own, limit, bands)
    assert set(own) <= set(found)
    assert list(found) == sorted(set(found))
    assert all(0 < each < limit for each in found)
    parts = max(1, round(bands / (len(own) + 1)))
    for low, high in itertools.pairwise((0, *own, limit)):
        widths = np.diff([low, *(each for each in found if low < each < high), high])
        assert len(widths) == min(parts, high - low)
        assert widths.max() - widths.min() <= 1


def test_numbers_that_are_tested_are_cut_into_equal_bands():
    found = cut("mixed:k=2,count=40,seed=0")
    assert found.cuts == {1: (25, 50, 75), 3: (*QUARTERS, 1 << 20), 4: QUARTERS}
    assert found.merged == (3, 4, 2, 5, 4)


def test_numbers_that_nobody_asks_about_are_cut_too():
    assert cut("marginals:k=2") == cut("mixed:k=2,count=40,seed=0")


def test_bands_of_the_workload_stay_as_they_are():
    found = cut("bands:of=a+x,bands=7; bands:of=x+y,bands=2", 32)
    assert found.cuts[1] == tuple(sorted({15, 29, 43, 58, 72, 86, 50}))
    assert found.cuts[3] == (1 << 19, 1 << 20)
    assert len(found.cuts[4]) == 31, "nobody asks for bands of z"


def test_bands_of_a_number_that_is_tested_too_are_divided():
    found = cut("bands:of=a+x,bands=2; mixed:k=1,count=40,seed=0", 8)
    assert found.cuts[1] == (13, 25, 38, 50, 63, 75, 88)


def test_bands_of_every_code_are_those_of_every_code():
    small = Schema((Codes(name="a", values=3), Numeric(name="x", lower=0, upper=5, integer=True, native=True)))
    asked = Workload((Banded(small.sizes, ((0, 1),), ((), ())),))
    found = banding(small.sizes, {1: 6}, asked, 2)
    assert found.cuts == {1: (1, 2, 3, 4, 5)}
    assert found.levels == {1: ()}
    assert found.measured(found.merge(asked)).parts == (Banded(small.sizes, ((0, 1),), ((), (1, 2, 3, 4, 5))),)


@pytest.mark.parametrize("spec", ["marginals:k=2", "bands:k=2,bands=7; mixed:k=3,count=9,seed=1", "bands:k=2,bands=3"])
def test_finer_bands_are_inside_of_bands(spec):
    found = cut(spec, 16)
    for number, limit in LIMITS.items():
        levels = (found.cuts[number], *found.levels[number])
        for less, more in itertools.pairwise(levels):
            assert set(less) < set(more)
        assert len(levels) == (3 if limit > 16 * (len(levels[0]) + 1) else 2)
        assert min(limit, FINEST // 2) <= len(levels[-1]) + 1 < FINEST * 1.5 + 2
    assert [set(level) for level in found.alone] == [
        {number for number in LIMITS if len(found.levels[number]) > deep} for deep in range(2)
    ]


@pytest.mark.parametrize(("bands", "expected"), [(4, (32, 1024)), (32, (256, 1024)), (64, (1024,)), (1024, ())])
def test_bands_are_cut_twice_where_that_is_far_finer(bands, expected):
    (levels,) = (found.levels[4] for found in [cut("marginals:k=2", bands)])
    assert tuple(len(each) + 1 for each in levels) == expected
    assert expected[:1] != (32,) or expected[0] == FINER * bands


def test_what_is_asked_of_bands():
    assert merged("bands:k=2,bands=3,target=a; marginals:k=2") == [{(0, 1), (0, 2), (0, 3), (0, 4)}, {(0, 2)}]
    assert merged("thresholds:k=2,r=1") == [{(0, 2)}]
    assert merged("halfspaces:count=9,target=b,seed=0") == [{(1, 2, 3), (1, 2, 4), (2, 3, 4)}]
    asked = workload("mixed:k=3,count=50,seed=0", SCHEMA)
    view = banding(SCHEMA.sizes, LIMITS, asked, 4)
    for part, found in zip(asked.parts, view.merge(asked).parts, strict=True):
        assert found.sets == (tuple(sorted((*part.tally.given, *part.tally.numbers))),)
    cells = Workload((Marginals(SCHEMA.sizes, ((0, 2),)).by_cell(),))
    assert view.merge(cells).parts[0].sets == ((0, 2),)


def test_weights_and_pieces_are_those_of_the_workload():
    asked = workload("marginals:k=2,weight=3; mixed:k=1,count=5,seed=0", SCHEMA)
    asked = Workload(asked.parts, weights=asked.weights, limit=77)
    view = banding(SCHEMA.sizes, LIMITS, asked, 4)
    told = view.merge(asked)
    assert (told.weights, told.limit) == (asked.weights, 77)
    found = view.measured(told)
    assert (found.weights, found.limit) == ((*asked.weights, Fraction(1), Fraction(1)), 77), "as x alone weighs"


def test_marginals_of_too_many_cells_stand_for_those_inside():
    fives = dict.fromkeys(range(44), (1, 2, 3, 4))
    view = Banding((5,) * 44, fives, {})
    assert set(view.within((3, 1))) == {(3, 1)}
    found = list(view.within(tuple(range(12))))
    assert 5**10 <= MOST_CELLS < 5**11
    assert len(found) == len(set(found)) == math.comb(12, 10)
    assert {len(each) for each in found} == {10}
    many = list(view.within(tuple(range(44))))
    assert {len(each) for each in many} == {5}, "of the larger ones there are millions"


def test_thresholds_stay_thresholds_unless_their_marginals_are_too_large():
    view = Banding((5,) * 12 + (100,), {12: (50,)}, {})
    small, large = (
        Thresholds(view.sizes, ((0, 1), (2, 3)), least=1),
        Thresholds(view.sizes, (tuple(range(12)),), least=2),
    )
    told = view.merge(Workload((small, large))).parts
    assert told == (Thresholds(view.merged, small.sets, least=1), Marginals(view.merged, told[1].sets))
    assert (len(told[1].sets), {len(each) for each in told[1].sets}) == (math.comb(12, 10), {10})


def test_functions_are_refused():
    asked = Workload((custom(lambda row: row["b"], SCHEMA, name="mine:own"),))
    with pytest.raises(WorkloadError, match="a workload over a table with native numbers must be of marginals"):
        banding(SCHEMA.sizes, LIMITS, asked, 4).merge(asked)


def test_without_numbers_all_stays():
    view, asked = Banding((2, 3), {}, {}), Workload((Marginals((2, 3), ((0, 1),)),))
    assert view.merge(asked) is asked
    assert view.measured(asked) is asked
    measurement = Measurement(asked, np.zeros(6), np.ones(1), 10.0)
    assert view.seen(asked, measurement) is measurement


def test_bands_are_counted_as_the_codes_of_a_merged_table():
    """Also those of each number alone."""
    generator = np.random.default_rng(0)
    codes = np.stack([generator.integers(0, size, 500) for size in SCHEMA.sizes], axis=1).astype(np.int32)
    codes[::7, 3] = 1 << 20
    asked = workload("bands:k=2,bands=6; mixed:k=3,count=30,seed=0", SCHEMA)
    view = banding(SCHEMA.sizes, LIMITS, asked, 8)
    queries = view.merge(asked)
    measured = view.measured(queries)
    source = TableSource(Table(codes, SCHEMA.sizes), SCHEMA)
    values = np.concatenate([count(piece.tally, source) for piece in measured.pieces()]).astype(float)
    sigma = np.arange(measured.blocks, dtype=float)
    measurement = Measurement(measured, values, sigma, 500.0)

    plain = codes.copy()
    for number, cuts in view.cuts.items():
        plain[:, number] = np.searchsorted(cuts, codes[:, number], side="right")
    narrow = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(view.merged)))
    other = TableSource(Table(plain, view.merged), narrow)
    seen = view.seen(queries, measurement)
    assert seen.workload is queries
    assert seen.sigma.tolist() == list(range(queries.blocks))
    np.testing.assert_array_equal(seen.values, np.concatenate([count(p.tally, other) for p in queries.pieces()]))

    details = view.details(queries, measurement)
    assert {number: tuple(each.cuts for each in levels) for number, levels in details.items()} == view.levels
    for number, detail in ((number, detail) for number, levels in details.items() for detail in levels):
        exact, _ = np.histogram(codes[:, number], [0, *detail.cuts, SCHEMA.sizes[number]])
        np.testing.assert_array_equal(detail.values, exact)
    noise = [detail.sigma for levels in details.values() for detail in levels]
    assert sorted(noise) == list(range(queries.blocks, measured.blocks))
