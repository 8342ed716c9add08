"""r-of-k thresholds: what they count, how they are cut, and which marginals they are sums of."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.tallies import AtLeast, GroupBy, count
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import WHOLE, Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table


def source(sizes, rows, seed=0):
    generator = np.random.default_rng(seed)
    codes = np.stack([generator.integers(0, size, rows) for size in sizes], axis=1).astype(np.int32)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    return TableSource(Table(codes, sizes), schema), codes


@st.composite
def thresholds(draw):
    """Thresholds of one order, their columns in any order."""
    sizes = tuple(draw(st.lists(st.integers(2, 6), min_size=1, max_size=5)))
    k = draw(st.integers(1, min(4, len(sizes))))
    features = st.permutations(range(len(sizes))).map(lambda order: tuple(order[:k]))
    sets = draw(st.lists(features, min_size=1, max_size=3, unique=True))
    return Thresholds(sizes, tuple(sets), draw(st.integers(1, k)))


def brute_force(queries, codes):
    """How many rows agree with each cell in at least r features: a list for each block."""
    found = []
    for features in queries.sets:
        cells = itertools.product(*(range(queries.sizes[feature]) for feature in features))
        found.append([int(np.sum(np.sum(codes[:, features] == cell, axis=1) >= queries.least)) for cell in cells])
    return found


def blocks(queries, rows, limit):
    found: list[list[int]] = [[] for _ in range(queries.blocks)]
    for piece in queries.pieces(limit):
        assert piece.tally.cells <= limit
        numbers = count(piece.tally, rows).tolist()
        if piece.blocks == 1:
            found[piece.first] += numbers
        else:
            assert piece.blocks == len(numbers)
            for i, number in enumerate(numbers):
                found[piece.first + i].append(number)
    return found


@given(thresholds(), st.integers(1, 300), st.integers(0, 30), st.data())
@settings(deadline=None)
def test_any_cut_counts_the_rows_that_agree_often_enough(queries, limit, n, data):
    rows, codes = source(queries.sizes, n)
    expected = brute_force(queries, codes)
    flat = [[number] for block in expected for number in block]
    assert blocks(queries, rows, limit) == expected
    assert blocks(queries.by_cell(), rows, limit) == flat
    chosen = data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=1, max_size=9))
    assert blocks(queries.by_cell().take(chosen), rows, limit) == [flat[i] for i in chosen]
    ids = data.draw(st.lists(st.integers(0, queries.blocks - 1), min_size=1, max_size=4))
    assert blocks(queries.take(ids), rows, limit) == [expected[i] for i in ids]
    assert queries.take(ids).least == queries.least


def test_with_all_features_it_is_the_marginal():
    whole = Thresholds((3, 4, 2), ((0, 1), (2, 1)), 2)
    marginals = Marginals((3, 4, 2), ((0, 1), (2, 1)))
    assert list(whole.pieces(5)) == list(marginals.pieces(5))
    assert Workload((whole,)).digest == Workload((marginals,)).digest
    assert whole.measured() == marginals
    assert type(Thresholds((3, 4, 2), ((0, 1),), 1).measured()) is Marginals
    assert Thresholds((3, 4, 2), ((0, 1),), 1).cells == 12


def test_a_slab_keeps_its_codes_and_its_least():
    cut = [piece.tally for piece in Thresholds((3, 4, 5), ((2, 0, 1),), 2).pieces(4)]
    assert all(type(tally) is AtLeast and tally.least == 2 for tally in cut)
    assert [tally.slab.offset for tally in cut] == list(range(0, 60, 4))
    assert cut[4].slab == GroupBy((3, 4, 5), (2, 0, 1), 1, 2, (1,))


def test_the_digest_tells_orders_from_each_other():
    made = [Workload((Thresholds((3, 4, 5), ((0, 1, 2),), least),)) for least in (1, 2, 3)]
    made += [workload.by_cell() for workload in made] + [workload.by_cell().take([7, 1]) for workload in made]
    assert len({workload.digest for workload in made}) == 9


@pytest.mark.parametrize(("sets", "least"), [(((0, 1),), 0), (((0, 1),), 3), (((0, 1), (2,)), 2), (((0,),), -1)])
def test_r_must_be_from_1_to_k(sets, least):
    with pytest.raises(WorkloadError, match=r"r \(-?\d\) must be from 1 to k, the number of columns of a threshold"):
        Thresholds((3, 4, 2), sets, least)


@pytest.mark.parametrize("features", [(), (0, 0), (3,), (-1,)])
def test_features_must_be_columns(features):
    with pytest.raises(WorkloadError, match="one or more distinct columns"):
        Thresholds((3, 4, 2), (features,), 1)


def test_a_block_of_any_size_is_described_and_cut():
    large = Thresholds((2**20,) * 3, ((0, 1, 2),), 2)
    (piece,) = large.pieces(WHOLE)
    assert (large.cells, piece.tally.cells, large.largest_block) == (2**60, 2**60, 2**60)
    first = next(large.pieces(1000))
    assert (first.tally.cells, first.tally.slab.prefix) == (1000, (0, 0))
