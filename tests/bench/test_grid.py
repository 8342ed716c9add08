"""The grid: which runs it makes, and its summary of made-up results. No mechanism and no peer is run."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
from bench.peers import harness, results
from bench.peers.results import Result

from anamorph.schema import Schema
from anamorph.table import Table
from bench import compare, grid, tables

SCHEMA = Schema.from_dict(
    {"dataset": "toy", "columns": {name: {"type": "codes", "values": 3, "source": "public"} for name in "abc"}}
)
TRUTH = tables.Rows(Table(np.array([[0, 1, 2], [1, 1, 0], [2, 0, 0]], np.int32), SCHEMA.sizes), SCHEMA)
CELL = grid.Cell("titanic", "marginals:k=2", 1.0)
NAMES = ("auto", "aim", "all-zero", "dp-merf", "gaussian", "rap")


def result(name="mst", seed=0, **values) -> Result:
    return Result(name=name, neighbours="add-remove", seed=seed, **values)


def auto(seed=0, **values) -> Result:
    figures = {"model_max": 0.1, "model_tv": 0.2, "rows_max": 0.11, "rows_tv": 0.21, "seconds": 2.0}
    return result("auto", seed, **(figures | values))


def reached(summary: grid.Summary) -> list[bool | None]:
    return [summary.reached(target) for target in grid.TARGETS]


# the store of runs


def test_a_result_leaves_those_of_other_seeds_names_and_relations():
    first, second, other = result(rows_tv=0.2), result(seed=1, rows_tv=0.3), result("rap")
    elsewhere = replace(first, neighbours="replace")
    again = replace(first, rows_tv=0.1)
    found = results.with_result([first, second, other, elsewhere], again)
    assert found == [second, other, elsewhere, again]


@pytest.mark.parametrize("change", [{"settings": '{"rounds": "1"}'}, {"version": "2"}])
def test_a_result_of_other_settings_or_another_version_takes_the_place_of_all_seeds(change):
    new = replace(result(seed=1), **change)
    assert results.with_result([result(), result(seed=1), result(seed=2)], new) == [new]


def test_a_result_is_added_to_what_the_file_holds_by_then(tmp_path):
    path = tmp_path / "deep" / "table.csv"
    assert results.add(path, result(rows_tv=0.2)) == [result(rows_tv=0.2)]
    results.write(path, [result("rap", rows_tv=0.1), *results.read(path)])  # by another process
    found = results.add(path, result(seed=1, rows_tv=0.3))
    assert found == results.read(path)
    assert [(item.name, item.seed) for item in found] == [("rap", 0), ("mst", 0), ("mst", 1)]


def test_medians_are_over_the_seeds_that_have_the_figure():
    found = [
        result(seed=0, model_max=0.3, rows_max=0.5, seconds=1.0),
        result(seed=1, model_max=0.1, seconds=9.0),
        result(seed=2, model_max=0.2, rows_max=0.7, seconds=2.0, remark="with care"),
        result(seed=3, error="stopped after 300 s", seconds=300.0),
        result("rap", seed=4, rows_tv=0.4),
    ]
    middle, single = results.medians(found)
    assert (middle.model_max, middle.rows_max, middle.rows_tv, middle.seconds) == (0.2, pytest.approx(0.6), None, 2.0)
    assert (middle.error, middle.remark) == ("", "median of 3 seeds, 1 without result")
    assert single == found[-1]


def test_medians_of_runs_that_all_failed_are_a_failure():
    found = [result(seed=seed, error="out of memory") for seed in (0, 1)]
    assert results.medians(found) == found[:1]


# the runs


class Ran(list):
    def __init__(self) -> None:
        super().__init__()
        self.fates: dict[str, dict] = {}


@pytest.fixture
def runs(monkeypatch):
    """Names and seeds of all that ran, of fakes: their seconds or errors are taken from `runs.fates`."""
    ran = Ran()

    def run(entry, bench):
        ran.append((entry.result.name, entry.result.seed))
        return replace(entry.result, **({"rows_max": 0.1, "seconds": 1.0} | ran.fates.get(entry.result.name, {})))

    def state(peer):
        return harness.Installed(peer.name, "1", "ready" if peer.name == "opendp" else "not made: make peers")

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "NAMES", NAMES)
    monkeypatch.setattr(harness, "state", state)
    monkeypatch.setattr(tables, "load", lambda _name: TRUTH)
    return ran


def test_cheap_ones_run_with_every_seed_and_the_others_with_the_first(runs, tmp_path):
    grid.run(grid.Request(seeds=(0, 1), folder=tmp_path), [CELL])
    assert runs == [
        *[("auto", 0), ("gaussian", 0), ("auto", 1), ("gaussian", 1)],
        *[("aim:80MB", 0), ("all-zero", 0), ("rap", 0), ("rap:blocks", 0), ("opendp/aim", 0), ("opendp/mst", 0)],
    ]


def test_what_is_known_is_not_run_again(runs, tmp_path):
    request = grid.Request(only=("auto", "aim"), seeds=(0, 1), folder=tmp_path)
    grid.run(request, [CELL])
    grid.run(replace(request, seeds=(0, 1, 2)), [CELL])
    assert runs == [("auto", 0), ("auto", 1), ("aim:80MB", 0), ("auto", 2)]
    grid.run(replace(request, only=("auto",), seeds=(1,), fresh=True), [CELL])
    assert runs[4:] == [("auto", 1)]
    found = results.read(compare.store(CELL.comparison(), tmp_path))
    assert sorted((item.name, item.seed) for item in found) == [("aim:80MB", 0), ("auto", 0), ("auto", 1), ("auto", 2)]


def test_a_run_that_is_killed_loses_itself_alone(runs, monkeypatch, tmp_path):
    working = compare.run

    def killed(entry, bench):
        if entry.result.seed == 2:
            raise KeyboardInterrupt
        return working(entry, bench)

    request = grid.Request(only=("auto",), folder=tmp_path)
    monkeypatch.setattr(compare, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        grid.run(request, [CELL])
    monkeypatch.setattr(compare, "run", working)
    grid.run(request, [CELL])
    assert runs == [("auto", seed) for seed in range(5)]


def test_without_the_first_seed_nothing_dear_is_run(runs, tmp_path):
    grid.run(grid.Request(only=("auto", "aim", "rap"), seeds=(3,), folder=tmp_path), [CELL])
    assert runs == [("auto", 3)]


STOPPED = {"error": "stopped after 300 s", "seconds": 300.2}


@pytest.mark.parametrize(
    ("fates", "tried"),
    [
        ({}, ["aim:80MB"]),
        ({"aim:80MB": STOPPED}, ["aim:80MB", "aim:20MB"]),
        ({"aim:80MB": STOPPED, "aim:20MB": {"error": "stopped above 14000 MB"}}, ["aim:80MB", "aim:20MB", "aim"]),
        ({"aim:80MB": {"seconds": 301.0}}, ["aim:80MB", "aim:20MB"]),
        ({"aim:80MB": STOPPED, "aim:20MB": STOPPED, "aim": STOPPED}, ["aim:80MB", "aim:20MB", "aim"]),
    ],
)
def test_aim_goes_down_its_sizes_until_one_ends_in_time(runs, tmp_path, fates, tried):
    runs.fates |= fates
    request = grid.Request(folder=tmp_path)
    grid.run_ladder(request, CELL)
    assert runs == [(name, 0) for name in tried]
    grid.run_ladder(request, CELL)
    assert len(runs) == len(tried)


def test_a_size_that_was_stopped_is_tried_again_with_a_higher_limit(runs, tmp_path):
    runs.fates["aim:80MB"] = STOPPED
    grid.run_ladder(grid.Request(folder=tmp_path), CELL)
    runs.fates.clear()
    grid.run_ladder(grid.Request(folder=tmp_path, seconds=900), CELL)
    assert [name for name, _ in runs] == ["aim:80MB", "aim:20MB", "aim:80MB"]


# the summary


def test_the_best_other_is_found_for_each_measure_by_its_median():
    found = [
        *(auto(seed) for seed in range(5)),
        *(result("lucky", seed, model_max=value, model_tv=9.0) for seed, value in enumerate((0.01, 0.9, 0.9))),
        result("gaussian", model_max=0.4, model_tv=8.0, rows_max=0.05, rows_tv=0.05),
        result("dpmm/aim", rows_max=0.7, rows_tv=0.5),
        result("opendp/aim", model_max=0.0, error="stopped after 300 s"),
        replace(result("mst", rows_max=0.0, rows_tv=0.0), neighbours="replace"),
        result("auto:small", model_max=0.0, model_tv=0.0),
    ]
    summary = grid.summarised(CELL, found)
    assert summary.best_max == grid.Best("gaussian", 0.4)
    assert summary.best_tv == grid.Best("dpmm/aim", 0.5)
    assert (summary.runs, summary.failed) == (5, 0)
    assert {item.name for item in summary.others} == {"lucky", "gaussian", "dpmm/aim"}


def test_each_other_is_compared_with_by_its_best_variant_and_peers_are_one():
    first = [auto(), result("aim", model_max=0.05, model_tv=0.4), result("aim:80MB", model_max=0.4, model_tv=0.1)]
    peers = [result("dpmm/aim", rows_max=0.4, rows_tv=0.8), result("opendp/mst", rows_max=0.8, rows_tv=0.4)]
    second = [auto(), result("aim", model_max=0.8, model_tv=0.8), result("gaussian", model_max=0.1)]
    items = [grid.summarised(CELL, [*first, *peers]), grid.summarised(CELL, second), grid.summarised(CELL, peers)]
    assert grid.against(items, "aim") == ("aim", "2", "0.125 to 2", "1", "0.25 to 2", "1")
    assert grid.against(items, grid.PEERS) == ("peers", "1", "0.25 to 0.25", "0", "0.5 to 0.5", "0")
    assert grid.against(items, "gaussian") == ("gaussian", "1", "1 to 1", "1", "-", "0")
    named = [line.split(" | ")[0] for line in grid.table(items).splitlines()[-3:]]
    assert named == ["| aim", "| gaussian", "| peers"]


def test_all_zero_is_an_other_like_any():
    summary = grid.summarised(
        CELL, [result("all-zero", model_max=0.9, model_tv=0.5), result(model_max=0.8, model_tv=2)]
    )
    assert (summary.best_max.name, summary.best_tv.name) == ("mst", "all-zero")


def test_ratios_are_of_medians_and_targets_of_ratios():
    found = [
        *(auto(seed, model_max=value, seconds=5.0 * seed) for seed, value in enumerate((0.9, 0.1, 0.08))),
        result(model_max=0.2, model_tv=0.2),
        result("aim:80MB", model_max=0.5, model_tv=0.5, seconds=50.0),
    ]
    summary = grid.summarised(CELL, found)
    assert summary.ratios["max"] == pytest.approx(0.5)
    assert summary.ratios["tv"] == pytest.approx(1.0)
    assert summary.ratios["rows_max"] == pytest.approx(1.1)
    assert summary.ratios["rows_tv"] == pytest.approx(1.05)
    assert summary.ratios["seconds"] == pytest.approx(0.1)
    assert reached(summary)[:2] == [True, False]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"model_max": 0.16, "rows_max": 0.16}, [False, True, True, True]),
        ({"model_tv": 0.39, "rows_tv": 0.39}, [True, False, True, True]),
        ({"rows_max": 0.12}, [True, True, False, True]),
        ({"rows_tv": 0.23}, [True, True, False, True]),
        ({"seconds": 3.1}, [True, True, True, False]),
        ({"rows_tv": None}, [True, True, None, True]),
        ({"model_max": None, "rows_max": 0.14}, [True, True, None, True]),
    ],
)
def test_each_target_has_its_figures(ours, expected):
    found = [auto(**({"rows_max": 0.105} | ours)), result("aim", model_max=0.3, model_tv=0.4, seconds=30.0)]
    assert reached(grid.summarised(CELL, found)) == expected


def test_a_target_whose_figures_are_missing_is_neither_reached_nor_missed():
    for found in ([], [auto()], [result(model_max=0.3)]):
        summary = grid.summarised(CELL, found)
        assert summary.ratios["max"] is summary.ratios["tv"] is summary.ratios["seconds"] is None
        assert [summary.reached(target) for target in ("max", "tv", "seconds")] == [None] * 3


def test_with_a_run_of_ours_that_failed_nothing_is_reached():
    other = result("aim", model_max=0.3, model_tv=0.4, seconds=30.0)
    summary = grid.summarised(CELL, [auto(rows_max=0.1), result("auto", 1, **STOPPED), other])
    assert (summary.runs, summary.failed) == (2, 1)
    assert summary.ratios["max"] == pytest.approx(1 / 3)
    assert reached(summary) == [False] * 4
    assert "1 of 2" in grid.line(summary)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"aim": 5.0, "aim:20MB": 20.0, "aim:80MB": 80.0}, grid.Best("aim:80MB", 80.0)),
        ({"aim": 5.0, "aim:20MB": 20.0, "aim:80MB": None}, grid.Best("aim:20MB", 20.0)),
        ({"aim": 5.0, "aim:80MB": 400.0}, grid.Best("aim", 5.0)),
        ({"aim": None, "aim:20MB": None, "aim:80MB": None}, grid.Best("aim, stopped", 300.2)),
        ({"aim:80MB": None}, grid.Best()),
        ({}, grid.Best()),
    ],
)
def test_the_seconds_of_aim_are_those_of_the_largest_size_that_ended_in_time(seconds, expected):
    found = [result(name, **(STOPPED if value is None else {"seconds": value})) for name, value in seconds.items()]
    assert grid.aim_seconds(found, 300.0) == expected


def test_aim_that_failed_has_no_seconds_to_be_compared_with():
    for error in ("exit code 1: no", "stopped above 14000 MB"):
        assert grid.aim_seconds([result("aim", error=error, seconds=20.0)], 300.0) == grid.Best()


# the files and the command line


def test_the_summary_of_the_whole_grid_is_written_and_the_asked_part_printed(runs, tmp_path, capsys):
    path = compare.store(CELL.comparison(), tmp_path)
    results.write(path, [auto(rows_max=0.1), result("aim", model_max=0.25, model_tv=0.4, seconds=30.0)])
    grid.main(["--summary", "--data", "titanic", "--epsilon", "1", "--folder", str(tmp_path)])
    assert runs == []
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 2 + 2 + 1 + 3
    assert printed[3].startswith(
        "| titanic | `marginals:k=2` | 1 | 1 | 0.1 | 0.25 (aim) | 0.4 | 0.2 | 0.4 (aim) | 0.5 |"
    )
    assert printed[3].endswith("| 2 | 30 (aim) | max, tv, rows, seconds |")
    assert printed[5] == "Reached: max in 1, tv in 1, rows in 1, seconds in 1; of 2."
    with (tmp_path / "accuracy.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(grid.cells()) == 24
    (line,) = [item for item in lines if item["auto_model_max"]]
    assert (line["data"], line["best_max_name"], line["best_max"], line["max_ratio"]) == (
        "titanic",
        "aim",
        "0.25",
        "0.4",
    )
    assert [line[f"{target}_reached"] for target in grid.TARGETS] == ["True"] * 4
    assert [lines[0][f"{target}_reached"] for target in grid.TARGETS] == [""] * 4
    assert printed[3] in (tmp_path / "accuracy.md").read_text().splitlines()


def test_the_command_line_runs_a_part(runs, tmp_path, capsys):
    part = ["--data", "nltcs,titanic", "--epsilon", "0.1", "--workload", "marginals:k=2", "--folder", str(tmp_path)]
    grid.main([*part, "--only", "gaussian, opendp/mst", "--seeds", "0,7"])
    assert runs == [("gaussian", 0), ("gaussian", 7)] * 2 + [("opendp/mst", 0)] * 2
    assert "left out: dpmm (not made: make peers)" in capsys.readouterr().err
    names = sorted(path.name for path in tmp_path.glob("compare-*.csv"))
    assert names == [f"compare-{data}-marginals-k-2-0.1.csv" for data in ("nltcs", "titanic")]


@pytest.mark.parametrize(("option", "value"), [("data", "titanik"), ("only", "dp-merf"), ("only", "aim:81MB")])
def test_names_that_would_run_nothing_are_refused(runs, option, value, capsys):
    with pytest.raises(SystemExit):
        grid.main([f"--{option}", value])
    assert f"{option} ({value!r}) must be one of" in capsys.readouterr().err
    assert runs == []
