"""Selection by lottery: the top k of Gumbel noisy scores among more candidates than can be enumerated.

Candidates are described by tickets. A *stratum* holds a number of tickets, of any size, and has a level l: a ticket
of it weighs 2^l. To draw a ticket takes integer arithmetic only; whose it is, and what its candidate scores, is asked
of those drawn and of no other. With probability exp(score / scale) / 2^l it wins, and its candidate is chosen, unless
it was chosen before.

Why this is peeling. Look at one draw, whatever happened before, and let Z be the weight of all tickets. A ticket of
weight 2^l is drawn and wins with probability

    2^l / Z * exp(score / scale) / 2^l = exp(score / scale) / Z,

in which l has cancelled. So a candidate with t valid tickets that was not chosen before is chosen by this draw with
probability t exp(score / scale) / Z, and given that the draw chooses one, with probability proportional to
t exp(score / scale) among those left. No history changes this; hence also the draw that does choose the next one,
however many it takes, chooses by the exponential mechanism with base measure t among those left. That is peeling, or
the k largest of score + scale ln t + scale * Gumbel, in order.

A candidate far above all others would win again and again, and the next one would be waited for in vain. So a lottery
ends when a candidate wins for the second time: whoever holds the tickets takes out those that were chosen, and begins
another for the rest. It may also end after a number of draws. Either way it ends by a draw that chose none, or when its
batch was due to end, and nothing else is known of the rest.

*With replacement* it is simpler still: every winner is a draw of the exponential mechanism from all candidates,
independent of those before (`winners`).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.noise import Bits, Integers, bernoulli, log_two, within
from anamorph.errors import ParameterError

BATCH = 16
"""Draws that are made together, at least."""

LARGEST_BATCH = 4096
"""Draws that are made together, at most."""

LIFT = 128
"""A stratum is taken as no lighter than 2^-LIFT of the heaviest, by raising its level: so the integers stay small."""

_HUGE = 2**1000  # no score / scale comes near it
_LN_2 = 0.6931471805599453  # the float nearest to ln 2

Find = Callable[[Integers, list[int]], tuple[Integers, Integers, NDArray[np.bool_]]]
"""Turns strata and ranks below their numbers of tickets into candidates, their scores, and whether each is valid."""


def lottery(
    levels: Sequence[int] | Integers,
    weights: Sequence[int],
    k: int,
    scale: float,
    find: Find,
    bits: Bits,
    patience: int | None = None,
) -> Integers:
    """Returns the first of the k candidates with the largest score + scale ln t + scale * Gumbel, in order.

    Fewer than k if a candidate has won again, or after so many draws as `patience` says. Stratum g has weights[g]
    tickets, and each valid one belongs to a candidate with exp(score / scale) <= 2^levels[g]; see `level`. A candidate
    has t valid tickets, in one stratum or in several. If that promise is broken, no error tells of it: the ticket wins
    with probability 1, which is less than its share. scale is the rational number that the float denotes. Some
    candidate must have a valid ticket, or this does not end without patience.

    The draws are made in batches, whose size is determined by those before; what is left of the last one is dropped.
    """
    chosen: dict[int, None] = {}
    for owner in winners(levels, weights, k, scale, find, bits, patience):
        if owner in chosen:
            break
        chosen[owner] = None
        if len(chosen) == k:
            break
    return np.array(list(chosen), np.int64)


def winners(
    levels: Sequence[int] | Integers,
    weights: Sequence[int],
    k: int,
    scale: float,
    find: Find,
    bits: Bits,
    patience: int | None = None,
) -> Iterator[int]:
    """Yields the candidates that win, in order, about k of them at first: see `lottery`.

    Each is drawn anew from all, with probability proportional to t exp(score / scale), whatever came before.
    """
    scale = within("scale", scale, 1e100)
    if k < 1:
        raise ParameterError(f"k ({k}) must be at least 1")
    urn = _Urn(levels, weights)
    size, left = BATCH + 2 * k, math.inf if patience is None else patience
    while left > 0:
        strata, ranks = urn.draw(size, bits)
        owners, scores, valid = find(strata, ranks)
        yield from owners[_wins(urn.raised[strata].tolist(), scores, scale, bits) & valid].tolist()
        left -= size
        size = min(LARGEST_BATCH, 2 * size)


def level(bounds: Integers, scale: float) -> Integers:
    """Returns for each bound the least integer l with exp(bound / scale) <= 2^l, so ceil(bound / (scale ln 2)).

    They are int64, or Python's integers where scale is below 2 and int64 might not hold them. numpy's quotient is
    off by a relative 2^-50 at most: the bound and the constant are rounded, and both divisions. Where twice that
    leaves the ceiling open, and only there, it is settled exactly.
    """
    scale = within("scale", scale, 1e100)
    if bounds.dtype != np.int64 or bounds.ndim != 1:
        raise ParameterError(f"bounds ({bounds.dtype}, {bounds.ndim}-d) must be int64, 1-d")
    values = bounds / scale / _LN_2
    slack = 2.0**-49 * np.abs(values)
    low, high = np.ceil(values - slack), np.ceil(values + slack)
    result = high.astype(np.int64) if scale >= 2 else np.array([int(value) for value in high], object)
    for item in np.flatnonzero(low < high):
        result[item] = _least(int(bounds[item]) / Fraction(scale))
    return result


def _least(value: Fraction) -> int:
    """Returns ceil(value / ln 2) for a value that is not 0, so that the quotient is irrational."""
    digits = 32
    while True:
        low, high = (math.ceil(value / Fraction(end)) for end in log_two(digits))
        if low == high:
            return low
        digits *= 2


class _Urn:
    """All tickets, each with a weight of 2^level.

    A level below 2^-LIFT of the heaviest stratum is raised, which a ticket's chance to win makes up for: a raised level
    is as good as any other.
    """

    def __init__(self, levels: Sequence[int] | Integers, weights: Sequence[int]) -> None:
        if len(levels) != len(weights):
            raise ParameterError("weights must be as many as levels")
        heights, self._weights = [operator.index(level) for level in levels], [operator.index(w) for w in weights]
        if any(weight < 0 for weight in self._weights) or not any(self._weights):
            raise ParameterError("weights must be at least 0, and some above 0")
        lengths = [weight.bit_length() for weight in self._weights]
        pairs = list(zip(heights, lengths, strict=True))
        heaviest = max(height + length for height, length in pairs if length)
        raised = [max(height, heaviest - LIFT - length) for height, length in pairs]
        self._lowest = min(height for height, length in zip(raised, lengths, strict=True) if length)
        self._stops = list(
            accumulate(
                weight << height - self._lowest if weight else 0
                for weight, height in zip(self._weights, raised, strict=True)
            )
        )
        self.raised = np.array(raised, object)

    def draw(self, count: int, bits: Bits) -> tuple[Integers, list[int]]:
        """Returns independent draws: the stratum of each, and the rank in it.

        One uniform integer gives the stratum, the rank, and in its last bits nothing.
        """
        strata, ranks = [], []
        for number in _uniform(self._stops[-1], count, bits):
            stratum = bisect_right(self._stops, number)
            place = number - (self._stops[stratum - 1] if stratum else 0)
            strata.append(stratum)
            ranks.append(place >> self.raised[stratum] - self._lowest)
        return np.array(strata, np.int64), ranks


def _uniform(bound: int, count: int, bits: Bits) -> list[int]:
    """Returns independent uniform integers in [0, bound): those of as many bits as it takes that are below it."""
    width = (bound - 1).bit_length()
    size = 8 * max(1, -(-width // 64))
    result: list[int] = []
    while len(result) < count:
        raw = bits.words(size // 8 * (count - len(result))).astype("<u8").tobytes()
        drawn = (int.from_bytes(raw[at : at + size], "little") >> 8 * size - width for at in range(0, len(raw), size))
        result += [number for number in drawn if number < bound]
    return result


def _wins(levels: list[int], scores: Integers, scale: float, bits: Bits) -> NDArray[np.bool_]:
    """Returns independent bits, the i-th 1 with probability exp(score / scale) / 2^level, or 1 if that is more.

    numpy's gamma = level ln 2 - score / scale is off by 2^-50 of the sum of both terms at most: each of them has
    three roundings, and the difference one. A level beyond _HUGE is taken as _HUGE: next to it all else is nothing,
    and the sign is the same.
    """
    heights = np.array([max(-_HUGE, min(height, _HUGE)) for height in levels], np.float64) * _LN_2
    shares = scores / scale
    error = 2.0**-49 * (np.abs(heights) + np.abs(shares))
    rational = Fraction(scale)
    return bernoulli(heights - shares, error, lambda item: (-int(scores[item]) / rational, levels[item]), bits)
