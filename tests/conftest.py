"""Tests run beside each other: in each process jax has one core, however many there are."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
