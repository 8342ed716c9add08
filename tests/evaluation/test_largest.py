"""The largest error of a block is found without listing its queries, and is the one that a list would give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import coarse
from anamorph.curator.estimates import RelaxedSide, RelaxedTable, RowTable, Support
from anamorph.errors import ParameterError
from anamorph.evaluation.errors import merged, model_errors, row_errors
from anamorph.evaluation.largest import FINEST, block_error, largest_error
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.custom import custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table


def support(generator, shape, rows, codes):
    """Rows that use some codes of each feature only."""
    drawn = np.stack([generator.integers(0, max(1, int(codes * size)), rows) for size in shape], axis=1)
    cells, counts = np.unique(np.ravel_multi_index(tuple(drawn.T), shape), return_counts=True)
    return Support(shape, cells, counts, rows, 1.0)


def relaxed(generator, shape, rows, codes):
    blocks = []
    for size in shape:
        block = np.zeros((size, rows), np.float32)
        used = max(1, int(codes * size))
        block[:used] = generator.dirichlet(np.full(used, 0.3), rows).T
        blocks.append(block)
    return RelaxedSide(blocks, generator.dirichlet(np.ones(rows)).astype(np.float32), 1.0)


def brute_force(data, estimate, least):
    cells = np.arange(math.prod(data.shape))
    return float(np.max(np.abs(data.fractions(cells, least) - estimate.fractions(cells, least))))


@given(
    st.lists(st.integers(2, 7), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2**20),
    st.integers(1, 60),
    st.sampled_from([0.4, 0.7, 1.0]),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_the_largest_error_is_that_of_all_queries(shape, seed, rows, codes, as_rows, data):
    generator = np.random.default_rng(seed)
    truth = support(generator, shape, rows, codes)
    estimate = (support if as_rows else relaxed)(generator, shape, data.draw(st.integers(1, 40)), codes)
    for least in range(1, len(shape) + 1):
        expected = brute_force(truth, estimate, least)
        assert block_error(truth, estimate, least) == pytest.approx(expected, abs=2 * FINEST)
        for floor in (expected / 2, expected * 2):
            assert block_error(truth, estimate, least, floor) == pytest.approx(max(expected, floor), abs=2 * FINEST)


def test_codes_that_no_row_has_do_not_keep_the_search_going():
    """The bug: (0, 2) is the worst of one of two, no row has code 2, and the bounds went on to tighten for ever."""
    cells = np.array([0, 1, 3, 4])
    truth = Support((2, 3), cells, np.array([4, 4, 1, 1]), 10, 1.0)
    estimate = Support((2, 3), cells, np.array([2, 2, 3, 3]), 10, 1.0)
    assert block_error(truth, estimate, 1) == pytest.approx(0.4)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_a_table_has_no_error_against_itself(least):
    truth = support(np.random.default_rng(0), (3, 4, 5), 50, 1.0)
    assert block_error(truth, truth, least) == pytest.approx(0, abs=FINEST)
    assert block_error(truth, truth, least, 0.25) == 0.25


def test_a_coarse_block_is_searched_in_chunks(monkeypatch):
    generator = np.random.default_rng(3)
    truth, estimate = support(generator, (6, 5, 4), 40, 1.0), relaxed(generator, (6, 5, 4), 9, 1.0)
    whole = [block_error(truth, estimate, least) for least in (1, 2)]
    monkeypatch.setattr(coarse, "CHUNK", 7)
    assert [block_error(truth, estimate, least) for least in (1, 2)] == pytest.approx(whole)


SIZES = (4, 3, 5, 2)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))


def table(rows, seed):
    generator = np.random.default_rng(seed)
    codes = np.stack([generator.integers(0, size, rows) for size in SIZES], axis=1).astype(np.int32)
    return TableSource(Table(codes, SIZES), SCHEMA)


def test_the_largest_error_of_a_workload():
    truth, made = table(70, 0), table(20, 1)
    parts = (Marginals(SIZES, ((0, 1), (3, 2))), Thresholds(SIZES, ((0, 1, 2), (3, 1, 0)), 2))
    workload = Workload((*parts, Thresholds(SIZES, ((1, 2),), 1)), limit=3)
    expected = merged(row_errors(truth, made, workload)).max_error
    assert largest_error(truth, 70, RowTable(made, 20), workload) == pytest.approx(expected)
    generator = np.random.default_rng(2)
    side = relaxed(generator, SIZES, 8, 1.0)
    estimate = RelaxedTable(SIZES, np.concatenate(side.blocks), side.weights)
    model = RelaxedRows(SIZES, estimate.lines, estimate.weights)
    expected = merged(model_errors(truth, model, workload)).max_error
    assert largest_error(truth, 70, estimate, workload) == pytest.approx(expected, abs=1e-6)


def in_use(sizes, rows, seed):
    """Rows that use a few codes of columns of any size."""
    generator = np.random.default_rng(seed)
    codes = np.stack([generator.integers(0, used, rows) for used in (5, 4, 3)], axis=1).astype(np.int32)
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)))
    return TableSource(Table(codes, sizes), schema)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_blocks_of_more_queries_than_could_be_listed(least):
    found = []
    for sizes in ((6, 5, 4), (2**20, 2**20, 4)):
        workload = Workload((Thresholds(sizes, ((0, 1, 2),), least),))
        found.append(largest_error(in_use(sizes, 30, 0), 30, RowTable(in_use(sizes, 12, 1), 12), workload))
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize(
    "queries", [Marginals(SIZES, ((0, 1),)).by_cell().take([1]), custom(lambda row: row["c0"], SCHEMA)]
)
def test_only_whole_blocks_are_searched(queries):
    with pytest.raises(ParameterError, match="must be of whole marginals and thresholds"):
        largest_error(table(5, 0), 5, RowTable(table(5, 1), 5), Workload((queries,)))
