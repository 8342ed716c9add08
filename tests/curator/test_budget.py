"""(epsilon, delta) to rho and back, and the noise that rho buys: every rounding is on the safe side."""

import math
from fractions import Fraction

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from anamorph.curator.budget import (
    Budget,
    delta_of,
    epsilon_of,
    gaussian_sigma,
    gumbel_scale,
    proportional,
    rest,
    rho_of,
    round_down,
    round_up,
)
from anamorph.errors import ParameterError

ADULT_DELTA = 1 / 48842**2
epsilons = st.floats(-9, 4).map(lambda power: 10**power)
deltas = st.floats(-300, math.log10(0.5)).map(lambda power: 10**power)
rhos = st.floats(-20, 4).map(lambda power: 10**power)


@pytest.mark.parametrize(
    ("epsilon", "tight", "loose"),
    [(0.1, 1.6748e-4, 1.1551e-4), (1, 0.014270, 0.011317), (10, 1.05208, 0.94857)],
)
def test_the_figures_of_the_adult_data(epsilon, tight, loose):
    rho = Budget(epsilon=epsilon, delta=ADULT_DELTA).rho
    assert rho == pytest.approx(tight, rel=5e-5)
    assert rho != pytest.approx(loose, rel=0.1), "the looser conversion of the papers"


def test_a_small_epsilon_buys_a_small_rho():
    assert 0 < rho_of(1e-7, 1e-9) < 1e-14


def test_delta_alone_buys_some_rho():
    assert rho_of(1e-200, 0.5) == pytest.approx(rho_of(1e-9, 0.5), rel=1e-6)


@pytest.mark.parametrize("epsilon", [10.0**power for power in range(-9, 5)])
@pytest.mark.parametrize("delta", [1e-300, 1e-100, 1e-20, 1e-9, 1e-3, 0.1, 0.5])
def test_extreme_values(epsilon, delta):
    rho = rho_of(epsilon, delta)
    assert delta_of(rho, epsilon) <= delta < delta_of(rho * (1 + 1e-9), epsilon)
    assert rho >= (epsilon / (math.sqrt(epsilon - math.log(delta)) + math.sqrt(-math.log(delta)))) ** 2


@pytest.mark.parametrize("epsilon", [5e-324, 1e-200, 1e200])
@pytest.mark.parametrize("delta", [5e-324, 0.5, 1 - 2**-53])
def test_absurd_values_still_keep_the_promise(epsilon, delta):
    rho = rho_of(epsilon, delta)
    assert 0 <= rho < math.inf
    assert delta_of(rho, epsilon) <= delta


@given(epsilons, deltas)
@settings(deadline=None)
def test_rho_never_breaks_the_promise_and_hardly_falls_short(epsilon, delta):
    rho = rho_of(epsilon, delta)
    assert delta_of(rho, epsilon) <= delta < delta_of(rho * (1 + 1e-9), epsilon)


@given(rhos, deltas)
@settings(deadline=None)
def test_epsilon_never_breaks_the_promise(rho, delta):
    epsilon = epsilon_of(rho, delta)
    assert delta_of(rho, epsilon) <= delta
    assume(epsilon > 1e-9)
    assert rho_of(epsilon, delta) >= rho * (1 - 1e-9)


@given(epsilons, deltas, st.floats(1 + 1e-6, 1e3))
@settings(deadline=None)
def test_rho_increases_with_epsilon_and_with_delta(epsilon, delta, factor):
    rho = rho_of(epsilon, delta)
    assert rho_of(epsilon * factor, delta) >= rho
    assert rho_of(epsilon, min(delta * factor, 0.9)) >= rho


@given(rhos, epsilons, st.floats(1 + 1e-6, 1e3))
@settings(deadline=None)
def test_delta_increases_with_rho_and_decreases_with_epsilon(rho, epsilon, factor):
    assert delta_of(rho * factor, epsilon) >= delta_of(rho, epsilon) >= delta_of(rho, epsilon * factor)
    assert 0 < delta_of(rho, epsilon) <= 1


@given(st.floats(1e-6, 50), st.floats(1e-4, 100))
@settings(deadline=None)
def test_delta_is_a_bound_for_the_gaussian_mechanism(rho, epsilon):
    """The exact delta of a Gaussian mechanism with this rho, by Balle & Wang 2018, Theorem 8."""
    mean = math.sqrt(2 * rho)
    tail = norm.cdf(mean / 2 - epsilon / mean)
    exact = tail - math.exp(epsilon + norm.logcdf(-mean / 2 - epsilon / mean))
    assert delta_of(rho, epsilon) >= exact - 1e-11 * tail


@pytest.mark.parametrize("rho", [1e-4, 0.014270, 0.3, 1.05208, 20.0])
@pytest.mark.parametrize("delta", [1e-12, ADULT_DELTA, 1e-5, 1e-2])
def test_an_independent_accountant_agrees(rho, delta):
    """Its orders are a grid and ours are not, so it may promise a little less, and never more."""
    accountant = RdpAccountant(orders=[1 + 10 ** (step / 50) for step in range(-150, 250)])
    accountant.compose(dp_event.ZCDpEvent(rho))
    epsilon = accountant.get_epsilon(delta)
    assert epsilon_of(rho, delta) <= epsilon * (1 + 1e-12)
    assert epsilon_of(rho, delta) == pytest.approx(epsilon, rel=0.01)


def test_nothing_is_spent_by_nothing():
    assert delta_of(0.0, 1.0) == 0
    assert epsilon_of(0.0, 1e-9) == 0


def test_equal_parts_where_the_quotient_rounds_up():
    """The bug: ten times the float nearest to a tenth of rho exceeds rho."""
    rho, parts = 1.0, 10
    assert Fraction(rho / parts) * parts > 1
    assert sum(map(Fraction, proportional(rho, [1.0] * parts))) <= 1


@given(st.integers(1, 10**12) | st.fractions(min_value=Fraction(1, 10**9), max_value=10**9), rhos)
def test_sigma_is_the_least_float_that_spends_no_more_than_rho(squared, rho):
    sigma = gaussian_sigma(squared, rho)
    below = math.nextafter(sigma, 0)
    assert 2 * Fraction(rho) * Fraction(below) ** 2 < squared <= 2 * Fraction(rho) * Fraction(sigma) ** 2
    assert sigma == pytest.approx(math.sqrt(squared / (2 * rho)))


@given(st.integers(1, 10**6), st.integers(1, 10**6), rhos)
def test_gumbel_scale_is_the_least_float_that_spends_no_more_than_rho(sensitivity, k, rho):
    scale = gumbel_scale(sensitivity, k, rho)
    below = math.nextafter(scale, 0)
    needed = sensitivity**2 * k
    assert 2 * Fraction(rho) * Fraction(below) ** 2 < needed <= 2 * Fraction(rho) * Fraction(scale) ** 2


def test_a_round_of_the_papers():
    assert gumbel_scale(1, 8, 0.01) == pytest.approx(math.sqrt(8 / 0.02))
    assert gumbel_scale(2, 8, 0.01) == pytest.approx(2 * math.sqrt(8 / 0.02))
    assert gaussian_sigma(2 * 8, 0.01) == pytest.approx(math.sqrt(2) * math.sqrt(8 / 0.02))


def test_gumbel_scale_is_not_that_of_the_looser_charge():
    """epsilon²/2 a round, the charge for any pure mechanism, would take twice the noise."""
    assert gumbel_scale(1, 1, 0.5) == 1.0


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf])
def test_epsilon_is_refused(epsilon):
    with pytest.raises(ParameterError, match=r"^epsilon \(.*\) must be a finite number above 0$"):
        Budget(epsilon=epsilon, delta=1e-9)
    with pytest.raises(ParameterError):
        rho_of(epsilon, 1e-9)


def test_the_wording_of_a_refusal():
    with pytest.raises(ParameterError, match=r"^epsilon \(0\) must be a finite number above 0$"):
        Budget(epsilon=0.0, delta=1e-9)


@pytest.mark.parametrize("delta", [0, 1, -1e-9, 1.5, math.nan])
def test_delta_is_refused(delta):
    with pytest.raises(ParameterError, match=r"^delta \(.*\) must be above 0 and below 1$"):
        Budget(epsilon=1.0, delta=delta)
    with pytest.raises(ParameterError):
        epsilon_of(1.0, delta)


@pytest.mark.parametrize("rho", [0, -1, math.nan, math.inf])
def test_rho_is_refused(rho):
    for spend in (
        lambda: proportional(rho, [1.0, 1.0]),
        lambda: gaussian_sigma(1, rho),
        lambda: gumbel_scale(1, 1, rho),
    ):
        with pytest.raises(ParameterError, match=r"^rho \(.*\) must be a finite number above 0$"):
            spend()


def test_counts_below_one_are_refused():
    for wrong in (lambda: gumbel_scale(0, 1, 1.0), lambda: gumbel_scale(1, 0, 1.0)):
        with pytest.raises(ParameterError, match=r" \(0\) must be at least 1$"):
            wrong()
    for squared in (0, -1, Fraction(-1, 3)):
        with pytest.raises(ParameterError, match=r"^squared_sensitivity \(.*\) must be above 0$"):
            gaussian_sigma(squared, 1.0)


def test_warnings():
    assert Budget(epsilon=1.0, delta=1e-9).warnings(48842) == ()
    assert Budget(epsilon=1.0, delta=0.1).warnings(None) == ()
    (only,) = Budget(epsilon=1.0, delta=1e-3).warnings(48842)
    assert only.startswith("delta (0.001) exceeds 1/48842")
    (only,) = Budget(epsilon=21, delta=1e-9).warnings(None)
    assert only.startswith("epsilon (21) exceeds 20")


@given(rhos, st.floats(0, 1))
def test_rest_is_the_largest_float_that_fits(rho, portion):
    part = min(portion * rho, rho)
    left = rest(rho, part)
    assert left >= 0
    assert Fraction(part) + Fraction(left) <= Fraction(rho)
    assert Fraction(part) + Fraction(math.nextafter(left, math.inf)) > Fraction(rho)


def test_rest_where_two_shares_overspend():
    rho, split = 0.1, 0.2
    parts = Fraction(split * rho) + Fraction((1 - split) * rho)
    assert parts > Fraction(rho), "plain products overspend"
    assert Fraction(split * rho) + Fraction(rest(rho, split * rho)) <= Fraction(rho)


@pytest.mark.parametrize(("rho", "part"), [(1.0, 0.0), (1.0, 1.0), (5e-324, 5e-324), (1e300, 1e-300)])
def test_rest_at_the_ends(rho, part):
    exact = Fraction(rho) - Fraction(part)
    assert Fraction(rest(rho, part)) <= exact < Fraction(math.nextafter(rest(rho, part), math.inf))


@pytest.mark.parametrize("part", [-1e-9, math.nextafter(1.0, 2.0), math.nan, math.inf])
def test_a_part_outside_the_whole_is_refused(part):
    with pytest.raises(ParameterError, match=r"^part \(.*\) must be from 0 to rho \(1\)$"):
        rest(1.0, part)
    with pytest.raises(ParameterError, match=r"^rho \(0\) must be a finite number above 0$"):
        rest(0.0, 0.0)


@given(st.fractions(-10, 10) | st.floats(-300, 300).map(lambda power: Fraction(1, 3) * Fraction(10**power)))
def test_rounding_is_to_the_safe_side_and_tight(value):
    below, above = round_down(value), round_up(value)
    assert Fraction(below) <= value <= Fraction(above)
    assert below == above or math.nextafter(below, math.inf) == above
    assert math.copysign(1, round_up(Fraction(0))) == 1


@given(rhos, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_proportional_parts_never_exceed_the_whole(rho, weights):
    parts = proportional(rho, weights)
    assert sum(map(Fraction, parts)) <= Fraction(rho)
    assert parts == pytest.approx([rho * weight / math.fsum(weights) for weight in weights], rel=1e-12)


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, math.inf], [1.0, math.nan]])
def test_weights_must_be_positive(weights):
    with pytest.raises(ParameterError, match="weights"):
        proportional(1.0, weights)
