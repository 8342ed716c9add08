"""Drives smartnoise-synth: MST, AIM, MWEM, DP-CTGAN and PATE-CTGAN.

Categories are public: its transformers learn them from rows, and are shown rows made here in which every code occurs.
Neighbours differ by adding or removing one row. MST and AIM turn (epsilon, delta) into rho; MWEM is purely epsilon; the
GANs stop training when the accountant reaches epsilon. What it takes from the data unpaid: MST the exact number of
rows; DP-CTGAN and PATE-CTGAN the exact frequency of every category, which steers the conditional sampling. PATE-CTGAN
makes one discriminator play every teacher and the student, so that the student learns from private rows directly.

MST and AIM draw rows by mbi 1.1's default, which sorts the rows of each value of a parent alike for every column below
it: columns that are independent in the model come out as copies of each other. There is no option to draw otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from protocol import Task, read_task
from snsynth import Synthesizer
from snsynth.aim import AIMSynthesizer
from snsynth.transform import ChainTransformer, LabelTransformer, OneHotEncoder
from snsynth.transform.table import TableTransformer

GANS = ("dpctgan", "patectgan")


def transformer(task: Task) -> TableTransformer:
    """Returns the transformer of a method, with public categories."""
    if task.method in GANS:
        columns = [ChainTransformer([LabelTransformer(nullable=False), OneHotEncoder()]) for _ in task.sizes]
    else:
        columns = [LabelTransformer(nullable=False) for _ in task.sizes]
    made = TableTransformer(columns)
    made.fit(pd.DataFrame(task.domain_rows(), columns=list(task.sizes)))
    return made


def told(task: Task) -> type[AIMSynthesizer]:
    """Returns AIM with the workload of the task, in the place of all marginals of some degree."""
    places = {column: f"col{place}" for place, column in enumerate(task.sizes)}
    asked = [tuple(places[column] for column in columns) for columns in task.workload]

    class Told(AIMSynthesizer):
        @staticmethod
        def get_workload(*_: Any, **__: Any) -> list[tuple[str, ...]]:  # noqa: ANN401
            return asked

    return Told


def synthesizer(task: Task) -> Any:  # noqa: ANN401 - one of several classes
    """Returns the synthesizer of a method."""
    if task.method == "aim":
        return told(task)(epsilon=task.epsilon, delta=task.delta, **task.settings)
    if task.method == "mwem":
        return Synthesizer.create("mwem", epsilon=task.epsilon, **task.settings)
    return Synthesizer.create(task.method, epsilon=task.epsilon, delta=task.delta, **task.settings)


def seed_everything(seed: int) -> None:
    """Seeds the generators that it uses; the noise of MST, AIM and MWEM is OpenDP's and cannot be seeded."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - its own generator is the global one


def run(task: Task) -> None:
    """Writes the rows of one method."""
    seed_everything(task.seed)
    frame = pd.DataFrame(task.codes(), columns=list(task.sizes))
    made = synthesizer(task)
    made.fit(frame, transformer=transformer(task))
    task.write(lines(made.sample(len(frame))))


def lines(rows: Any) -> Iterable[Sequence[Any]]:  # noqa: ANN401 - a frame, or a list of tuples
    """Returns the rows one by one."""
    return rows.itertuples(index=False) if isinstance(rows, pd.DataFrame) else rows


if __name__ == "__main__":
    run(read_task())
