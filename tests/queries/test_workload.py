"""Workloads: ids are always ids into this workload, and streams of answers follow the same cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.tallies import count
from anamorph.errors import WorkloadError
from anamorph.queries.marginals import Cells, Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4, 5)
SETS = ((0,), (1, 2), (3, 0), (0, 1, 2), (2, 3), (1,))


def source(rows=200):
    generator = np.random.default_rng(5)
    codes = np.stack(
        [np.minimum(generator.integers(0, s, rows), generator.integers(0, s, rows)) for s in SIZES], axis=1
    )
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    return TableSource(Table(codes.astype(np.int32), SIZES), schema)


ROWS = source()


def answers(workload, limit=37):
    """Exact counts, block by block: a list of arrays."""
    blocks: list[list[np.ndarray]] = [[] for _ in range(workload.blocks)]
    for piece in workload.pieces(limit):
        numbers = count(piece.tally, ROWS)
        if piece.blocks == 1:
            blocks[piece.first].append(numbers)
        else:
            assert piece.blocks == numbers.size
            for i, value in enumerate(numbers):
                blocks[piece.first + i].append(np.array([value]))
    return [np.concatenate(found).tolist() for found in blocks]


@st.composite
def parts(draw):
    sets = tuple(draw(st.lists(st.sampled_from(SETS), min_size=1, max_size=4, unique=True)))
    queries = Thresholds(SIZES, sets, 1) if draw(st.booleans()) else Marginals(SIZES, sets)
    kind = draw(st.sampled_from(["whole", "cells", "chosen"]))
    if kind == "whole":
        return queries
    cells = Cells(queries)
    return (
        cells
        if kind == "cells"
        else cells.take(draw(st.lists(st.integers(0, cells.cells - 1), min_size=1, max_size=8)))
    )


@st.composite
def workloads(draw):
    found = tuple(draw(st.lists(parts(), min_size=1, max_size=4)))
    weights = st.lists(st.fractions("1/10", 10), min_size=len(found), max_size=len(found))
    return Workload(found, weights=tuple(draw(weights)) if draw(st.booleans()) else ())


WORKLOADS = workloads()


@given(WORKLOADS, st.data())
@settings(deadline=None)
def test_a_subset_answers_as_the_whole_does_at_its_ids(workload, data):
    every = answers(workload)
    ids = data.draw(st.lists(st.integers(0, workload.blocks - 1), min_size=1, max_size=10))
    taken = workload.take(ids)
    assert answers(taken) == [every[i] for i in ids]
    assert taken.blocks == len(ids)
    assert taken.cells == sum(len(every[i]) for i in ids)
    assert taken.largest_block == max(part.largest_block for part in taken.parts)
    again = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10))
    assert answers(taken.take(again)) == [every[ids[i]] for i in again]
    cells = data.draw(st.lists(st.integers(0, taken.cells - 1), min_size=1, max_size=10))
    flat = [number for block in answers(taken) for number in block]
    assert answers(taken.by_cell().take(cells)) == [[flat[i]] for i in cells]


@given(WORKLOADS, st.integers(1, 200))
@settings(deadline=None)
def test_any_cut_gives_the_same_answers(workload, limit):
    assert answers(workload, limit) == answers(workload, 10**6)
    flat = [[number] for block in answers(workload) for number in block]
    assert answers(workload.by_cell(), limit) == flat
    assert workload.cells == len(flat)
    assert workload.by_cell().blocks == len(flat)
    assert all(piece.tally.cells <= limit for piece in workload.pieces(limit))
    whole, own = replace(workload, limit=limit), [piece.tally.cells for piece in workload.pieces(limit)]
    assert [piece.tally.cells for piece in whole.pieces()] == own
    assert whole.digest == workload.digest


def test_answers_are_those_of_the_rows():
    workload = Workload((Marginals(SIZES, ((3, 0),)),))
    codes = ROWS._table.codes
    expected = [int(np.sum((codes[:, 3] == a) & (codes[:, 0] == b))) for a in range(5) for b in range(3)]
    assert answers(workload) == [expected]


@pytest.mark.parametrize("ids", [[-1], [0, 3], [10**9]])
def test_ids_of_another_workload_are_refused(ids):
    workload = Workload((Marginals(SIZES, SETS[:2]), Marginals(SIZES, SETS[2:3])))
    with pytest.raises(WorkloadError, match="ids must be from 0 to 2: they are ids into this workload"):
        workload.take(ids)


def test_an_empty_workload_is_refused():
    with pytest.raises(WorkloadError, match="at least one query"):
        Workload(())
    with pytest.raises(WorkloadError, match="at least one query"):
        Workload((Marginals(SIZES, ()),))
    with pytest.raises(WorkloadError, match="at least one query"):
        Workload((Marginals(SIZES, SETS),)).take([])


def test_empty_parts_take_no_ids():
    empty, some = Marginals(SIZES, ()), Marginals(SIZES, SETS[:2])
    for order in ((empty, some), (some, empty), (empty, some, empty, some)):
        workload = Workload(order)
        every = answers(workload)
        assert [answers(workload.take([i]))[0] for i in range(workload.blocks)] == every


def test_the_digest_is_of_queries_and_their_order():
    whole = Marginals(SIZES, SETS)
    reversed_sets = Marginals(SIZES, SETS[::-1])
    made = [
        Workload((whole,)),
        Workload((reversed_sets,)),
        Workload((whole,)).by_cell(),
        Workload((whole,)).take([0, 1]),
        Workload((whole,)).take([1, 0]),
        Workload((whole,)).by_cell().take([0, 5]),
        Workload((whole,)).by_cell().take([5, 0]),
        Workload((whole,)).by_cell().take([0, 6]),
        Workload((Marginals((3, 2, 4, 6), SETS),)),
        Workload((Marginals(SIZES, ((2, 1),)),)),
        Workload((Marginals(SIZES, ((1, 2),)),)),
        Workload((whole, whole)),
    ]
    assert len({workload.digest for workload in made}) == len(made)
    assert Workload((whole,)).digest == Workload((Marginals(SIZES, SETS),), spec="another text").digest
    cut = Workload((Marginals(SIZES, SETS[:2]), Marginals(SIZES, SETS[2:])))
    assert cut.digest == Workload((whole,)).digest


def weights(workload):
    """The weight of each block."""
    found = [Fraction(0)] * workload.blocks
    for piece in workload.pieces(5):
        found[piece.first : piece.first + piece.blocks] = [piece.weight] * piece.blocks
    return found


@given(WORKLOADS, st.data())
@settings(deadline=None)
def test_a_block_keeps_its_weight(workload, data):
    every = weights(workload)
    ids = data.draw(st.lists(st.integers(0, workload.blocks - 1), min_size=1, max_size=10))
    assert weights(workload.take(ids)) == [every[i] for i in ids]
    assert bool(workload.take(ids).weights) == bool(workload.weights)
    cells = [weight for weight, numbers in zip(every, answers(workload), strict=True) for _ in numbers]
    assert weights(workload.by_cell()) == cells
    if not workload.weights:
        assert set(every) == {Fraction(1)}


def test_the_digest_is_of_weights():
    pair = (Marginals(SIZES, SETS[:2]), Thresholds(SIZES, SETS[2:4], 1))
    made = [Workload(pair, weights=weights) for weights in ((), (1, 2), (2, 1), (2, 2), (Fraction(1, 2), 1))]
    assert len({workload.digest for workload in made}) == len(made)
    assert Workload(pair, weights=(Fraction(1), Fraction(1))).digest == made[0].digest


@pytest.mark.parametrize("weights", [(1,), (1, 0), (1, -1), (1, 1, 1), (0, 0)])
def test_faulty_weights_are_refused(weights):
    with pytest.raises(WorkloadError, match="weights must be numbers above 0, one for each part"):
        Workload((Marginals(SIZES, SETS[:1]), Marginals(SIZES, SETS[1:2])), weights=weights)


@given(WORKLOADS)
@settings(deadline=None)
def test_what_is_measured_is_each_marginal_once_with_its_largest_weight(workload):
    measured, wanted = workload.measured(), {}
    for part, weight in zip(workload.parts, workload.weights or [Fraction(1)] * len(workload.parts), strict=True):
        for features in getattr(part, "sets", ()):
            wanted[features] = max(weight, wanted.get(features, Fraction(0)))
    kept = zip(measured.parts, measured.weights or [Fraction(1)] * len(measured.parts), strict=True)
    whole = [(part, weight) for part, weight in kept if isinstance(part, Marginals)]
    listed = [features for part, _ in whole for features in part.sets]
    assert {features: weight for part, weight in whole for features in part.sets} == wanted
    assert len(listed) == len(set(listed))
    assert not any(isinstance(part, Thresholds) or not part.blocks for part in measured.parts)
    single = [part for part in workload.parts if isinstance(part, Cells)]
    assert sum(isinstance(part, Cells) for part in measured.parts) == len(single)
    assert measured.cells == sum(part.cells for part in single) + sum(part.cells for part, _ in whole)
    assert measured.measured().digest == measured.digest
    assert bool(measured.weights) == bool(workload.weights)
    assert measured.limit == workload.limit


def test_marginals_measured_for_thresholds_answer_them():
    """By the cells with which a query agrees often enough."""
    workload = Workload((Thresholds(SIZES, ((0, 1, 2),), 2),))
    (cells,), (found,) = answers(workload.measured()), answers(workload)
    codes = np.stack(np.unravel_index(np.arange(len(cells)), SIZES[:3]), axis=1)
    agrees = np.sum(codes[:, None] == codes[None], axis=2) >= 2
    assert found == (agrees @ np.array(cells)).tolist()


@pytest.mark.parametrize("order", [1, 2, 3, 9])
def test_marginals_over_fewer_features_may_be_measured_instead(order):
    """All that are over `order` of a block's features, and smaller blocks as they are; each once."""
    parts = (Thresholds(SIZES, ((0, 1, 2), (0, 2, 3)), 2), Marginals(SIZES, ((1,), (0, 1), (1, 2, 3))))
    measured = Workload((*parts, Cells(parts[1])), weights=(Fraction(1), Fraction(2), Fraction(1))).measured(order)
    whole = [
        (part.sets, weight)
        for part, weight in zip(measured.parts, measured.weights, strict=True)
        if "sets" in vars(part)
    ]
    found = {features: weight for sets, weight in whole for features in sets}
    wanted: dict[tuple[int, ...], int] = {}
    for part, weight in zip(parts, (1, 2), strict=True):
        for features in part.sets:
            for smaller in itertools.combinations(features, min(order, len(features))):
                wanted[smaller] = max(weight, wanted.get(smaller, 0))
    assert found == wanted
    assert sum(len(sets) for sets, _ in whole) == len(found)
    assert sum(isinstance(part, Cells) for part in measured.parts) == 1
    assert measured.measured(order).digest == measured.digest
