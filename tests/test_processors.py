"""Cores are devices of jax where it has not been told otherwise, and has not begun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from anamorph import processors

COUNT = "import jax; from anamorph.processors import use_cores; {}; use_cores(); print(jax.device_count())"


def devices(before="pass", **environment):
    """Returns how many devices a process of its own has: the configuration of jax is one for all."""
    given = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    command = [sys.executable, "-c", COUNT.format(before)]
    done = subprocess.run(command, env=given | environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return int(done.stdout)


def test_every_core_is_a_device():
    assert devices() == min(processors.cores(), processors.MOST)


@pytest.mark.parametrize(("cores", "expected"), [(3, 3), (500, processors.MOST)])
def test_there_are_as_many_as_cores_but_not_too_many(cores, expected):
    assert devices(f"from anamorph import processors; processors.cores = lambda: {cores}") == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be taken from a process here")
def test_cores_that_may_not_be_used_are_none():
    assert devices("import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", processors.MOST), ("250000 100000\n", 2.5), ("50000 100000\n", 0.5), ("a b", processors.MOST)],
)
def test_a_container_may_have_the_time_of_fewer(tmp_path, monkeypatch, text, expected):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert processors.granted(quota) == expected
    monkeypatch.setattr(processors, "granted", lambda: expected)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert processors.cores() == {2.5: 3, 0.5: 1}.get(expected, processors.MOST)


def test_where_nothing_is_said_of_time_there_is_no_limit(tmp_path):
    assert processors.granted(tmp_path / "absent") == processors.MOST
    (tmp_path / "empty").write_text("")
    assert processors.granted(tmp_path / "empty") == processors.MOST


def test_what_jax_was_told_stays():
    assert devices(JAX_NUM_CPU_DEVICES="3") == 3
    assert devices(XLA_FLAGS="--xla_force_host_platform_device_count=5") == 5


def test_devices_that_are_there_stay():
    assert devices("jax.devices()") == 1
