"""Banded rows: answers against the sum over all codes, rulers, rows drawn, and what a release keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator.bands import Bands
from anamorph.curator.tallies import AtLeast, GroupBy, count
from anamorph.curator.tallies import Tests as SingleCells
from anamorph.curator.where import Where
from anamorph.errors import CorruptionError, ParameterError
from anamorph.models.banded import BandedRows, Ruler, detailed, divided, even, halved
from anamorph.models.relaxed import RelaxedRows
from anamorph.queries.numbers import Tested as NumberTests
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource

SIZES = (3, 12, 2, 9)
LIMITS = {1: 12, 3: 8}
"""c3 may be missing: its code is 8."""
UNEVEN = Ruler(np.array([0, 2, 3, 6, 12]), np.array([0.0, 0.9, 1.0, 2.0, 3.0]))
RULERS = {1: UNEVEN, 3: even((3, 8), 9)}
MERGED = (3, 3, 2, 3)
PREFIXES = Where(SIZES, (2, 0), (1, 3), (12, 8), np.array([[2, 7], [9, 3], [5, 5], [0, 7], [-1, 4], [99, 99]]))
SINGLE = Where(SIZES, (), (3,), (8,), np.array([[1], [4], [7]]))
HALFSPACES = Where(SIZES, (0,), (3, 1), (8, 12), np.array([30, -8, 11]), np.array([[4, 3], [-3, 1], [2, -5]]))
TALLIES = (
    PREFIXES,
    SINGLE,
    Bands(SIZES, (1,), ((1, 5, 7),)),
    Bands(SIZES, (3, 0, 1), ((2, 8), (), (6,))),
    Bands(SIZES, (2, 3), ((), ())),
    Bands(SIZES, (0, 1), ((2,), (3, 6))),
    GroupBy(SIZES, (2, 0), 0, 2),
    AtLeast(GroupBy(SIZES, (0, 2), 0, 3), 1),
)


def rows_of(rulers=RULERS, rows=7, seed=0) -> BandedRows:
    random = np.random.default_rng(seed)
    merged = tuple(rulers[column].bands if column in rulers else size for column, size in enumerate(SIZES))
    probabilities = np.concatenate([random.dirichlet(np.full(size, 0.6), rows).T for size in merged])
    weights = random.dirichlet(np.ones(rows))
    coded = RelaxedRows(merged, probabilities.astype(np.float32), weights.astype(np.float32))
    return BandedRows(SIZES, rulers, coded)


def shares_by_hand(ruler: Ruler) -> np.ndarray:
    """The chance of each code given its band, bands by codes."""
    found = np.zeros((ruler.bands, ruler.edges[-1]))
    for (low, high), (bottom, top) in zip(
        itertools.pairwise(ruler.edges), itertools.pairwise(ruler.heights), strict=True
    ):
        found[int(bottom + 1e-9) if top > bottom else min(int(bottom), ruler.bands - 1), low:high] += (top - bottom) / (
            high - low
        )
    return found


class Everything:
    """All combinations of codes, each as a row with its probability: what answers are sums over."""

    def __init__(self, model: BandedRows) -> None:
        self.codes = np.array(list(itertools.product(*map(range, SIZES))), np.int32)
        total = model.rows.weights.astype(float)[None]
        for column in range(len(SIZES)):
            lines = model.lines(column).astype(float)
            if column in model.rulers:
                lines = shares_by_hand(model.rulers[column]).T @ lines
            total = (total[:, None] * lines[None]).reshape(-1, total.shape[1])
        self.weights = total.sum(axis=1)

    def answer(self, tally) -> np.ndarray:
        found = np.zeros(tally.cells)
        for code, weight in zip(self.codes, self.weights, strict=True):
            found += weight * self.holds(tally, code)
        return found

    @staticmethod
    def holds(tally, code) -> np.ndarray:
        if isinstance(tally, Where):
            numbers = code[list(tally.numbers)]
            present = np.all(numbers < np.array(tally.limits))
            passed = tally.holds(numbers[None].astype(float), slice(None))[:, 0] & present
            cell = np.ravel_multi_index(code[list(tally.given)], [SIZES[g] for g in tally.given]) if tally.given else 0
            return (passed[:, None] * (np.arange(tally.width) == cell)).ravel()
        if isinstance(tally, AtLeast):
            cells = np.array(list(itertools.product(*(range(SIZES[f]) for f in tally.slab.features))))
            return (cells == code[list(tally.slab.features)]).sum(axis=1) >= tally.least
        cuts = tally.cuts if isinstance(tally, Bands) else ((),) * len(tally.features)
        owners = [
            np.searchsorted(c, code[f], side="right") if c else code[f]
            for f, c in zip(tally.features, cuts, strict=True)
        ]
        shape = [len(c) + 1 if c else SIZES[f] for f, c in zip(tally.features, cuts, strict=True)]
        return np.arange(tally.cells) == np.ravel_multi_index(owners, shape)


@pytest.mark.parametrize("tally", TALLIES, ids=str)
def test_answers_are_sums_over_all_codes(tally):
    model = rows_of()
    expected = Everything(model).answer(tally)
    assert expected.max() > 0.01
    np.testing.assert_allclose(model.answer(tally), expected, atol=1e-6)


def test_answers_come_piece_by_piece():
    model = rows_of()
    whole = Workload((NumberTests(PREFIXES), NumberTests(SINGLE)))
    parts = list(model.answers(replace(whole, limit=6)))
    assert len(parts) == 7
    expected = np.concatenate([model.answer(PREFIXES), model.answer(SINGLE)])
    np.testing.assert_allclose(np.concatenate(parts), expected)


def test_large_tallies_are_answered_a_few_products_at_a_time(monkeypatch):
    expected = [rows_of().answer(tally) for tally in (*TALLIES, HALFSPACES)]
    monkeypatch.setattr("anamorph.models.banded.HELD", 20)
    for tally, whole in zip((*TALLIES, HALFSPACES), expected, strict=True):
        np.testing.assert_allclose(rows_of().answer(tally), whole, atol=1e-9)


def test_halfspaces_are_answered_by_numbers_drawn_from_all_rows():
    """Some 2^17 of them in strata, from 7 rows: far below 0.004, a deviation of 2^17 numbers that are not."""
    model = rows_of()
    expected = Everything(model).answer(HALFSPACES)
    assert 0.05 < expected.max() < 0.5
    np.testing.assert_allclose(model.answer(HALFSPACES), expected, atol=0.003)
    np.testing.assert_array_equal(model.answer(HALFSPACES), rows_of().answer(HALFSPACES))


def test_rows_drawn_approach_the_answers():
    """40,000 rows: 4.5 deviations of a count are at most 0.012 of the rows; drawn in strata they are less."""
    model = rows_of()
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)))
    drawn = TableSource(model.sample(40_000, seed=3), schema)
    for tally in (*TALLIES, HALFSPACES):
        if not isinstance(tally, AtLeast):
            np.testing.assert_allclose(count(tally, drawn) / 40_000, model.answer(tally), atol=0.012)


def test_rows_differ_by_seed_alone():
    model = rows_of()
    first, again, other = (model.sample(200, seed=seed).codes for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


def test_rows_are_polished_in_bands():
    """As sharply as those of relaxed rows; where in its band a number lies does not matter to it."""
    model = rows_of(rows=30)
    rough, fine = (model.sample(500, seed=1, keep=keep).codes for keep in ((), ((0, 1), (1, 3))))
    assert np.any(rough != fine)
    for features, cuts in (((0, 1), ((), (3, 6))), ((1, 3), ((3, 6), (3, 8)))):
        tally = Bands(SIZES, features, cuts)
        errors = []
        for codes in (rough, fine):
            cells = np.zeros(500, np.int64)
            for feature, each, size in zip(features, cuts, tally.shape, strict=True):
                own = np.searchsorted(each, codes[:, feature], side="right") if each else codes[:, feature]
                cells = cells * size + own
            errors.append(np.abs(np.bincount(cells, minlength=tally.cells) / 500 - model.answer(tally)).sum())
        assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    "tally",
    [
        GroupBy(SIZES, (0, 1), 0, 3),
        AtLeast(GroupBy(SIZES, (1, 2), 0, 12), 1),
        SingleCells(SIZES, ((0, 3),), np.array([0]), np.array([[1, 2]]), 2),
        Where(SIZES, (1,), (3,), (8,), np.array([[4]])),
    ],
    ids=lambda tally: type(tally).__name__,
)
def test_numbers_have_no_cells(tally):
    with pytest.raises(ParameterError):
        rows_of().answer(tally)


# --- rulers


def rulers():
    """Rulers of up to 5 bands of up to 6 fine bands each, some of which nothing is in."""

    @st.composite
    def drawn(draw):
        edges, heights = [0], [0.0]
        for band in range(draw(st.integers(1, 5))):
            shares = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=6))
            shares[draw(st.integers(0, len(shares) - 1))] += 0.25
            ends = np.cumsum(shares) / sum(shares)
            ends[-1] = 1.0
            edges += (edges[-1] + np.cumsum([draw(st.integers(1, 9)) for _ in shares])).tolist()
            heights += (band + np.minimum(ends, 1)).tolist()
        return Ruler(np.array(edges), np.array(heights))

    return drawn()


@given(rulers())
@settings(deadline=None)
def test_numbers_lie_in_their_bands_as_the_ruler_says(ruler):
    starts = [int(ruler.edges[np.flatnonzero(ruler.heights == band)[-1]]) for band in range(ruler.bands)]
    stops = [int(ruler.edges[np.flatnonzero(ruler.heights == band)[0]]) for band in range(1, ruler.bands + 1)]
    bands = np.repeat(np.arange(ruler.bands), 3000)
    codes = ruler.codes(bands, np.random.default_rng(0))
    shares = ruler.below(np.arange(ruler.edges[-1] + 1))
    np.testing.assert_allclose(shares[-1], 1)
    np.testing.assert_allclose(shares[0], 0)
    for band, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        mine = codes[bands == band]
        assert start <= mine.min()
        assert mine.max() < stop
        found = np.cumsum(np.bincount(mine, minlength=ruler.edges[-1])) / 3000
        np.testing.assert_allclose(found, shares[1:, band], atol=2 / 3000)


@given(rulers(), st.sets(st.integers(1, 200)))
@settings(deadline=None)
def test_other_bands_have_their_parts_of_bands(ruler, cuts):
    kept = sorted(each for each in cuts if each < ruler.edges[-1])
    found = ruler.cut(kept)
    assert found.shape == (len(kept) + 1, ruler.bands)
    np.testing.assert_allclose(found.sum(axis=0), 1)
    np.testing.assert_allclose(np.cumsum(found, axis=0)[:-1], ruler.below(np.array(kept, np.int64)), atol=1e-12)


def test_a_number_of_which_nothing_is_known_lies_anywhere_in_its_band():
    ruler = even((4, 8), 9)
    np.testing.assert_allclose(
        ruler.below(np.array([0, 1, 6, 8, 9])).T, [[0, 0.25, 1, 1, 1], [0, 0, 0.5, 1, 1], [0, 0, 0, 0, 1]]
    )
    assert ruler.bands == 3


def test_what_fine_bands_tell_is_told_where_it_is_no_noise():
    """Half of the rows have one code; the rest lie evenly, but for the second band, which is one slope."""
    fine = tuple(range(1, 16))
    exact = np.full(16, 0.25 / 8)
    exact[3] += 0.5
    exact[8:] = np.arange(8) * 0.25 / 28
    noise = np.random.default_rng(0).normal(0, 0.001, 16)
    halves = np.array([exact[:8].sum(), exact[8:].sum()])
    ruler, masses = detailed(even((8,), 16), halves, fine, exact + noise, 0.001)
    np.testing.assert_allclose(masses, exact, atol=0.004)
    shares = np.diff(ruler.below(np.arange(17)), axis=0)
    np.testing.assert_allclose(shares[:8, 0], exact[:8] / exact[:8].sum(), atol=0.005)
    np.testing.assert_allclose(shares[8:, 1], exact[8:] / exact[8:].sum(), atol=0.02)
    assert len(set(np.round(np.delete(shares[:8, 0], 3)[3:], 9))) == 1, "four that are alike are told as one"


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_told_as_nothing(seed):
    """32 bands of 32: a step of 3 sigmas is one of 400; each moves few numbers."""
    fine, cuts = tuple(range(1, 1024)), tuple(range(32, 1024, 32))
    noise = np.random.default_rng(seed).normal(0, 0.01, 1024)
    ruler, _ = detailed(even(cuts, 1024), np.full(32, 1 / 32), fine, 1 / 1024 + noise, 0.01)
    plain = even(cuts, 1024)
    moved = np.abs(ruler.below(np.arange(1025)) - plain.below(np.arange(1025))).max(axis=0)
    assert np.mean(moved > 1e-9) < 0.35
    ends = np.array([0, *cuts, 1024])
    np.testing.assert_allclose(ruler.below(ends), plain.below(ends))


def test_a_slope_drowns_in_fine_bands_and_not_in_few():
    """A sum over many fine bands has the noise of all of them; a spike shows in these, and keeps its place."""
    cuts, few, fine = (512,), tuple(range(64, 1024, 64)), tuple(range(1, 1024))
    exact = np.concatenate([np.linspace(0, 2, 512), np.ones(512)]) / 1124
    exact[700] += 100 / 1124
    sigma, random = 0.004, np.random.default_rng(0)
    halves = np.array([exact[:512].sum(), exact[512:].sum()])
    values = exact + random.normal(0, sigma, 1024)
    once, _ = detailed(even(cuts, 1024), halves, fine, values, sigma)
    coarse = exact.reshape(16, 64).sum(axis=1) + random.normal(0, sigma, 16)
    twice, masses = detailed(even(cuts, 1024), halves, few, coarse, sigma)
    both, _ = detailed(twice, masses, fine, values, sigma)
    truth = np.cumsum(exact[:512]) / exact[:512].sum()
    off = [np.abs(ruler.below(np.arange(1, 513))[:, 0] - truth).max() for ruler in (once, twice, both)]
    assert off[0] > 0.2
    assert max(off[1:]) < 0.05
    place = both.below(np.array([700, 701]))[:, 1]
    assert place[1] - place[0] == pytest.approx(101 / 612, abs=0.03)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.floats(1e-9, 10),
    st.integers(0, 2**32 - 1),
)
def test_shares_are_shares_whatever_the_noise(lengths, sigma, seed):
    noisy = np.random.default_rng(seed).normal(0, 1, len(lengths))
    for inside in (divided, halved):
        found = inside(np.array(lengths), noisy, sigma)
        assert found.shape == (len(lengths),)
        assert np.all(found >= 0)
        assert found.sum() == pytest.approx(1)


@given(st.integers(0, 2**32 - 1), st.integers(2, 300), st.integers(1, 20))
def test_rulers_of_noise_are_rulers(seed, limit, bands):
    """As a release would take them: rising, with every band begun."""
    random = np.random.default_rng(seed)
    fine = tuple(range(1, limit))
    cuts = tuple(sorted({int(each) for each in random.integers(1, limit, bands)} - {0}))
    noisy = random.normal(0, 1, limit) * random.random(limit) ** 4
    merged = (len(cuts) + 1,)
    ruler, masses = detailed(even(cuts, limit), random.normal(0, 1, merged[0]), fine, noisy, 1e-3)
    assert np.all(np.isfinite(masses))
    model = replace(rows_of({}), sizes=(limit,), rulers={0: ruler})
    flat = np.full((merged[0], 1), 1 / merged[0], np.float32)
    model = replace(model, rows=RelaxedRows(merged, flat, np.ones(1, np.float32)))
    assert BandedRows.from_arrays((limit,), model.arrays()).rulers[0].bands == merged[0]
    assert model.sample(9, seed=0).codes.min() >= 0


# --- releases


def test_a_release_keeps_the_model():
    model = rows_of()
    loaded = BandedRows.from_arrays(SIZES, model.arrays())
    for tally in (*TALLIES, HALFSPACES):
        np.testing.assert_array_equal(loaded.answer(tally), model.answer(tally))
    np.testing.assert_array_equal(loaded.sample(50, seed=2).codes, model.sample(50, seed=2).codes)


def changed(name, change):
    arrays = {key: value.copy() for key, value in rows_of().arrays().items()}
    arrays[name] = change(arrays[name])
    return arrays


FOREIGN = {
    "a column beyond the last": changed("numbers", lambda a: np.add(a, [[0, 0], [9, 0]])),
    "a negative column": changed("numbers", lambda a: a - [[9, 0], [0, 0]]),
    "other lengths": changed("numbers", lambda a: np.add(a, [[0, 1], [0, 0]])),
    "negative lengths": changed("numbers", lambda a: np.array([[1, 9], [3, -1]])),
    "no lengths": changed("numbers", lambda a: a[:, :1]),
    "numbers of another type": changed("numbers", lambda a: a.astype(np.int32)),
    "edges that do not begin at 0": changed("edges", lambda a: a + (np.arange(a.size) == 0)),
    "edges that fall": changed("edges", lambda a: np.concatenate([a[:1], a[2:0:-1], a[3:]])),
    "edges that end early": changed("edges", lambda a: a - (np.arange(a.size) == 4)),
    "edges that are no integers": changed("edges", lambda a: a.astype(np.float64)),
    "heights that fall": changed("heights", lambda a: a - 0.95 * (np.arange(a.size) == 2)),
    "a band that no edge begins": changed("heights", lambda a: a + 0.5 * (np.arange(a.size) == 3)),
    "heights that are no numbers": changed("heights", lambda a: a * np.nan),
    "heights of another type": changed("heights", lambda a: a.astype(np.float32)),
    "heights from elsewhere": changed("heights", lambda a: a[1:]),
    "more arrays": rows_of().arrays() | {"more": np.zeros(1)},
    "other probabilities": changed("probabilities", lambda a: a[1:]),
}


@pytest.mark.parametrize("arrays", FOREIGN.values(), ids=FOREIGN)
def test_foreign_arrays_are_refused(arrays):
    with pytest.raises(CorruptionError):
        BandedRows.from_arrays(SIZES, arrays)
