"""The experiment on the choices of `auto`: that it begins where `auto` is, what it runs again, and its ratios."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from bench.choices import Key

from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.evaluation.errors import merged, model_errors
from anamorph.mechanisms import auto
from anamorph.mechanisms.auto import Auto, told
from anamorph.models import shrinking
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.schema import Schema
from anamorph.table import Table
from bench import choices, tables

PAIRS, TRIPLES = choices.WORKLOADS
KEY = Key("nltcs", PAIRS, 1.0, "auto", 0)
TOY = "marginals:k=3"
SCHEMA = Schema.from_dict(
    {"dataset": "toy", "columns": {name: {"type": "codes", "values": 3, "source": "public"} for name in "abcd"}}
)


@pytest.fixture
def toy(monkeypatch):
    codes = np.random.default_rng(0).integers(0, 3, (500, 4)).astype(np.int32)
    codes[:, 1] = codes[:, 0]
    rows = tables.Rows(Table(codes, SCHEMA.sizes), SCHEMA)
    monkeypatch.setattr(tables, "load", lambda name: rows)
    return rows


def curator(rows) -> Curator:
    budget = Budget(epsilon=1.0, delta=1 / rows.rows() ** 2)
    return Curator(rows, budget, neighbours="add-remove", unsafe_seed=1003)


def log_of(rows, name):
    known = curator(rows)
    queries = choices.VARIANTS[name].plan(known, parse_workload(TOY, SCHEMA))
    return told(SCHEMA.sizes, (known.measure(queries, rho=known.remaining),))


def measured_sets(rows, name) -> set[tuple[int, ...]]:
    (measurement,) = log_of(rows, name)
    assert all(isinstance(part, Marginals) for part in measurement.workload.parts)
    return {features for part in measurement.workload.parts for features in part.sets}


def aims_of(log, name) -> shrinking.Aims:
    return choices.VARIANTS[name].estimator.aims(shrinking.Layout(SCHEMA.sizes), log)


# the variants


def test_the_variant_auto_is_the_mechanism(toy):
    workload = parse_workload(TOY, SCHEMA)
    errors = merged(model_errors(toy, Auto()(curator(toy), workload, seed=3).model, workload))
    found = choices.measured(Key("toy", TOY, 1.0, "auto", 3))
    assert found[:2] == (errors.max_error, errors.tv)
    assert found[2] > 0


def test_other_aims_change_one_thing(toy):
    log = log_of(toy, "auto")
    ours, heard = aims_of(log, "auto"), shrinking.noise(log)
    sigma = min(sigma for tally, _, sigma in shrinking.whole_marginals(log) if len(tally.features) == 3) * log[0].total
    factors = {
        "no penalty": 0.0,
        "strength x 2": 2.0,
        "flatter in crowding": heard.crowding**-0.2,
        "steeper in crowding": heard.crowding**0.2,
        "sigma of a marginal": 4 * heard.sigma / sigma,
    }
    for name, factor in factors.items():
        aims = aims_of(log, name)
        assert float(aims.penalty / ours.penalty) == pytest.approx(factor, rel=1e-5)
        assert (aims.tail, aims.steps) == (ours.tail, ours.steps)
    assert aims_of(log, "no tail").tail.weight == 0
    near = aims_of(log, "reach 2")
    assert near.tail.reach == pytest.approx(2 / np.sqrt(log[0].total))
    assert (near.tail.weight, near.penalty) == (ours.tail.weight, ours.penalty)


def test_those_that_say_so_try_how_to_shrink_and_what_to_quiet(toy, monkeypatch):
    asked = []
    monkeypatch.setattr(choices, "suited", lambda estimator, *_told, seed: asked.append(seed) or estimator)
    for seed, name in enumerate(("auto", "tried", choices.BASE, "strength x 2")):
        choices.measured(Key("toy", TOY, 1.0, name, seed))
    assert asked == [0, 1]


def test_the_penalty_need_not_grow_where_answers_are_faint(toy):
    log = log_of(toy, "auto")
    with choices.in_place(choices.VARIANTS["no more where faint"].constants):
        found = aims_of(log, "no more where faint")
    ours = aims_of(log, "auto")
    assert 0 < found.penalty < ours.penalty
    assert (found.tail, found.steps) == (ours.tail, ours.steps)


def test_a_uniform_start_knows_no_one_way_marginals(toy):
    log, layout = log_of(toy, "auto"), shrinking.Layout(SCHEMA.sizes)
    begun = {name: choices.VARIANTS[name].estimator.begin(layout, log, 0) for name in ("auto", "uniform start")}
    plain = choices.FIXED.begin(layout, (), 0)
    for uniform, ours, expected in zip(begun["uniform start"].free, begun["auto"].free, plain.free, strict=True):
        np.testing.assert_array_equal(uniform, expected)
        assert not np.array_equal(ours, expected)


def test_plans_measure_the_orders_they_name(toy):
    assert {len(features) for features in measured_sets(toy, "largest order only")} == {3}
    assert {len(features) for features in measured_sets(toy, "no residuals")} == {1, 2, 3}
    pairs = {features for features in measured_sets(toy, "no residuals") if len(features) < 3}
    assert measured_sets(toy, "orders 1 and 2") == pairs


def test_without_residuals_marginals_are_measured(toy):
    ours, plain = (log_of(toy, name)[0] for name in ("auto", "no residuals"))
    sets = {name: measured_sets(toy, name) for name in ("auto", "no residuals")}
    assert sets["auto"] <= sets["no residuals"]
    assert not np.array_equal(ours.values, plain.values)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_single_columns_have_the_share_of_the_name(toy, monkeypatch, share):
    monkeypatch.setattr(auto, "WORTH", 0.0)  # in marginals the share can be seen
    (measurement,) = log_of(toy, f"singles {share}")
    precisions = [(len(tally.features), sigma**-2) for tally, _, sigma in shrinking.whole_marginals((measurement,))]
    singles = sum(precision for order, precision in precisions if order == 1)
    assert singles / sum(precision for _, precision in precisions) == pytest.approx(share, abs=0.005)


def test_constants_are_there_for_a_while_also_in_what_is_compiled():
    compiled, kept = jax.jit(lambda: shrinking.FLOOR), shrinking.FLOOR
    assert float(compiled()) == pytest.approx(kept)
    with choices.in_place({"FLOOR": 0.5}):
        assert float(compiled()) == 0.5
    assert kept == shrinking.FLOOR
    assert float(compiled()) == pytest.approx(kept)


def test_constants_go_when_a_run_fails(tmp_path):
    def run(key):
        raise InterruptedError

    kept = shrinking.FORGET
    with pytest.raises(InterruptedError):
        choices.complete(tmp_path / "choices.csv", [KEY._replace(variant="usual Adam")], run)
    assert kept == shrinking.FORGET


# the store of runs


def test_the_longest_runs_are_left_out_unless_asked_for():
    few, many = choices.asked(choices.DATA), choices.asked(choices.DATA, slow=True)
    assert {key[:2] for key in many} - {key[:2] for key in few} == {("adult", TRIPLES)}
    among = {"orders 1 and 2", "between 0.45"}  # those of auto where no order lies in between
    assert {key.workload for key in many if key.variant in among} == {TRIPLES}
    assert {key.variant for key in few if key[:2] == ("adult", PAIRS)} == set(choices.VARIANTS) - among
    assert len(set(many)) == len(many)


def test_a_run_in_the_file_is_not_run_again(tmp_path):
    path, ran = tmp_path / "choices.csv", []

    def run(key):
        if key.seed == 2 and len(ran) == 2:
            raise InterruptedError
        ran.append(key)
        return 0.5, 0.123456789, key.seed + 1.0

    keys = [KEY._replace(seed=seed, workload=TRIPLES) for seed in range(4)]
    with pytest.raises(InterruptedError):
        choices.complete(path, keys, run)
    assert ran == keys[:2]
    ran.append(KEY)
    choices.complete(path, keys, run)
    assert ran == [*keys[:2], KEY, *keys[2:]]
    assert choices.read(path) == {key: (0.5, 0.12346, key.seed + 1.0) for key in keys}
    assert path.read_text().startswith("data,workload,epsilon,variant,seed,max,tv,seconds\nnltcs,")


def test_runs_of_a_variant_have_its_constants(tmp_path):
    found = {}

    def run(key):
        found[key.variant] = shrinking.FORGET
        return 1.0, 1.0, 1.0

    ours = shrinking.FORGET
    choices.complete(tmp_path / "choices.csv", [KEY._replace(variant=name) for name in ("usual Adam", "auto")], run)
    assert found == {"usual Adam": 0.999, "auto": ours}


# the summary


def runs(variant, figures, **parts) -> choices.Runs:
    return {KEY._replace(variant=variant, seed=seed, **parts): value for seed, value in enumerate(figures)}


def test_ratios_are_of_medians_over_the_seeds_of_both():
    ours = runs(choices.BASE, [(1.0, 10.0, 2.0), (2.0, 20.0, 2.0), (3.0, 30.0, 2.0), (100.0, 1.0, 9.0)])
    theirs = runs("no tail", [(2.0, 5.0, 4.0), (3.0, 10.0, 4.0), (9.0, 15.0, 4.0)])
    cell = KEY._replace(variant="no tail")
    assert choices.ratios(ours | theirs, [cell]) == pytest.approx((1.5, 0.5, 2.0))
    assert choices.ratios(ours, [cell]) is None
    assert choices.ratios(theirs, [cell]) is None


def test_ratios_of_cells_have_a_geometric_mean():
    both = runs(choices.BASE, [(1.0, 1.0, 1.0)]) | runs("no tail", [(4.0, 1.0, 1.0)])
    other = runs(choices.BASE, [(2.0, 1.0, 1.0)], data="titanic") | runs("no tail", [(2.0, 9.0, 1.0)], data="titanic")
    cells = [KEY._replace(variant="no tail", data=name) for name in choices.DATA]
    assert choices.ratios(both | other, cells) == pytest.approx((2.0, 3.0, 1.0))


def test_the_summary_has_a_table_of_all_and_one_of_each(tmp_path, capsys):
    for name, largest in (("nltcs", 4.0), ("titanic", 1.0)):
        for key, figures in (
            runs(choices.BASE, [(1.0, 1.0, 1.0)], data=name) | runs("no tail", [(largest, 0.5, 3.0)], data=name)
        ).items():
            choices.add(tmp_path / "choices.csv", key, figures)
    choices.main(["--summary", "--folder", str(tmp_path)])
    text = (tmp_path / "choices.md").read_text()
    assert capsys.readouterr().out == f"{text}\n"
    titles = [line for line in text.splitlines() if line.startswith("##")]
    assert titles == ["## nltcs, titanic: geometric means", "## nltcs", "## titanic"]
    lines = [line for line in text.splitlines() if line.startswith("| no tail ")]
    blank = "- | - | - | - | -"
    first = "| no tail | - | {0} | - | - | - | - | {0} | 3.00 |"
    assert lines == [first.format(f"{largest} / 0.50") for largest in ("2.00", "4.00", "1.00")]
    assert text.count(f"| start 0.3 | {blank} ") == 3
