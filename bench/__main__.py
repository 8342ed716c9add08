"""Every figure of the benchmarks, as JSON lines: `python -m bench`, or some by name: `python -m bench step help`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import accuracy, counting, elsewhere, engine, game, matrix, numbers, oracle, scale, speed, thresholds, unseen

FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "rho": accuracy.rho,
    "help": speed.help_seconds,
    "step": speed.projection_step,
    "select": speed.selection,
    "noise": speed.noise,
    "counting": counting.counting,
    "tests": counting.tests,
    "end-to-end": speed.end_to_end,
    "compilations": speed.compilations,
    "engine": engine.floor,
    "rap-cells": accuracy.rap_cells,
    "rap-blocks": accuracy.rap_blocks,
    "hdmm": matrix.hdmm,
    "coverage": matrix.coverage,
    "scale-one-round": lambda: scale.measured("one-round"),
    "scale-all-three-way": lambda: scale.measured("all-three-way"),
    "scale-five-way": lambda: scale.measured("five-way"),
    "numbers-asked": numbers.asked,
    "numbers-mixed": numbers.mixed,
    "numbers-learning": numbers.learning,
    "numbers-multitask": numbers.multitask,
    "numbers-annealing": numbers.annealing,
    "numbers-speed": numbers.speed,
    "oracle": oracle.oracle,
    "fem": game.fem,
    "dqrs": game.dqrs,
    "thresholds": thresholds.table,
    "thresholds-speed": thresholds.speed,
    "unseen": unseen.unseen,
    "elsewhere": elsewhere.elsewhere,
}


def main(names: list[str]) -> None:
    """Prints a line of JSON for each figure: what was measured, what the target is, whether it is reached."""
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        sys.exit(f"figure {unknown[0]!r} must be one of {', '.join(FIGURES)}")
    for name in names or FIGURES:
        start = time.perf_counter()
        result = FIGURES[name]()
        line = (
            {"figure": name}
            | result
            | {"cores": os.cpu_count(), "bench_seconds": round(time.perf_counter() - start, 1)}
        )
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
