"""Tiles that several devices share have the losses, the gradients and the steps of one device (devices.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_devices_that_share_tiles_find_what_one_does():
    script = Path(__file__).with_name("devices.py")
    given = os.environ | {"JAX_NUM_CPU_DEVICES": "3"}
    done = subprocess.run([sys.executable, str(script)], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all as on one device\n"
