"""Exact noise: discrete Gaussian, discrete Laplace, and the ordered top k of Gumbel noisy scores.

Everything here is made of one thing, the exponential variate E = -ln W of a uniform real W in (0, 1) whose
binary digits are drawn when they are needed:

    a bit that is 1 with probability exp(-gamma)    is  [E > gamma]
    an integer q with P(q >= j) = exp(-j / ratio)   is  floor(ratio E)
    a Gumbel variate                                is  -ln E

The first 64 digits of W, a *word*, are drawn for many items at once, and numpy computes with E to within a
bound. Where the bound leaves the outcome open, and only there, more digits are drawn and the outcome is
settled by `decimal`, every step rounded outwards. So the outcome is that of arithmetic on real numbers, with
no failure mass.

What is taken on trust: the words are uniform and independent; numpy's + - * / and its conversions round to
nearest (relative error 2^-53); numpy's log and log1p have a relative error below 2^-40 (in truth a few
2^-53); decimal's ln is correctly rounded, as its manual says.
The word w stands for all W in [w, w + 1] / 2^64.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from anamorph.errors import ParameterError

EXCLUDED = np.iinfo(np.int64).min
"""The score of a candidate that must never be selected."""

LARGEST = 2.0**40
"""Largest sigma, or scale, of integer noise. Below it the magnitudes that int64 cannot hold have a mass under
exp(-2^22), and one of them would take six million bits, all zero, to be drawn."""

PIECE = 2**15
"""Items worked on at a time: the arrays of one piece stay in the processor's cache."""

_SMALL = 2**32
_LARGE = 2**64 - 2**44
_TOLERANCE = 2.0**-30  # exceeds the error of numpy where the word is in [_SMALL, _LARGE]; proved at each use

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Reals = NDArray[np.float64]
Entrants = NDArray[np.void]

_ENTRANT = np.dtype([("position", np.int64), ("score", np.int64), ("word", np.uint64)])
"""A candidate that may be among the k best. Its word stands for V = 1 - W, so that the large Gumbels, which
have a small E = -log1p(-V), are known to a good relative accuracy."""


class Bits(Protocol):
    """A source of uniform 64-bit words."""

    private: ClassVar[bool]

    def words(self, count: int) -> Words:
        """Returns `count` fresh words."""
        ...


@dataclass(frozen=True)
class SystemBits:
    """The operating system's cryptographic generator. No state is held here: nothing to seed or to copy."""

    private: ClassVar[bool] = True

    def words(self, count: int) -> Words:
        """Returns `count` fresh words."""
        return np.frombuffer(os.urandom(8 * count), np.uint64)


class SeededBits:
    """NOT PRIVATE: a Philox stream that its seed reproduces, for tests and outputs that are stamped so."""

    private: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self._stream = np.random.Philox(seed)

    def words(self, count: int) -> Words:
        """Returns the next `count` words of the stream."""
        return np.asarray(self._stream.random_raw(count), np.uint64)


def discrete_gaussian(size: int, sigma: float, bits: Bits) -> Integers:
    """Returns `size` independent integers with P(x) proportional to exp(-x² / (2 sigma²)).

    Canonne, Kamath & Steinke 2020, Algorithm 3: propose x from the discrete Laplace of scale t = floor(sigma)
    + 1 and accept it with probability exp(-gamma), gamma = (|x| - sigma²/t)² / (2 sigma²). sigma is the
    rational number that the float denotes. Deviation: the proposals of a round are made together.

    numpy's gamma is r²/2 with r = |x|/sigma - sigma/t. As sigma/t <= 1, both terms are at most |r| + 1, so r
    is off by 2^-51 (|r| + 1) at most and gamma by less than 2^-45 (1 + gamma), as `_bernoulli` asks.
    """
    sigma = within("sigma", sigma, LARGEST)
    scale, variance = math.floor(sigma) + 1, Fraction(sigma) ** 2

    def draw(count: int) -> Integers:
        proposed = _laplace_round(count, Fraction(scale), bits)
        distance = np.abs(proposed) / sigma - sigma / scale

        def gamma(item: int) -> Fraction:
            return (abs(int(proposed[item])) - variance / scale) ** 2 / (2 * variance)

        return proposed[_bernoulli(distance * distance / 2, gamma, bits)]

    return _collect(size, draw)


def discrete_laplace(size: int, scale: float, bits: Bits) -> Integers:
    """Returns `size` independent integers with P(x) proportional to exp(-|x| / scale).

    scale is the rational number that the float denotes; the method is that of `_laplace_round`.
    """
    rational = Fraction(within("scale", scale, LARGEST))
    return _collect(size, lambda count: _laplace_round(count, rational, bits))


def top_k(scores: Iterable[Integers], k: int, scale: float, bits: Bits) -> Integers:
    """Returns the positions, best first, of the k largest of score + scale * Gumbel, and nothing else.

    This is the exponential mechanism with weights exp(score / scale), applied k times, each time without the
    candidates chosen before (Durfee & Rogers 2019): exp(-noisy score / scale) = E exp(-score / scale) is
    exponential with rate exp(score / scale), the first of several such clocks to ring is the i-th with
    probability proportional to its rate, and those that have not rung have no memory.

    The scores come in chunks, and a position counts through all of them. A candidate whose score is EXCLUDED
    never enters. Other scores are clamped to (-2^62, 2^62], which raises no sensitivity, and no error tells
    of it.

    Each piece is cut down to the candidates that the bounds do not rule out, about k of them; they are joined
    with those of the pieces before and cut down again, so memory is O(piece + k). The last of them are put in
    exact order.
    """
    scale = within("scale", scale, 1e100)
    if k < 1:
        raise ParameterError(f"k ({k}) must be at least 1")
    best, eligible = np.empty(0, _ENTRANT), 0
    for entrants in _entrants(scores, max(PIECE, k), bits):
        best = _leaders(np.concatenate((best, _leaders(entrants, k, scale))), k, scale)
        eligible += entrants.size
    if k > eligible:
        raise ParameterError(f"k ({k}) must be at most {eligible}, the number of eligible candidates")
    return np.array([candidate.position for candidate in _ordered(best, k, scale, bits)[:k]], np.int64)


def bernoulli(
    gamma: Reals, error: Reals, exact: Callable[[int], tuple[Fraction, int]], bits: Bits
) -> NDArray[np.bool_]:
    """Returns independent bits, the i-th of them 1 with probability exp(-g) or 1, whichever is less.

    g is b + p ln 2, where exact(i) = (b, p), and `gamma` holds it to within 2^-45 (1 + |g|) + error / 2. The
    bit is [E > g]. If |E - gamma| >= _TOLERANCE + error and the word is not small, numpy's sign is right: for
    |gamma| <= 32 because the errors of E and gamma add up to less; for larger gamma because E < 23, and the
    error takes at most half of what gamma is above E; for gamma < -32 because E > 0, and the same half. The
    others are settled exactly.
    """
    words = bits.words(gamma.size)
    excess = _exponentials(words) - gamma
    result = excess > 0
    for item in np.flatnonzero((np.abs(excess) < _TOLERANCE + error) | (words < _SMALL)):
        result[item] = _Exponential(int(words[item]), bits).exceeds(*exact(int(item)))
    return result


def within(name: str, value: float, largest: float) -> float:
    """Returns the value, if it is in the range that the bounds of this module are proved for."""
    if not 1e-100 <= value <= largest:
        raise ParameterError(f"{name} ({value:.12g}) must be a number between 1e-100 and {largest:.12g}")
    return float(value)


def log_two(digits: int) -> tuple[Decimal, Decimal]:
    """Returns numbers below and above ln 2, of that many digits."""
    return _minus_log(Decimal("0.5"), Decimal("0.5"), digits)


def _bernoulli(gamma: Reals, exact: Callable[[int], Fraction], bits: Bits) -> NDArray[np.bool_]:
    """Returns independent bits, the i-th of them 1 with probability exp(-exact(i)).

    `gamma` holds exact(i) to within 2^-45 (1 + exact(i)).
    """
    return bernoulli(gamma, np.zeros(1), lambda item: (exact(item), 0), bits)


def _exponentials(words: Words) -> Reals:
    """Returns E = -ln W for each word, a smaller word taken as _SMALL, where E is about 22.2.

    For a word w >= _SMALL the error is below 1.2 * 2^-32: the width of its interval contributes ln(1 + 1/w) <
    2^-32, its conversion 2^-52, and the logarithm 23 * 2^-40 < 2^-35.
    """
    return -np.log(np.maximum(words, _SMALL) * 2.0**-64)


def _quotients(count: int, ratio: Fraction, bits: Bits) -> Integers:
    """Returns independent integers q = floor(ratio E), for a ratio below 2.

    numpy's ratio * E is off by 1.3 * 2^-31 < _TOLERANCE at most, so its floor is right unless a positive
    integer j is nearer than that, or the word is small. In both cases q >= j - 1 for the positive integer j
    that is nearest, and from there on q + 1 is tried: ratio E >= q + 1 or not.
    """
    words = bits.words(count)
    values = _exponentials(words) * float(ratio)
    result = values.astype(np.int64)
    nearest = np.maximum(np.rint(values), 1.0)
    for item in np.flatnonzero((np.abs(values - nearest) < _TOLERANCE) | (words < _SMALL)):
        variate, quotient = _Exponential(int(words[item]), bits), int(nearest[item]) - 1
        while variate.exceeds((quotient + 1) / ratio):
            quotient += 1
        result[item] = quotient
    return result


def _uniform_below(bound: int, count: int, bits: Bits) -> Integers:
    """Returns independent uniform integers in [0, bound), from words below the last multiple of it."""
    words = bits.words(count)
    return (words[words <= 2**64 - 1 - 2**64 % bound] % bound).astype(np.int64)


def _laplace_round(count: int, scale: Fraction, bits: Bits) -> Integers:
    """Returns independent draws of the discrete Laplace: those of `count` attempts that are not rejected.

    Canonne, Kamath & Steinke 2020, Algorithm 2. With t = max(1, floor(scale)), the magnitude is u + t q,
    where u is uniform on {0, ..., t - 1} and kept with probability exp(-u / scale), and P(q >= j) = exp(-j t
    / scale): so P(u + t q) is proportional to exp(-(u + t q) / scale). A sign is drawn, and a zero with a
    minus sign rejected. Deviation: the paper multiplies a rational scale up to an integer and divides at the
    end; here q carries the ratio scale / t, which is in (0, 2), and no intermediate number is larger than the
    draw.
    """
    step = max(1, math.floor(scale))
    offered = _uniform_below(step, count, bits)
    kept = offered[_bernoulli(offered / float(scale), lambda item: int(offered[item]) / scale, bits)]
    magnitudes = kept + step * _quotients(kept.size, scale / step, bits)
    coins = bits.words(-(-kept.size // 64)).view(np.uint8)
    negative = np.unpackbits(coins, count=kept.size).astype(np.bool_)
    return np.where(negative, -magnitudes, magnitudes)[(magnitudes > 0) | ~negative]


def _collect(size: int, draw: Callable[[int], Integers]) -> Integers:
    """Returns the first `size` results of rounds of `draw`, which keeps some of its `count` attempts."""
    if size < 0:
        raise ParameterError(f"size ({size}) must be at least 0")
    result, filled = np.empty(size, np.int64), 0
    while filled < size:
        drawn = draw(min(PIECE, 2 * (size - filled) + 16))[: size - filled]
        result[filled : filled + drawn.size] = drawn
        filled += drawn.size
    return result


def _entrants(scores: Iterable[Integers], piece: int, bits: Bits) -> Iterator[Entrants]:
    """Yields the eligible candidates of the chunks, `piece` at most at a time, each with a fresh word."""
    offset = 0
    for chunk in scores:
        if chunk.dtype != np.int64 or chunk.ndim != 1:
            raise ParameterError(f"scores ({chunk.dtype}, {chunk.ndim}-d) must be chunks of int64, 1-d")
        for start in range(0, chunk.size, piece):
            part = chunk[start : start + piece]
            where = np.flatnonzero(part != EXCLUDED)
            entrants = np.empty(where.size, _ENTRANT)
            entrants["position"] = where + (offset + start)
            entrants["score"] = part[where].clip(1 - 2**62, 2**62)
            entrants["word"] = bits.words(where.size)
            yield entrants
        offset += chunk.size


def _leaders(entrants: Entrants, k: int, scale: float) -> Entrants:
    """Returns the entrants that the bounds do not rule out: all of the k best, and rarely any other.

    Write m for `_margin`. If k entrants have computed values of at least c, their true values are at least
    c - m(c), because x - m(x) increases with x. One with a computed x < c - 4 m(c) has a true value below
    x + m(x) < c - m(c). A large word gives no lower bound, and a small one no upper bound.
    """
    rank = entrants.size - k
    if rank <= 0:
        return entrants
    values = _values(entrants, _reference(entrants, k), scale)
    sure = np.where(entrants["word"] > _LARGE, -np.inf, values)
    sure.partition(rank)
    cut = sure[rank] - 4 * _margin(sure[rank])
    return entrants[(values >= cut) | (entrants["word"] < _SMALL)]


def _ordered(entrants: Entrants, k: int, scale: float, bits: Bits) -> list[_Candidate]:
    """Returns the entrants in the order of their true noisy scores, the largest first."""
    reference = _reference(entrants, k)
    values = _values(entrants, reference, scale)
    candidates = []
    for item in np.argsort(-values):  # nearly in order: then sorting takes few comparisons
        position, score, word = entrants[item].item()
        value = float(values[item])
        low = value - _margin(value) if word <= _LARGE else -math.inf
        high = value + _margin(value) if word >= _SMALL else math.inf
        variate = _Exponential(2**64 - 1 - word, bits)
        candidates.append(_Candidate(position, (score - reference) / Fraction(scale), variate, low, high))
    return sorted(candidates)


def _reference(entrants: Entrants, k: int) -> int:
    """Returns the k-th largest score: differences to it are exact, and small where the choice is close."""
    rank = max(0, entrants.size - k)
    return int(np.partition(entrants["score"], rank)[rank])


def _values(entrants: Entrants, reference: int, scale: float) -> Reals:
    """Returns x = (score - reference) / scale - ln E, to `_margin(x)` for words within the limits.

    The words give V to a relative 2^-32 + 2^-53. For V <= 1/2 they give E to a relative 2^-31, because
    dE = dV / (1 - V) and E >= V. For V > 1/2 they give V to 2^-53, and E > 1/2 to a relative 2^-32, because
    1 - V >= 2^-20. To the error of ln E, log1p adds 2^-40 and log 23 * 2^-40: it stays below 1.2 * 2^-31. The
    quotient and the difference add 2^-51 |x| + 2^-46. A word outside the limits is taken as the nearer limit:
    the Gumbel of a small word is larger than computed here, that of a large word smaller.
    """
    result = np.clip(entrants["word"], _SMALL, _LARGE) * -(2.0**-64)
    np.log1p(result, out=result)
    np.negative(result, out=result)
    np.log(result, out=result)
    return np.subtract((entrants["score"] - reference) / scale, result, out=result)


def _margin(value: float) -> float:
    """Returns the bound on the error of a value of `_values`."""
    return _TOLERANCE + 2.0**-50 * abs(value)


class _Exponential:
    """The exponential variate -ln W, W uniform in (0, 1), of which the leading bits are known."""

    def __init__(self, word: int, bits: Bits) -> None:
        self.leading, self.size, self.bits = word, 64, bits

    def refine(self) -> None:
        """Draws 64 more bits of W."""
        self.leading = self.leading << 64 | int(self.bits.words(1)[0])
        self.size += 64

    def bounds(self) -> tuple[Decimal, Decimal]:
        """Returns numbers below and above -ln W, for all W in [leading, leading + 1] / 2^size."""
        down, up = _rounding(self.size)
        unit = Decimal(2**self.size)
        low, high = down.divide(Decimal(self.leading), unit), up.divide(Decimal(self.leading + 1), unit)
        return _minus_log(low, high, self.size)

    def excess(self, power: int) -> tuple[Decimal, Decimal]:
        """Returns numbers below and above -ln W - power ln 2, every step rounded outwards."""
        down, up = _rounding(self.size)
        (low, high), ends, factor = self.bounds(), log_two(self.size), Decimal(-power)
        below = min(down.multiply(factor, end) for end in ends)
        above = max(up.multiply(factor, end) for end in ends)
        return down.add(low, below), up.add(high, above)

    def exceeds(self, bound: Fraction, power: int = 0) -> bool:
        """Returns whether -ln W > bound + power ln 2, with as many bits as that takes."""
        low, high = self.excess(power)
        while low <= bound <= high:
            self.refine()
            low, high = self.excess(power)
        return low > bound


@dataclass(slots=True, eq=False)
class _Candidate:
    """A candidate: bounds of its noisy score, shift - ln E, that tighten when a comparison asks."""

    position: int
    shift: Fraction
    variate: _Exponential
    low: float | Decimal
    high: float | Decimal

    def refine(self) -> None:
        """Draws more bits and recomputes the bounds, every step rounded outwards."""
        self.variate.refine()
        down, up = _rounding(self.variate.size)
        low, high = _minus_log(*self.variate.bounds(), self.variate.size)
        numerator, denominator = Decimal(self.shift.numerator), Decimal(self.shift.denominator)
        self.low = down.add(down.divide(numerator, denominator), low)
        self.high = up.add(up.divide(numerator, denominator), high)

    def __lt__(self, other: _Candidate) -> bool:
        """Returns whether this one comes first: its noisy score is the larger."""
        while self.low <= other.high and other.low <= self.high:
            self.refine()
            other.refine()
        return self.low > other.high


def _rounding(digits: int) -> tuple[Context, Context]:
    """Returns two contexts of that many digits: one rounds down, the other up."""
    return Context(digits, ROUND_FLOOR, traps=[]), Context(digits, ROUND_CEILING, traps=[])


def _minus_log(low: Decimal, high: Decimal, digits: int) -> tuple[Decimal, Decimal]:
    """Returns numbers below and above -ln x, for all positive x in [low, high].

    decimal's ln is rounded to nearest whatever the context says, so the neighbours of its result enclose the
    true one.
    """
    down, up = _rounding(digits)
    top = up.next_plus(up.ln(low).copy_negate()) if low > 0 else Decimal("Infinity")
    return down.next_minus(down.ln(high).copy_negate()), top
