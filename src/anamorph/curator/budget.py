"""The budget: what (epsilon, delta) buys in zero-concentrated differential privacy, and that in noise.

Every rounding here goes one way: the promise that is kept is never weaker than the promise that was stated.

A rho-zCDP mechanism has Rényi divergences of at most alpha rho for every order alpha > 1 (Bun & Steinke
2016), and is therefore (epsilon, delta)-DP, whatever alpha = 1 + a, with (Canonne, Kamath & Steinke 2020)

    ln delta = a ((1 + a) rho - epsilon) - a ln(1 + 1/a) - ln(1 + a).

This is (alpha - 1)(alpha rho - epsilon) + alpha ln(1 - 1/alpha) - ln(alpha - 1), written so that nothing
cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from anamorph.errors import ParameterError

Relation = Literal["replace", "add-remove"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The guarantee that the user states: (epsilon, delta)-differential privacy."""

    epsilon: float
    """Finite and above 0; the smaller, the stronger."""

    delta: float
    """Above 0 and below 1; much less than one over the number of rows."""

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)
        _check_delta(self.delta)

    @property
    def rho(self) -> float:
        """The zero-concentrated budget that this guarantee affords, rounded down."""
        return rho_of(self.epsilon, self.delta)

    def warnings(self, rows: int | None) -> tuple[str, ...]:
        """Returns what a careful reader would object to; `rows` is the public number of rows, or None."""
        found = []
        if rows is not None and self.delta * rows > 1:
            found.append(
                f"delta ({self.delta:.12g}) exceeds 1/{rows}, one over the number of rows: to publish a row "
                "drawn at random would be as private. Take a far smaller delta, such as 1/rows²."
            )
        if self.epsilon > 20:
            found.append(f"epsilon ({self.epsilon:.12g}) exceeds 20 and promises next to nothing. Take 10 or less.")
        return tuple(found)


def delta_of(rho: float, epsilon: float) -> float:
    """Returns the least delta for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded up.

    ln delta is convex in a; its derivative (1 + 2a) rho - epsilon - ln(1 + 1/a) changes sign once, below
    epsilon / (2 rho) + 1 / sqrt(2 rho), because ln(1 + 1/a) < 1/a. Bisection on ln a finds the place. Each a
    is valid, so it need not be the best one: what remains is to evaluate ln delta at the float a. The four
    terms are each off by 2^-50 of their size at most (a few roundings and a log1p good to a few 2^-53) and
    their sum by 2^-51 of the sum of sizes, so adding 2^-48 (1 + sum of sizes), which includes the error of
    exp, rounds up.
    """
    _check(rho >= 0 and math.isfinite(rho), "rho", rho, "a finite number, 0 or above")
    _check(epsilon >= 0 and math.isfinite(epsilon), "epsilon", epsilon, "a finite number, 0 or above")
    if rho == 0:
        return 0.0
    low, high = -700.0, math.log(min(epsilon / (2 * rho) + 1 / math.sqrt(2 * rho), 1e150))
    for _ in range(60):
        middle = (low + high) / 2
        a = math.exp(middle)
        if (1 + 2 * a) * rho - epsilon < math.log1p(1 / a):
            low = middle
        else:
            high = middle
    a = math.exp(high)
    terms = (a * (1 + a) * rho, -a * epsilon, -a * math.log1p(1 / a), -math.log1p(a))
    logarithm = sum(terms) + 2.0**-48 * (1 + sum(map(abs, terms)))
    return math.nextafter(math.exp(logarithm), 1.0) if logarithm < 0 else 1.0


def epsilon_of(rho: float, delta: float) -> float:
    """Returns the least epsilon for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded up."""
    _check_delta(delta)
    if delta_of(rho, 0.0) <= delta:
        return 0.0
    valid = rho + 2 * math.sqrt(rho * -math.log(delta))
    return _boundary(lambda epsilon: delta_of(rho, epsilon) <= delta, valid, 0.5)


def rho_of(epsilon: float, delta: float) -> float:
    """Returns the largest rho that is known to imply (epsilon, delta)-DP, rounded down.

    The rho that comes back has been checked: delta_of(rho, epsilon) <= delta. The search starts from the
    looser rho + 2 sqrt(rho ln(1/delta)) = epsilon of Bun & Steinke 2016, Proposition 1.3, solved without
    cancellation.
    """
    _check_epsilon(epsilon)
    _check_delta(delta)
    root = math.sqrt(-math.log(delta))
    valid = (epsilon / (math.sqrt(root**2 + epsilon) + root)) ** 2
    return _boundary(lambda rho: delta_of(rho, epsilon) <= delta, max(valid, 1e-300), 2.0)


def proportional(rho: float, weights: Sequence[float]) -> tuple[float, ...]:
    """Returns floats in proportion to the weights, up to rounding, whose sum is at most rho in exact arithmetic."""
    _check_rho(rho)
    _check(len(weights) >= 1 and all(0 < weight < math.inf for weight in weights), "weights", len(weights), "positive")
    total = sum(map(Fraction, weights))
    return tuple(round_down(Fraction(rho) * Fraction(weight) / total) for weight in weights)


def rest(rho: float, part: float) -> float:
    """Returns the largest float r with part + r <= rho in exact arithmetic."""
    _check_rho(rho)
    _check(0 <= part <= rho, "part", part, f"from 0 to rho ({rho:.12g})")
    return round_down(Fraction(rho) - Fraction(part))


def round_down(value: Fraction) -> float:
    """Returns the largest float that is not above `value`."""
    nearest = float(value)
    return nearest if Fraction(nearest) <= value else math.nextafter(nearest, -math.inf)


def round_up(value: Fraction) -> float:
    """Returns the smallest float that is not below `value`."""
    return -round_down(-value) + 0.0


def gaussian_sigma(squared_sensitivity: int | Fraction, rho: float) -> float:
    """Returns the least float sigma with squared_sensitivity <= 2 rho sigma² in exact arithmetic.

    The (discrete) Gaussian mechanism of that sigma is rho-zCDP for a query whose L2 sensitivity, squared, is
    `squared_sensitivity`: Canonne, Kamath & Steinke 2020; sigma = Delta / sqrt(2 rho).
    """
    _check_rho(rho)
    _check(squared_sensitivity > 0, "squared_sensitivity", float(squared_sensitivity), "above 0")
    sigma = math.sqrt(squared_sensitivity / 2) / math.sqrt(rho) * (1 - 2.0**-50)  # a little too small
    while 2 * Fraction(rho) * Fraction(sigma) ** 2 < squared_sensitivity:
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def gumbel_scale(sensitivity: int, k: int, rho: float) -> float:
    """Returns the least float beta with k sensitivity² <= 2 rho beta² in exact arithmetic.

    Gumbel noise of scale beta makes each of k peelings an exponential mechanism whose range is bounded by
    b = 2 sensitivity / beta and which is b²/8-zCDP (Cesar & Rogers 2021, Durfee & Rogers 2019), so that
    beta = sensitivity sqrt(k / (2 rho)).
    """
    _check(sensitivity >= 1, "sensitivity", sensitivity, "at least 1")
    _check(k >= 1, "k", k, "at least 1")
    return gaussian_sigma(sensitivity**2 * k, rho)


def _boundary(holds: Callable[[float], bool], start: float, factor: float) -> float:
    """Returns a number where the condition holds, and beyond which, in the direction of the factor, it fails.

    The start should hold and is moved back if it does not; it then steps by the factor until the condition
    fails, and bisection follows. Whatever rounding does to the condition, it was seen to hold for what is
    returned.
    """
    good = start
    while not holds(good):
        good /= factor
    bad = good * factor
    while bad != good and holds(bad):
        good, bad = bad, bad * factor
    for _ in range(60):
        middle = good + (bad - good) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _check_epsilon(epsilon: float) -> None:
    _check(0 < epsilon < math.inf, "epsilon", epsilon, "a finite number above 0")


def _check_delta(delta: float) -> None:
    _check(0 < delta < 1, "delta", delta, "above 0 and below 1")


def _check_rho(rho: float) -> None:
    _check(0 < rho < math.inf, "rho", rho, "a finite number above 0")


def _check(condition: bool, name: str, value: float, rule: str) -> None:
    if not condition:
        raise ParameterError(f"{name} ({value:.12g}) must be {rule}")
