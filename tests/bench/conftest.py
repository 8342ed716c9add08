"""The benchmarks are not installed: they are found from the root of the project, however the tests are started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
