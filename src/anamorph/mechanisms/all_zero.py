"""All-0: every answer is 0. The baseline of the papers; it looks at nothing and spends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anamorph.curator.curator import Curator
from anamorph.mechanisms.mechanism import Step, description
from anamorph.models.answers import Zero
from anamorph.queries.workload import Workload
from anamorph.release import Release


@dataclass(frozen=True, kw_only=True)
class AllZero:
    """Answers 0 to every query."""

    name: ClassVar[str] = "all-zero"
    native: ClassVar[bool] = True

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns no step."""
        return ()

    def memory(self, workload: Workload) -> int:
        """Returns 0."""
        return 0

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns a release that carries no information."""
        model = Zero(curator.schema.sizes)
        return Release(curator.schema, model, (), curator.privacy(), 0.0, description(self), workload.spec)
