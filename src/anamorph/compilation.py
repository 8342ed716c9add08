"""Compiled steps, kept between runs, and dropped before they are too many: XLA takes seconds to compile what then
computes for less, and memory maps by the hundred for every program.

What is kept is machine code for shapes that follow from the schema, the workload and the parameters: no data, and
nothing that depends on private rows (their number included: rows are counted in batches of one fixed shape).
"""

from __future__ import annotations

import os
from pathlib import Path

SWITCH = "ANAMORPH_CACHE"
"""The variable of the environment that names another folder, or is `off`."""

MOST_BYTES = 1 << 29
"""The most that is kept; what was not used for long goes first."""

SHORTEST = 0.1
"""What compiles in fewer seconds is not kept."""


def keep_compiled() -> Path | None:
    """Keeps what is compiled from now on in the user's cache folder; returns the folder, None if nothing is kept.

    A folder that jax was told of already stays as it is; one that cannot be written is done without.
    """
    import jax  # noqa: PLC0415 - of the commands that compile nothing none should wait for it

    wanted = os.environ.get(SWITCH, "")
    if wanted.lower() == "off" or jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(wanted) if wanted else home / "anamorph" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def forget_compiled(held: Path = Path("/proc/self/maps"), allowed: Path = Path("/proc/sys/vm/max_map_count")) -> bool:
    """Drops what this process has compiled if it fills half of its memory maps; returns whether it did.

    A process that fits tables of ever new shapes would run out of them after some dozens, and memory could not be had
    though there is plenty. Where the system does not say how many there are, nothing is dropped.
    """
    try:
        full = 2 * held.read_bytes().count(b"\n") > int(allowed.read_bytes())
    except (OSError, ValueError):
        return False
    if full:
        import jax  # noqa: PLC0415 - of the commands that compile nothing none should wait for it

        jax.clear_caches()
    return full
