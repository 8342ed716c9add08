"""Exact noise: the right distribution, the wrong one rejected, the exact paths against slow references."""

import itertools
import math
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import opendp.prelude as dp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from anamorph.curator import noise
from anamorph.curator.noise import (
    EXCLUDED,
    SeededBits,
    SystemBits,
    discrete_gaussian,
    discrete_laplace,
    top_k,
)
from anamorph.errors import ParameterError

ONES = 2**64 - 1
FLOOR = 1e-6  # a test with fresh noise fails by chance once in a million runs


class Script:
    """NOT PRIVATE: the words of a list, then those of a seeded stream."""

    private = False

    def __init__(self, *script):
        self.script, self.rest = list(script), SeededBits(0)

    def words(self, count):
        taken, self.script = self.script[:count], self.script[count:]
        return np.concatenate((np.array(taken, np.uint64), self.rest.words(count - len(taken))))


def p_value(sample, probability):
    """The chi-square p-value of integers, those with an expectation below 10 taken together."""
    observed, size = Counter(np.asarray(sample).tolist()), len(sample)
    support = [x for x in range(min(observed), max(observed) + 1) if probability(x) * size >= 10]
    expected = [probability(x) * size for x in support]
    counts = [observed[x] for x in support]
    rest, expected_rest = size - sum(counts), size - sum(expected)
    if expected_rest >= 10:
        counts, expected = [*counts, rest], [*expected, expected_rest]
    else:
        counts[0], expected[0] = counts[0] + rest, expected[0] + expected_rest
    return stats.chisquare(counts, expected).pvalue


def homogeneity(first, second):
    """The chi-square p-value of two samples having one distribution."""
    columns = Counter(first), Counter(second)
    frequent = [x for x in columns[0] + columns[1] if columns[0][x] + columns[1][x] >= 40]
    table = [[column[x] for x in frequent] for column in columns]
    return stats.chi2_contingency(table).pvalue


def gaussian(sigma):
    weights = {
        x: math.exp(-x * x / (2 * sigma * sigma)) for x in range(-math.ceil(40 * sigma), math.ceil(40 * sigma) + 1)
    }
    total = math.fsum(weights.values())
    return lambda x: weights.get(x, 0.0) / total


def laplace(scale):
    return lambda x: math.tanh(1 / (2 * scale)) * math.exp(-abs(x) / scale)


def exact(digits=80):
    """A decimal context with more digits than any comparison here needs."""
    return localcontext(prec=digits)


def uniform_digits(gamma, words):
    """The first words of the binary expansion of exp(-gamma)."""
    with exact(60 + 20 * words):
        value = int((-(Decimal(gamma.numerator) / gamma.denominator)).exp() * 2 ** (64 * words))
    return [value >> 64 * place & ONES for place in reversed(range(words))]


def noisy(score, word, scale):
    """The noisy score, over the scale, with the centre of the word's interval."""
    with exact(500):
        uniform = Decimal(2 * word + 1) / 2**65
        shift = Decimal(int(score)) / Decimal(scale)
    with exact(80):
        gumbel = -(-(1 - uniform).ln()).ln()
    with exact(500):
        return shift + gumbel


def reference_top_k(scores, k, scale, seed):
    """The slow way: all noisy scores in decimal, sorted."""
    eligible = [i for i, score in enumerate(scores) if score != EXCLUDED]
    words = SeededBits(seed).words(len(eligible))
    values = {i: noisy(scores[i], int(word), scale) for i, word in zip(eligible, words, strict=True)}
    return sorted(eligible, key=values.__getitem__, reverse=True)[:k]


def peeling(scores, k, scale):
    """The probability of each ordered outcome: the exponential mechanism applied k times."""
    weights = [math.exp(score / scale) for score in scores]
    result = {}
    for outcome in itertools.permutations(range(len(scores)), k):
        left, result[outcome] = math.fsum(weights), 1.0
        for chosen in outcome:
            result[outcome] *= weights[chosen] / left
            left -= weights[chosen]
    return result


def outcome_p_value(outcomes, probabilities):
    names = list(probabilities)
    observed = Counter(outcomes)
    return stats.chisquare([observed[n] for n in names], [probabilities[n] * len(outcomes) for n in names]).pvalue


# Distributions


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 3.7, 20.0])
def test_discrete_gaussian_has_its_distribution_and_no_other(sigma):
    sample = discrete_gaussian(200_000, sigma, SeededBits(1))
    assert p_value(sample, gaussian(sigma)) > FLOOR
    assert p_value(sample, gaussian(sigma * 1.05)) < FLOOR
    assert p_value(sample, gaussian(sigma / 1.05)) < FLOOR
    assert p_value(sample, laplace(sigma / math.sqrt(2))) < FLOOR


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.99, 2.5, 40.0])
def test_discrete_laplace_has_its_distribution_and_no_other(scale):
    sample = discrete_laplace(200_000, scale, SeededBits(2))
    assert p_value(sample, laplace(scale)) > FLOOR
    assert p_value(sample, laplace(scale * 1.05)) < FLOOR
    assert p_value(sample, laplace(scale / 1.05)) < FLOOR


@pytest.mark.parametrize("sigma", [5e6, 1e12])
def test_large_sigma_keeps_its_shape_and_its_last_digits(sigma):
    sample = discrete_gaussian(100_000, sigma, SeededBits(3))
    assert stats.kstest(sample / sigma, "norm").pvalue > FLOOR
    assert stats.kstest(sample / sigma / 1.05, "norm").pvalue < FLOOR
    for modulus in (2, 3, 10, 64):
        assert stats.chisquare(np.bincount(sample % modulus, minlength=modulus)).pvalue > FLOOR


def test_large_laplace_keeps_its_shape_and_its_last_digits():
    sample = discrete_laplace(100_000, 1e12 + 0.125, SeededBits(3))
    assert stats.kstest(sample / 1e12, "laplace").pvalue > FLOOR
    assert stats.kstest(sample / 1.05e12, "laplace").pvalue < FLOOR
    assert stats.chisquare(np.bincount(sample % 10, minlength=10)).pvalue > FLOOR


@pytest.mark.parametrize("sigma", [1e-100, 1e-9, 0.02])
def test_a_tiny_sigma_or_scale_gives_zeros(sigma):
    assert not discrete_gaussian(1000, sigma, SeededBits(4)).any()
    assert not discrete_laplace(1000, sigma, SeededBits(4)).any()


def test_discrete_gaussian_agrees_with_opendp():
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i32")), dp.l2_distance(T="f64")
    theirs = dp.m.make_gaussian(*space, scale=3.0)([0] * 20_000)
    assert homogeneity(theirs, discrete_gaussian(100_000, 3.0, SystemBits()).tolist()) > FLOOR
    assert homogeneity(theirs, discrete_gaussian(100_000, 3.3, SystemBits()).tolist()) < FLOOR


SCORES, SCALE = [0, 3, 5, 9], 2.5


def test_top_k_is_peeling_and_nothing_else():
    bits, scores = SeededBits(5), np.array(SCORES)
    outcomes = [tuple(top_k([scores], 2, SCALE, bits).tolist()) for _ in range(15_000)]
    assert outcome_p_value(outcomes, peeling(SCORES, 2, SCALE)) > FLOOR
    assert outcome_p_value(outcomes, peeling(SCORES, 2, SCALE * 1.1)) < FLOOR
    assert outcome_p_value(outcomes, peeling(SCORES, 2, SCALE / 1.1)) < FLOOR


@pytest.mark.parametrize("family", ["laplace", "exponential", "normal"])
def test_the_statistic_rejects_other_noise_than_gumbel(family):
    generator = np.random.default_rng(0)
    values = np.array(SCORES) + getattr(generator, family)(size=(15_000, 4), scale=SCALE)
    outcomes = [tuple(row) for row in np.argsort(-values)[:, :2].tolist()]
    assert outcome_p_value(outcomes, peeling(SCORES, 2, SCALE)) < FLOOR


def test_top_k_agrees_with_opendp():
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i32")), dp.linf_distance(T="i32")
    select = dp.m.make_noisy_top_k(*space, dp.zero_concentrated_divergence(), k=2, scale=SCALE)
    theirs = [tuple(select(SCORES)) for _ in range(15_000)]
    assert outcome_p_value(theirs, peeling(SCORES, 2, SCALE)) > FLOOR
    ours = [tuple(top_k([np.array(SCORES)], 2, SCALE, SystemBits()).tolist()) for _ in range(15_000)]
    assert homogeneity(theirs, ours) > FLOOR


# The exact paths


@pytest.fixture
def wide(monkeypatch):
    """Bounds far wider than the proved ones, thus still valid: many of the items are settled exactly."""
    monkeypatch.setattr(noise, "_TOLERANCE", 0.05)
    monkeypatch.setattr(noise, "_SMALL", 2**60)


@pytest.mark.usefixtures("wide")
def test_the_distributions_stay_when_much_is_settled_exactly():
    assert p_value(discrete_gaussian(5000, 1.3, SeededBits(6)), gaussian(1.3)) > FLOOR
    assert p_value(discrete_laplace(5000, 2.5, SeededBits(6)), laplace(2.5)) > FLOOR
    bits, scores = SeededBits(7), np.array(SCORES)
    outcomes = [tuple(top_k([scores], 2, SCALE, bits).tolist()) for _ in range(3000)]
    assert outcome_p_value(outcomes, peeling(SCORES, 2, SCALE)) > FLOOR


def test_the_fast_and_the_exact_paths_decide_alike(monkeypatch):
    gammas = np.random.default_rng(0).exponential(size=2000)
    rationals = [Fraction(gamma) for gamma in gammas]
    scores = np.random.default_rng(0).integers(0, 50, 300)

    def draws():
        yield noise._bernoulli(gammas, rationals.__getitem__, SeededBits(8))
        for ratio in (Fraction(1), Fraction(1, 3), Fraction(199, 100)):
            yield noise._quotients(2000, ratio, SeededBits(9))
        yield top_k([scores], 300, 7.0, SeededBits(10))
        for scale in (0.4, 1.3, 41.7):
            yield discrete_gaussian(200, scale, SeededBits(11))
            yield discrete_laplace(200, scale, SeededBits(11))

    fast = list(draws())
    monkeypatch.setattr(noise, "_TOLERANCE", 4.0)
    assert all(np.array_equal(a, b) for a, b in zip(fast, draws(), strict=True))


gammas = st.fractions(min_value=Fraction(1, 10**6), max_value=40, max_denominator=10**12)


@given(gammas, st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_bernoulli_decides_on_the_last_bit(gamma, words, below):
    """W agrees with exp(-gamma) in all the words of the script but the last, which is one less or more."""
    *leading, last = uniform_digits(gamma, words + 1)
    script = Script(*leading, (last - 1 if below else last + 1) % 2**64)
    expected = below if 0 < last < ONES else None
    found = noise._bernoulli(np.array([float(gamma)]), lambda _: gamma, script)
    assert expected in (None, bool(found[0]))
    assert script.script == []


@given(
    st.fractions(Fraction(1, 50), Fraction(199, 100), max_denominator=10**9),
    st.integers(1, 30),
    st.booleans(),
)
@settings(deadline=None)
def test_quotients_decide_on_the_last_bit(ratio, quotient, below):
    first, last = uniform_digits(quotient / ratio, 2)
    script = Script(first, (last - 1 if below else last + 1) % 2**64)
    expected = (quotient if below else quotient - 1) if 0 < last < ONES else None
    assert expected in (None, noise._quotients(1, ratio, script)[0])


@given(st.lists(st.sampled_from([0, 1, 2, 2**31, 2**32 - 1, 2**32, ONES]), min_size=2, max_size=5))
@settings(deadline=None)
@example([0, 0, 0, 1])
@example([0, ONES])
def test_quotients_of_extreme_words(words):
    """The words from the script decide, whatever follows: floor is the same at both ends of the interval."""
    value, size = int.from_bytes(b"".join(word.to_bytes(8) for word in words)), 64 * len(words)
    ratio = Fraction(3, 2)
    with exact(200):
        low, high = (
            math.floor(-(Decimal(end) / 2**size).ln() * 3 / 2) if end else math.inf for end in (value + 1, value)
        )
    found = noise._quotients(1, ratio, Script(*words))[0]
    assert max(low, 0) <= found <= high


def test_a_certain_bit_is_one_even_where_the_word_says_nothing():
    script = Script(ONES, ONES, ONES, 5)
    assert noise._bernoulli(np.zeros(1), lambda _: Fraction(0), script)[0]
    assert script.script == []


@pytest.mark.parametrize("first", [0, ONES])
def test_draws_from_constant_words(first):
    for draw in (discrete_gaussian, discrete_laplace):
        sample = draw(50, 3.5, Script(*[first] * 200))
        assert sample.size == 50
        assert np.abs(sample).max() < 1000


def test_uniform_below_rejects_the_incomplete_multiple():
    assert noise._uniform_below(3, 3, Script(ONES, ONES - 1, 4)).tolist() == [2, 1]
    assert noise._uniform_below(8, 2, Script(ONES, 9)).tolist() == [7, 1]
    assert noise._uniform_below(1, 2, Script(ONES, 9)).tolist() == [0, 0]
    drawn = noise._uniform_below(10**12 + 1, 50_000, SeededBits(0))
    assert stats.kstest(drawn / (10**12 + 1), "uniform").pvalue > FLOOR


@given(
    st.lists(st.integers(-(2**62) + 1, 2**62) | st.integers(-5, 5) | st.just(EXCLUDED), min_size=1, max_size=30),
    st.floats(-100, 100).map(lambda power: 10**power) | st.floats(0.1, 10),
    st.data(),
)
@settings(deadline=None)
def test_top_k_equals_the_slow_reference(scores, scale, data):
    eligible = sum(score != EXCLUDED for score in scores)
    if eligible:
        k = data.draw(st.integers(1, eligible))
        assert top_k([np.array(scores)], k, scale, SeededBits(11)).tolist() == reference_top_k(scores, k, scale, 11)


def test_top_k_of_many_equals_the_slow_reference():
    scores = np.random.default_rng(0).integers(0, 30, 3000)
    for seed in range(3):
        assert top_k([scores], 20, 4.0, SeededBits(seed)).tolist() == reference_top_k(scores, 20, 4.0, seed)


EXTREMES = [
    0,
    1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**40 + 1,
    2**50,
    2**50 + 1,
    2**63,
    2**64 - 2**44,
    2**64 - 2**44 + 1,
    ONES - 1,
    ONES,
]


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(EXTREMES)), min_size=2, max_size=12), st.data())
@settings(deadline=None, max_examples=50)
def test_ties_and_extreme_words_are_ordered_by_fresh_bits(pairs, data):
    """Candidates with equal or extreme words are ordered by the bits that each has drawn in the end."""
    k, scale = data.draw(st.integers(1, len(pairs))), data.draw(st.sampled_from([0.5, 3.0, 1e-50]))
    entrants = np.array([(i, score, word) for i, (score, word) in enumerate(pairs)], noise._ENTRANT)
    kept = noise._leaders(entrants, k, scale)
    ordered = noise._ordered(kept, k, scale, SeededBits(12))
    bounds = []
    for candidate in ordered:
        variate = candidate.variate
        assert variate.leading >> variate.size - 64 == ONES - pairs[candidate.position][1]
        with exact(800):
            shift = Decimal(pairs[candidate.position][0]) / Decimal(scale)
        with exact(200):
            ends = [Decimal(variate.leading + end) / 2**variate.size for end in (0, 1)]
            low, high = (-(-end.ln()).ln() if 0 < end < 1 else Decimal("Infinity") for end in ends)
            low = low if ends[0] else Decimal("-Infinity")
        with exact(800):
            bounds.append((shift + low, shift + high))
    assert all(first[0] >= second[1] for first, second in itertools.pairwise(bounds))
    assert {int(position) for position in kept["position"]} >= set(possible_positions(pairs, k, scale))


def possible_positions(pairs, k, scale):
    """The positions whose noisy score may, by the bounds of the word alone, be among the k largest."""
    with exact(300):
        lows, highs = [], []
        for score, word in pairs:
            ends = [-(1 - Decimal(word + end) / 2**64).ln() if word + end < 2**64 else None for end in (0, 1)]
            shift = Decimal(score) / Decimal(scale)
            highs.append(shift - ends[0].ln() if word else Decimal("Infinity"))
            lows.append(shift - ends[1].ln() if ends[1] is not None else Decimal("-Infinity"))
    threshold = sorted(lows, reverse=True)[k - 1]
    return [i for i, high in enumerate(highs) if high >= threshold]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("start", [2**33, 2**40, 2**63, 2**64 - 2**45])
def test_neighbouring_words_are_not_ruled_out(k, start):
    pairs = [(0, start + step) for step in range(4)]
    entrants = np.array([(i, score, word) for i, (score, word) in enumerate(pairs)], noise._ENTRANT)
    assert noise._leaders(entrants, k, 1.0)["position"].tolist() == [0, 1, 2, 3]
    assert possible_positions(pairs, k, 1.0) == list(range(k + 1))


def test_equal_words_and_scores_give_every_order():
    first = Counter(
        int(top_k([np.zeros(3, np.int64)], 1, 1.0, Shuffled(seed, [77 << 50] * 3))[0]) for seed in range(600)
    )
    assert stats.chisquare([first[i] for i in range(3)]).pvalue > FLOOR


class Shuffled(Script):
    """The words of a list, then those of a stream with a seed of its own."""

    def __init__(self, seed, script):
        super().__init__(*script)
        self.rest = SeededBits(seed)


def test_numpy_is_better_than_what_is_taken_on_trust():
    words = np.concatenate((SeededBits(0).words(300), SeededBits(1).words(100) >> np.uint64(20)))
    shares = np.clip(words, 2**32, 2**64 - 2**44) * 2.0**-64
    with exact(50):
        for share, log, log1p in zip(shares.tolist(), np.log(shares), np.log1p(-shares), strict=True):
            for found, true in ((log, Decimal(share).ln()), (log1p, (1 - Decimal(share)).ln())):
                assert abs(Decimal(float(found)) / true - 1) < Decimal(2) ** -48


# Behaviour


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_chunks_and_pieces_change_nothing(piece, monkeypatch):
    scores = np.random.default_rng(1).integers(-20, 20, 500)
    scores[::7] = EXCLUDED
    whole = top_k([scores], 5, 3.0, SeededBits(13))
    monkeypatch.setattr(noise, "PIECE", piece)
    for cuts in ([], [1], [250], [10, 10, 499]):
        assert np.array_equal(top_k(iter(np.split(scores, cuts)), 5, 3.0, SeededBits(13)), whole)


def test_excluded_candidates_are_never_selected():
    scores = np.array([EXCLUDED, 5, EXCLUDED, -(10**12), 7, EXCLUDED])
    for seed in range(50):
        assert sorted(top_k([scores], 3, 100.0, SeededBits(seed)).tolist()) == [1, 3, 4]


def test_exp_of_the_scores_would_overflow_and_the_maximum_is_found():
    scores = np.array([-(10**15), 0, 10**15, 10**15 - 1, 5])
    assert top_k([scores], 3, 1e-9, SystemBits()).tolist() == [2, 3, 4]
    assert top_k([np.array([1 - 2**62, 2**62])], 2, 1e-100, SystemBits()).tolist() == [1, 0]


def test_scores_beyond_the_range_are_clamped_without_a_word():
    scores = np.array([np.iinfo(np.int64).min + 1, 0, np.iinfo(np.int64).max])
    assert top_k([scores], 3, 1.0, SystemBits()).tolist() == [2, 1, 0]


def test_differences_below_the_resolution_of_float_are_seen():
    scores = np.array([2**60, 2**60 + 1, 2**60 + 2])
    assert top_k([scores], 3, 1e-3, SystemBits()).tolist() == [2, 1, 0]


def test_few_candidates_are_left_to_the_slow_part():
    """Also far from zero, where a float does not tell one score from the next, and below a few giants."""
    scores = np.random.default_rng(2).integers(0, 100, 20_000) + 2**61
    scores[:3] = 2**62
    entrants = next(noise._entrants([scores], noise.PIECE, SeededBits(16)))
    assert 10 <= noise._leaders(entrants, 10, 5.0).size <= 12


def test_two_calls_give_different_noise():
    for bits in (SystemBits(), SeededBits(14)):
        assert not np.array_equal(discrete_gaussian(50, 100.0, bits), discrete_gaussian(50, 100.0, bits))
        assert not np.array_equal(discrete_laplace(50, 100.0, bits), discrete_laplace(50, 100.0, bits))
        flat = [np.zeros(1000, np.int64)]
        assert not np.array_equal(top_k(flat, 10, 1.0, bits), top_k(flat, 10, 1.0, bits))


def test_a_seed_reproduces_and_another_does_not():
    first, again, other = (discrete_gaussian(50, 100.0, SeededBits(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    stream = SeededBits(1)
    joined = np.concatenate((stream.words(3), stream.words(5)))
    assert np.array_equal(joined, SeededBits(1).words(8))


def test_only_the_system_is_private():
    assert SystemBits.private
    assert not SeededBits.private
    words = SystemBits().words(1000)
    assert words.dtype == np.uint64
    assert len(set(words.tolist())) == 1000
    assert SystemBits().words(0).size == 0


def test_no_floating_point_exception_is_raised():
    with np.errstate(all="raise"):
        for sigma in (1e-100, 0.5, 2.0**40):
            assert discrete_gaussian(1000, sigma, SeededBits(15)).dtype == np.int64
            assert discrete_laplace(1000, sigma, SeededBits(15)).dtype == np.int64
        for scale in (1e-100, 1.0, 1e100):
            top_k([np.array([-(2**61), 0, 2**61, EXCLUDED])], 2, scale, SeededBits(15))


def test_sizes():
    for draw in (discrete_gaussian, discrete_laplace):
        assert draw(0, 1.0, SystemBits()).shape == (0,)
        assert draw(1, 1.0, SystemBits()).shape == (1,)
        assert draw(noise.PIECE + 1, 1.0, SystemBits()).shape == (noise.PIECE + 1,)
        with pytest.raises(ParameterError, match=r"^size \(-1\) must be at least 0$"):
            draw(-1, 1.0, SystemBits())


@pytest.mark.parametrize("wrong", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e-101, 1e101])
def test_scales_outside_the_proved_range_are_refused(wrong):
    for name, call in (
        ("sigma", lambda: discrete_gaussian(1, wrong, SystemBits())),
        ("scale", lambda: discrete_laplace(1, wrong, SystemBits())),
        ("scale", lambda: top_k([np.zeros(2, np.int64)], 1, wrong, SystemBits())),
    ):
        with pytest.raises(ParameterError, match=rf"^{name} \(.*\) must be a number between 1e-100 and "):
            call()


def test_k_is_refused():
    scores = [np.array([1, EXCLUDED, 2])]
    for k in (0, -1):
        with pytest.raises(ParameterError, match=rf"^k \({k}\) must be at least 1$"):
            top_k(scores, k, 1.0, SystemBits())
    with pytest.raises(ParameterError, match=r"^k \(3\) must be at most 2, the number of eligible candidates$"):
        top_k(scores, 3, 1.0, SystemBits())
    with pytest.raises(ParameterError, match=r"^k \(1\) must be at most 0, "):
        top_k([], 1, 1.0, SystemBits())


def test_scores_that_are_not_integers_are_refused():
    for chunk in (np.zeros(3), np.zeros(3, np.int32), np.zeros((3, 1), np.int64)):
        with pytest.raises(ParameterError, match=r"must be chunks of int64, 1-d$"):
            top_k([chunk], 1, 1.0, SystemBits())
