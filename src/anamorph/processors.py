"""Processors: every core a device of jax's own, so that a fit computes on all of them.

XLA splits one matrix product over the cores of a CPU. Those of a fit (models/tiles.py) are too small for that: two
cores take as long as one. As devices, cores have tiles of their own, and two are nearly twice as fast.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

MOST = 8
"""The most cores that are devices: each has a copy of the table, and all wait for each other at every step."""

TOLD = "xla_force_host_platform_device_count"
"""How else users say how many devices a CPU is."""


def use_cores() -> None:
    """Makes the cores that this process may use devices, unless jax was told of a number of them or has begun."""
    import jax  # noqa: PLC0415 - of the commands that compute nothing none should wait for it

    told = jax.config.jax_num_cpu_devices > 0 or TOLD in os.environ.get("XLA_FLAGS", "")  # pyright: ignore[reportAttributeAccessIssue]
    if told:
        return
    try:
        jax.config.update("jax_num_cpu_devices", min(cores(), MOST))
    except RuntimeError:
        return  # Its devices are there already: a program that uses jax by itself has as many as it wants.


def cores() -> int:
    """Returns how many cores this process may use, a container's share of them considered."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, math.ceil(granted())))


def granted(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Returns how many cores' time a container has; any number where it has no limit."""
    try:
        most, period = quota.read_text(encoding="ascii").split()
        return MOST if most == "max" else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return MOST
