"""The one-object surface: the same kind of frame comes out that went in, and budgets are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import anamorph
from anamorph.datasets import survey, survey_schema
from anamorph.errors import BudgetError, ParameterError

SETTINGS = {"rows": 32, "effort": 4}
TABLE = survey(800)


def synthesizer(**more):
    given = {"epsilon": 2.0, "delta": 1e-5, "workload": "marginals:k=2", "settings": SETTINGS} | more
    return anamorph.Synthesizer(**given)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [(TABLE.to_pandas(), pd.DataFrame), (pl.from_arrow(TABLE), pl.DataFrame), (TABLE, pa.Table)],
)
def test_the_same_kind_of_frame_comes_out(frame, kind):
    made = synthesizer().fit(frame, survey_schema()).sample(30)
    assert isinstance(made, kind)
    assert list(made.column_names if isinstance(made, pa.Table) else made.columns) == list(survey_schema().names)
    assert len(made) == 30


def test_a_file_comes_out_as_pandas(tmp_path):
    TABLE.to_pandas().to_csv(tmp_path / "survey.csv", index=False)
    (tmp_path / "survey.yaml").write_text(survey_schema().to_yaml())
    made = synthesizer().fit(str(tmp_path / "survey.csv"), tmp_path / "survey.yaml")
    assert isinstance(made.sample(5), pd.DataFrame)
    assert len(made.sample()) == 800
    assert 0 <= made.ask("age < 30").fraction <= 1


def test_fit_comes_first():
    with pytest.raises(ParameterError, match="fit must come first"):
        synthesizer().sample(3)


def test_a_ledger_refuses_the_second_fit(tmp_path):
    ledger = tmp_path / "ledger"
    synthesizer(ledger=ledger).fit(TABLE, survey_schema())
    with pytest.raises(BudgetError, match="ledger open"):
        synthesizer(ledger=ledger).fit(TABLE, survey_schema())


def test_settings_are_checked_before_anything_is_read():
    with pytest.raises(ParameterError, match="setting"):
        synthesizer(settings={"round": 3}).fit(object(), survey_schema())


def numbers(rows=2000):
    """A number that follows from a group, and one column more."""
    random = np.random.default_rng(0)
    group = random.integers(0, 2, rows)
    pay = 10 * group + random.random(rows) * 5
    return pd.DataFrame({"group": np.array(["a", "b"])[group], "pay": pay, "other": random.choice(["x", "y"], rows)})


PEOPLE = anamorph.Schema.from_dict(
    {
        "columns": {
            "group": {"type": "categorical", "categories": ["a", "b"]},
            "pay": {"type": "numeric", "lower": 0, "upper": 20, "native": True},
            "other": {"type": "categorical", "categories": ["x", "y"]},
        }
    }
)


@pytest.mark.parametrize("columns", [["group", "pay", "other"], ["group", "pay"], ["pay"]])
def test_unless_told_rows_keep_how_columns_go_together_numbers_too(columns):
    """However few they are."""
    schema = replace(PEOPLE, columns=tuple(column for column in PEOPLE.columns if column.name in columns))
    made = synthesizer(workload=None).fit(numbers()[columns], schema)
    assert made.release.workload == f"bands:k={len(columns)}"
    rows = made.sample(1000)
    assert 0.4 < (rows["pay"] > 7.5).mean() < 0.6
    if "group" in columns:
        assert np.mean((rows["pay"] > 7.5) == (rows["group"] == "b")) > 0.97


def test_unless_told_codes_are_asked_about_three_at_a_time():
    made = anamorph.Synthesizer(epsilon=2.0, delta=1e-5, settings=SETTINGS).fit(TABLE, survey_schema())
    assert made.release.workload == "marginals:k=3"
