"""Residuals: their numbers against dense matrices, their sensitivity against every neighbour, and their noise."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph.columns import Codes
from anamorph.curator import curator as curator_module
from anamorph.curator import residuals as residuals_module
from anamorph.curator.budget import Budget, gaussian_sigma
from anamorph.curator.curator import Curator
from anamorph.curator.estimates import RelaxedTable
from anamorph.curator.residuals import MOST_CELLS, UNITS, Residual, joint
from anamorph.curator.scores import AbsoluteError, L1Error, MaxError
from anamorph.curator.tallies import AtLeast, GroupBy, check_tally, copied, count, scale, squared_sensitivity
from anamorph.errors import ParameterError, WorkloadError
from anamorph.queries.marginals import Marginals
from anamorph.queries.piece import Piece
from anamorph.queries.residuals import Residuals
from anamorph.queries.workload import Workload
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table

RELATIONS = ("replace", "add-remove")
SIZES = (3, 2, 4)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
ROWS = np.stack([np.random.default_rng(i).integers(0, size, 500) for i, size in enumerate(SIZES)], axis=1)
BUDGET = Budget(epsilon=1.0, delta=1e-6)
HUGE = Budget(epsilon=1e9, delta=1e-6)


def source(rows=ROWS, sizes=SIZES) -> TableSource:
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="rows")
    return TableSource(Table(np.asarray(rows, np.int32).reshape(-1, len(sizes)), sizes), schema)


def scaled_projection(shape):
    """M P: the Kronecker product of (m I - 1 1^T), in Python's whole numbers."""
    matrix = np.ones((1, 1), object)
    for size in shape:
        matrix = np.kron(matrix, size * np.eye(size, dtype=object) - 1)
    return matrix


def marginal_counts(rows, sizes, features):
    dense = np.zeros([sizes[feature] for feature in features], np.int64)
    np.add.at(dense, tuple(np.asarray(rows, np.int64).reshape(-1, len(sizes))[:, f] for f in features), 1)
    return dense.ravel()


def residual_counts(rows, sizes, features):
    """The residual in counts, exactly."""
    shape = [sizes[feature] for feature in features]
    return (
        scaled_projection(shape) @ marginal_counts(rows, sizes, features).astype(object) * Fraction(1, math.prod(shape))
    )


@st.composite
def residuals(draw, largest=4, most=4):
    sizes = tuple(draw(st.lists(st.integers(2, largest), min_size=1, max_size=most)))
    features = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, len(sizes)))])
    return Residual(sizes, features)


def rows_over(sizes):
    return st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), max_size=12)


@given(residuals(), st.data())
@settings(max_examples=100, deadline=None)
def test_numbers_are_those_of_the_dense_matrix(tally, data):
    rows = data.draw(rows_over(tally.sizes))
    check_tally(tally, tally.sizes)
    numbers = count(tally, source(rows, tally.sizes))
    assert numbers.dtype == np.int64
    assert tally.scale == scale(tally) == tally.cells == numbers.size == math.prod(tally.shape)
    assert [Fraction(int(n), tally.scale) for n in numbers] == residual_counts(
        rows, tally.sizes, tally.features
    ).tolist()
    shaped = numbers.reshape(tally.shape)
    assert all(not np.any(shaped.sum(axis=axis)) for axis in range(shaped.ndim))


@given(residuals(largest=3), st.data())
@settings(max_examples=50, deadline=None)
def test_a_marginal_is_the_sum_of_its_residuals(tally, data):
    """Each is spread evenly over the features outside of it; that of no features is the number of rows."""
    rows = data.draw(rows_over(tally.sizes))
    found = source(rows, tally.sizes)
    total = np.full(tally.shape, Fraction(len(rows), tally.cells))
    for order in range(1, len(tally.features) + 1):
        for axes in itertools.combinations(range(len(tally.features)), order):
            inner = Residual(tally.sizes, tuple(tally.features[axis] for axis in axes))
            part = np.array([Fraction(int(n), inner.scale) for n in count(inner, found)], object)
            shape = [size if axis in axes else 1 for axis, size in enumerate(tally.shape)]
            total = total + part.reshape(shape) * Fraction(inner.cells, tally.cells)
    assert total.ravel().tolist() == marginal_counts(rows, tally.sizes, tally.features).tolist()


def columns(tallies):
    """What one row of every kind adds to the numbers of some tallies, in counts, a line for each kind of row."""
    sizes = tallies[0].sizes
    found = []
    for row in itertools.product(*map(range, sizes)):
        added = []
        for tally in tallies:
            if isinstance(tally, Residual):
                added += residual_counts([row], sizes, tally.features).tolist()
            else:
                added += count(tally, source([row], sizes)).tolist()
        found.append(np.array(added, object))
    return found


def squares(vector, weights):
    return sum(weight * value * value for weight, value in zip(weights, vector, strict=True))


def moves(tallies, weights):
    """The largest squared change by one row added, and by one row replaced; and the least by one row added."""
    repeated = [weight for tally, weight in zip(tallies, weights, strict=True) for _ in range(tally.cells)]
    found = columns(tallies)
    added = [squares(row, repeated) for row in found]
    replaced = max(squares(one - other, repeated) for one, other in itertools.combinations(found, 2))
    return min(added), max(added), replaced


@given(residuals(largest=5, most=3))
@settings(max_examples=100, deadline=None)
def test_the_sensitivity_of_one_residual_is_reached(tally):
    """Add-remove: by every row. Replace: by the two rows that differ most."""
    matrix = scaled_projection(tally.shape).astype(np.int64)
    added = {Fraction(int(column @ column), tally.scale**2) for column in matrix.T}
    inner = matrix.T @ matrix
    replaced = np.diag(inner)[:, None] + np.diag(inner) - 2 * inner
    assert added == {tally.kappa} == {squared_sensitivity([tally], "add-remove")}
    most = Fraction(int(replaced.max()), tally.scale**2)
    assert most == tally.furthest == squared_sensitivity([tally], "replace")


def test_the_sensitivity_by_hand():
    """Of one column with m values: (1 - 1/m), and 2. Of two: both parts differ in the column of fewer values."""
    assert Residual((5,), (0,)).kappa == Fraction(4, 5)
    assert Residual((5,), (0,)).furthest == 2
    for features in ((0, 1), (1, 0)):
        assert Residual((5, 3), features).kappa == Fraction(4 * 2, 5 * 3)
        assert Residual((5, 3), features).furthest == 2 * Fraction(4, 5)
    assert Residual((2, 2), (0, 1)).furthest == 1 == 4 * Fraction(1, 4)


SUBSETS = [features for k in (1, 2, 3) for features in itertools.permutations(range(3), k)]


@st.composite
def several(draw):
    """Residuals and other tallies of one small table, no block twice, each with a weight."""
    sizes = tuple(draw(st.lists(st.integers(2, 3), min_size=3, max_size=3)))
    sets = draw(st.lists(st.sampled_from(SUBSETS), min_size=1, max_size=3, unique=True))
    tallies: list = [Residual(sizes, features) for features in sets]
    others = [GroupBy(sizes, (0, 2), 0, sizes[0]), AtLeast(GroupBy(sizes, (1, 2), 0, sizes[1]), 1)]
    tallies += others[: draw(st.integers(0, 2))]
    weights = draw(
        st.lists(st.fractions(Fraction(1, 9), 9, max_denominator=9), min_size=len(tallies), max_size=len(tallies))
    )
    return tallies, weights


@given(several())
@settings(max_examples=25, deadline=None)
def test_no_neighbour_moves_several_tallies_by_more(made):
    tallies, weights = made
    least, most, replaced = moves(tallies, weights)
    assert least == most == squared_sensitivity(tallies, "add-remove", weights)
    assert replaced <= squared_sensitivity(tallies, "replace", weights)
    assert isinstance(squared_sensitivity(tallies, "replace", weights), Fraction)


def one_by_one(residuals):
    return sum((weight * residual.furthest for residual, weight in residuals), start=Fraction(0))


@st.composite
def only_residuals(draw):
    sizes = tuple(draw(st.lists(st.integers(2, 3), min_size=3, max_size=3)))
    sets = draw(st.lists(st.sampled_from(SUBSETS), min_size=1, max_size=5, unique=True))
    return [(Residual(sizes, features), draw(st.fractions(Fraction(1, 9), 9, max_denominator=9))) for features in sets]


@given(only_residuals())
@settings(max_examples=50, deadline=None)
def test_some_replaced_row_moves_residuals_by_all_of_their_joint_sensitivity(made):
    """But for the parts that are rounded up."""
    _, _, replaced = moves(*zip(*made, strict=True))
    assert replaced <= joint(made, "replace") <= replaced + one_by_one(made) * len(made) / UNITS


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("most_features", [1, 2, 6])
@given(made=only_residuals())
@settings(max_examples=5, deadline=None)
def test_whatever_the_groups_no_two_rows_move_residuals_further(made, group, groups, most_features):
    _, _, replaced = moves(*zip(*made, strict=True))
    limits = {"MOST_COLUMNS": 0, "GROUP": group, "GROUPS": groups, "MOST_FEATURES": most_features}
    with mock.patch.multiple(residuals_module, **limits):
        assert replaced <= joint(made, "replace") <= one_by_one(made) * (1 + Fraction(10 * len(made), UNITS))


def test_the_joint_sensitivity_by_hand():
    """A pair of binary columns is moved, by 4/4, where just one of them differs: s (16 - s) pairs of 16, at most 64."""
    sizes = (2,) * 16
    pairs = [(Residual(sizes, pair), Fraction(1)) for pair in itertools.combinations(range(16), 2)]
    assert 64 <= joint(pairs, "replace") < 64 + Fraction(1, 10**9)
    assert one_by_one(pairs) == 120
    assert joint(pairs, "add-remove") == 120 * Fraction(1, 4)
    assert joint([], "replace") == joint([], "add-remove") == 0


def test_the_joint_sensitivity_of_many_columns():
    """More than are tried together: no pair of rows reaches more, and it is far less than one by one."""
    generator = np.random.default_rng(3)
    sizes = tuple(generator.integers(2, 4, 30).tolist())
    sets = [f for k in (1, 2) for f in itertools.combinations(range(30), k)]
    made = [(Residual(sizes, features), Fraction(1, len(features))) for features in sets]
    bound, reached = joint(made, "replace"), Fraction(0)
    assert bound < 0.75 * one_by_one(made)
    for share in np.linspace(0.1, 1, 40):
        differ = generator.random(30) < share
        factors = [
            Fraction(-1, size) if other else Fraction(size - 1, size) for size, other in zip(sizes, differ, strict=True)
        ]
        products = [math.prod((factors[feature] for feature in features), start=Fraction(1)) for features in sets]
        reached = max(reached, sum(2 * w * (r.kappa - p) for (r, w), p in zip(made, products, strict=True)))
    assert 0.9 * bound < reached <= bound


def test_numbers_are_exact_modulo_two_to_the_64():
    """Whatever the counts: nothing is cut, so that a row moves the numbers by the same, modulo 2^64, everywhere."""
    small = Residual((3, 2), (0, 1))
    counts = np.array([0, 1 << 40, 1 << 60, (1 << 62) + 5, (1 << 63) - 1, 5])
    exact = scaled_projection((3, 2)) @ counts.astype(object)
    assert max(map(abs, exact)) > 1 << 63
    assert [(int(found) - wanted) % (1 << 64) for found, wanted in zip(small.centred(counts), exact, strict=True)] == [
        0
    ] * 6
    more = counts + np.eye(6, dtype=np.int64)[2]
    assert (small.centred(more) - small.centred(counts)).tolist() == scaled_projection((3, 2))[:, 2].tolist()


@pytest.mark.parametrize("shape", [(1 << 12, 1 << 11), (2,) * 23, (2, 1 << 22)])
def test_numbers_of_many_rows_are_exact(shape):
    tally = Residual(shape, tuple(range(len(shape))))
    assert tally.cells == MOST_CELLS
    counts = np.zeros(MOST_CELLS, np.int64)
    counts[7] = rows = (1 << 39) - 1
    numbers = tally.centred(counts)
    assert int(numbers[7]) == rows * math.prod(size - 1 for size in shape)
    assert int(np.abs(numbers).max()) == int(numbers[7])


class Posing(Residual):
    """A residual that says it moves less than it does."""

    @property
    def kappa(self):
        return Fraction(1, 10**6)

    furthest = kappa


WIDE = (3, 1, 4096, 2048, 2)


@pytest.mark.parametrize(
    "tally",
    [
        Residual(WIDE, (0, 1)),
        Residual(WIDE, (1,)),
        Residual(WIDE, (0, 0)),
        Residual(WIDE, (0, 5)),
        Residual(WIDE, (-1,)),
        Residual(WIDE, ()),
        Residual(WIDE, (2, 3, 4)),
        Residual(WIDE[:3], (0,)),
        Posing(WIDE, (0, 2)),
    ],
)
def test_what_is_no_residual_is_refused(tally):
    check_tally(Residual(WIDE, (2, 3)), WIDE)
    with pytest.raises(WorkloadError, match="must be of tallies over the columns of this schema"):
        check_tally(tally, WIDE)


def test_a_copy_is_of_plain_numbers():
    tally = Residual((np.int64(3), np.int64(2)), (np.int64(1), np.int64(0)))  # type: ignore[arg-type]
    plain = copied(tally)
    assert type(plain) is Residual
    assert plain == Residual((3, 2), (1, 0))
    assert {type(number) for number in (*plain.sizes, *plain.features)} == {int}
    posing = Posing(SIZES, (0,))
    assert copied(posing) is posing, "it stays what check_tally refuses"


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries that are what they are told to be."""

    listed: tuple
    streamed: tuple
    sizes: tuple = SIZES

    @property
    def blocks(self):
        return sum(piece.blocks for piece in self.listed)

    @property
    def cells(self):
        return sum(piece.tally.cells for piece in self.listed)

    def pieces(self, limit):
        return iter(self.listed if limit > 1 << 40 else self.streamed)


RESIDUALS = Workload((Residuals(SIZES, ((0, 1), (2,))),))
MIXED = Workload((Marginals(SIZES, ((0, 1),)), Residuals(SIZES, ((0, 1),))))
UNIFORM = RelaxedTable(
    SIZES,
    np.concatenate([np.full((size, 2), 1 / size) for size in SIZES]).astype(np.float32),
    np.full(2, 0.5, np.float32),
)


def single(tally):
    return Piece(tally, 0, tally.cells)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("score", [AbsoluteError(), L1Error(), MaxError()])
@pytest.mark.parametrize("workload", [RESIDUALS, MIXED])
def test_residuals_are_not_selected_by_arrays(workload, score, relation):
    curator = Curator(source(), BUDGET, neighbours=relation)
    estimate = [np.zeros(piece.tally.cells) for piece in workload.pieces()]
    with pytest.raises(WorkloadError, match="residuals must be measured: they cannot be selected"):
        curator.select(workload, estimate, rho=0.001, score=score)
    assert {spend.kind for spend in curator.privacy().spends} <= {"total"}
    assert relation == "add-remove" or curator.privacy().spends == ()


@pytest.mark.parametrize(
    ("listed", "streamed"),
    [
        (single(Residual(SIZES, (0, 1))), single(Residual(SIZES, (0, 1)))),
        (single(Residual(SIZES, (0, 1))), single(GroupBy(SIZES, (0, 1), 0, 3))),
        (single(GroupBy(SIZES, (0, 1), 0, 3)), single(Residual(SIZES, (0, 1)))),
    ],
)
@pytest.mark.parametrize("table", [True, False])
def test_residuals_that_pose_as_single_queries_are_not_selected(listed, streamed, table):
    """A table looks at what is listed alone; arrays at what is streamed as well."""
    curator = Curator(source(), BUDGET)
    workload = Workload((Asked((listed,), (streamed,)),))
    if table and isinstance(listed.tally, GroupBy):
        assert curator.select(workload, UNIFORM, rho=0.001).size == 1
        return
    with pytest.raises(WorkloadError, match="residuals must be measured: they cannot be selected"):
        curator.select(workload, UNIFORM if table else [np.zeros(6)], rho=0.001)
    assert curator.privacy().spends == ()


def test_blocks_of_residuals_are_not_selected_by_a_table():
    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError, match="estimate must be arrays"):
        curator.select(RESIDUALS, UNIFORM, rho=0.001)
    assert curator.privacy().spends == ()


@pytest.mark.parametrize(
    "workload",
    [
        Workload((Residuals(SIZES, ((0, 1), (0, 1))),)),
        Workload((Residuals(SIZES, ((0, 1),)), Marginals(SIZES, ((0, 1),)), Residuals(SIZES, ((0, 1),)))),
    ],
)
def test_a_residual_asked_twice_is_refused_before_the_charge(workload):
    curator = Curator(source(), BUDGET)
    with pytest.raises(WorkloadError, match="must be asked once"):
        curator.measure(workload, rho=0.001)
    assert curator.privacy().spends == ()


def test_features_in_another_order_are_another_block():
    both = [Residual(SIZES, (0, 1)), Residual(SIZES, (1, 0))]
    for relation in RELATIONS:
        assert squared_sensitivity(both, relation) == 2 * squared_sensitivity(both[:1], relation)


def test_residuals_that_the_curator_does_not_know_are_refused_before_the_charge():
    for tally in (Posing(SIZES, (0, 1)), Residual((3, 2), (0, 1))):
        curator = Curator(source(), BUDGET)
        with pytest.raises(WorkloadError, match="over the columns of this schema"):
            curator.measure(Workload((Asked((Piece(tally, 0, 1),), ()),)), rho=0.001)
        assert curator.privacy().spends == ()


def test_noise_beyond_its_range_is_refused_before_the_charge():
    """In units of one over the cells the noise is larger than that of the marginal, which is measured."""
    sizes, rows = (1 << 10, 1 << 10), np.zeros((5, 2))
    curator = Curator(source(rows, sizes), BUDGET)
    with pytest.raises(ParameterError, match="sigma"):
        curator.measure(Workload((Residuals(sizes, ((0, 1),)),)), rho=1e-13)
    assert curator.privacy().spends == ()
    curator.measure(Workload((Marginals(sizes, ((0,),)),)), rho=1e-13)


@pytest.fixture
def sigmas(monkeypatch):
    """Records the noise that is asked for, and makes none."""
    seen = []

    def gaussian(size, sigma, bits):
        seen.append(sigma)
        return np.zeros(size, np.int64)

    monkeypatch.setattr(curator_module, "discrete_gaussian", gaussian)
    return seen


WEIGHTED = Workload(
    (
        Residuals(SIZES, ((0,), (2, 0))),
        Marginals(SIZES, ((1, 2), (0,))),
        Residuals(SIZES, ((0, 1, 2),)),
    ),
    weights=(Fraction(3, 7), Fraction(1), Fraction(5)),
)


def moved_by(tallies, weights, relation):
    """The most that a neighbour moves residuals, and marginals beside them."""
    paired = list(zip(tallies, weights, strict=True))
    most = 2 if relation == "replace" else 1
    apart = sum((most * weight for tally, weight in paired if not isinstance(tally, Residual)), start=Fraction(0))
    return apart + moves(*zip(*((t, w) for t, w in paired if isinstance(t, Residual)), strict=True))[most]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("rho", [0.01, 0.0123, 1 / 300, 0.0071, 0.000917])
def test_the_noise_is_rounded_up_in_the_unit_of_each_tally(sigmas, relation, rho):
    """Whatever the rounding, the whole costs at most rho, in exact arithmetic, and hardly less."""
    curator = Curator(source(), BUDGET, neighbours=relation)
    total = curator.total
    sigmas.clear()
    measurement = curator.measure(WEIGHTED, rho=rho)
    pieces = list(WEIGHTED.pieces())
    units = [3, 12, 1, 1, 24]
    assert [scale(piece.tally) for piece in pieces] == units
    tallies = [piece.tally for piece in pieces]
    exact = moved_by(tallies, [piece.weight for piece in pieces], relation)
    squared = squared_sensitivity(tallies, relation, [piece.weight for piece in pieces])
    assert exact <= squared <= exact * (1 + Fraction(1, 10**12))
    for piece, unit, found in zip(pieces, units, sigmas, strict=True):
        wanted = Fraction(gaussian_sigma(squared / piece.weight, rho)) * unit
        assert Fraction(math.nextafter(found, 0)) < wanted <= Fraction(found)
    precisions = [1 / (Fraction(sigma) / unit) ** 2 for sigma, unit in zip(sigmas, units, strict=True)]
    cost = moved_by(tallies, precisions, relation) / 2
    assert cost <= Fraction(rho)
    assert float(cost) == pytest.approx(rho, rel=1e-12)
    assert measurement.sigma == pytest.approx(np.array(sigmas) / units / total, rel=1e-14)
    exact = [
        residual_counts(ROWS, SIZES, piece.tally.features)
        if isinstance(piece.tally, Residual)
        else marginal_counts(ROWS, SIZES, piece.tally.features)
        for piece in pieces
    ]
    assert measurement.values * total == pytest.approx(np.concatenate(exact).astype(float), abs=1e-9)


def test_some_noise_would_be_too_small_without_rounding_up():
    """So that the test above can fail."""
    rhos = [0.01, 0.0123, 1 / 300, 0.0071, 0.000917]
    exact = [Fraction(gaussian_sigma(Fraction(2), rho)) * 3 for rho in rhos]
    assert any(Fraction(float(value)) < value for value in exact)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_noise_has_the_size_and_the_unit_that_are_stated(relation):
    """6 counts of noise in 200 measurements of 12 cells: the deviation is known to 1 in sqrt(2 * 2400) or 1.4%.

    Of 4.5 such deviations, 1.065, neither twice the variance nor that of a replaced row is mistaken for it.
    """
    curator = Curator(source(), HUGE, neighbours=relation, unsafe_seed=5)
    total, workload = curator.total, Workload((Residuals(SIZES, ((2, 0),)),))
    kappa = Fraction(3 * 2, 4 * 3) if relation == "add-remove" else 2 * Fraction(3, 4)
    rho = float(kappa) / 2 / 36
    repeats = [curator.measure(workload, rho=rho) for _ in range(200)]
    exact = residual_counts(ROWS, SIZES, (2, 0)).astype(float)
    noise = np.stack([found.values * total - exact for found in repeats])
    units = noise * 12
    assert np.allclose(units, np.rint(units), atol=1e-5)
    assert len(np.unique(np.rint(units) % 12)) == 12, "not whole counts: every twelfth of one occurs"
    assert repeats[0].sigma * total == pytest.approx([6.0])
    assert abs(noise.std() / 6 - 1) < 4.5 / math.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 4.5 * 6 / math.sqrt(noise.size)
    lines = noise.reshape(-1, 4, 3).sum(axis=1)  # the noise is not centred: each cell has its own
    assert abs(lines.std() / (6 * math.sqrt(4)) - 1) < 4.5 / math.sqrt(2 * lines.size)


def test_residuals_and_marginals_have_different_digests():
    parts = [kind(SIZES, ((0, 1),)) for kind in (Residuals, Marginals)]
    one, other = (Workload((part,)).digest for part in parts)
    assert one != other
    assert Workload((Residuals(SIZES, ((1, 0),)),)).digest != one
