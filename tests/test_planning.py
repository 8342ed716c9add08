"""A plan says what a run will spend and need, and reads nothing; memory is divided so that the run keeps within it."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes, Numeric
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.errors import ParameterError, ResourceError, WorkloadError
from anamorph.mechanisms.aim import AIM
from anamorph.mechanisms.all_zero import AllZero
from anamorph.mechanisms.dual_query import DualQuery
from anamorph.mechanisms.fem import FEM
from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.mwem_pgm import MWEMPGM
from anamorph.mechanisms.rap import RAP
from anamorph.mechanisms.rap_plus_plus import RAPPlusPlus
from anamorph.planning import SMALLEST_PIECE, divide, parameters, parse_memory, plan
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import PIECE_CELLS, Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=3) for i in range(4)))
BUDGET = Budget(epsilon=1.0, delta=1e-6)
MECHANISMS = [
    Gaussian(),
    Gaussian(blocks=False),
    RAP(rounds=3, per_round=2, rows=10, steps=2),
    RAP(rounds=2, per_round=1, blocks=True, rows=10, steps=2),
]


SPECS = {
    "marginals": "marginals:k=2",
    "thresholds": "thresholds:k=3,r=2",
    "weights": "marginals:k=1,weight=3; thresholds:k=2,r=1; marginals:of=c0+c1,weight=1/2",
}


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda made: f"{made.name} {made.blocks}")
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_the_plan_is_what_a_run_spends(mechanism, relation, spec):
    figures = plan(SCHEMA, spec, mechanism, BUDGET, neighbours=relation, rows=500)
    rows = TableSource(Table(np.zeros((500, 4), np.int32), SCHEMA.sizes), SCHEMA)
    curator = Curator(rows, BUDGET, neighbours=relation)
    spends = mechanism(curator, workload(spec, SCHEMA), seed=0).privacy.spends
    assert [step["kind"] for step in figures["steps"]] == [spend.kind for spend in spends]
    assert [step["rho"] for step in figures["steps"]] == pytest.approx([spend.rho for spend in spends])
    for step, spend in zip(figures["steps"], spends, strict=True):
        known = mechanism.name == "gaussian" or step["kind"] == "total"
        if "sigma_counts" in step and (known or (mechanism.blocks and ";" not in spec)):
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


MODULE = """
def both(row):
    return row["c0"][:, None] * row["c1"][None]
"""


@pytest.mark.parametrize("relation", ["replace", "add-remove"])
def test_the_noise_of_functions_is_that_of_all_their_values(tmp_path, monkeypatch, relation):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_queries.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "planned_queries", raising=False)
    made, spec = RAP(rounds=1, rows=10, steps=2), "custom:planned_queries:both; marginals:k=1"
    figures = plan(SCHEMA, spec, made, BUDGET, neighbours=relation, rows=None)
    curator = Curator(TableSource(Table(np.zeros((9, 4), np.int32), SCHEMA.sizes), SCHEMA), BUDGET, neighbours=relation)
    spends = made(curator, workload(spec, SCHEMA), seed=0).privacy.spends
    assert f"sigma {figures['steps'][-1]['sigma_counts']:.6g}" in spends[-1].what
    most = 2 if relation == "replace" else 1
    rho = figures["steps"][-1]["rho"]
    assert figures["steps"][-1]["sigma_counts"] == pytest.approx(((9 + 4 * most) / (2 * rho)) ** 0.5)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("512MB", 512 * 10**6),
        ("2GiB", 2 << 30),
        (" 1.5KiB ", 1536),
        ("0.25TB", 250 * 10**9),
        ("0KB", 0),
    ],
)
def test_sizes_of_memory(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "4", "GB", "4G", "4 XB", "-4GB", "+4GB", "4,5GB", "4GBs", "1e3GB", "nanGB", ".5GB", "4.GB", "9" * 30 + "GB"],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ParameterError) as caught:
        parse_memory(text)
    assert str(caught.value) == f"memory ({text!r}) must be a size such as 4GB"


LARGE = {
    "one large block": Workload((Thresholds((300,) * 3, ((0, 1, 2),), 2),)),
    "many": Workload((Marginals((100,) * 8, tuple((i, j) for i in range(8) for j in range(i))),)),
    "small": Workload((Marginals((3, 4), ((0, 1),)),)),
}


@given(
    st.sampled_from(sorted(LARGE)),
    st.sampled_from([RAP(), RAP(blocks=True, rounds=2, per_round=1), RAP(rounds=1), Gaussian(), AllZero()]),
    st.floats(6, 11.5),
)
@settings(deadline=None)
def test_a_division_keeps_within_the_memory_or_is_refused(name, mechanism, digits):
    memory, asked = int(10**digits), LARGE[name]
    try:
        mechanism.steps_for(asked, 1.0)
    except WorkloadError:
        return

    def needed(pieces):
        return mechanism.memory(replace(asked, limit=pieces))

    if needed(SMALLEST_PIECE) > memory - memory // 4:
        with pytest.raises(ResourceError, match=r"memory \(.* GB\) must be at least .* GB for this run") as caught:
            divide(memory, mechanism, asked)
        assert caught.value.exit_code == 5
        return
    divided = divide(memory, mechanism, asked)
    assert divided.total == memory
    assert divided.engine + needed(divided.pieces) <= memory
    assert SMALLEST_PIECE <= divided.pieces <= PIECE_CELLS
    assert divided.pieces == PIECE_CELLS or divided.engine + needed(2 * divided.pieces) > memory


@pytest.mark.parametrize("mechanism", [RAP(), RAP(rounds=1), Gaussian()], ids=["rap", "rap at once", "gaussian"])
def test_the_memory_that_a_refusal_names_suffices(mechanism):
    with pytest.raises(ResourceError) as caught:
        divide(10**6, mechanism, LARGE["one large block"])
    words = str(caught.value).split()
    wanted = float(words[words.index("least") + 1])
    assert divide(int(wanted * 1.01e9), mechanism, LARGE["one large block"]).pieces >= SMALLEST_PIECE
    with pytest.raises(ResourceError):
        divide(int(wanted * 0.98e9), mechanism, LARGE["one large block"])


class Streaming(AllZero):
    """Needs 100 bytes for each answer that it holds."""

    def memory(self, workload):
        return 100 * workload.limit


@pytest.mark.parametrize("power", [14, 17, 20, 22])
def test_less_memory_makes_smaller_pieces(power):
    enough = -(-400 * (1 << power) // 3)
    assert divide(enough, Streaming(), LARGE["small"]).pieces == 1 << power
    assert divide(2 * enough - 4, Streaming(), LARGE["small"]).pieces == 1 << power
    if power > 14:
        assert divide(enough - 4, Streaming(), LARGE["small"]).pieces == 1 << (power - 1)


def test_a_plan_says_how_memory_is_divided():
    made, spec = RAP(rounds=2), "thresholds:k=3,r=2"
    figures = plan(SCHEMA, spec, made, BUDGET, neighbours="replace", rows=None, memory=4 * 10**9)
    assert (figures["engine_bytes"], figures["piece_queries"]) == (10**9, PIECE_CELLS)
    assert figures["memory_bytes"] + figures["engine_bytes"] <= 4 * 10**9
    assert (figures["queries"], figures["blocks"], figures["largest_block"]) == (4 * 27, 4, 27)
    with pytest.raises(ResourceError, match=r"memory \(0\.1 GB\) must be at least"):
        plan(SCHEMA, spec, made, BUDGET, neighbours="replace", rows=None, memory=10**8)


@pytest.mark.parametrize(("mechanism", "named"), [(RAP(rounds=1), True), (FEM(), False)])
def test_a_refusal_names_rows_to_mechanisms_that_have_them(mechanism, named):
    with pytest.raises(ResourceError) as caught:
        divide(10**6, mechanism, LARGE["small"])
    assert ("--set rows" in str(caught.value)) == named


def test_a_plan_of_a_game_counts_its_rounds():
    def planned(rounds):
        made = DualQuery(rounds=rounds, samples=3)
        return plan(SCHEMA, "marginals:k=2", made, BUDGET, neighbours="replace", rows=None)["seconds_estimate"]

    assert planned(41) == pytest.approx(4 * planned(11))  # the first round draws nothing
    assert 0.1 < planned(11) < 10


@pytest.mark.parametrize("mechanism", [Gaussian(), RAP(rounds=1), RAP(rounds=2, per_round=1, blocks=True)])
def test_a_measurement_too_large_for_a_ledger_is_refused_at_once(mechanism):
    wide = Schema(tuple(Codes(name=f"c{i}", values=500) for i in range(3)))
    with pytest.raises(
        WorkloadError, match=r"a measurement \(of up to 12500[0-9]+ queries\) must have at most 100000000"
    ):
        plan(wide, "marginals:k=3; thresholds:k=1,r=1", mechanism, BUDGET, neighbours="replace", rows=5, memory=10**12)


NATIVE = Schema(
    (
        *(Codes(name=f"c{i}", values=values) for i, values in enumerate((2, 300, 300, 300))),
        *(Numeric(name=f"x{i}", lower=0, upper=1, native=True) for i in range(60)),
    )
)


@pytest.mark.parametrize("spec", ["mixed:k=3,count=9,seed=1,target=c1", "halfspaces:count=9,target=c1+c2"])
def test_tests_of_few_cells_are_planned(spec):
    few = Schema(NATIVE.columns[:6])
    figures = plan(few, spec, RAPPlusPlus(rounds=2), BUDGET, neighbours="replace", rows=9, memory=10**11)
    assert figures["blocks"] == 9
    assert 300 <= figures["largest_block"] <= 90_000


def test_a_native_number_takes_the_time_of_one_number():
    """Not that of its codes, of which there are a million."""
    assert parameters(NATIVE) == 2 + 3 * 300 + 60
    made, spec = RAPPlusPlus(rounds=2), "mixed:k=2,count=30"
    figures = plan(Schema(NATIVE.columns[:6]), spec, made, BUDGET, neighbours="replace", rows=9)
    assert 1 < figures["seconds_estimate"] < 60


@pytest.mark.parametrize("mechanism", [RAPPlusPlus(rounds=2), AllZero()], ids=["rap++", "all-zero"])
def test_a_test_of_too_many_cells_is_refused_before_anything_is_charged(mechanism):
    """Its cells are counted together: no pieces make it fit."""
    few = Schema(NATIVE.columns[1:5])
    with pytest.raises(WorkloadError, match=r"block c1 x c2 x c3 has 2\.70e\+7 cells and must have at most 4\.19e\+6"):
        plan(few, "mixed:k=4,count=1", mechanism, BUDGET, neighbours="replace", rows=9, memory=10**12)
    assert workload("mixed:k=3,count=5,target=c1", few).largest_block <= 90_000


def test_tests_of_too_many_sets_of_columns_are_refused_at_once():
    with pytest.raises(WorkloadError, match=r"k \(6\) must leave at most 4194304 sets of columns .*, not 7\.50e\+7"):
        plan(NATIVE, "mixed:k=6,count=1", RAPPlusPlus(), BUDGET, neighbours="replace", rows=9)


@pytest.mark.parametrize("mechanism", [AIM(split=1e-17), MWEMPGM(split=1e-17)])
def test_a_step_without_budget_is_refused_before_anything_is_charged(mechanism):
    with pytest.raises(ParameterError, match="every step must have some of the budget"):
        plan(SCHEMA, "marginals:k=2", mechanism, BUDGET, neighbours="replace", rows=5)


@pytest.mark.parametrize("mechanism", [Gaussian(), MWEMPGM(), RAP(rounds=1)])
def test_noise_out_of_range_is_refused_before_anything_is_charged(mechanism):
    tiny = Budget(epsilon=1e-11, delta=1e-16)
    with pytest.raises(ParameterError, match=r"epsilon must be larger: the noise of a measurement .* is out of range"):
        plan(SCHEMA, "marginals:k=2", mechanism, tiny, neighbours="replace", rows=5)
