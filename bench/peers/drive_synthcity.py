"""Drives synthcity's AIM.

It has no place for public bounds: the size of a column is the number of its distinct values in the data, which must be
0, 1, 2 ...; so the codes that occur are numbered here, as a user would have to do, and the domain is taken from the
data unpaid, as is the schema that it keeps. Neighbours differ by adding or removing one row; (epsilon, delta) becomes
rho. The whole epsilon is spent in `generate`, and again each time more rows are wanted than came: `strict` (which also
drops rows that occur twice) is off and a little fewer rows are asked for, so that it is spent once.

Its mirror descent begins every line search at the same step, 2 / rows^2, where the original doubles the last step that
was good: the model hardly moves from the uniform one, whatever was measured.
"""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
from protocol import Task, read_task
from synthcity.plugins.privacy.plugin_aim import AIMPlugin

SPARE = 0.01
"""The share of rows that is not asked for: the number that comes is noisy."""


def run(task: Task) -> None:
    """Writes the rows of one method."""
    random.seed(task.seed)
    np.random.seed(task.seed)  # noqa: NPY002 - its noise is drawn by the global generator
    frame = pd.DataFrame(task.codes(), columns=list(task.sizes))
    present = {column: np.unique(frame[column]) for column in frame}
    numbered = pd.DataFrame({column: np.searchsorted(present[column], frame[column]) for column in frame})
    plugin = AIMPlugin(
        epsilon=task.epsilon, delta=task.delta, random_state=task.seed, strict=False, **dict(task.settings)
    )
    plugin.fit(numbered)
    plugin.model.workload = [(columns, 1.0) for columns in task.workload]  # it only takes a degree
    made = plugin.generate(count=round(len(frame) * (1 - SPARE))).dataframe()
    codes = [present[column][made[column].astype(int)] for column in task.sizes]
    task.write(zip(*codes, strict=True))


if __name__ == "__main__":
    run(read_task())
