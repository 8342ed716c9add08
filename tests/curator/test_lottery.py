"""Selection by lottery: the law of peeling, other laws rejected, the exact paths against slow references."""

import itertools
import math
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from anamorph.curator import lottery as module
from anamorph.curator import noise
from anamorph.curator.lottery import level, lottery
from anamorph.curator.noise import SeededBits, SystemBits, top_k
from anamorph.errors import ParameterError

ONES = 2**64 - 1
FLOOR = 1e-6  # a test with fresh noise fails by chance once in a million runs
SCORES, SCALE = [0, 2, 3, 6], 2.5
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Script:
    """NOT PRIVATE: the words of a list, then those of a seeded stream."""

    private = False

    def __init__(self, *script):
        self.script, self.rest = list(script), SeededBits(0)

    def words(self, count):
        taken, self.script = self.script[:count], self.script[count:]
        return np.concatenate((np.array(taken, np.uint64), self.rest.words(count - len(taken))))


class Tickets:
    """Strata that are lists of tickets, each the id of its candidate, or None where it is void."""

    def __init__(self, scores, strata, scale, loose=()):
        self.scores, self.strata, self.scale, self.loose = list(scores), strata, scale, loose
        owners = [[owner for owner in stratum if owner is not None] for stratum in strata]
        highest = [max((scores[owner] for owner in held), default=min(scores)) for held in owners]
        slack = [*loose, *[0] * (len(strata) - len(loose))]
        tight = level(np.array(highest, np.int64), scale).tolist()
        self.levels = [least + more for least, more in zip(tight, slack, strict=True)]
        self.weights = [len(stratum) for stratum in strata]
        self.calls = []

    def find(self, strata, ranks):
        self.calls.append(len(ranks))
        owners = [self.strata[stratum][rank] for stratum, rank in zip(strata.tolist(), ranks, strict=True)]
        scores = [MOST if owner is None else self.scores[owner] for owner in owners]  # of a void one, anything
        ids = np.array([-1 if owner is None else owner for owner in owners])
        return ids, np.array(scores), ids >= 0

    def once(self, k, bits, patience=None):
        """What one lottery returns."""
        return tuple(lottery(self.levels, self.weights, k, self.scale, self.find, bits, patience).tolist())

    def without(self, chosen):
        """The tickets of all others, with levels and weights of their own."""
        strata = [[owner for owner in stratum if owner not in chosen] for stratum in self.strata]
        left = Tickets(self.scores, strata, self.scale, self.loose)
        left.calls = self.calls
        return left

    def draw(self, k, bits, patience=None):
        """The k first: one lottery after the other, each without those chosen before."""
        chosen, left = (), self
        while len(chosen) < k:
            chosen += left.once(k - len(chosen), bits, patience)
            left = self.without(chosen)
        return chosen

    def measure(self):
        """How many tickets each candidate has."""
        held = Counter(owner for stratum in self.strata for owner in stratum)
        return [held[candidate] for candidate in range(len(self.scores))]


def peeling(scores, k, scale, measure):
    """The probability of each ordered outcome: the exponential mechanism with a base measure, applied k times."""
    weights = [times * math.exp(score / scale) for score, times in zip(scores, measure, strict=True)]
    result = {}
    for outcome in itertools.permutations(range(len(scores)), k):
        left, result[outcome] = math.fsum(weights), 1.0
        for chosen in outcome:
            result[outcome] *= weights[chosen] / left
            left -= weights[chosen]
    return result


def p_value(outcomes, probabilities):
    """The chi-square p-value of outcomes."""
    observed = Counter(outcomes)
    expected = [probability * len(outcomes) for probability in probabilities.values()]
    assert min(expected) > 5
    assert observed.keys() <= probabilities.keys()
    return stats.chisquare([observed[name] for name in probabilities], expected).pvalue


def exact(digits=80):
    """A decimal context with more digits than any comparison here needs."""
    return localcontext(prec=digits)


# Distributions

SINGLE = [[0], [1], [2], [3]]
JOINT = [[0, 1, 2, 3]]
SEVERAL = [[0, 0, 0, 1, 2], [3], [0, 0, 1], [2, 3, 2], [1]]
VOID = [[None, 0, 0], [None, None, 1, 3], [None] * 5, [2, 0, None], []]


@pytest.mark.parametrize(
    ("strata", "loose"),
    [
        (SINGLE, []),
        (SINGLE, [3, 0, 6, 1]),
        (JOINT, []),
        (JOINT, [3]),
        (SEVERAL, []),
        (SEVERAL, [4, 0, 3, 0, 8]),
        (VOID, []),
        (VOID, [0, 2, 3, 1]),
    ],
)
def test_a_lottery_is_peeling_and_nothing_else(strata, loose):
    tickets, bits = Tickets(SCORES, strata, SCALE, loose), SeededBits(1)
    outcomes, measure = [tickets.draw(2, bits) for _ in range(2500)], tickets.measure()
    assert p_value(outcomes, peeling(SCORES, 2, SCALE, measure)) > FLOOR
    assert p_value(outcomes, peeling(SCORES, 2, SCALE * 1.3, measure)) < FLOOR
    assert p_value(outcomes, peeling(SCORES, 2, SCALE / 1.3, measure)) < FLOOR
    if len(set(measure)) > 1:
        assert p_value(outcomes, peeling(SCORES, 2, SCALE, [1] * 4)) < FLOOR
    first = peeling(SCORES, 1, SCALE, measure)
    assert p_value([outcome[:1] for outcome in outcomes], first) > FLOOR


def until_a_repeat(scores, k, scale, measure):
    """The probability of what one lottery returns: winners are independent, and the second win of one is the end."""
    weights = [times * math.exp(score / scale) for score, times in zip(scores, measure, strict=True)]
    shares, result = [weight / math.fsum(weights) for weight in weights], {}
    for size in range(1, k + 1):
        for outcome in itertools.permutations(range(len(scores)), size):
            again = math.fsum(shares[chosen] for chosen in outcome) if size < k else 1.0
            result[outcome] = math.prod(shares[chosen] for chosen in outcome) * again
    return result


@pytest.mark.parametrize("strata", [SINGLE, SEVERAL, VOID])
def test_a_lottery_ends_when_one_wins_again_and_returns_what_it_had(strata):
    tickets, bits = Tickets(SCORES, strata, SCALE), SeededBits(18)
    outcomes, law = [tickets.once(3, bits) for _ in range(3000)], until_a_repeat(SCORES, 3, SCALE, tickets.measure())
    assert math.isclose(math.fsum(law.values()), 1)
    few = {outcome: share for outcome, share in law.items() if share * 3000 > 6}
    rest = {"rare": 1 - math.fsum(few.values())} if len(few) < len(law) else {}
    assert p_value([outcome if outcome in few else "rare" for outcome in outcomes], few | rest) > FLOOR
    assert {len(outcome) for outcome in outcomes} == {1, 2, 3}


def test_a_lottery_for_one_never_ends_early():
    tickets = Tickets([10**6, 0], [[0] * 9, [1]], 1.0)
    assert {tickets.once(1, SeededBits(seed)) for seed in range(9)} == {(0,)}
    assert {tickets.once(2, SeededBits(seed)) for seed in range(9)} == {(0,)}
    assert {tickets.draw(2, SeededBits(seed)) for seed in range(9)} == {(0, 1)}


@pytest.mark.parametrize("patience", [1, 30])
def test_a_lottery_ends_when_its_patience_does_and_the_next_goes_on(patience, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 1)
    tickets, bits = Tickets(SCORES, VOID, SCALE, [1, 2]), SeededBits(19)
    few = [tickets.once(2, bits, patience) for _ in range(300)]
    assert {0, 1, 2} == set(map(len, few)) if patience == 1 else {1, 2} <= set(map(len, few))
    tickets.calls.clear()
    outcomes = [tickets.draw(2, bits, patience) for _ in range(2000)]
    assert max(tickets.calls) < 5 + 2 * patience
    assert p_value(outcomes, peeling(SCORES, 2, SCALE, tickets.measure())) > FLOOR


def test_nobody_is_waited_for_longer_than_patience_allows():
    nothing = Tickets([0], [[None] * 9, [0]], 1.0, [200])
    assert nothing.once(1, SeededBits(20), 10_000) == ()
    assert 10_000 <= sum(nothing.calls) < 10_000 + module.LARGEST_BATCH
    assert nothing.once(1, SeededBits(20), 0) == ()


@pytest.mark.parametrize("smallest", [2, 5])
@pytest.mark.parametrize("lift", [0, 3])
def test_batches_and_raised_levels_change_nothing(smallest, lift, monkeypatch):
    """In small batches nearly every choice is in one of its own; with a small lift nearly all levels are raised."""
    monkeypatch.setattr(module, "BATCH", smallest)
    monkeypatch.setattr(module, "LARGEST_BATCH", smallest)
    monkeypatch.setattr(module, "LIFT", lift)
    tickets, bits = Tickets(SCORES, VOID, SCALE, [1, 2]), SeededBits(2)
    assert module._Urn(tickets.levels, tickets.weights).raised.tolist() != tickets.levels
    outcomes = [tickets.draw(2, bits) for _ in range(600)]
    assert p_value(outcomes, peeling(SCORES, 2, SCALE, tickets.measure())) > FLOOR
    assert set(tickets.calls) == {smallest, smallest + 2, smallest + 4}


WINS = module._wins
WRONG = {
    "the levels are forgotten": lambda levels, *rest: WINS([max(levels)] * len(levels), *rest),
    "the levels are too low": lambda levels, *rest: WINS([height - 1 for height in levels], *rest),
    "another scale": lambda levels, scores, scale, bits: WINS(levels, scores, 1.2 * scale, bits),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_statistic_rejects_a_wrong_chance_to_win(wrong, monkeypatch):
    tickets, bits = Tickets(SCORES, SINGLE, SCALE), SeededBits(3)
    monkeypatch.setattr(module, "_wins", WRONG[wrong])
    outcomes = [tickets.draw(2, bits) for _ in range(2500)]
    assert p_value(outcomes, peeling(SCORES, 2, SCALE, [1] * 4)) < FLOOR


def test_a_lottery_agrees_with_top_k():
    """One ticket for each candidate: the same distribution, of all ordered triples."""
    scores = [-2, 0, 1, 1, 4]
    tickets = Tickets(scores, [[4, 2], [None, 3, 0], [1]], SCALE, [1])
    ours = Counter(tickets.draw(3, SystemBits()) for _ in range(3000))
    theirs = Counter(tuple(top_k([np.array(scores)], 3, SCALE, SystemBits()).tolist()) for _ in range(3000))
    frequent = [outcome for outcome in ours + theirs if ours[outcome] + theirs[outcome] >= 40]
    table = [[counts[outcome] for outcome in frequent] for counts in (ours, theirs)]
    assert stats.chi2_contingency(table).pvalue > FLOOR


@pytest.mark.parametrize("power", [200, 2000])
def test_huge_numbers_of_tickets(power):
    """Tickets that weigh 2^-power and are 2^power times as many: no level is raised to where they hide the others."""
    scale = 1000.0
    scores = [-round(power * math.log(2) * scale), 0, -700]
    weights = [2**power, 3, 3]

    def find(strata, ranks):
        halves = [2 * (rank >> power - 1) if stratum == 0 else 0 for stratum, rank in zip(strata, ranks, strict=True)]
        return strata + 3 * np.array(halves, np.int64), np.array(scores)[strata], np.ones(len(ranks), np.bool_)

    bits, levels = SeededBits(4), level(np.array(scores), scale)
    found = [int(lottery(levels, weights, 1, scale, find, bits)[0]) for _ in range(2000)]
    shares = np.array([0.5, 3, 3 * math.exp(-0.7), 0.5])
    observed = [found.count(candidate) for candidate in (0, 1, 2, 6)]
    assert stats.chisquare(observed, 2000 * shares / shares.sum()).pvalue > FLOOR
    assert stats.chisquare(observed, np.array([500, 500, 500, 500])).pvalue < FLOOR


def test_levels_that_differ_by_thousands():
    """The tickets that count are among others that weigh nothing, far below, and void ones."""
    strata, loose = [*SINGLE, [4] * 9, [4] * 5, [None]], [0, 0, 0, 0, 5000, 40_000, 57_707]
    tickets, bits = Tickets([*SCORES, -(10**5)], strata, SCALE, loose), SeededBits(5)
    assert np.diff(sorted(tickets.levels)).max() > 10_000
    outcomes = [tickets.draw(2, bits) for _ in range(1000)]
    assert p_value(outcomes, peeling(SCORES, 2, SCALE, [1] * 4)) > FLOOR


# The tickets in play


@given(
    st.lists(st.integers(LEAST, MOST) | st.integers(-9, 9), min_size=1, max_size=12, unique=True),
    st.floats(-100, -3).map(lambda power: 10**power),
    st.data(),
)
@settings(deadline=None, max_examples=25)
def test_far_apart_scores_come_in_their_order(scores, scale, data):
    """Gaps of a thousand scales: the order is certain, whatever the strata, and if the levels are a little loose."""
    owners = [*range(len(scores)), *data.draw(st.lists(st.none() | st.sampled_from(range(len(scores))), max_size=30))]
    strata = [[] for _ in range(data.draw(st.integers(1, 6)))]
    for owner in data.draw(st.permutations(owners)):
        data.draw(st.sampled_from(strata)).append(owner)
    loose = data.draw(st.lists(st.integers(0, 3), max_size=len(strata)))
    tickets = Tickets(scores, strata, scale, loose)
    k = data.draw(st.integers(1, len(scores)))
    expected = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:k]
    assert tickets.draw(k, SeededBits(6)) == tuple(expected)
    inner = [min(max(score, 1 - 2**62), 2**62) for score in scores]
    if inner == scores:
        assert top_k([np.array(scores)], k, scale, SeededBits(6)).tolist() == expected


def test_a_candidate_far_above_is_not_waited_upon():
    """It wins nearly every draw, with 300 tickets, until they are taken out."""
    tickets = Tickets([10**9, 7, 0], [[0] * 300 + [1], [2]], 1e-3, [4, 2])
    assert tickets.draw(3, SeededBits(7)) == (0, 1, 2)
    assert len(tickets.calls) < 20


def test_tickets_are_drawn_by_their_weight():
    urn = module._Urn([0, -2, 3, 0, 7], [3, 4, 1, 1, 0])
    assert urn.raised.tolist()[:4] == [0, -2, 3, 0]
    strata, ranks = urn.draw(20_000, SeededBits(9))
    drawn = Counter(zip(strata.tolist(), ranks, strict=True))
    weights = {(0, 0): 4, (0, 1): 4, (0, 2): 4, (3, 0): 4, (2, 0): 32} | {(1, rank): 1 for rank in range(4)}
    expected = [weight * 20_000 / sum(weights.values()) for weight in weights.values()]
    assert drawn.keys() == weights.keys()
    assert stats.chisquare([drawn[ticket] for ticket in weights], expected).pvalue > FLOOR


def test_raised_tickets_are_drawn_by_the_level_they_were_raised_to(monkeypatch):
    """A stratum as light as 2^-20 of the heaviest is drawn as if it weighed an eighth of it or more."""
    monkeypatch.setattr(module, "LIFT", 3)
    urn = module._Urn([20, 0], [1, 2])
    assert urn.raised.tolist() == [20, 16]
    strata, ranks = urn.draw(9000, SeededBits(9))
    drawn = Counter(zip(strata.tolist(), ranks, strict=True))
    assert stats.chisquare([drawn[0, 0], drawn[1, 0], drawn[1, 1]], [8000, 500, 500]).pvalue > FLOOR


def test_light_strata_are_raised_and_the_integers_stay_small():
    urn = module._Urn([0, -5000, -5000, 40, -(10**30)], [2**300, 2**10, 1, 1, 2**600])
    asked = []

    class Counted(SeededBits):
        def words(self, count):
            asked.append(count)
            return super().words(count)

    strata, _ = urn.draw(1000, Counted(10))
    assert max(asked) <= 1000 * -(-(600 + module.LIFT + 8) // 64)
    assert set(strata.tolist()) == {0}
    least = [301 - module.LIFT - length for length in (301, 11, 1, 1, 601)]
    assert urn.raised.tolist() == [0, *least[1:]]


def test_uniform_integers_of_any_size():
    assert module._uniform(1, 3, SeededBits(11)) == [0, 0, 0]
    assert module._uniform(3, 2, Script(ONES, 1 << 62, 2 << 62)) == [1, 2]
    assert module._uniform(2**64, 2, Script(ONES, 5)) == [ONES, 5]
    assert module._uniform(2**64 + 1, 1, Script(0, 1 << 63, ONES, ONES, 0, 0)) == [2**64]
    assert module._uniform(2**64 + 1, 1, Script(1 << 63, 1 << 63, 1 << 63, 0)) == [1]
    for bound in (10, 2**64 - 1, 3**50, 2**200):
        drawn = module._uniform(bound, 5000, SeededBits(12))
        assert 0 <= min(drawn) <= max(drawn) < bound
        assert stats.chisquare(np.bincount([10 * number // bound for number in drawn])).pvalue > FLOOR
        assert bound % 10 or stats.chisquare(np.bincount([number % 10 for number in drawn])).pvalue > FLOOR


# Levels

scales = st.floats(-100, 100).map(lambda power: 10**power) | st.floats(0.1, 1e6)


def least_level(bound, scale):
    """The slow way."""
    with exact(400):
        return math.ceil(Decimal(bound) / Decimal(scale) / Decimal(2).ln())


@given(st.lists(st.integers(LEAST, MOST) | st.integers(-99, 99), max_size=8), scales)
@settings(deadline=None)
def test_levels_are_the_least(bounds, scale):
    found = level(np.array(bounds, np.int64), scale)
    assert found.tolist() == [least_level(bound, scale) for bound in bounds]
    assert all(isinstance(height, int) for height in found.tolist())
    assert scale < 2 or found.dtype == np.int64


@given(st.integers(-(2**40), 2**40), st.floats(1e-3, 1e15))
@settings(deadline=None)
def test_levels_at_the_multiples_of_ln_2(multiple, scale):
    """The integers on both sides of multiple * scale * ln 2, which differ less than a float can tell."""
    with exact(200):
        edge = math.floor(multiple * Decimal(scale) * Decimal(2).ln())
    bounds = [bound for bound in (edge - 1, edge, edge + 1, edge + 2) if LEAST <= bound <= MOST]
    assert level(np.array(bounds, np.int64), scale).tolist() == [least_level(bound, scale) for bound in bounds]
    if edge in bounds and multiple and scale > 2:
        assert level(np.array([edge]), scale)[0] == multiple


def test_few_levels_are_left_to_the_slow_part(monkeypatch):
    monkeypatch.setattr(module, "_least", None)
    bounds = np.random.default_rng(0).integers(-(2**26), 2**26, 100_000)
    assert level(bounds, 1234.5).max() == least_level(int(bounds.max()), 1234.5)
    assert level(np.zeros(3, np.int64), 1e-100).tolist() == [0, 0, 0]


def test_the_constant_is_the_nearest_float():
    with exact():
        assert abs(Decimal(module._LN_2) - Decimal(2).ln()) < Decimal(2) ** -54
        low, high = noise.log_two(40)
        assert low < Decimal(2).ln() < high
        assert high - low < Decimal("1e-38")


# The exact paths


def chance_digits(height, score, scale, words):
    """The first words of the binary expansion of exp(score / scale) / 2^height."""
    with exact(100 + 20 * words):
        value = int((Decimal(score) / Decimal(scale)).exp() / Decimal(2) ** height * 2 ** (64 * words))
    return [value >> 64 * place & ONES for place in reversed(range(words))]


@given(
    st.integers(-(10**6), 10**6),
    st.floats(0.5, 1e5),
    st.integers(0, 40),
    st.integers(1, 3),
    st.booleans(),
)
@settings(deadline=None)
def test_a_win_is_decided_on_the_last_bit(score, scale, slack, words, below):
    """U agrees with exp(score / scale) / 2^level in all the words of the script but the last, one less or more."""
    height = least_level(score, scale) + slack
    *leading, last = chance_digits(height, score, scale, words + 1) if score or slack else [ONES] * (words + 1)
    script = Script(*leading, (last - 1 if below else last + 1) % 2**64)
    expected = below if 0 < last < ONES else None
    found = module._wins([height], np.array([score]), scale, script)
    assert expected in (None, bool(found[0]))
    assert script.script == []


@pytest.mark.parametrize("scale", [1e-100, 1e-9, 1e100])
def test_a_win_is_decided_where_floats_say_nothing(scale):
    """Here level ln 2 and score / scale agree in all digits of a float: the words around the chance decide."""
    for score in (MOST, 3 * 10**17 + 1, LEAST, -7):
        with exact(400):
            height = least_level(score, scale)
            share = ((Decimal(score) / Decimal(scale)) - height * Decimal(2).ln()).exp()
            word = int(share * 2**64)
        assert 2**63 - 1 <= word <= ONES
        for step, expected in ((-3, True), (3, False)):
            if 0 <= word + step <= ONES:
                assert module._wins([height], np.array([score]), scale, Script(word + step))[0] == expected


def test_the_fast_and_the_exact_paths_decide_alike(monkeypatch):
    scores = np.random.default_rng(0).integers(-50, 50, 2000)
    levels = (level(scores, 7.0) + np.random.default_rng(1).integers(0, 5, 2000)).tolist()
    tickets = Tickets(SCORES, SEVERAL, SCALE, [4, 0, 3])

    def results():
        return WINS(levels, scores, 7.0, SeededBits(13)).tolist(), [tickets.draw(4, SeededBits(i)) for i in range(20)]

    fast = results()
    assert 200 < sum(fast[0]) < 1800
    monkeypatch.setattr(noise, "_TOLERANCE", 40.0)
    assert results() == fast


def test_the_power_of_two_is_that_of_the_bound():
    """-ln W > bound + power ln 2 at W next to 2^-power exp(-bound), also for a power that no float holds."""
    half = noise._Exponential(2**63 - 1, Script(0))
    assert half.exceeds(Fraction(0), 1)
    assert half.exceeds(Fraction(-1), 2)
    assert not noise._Exponential(2**63, Script(1)).exceeds(Fraction(0), 1)
    assert noise._Exponential(5, Script()).exceeds(Fraction(0), -(10**400))
    assert not noise._Exponential(5, Script()).exceeds(Fraction(0), 10**400)


def test_extreme_levels_and_broken_promises_raise_nothing():
    scores = np.array([LEAST, -1, 0, 1, MOST])
    with np.errstate(all="raise"):
        for scale in (1e-100, 1.0, 1e100):
            for height, wins in ((10**400, False), (2**1010, False), (-(10**400), True), (-(2**1010), True)):
                assert (WINS([height] * 5, scores, scale, SeededBits(14)) == wins).all()
            found = lottery([-(10**400)] * 5, [1] * 5, 5, scale, lambda g, _: (g, scores[g], g >= 0), SeededBits(14))
            assert 1 <= len(set(found.tolist())) == found.size <= 5


def test_a_ticket_above_its_level_wins():
    assert WINS([0, 3, 3], np.array([1, 100, 10**6]), 1.0, Script(ONES, ONES, ONES)).all()
    tickets = Tickets([0, 50], [[0], [1]], 1.0, [0, -72])
    found = Counter(tickets.draw(1, SeededBits(seed))[0] for seed in range(300))
    assert min(found[0], found[1]) > 50  # both have level 0, and win


# Behaviour


def test_candidates_are_asked_for_in_batches():
    tickets = Tickets(SCORES, [[0, 1, 2, 3] + [None] * 50_000], SCALE)
    tickets.once(1, SeededBits(15))
    expected = [min(18 << place, module.LARGEST_BATCH) for place in range(len(tickets.calls))]
    assert tickets.calls == expected
    assert max(tickets.calls) == module.LARGEST_BATCH
    many = Tickets([0] * 500, [[owner] for owner in range(500)], SCALE)
    assert sorted(many.draw(500, SeededBits(15))) == list(range(500))
    assert many.calls[0] == module.BATCH + 2 * 500


def test_a_seed_reproduces_and_another_does_not():
    tickets = Tickets(list(range(300)), [list(range(300))], 100.0)
    first, again, other = (tickets.draw(20, SeededBits(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert tickets.draw(20, SystemBits()) != tickets.draw(20, SystemBits())


def test_levels_and_weights_may_be_of_numpy_or_of_python():
    scores = np.array(SCORES)

    def find(strata, ranks):
        assert strata.dtype == np.int64
        assert all(type(rank) is int for rank in ranks)
        return strata, scores[strata], np.ones(len(ranks), np.bool_)

    levels, weights = level(scores, SCALE), [2**62] * 4
    ways = [(levels, weights), (levels.tolist(), np.array(weights)), (tuple(levels), tuple(weights))]
    found = [lottery(*way, 3, 9.5, find, SeededBits(16)).tolist() for way in ways]
    assert found[0] == found[1] == found[2]


def test_a_million_strata():
    scores = np.random.default_rng(2).integers(0, 10**7, 10**6)

    def find(strata, ranks):
        return strata, scores[strata], np.array(ranks) == 0

    found = lottery(level(scores, 500.0), [2] * 10**6, 50, 500.0, find, SeededBits(17))
    assert 1 <= len(set(found.tolist())) == found.size <= 50
    assert scores[found].min() > scores.max() - 40 * 500


def test_what_is_refused():
    def find(strata, ranks):
        return strata, np.zeros(len(ranks), np.int64), strata > 0

    for k in (0, -1):
        with pytest.raises(ParameterError, match=rf"^k \({k}\) must be at least 1$"):
            lottery([0], [1], k, 1.0, find, SystemBits())
    with pytest.raises(ParameterError, match=r"^weights must be as many as levels$"):
        lottery([0, 0], [1], 1, 1.0, find, SystemBits())
    for levels, weights in (([0, 0], [1, -1]), ([0, 0], [0, 0]), ([], [])):
        with pytest.raises(ParameterError, match=r"^weights must be at least 0, and some above 0$"):
            lottery(levels, weights, 1, 1.0, find, SystemBits())
    for bounds in (np.zeros(2), np.zeros(2, np.int32), np.zeros((2, 1), np.int64)):
        with pytest.raises(ParameterError, match=r"must be int64, 1-d$"):
            level(bounds, 1.0)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, 1e-101, 1e101])
def test_scales_outside_the_proved_range_are_refused(wrong):
    for call in (
        lambda: level(np.zeros(1, np.int64), wrong),
        lambda: lottery([0], [1], 1, wrong, lambda strata, _: (strata, strata, strata >= 0), SystemBits()),
    ):
        with pytest.raises(ParameterError, match=r"^scale \(.*\) must be a number between 1e-100 and "):
            call()
