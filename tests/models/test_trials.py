"""Trials: what is tried, with how many rows, and that what explains best what is held back is chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from fits import WHOLE, WIDE, answers, exact, measure, noisy, unrelated

from anamorph import progress
from anamorph.models import trials
from anamorph.models.least_squares import least_squares
from anamorph.models.relaxed import RelaxedRows
from anamorph.models.shrinking import ShrinkingProjection, fitting_rows
from anamorph.models.thinning import thinned
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload

SMALL = ShrinkingProjection(rows=40)
LESS, ONCE, TWICE, THRICE = 2**-0.5, 2**0.5, 2.0, 2**1.5
WEIGHED = [[0.5, 0, True]]
"""What is tried first beside weights."""

UNWEIGHED = (math.inf,)
"""What it leaves where weights explain nothing."""


def suited(log, estimator=SMALL, seed=0, asked=WHOLE):
    return trials.suited(estimator, asked, *thinned(log, seed=seed), seed=seed)


def mildly_related():
    """The answers of a table whose columns depend on each other a little, all on many kinds of rows."""
    generator = np.random.default_rng(2)
    lines = [generator.dirichlet(np.full(size, 1.0), 1).T * generator.gamma(20, 1, (size, 200)) for size in WIDE]
    kinds = np.concatenate([line / line.sum(axis=0) for line in lines]).astype(np.float32)
    return answers(RelaxedRows(WIDE, kinds, np.full(200, 1 / 200, np.float32)), WHOLE).astype(float)


# --- on noise


@pytest.mark.parametrize("seed", range(3))
def test_less_is_told_where_columns_hardly_depend_on_each_other(seed):
    values = unrelated()
    log = noisy(2e-4, seed, values=values)
    chosen = suited(log, seed=seed)
    assert chosen.loudness > 0 or chosen.firmness > 1 or chosen.weighing
    before, after = (answers(each.fit(WIDE, log, seed=seed), WHOLE) for each in (SMALL, chosen))
    assert np.abs(after - values).sum() < 0.8 * np.abs(before - values).sum()


@pytest.mark.parametrize("seed", range(3))
def test_more_is_shrunk_where_columns_depend_on_each_other_a_little(seed, monkeypatch):
    monkeypatch.setattr(trials, "WORTH", math.inf)  # nothing is quieted
    monkeypatch.setattr(trials, "by_weight", lambda plain, _judge: plain)  # or weighed
    values = mildly_related()
    log = noisy(1e-4, seed, values=values)
    chosen = suited(log, seed=seed)
    assert chosen.firmness > 1
    before, after = (answers(each.fit(WIDE, log, seed=seed), WHOLE) for each in (SMALL, chosen))
    assert np.square(after - values).sum() < 0.9 * np.square(before - values).sum()


def test_nothing_is_changed_where_nothing_explains_more():
    assert suited(noisy(2e-5)) == SMALL


@pytest.mark.parametrize("seed", range(3))
def test_what_stands_out_counts_for_more_where_that_is_better(seed):
    log = noisy(1e-5, seed)
    chosen = suited(log, seed=seed)
    assert chosen.weighing
    before, after = (answers(each.fit(WIDE, log, seed=seed), WHOLE) for each in (SMALL, chosen))
    assert np.square(after - exact()).sum() < 0.85 * np.square(before - exact()).sum()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_quieted_where_columns_depend_on_each_other(seed):
    log = noisy(5e-4, seed)
    chosen = suited(log, seed=seed)
    assert chosen.loudness == 0
    before, after = (answers(each.fit(WIDE, log, seed=seed), WHOLE) for each in (SMALL, chosen))
    assert np.square(after - exact()).sum() <= np.square(before - exact()).sum()


# --- thresholds

EITHER = Workload((Thresholds(WIDE, ((0, 1), (2, 3)), least=1), *WHOLE.parts))
ASKED = [piece.tally for piece in EITHER.pieces()][:2]
"""Its thresholds."""


def test_thresholds_are_missed_by_what_rows_and_noisy_answers_differ_in():
    rows = SMALL.fit(WIDE, noisy(1e-5), seed=0)
    known = least_squares(WIDE, [measure(WHOLE, answers(rows, WHOLE), sigma=1e-4)])
    assert trials.amiss(ASKED, known, rows) < 1e-8
    other = SMALL.fit(WIDE, noisy(1e-3), seed=0)
    away = np.concatenate([other.answer(tally) - rows.answer(tally) for tally in ASKED])
    assert trials.amiss(ASKED, known, other) == pytest.approx(np.square(away).sum(), rel=1e-3)


def test_thresholds_that_do_not_follow_from_what_was_measured_are_not_judged():
    rows = SMALL.fit(WIDE, noisy(1e-3), seed=0)
    singles = Workload(WHOLE.parts[:1])
    known = least_squares(WIDE, [measure(singles, exact()[: sum(WIDE)], sigma=1e-4)])
    assert trials.amiss(ASKED, known, rows) == 0


@pytest.mark.parametrize(
    ("missed", "weighed"), [((1, 1), True), ((1, 0.9), True), ((1, 1.1), False), ((1, math.nan), False)]
)
def test_what_is_better_must_not_miss_more_of_the_thresholds_that_are_asked_for(monkeypatch, missed, weighed):
    left, given = iter(missed), []
    monkeypatch.setattr(trials, "amiss", lambda tallies, *_what: given.append(tallies) or next(left))
    assert suited(noisy(1e-5), asked=EITHER).weighing == weighed
    assert given == [ASKED, ASKED]


@pytest.mark.parametrize("parts", [WHOLE.parts, (Thresholds(WIDE, WHOLE.parts[1].sets, least=2),)])
def test_marginals_are_judged_by_chi_squared_alone(monkeypatch, parts):
    monkeypatch.setattr(trials, "amiss", None)
    assert suited(noisy(1e-5), asked=Workload(parts)).weighing


# --- what is tried


def tried(monkeypatch, losses, estimator=SMALL, log=None, share=0.0):
    """What is found where the trials leave these chi^2, and each of them: firmness, loudness, weights, rows.

    The first leaves as much when it goes on.
    """
    seen, left, aims = [], iter([*losses[:1], *losses]), ShrinkingProjection.aims

    def heard(self, layout, told):
        seen.append([self.firmness, self.loudness, self.weighing])
        return aims(self, layout, told)

    def descended(_layout, point, _aims, _stage):
        seen[-1].append(point.rows.size)
        return point, True

    log = log or noisy(0.01)
    monkeypatch.setattr(ShrinkingProjection, "aims", heard)
    monkeypatch.setattr(trials, "descend", descended)
    monkeypatch.setattr(trials, "quiet_share", lambda _told, loudness: share if loudness == 4 else 0)
    monkeypatch.setattr(trials, "unexplained", lambda *_what: next(left) / (2 * log[0].total))
    found = suited(log, estimator)
    assert seen[:1] == seen[1:2], "what goes on is as it was"
    return found, seen[1:]


@pytest.mark.parametrize(
    ("losses", "found", "firmness"),
    [
        ([900, 895], 1, [1, ONCE]),
        ([900, 890], 1, [1, ONCE]),
        ([900, 910], 1, [1, ONCE]),
        ([900, 889, 880], ONCE, [1, ONCE, TWICE]),
        ([900, 880, 869, 860], TWICE, [1, ONCE, TWICE, THRICE]),
        ([900, 880, 860, 840], THRICE, [1, ONCE, TWICE, THRICE]),
        ([math.nan, 0.0], 1, [1, ONCE]),
        ([900, math.nan], 1, [1, ONCE]),
        ([900, 800, math.nan], ONCE, [1, ONCE, TWICE]),
    ],
)
def test_more_is_shrunk_for_as_long_as_it_explains_more(monkeypatch, losses, found, firmness):
    plain, *firmer = losses
    chosen, seen = tried(monkeypatch, [plain, *UNWEIGHED, *firmer])
    assert chosen == replace(SMALL, firmness=found)
    assert [each[:3] for each in seen] == [[1, 0, False], *WEIGHED, *([firm, 0, False] for firm in firmness[1:])]


@pytest.mark.parametrize(
    ("losses", "found", "loudness"),
    [
        ([900, 901], 0, [0, 2]),
        ([900, 900], 0, [0, 2]),
        ([900, 895, 880], 1, [0, 2, 1]),
        ([900, 895, 895], 0, [0, 2, 1]),
        ([900, 880, 890], 2, [0, 2, 4]),
        ([900, 880, 870], 4, [0, 2, 4]),
        ([math.nan, 0.0], 0, [0, 2]),
        ([900, math.nan], 0, [0, 2]),
        ([900, 800, math.nan], 2, [0, 2, 4]),
    ],
)
def test_what_is_quiet_is_told_as_plain_if_that_explains_more(monkeypatch, losses, found, loudness):
    plain, *quieted = losses
    chosen, seen = tried(monkeypatch, [plain, *UNWEIGHED, math.inf, *quieted], share=1.0)
    assert chosen == replace(SMALL, loudness=found)
    firmer, louder = [ONCE, 0, False], [[1, loud, False] for loud in loudness[1:]]
    assert [each[:3] for each in seen] == [[1, 0, False], *WEIGHED, firmer, *louder]


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([900, *UNWEIGHED, 800, 810, 820, 815], {"firmness": ONCE}),
        ([900, *UNWEIGHED, 800, 810, 790, 815], {"loudness": 2.0}),
        ([900, *UNWEIGHED, 800, 810, 800, 815], {"firmness": ONCE}),
        ([900, 800, 700, 695, 705, 715], {"firmness": LESS, "weighing": True}),
        ([900, 800, 700, 695, 690, 715], {"loudness": 2.0}),
    ],
)
def test_what_is_best_is_chosen_of_all_that_is_tried(monkeypatch, losses, found):
    chosen, seen = tried(monkeypatch, losses, share=1.0)
    assert chosen == replace(SMALL, **found)
    assert all(loud == 0 or (firm == 1 and not weighing) for firm, loud, weighing, _ in seen), "not all at once"


@pytest.mark.parametrize(
    ("losses", "found", "firmness"),
    [
        ([900, 880, 870, 865], LESS, [0.5, LESS, 1]),
        ([900, 880, 870, 850, 845], 1, [0.5, LESS, 1, ONCE]),
        ([900, 880, 870, 850, 830, 810], 2, [0.5, LESS, 1, ONCE, 2]),
        ([900, 870, 880, 865], 0.5, [0.5, LESS, 2**-1.5]),
        ([900, 870, 880, 850, 845], 2**-1.5, [0.5, LESS, 2**-1.5, 0.25]),
        ([900, 870, 880, 850, 830], 0.25, [0.5, LESS, 2**-1.5, 0.25]),
        ([900, 870, 870, 870], 0.5, [0.5, LESS, 2**-1.5]),
        ([900, 949, 1200, 880, 875], 2**-1.5, [0.5, LESS, 2**-1.5, 0.25]),
        ([900, 870, math.nan, 865], 0.5, [0.5, LESS, 2**-1.5]),
    ],
)
def test_what_stands_out_counts_for_more_if_that_explains_more(monkeypatch, losses, found, firmness):
    chosen, seen = tried(monkeypatch, losses)
    assert chosen == replace(SMALL, weighing=True, firmness=found)
    assert [each[:3] for each in seen] == [[1, 0, False], *([firm, 0, True] for firm in firmness)]


@pytest.mark.parametrize(
    ("losses", "firmness"),
    [
        ([900, 950], []),
        ([900, 949, 950, 940], [LESS, 2**-1.5]),
        ([900, 891, 900, 890], [LESS, 2**-1.5]),
        ([900, 945, 920, 891, 895], [LESS, 1, ONCE]),
        ([900, 891, math.nan, 890], [LESS, 2**-1.5]),
        ([math.nan, 1], []),
        ([900, math.nan], []),
    ],
)
def test_nothing_is_weighed_that_does_not_explain_more(monkeypatch, losses, firmness):
    chosen, seen = tried(monkeypatch, [*losses, math.inf])
    assert chosen == SMALL
    weighed = [each[:3] for each in seen if each[2]]
    assert weighed == [*WEIGHED, *([firm, 0, True] for firm in firmness)]
    assert seen[-1][:3] == [ONCE, 0, False]


def test_beside_weights_more_is_not_shrunk_either_where_the_largest_error_matters(monkeypatch):
    largest = replace(SMALL, objective="max")
    chosen, seen = tried(monkeypatch, [900, 880, 870], largest)
    assert chosen == replace(largest, weighing=True, firmness=LESS)
    assert len(seen) == 3
    chosen, _ = tried(monkeypatch, [900, 870, 880, 850, 845], largest)
    assert chosen == replace(largest, weighing=True, firmness=2**-1.5)


@pytest.mark.parametrize(("matters", "trials"), [("max", 2), ("balanced", 3), ("average", 3)])
def test_more_is_not_shrunk_where_the_largest_error_matters(monkeypatch, matters, trials):
    assert len(tried(monkeypatch, [3, *UNWEIGHED, 2], replace(SMALL, objective=matters))[1]) == trials


@pytest.mark.parametrize(("rows", "trial"), [(7, 7), (64, 64), (128, 64), (1025, 512), (0, 64)])
def test_trials_have_half_of_the_rows_but_at_least_some(monkeypatch, rows, trial):
    _, seen = tried(monkeypatch, [3, *UNWEIGHED, 2], replace(SMALL, rows=rows))
    assert [size for *_, size in seen] == [trial] * 3


@pytest.mark.parametrize(("sigma", "trial"), [(0.1, 64), (4e-4, 128), (1e-6, 512)])
def test_trials_have_half_of_the_rows_that_suit_the_noise(monkeypatch, sigma, trial):
    log = noisy(sigma)
    assert fitting_rows(thinned(log, seed=0)[0]) == {64: 64, 128: 256, 512: 1024}[trial]
    _, seen = tried(monkeypatch, [3, *UNWEIGHED, 2], replace(SMALL, rows=0), log)
    assert [size for *_, size in seen] == [trial] * 3


@pytest.mark.parametrize(("share", "quieted"), [(0.24, 0), (0.25, 2)])
def test_nothing_is_quieted_where_little_is_quiet(monkeypatch, share, quieted):
    assert len(tried(monkeypatch, [3, *UNWEIGHED, 4, 2, 1], share=share)[1]) == 3 + quieted


def test_there_are_no_trials_where_there_is_no_room(monkeypatch):
    monkeypatch.setattr(trials, "ROOM", SMALL.rows * WHOLE.cells - 1)
    assert tried(monkeypatch, []) == (SMALL, [])
    monkeypatch.setattr(trials, "ROOM", SMALL.rows * WHOLE.cells)
    assert len(tried(monkeypatch, [3, *UNWEIGHED, 2])[1]) == 3


@pytest.mark.parametrize("plain", [(800, 900), (900, 800), (math.nan, 700), (900, 790), (790, 900)])
def test_what_is_better_must_be_so_than_the_first_as_it_ends_and_as_it_goes_on(monkeypatch, plain):
    left = iter([*plain, 789.9, 789])
    monkeypatch.setattr(trials, "unexplained", lambda *_what: next(left) / (2 * noisy(0.01)[0].total))
    monkeypatch.setattr(trials, "by_weight", lambda plain, _judge: plain)
    monkeypatch.setattr(trials, "quiet_share", lambda *_what: 0)
    assert (suited(noisy(0.01)).firmness > 1) == (sorted(plain) == [800, 900])


@pytest.mark.parametrize(("steps", "brief"), [(100, 25), (101, 26)])
def test_all_trials_go_on_from_the_first_with_a_quarter_of_its_steps(monkeypatch, steps, brief):
    seen, aims = [], ShrinkingProjection.aims

    def descended(_layout, point, aims, _stage):
        seen.append((float(point.rows[0]), int(aims.steps), round(float(aims.rate), 6)))
        return point._replace(rows=point.rows + 1), True

    monkeypatch.setattr(ShrinkingProjection, "aims", lambda *what: aims(*what)._replace(steps=jnp.int32(steps)))
    monkeypatch.setattr(trials, "descend", descended)
    suited(noisy(2e-5))
    assert seen[0] == (0, steps, 0.2)
    assert len(seen) > 2
    assert set(seen[1:]) == {(1, brief, 0.1)}


def test_trials_are_told_as_such():
    told = []
    with progress.listening(lambda *what: told.append(what)):
        suited(noisy(2e-4, values=unrelated()))
    assert {stage for stage, _, _ in told} == {"try"}
    assert told[-1][1] == told[-1][2]
