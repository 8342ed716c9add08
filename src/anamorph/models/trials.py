"""Trials: how firmly to shrink, what to weigh and what to quiet, by what is held back of a measurement.

The penalty of shrinking.py follows from public numbers. How much the columns depend on each other none of these tells:
where many do so a little, that penalty lets through more noise than it keeps of what they say; where some do strongly
and most hardly, it is too strong for the former and too weak for the latter; where three do no more than each two of
them, noise is larger than all there is to tell. So three things are tried:

- to *weigh* what was measured by how far it stands out of noise (weighing.py), beside half of the penalty; unless that
  explains much less than no weights do, beside sqrt(1/2) of it; then on from the better of these, with less, or with
  more, for as long as each is better than the one before;
- where that is no better, to shrink more *firmly*, f times as much with a tail f^2 times as heavy that begins nearer
  by, f = sqrt(2), 2, 2 sqrt(2), for as long as each is better than the one before;
- to tell what noise explains as plainly as can be (quieting.py).

Rows are fitted to one half of a thinned measurement (thinning.py), and the best is what leaves the least chi^2 of the
other half. Its noise is independent of the rows, and the same for all of them; what differs is, in expectation, the sum
of their squared errors, in sigmas. First they are fitted as public numbers say; all trials go on from where that ends,
with a quarter of the steps at half of the rate, and choose as if each had begun anew (docs/accuracy.md). They must be
better than the first, both as it ends and as it goes on. Not all are tried at once: what is quiet has little noise to
shrink.

Thresholds are sums of many cells, whose errors may add up: where they are asked for, what is best must not miss those
of the other half by more than the first does.

A sum of squares weighs what is large, and many small errors alike. What is shrunk more firmly costs some of the former
and gains of the latter, so neither that nor more of the penalty beside weights is tried where only the largest error
matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from anamorph.curator.tallies import AtLeast
from anamorph.models import goals
from anamorph.models.least_squares import LeastSquares, least_squares
from anamorph.models.quieting import quiet_share
from anamorph.models.relaxed import Parameters, RelaxedRows
from anamorph.models.shrinking import (
    FEWEST_ROWS,
    ShrinkingProjection,
    counted,
    descend,
    fitting_rows,
    revealed,
    unexplained,
)
from anamorph.models.simplex import Layout
from anamorph.models.tiles import NO_TAIL
from anamorph.queries.workload import Workload
from anamorph.release import Measurement

ROOM = 1 << 30
"""The most rows times cells of a trial: seconds on two cores."""

FIRMER = (2**0.5, 2.0, 2**1.5)
"""How many times the penalty is tried to be, in this order."""

BESIDE = (0.5, 2**-0.5)
"""How many times it is tried to be beside weights, at first."""

DOWN, UP = (2**-1.5, 0.25), (1.0, 2**0.5, 2.0)
"""How it is tried on from the first of these, and from the second."""

LOUDNESS = 2.0
"""How loud what is not told as plain is tried to be; then twice as loud if that is better, or half as loud if it is so
by too little to tell."""

WORTH = 0.25
"""The least share of all there is to tell that must be quiet at twice that, for it to be tried."""

BRIEF, GENTLE = 0.25, 0.5
"""The part of the steps, and of the rate, of a trial."""

GAIN = 10.0
"""By how much chi^2 must fall for a trial to be better: fits that are nearly the same differ by a few by chance."""

LOSS = 50.0
"""By how much it may be larger beside weights for another penalty to be tried."""


class Trial(NamedTuple):
    """What an estimator leaves of chi^2, of what is held back."""

    left: float
    estimator: ShrinkingProjection
    point: Parameters
    """Where its rows are."""


Judge = Callable[[ShrinkingProjection], Trial]


def suited(
    estimator: ShrinkingProjection,
    asked: Workload,
    told: Sequence[Measurement],
    held: Sequence[Measurement],
    *,
    seed: int,
) -> ShrinkingProjection:
    """Returns the estimator that best explains what is held back: with weights, firmer, quieter, or as it is.

    Half of the rows are fitted, but at least `FEWEST_ROWS`. Where these and the cells have no `ROOM`, trials would take
    long.
    """
    sizes = asked.sizes
    all_rows = estimator.rows or fitting_rows(told)
    rows = max(all_rows // 2, min(all_rows, FEWEST_ROWS))
    if rows * sum(measurement.workload.cells for measurement in told) > ROOM:
        return estimator
    layout, unseen = Layout(sizes), goals.build(Layout(sizes), held, last=True)

    def judged(other: ShrinkingProjection, point: Parameters) -> Trial:
        return Trial(2 * counted(held) * float(unexplained(layout, point, unseen, NO_TAIL)), other, point)

    def judge(other: ShrinkingProjection) -> Trial:
        aims = other.aims(layout, told)
        steps = jnp.int32(math.ceil(BRIEF * int(aims.steps)))
        return judged(other, descend(layout, begin, aims._replace(steps=steps, rate=GENTLE * aims.rate), "try")[0])

    fresh = replace(estimator, rows=rows).begin(layout, told, seed)
    begin, _ = descend(layout, fresh, estimator.aims(layout, told), "try")
    plain = least(judged(estimator, begin), judge(estimator))
    best = by_weight(plain, judge)
    if best is plain and estimator.objective != "max":
        best = climbed(plain, judge, FIRMER)
    best = least(best, quieter(plain, judge, told))
    thresholds = [piece.tally for piece in asked.pieces() if isinstance(piece.tally, AtLeast)]
    if best is plain or not thresholds:
        return best.estimator
    known = least_squares(sizes, held)
    before, after = (amiss(thresholds, known, revealed(layout, trial.point)) for trial in (plain, best))
    return best.estimator if after <= before else estimator


def amiss(thresholds: Sequence[AtLeast], known: LeastSquares, rows: RelaxedRows) -> float:
    """Returns the sum of the squares by which rows miss thresholds, as far as these follow from noisy answers."""
    told = (tally for tally in thresholds if all(map(known.knows, tally.sets)))
    return sum(float(np.square(rows.answer(tally) - known.answer(tally)).sum()) for tally in told)


def by_weight(plain: Trial, judge: Judge) -> Trial:
    """Returns the best of trials that weigh what was measured; the plain one where none is better."""
    weighing = replace(plain.estimator, weighing=True)
    low = judge(replace(weighing, firmness=BESIDE[0]))
    if not low.left < plain.left + LOSS:
        return plain
    high = judge(replace(weighing, firmness=BESIDE[1]))
    up = UP if weighing.objective != "max" else ()
    best = climbed(high, judge, up) if high.left < low.left else climbed(low, judge, DOWN)
    return best if best.left < plain.left - GAIN else plain


def climbed(begin: Trial, judge: Judge, firmness: Sequence[float]) -> Trial:
    """Returns the best of trials that shrink ever more firmly, or ever less."""
    best = begin
    for firm in firmness:
        trial = judge(replace(begin.estimator, firmness=firm))
        if not trial.left < best.left - GAIN:
            break
        best = trial
    return best


def quieter(plain: Trial, judge: Judge, told: Sequence[Measurement]) -> Trial:
    """Returns the best of trials that quiet; where little is quiet, they would make no difference."""
    if quiet_share(told, 2 * LOUDNESS) < WORTH:
        return plain
    some = judge(replace(plain.estimator, loudness=LOUDNESS))
    if not some.left < plain.left:
        return plain
    enough = plain.left - GAIN
    best = least(some, judge(replace(plain.estimator, loudness=LOUDNESS * (2 if some.left < enough else 0.5))))
    return best if best.left < enough else plain


def least(first: Trial, second: Trial) -> Trial:
    """Returns the trial that leaves less; the first if they leave the same, or the second is no number."""
    return min(first, second, key=attrgetter("left"))
