"""The engine of whole marginals: seconds of a pass beside those of its bare matrix products, and of compilation.

Needs numpy and jax alone (and the benchmark data), so it runs where a device is: `python -m bench.engine`. All devices
are used, as in a fit; the bare products are dealt to them likewise. Beside both, what one large product reaches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from anamorph.curator.tallies import GroupBy
from anamorph.mechanisms.auto import planned
from anamorph.models import shrinking, tiles
from anamorph.models.simplex import Layout
from anamorph.processors import use_cores
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from bench import tables

SPEC = "marginals:k=3,count=64,seed=0"
ROWS = 256
TIMES = 5
LARGE = 2048
"""The side of a large product."""


def floor() -> dict[str, Any]:
    """Returns the ratio of a pass over ADULT's 64 3-way marginals to its matrix products, and compilation seconds."""
    use_cores()
    schema = tables.load("adult").schema
    queries, layout = planned(parse_workload(SPEC, schema)), Layout(schema.sizes)
    goal = tiles.tiled(layout, [item for item in items(queries) if len(item[0].features) > 1])
    table = jnp.full((layout.end, ROWS), 0.01)
    weights = jnp.full(ROWS, 1 / ROWS)
    slope = jax.jit(jax.value_and_grad(tiles.tiled_loss, argnums=(0, 1)))
    seconds = best(lambda: slope(table, weights, goal))
    used, height = int(goal.used), tiles.windows(layout).height
    products = best(lambda: bare(used, jnp.full((height, ROWS), 0.01), goal.devices))
    large = np.full((LARGE, LARGE), 0.5, np.float32)
    peak = 2 * LARGE**3 / best(lambda: large @ large) / 1e9
    compiling = compilation(schema.sizes, queries)
    return {
        "tiles": used,
        "height": height,
        "pass_ms": 1e3 * seconds,
        "products_ms": 1e3 * products,
        "gflops": 6 * used * height**2 * ROWS / seconds / 1e9,
        "gflops_of_one_large_product_by_numpy": peak,
        "ratio": seconds / products,
        "target": 3.0,
        "compilation_seconds": compiling,
        "compilation_target": 10.0,
        "device": jax.devices()[0].device_kind,
        "devices": goal.devices,
        "reached": seconds <= 3 * products and compiling <= 10,
    }


def items(queries: Workload) -> list[tiles.Whole]:
    """Returns noisy answers of all marginals: zeros, which take as long as any."""
    tallies = [piece.tally for piece in queries.pieces() if isinstance(piece.tally, GroupBy)]
    return [(tally, np.zeros(tally.cells), 1.0) for tally in tallies]


def best(work: Callable[[], object]) -> float:
    """Returns the seconds of some work, the best of a few times, compiled before."""
    jax.block_until_ready(work())
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        jax.block_until_ready(work())
        found.append(time.perf_counter() - start)
    return min(found)


@partial(jax.jit, static_argnums=2)
def bare(used: Array, panel: Array, devices: int) -> Array:
    """Returns something that takes three products for each tile, and nothing else to speak of."""
    batch = 1 if jax.default_backend() == "cpu" else tiles.BATCH
    many = jnp.broadcast_to(panel, (batch, *panel.shape))

    def add(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        left, right = state
        answers = jnp.einsum("gar,gbr->gab", left, right, precision=tiles.EXACT)
        by_right = jnp.einsum("gab,gar->gbr", answers, left, precision=tiles.EXACT)
        by_left = jnp.einsum("gab,gbr->gar", answers, right, precision=tiles.EXACT)
        return by_left, by_right

    def some(many: Array) -> Array:
        return jax.lax.fori_loop(0, -(-used // (batch * devices)), add, (many, many))[0]

    everywhere = PartitionSpec()
    return jax.shard_map(some, mesh=tiles.mesh(devices), in_specs=everywhere, out_specs=everywhere, check_vma=False)(
        many
    )


def compilation(sizes: tuple[int, ...], queries: Workload) -> float:
    """Returns the seconds that a fit takes before it computes: those of one step, less those of another."""
    sigma = np.full(queries.blocks, 0.001)
    log = [Measurement(queries, np.zeros(queries.cells), sigma, 48842.0)]
    layout, made = Layout(sizes), shrinking.ShrinkingProjection(rows=ROWS)
    aims, point = made.aims(layout, log), made.begin(layout, log, 0)
    found = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(shrinking.advance(layout, shrinking.start(tiles.beside(aims, point)), aims, 1))
        found.append(time.perf_counter() - start)
    return found[0] - found[1]


if __name__ == "__main__":
    print(json.dumps(floor()))
