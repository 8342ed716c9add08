"""The bench of native numbers, in a small version, on the real data: NOT PRIVATE."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from bench import numbers

pytestmark = pytest.mark.skipif(not numbers.PATH.exists(), reason="the benchmark data is not here: set ANAMORPH_DATA")


def test_rap_plus_plus_is_nearer_to_mixed_marginals_than_bins():
    found = numbers.mixed_table((1.0,), 1, 500, str(numbers.PATH), ("rap++", "mwem-pgm"))
    row = found["table"]["1.0"]
    assert row["ratio"] == row["rap++"] / row["mwem-pgm"]
    assert 0 < row["rap++"] < row["mwem-pgm"]
    assert found["reached"] == (row["ratio"] <= 0.7)


def test_auto_is_nearer_than_rap_plus_plus_to_what_is_asked_of_numbers():
    (row,) = numbers.asked_table(("bands:k=2,bands=4,target=income",), (1.0,), 1, str(numbers.PATH))["table"].values()
    assert len(row["auto"]) == len(row["rap++"]) == 3
    assert all(0 < ours < theirs for ours, theirs in zip(row["auto"], row["rap++"], strict=True))


def test_the_errors_of_the_data_itself_are_of_rounding_only():
    """Real rows in bins, and drawn from them again, lose what bins lose; native ones nothing."""
    errors = numbers.MixedErrors(200, str(numbers.PATH))
    again = errors.answers(numbers.encode(str(numbers.PATH), errors.schema))
    assert all(np.array_equal(a, b) for a, b in zip(again, errors.truth, strict=True))


def test_rows_of_rap_plus_plus_train_a_model_nearly_as_well_as_real_ones():
    table = numbers.f1_table(("rap++",), numbers.SINGLE, 1, 1.0, str(numbers.PATH))
    real, found = table["real"]["income"]["median"], table["rap++"]["income"]["median"]
    assert 0.77 < real < 0.8
    assert 0.95 * real < found < 1.02 * real


def test_annealing_beats_fixed_temperatures():
    found = numbers.annealing_table(60, 10, 40, (4, 64, 512), str(numbers.PATH))
    assert set(found["table"]) == {"annealed", "sigma 4", "sigma 64", "sigma 512"}
    assert found["reached"]
