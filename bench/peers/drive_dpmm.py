"""Drives dpmm: AIM, MST and PrivBayes.

Bounds are public: the models take `domain`, the number of codes of each column, and `disable_processing` leaves out
the binning, which would cost epsilon of its own. Neighbours differ by adding or removing one row (a marginal has L2
sensitivity 1); (epsilon, delta) becomes rho. What it takes from the data unpaid: PrivBayes reads the number of rows for
the sensitivity of mutual information, and divides mutual information by entropies without counting what this does to
that sensitivity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from dpmm.pipelines import AIMPipeline, MSTPipeline, PrivBayesPipeline
from protocol import Task, read_task

PIPELINES = {"aim": AIMPipeline, "mst": MSTPipeline, "privbayes": PrivBayesPipeline}


def run(task: Task) -> None:
    """Writes the rows of one method."""
    frame = pd.DataFrame(task.codes(), columns=list(task.sizes))
    options: dict[str, Any] = {"n_jobs": 1, **task.settings}
    pipeline = PIPELINES[task.method](
        epsilon=task.epsilon, delta=task.delta, disable_processing=True, proc_epsilon=None, **options
    )
    pipeline.gen.set_random_state(np.random.RandomState(task.seed))
    pipeline.gen.set_domain(dict(task.sizes))
    pipeline.gen.check_fit(frame)
    if task.method == "aim":  # the pipeline's fit has no place for a workload; the mechanism below it has
        pipeline.gen.generator.fit(frame, W=[(columns, 1.0) for columns in task.workload])
    else:
        pipeline.gen.fit(frame)
    made = pipeline.gen.generate(n_records=len(frame))
    task.write(made[list(task.sizes)].itertuples(index=False))


if __name__ == "__main__":
    run(read_task())
