"""Synthesizer: fit and sample in one object, for people who come from scikit-learn, SDV or SmartNoise."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from anamorph import fitting
from anamorph.curator.budget import Budget, Relation
from anamorph.errors import ParameterError
from anamorph.mechanisms.mechanism import mechanism
from anamorph.questions import Answer, ask
from anamorph.release import Release
from anamorph.schema import Schema
from anamorph.tables import sample_rows


@dataclass(kw_only=True)
class Synthesizer:
    """Synthetic rows of a private table.

    Example:
        >>> model = Synthesizer(epsilon=1.0, delta=1e-9, workload="marginals:k=2")
        >>> rows = model.fit(frame, schema).sample(1000)  # doctest: +SKIP
    """

    epsilon: float = 1.0
    delta: float = 1e-9
    mechanism: str = "auto"
    workload: str | None = None
    """What the rows should answer; None: every three columns (all, if there are fewer), native numbers in bands."""
    neighbours: Relation = "replace"
    settings: dict[str, Any] = field(default_factory=dict)
    """Parameters of the mechanism, by name."""
    ledger: str | Path | None = None
    """The file that keeps what was spent, over runs; without one, nothing but this object counts."""
    seed: int = 0
    """Of projection and rounding; never of noise."""
    release: Release | None = None
    _like: str = "pandas"

    def fit(self, data: Any, schema: Schema | str | Path) -> Self:  # noqa: ANN401 - any frame or path
        """Makes the private release; returns itself."""
        made = mechanism(self.mechanism, {key: str(value) for key, value in self.settings.items()})
        known = schema if isinstance(schema, Schema) else Schema.load(schema)
        request = fitting.Fit(
            data=data,
            schema=known,
            workload=self.workload or usual_workload(known),
            mechanism=made,
            budget=Budget(epsilon=self.epsilon, delta=self.delta),
            neighbours=self.neighbours,
            ledger=None if self.ledger is None else Path(self.ledger),
            seed=self.seed,
        )
        self.release = fitting.run(request)
        self._like = type(data).__module__.partition(".")[0]
        return self

    def sample(self, rows: int | None = None) -> Any:  # noqa: ANN401 - a frame of the kind that was fitted
        """Returns synthetic rows, in the kind of frame that `fit` was given: pandas, polars or Arrow."""
        table = sample_rows(self._fitted(), rows, seed=self.seed)
        if self._like == "polars":
            import polars  # noqa: PLC0415

            return polars.from_arrow(table)
        return table if self._like == "pyarrow" else table.to_pandas()

    def ask(self, question: str) -> Answer:
        """Returns the answer to a condition such as "age < 30 and sex = 'F'"."""
        return ask(self._fitted(), question)

    def _fitted(self) -> Release:
        if self.release is None:
            raise ParameterError("fit must come first: there is no release yet")
        return self.release


def usual_workload(schema: Schema) -> str:
    """Returns a workload that tells how the columns of a table go together."""
    return f"{'bands' if schema.numbers else 'marginals'}:k={min(3, len(schema.columns))}"
