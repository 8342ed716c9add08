"""A plan says what a run will spend, and reads nothing."""

from __future__ import annotations

import numpy as np
import pytest

from anamorph.columns import Codes
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.rap import RAP
from anamorph.planning import plan
from anamorph.queries.spec import workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=3) for i in range(4)))
BUDGET = Budget(epsilon=1.0, delta=1e-6)
MECHANISMS = [
    Gaussian(),
    RAP(rounds=3, per_round=2, rows=10, steps=2),
    RAP(rounds=2, per_round=1, blocks=True, rows=10, steps=2),
]


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda made: f"{made.name} {made.blocks}")
def test_the_plan_is_what_a_run_spends(mechanism, relation):
    figures = plan(SCHEMA, "marginals:k=2", mechanism, BUDGET, neighbours=relation, rows=500)
    rows = TableSource(Table(np.zeros((500, 4), np.int32), SCHEMA.sizes), SCHEMA)
    curator = Curator(rows, BUDGET, neighbours=relation)
    spends = mechanism(curator, workload("marginals:k=2", SCHEMA), seed=0).privacy.spends
    assert [step["kind"] for step in figures["steps"]] == [spend.kind for spend in spends]
    assert [step["rho"] for step in figures["steps"]] == pytest.approx([spend.rho for spend in spends])
    for step, spend in zip(figures["steps"], spends, strict=True):
        if mechanism.blocks and "sigma_counts" in step:
            assert f"sigma {step['sigma_counts']:.6g}" in spend.what


def test_the_plan_counts_queries_in_whole_numbers():
    figures = plan(SCHEMA, "marginals:k=3", Gaussian(), BUDGET, neighbours="replace", rows=None)
    assert (figures["queries"], figures["blocks"], figures["largest_block"]) == (4 * 27, 4, 27)
    assert figures["rho"] == BUDGET.rho
    assert figures["memory_bytes"] > 0


def test_the_plan_warns_of_noise_larger_than_the_data():
    small = Budget(epsilon=0.001, delta=1e-9)
    figures = plan(SCHEMA, "marginals:k=2", Gaussian(), small, neighbours="replace", rows=50)
    assert any("larger than the number of rows" in warning for warning in figures["warnings"])
    assert not plan(SCHEMA, "marginals:k=2", Gaussian(), BUDGET, neighbours="replace", rows=500)["warnings"]


@pytest.mark.parametrize(("neighbours", "rows"), [("nobody", 5), ("replace", 0)])
def test_bad_requests_are_refused(neighbours, rows):
    with pytest.raises(ParameterError):
        plan(SCHEMA, "marginals:k=2", Gaussian(), BUDGET, neighbours=neighbours, rows=rows)
