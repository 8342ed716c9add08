"""The one-object surface: the same kind of frame comes out that went in, and budgets are kept."""

from __future__ import annotations

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
