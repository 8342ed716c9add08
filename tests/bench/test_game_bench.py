"""The bench of the query release game: what it asks for, what it runs again, and which setting it calls the best."""

from __future__ import annotations

import json

import pytest
from bench.game import Found, Run

from bench import game

GIVEN = json.dumps({"rounds": "50", "samples": "10"})
RUN = Run("adult", 3, 0.5, "dqrs", GIVEN, 0)


def test_the_grids_are_those_of_the_paper_with_one_seed_and_the_dual_methods_have_five():
    runs = game.asked(["adult"], [3], [0.1])
    assert len(set(runs)) == len(runs)
    counts = {kind: sum(run.mechanism == kind for run in runs) for kind in game.KINDS}
    assert counts == {"fem": 40, "fem paper": 40, "sepfem": 32, "dualquery": 60, "dqrs": 60, "rap": 2}
    assert {run.mechanism for run in game.asked(["loans"], [5], [1.0], ("rap",))} == {"rap"}


def test_settings_of_too_many_rounds_or_none_are_left_out_and_known_runs_are_not_run_again(tmp_path, monkeypatch):
    lengths = {"0.003": 1000, "0.005": 7, "0.007": 0, "0.009": 3}
    monkeypatch.setattr(game, "rounds", lambda run: lengths[json.loads(run.settings)["eps0"]])
    ran = []

    class Here:
        """Runs what is submitted at once."""

        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, _, run):
            ran.append(run)
            return self

        def result(self):
            return Found(7, 0.25, 0.5, 1.0)

        def __hash__(self):
            return len(ran)

        def __eq__(self, other):
            return False

    monkeypatch.setattr(game, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(game, "as_completed", list)
    runs = [Run("adult", 3, 1.0, "fem", json.dumps({"eps0": eps0}), 0) for eps0 in lengths]
    path = tmp_path / "game.csv"
    game.add(path, runs[3], Found(3, 0.1, 0.2, 0.5))
    store = game.complete(runs, path, most=100)
    assert ran == [runs[1]]
    assert store == {runs[3]: Found(3, 0.1, 0.2, 0.5), runs[1]: Found(7, 0.25, 0.5, 1.0)}


def test_the_best_setting_has_the_least_median_of_those_with_the_most_runs():
    other, lucky = (json.dumps({"rounds": "50", "samples": samples}) for samples in ("25", "50"))
    store = {RUN._replace(seed=seed): Found(50, error, 0.5, 1.0) for seed, error in enumerate((0.1, 0.4, 0.3))}
    store |= {RUN._replace(settings=other, seed=seed): Found(50, 0.2, 0.6, 1.0) for seed in range(3)}
    store[RUN._replace(settings=lucky)] = Found(50, 0.02, 0.1, 1.0)
    store[RUN._replace(epsilon=1.0)] = Found(50, 0.01, 0.1, 1.0)
    found = game.best(store, "adult", 3, 0.5, "dqrs")
    assert found == {
        "max_error": pytest.approx(0.2),
        "tv": pytest.approx(0.6),
        "rounds": 50,
        "settings": {"rounds": "50", "samples": "25"},
        "runs": 3,
        "tried": 3,
    }
    assert game.best(store, "adult", 3, 0.5, "rap") is None
    assert [(line["epsilon"], line["rap"]) for line in game.table(store)] == [(0.5, None), (1.0, None)]


def test_the_best_settings_of_a_grid_are_run_again_with_all_seeds():
    grid = [RUN._replace(mechanism="fem", settings=str(index)) for index in range(6)]
    store = {run: Found(50, error, 0.5, 1.0) for run, error in zip(grid, (0.5, 0.1, 0.4, 0.2, 0.3), strict=False)}
    store |= {RUN: Found(50, 0.01, 0.5, 1.0), grid[5]._replace(seed=1): Found(50, 0.01, 0.5, 1.0)}
    found = game.again(store, [*grid, RUN])
    assert found == [grid[index]._replace(seed=seed) for index in (1, 3, 4) for seed in game.SEEDS]
