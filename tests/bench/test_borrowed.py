"""The bench on other people's tables: how columns are coded, and that what is stopped or there already is told so."""

from __future__ import annotations

import math
import time

import numpy as np
import pandas as pd
import pytest
from bench.choices import Key, add, read
from bench.unseen import network

from anamorph.mechanisms.gaussian import Gaussian
from anamorph.mechanisms.independent import Independent
from bench import borrowed


def test_numbers_of_many_values_are_binned_between_quantiles():
    codes, size = borrowed.coded(pd.Series([*np.arange(1000.0), 1e9, math.nan]))
    assert size == 21
    assert codes[-1] == 20, "missing"
    assert codes[-2] == 19, "far beyond"
    assert (codes[0], codes[500], codes[999]) == (0, 10, 19)
    assert np.all(np.diff(codes[:1000]) >= 0)


def test_numbers_of_few_values_are_codes():
    codes, size = borrowed.coded(pd.Series([3, 1, 2, 1]))
    assert (codes.tolist(), size) == ([2, 0, 1, 0], 3)


def test_rare_texts_share_a_code_and_missing_ones_have_their_own():
    often = [f"t{index:03}" for index in range(borrowed.TOP)] * 2
    codes, size = borrowed.coded(pd.Series([*often, "rare", "rarer", None]))
    assert codes[: borrowed.TOP].tolist() == list(range(borrowed.TOP))
    assert codes[-3:].tolist() == [borrowed.TOP, borrowed.TOP, borrowed.TOP + 1]
    assert size == borrowed.TOP + 2


def test_names_of_rows_have_no_codes():
    assert borrowed.coded(pd.Series([f"row {index}" for index in range(borrowed.MANY + 1)]))[1] == 1


def test_what_takes_too_long_is_stopped():
    with pytest.raises(TimeoutError), borrowed.at_most(1):
        time.sleep(30)
    with borrowed.at_most(0):
        time.sleep(1.1)


@pytest.fixture
def small(monkeypatch, tmp_path):
    rows = network(rows=300, columns=3, largest=3, parents=1, evenness=1.0)
    monkeypatch.setattr(borrowed, "TABLES", {"toy": ("", "", ())})
    monkeypatch.setattr(borrowed, "CELLS", (("marginals:k=2", 1.0),))
    monkeypatch.setattr(borrowed, "MECHANISMS", {"auto": Gaussian(), "independent": Independent()})
    monkeypatch.setattr(borrowed, "load", lambda _name: rows)
    return tmp_path


def test_runs_are_kept_and_told(small, capsys):
    borrowed.main(["--folder", str(small)])
    runs = read(small / "borrowed.csv")
    assert set(runs) == {Key("toy", "marginals:k=2", 1.0, name, 0) for name in ("auto", "independent")}
    ours, theirs = runs.values()
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("| `marginals:k=2` | 1 |")]
    assert line.split("|")[3].strip() == (
        f"{ours[0] / theirs[0]:.2f} / {ours[1] / theirs[1]:.2f}, "
        f"below in {int(ours[0] < theirs[0])} / {int(ours[1] < theirs[1])} of 1"
    )


def test_what_is_there_is_not_run_again(small, monkeypatch):
    for key in borrowed.asked(borrowed.MECHANISMS):
        add(small / "borrowed.csv", key, (0.5, 0.25, 1.0))
    monkeypatch.setattr(borrowed, "measured", lambda key: pytest.fail(f"{key} was run again"))
    borrowed.main(["--folder", str(small)])
    assert "| toy | `marginals:k=2` | 1 | 0.5 / 0.25 | 0.5 / 0.25 |" in (small / "borrowed.md").read_text()


def test_a_run_that_was_stopped_is_told_as_none(small, monkeypatch):
    def stopped(*_what, **_more):
        raise TimeoutError

    monkeypatch.setattr(Independent, "__call__", stopped)
    borrowed.main(["--folder", str(small)])
    text = (small / "borrowed.md").read_text()
    assert "| `marginals:k=2` | 1 | - |" in text
    assert text.splitlines()[-1].endswith(" | - |")
