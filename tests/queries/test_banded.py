"""Marginals of bands as queries: how numbers are cut, what specs draw, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes, Datetime, Numeric
from anamorph.curator.tallies import check_tally
from anamorph.errors import WorkloadError
from anamorph.queries.bands import BANDS, Banded, equal_cuts, merged_sizes
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload
from anamorph.queries.workload import Workload, keys_of
from anamorph.schema import Schema

SCHEMA = Schema(
    (
        Codes(name="a", values=3),
        Numeric(name="x", lower=0, upper=9, integer=True, native=True),
        Codes(name="b", values=2),
        Numeric(name="y", lower=-1.0, upper=1.0, native=True, missing=True),
    )
)
PLAIN = Schema((Codes(name="a", values=3), Codes(name="b", values=2), Codes(name="c", values=4)))
CUTS = ((), (2, 4), (), (1,))


def number(codes, missing):
    return Schema((Numeric(name="x", lower=1, upper=codes, integer=True, native=True, missing=missing),))


@given(st.integers(2, 400), st.integers(2, 500), st.booleans())
@settings(max_examples=200, deadline=None)
def test_bands_are_equally_wide(codes, bands, missing):
    """To within a code; every code is in one, missing alone in the last."""
    (cuts,) = equal_cuts(number(codes, missing), bands)
    edges = (0, *cuts, codes + missing)
    widths = [stop - start for start, stop in itertools.pairwise(edges)]
    assert min(widths) >= 1
    regular = widths[: len(widths) - missing]
    assert len(regular) == min(codes, bands)
    assert max(regular) - min(regular) <= 1
    assert sum(regular) == codes
    assert not missing or (cuts[-1], widths[-1]) == (codes, 1)


def test_the_cuts_of_known_numbers():
    assert equal_cuts(SCHEMA, 4) == ((), (3, 5, 8), (), (1 << 18, 1 << 19, 3 << 18, 1 << 20))
    assert equal_cuts(SCHEMA, 10)[1] == equal_cuts(SCHEMA, 99)[1] == tuple(range(1, 10))
    assert len(equal_cuts(SCHEMA)[3]) == BANDS
    assert equal_cuts(number(2, True), 2) == ((1, 2),)
    assert equal_cuts(number(2, False), 2) == ((1,),)
    assert equal_cuts(PLAIN, 2) == ((), (), ())
    dates = Schema((Datetime(name="day", lower="2020-01-01", upper="2020-01-31", date=True),))
    assert equal_cuts(dates, 2) == ((16,),)
    assert merged_sizes(SCHEMA.sizes, equal_cuts(SCHEMA, 4)) == (3, 4, 2, 5)


@pytest.mark.parametrize("bands", [1, 0, -3])
def test_one_band_is_refused(bands):
    """It has no cuts, and a column without cuts has a band for every code: 2^20 of them."""
    with pytest.raises(WorkloadError, match=rf"bands \({bands}\) must be at least 2"):
        equal_cuts(SCHEMA, bands)


def test_blocks_are_marginals_of_merged_columns():
    part = Banded(SCHEMA.sizes, ((0, 1), (3,), (2, 1, 3)), CUTS)
    assert (part.blocks, part.cells, part.largest_block) == (3, 9 + 2 + 12, 12)
    taken = part.take([2, 0])
    assert (taken.sets, taken.cuts, taken.sizes) == (((2, 1, 3), (0, 1)), CUTS, SCHEMA.sizes)
    assert part.take([]).blocks == part.take([]).cells == 0
    assert part.measured() is part
    for limit in (1, 10, 10**6):
        pieces = list(part.pieces(limit))
        assert [(piece.first, piece.blocks, piece.tally.cells) for piece in pieces] == [
            (0, 1, 9),
            (1, 1, 2),
            (2, 1, 12),
        ]
        assert [piece.tally.features for piece in pieces] == list(part.sets)
    assert part.tally(2).cuts == ((), (2, 4), (1,))
    for block in range(3):
        check_tally(part.tally(block), SCHEMA.sizes)
    uncut = Banded(SCHEMA.sizes, ((2, 0), (0, 1)), CUTS)
    (marginal,) = Marginals(SCHEMA.sizes, ((2, 0),)).pieces(10**6)
    assert uncut.tally(0) == marginal.tally, "where nothing is cut it is a plain marginal, measured and known as such"
    with pytest.raises(WorkloadError, match="must be taken in whole blocks"):
        part.by_cell()


@pytest.mark.parametrize(
    ("sets", "cuts", "words"),
    [
        (((0, 1),), CUTS[:3], "cuts must be ascending"),
        (((0, 1),), (*CUTS, ()), "cuts must be ascending"),
        (((0, 1),), ((), (4, 2), (), ()), "cuts must be ascending"),
        (((0, 1),), ((), (2, 2), (), ()), "cuts must be ascending"),
        (((0, 1),), ((), (0, 2), (), ()), "cuts must be ascending"),
        (((0, 1),), ((), (2, 10), (), ()), "cuts must be ascending"),
        (((0, 1),), ((), (2.0,), (), ()), "cuts must be ascending"),
        (((0, 0),), CUTS, "distinct columns"),
        (((0, 4),), CUTS, "distinct columns"),
        (((),), CUTS, "distinct columns"),
        (((1, 3, 0),), ((), (), (), ()), "must have at most 16777216: cut into fewer"),
    ],
)
def test_what_cannot_be_counted_is_refused(sets, cuts, words):
    with pytest.raises(WorkloadError, match=words):
        Banded(SCHEMA.sizes, sets, cuts)


def test_the_digest_is_of_the_cuts_too():
    ways = (CUTS, ((), (2, 5), (), (1,)), ((1,), (2, 4), (), ()), ((), (), (), (1,)))
    parts = [Banded(SCHEMA.sizes, ((0, 1),), cuts) for cuts in ways]
    assert len({Workload((part,)).digest for part in parts}) == 4
    unused = Banded(SCHEMA.sizes, ((0, 1),), ((), (2, 4), (), ()))
    assert Workload((unused,)).digest == Workload((parts[0],)).digest, "cuts of other columns do not matter"


def sets(spec):
    (part,) = workload(spec, SCHEMA).parts
    return part.sets


def test_specs_draw_as_marginals_do_from_all_columns():
    plain = Schema(tuple(Codes(name=name, values=2) for name in SCHEMA.names))
    rests = ("k=2", "k=3,count=3,seed=5", "k=2,count=4,seed=1", "of=y+a", "k=3,target=b", "k=3,target=y,count=2,seed=2")
    for rest in rests:
        (part,) = workload(f"marginals:{rest}", plain).parts
        assert sets(f"bands:{rest},bands=5" if "of" not in rest else f"bands:{rest}") == part.sets
    assert sets("bands:k=1") == ((0,), (1,), (2,), (3,))
    drawn = Counter(sets(f"bands:k=2,count=1,seed={seed}")[0] for seed in range(60))
    assert len(drawn) == 6


def test_specs_cut_as_told():
    for spec, bands in (
        ("bands:k=2,bands=4", 4),
        ("bands:bands=7,k=2", 7),
        ("bands:k=2", BANDS),
        ("bands:of=x+y", BANDS),
    ):
        (part,) = workload(spec, SCHEMA).parts
        assert (part.cuts, part.sizes) == (equal_cuts(SCHEMA, bands), SCHEMA.sizes)
    (fine,) = workload("bands:of=x+y,bands=2000000", SCHEMA).parts
    assert fine.cells == 10 * ((1 << 20) + 1), "no more bands than codes"
    weighted = workload("bands:k=2,weight=3; marginals:k=1", SCHEMA)
    assert weighted.weights == (Fraction(3), Fraction(1))
    assert weighted.cells == 3 * 10 + 3 * 2 + 3 * 33 + 10 * 2 + 10 * 33 + 2 * 33 + 5


@pytest.mark.parametrize("spec", ["bands:k=2", "bands:of=a+b,bands=4"])
def test_without_numbers_they_are_plain_marginals(spec):
    (part,) = workload(spec, PLAIN).parts
    assert type(part) is Marginals
    assert part.sets == workload(spec.replace("bands:", "marginals:").replace(",bands=4", ""), PLAIN).parts[0].sets
    (coded,) = workload("bands:of=a+b", SCHEMA).parts
    assert (type(coded), coded.sets, coded.sizes) == (Marginals, ((0, 2),), SCHEMA.sizes)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bands:k=2,bands=1", r"bands \(1\) must be at least 2"),
        ("bands:k=2,bands=0", r"bands \(0\) must be at least 2"),
        ("bands:k=2,bands=-1", r"bands \('-1'\) must be a whole number"),
        ("bands:k=2,bands=4.5", r"bands \('4.5'\) must be a whole number"),
        ("bands:k=2,bands=4,bands=5", "bands must be given once"),
        ("bands:k=0", r"k \(0\) must be from 1 to 4, the number of columns"),
        ("bands:k=5", r"k \(5\) must be from 1 to 4, the number of columns"),
        ("bands:bands=5", "must give k"),
        ("bands:k=2,count=7", r"count \(7\) must be at most 6"),
        ("bands:k=2,seed=7", "seed must come with count"),
        ("bands:of=a,k=1", "of must stand without k"),
        ("bands:of=z", r"column \('z'\) must be in the schema"),
        ("bands:k=2,target=a+b", "target must be one column"),
        ("bands:k=2,r=1", r"option \('r=1'\) must be one of k, bands"),
        ("bands:of=a+x+y,bands=1000000", r"block a x x x y has 3.00e\+7 cells and must have at most 1.68e\+7: take"),
        ("bands:k=2; bands:of=x+y", "block x x y must be listed once"),
        ("bands:k=1,bands=10; bands:of=x,bands=11", "block x must be listed once"),
        ("marginals:k=2; mixed:k=1,count=1; bandz:k=2", "Did you mean 'bands'?"),
    ],
)
def test_specs_that_cannot_be(spec, words):
    with pytest.raises(WorkloadError, match=words):
        workload(spec, SCHEMA)


def test_the_same_numbers_may_be_cut_in_several_ways():
    """And a marginal without numbers, which all of them have, is measured once, with the largest weight."""
    whole = workload("bands:k=2,bands=4; bands:k=2,bands=8,weight=2; marginals:k=2", SCHEMA)
    assert whole.blocks == 6 + 6 + 1
    measured = whole.measured()
    assert measured.blocks == 6 + 5
    assert [(type(part), part.blocks) for part in measured.parts] == [(Banded, 6), (Banded, 5)]
    assert measured.weights == (Fraction(2), Fraction(1))
    keys = [key for part in measured.parts for key in keys_of(part)]
    assert len(set(keys)) == 11
    assert (0, 2) in keys
    first = workload("marginals:k=2; bands:k=2", SCHEMA).measured()
    assert [(type(part), part.blocks) for part in first.parts] == [(Marginals, 1), (Banded, 5)]
    twice = Workload((whole.parts[0], whole.parts[0].take(np.arange(3)))).measured()
    assert twice.blocks == 6
