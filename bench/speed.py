"""Speed and memory figures. What a program needs is measured from outside, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from anamorph.curator.noise import SystemBits, discrete_gaussian, top_k
from anamorph.datasets import benchmark

ONE_CORE = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
}


def child(function: str, **environment: str) -> dict[str, Any]:
    """Returns what a function of this module returns, run on one core in a process of its own, and its peak memory."""
    code = (
        "import os, json; os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[-1]]);"
        f"from bench import speed; found = speed.{function}();"
        "found['peak_mb'] = speed.peak_mb(); print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def peak_mb() -> float:
    """Returns the most memory that this process has had, in MB (`ru_maxrss` would start at that of its parent)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def help_seconds() -> dict[str, Any]:
    """Returns the seconds that `anamorph --help` takes, the best of five."""
    program = Path(sys.executable).parent / "anamorph"
    best = min(timed([str(program), "--help"]) for _ in range(5))
    return {"seconds": best, "target": 0.5, "reached": best <= 0.5}


def timed(command: list[str]) -> float:
    """Returns the seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def projection_step() -> dict[str, Any]:
    """Returns the milliseconds of one projection step: 256 cells of ADULT, n' = 1000, one core."""
    found = child("measure_step", **ONE_CORE)
    return found | {"target_ms": 10, "reached": found["ms"] <= 10}


def measure_step() -> dict[str, Any]:
    """Returns the time of a step of either simplex mapping, the best of some runs of 100 steps."""
    import jax

    from anamorph.models import goals
    from anamorph.models.descent import advance, start
    from anamorph.models.relaxed import RelaxedProjection, scatter
    from anamorph.models.simplex import Layout
    from anamorph.queries.marginals import random_marginals
    from anamorph.queries.workload import Workload
    from anamorph.release import Measurement

    _, schema = benchmark("adult")
    cells = Workload((random_marginals(schema, 3, count=64, seed=0),)).by_cell()
    random = np.random.default_rng(0)
    chosen = cells.take(random.choice(cells.blocks, 256, replace=False))
    measurement = Measurement(chosen, random.random(256) * 0.01, np.full(256, 0.003), 48842.0)
    layout = Layout(schema.sizes)
    aims = goals.build(layout, [measurement])
    found = {}
    for simplex in ("sparsemax", "softmax"):
        estimator = RelaxedProjection(simplex=simplex, tolerance=0.0)
        problem = estimator.problem(layout)
        state = start(problem, scatter(estimator, layout, jax.random.key(0)))
        times = []
        for until in range(100, 700, 100):
            begin = time.perf_counter()
            state = jax.block_until_ready(advance(problem, state, aims, until))
            times.append((time.perf_counter() - begin) * 10)
        found[simplex] = min(times[1:])
    return {"ms": found["sparsemax"], "ms_softmax": found["softmax"]}


def selection() -> dict[str, Any]:
    """Returns the seconds of selecting the top 16 of 2.5 million, and of 100 million streamed, on one core."""
    small, large = child("select_small"), child("select_large")
    reached = small["seconds"] <= 1 and large["seconds"] <= 60 and large["peak_mb"] <= 1024
    return {
        "of_2.5e6": small,
        "of_1e8": large,
        "target_seconds": [1, 60],
        "target_mb": 1024,
        "reached": reached,
    }


def select_small() -> dict[str, Any]:
    """Returns the seconds of one selection from memory."""
    scores = np.random.default_rng(0).integers(0, 1 << 20, 2_500_000)
    start = time.perf_counter()
    top_k([scores], 16, 1e5, SystemBits())
    return {"seconds": time.perf_counter() - start}


def select_large() -> dict[str, Any]:
    """Returns the seconds of one selection from a stream; making the scores is counted in."""
    random = np.random.default_rng(0)
    start = time.perf_counter()
    top_k((random.integers(0, 1 << 20, 4_000_000) for _ in range(25)), 16, 1e5, SystemBits())
    return {"seconds": time.perf_counter() - start}


def noise() -> dict[str, Any]:
    """Returns the seconds of 2.5 million exact discrete Gaussians."""
    start = time.perf_counter()
    discrete_gaussian(2_500_000, 500.0, SystemBits())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "target": 20, "reached": seconds <= 20}


def end_to_end() -> dict[str, Any]:
    """Returns the seconds and the memory of RAP with (T, K) = (16, 16) from CSV to release, by the command line."""
    data, _ = benchmark("adult")
    schema = data.parent / "adult-domain.json"
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(str(Path(sys.executable).parent / "anamorph"), "fit", str(data), "--schema", str(schema)),
            *("--workload", "marginals:k=3,count=64,seed=0", "--mechanism", "rap", "--epsilon", "1"),
            *(
                "--delta",
                "4.19e-10",
                "--neighbours",
                "replace",
                "--set",
                "rounds=16",
                "--set",
                "per_round=16",
            ),
            *("--set", "steps=500", "-o", f"{directory}/out", "--ledger", f"{directory}/ledger"),
        ]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds, peak = time.perf_counter() - start, usage.ru_maxrss / 1024
    if status != 0:
        raise SystemExit("the fit must succeed")
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "target_seconds": 60,
        "target_mb": 2048,
        "reached": seconds <= 60 and peak <= 2048,
    }


def compilations() -> dict[str, Any]:
    """Returns how many XLA compilations runs of 4 and of 16 rounds need."""
    found = {rounds: child(f"compile_{rounds}")["compilations"] for rounds in (4, 16)}
    return {"rounds": {str(key): value for key, value in found.items()}, "reached": found[4] == found[16]}


def compile_4() -> dict[str, Any]:
    """Returns the compilations of 4 rounds."""
    return count_compilations(4)


def compile_16() -> dict[str, Any]:
    """Returns the compilations of 16 rounds."""
    return count_compilations(16)


def count_compilations(rounds: int) -> dict[str, Any]:
    """Returns the number of programs that XLA compiles in one run."""
    import jax

    from anamorph.mechanisms.rap import RAP
    from bench import accuracy

    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    accuracy.run(RAP(rounds=rounds, per_round=16, steps=20), 1.0, seed=0)
    return {"compilations": len(compiled)}
