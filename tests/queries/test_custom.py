"""Custom queries: blocks and cells of a function, functions by name, and what is left of them in a release."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator.rowwise import sums
from anamorph.errors import WorkloadError
from anamorph.queries.custom import Custom, CustomCells, Recorded, custom, from_spec
from anamorph.queries.marginals import Marginals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema

SIZES = (2, 3, 5)
SCHEMA = Schema(tuple(Codes(name=name, values=size) for name, size in zip(("sex", "race", "age"), SIZES, strict=True)))
ROWS = np.array([[0, 1, 4], [1, 1, 2], [1, 0, 0], [0, 1, 4]], np.int32)


def any_of(row):
    return 1 - jnp.einsum("i,j->ij", 1 - row["sex"], 1 - row["race"])


QUERIES = custom(any_of, SCHEMA)


def answers(queries, limit=4):
    """Sums of the rows, block by block."""
    blocks: list[list[int]] = [[] for _ in range(queries.blocks)]
    for piece in queries.pieces(limit):
        numbers = sums(piece.tally.function, [ROWS], piece.tally.chosen).tolist()
        assert len(numbers) == piece.tally.cells
        if piece.blocks == 1:
            blocks[piece.first] += numbers
        else:
            assert piece.blocks == len(numbers) <= limit
            for i, number in enumerate(numbers):
                blocks[piece.first + i].append(number)
    return blocks


EVERY = answers(QUERIES)[0]


def test_a_function_is_one_block():
    assert (QUERIES.blocks, QUERIES.cells, QUERIES.largest_block) == (1, 6, 6)
    assert QUERIES.function.name == f"{__name__}:any_of"
    assert QUERIES.sizes == QUERIES.by_cell().sizes == SIZES
    assert QUERIES.measured() is QUERIES
    assert answers(QUERIES) == [EVERY]
    assert [number >> 12 for number in EVERY] == [3, 3, 2, 2, 4, 2]
    assert QUERIES.take([0]) == QUERIES == custom(any_of, SCHEMA)
    assert (QUERIES.take([]).blocks, QUERIES.take([]).cells) == (0, 0)
    assert answers(QUERIES.take([0, 0])) == [EVERY, EVERY]
    assert answers(QUERIES.take([0, 0]).by_cell()) == [[number] for number in EVERY + EVERY]


@pytest.mark.parametrize("limit", [1, 4, 6, 100])
def test_cells_are_single_values(limit):
    cells = QUERIES.by_cell()
    assert (cells.blocks, cells.cells, cells.largest_block) == (6, 6, 1)
    assert cells.by_cell() is cells is cells.measured()
    assert answers(cells, limit) == [[number] for number in EVERY]
    taken = cells.take([4, 0, 4])
    assert answers(taken, limit) == [[EVERY[4]], [EVERY[0]], [EVERY[4]]]
    assert answers(taken.take([1]), limit) == [[EVERY[0]]]
    assert answers(cells.take([]), limit) == []


@pytest.mark.parametrize("queries", [QUERIES, QUERIES.by_cell(), Recorded("m:f", 6), Recorded("m:f", 6, single=True)])
@pytest.mark.parametrize("ids", [[-1], [0, 6]])
def test_ids_of_another_workload_are_refused(queries, ids):
    with pytest.raises(WorkloadError, match=f"ids must be from 0 to {queries.blocks - 1}"):
        queries.take(ids)


def test_it_is_a_part_of_a_workload():
    workload = Workload((Marginals(SIZES, ((0,), (1, 2))), QUERIES))
    assert (workload.blocks, workload.cells) == (3, 2 + 15 + 6)
    assert workload.take([2]).parts == (QUERIES,)
    assert [piece.first for piece in workload.pieces(100)] == [0, 1, 2]
    others = [
        Workload((QUERIES,)),
        Workload((custom(lambda row: any_of(row) / 2, SCHEMA),)),
        Workload((QUERIES.by_cell(),)),
        Workload((QUERIES.by_cell().take([1, 2]),)),
    ]
    assert len({other.digest for other in others}) == len(others)
    assert others[0].digest == Workload((custom(any_of, SCHEMA),)).digest


def test_names():
    class Asked:
        def __call__(self, row):
            return row["sex"]

    assert custom(Asked(), SCHEMA).function.name.startswith(f"{__name__}:test_names.<locals>.Asked")
    assert custom(any_of, SCHEMA, name="mine:own").function.name == "mine:own"
    with pytest.raises(WorkloadError, match=r"function \('int'\) must be a jax function of one row"):
        custom(3, SCHEMA)  # pyright: ignore[reportArgumentType]


MODULE = """
import jax.numpy as jnp
import sibling_of_queries

def any_of(row):
    return sibling_of_queries.HALF * row["sex"]

def broken(row):
    return row["sax"]

class Inside:
    race = staticmethod(lambda row: row["race"])

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"queries_of_mine": MODULE, "sibling_of_queries": "HALF = 0.5", "stopping": "import sys; sys.exit(3)"}
    files |= {"misspelt": "def any_of(row:", "failing": "raise OSError('no\\nroom')"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in files:
        sys.modules.pop(name, None)


def test_a_function_is_found_by_its_name(here):
    before = list(sys.path)
    found = from_spec("queries_of_mine:any_of", SCHEMA)
    assert found.function.name == "queries_of_mine:any_of"
    assert sums(found.function, [ROWS]).tolist() == [4096, 4096]
    assert from_spec("queries_of_mine:Inside.race", SCHEMA).cells == 3
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("queries_of_mine", "must be named as module:function, such as 'my_queries:any_of'"),
        ("queries_of_mine:", "must be named as module:function"),
        (":any_of", "must be named as module:function"),
        ("queries.of-mine:any_of", "must be named as module:function"),
        ("a:b:c", "must be named as module:function"),
        (
            "queries_of_yours:any_of",
            r"module \('queries_of_yours'\) must be .*ModuleNotFoundError: No module named",
        ),
        ("misspelt:any_of", r"module \('misspelt'\) must be one that Python can import: SyntaxError: "),
        ("failing:any_of", r"module \('failing'\) must be one that Python can import: OSError: no room"),
        ("stopping:any_of", r"module \('stopping'\) must be one that Python can import: SystemExit: 3"),
        (
            "queries_of_mine:any_off",
            r"\('queries_of_mine:any_off'\) must be in its module. Did you mean 'any_of'",
        ),
        ("queries_of_mine:Inside.age", r"function \('queries_of_mine:Inside.age'\) must be in its module"),
        ("queries_of_mine:number", "must be a jax function of one row, and is int"),
        ("queries_of_mine:broken", r"function \('queries_of_mine:broken'\) must be a jax .*: KeyError: 'sax'"),
    ],
)
def test_faulty_names(here, spec, message):
    before = list(sys.path)
    with pytest.raises(WorkloadError, match=message):
        from_spec(spec, SCHEMA)
    assert sys.path == before


def shape(queries):
    return queries.blocks, queries.cells, queries.largest_block


@pytest.mark.parametrize(
    "change",
    [
        lambda queries: queries,
        lambda queries: queries.take([0]),
        lambda queries: queries.take([0, 0]),
        lambda queries: queries.take([]),
        lambda queries: queries.by_cell(),
        lambda queries: queries.by_cell().take([5, 1]),
        lambda queries: queries.take([0, 0]).by_cell().take([7]),
        lambda queries: queries.by_cell().take([5, 1]).take([0]).by_cell(),
    ],
)
def test_what_a_release_knows_has_the_shape_of_the_queries(change):
    known, real = change(Recorded("my_queries:any_of", 6, sizes=SIZES)), change(QUERIES)
    assert isinstance(real, Custom | CustomCells)
    assert shape(known) == shape(real)
    assert known.sizes == real.sizes
    assert known.measured() is known
    chosen = real.chosen if isinstance(real, CustomCells) else None
    np.testing.assert_array_equal(known.chosen, chosen)
    with pytest.raises(WorkloadError, match=r"function \('my_queries:any_of'\) must be given to compute"):
        next(known.pieces(10))
