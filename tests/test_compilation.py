"""Compiled steps are kept where the user says, and never where not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KEEP = """
import jax
from anamorph.compilation import keep_compiled
print(keep_compiled())
print(jax.jit(lambda x: (x @ x.T).sum() * 3)(jax.numpy.ones((64, 64))))
print(jax.config.jax_compilation_cache_dir)
"""


def run(tmp_path, **environment):
    """Returns what a process of its own prints: the configuration of jax is one for all."""
    kept = {name: value for name, value in os.environ.items() if name not in ("ANAMORPH_CACHE", "XDG_CACHE_HOME")}
    given = kept | {"HOME": str(tmp_path)} | environment
    done = subprocess.run([sys.executable, "-c", KEEP], env=given, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    folder, _, configured = done.stdout.split()
    return folder, configured


def test_the_cache_folder_of_the_user_is_the_place(tmp_path):
    place = tmp_path / ".cache" / "anamorph" / "compiled"
    assert run(tmp_path) == (str(place), str(place))
    assert place.stat().st_mode & 0o077 == 0, "nobody else reads what will be run"
    other = tmp_path / "elsewhere" / "anamorph" / "compiled"
    assert run(tmp_path, XDG_CACHE_HOME=str(tmp_path / "elsewhere")) == (str(other), str(other))


def test_a_folder_may_be_named_or_none(tmp_path):
    place = tmp_path / "mine"
    assert run(tmp_path, ANAMORPH_CACHE=str(place)) == (str(place), str(place))
    assert run(tmp_path, ANAMORPH_CACHE="off") == ("None", "None")
    assert not (tmp_path / ".cache").exists()


def test_what_jax_was_told_stays(tmp_path):
    place = str(tmp_path / "told")
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=place) == ("None", place)


@pytest.mark.parametrize("blocked", ["file", "below a file"])
def test_a_place_that_is_no_folder_is_done_without(tmp_path, blocked):
    (tmp_path / "taken").write_text("")
    name = tmp_path / "taken" if blocked == "file" else tmp_path / "taken" / "compiled"
    assert run(tmp_path, ANAMORPH_CACHE=str(name)) == ("None", "None")


FORGET = """
import gc
import jax
from pathlib import Path
from anamorph.compilation import forget_compiled
step = jax.jit(lambda x: (x @ x.T).sum() * 3)
for size in range(2, 6):
    step(jax.numpy.ones((size, size))).block_until_ready()
count = lambda: len(Path("/proc/self/maps").read_bytes().splitlines())
held, compiled = count(), step._cache_size()
done = forget_compiled(allowed=Path({allowed!r}))
gc.collect()
print(done, compiled, step._cache_size(), held, count())
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say how many maps there are")
@pytest.mark.parametrize(("allowed", "full"), [("100", True), ("10000000", False), ("none", False), ("", False)])
def test_what_was_compiled_is_dropped_before_memory_maps_run_out(tmp_path, allowed, full):
    place = tmp_path / "allowed"
    if allowed:
        place.write_text(allowed)
    code = FORGET.format(allowed=str(place))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    dropped, compiled, kept, before, after = done.stdout.split()
    assert (dropped, compiled) == (str(full), "4")
    assert (kept == "0") == full
    assert (int(after) < int(before)) == full
