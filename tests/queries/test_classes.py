"""What every query class must do: one row of the table buys all of these tests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator.tallies import check_tally, count, grid
from anamorph.curator.where import Where
from anamorph.errors import WorkloadError
from anamorph.models.mixed import Columns, MixedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.bands import Banded
from anamorph.queries.custom import Custom, custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.spec import CLASSES
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import WHOLE, Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SIZES = (3, 2, 4, 5)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
N = 64
"""A power of two, so that weights of 1/N are exact."""
_RANDOM = np.random.default_rng(5)
ROWS = np.stack([_RANDOM.integers(0, size, N) for size in SIZES], axis=1).astype(np.int32)
SOURCE = TableSource(Table(ROWS, SIZES), SCHEMA)
ONE_HOT = RelaxedRows(
    SIZES,
    np.concatenate([np.arange(size)[:, None] == ROWS[:, i] for i, size in enumerate(SIZES)]).astype(np.float32),
    np.full(N, 1 / N, np.float32),
)
LIMITED = (4, 4)
"""The codes of c2 and c3, where they are numbers: the last code of c3 is `missing`."""
ABSENT = ROWS[:, 3] == LIMITED[1]
NUMBERED = MixedRows(
    Columns(SIZES, (2, 3), LIMITED),
    RelaxedRows(
        (*SIZES[:2], 2),
        np.concatenate([ONE_HOT.probabilities[:5], np.stack([~ABSENT, ABSENT]).astype(np.float32)]),
        ONE_HOT.weights,
    ),
    ((np.minimum(ROWS[:, 2:].T, 3) + 0.5) / 4).astype(np.float32),
)
SETS = ((0, 1, 2), (3, 1, 0), (2, 3, 1))


def any_of(row):
    return 1 - jnp.einsum("i,j->ij", 1 - row["c0"], 1 - row["c3"])


def graded(row):
    return row["c1"][0] * row["c2"] * 0.5


WHOLE_BLOCKS = {
    "marginals": lambda: Marginals(SIZES, ((1,), (0, 2), (3, 1, 0), (2, 3))),
    "thresholds": lambda: Thresholds(SIZES, SETS, 2),
    "thresholds of one": lambda: Thresholds(SIZES, SETS, 1),
    "thresholds of all": lambda: Thresholds(SIZES, SETS, 3),
    "custom": lambda: custom(any_of, SCHEMA),
    "custom halves": lambda: custom(graded, SCHEMA),
}
SINGLE = {f"{name} by cell": lambda made=made: made().by_cell() for name, made in WHOLE_BLOCKS.items()}
CHOSEN = {f"{name}, chosen": lambda made=made: made().take([3, 0, 2]) for name, made in SINGLE.items()}
PAIRS = np.array([[0, 3], [2, 1], [3, 3], [1, 0], [-1, 2]])
SLOPES, OFFSETS = np.array([[3, -2], [-5, 1], [0, 7], [4, 4]]), np.array([1, -6, 14, 15])
TESTED = {
    "mixed": lambda: NumberTests(Where(SIZES, (1, 0), (2, 3), LIMITED, PAIRS)),
    "mixed, none given": lambda: NumberTests(Where(SIZES, (), (3,), LIMITED[1:], PAIRS[:, 1:])),
    "halfspaces": lambda: NumberTests(Where(SIZES, (1,), (2, 3), LIMITED, OFFSETS, SLOPES)),
}
CUT = {
    "bands": lambda: Banded(SIZES, ((1,), (0, 2), (3, 1, 2), (3,)), ((), (), (1, 3), (2, 4))),
    "bands of codes": lambda: Banded(SIZES, SETS, ((), (), (1, 2, 3), (1, 2, 3, 4))),
}
TABLE = WHOLE_BLOCKS | SINGLE | CHOSEN | TESTED | CUT
UNCUT = NumberTests | Banded
"""Those whose blocks are counted whole."""
LIMITS = (1, 3, 7, 20, 10**6)


@pytest.fixture(params=TABLE, name="queries")
def _queries(request):
    return TABLE[request.param]()


def answers(queries, limit=WHOLE):
    """Exact counts, a list for each block; pieces must tile the ids on the way."""
    blocks: list[list[float]] = []
    for piece in queries.pieces(limit):
        numbers = (count(piece.tally, SOURCE) / 2.0 ** grid(piece.tally)).tolist()
        assert len(numbers) == piece.tally.cells > 0
        assert piece.blocks in (1, len(numbers), getattr(piece.tally, "tests", 1))
        assert piece.first in (len(blocks), len(blocks) - 1)  # the next block, or more of the last
        if piece.first == len(blocks) - 1:
            assert piece.blocks == 1
            blocks[-1] += numbers
        else:
            blocks += np.reshape(numbers, (piece.blocks, -1)).tolist()
    return blocks


def test_every_class_has_a_row():
    assert set(CLASSES) <= set(TABLE)


@pytest.mark.parametrize("limit", LIMITS)
def test_any_cut_tiles_the_ids_and_gives_the_same_answers(queries, limit):
    found = answers(queries, limit)
    assert found == answers(queries)
    assert len(found) == queries.blocks
    assert sum(map(len, found)) == queries.cells
    assert max(map(len, found)) == queries.largest_block


@pytest.mark.parametrize("limit", LIMITS)
def test_a_piece_is_within_the_limit_and_of_the_closed_set(queries, limit):
    for piece in queries.pieces(limit):
        check_tally(piece.tally, SIZES)
        # A function is evaluated once for all of its values, whatever the limit; a test is not cut.
        whole = isinstance(queries, Custom) or (isinstance(queries, UNCUT) and piece.blocks == 1)
        assert piece.tally.cells <= limit or whole


def test_take_of_take_composes(queries):
    every, last = answers(queries), queries.blocks - 1
    ids = [last, 0, last // 2]
    taken = queries.take(ids)
    assert answers(taken) == [every[i] for i in ids]
    assert answers(taken.take([2, 0])) == answers(queries.take([ids[2], ids[0]]))
    assert answers(queries.take(range(queries.blocks))) == every
    assert (taken.blocks, taken.sizes) == (3, SIZES)
    nothing = queries.take([])
    assert (nothing.blocks, nothing.cells, list(nothing.pieces(5))) == (0, 0, [])


def test_by_cell_makes_each_query_a_block_once(queries):
    if isinstance(queries, UNCUT):
        with pytest.raises(WorkloadError, match="must be taken in whole blocks"):
            queries.by_cell()
        return
    cells = queries.by_cell()
    assert answers(cells) == [[number] for block in answers(queries) for number in block]
    assert cells.by_cell() is cells
    assert (cells.blocks, cells.cells) == (queries.cells, queries.cells)
    assert cells.sizes == queries.sizes == SIZES
    assert cells.largest_block == 1


def test_what_is_measured_is_measured_as_it_is(queries):
    measured = queries.measured()
    assert type(measured.measured()) is type(measured)
    assert (measured.blocks, measured.cells, measured.sizes) == (queries.blocks, queries.cells, SIZES)
    assert type(measured) is (Marginals if type(queries) is Thresholds else type(queries))


@pytest.mark.parametrize("limit", [7, WHOLE])
def test_rows_and_the_relaxed_rows_that_are_one_hot_answer_alike(queries, limit):
    model = NUMBERED if isinstance(queries, UNCUT) else ONE_HOT
    for piece in queries.pieces(limit):
        exact = count(piece.tally, SOURCE) / 2.0 ** grid(piece.tally) / N
        np.testing.assert_allclose(model.answer(piece.tally), exact, atol=2e-6)


def test_the_digest_is_of_the_queries_and_their_order(request, queries):
    made = TABLE[request.node.callspec.params["queries"]]
    whole = Workload((queries,))
    assert whole.digest == Workload((made(),), "another text", limit=3).digest
    others = [Workload((queries, queries))]
    others += [whole.take([0]), whole.take(range(queries.blocks)[::-1])] if queries.blocks > 1 else []
    others += [whole.by_cell()] if queries.largest_block > 1 and not isinstance(queries, UNCUT) else []
    assert len({whole.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_no_two_classes_have_one_digest():
    assert len({Workload((made(),)).digest for made in TABLE.values()}) == len(TABLE)
