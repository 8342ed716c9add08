"""Polishing: books stay exact, the objective never rises, nothing impossible is drawn, and rows come much nearer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph import polishing, progress
from anamorph.polishing import CANDIDATES, FLOOR, Moves, Polish, Values, chances, polished
from anamorph.rounding import draw

SEEDS = st.integers(0, 10_000)
SIZES = (4, 2, 6, 3)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Rows drawn from relaxed ones, and the answers of these."""

    codes: np.ndarray
    owner: np.ndarray
    matrix: np.ndarray
    sizes: tuple[int, ...]
    targets: dict[tuple[int, ...], np.ndarray]

    def polished(self, seed=0, **options):
        return polished(self.codes, self.owner, self.matrix, self.sizes, self.targets, seed=seed, **options)

    def start(self, codes=None):
        return Polish.start(self.codes if codes is None else codes, self.sizes, self.targets)

    def lines(self, feature):
        first = sum(self.sizes[:feature])
        return self.matrix[first : first + self.sizes[feature]]

    def values(self, feature):
        return Values.of(self.lines(feature))

    def probability(self, codes):
        """The probability of each value of each row under the relaxed row that it was drawn from."""
        columns = [self.lines(feature)[codes[:, feature], self.owner] for feature in range(len(self.sizes))]
        return np.stack(columns, axis=1)


def model(generator, sizes, rows):
    """Relaxed rows in which about a third of the values are impossible, or as good as."""
    blocks = []
    for size in sizes:
        block = generator.dirichlet(np.full(size, 0.7), rows).T
        low = generator.random(block.shape)
        block[low < 0.2] = 0
        block[(low > 0.9) & (block > 0)] = FLOOR / 10
        block[generator.integers(size), block.max(axis=0) < 2 * FLOOR] = 1
        blocks.append(block / block.sum(axis=0))
    return np.concatenate(blocks).astype(np.float32), generator.dirichlet(np.ones(rows)).astype(np.float32)


def answers(matrix, weights, sizes, features):
    firsts = np.cumsum((0, *sizes))
    product = weights.astype(np.float64)[None, :]
    for feature in features:
        lines = matrix[firsts[feature] : firsts[feature + 1]].astype(np.float64)
        product = (product[:, None, :] * lines[None, :, :]).reshape(-1, weights.size)
    return product.sum(axis=1)


def example(seed, *, rows=200, sizes=SIZES, orders=(2,), relaxed=5):
    generator = np.random.default_rng(seed)
    matrix, weights = model(generator, sizes, relaxed)
    codes, owner = draw(matrix, weights, sizes, rows, generator)
    sets = [fs for order in orders for fs in itertools.combinations(range(len(sizes)), order)]
    return Drawn(codes, owner, matrix, sizes, {fs: answers(matrix, weights, sizes, fs) for fs in sets})


@st.composite
def examples(draw_from):
    """Small tables of any shape, with some sets of features in any order and of any length."""
    sizes = tuple(draw_from(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    pool = [fs for order in range(len(sizes) + 1) for fs in itertools.permutations(range(len(sizes)), order)]
    sets = draw_from(st.lists(st.sampled_from(pool), max_size=6, unique=True))
    generator = np.random.default_rng(draw_from(SEEDS))
    matrix, weights = model(generator, sizes, draw_from(st.integers(1, 4)))
    codes, owner = draw(matrix, weights, sizes, draw_from(st.integers(1, 150)), generator)
    return Drawn(codes, owner, matrix, sizes, {fs: answers(matrix, weights, sizes, fs) for fs in sets})


def error(codes, sizes, targets):
    """The objective, from the definition."""
    total = 0.0
    for features, target in targets.items():
        cells = itertools.product(*(range(sizes[feature]) for feature in features))
        counts = [np.all(codes[:, features] == cell, axis=1).sum() for cell in cells]
        total += float(np.square(counts - len(codes) * target).sum())
    return total


def largest(codes, sizes, targets):
    one_by_one = ({features: target} for features, target in targets.items())
    return max(error(codes, sizes, each) for each in one_by_one) ** 0.5 / len(codes)


def proposed(drawn, polish, column, seed=0):
    """The moves that the first visit of a column would propose, were all rows one batch."""
    generator = np.random.default_rng(seed)
    uniform = generator.random((3, len(drawn.codes)))
    values = drawn.values(column).draw(np.broadcast_to(drawn.owner, uniform.shape), uniform)
    sets = np.flatnonzero(polish.strides[:, column])
    return polish.proposals(column, sets, np.arange(len(drawn.codes)), values)


def moved(codes, column, moves, which):
    changed = codes.copy()
    changed[moves.rows[which], column] = moves.values[which]
    return changed


@given(examples())
@settings(deadline=None)
def test_residuals_start_as_counts_less_targets(drawn):
    polish = drawn.start()
    assert polish.residuals.size == sum(target.size for target in drawn.targets.values())
    assert polish.objective() == pytest.approx(error(drawn.codes, drawn.sizes, drawn.targets), rel=1e-4, abs=1e-4)


@given(examples(), SEEDS)
@settings(deadline=None)
def test_books_stay_exact_and_the_objective_never_rises(drawn, seed):
    generator = np.random.default_rng(seed)
    polish = drawn.start()
    for column in range(len(drawn.sizes)):
        before = polish.objective()
        change = polish.visit(column, drawn.owner, drawn.values(column), generator)
        codes = polish.codes.T.astype(np.int32)
        np.testing.assert_array_equal(polish.residuals, drawn.start(codes).residuals)
        assert change <= 0
        assert polish.objective() - before == pytest.approx(change, rel=1e-9, abs=1e-6)


@given(examples(), SEEDS)
@settings(deadline=None)
def test_polished_rows_are_possible_no_farther_and_repeatable(drawn, seed):
    before = drawn.codes.copy()
    found = drawn.polished(seed)
    np.testing.assert_array_equal(drawn.codes, before)
    assert found.dtype == np.int32
    assert found.shape == before.shape
    assert np.all(drawn.probability(found)[found != before] >= FLOOR)
    used = {feature for features in drawn.targets for feature in features}
    idle = [feature for feature in range(len(drawn.sizes)) if feature not in used]
    np.testing.assert_array_equal(found[:, idle], before[:, idle])
    # Residuals are rounded to whole units, far below this.
    assert error(found, drawn.sizes, drawn.targets) <= error(before, drawn.sizes, drawn.targets) + 1e-3
    np.testing.assert_array_equal(drawn.polished(seed), found)


@pytest.mark.parametrize("column", range(len(SIZES)))
def test_a_proposal_changes_the_objective_as_it_says(column):
    drawn = example(3, rows=60, orders=(1, 2, 3))
    polish = drawn.start()
    moves = proposed(drawn, polish, column)
    assert moves.rows.size > 3
    before = error(drawn.codes, SIZES, drawn.targets)
    for index in range(moves.rows.size):
        after = error(moved(drawn.codes, column, moves, [index]), SIZES, drawn.targets)
        assert after - before == pytest.approx(moves.changes[index] / polish.unit, abs=1e-3)
        assert after < before


def test_a_proposal_is_the_best_of_the_values_drawn():
    drawn = example(4, rows=80)
    polish = drawn.start()
    every = np.broadcast_to(np.arange(SIZES[2])[:, None], (SIZES[2], 80))
    moves = polish.proposals(2, np.flatnonzero(polish.strides[:, 2]), np.arange(80), every)
    assert moves.rows.size > 3
    for index, row in enumerate(moves.rows):
        found = []
        for value in range(SIZES[2]):
            codes = drawn.codes.copy()
            codes[row, 2] = value
            found.append(error(codes, SIZES, drawn.targets))
        assert found[moves.values[index]] == pytest.approx(min(found), abs=1e-3)


@given(SEEDS, st.integers(0, 3))
@settings(deadline=None)
def test_interactions_are_what_moves_add_together_beyond_alone(seed, column):
    drawn = example(seed, rows=40)
    polish = drawn.start()
    moves = proposed(drawn, polish, column, seed)
    polish.shift(moves, polish.unit)
    found = polish.together(moves) / polish.unit
    for index in range(moves.rows.size):
        others = np.arange(moves.rows.size) != index
        without = error(moved(drawn.codes, column, moves, others), SIZES, drawn.targets)
        whole = error(moved(drawn.codes, column, moves, slice(None)), SIZES, drawn.targets)
        assert whole - without == pytest.approx(moves.changes[index] / polish.unit + 2 * found[index], abs=1e-3)


@given(SEEDS, st.integers(0, 3))
@settings(deadline=None)
def test_moves_are_made_only_if_together_they_lower_the_objective(seed, column):
    drawn = example(seed, rows=40)
    polish = drawn.start()
    moves = proposed(drawn, polish, column, seed)
    made, change = polish.make(moves, np.random.default_rng(seed))
    codes = moved(drawn.codes, column, moves, made)
    np.testing.assert_array_equal(polish.residuals, drawn.start(codes).residuals)
    after, before = (error(each, SIZES, drawn.targets) for each in (codes, drawn.codes))
    assert after - before == pytest.approx(change / polish.unit, abs=1e-3)
    assert change < 0 or not made.any()


def test_a_failed_batch_is_taken_back_step_by_step(monkeypatch):
    """With every chance 1, a crowd of moves into one cell overshoots; what is left after halving must not."""
    monkeypatch.setattr(polishing, "chances", lambda changes, together: np.ones(changes.size))
    codes = np.zeros((1000, 1), np.int32)
    polish = Polish.start(codes, (2,), {(0,): np.array([0.98, 0.02])})
    ones = np.ones(1000, np.int64)
    moves = Moves(np.arange(1000), ones, 0 * ones[None], ones[None], 2 * (-20 - 20 + 1) * polish.unit * ones)
    made, change = polish.make(moves, np.random.default_rng(0))
    assert 1 <= made.sum() < 40
    assert change / polish.unit == pytest.approx(2 * (made.sum() - 20) ** 2 - 2 * 20**2, abs=1e-3)


def test_a_crowd_moves_as_far_as_it_should():
    """A thousand rows that all could fill one gap of twenty: about twenty do, in one weighing."""
    together = np.full(1000, 2 * 999)
    alone = np.full(1000, 2 * (-20 - 20 + 1))
    expected = 1000 * chances(alone, together)[0]
    assert expected == pytest.approx(20, abs=1)


def test_chances_are_whole_for_moves_that_meet_nobody_or_help_each_other():
    np.testing.assert_allclose(chances(np.array([-6, -6, -6, -6]), np.array([0, -5, 3, 6])), [1, 1, 1, 0.5])


def test_values_follow_the_probabilities_and_skip_the_impossible():
    lines = np.array([[0.0, 0.25, 1], [0.5, FLOOR / 2, 0], [0.5, 0.75, 0]], np.float32)
    grid = (np.arange(400) + 0.5) / 400
    for row, wanted in enumerate([[0, 200, 200], [100, 0, 300], [400, 0, 0]]):
        drawn = Values.of(lines).draw(np.full(400, row), grid)
        np.testing.assert_array_equal(np.bincount(drawn, minlength=3), wanted)


@given(SEEDS)
def test_the_ends_of_the_ladder_are_possible_values(seed):
    matrix, _ = model(np.random.default_rng(seed), (5,), 3000)
    owner = np.arange(3000)
    for end in (0.0, np.nextafter(1.0, 0)):
        drawn = Values.of(matrix).draw(owner, np.full(3000, end))
        assert np.all((drawn >= 0) & (drawn < 5))
        assert np.all(matrix[drawn, owner] >= FLOOR)


@pytest.mark.parametrize("orders", [(2,), (3,), (1, 2, 3)])
def test_polished_rows_are_much_nearer(orders):
    drawn = example(7, rows=5000, orders=orders, relaxed=20)
    found = drawn.polished()
    before, after = (error(codes, SIZES, drawn.targets) for codes in (drawn.codes, found))
    assert after < before / 50
    assert largest(found, SIZES, drawn.targets) < largest(drawn.codes, SIZES, drawn.targets) / 5
    assert np.mean(found != drawn.codes) < 0.1


def test_polished_rows_bring_wide_columns_nearer_too():
    sizes = (40, 30, 2, 25)
    drawn = example(8, rows=3000, sizes=sizes, relaxed=20)
    after, before = (error(codes, sizes, drawn.targets) for codes in (drawn.polished(), drawn.codes))
    assert after < before / 8


def test_answers_elsewhere_do_not_suffer():
    """Pairs are polished; the answers over three features, which are not, are on average no farther than before."""
    before = after = 0.0
    for seed in range(6):
        drawn = example(seed, rows=3000, orders=(2, 3), relaxed=20)
        pairs = {features: target for features, target in drawn.targets.items() if len(features) == 2}
        rest = {features: target for features, target in drawn.targets.items() if len(features) == 3}
        found = polished(drawn.codes, drawn.owner, drawn.matrix, SIZES, pairs, seed=seed)
        before += error(drawn.codes, SIZES, rest)
        after += error(found, SIZES, rest)
    assert after < before


def test_seeds_differ():
    drawn = example(5)
    assert np.any(drawn.polished(0) != drawn.polished(1))


@pytest.mark.parametrize("options", [{"sweeps": 0}, {"sweeps": 6, "lookups": 10}])
def test_rows_stay_where_no_sweep_is_wanted_or_affordable(options, monkeypatch):
    drawn = example(5)
    assert np.any(drawn.polished() != drawn.codes)
    monkeypatch.setattr(polishing, "LOOKUPS", options.pop("lookups", polishing.LOOKUPS))
    found = drawn.polished(**options)
    np.testing.assert_array_equal(found, drawn.codes)
    assert found is not drawn.codes


def test_sweeps_are_as_many_as_affordable(monkeypatch):
    drawn = example(5)
    monkeypatch.setattr(polishing, "LOOKUPS", 2 * len(drawn.codes) * 2 * len(drawn.targets) * (CANDIDATES + 1))
    np.testing.assert_array_equal(drawn.polished(), drawn.polished(sweeps=2))
    assert np.any(drawn.polished() != drawn.polished(sweeps=1))


def test_no_rows_and_no_sets_are_left_alone():
    drawn = example(5)
    empty = polished(drawn.codes[:0], drawn.owner[:0], drawn.matrix, SIZES, drawn.targets, seed=0)
    assert empty.shape == (0, len(SIZES))
    found = polished(drawn.codes, drawn.owner, drawn.matrix, SIZES, {}, seed=0)
    np.testing.assert_array_equal(found, drawn.codes)


def test_progress_is_reported_to_the_end():
    drawn, seen = example(5), []
    with progress.listening(lambda *report: seen.append(report)):
        drawn.polished(sweeps=3)
    assert {stage for stage, _, _ in seen} == {"polish"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[0] == ("polish", 0, 3 * len(SIZES))
    assert seen[-1] == ("polish", 3 * len(SIZES), 3 * len(SIZES))
