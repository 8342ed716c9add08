"""Functions of one row: their sums against brute force, what is refused, and that a row counts for itself alone."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback
from jax.extend.core import Primitive

from anamorph.curator import rowwise
from anamorph.curator.rowwise import BATCH, GRID, RowFunction, sums, trace
from anamorph.errors import WorkloadError

NAMES, SIZES = ("sex", "race", "age"), (2, 3, 5)
ONE = 1 << GRID
LIKE_RACE = jax.ShapeDtypeStruct((3,), jnp.float32)
TABLE = np.linspace(-0.3, 1.2, 15, dtype=np.float32).reshape(3, 5)


def traced(function, names=NAMES, sizes=SIZES):
    return trace(function, names, sizes, name="tests:function")


def some_rows(rows, sizes=SIZES, seed=0):
    generator = np.random.default_rng(seed)
    return np.stack([generator.integers(0, size, rows) for size in sizes], axis=1).astype(np.int32)


def any_of(row):
    return 1 - jnp.einsum("i,j,k->ijk", 1 - row["sex"], 1 - row["race"], 1 - row["age"])


def rough(row):
    """Many digits, and products and sums whose order would show."""
    mixed = row["race"] @ jnp.asarray(TABLE) + jnp.sin(row["age"] * 3.7)
    return jnp.concatenate([jax.nn.softmax(mixed), jax.nn.sigmoid(jnp.cumsum(mixed * row["sex"][0])), mixed / 3])


ROUGH = traced(rough)


@given(st.tuples(*[st.integers(1, 6)] * 3), st.integers(0, 30), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_one_of_three_is_counted_as_by_hand(sizes, rows, seed):
    codes = some_rows(rows, sizes, seed)
    found = sums(traced(any_of, sizes=sizes), [codes])
    cells = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=1)
    agree = (codes[:, None, :] == cells[None]).any(axis=2)
    np.testing.assert_array_equal(found, agree.sum(axis=0) * ONE)


def test_sums_are_those_of_the_function_called_row_by_row():
    codes = some_rows(40)
    expected = np.zeros(ROUGH.count, np.int64)
    for row in codes:
        vectors = {name: jnp.eye(size)[code] for name, size, code in zip(NAMES, SIZES, row, strict=True)}
        expected += np.rint(np.clip(np.asarray(rough(vectors), np.float64), 0, 1) * ONE).astype(np.int64)
    found = sums(ROUGH, [codes])
    assert found.dtype == np.int64
    assert np.max(np.abs(found - expected)) <= 2  # a rounding or two may fall on the other side
    chosen = np.array([4, 0, 4, 7])
    np.testing.assert_array_equal(sums(ROUGH, [codes], chosen), found[chosen])


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_row_counts_the_same_whatever_rows_are_around_it(data):
    rows = data.draw(st.lists(st.integers(0, 29), min_size=1, max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    codes = some_rows(30)[rows]
    alone = sum(sums(ROUGH, [codes[i : i + 1]]) for i in range(len(rows)))
    np.testing.assert_array_equal(sums(ROUGH, [codes]), alone)
    np.testing.assert_array_equal(sums(ROUGH, np.split(codes[::-1], cuts)), alone)


def test_long_batches_are_cut_and_do_not_overflow():
    certain = traced(lambda row: jnp.stack([jnp.sum(row["race"]), row["sex"][1]]))
    codes = np.tile(some_rows(10), (BATCH // 8, 1))
    assert len(codes) > BATCH
    np.testing.assert_array_equal(sums(certain, [codes]), np.array([len(codes), codes[:, 0].sum()]) * ONE)
    np.testing.assert_array_equal(sums(ROUGH, [codes]), sums(ROUGH, [some_rows(10)]) * (BATCH // 8))
    assert sums(certain, []).tolist() == sums(certain, [codes[:0]]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("returned", "counted"),
    [
        ([2.0, -1.0, np.nan, np.inf, -np.inf, 1 + 1e-7, -1e-30], [ONE, 0, 0, ONE, 0, ONE, 0]),
        ([0.5, 1 / 3, 0.75 / ONE, 0.25 / ONE], [ONE // 2, 1365, 1, 0]),
        ([[True, False]], [ONE, 0]),
        (7, [ONE]),
        (0.25, [ONE // 4]),
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_values_are_clipped_and_rounded(returned, counted, constant):
    value = np.array(returned) if isinstance(returned, list) else returned

    def function(row):
        return value if constant else jnp.where(row["sex"][0] >= 0, value, 0)

    assert sums(traced(function), [some_rows(3)]).tolist() == [3 * number for number in counted]


def test_the_python_code_runs_once_and_captured_arrays_are_its_own():
    calls, table = [], np.array([0.25, 0.5], np.float32)
    inner = jax.jit(lambda vector: vector * table)

    def function(row):
        calls.append(row)
        return inner(row["sex"]) + 0 * table

    found = traced(function)
    digest, table[:] = found.digest, 0
    assert sums(found, [some_rows(20), some_rows(5)]).sum() > 0
    assert traced(function).digest != digest == found.digest
    assert len(calls) == 2
    assert list(calls[0]) == list(NAMES)
    assert [vector.shape for vector in calls[0].values()] == [(2,), (3,), (5,)]


def test_only_columns_in_use_are_looked_at():
    assert traced(lambda row: row["age"]).used == (2,)
    assert traced(lambda row: row["race"] * row["sex"][0]).used == (0, 1)
    assert traced(lambda row: 0.5).used == (0,)


def printing(x):
    jax.debug.print("{}", x)
    return x


def calling(x):
    jax.debug.callback(lambda _: None, x)
    return x


REFERENCE = jax.new_ref(jnp.zeros(3))


def remembering(x):
    REFERENCE[...] += x
    return REFERENCE[...]


LOOKALIKE = Primitive("add")
LOOKALIKE.def_abstract_eval(lambda x: x)

IMPURE = {
    "debug_print": printing,
    "debug_callback": calling,
    "pure_callback": lambda x: jax.pure_callback(lambda y: y, LIKE_RACE, x),
    "io_callback": lambda x: io_callback(lambda y: y, LIKE_RACE, x),
    "ffi_call": jax.ffi.ffi_call("anything", LIKE_RACE),
    "random_seed": lambda x: jax.random.uniform(jax.random.key(0), (3,)) * x,
    "rng_uniform": lambda x: jax.lax.rng_uniform(0.0, 1.0, (3,)) * x,
    "get": remembering,
    "device_put": jax.device_put,
    "add": LOOKALIKE.bind,
}


def in_derivative(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return wrapped


def deep(function):
    inner = jax.jit(lambda x: jax.lax.map(lambda _: function(x), x)[0])
    return jax.jit(lambda x: jax.lax.cond(x[0] > 0, inner, jnp.sin, x))


WAYS = {
    "plainly": lambda f: f,
    "in jit": jax.jit,
    "in cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda y: y, x),
    "in scan": lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, 2)[0],
    "in while": lambda f: lambda x: jax.lax.while_loop(lambda y: y[0] > 0, f, x),
    "in checkpoint": jax.checkpoint,
    "in custom_jvp": in_derivative,
    "deep": deep,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", IMPURE)
def test_whatever_does_more_than_compute_is_refused(kind, way):
    if kind == "get" and way in ("in checkpoint", "in custom_jvp", "in while", "in cond"):
        expected = "must be"  # some of these jax itself refuses
    else:
        expected = rf"must be of jax's pure operations alone; it may not use .*{kind}"
    with pytest.raises(WorkloadError, match=expected):
        traced(lambda row: WAYS[way](IMPURE[kind])(row["race"]))


@pytest.mark.parametrize("way", WAYS)
def test_what_computes_is_not_refused(way):
    assert traced(lambda row: WAYS[way](lambda x: jnp.cos(x) * x)(row["race"])).count == 3


def test_a_program_made_by_hand_is_checked_too():
    program = jax.make_jaxpr(lambda *row: printing(row[1]))(*[jax.ShapeDtypeStruct((s,), jnp.float32) for s in SIZES])
    with pytest.raises(WorkloadError, match="debug_print"):
        rowwise.Rowwise("m:f", NAMES, SIZES, program, 3)
    good = traced(lambda row: row["race"])
    for sizes, count in (((2, 3, 4), 3), (SIZES, 2)):
        with pytest.raises(WorkloadError, match="over the columns of this schema"):
            rowwise.Rowwise("m:f", NAMES, sizes, good.jaxpr, count)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda row: (row["sex"], row["race"]), "must return one array, and returns tuple: join several with"),
        (lambda row: None, "must return one array, and returns NoneType"),
        (lambda row: {"a": row["sex"]}, "must return one array, and returns dict"),
        (lambda row: "text", "must return one array, and returns str"),
        (lambda row: row["sex"] * 1j, "must return real numbers, and returns complex64"),
        (lambda row: jax.random.key(0), "must return real numbers, and returns key"),
        (lambda row: jnp.zeros((2, 0)), "must return from 1 to 10000000 values, and returns 0"),
        (lambda row: jnp.zeros((4000, 4000)), "must return from 1 to 10000000 values, and returns 16000000"),
        (lambda row: row["sax"], "must be a jax function of one row, .*: KeyError: 'sax'"),
        (lambda row: 1 / 0, "must be a jax function of one row, .*: ZeroDivisionError: division by zero"),
        (lambda row: 1.0 if row["sex"][0] > 0 else 0.0, "must be a jax function of one row, .*TracerBoolConversion"),
        (lambda: 1.0, "must be a jax function of one row, .*: TypeError"),
        (lambda row: np.asarray(row["sex"]), "must be a jax function of one row, .*TracerArrayConversion"),
    ],
)
def test_what_is_not_a_function_of_one_row_is_refused(function, message):
    with pytest.raises(WorkloadError, match=rf"function \('tests:function'\) {message}"):
        traced(function)


def test_large_captured_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(rowwise, "MOST_BYTES", 1 << 20)
    table = np.zeros((1 << 18, 2), np.float32)
    inner = jax.jit(lambda x: x @ jnp.asarray(table)[0])
    with pytest.raises(WorkloadError, match="must capture at most 1 MiB of arrays, and captures 2"):
        traced(lambda row: inner(row["sex"]))


def test_the_digest_is_of_the_program_and_its_arrays():
    made = [
        traced(any_of),
        traced(any_of, sizes=(2, 3, 4)),
        traced(rough),
        traced(lambda row: row["race"] * 0.5),
        traced(lambda row: row["race"] * 0.25),
        traced(lambda row: row["age"] * 0.5),
        traced(lambda row: row["race"] @ TABLE),
        traced(lambda row: row["race"] @ (TABLE + 0.1)),
        traced(lambda row: jax.jit(lambda x: x @ TABLE)(row["race"])),
        traced(lambda row: jax.jit(lambda x: x @ (TABLE + 0.1))(row["race"])),
    ]
    assert len({function.digest for function in made}) == len(set(made)) == len(made)
    assert traced(any_of) == made[0]
    assert hash(traced(any_of)) == hash(made[0])
    assert made[0] != trace(any_of, NAMES, SIZES, name="tests:other")
    assert made[0] != "a function"
    assert made[0].digest in repr(made[0])


def test_the_digest_is_the_same_in_every_process_and_jax_is_not_imported_before_it_is_used():
    code = (
        "import sys; from anamorph.curator import tallies; from anamorph.curator.rowwise import trace\n"
        "assert 'jax' not in sys.modules\n"
        "import jax, jax.numpy as jnp; jnp.where(jnp.ones(3) > 0, 1.0, jnp.ones(3)); jax.nn.softmax(jnp.ones(5))\n"
        "sys.path.insert(0, sys.argv[1]); import test_rowwise\n"
        "print(test_rowwise.ROUGH.digest)"
    )
    here = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [ROUGH.digest]


def test_a_tally_has_as_many_numbers_as_were_chosen():
    assert RowFunction(SIZES, ROUGH).cells == ROUGH.count == 15
    chosen = RowFunction(SIZES, ROUGH, np.array([3, 1]))
    assert (chosen.cells, chosen.sets) == (2, ())
