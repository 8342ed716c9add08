"""Row functions: a tally that is a user's own jax function of one row, with values in [0, 1].

The user's Python code runs once, on abstract rows, and leaves a *jaxpr*: a straight list of array operations. Only the
jaxpr is evaluated on private rows, and only if every operation in it, at any depth, is one of `PURE`: these have no
effects, no state, no randomness and no way out of the process. So the numbers of a row are a function of that row,
and each is bounded here, whatever the function returns: what is not a number counts as 0, the rest is clipped to
[0, 1], and rounded to a whole multiple of 2^-GRID. One row added, removed or replaced moves each sum by at most 1, and
m sums by at most sqrt(m) in L2; sums are exact integers, in units of 2^-GRID.

For that the numbers of a row must not depend on the rows around it, to the last bit. Under `vmap` they could: a batch
is one large product, and how XLA orders its additions depends on the size of the batch. Here a loop (what `lax.map`
compiles to) evaluates one row at a time, by one executable for every batch of every length: its length is a number
given when it runs, and the compiler's optimiser is off, so that it cannot merge the code of several rounds of the loop.
Rows that agree on the columns that the function reads are evaluated once and counted. A loop over rows is at its best
on a CPU, so that is where it runs, accelerator or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.scores import GRID
from anamorph.errors import WorkloadError

if TYPE_CHECKING:
    from jax import Array
    from jax.extend.core import ClosedJaxpr, Primitive

    Function = Callable[[dict[str, Array]], Any]
    """A user's function: from an encoded row, a vector for each column by name, to an array."""

BATCH = 1 << 16
"""How many rows are added up at a time: in 32 bits, since BATCH << GRID is far below 2^31."""

MOST_VALUES = 10_000_000
"""The most values that one function may return."""

MOST_BYTES = 64 << 20
"""The most bytes of arrays that one function may capture."""

MOST_TEXT = 500
"""How much of the message of a user's exception is shown."""

PURE = """
    abs acos acosh add add_jaxvals and argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_in_dim call cbrt ceil cholesky clamp closed_call clz complex concatenate cond conj
    conv_general_dilated convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum custom_jvp_call
    custom_vjp_call digamma div dot_general dynamic_slice dynamic_update_slice eigh eq eq_to erf erf_inv erfc exp exp2
    expm1 fft floor gather ge gt householder_product igamma igamma_grad_a igammac imag integer_pow iota is_finite jit
    le le_to lgamma linear_solve log log1p logistic lt lt_to lu lu_pivots_to_permutation max min mul mulhi name ne neg
    nextafter not optimization_barrier or pad polygamma population_count pow qr real reduce reduce_and reduce_max
    reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_window reduce_window_max reduce_window_min
    reduce_window_sum reduce_xor regularized_incomplete_beta rem remat reshape rev round rsqrt scan scatter scatter_add
    scatter_max scatter_min scatter_mul scatter_sub select_and_gather_add select_and_scatter select_and_scatter_add
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square squeeze
    stack stop_gradient sub svd tan tanh tile top_k transpose triangular_solve tridiagonal_solve unstack while xor zeta
"""
"""The operations of jax that a function may be made of. What is not listed is refused: also what a later jax adds."""


@dataclass(frozen=True, eq=False, repr=False)
class Rowwise:
    """A function of one row, traced and found to be pure; equal to another of the same name and program."""

    name: str
    """Where it came from, `module:function`."""
    names: tuple[str, ...]
    """The names of all columns of the schema."""
    sizes: tuple[int, ...]
    """The sizes of all columns of the schema."""
    jaxpr: ClosedJaxpr
    """From a vector for each column to `count` numbers, not yet bounded; with its own copies of captured arrays."""
    count: int

    def __post_init__(self) -> None:
        check_program(self)
        object.__setattr__(self, "jaxpr", with_own_constants(self.jaxpr))

    @cached_property
    def digest(self) -> str:
        """A hash of the program and of the arrays that it captured; another version of jax may trace another one."""
        state = hashlib.sha256(self.jaxpr.pretty_print(use_color=False).encode())
        for constant in constants(self.jaxpr):
            state.update(f"{constant.dtype}{constant.shape}".encode() + constant.tobytes())
        return state.hexdigest()

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The columns that the function reads; the first column where it reads none."""
        program = self.jaxpr.jaxpr
        read = {id(atom) for equation in program.eqns for atom in equation.invars} | set(map(id, program.outvars))
        return tuple(i for i, variable in enumerate(program.invars) if id(variable) in read) or (0,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rowwise) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Rowwise({self.name!r}, {self.names!r}, {self.sizes!r}, {self.count}, {self.digest})"


@dataclass(frozen=True, eq=False)
class RowFunction:
    """The sums over rows of the values of a function, in units of 2^-GRID: all of them, or the chosen ones."""

    sizes: tuple[int, ...]
    """The sizes of all columns."""
    function: Rowwise
    chosen: NDArray[np.int64] | None = None

    @property
    def cells(self) -> int:
        """How many numbers the tally has."""
        return self.function.count if self.chosen is None else self.chosen.size

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The feature sets to group by: none."""
        return ()


def trace(function: Function, names: Sequence[str], sizes: Sequence[int], *, name: str) -> Rowwise:
    """Returns a user's function in the form in which it is evaluated; its Python code runs here and never again.

    It sees abstract rows, so nothing that it does or says here can carry a private value. Only a rule for derivatives
    (`jax.custom_jvp`) is called later: by the fit, on public rows.
    """
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    def flat(*vectors: Array) -> Array:
        return flattened(function(dict(zip(names, vectors, strict=True))), name)

    rows = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    try:
        with jax.default_matmul_precision("highest"):
            program = jax.make_jaxpr(flat)(*rows)
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"function ({name!r}) must be a jax function of one row, a mapping from column names to vectors: "
            f"{told(error)}"
        ) from error
    return Rowwise(name, tuple(names), tuple(sizes), program, program.out_avals[0].size)


def told(error: BaseException) -> str:
    """Returns the type and the message of an exception, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_TEXT]


def flattened(found: object, name: str) -> Array:
    """Returns what a function returned as a vector of floats; refuses what is not one array of numbers."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    if not isinstance(found, jax.Array | np.ndarray | np.generic | float | int):
        raise WorkloadError(
            f"function ({name!r}) must return one array, and returns {type(found).__name__}: join several with "
            "jnp.concatenate"
        )
    array = jnp.asarray(found)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise WorkloadError(f"function ({name!r}) must return real numbers, and returns {array.dtype}")
    if not 1 <= array.size <= MOST_VALUES:
        raise WorkloadError(f"function ({name!r}) must return from 1 to {MOST_VALUES} values, and returns {array.size}")
    return jnp.ravel(array).astype(jnp.float32)


def check_program(function: Rowwise) -> None:
    """Refuses a program that is not from one row to `count` floats, or that may do more than compute them."""
    program = function.jaxpr
    given = [(aval.shape, str(aval.dtype)) for aval in program.in_avals]
    made = [(aval.shape, str(aval.dtype)) for aval in program.out_avals]
    if given != [((size,), "float32") for size in function.sizes] or made != [((function.count,), "float32")]:
        raise WorkloadError(f"function ({function.name!r}) must be traced over the columns of this schema")
    if not 1 <= function.count <= MOST_VALUES or len(function.names) != len(function.sizes):
        raise WorkloadError(f"function ({function.name!r}) must be made by `trace`")
    inside, allowed = list(programs(program)), {id(operation) for operation in pure_operations()}
    found = {id(equation.primitive): equation.primitive for inner in inside for equation in inner.eqns}
    strange = [str(operation) for identity, operation in found.items() if identity not in allowed]
    if strange or any(inner.effects for inner in inside):
        raise WorkloadError(
            f"function ({function.name!r}) must be of jax's pure operations alone; it may not use "
            f"{', '.join(strange) or 'effects'}: leave out printing, callbacks, random numbers, references, foreign "
            "calls and devices"
        )
    size = sum(constant.nbytes for constant in constants(program))
    if size > MOST_BYTES:
        raise WorkloadError(
            f"function ({function.name!r}) must capture at most {MOST_BYTES >> 20} MiB of arrays, and captures "
            f"{size / (1 << 20):.3g}"
        )


@cache
def pure_operations() -> frozenset[Primitive]:
    """Returns the operations that `PURE` names: jax's own objects, so that no other can pass under such a name."""
    from jax import lax  # noqa: PLC0415
    from jax.extend.core import primitives  # noqa: PLC0415

    homes, keys = (primitives, lax, lax.linalg), (f"{name}_p" for name in PURE.split())
    named = (next((vars(home)[key] for home in homes if key in vars(home)), None) for key in keys)
    return frozenset(found for found in named if found is not None)


def programs(program: Any) -> Iterator[Any]:  # noqa: ANN401 - with constants or without: two classes, later one
    """Yields a program and every program inside of it: branches, bodies of loops, inner calls."""
    yield program
    for equation in program.eqns:
        for inner in filter(is_program, leaves(tuple(equation.params.values()))):
            yield from programs(inner)


def is_program(value: object) -> bool:
    """Returns whether a parameter of an operation is itself a program."""
    from jax.extend.core import ClosedJaxpr, Jaxpr  # noqa: PLC0415

    return isinstance(value, Jaxpr | ClosedJaxpr)


def leaves(value: object) -> Iterator[object]:
    """Yields what is in nested lists, tuples and mappings."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def constants(program: ClosedJaxpr) -> Iterator[NDArray]:
    """Yields all arrays that a program captured."""
    from jax.extend.core import Literal  # noqa: PLC0415

    for inner in programs(program):
        yield from map(np.asarray, getattr(inner, "consts", ()))
        for equation in inner.eqns:
            yield from (np.asarray(atom.val) for atom in equation.invars if isinstance(atom, Literal))


def with_own_constants(value: Any) -> Any:  # noqa: ANN401 - a program, or a parameter of an operation
    """Returns a program with copies of all arrays that it captured: the user may change the originals."""
    if isinstance(value, tuple | list):
        copies = map(with_own_constants, value)
        return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)
    if not is_program(value):
        return value
    equations = [
        equation.replace(params={key: with_own_constants(item) for key, item in equation.params.items()})
        for equation in value.eqns
    ]
    if hasattr(value, "consts") and len(value.consts) == len(value.constvars):
        inner = value.jaxpr.replace(eqns=equations)
        return value.replace(jaxpr=inner, consts=[np.array(constant) for constant in value.consts])
    return value.replace(eqns=equations)


def values(function: Rowwise, vectors: Sequence[Array], *, slack: float = 0.0) -> Array:
    """Returns the values of a function on one row: `count` numbers in [0, 1], 0 for what is not a number.

    A value on the bounds keeps its derivative. With `slack`, so does one that rounding has moved past them by that
    much, and it is not clipped: a relaxed row's, never a private row's.
    """
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.extend.core import jaxpr_as_fun  # noqa: PLC0415

    (found,) = jaxpr_as_fun(function.jaxpr)(*vectors)
    return jnp.where((found >= -slack) & (found <= 1 + slack), found, (found > 1).astype(found.dtype))


def sums(
    function: Rowwise, batches: Iterable[NDArray[np.int32]], chosen: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Returns the sums over private rows of a function's values, exact, in units of 2^-GRID; or only the chosen ones.

    Args:
        function: the function.
        batches: the codes of the rows, rows by columns of the schema, cut in any way.
        chosen: which of the values are wanted.
    """
    add = adder(function)
    totals = np.zeros(function.count, np.int64)
    for batch in batches:
        for first in range(0, len(batch), BATCH):
            totals += add(batch[first : first + BATCH, list(function.used)])
    return totals if chosen is None else totals[chosen]


@lru_cache(maxsize=32)
def adder(function: Rowwise) -> Callable[[NDArray[np.int32]], NDArray[np.int32]]:
    """Returns what adds up the values of at most BATCH rows, given the codes of the columns in use; compiles it."""
    import jax  # noqa: PLC0415

    width = len(function.used)
    shapes = [jax.ShapeDtypeStruct(shape, np.int32) for shape in ((BATCH, width), (BATCH,), ())]
    with plain_settings():
        # The optimiser may merge rounds of the loop; without it, every row runs through the same instructions.
        run = jax.jit(loop(function)).lower(*shapes).compile({"xla_backend_optimization_level": "0"})

    def add(codes: NDArray[np.int32]) -> NDArray[np.int32]:
        rows, times = distinct(codes)
        padded, counted = np.zeros((BATCH, width), np.int32), np.zeros(BATCH, np.int32)
        padded[: len(rows)], counted[: len(rows)] = rows, times
        with plain_settings():
            return np.asarray(run(padded, counted, np.int32(len(rows))))

    return add


@contextmanager
def plain_settings() -> Iterator[None]:
    """Sets what all work on private rows goes by, whatever the user has set: the processor, and compiled code."""
    import jax  # noqa: PLC0415

    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # jax was told to do without it
        device = jax.local_devices()[0]
    with jax.default_device(device), jax.disable_jit(False):
        yield


def loop(function: Rowwise) -> Callable[[Array, Array, Array], Array]:
    """Returns the jax function that adds up, over the first `used` rows, times * values in whole units of 2^-GRID."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    def vectors(codes: Array) -> Iterator[Array]:
        for column, size in enumerate(function.sizes):
            if column in function.used:
                yield (codes[function.used.index(column)] == jnp.arange(size)).astype(jnp.float32)
            else:
                yield jnp.zeros(size, jnp.float32)

    def total(codes: Array, times: Array, used: Array) -> Array:
        def step(index: Array, before: Array) -> Array:
            found = values(function, list(vectors(codes[index])))
            return before + times[index] * jnp.rint(found * (1 << GRID)).astype(jnp.int32)

        return jax.lax.fori_loop(0, used, step, jnp.zeros(function.count, jnp.int32))

    return total


def distinct(codes: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Returns the distinct rows, and how often each occurs."""
    plain = np.ascontiguousarray(codes, np.int32)
    whole = plain.view(np.dtype((np.void, plain.shape[1] * 4))).ravel()
    _, first, times = np.unique(whole, return_index=True, return_counts=True)
    return plain[first], times
