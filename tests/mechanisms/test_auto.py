"""auto: what it measures and with which share of the budget, numbers in bands, and the smallest of data."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anamorph import archive
from anamorph.columns import Codes, Numeric
from anamorph.curator.budget import Budget
from anamorph.curator.curator import Curator
from anamorph.curator.tallies import count
from anamorph.errors import ParameterError, WorkloadError
from anamorph.mechanisms import auto
from anamorph.mechanisms.auto import BETWEEN, FEWEST, MOST, MOST_BANDS, Auto, Split, in_residuals, planned, split
from anamorph.mechanisms.mechanism import description, mechanism
from anamorph.models.banded import BandedRows
from anamorph.models.relaxed import RelaxedRows
from anamorph.models.shrinking import ShrinkingProjection
from anamorph.models.thinning import thinned
from anamorph.planning import plan
from anamorph.queries.banding import FINER, FINEST
from anamorph.queries.bands import Banded
from anamorph.queries.custom import Custom, CustomCells, custom
from anamorph.queries.marginals import Marginals
from anamorph.queries.residuals import Residuals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.thresholds import Thresholds
from anamorph.queries.workload import Workload
from anamorph.questions import ask
from anamorph.schema import Schema
from anamorph.sources import TableSource
from anamorph.table import Table
from anamorph.tables import measured_sets

SIZES = (3, 4, 2, 5)
SCHEMA = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(SIZES)), dataset="rows")
SMALL = Auto(rows=16, effort=1.0)
RELATIONS = ("replace", "add-remove")
PAIRS = parse_workload("marginals:k=2", SCHEMA)
VALUES = custom(lambda row: row["c1"], SCHEMA, name="mine:values")
ONE = custom(lambda row: row["c0"][0] * row["c2"][1], SCHEMA, name="mine:one")


def rows_of(count, sizes=SIZES):
    generator = np.random.default_rng(4)
    first = generator.integers(0, sizes[0], count)
    return np.stack([(first + generator.binomial(1, 0.3, count)) % size for size in sizes], axis=1).astype(np.int32)


def curator(count=2000, relation="replace", epsilon=1.0, schema=SCHEMA, codes=None, seed=1):
    table = Table(rows_of(count, schema.sizes) if codes is None else codes, schema.sizes)
    budget = Budget(epsilon=epsilon, delta=1e-6)
    return Curator(TableSource(table, schema), budget, neighbours=relation, unsafe_seed=seed)


def marginals(*sets, sizes=SIZES, weights=(), **more):
    return Workload((Marginals(sizes, sets),), weights=weights, **more)


def shares_of(queries):
    """The share of the budget of each marginal, and of each function: by its weight where all add up to 1."""
    weights = {}
    for part, weight in zip(queries.parts, queries.weights, strict=True):
        keys = part.sets if isinstance(part, Marginals) else [part.function.name]
        assert not set(keys) & set(weights)
        # A marginal moves by 1, however many cells it has, a function by 1 for each of its values.
        weights |= dict.fromkeys(keys, float(weight) * (1 if isinstance(part, Marginals) else part.cells))
    whole = sum(weights.values())
    return {key: weight / whole for key, weight in weights.items()}


def by_order(shares):
    found = {}
    for features, share in shares.items():
        found.setdefault(len(features), []).append(share)
    return found


# --- what is measured


@pytest.mark.parametrize(
    ("order", "parts"),
    [
        (1, [1.0]),
        (2, [0.1, 0.9]),
        (3, [0.1, 0.45 * 0.9, 0.55 * 0.9]),
        (4, [0.1, 0.45 * 0.9 * 0.6, 0.45 * 0.9 * 0.4, 0.55 * 0.9]),
    ],
)
def test_orders_share_the_budget_and_marginals_of_an_order_share_alike(order, parts):
    found = by_order(shares_of(planned(parse_workload(f"marginals:k={order}", SCHEMA))))
    assert [sum(found[k]) for k in range(1, order + 1)] == pytest.approx(parts, rel=1e-5)
    for k, each in found.items():
        assert len(each) == math.comb(4, k)
        assert each == pytest.approx([each[0]] * len(each))


@pytest.mark.parametrize("shares", [Split(0.05, 0.01), Split(0.3, 0.2), Split(0.5, 0.45)])
def test_orders_have_the_shares_they_are_given(shares):
    for order in (2, 3, 4):
        found = by_order(shares_of(planned(parse_workload(f"marginals:k={order}", SCHEMA), shares)))
        between = 0 if order == 2 else shares.between * (1 - shares.singles)
        assert sum(found[1]) == pytest.approx(shares.singles, rel=1e-5)
        assert sum(found[order]) == pytest.approx(1 - shares.singles - between, rel=1e-5)
        each = {2: [], 3: [between], 4: [0.6 * between, 0.4 * between]}[order]
        assert [sum(found[k]) for k in range(2, order)] == pytest.approx(each, rel=1e-4)


def test_what_matters_more_has_more_of_its_order():
    asked = Workload(
        (Marginals(SIZES, ((0, 1, 2),)), Marginals(SIZES, ((3, 1), (0, 1)))), weights=(Fraction(1), Fraction(3))
    )
    found = shares_of(planned(asked))
    assert set(found) == {(0,), (1,), (2,), (3,), (0, 1), (0, 2), (1, 2), (1, 3), (0, 1, 2)}
    assert found[0, 1] == pytest.approx(3 / 5 * 0.45 * 0.9, rel=1e-5), "the largest weight of those it is inside"
    assert found[0, 2] == found[1, 2] == pytest.approx(1 / 5 * 0.45 * 0.9, rel=1e-5)
    assert found[1, 3] == pytest.approx(3 / 4 * 0.55 * 0.9, rel=1e-5), "inside no other, though it is only a pair"
    assert found[0, 1, 2] == pytest.approx(1 / 4 * 0.55 * 0.9, rel=1e-5)
    turned = Workload(asked.parts[::-1], weights=asked.weights[::-1])
    assert shares_of(planned(turned)) == pytest.approx(found)
    twice = Workload((*asked.parts, Marginals(SIZES, ((1, 0),))), weights=(*asked.weights, Fraction(1, 2)))
    assert shares_of(planned(twice)) == pytest.approx(found)


def test_only_what_is_inside_is_measured_but_every_column():
    found = shares_of(planned(marginals((2, 0))))
    assert found == pytest.approx({(0,): 0.025, (1,): 0.025, (2,): 0.025, (3,): 0.025, (0, 2): 0.9}, rel=1e-5)
    assert shares_of(planned(marginals((1,)))) == pytest.approx({(column,): 0.25 for column in range(4)})


def test_pairs_beside_one_triple_have_their_share():
    """A pair inside no other marginal is not between anything, whatever else is asked."""
    few = shares_of(planned(marginals((0, 3), (1, 3), (2, 3)), Split(0.1, 0.001)))
    more = shares_of(planned(marginals((0, 3), (1, 3), (2, 3), (0, 1, 2)), Split(0.1, 0.001)))
    assert few[0, 3] == pytest.approx(0.3, rel=1e-4)
    assert more[0, 3] == pytest.approx(0.9 * 0.999 / 4, rel=1e-4)


@pytest.mark.parametrize("most", [1, 14, 30, 84, 85, 120, 238, 239, 500])
def test_the_largest_marginals_are_left_out_where_there_are_too_many_cells(monkeypatch, most):
    """14 cells of columns, 71 of pairs, 154 of triples."""
    monkeypatch.setattr(auto, "MOST_CELLS", most)
    found = shares_of(planned(parse_workload("marginals:k=3", SCHEMA)))
    cells = {features: math.prod(SIZES[f] for f in features) for features in found}
    assert {(column,) for column in range(4)} <= set(found)
    assert sum(cells.values()) <= max(most, 14)
    every = [f for k in (1, 2, 3) for f in itertools.combinations(range(4), k)]
    left = [math.prod(SIZES[f] for f in features) for features in every if features not in found]
    assert all(sum(cells.values()) + each > most for each in left), "no more would fit"
    assert sum(found.values()) == pytest.approx(1)
    for features in found:
        assert all(part in found for part in itertools.combinations(features, len(features) - 1) if part)


@pytest.mark.parametrize(("most", "order"), [(3, 1), (4, 1), (9, 1), (10, 2), (13, 2), (14, 3)])
def test_the_largest_orders_are_left_out_where_there_are_too_many(monkeypatch, most, order):
    """4 columns, 6 pairs, 4 triples."""
    monkeypatch.setattr(auto, "MOST_SETS", most)
    assert max(by_order(shares_of(planned(parse_workload("marginals:k=3", SCHEMA))))) == order


@pytest.mark.parametrize("cells", [False, True])
def test_thresholds_and_single_cells_are_measured_as_marginals(cells):
    asked = Workload((Thresholds(SIZES, ((0, 1, 2),), 2), Thresholds(SIZES, ((3, 1),), 1)))
    queries = planned(asked.by_cell() if cells else asked)
    assert all(type(part) is Marginals for part in queries.parts)
    assert queries.digest == planned(marginals((0, 1, 2), (1, 3))).digest


def test_functions_beside_marginals_have_half():
    queries = planned(Workload((*PAIRS.parts, VALUES, ONE)))
    found = shares_of(queries)
    assert found.pop("mine:values") == pytest.approx(0.5 * 4 / 5, rel=1e-5), "a value each, alike"
    assert found.pop("mine:one") == pytest.approx(0.5 / 5, rel=1e-5)
    parts = by_order(found)
    assert [sum(parts[1]), sum(parts[2])] == pytest.approx([0.5 * 0.1, 0.5 * 0.9], rel=1e-5)


def test_functions_alone_leave_single_columns_their_share():
    found = shares_of(planned(Workload((VALUES,))))
    assert found.pop("mine:values") == pytest.approx(0.9, rel=1e-5)
    assert found == pytest.approx({(column,): 0.025 for column in range(4)}, rel=1e-5)


def test_functions_share_by_weight():
    weighed = planned(Workload((VALUES, ONE), weights=(Fraction(1), Fraction(2))))
    assert shares_of(weighed)["mine:one"] == pytest.approx(0.9 * 2 / 6, rel=1e-5)
    chosen = planned(Workload((VALUES.by_cell().take([0, 2]), *PAIRS.parts)))
    assert [type(part) for part in chosen.parts].count(CustomCells) == 1
    assert shares_of(chosen)["mine:values"] == pytest.approx(0.5, rel=1e-5)


def test_pieces_are_as_large_as_the_workload_has_them():
    assert planned(marginals((0, 1), limit=7)).limit == 7


SUBSETS = [s for k in range(1, 5) for s in itertools.permutations(range(4), k)]
PARTS = st.one_of(
    st.lists(st.sampled_from(SUBSETS), min_size=1, max_size=4).map(lambda s: Marginals(SIZES, tuple(s))),
    st.lists(st.sampled_from(SUBSETS), min_size=1, max_size=3).map(lambda s: Thresholds(SIZES, tuple(s), 1)),
    st.lists(st.sampled_from(SUBSETS), min_size=1, max_size=3).map(lambda s: Marginals(SIZES, tuple(s)).by_cell()),
    st.sampled_from([VALUES, ONE, VALUES.by_cell(), VALUES.by_cell().take([3, 1])]),
)


@given(
    st.lists(st.tuples(PARTS, st.fractions(Fraction(1, 1000), 1000)), min_size=1, max_size=4),
    st.builds(Split, st.floats(FEWEST, MOST), st.floats(1e-3, BETWEEN)),
    st.sampled_from([1 << 26, 100, 20]),
)
@settings(deadline=None, max_examples=60)
def test_whatever_is_asked_every_marginal_is_measured_once_and_shares_are_all_of_the_budget(parts, given_shares, most):
    names = [part.function for part, _ in parts if isinstance(part, Custom | CustomCells)]
    if len(set(names)) < len(names):
        return
    asked = Workload(tuple(part for part, _ in parts), weights=tuple(weight for _, weight in parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "MOST_CELLS", most)
        queries = planned(asked, given_shares)
    sets = [features for part in queries.parts if isinstance(part, Marginals) for features in part.sets]
    assert len(sets) == len(set(sets))
    assert {(column,) for column in range(4)} <= set(sets)
    assert all(features == tuple(sorted(features)) for features in sets)
    assert all(0 < weight <= 1 for weight in queries.weights)
    assert max(queries.weights) == 1
    within = [getattr(part, "marginals", part) for part in asked.parts]
    wanted = {tuple(sorted(features)) for part in within if isinstance(part, Marginals) for features in part.sets}
    assert all(len(found) == 1 or any(set(found) <= set(features) for features in wanted) for found in sets)
    if most == 1 << 26:
        assert wanted <= set(sets)
    shares = shares_of(queries)
    functions = sum(share for key, share in shares.items() if isinstance(key, str))
    assert functions == pytest.approx(0 if not names else 0.5 if wanted else 1 - given_shares.singles, rel=1e-3)
    columns = sum(shares[column,] for column in range(4)) / (1 - functions)
    larger = any(len(features) > 1 for features in sets)
    assert columns == pytest.approx(given_shares.singles if larger else 1.0, rel=1e-3)


# --- how well


@pytest.fixture(name="unfitted")
def _unfitted(monkeypatch):
    """Leaves out the fit where only what is measured is looked at."""
    rows = RelaxedRows(
        SIZES, np.concatenate([np.full((n, 1), 1 / n, np.float32) for n in SIZES]), np.ones(1, np.float32)
    )
    monkeypatch.setattr(ShrinkingProjection, "fit", lambda *_what, **_more: rows)


def faintness(rho, squared, total, order):
    """Sigma as a part of the rows, if all marginals of an order had all of the budget."""
    return math.sqrt(math.comb(len(SIZES), order) * squared / (2 * rho)) / total


def crowding(rho, squared, total, order):
    """The share of a marginal that such noise would fill."""
    cells = [math.prod(chosen) for chosen in itertools.combinations(SIZES, order)]
    return np.mean(cells) * faintness(rho, squared, total, order)


def split_of(rho, squared, total, order):
    """0.4 sqrt(e) of columns, from 0.02 to 0.4, or 2.5 s of larger ones, to 0.6; 0.45 e / (1 + e) of the largest."""
    columns, largest = (crowding(rho, squared, total, k) for k in (1, order))
    crowded = min(max(0.4 * math.sqrt(columns), 0.02), 0.4)
    faint = min(2.5 * faintness(rho, squared, total, order), 0.6) if order > 1 else 0.0
    return max(crowded, faint), 0.45 * largest / (1 + largest)


@pytest.mark.parametrize(("relation", "squared"), [("replace", 2), ("add-remove", 1)])
@pytest.mark.parametrize(
    ("count", "epsilon", "least", "most"), [(10, 0.1, 0.4, 0.6), (2000, 1, 0.05, 0.3), (2000, 1e4, 0.02, 0.02)]
)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_smaller_orders_have_more_where_noise_crowds_them(relation, squared, count, epsilon, least, most, order):
    told = curator(count, relation, epsilon)
    found = split(told, parse_workload(f"marginals:k={order}", SCHEMA))
    assert found == pytest.approx(split_of(told.remaining, squared, told.total, order), rel=1e-6)
    assert least <= found.singles <= most
    assert 0 < found.between < 0.45


@pytest.mark.parametrize(("order", "share"), [(1, 0.4), (2, 0.6), (3, 0.6)])
def test_columns_have_most_where_nothing_else_can_be_told(order, share):
    assert split(curator(10, epsilon=0.1), parse_workload(f"marginals:k={order}", SCHEMA)).singles == share


def test_shares_suit_the_largest_order_that_is_measured(monkeypatch):
    triples = parse_workload("marginals:k=3", SCHEMA)
    monkeypatch.setattr(auto, "MOST_CELLS", 100)
    assert split(curator(), triples) == split(curator(), PAIRS)


@pytest.mark.usefixtures("unfitted")
@pytest.mark.parametrize(("relation", "squared"), [("replace", 2), ("add-remove", 1)])
def test_the_noise_follows_the_shares_and_all_of_the_budget_is_spent(monkeypatch, relation, squared):
    monkeypatch.setattr(auto, "WORTH", 0.0)  # no residuals
    told = curator(relation=relation)
    rho, total = told.remaining, told.total
    found = SMALL(told, parse_workload("marginals:k=3", SCHEMA), seed=0)
    (measurement,) = found.measurements
    sets = [features for part in measurement.workload.parts for features in part.sets]
    shares = [squared / (2 * rho * (sigma * total) ** 2) for sigma in measurement.sigma]
    assert sum(shares) == pytest.approx(1, rel=1e-6)
    singles, between = split_of(rho, squared, total, 3)
    expected = {1: singles / 4, 2: between * (1 - singles) / 6, 3: (1 - between) * (1 - singles) / 4}
    assert shares == pytest.approx([expected[len(features)] for features in sets], rel=1e-4)
    spends = [Fraction(spend.rho) for spend in found.privacy.spends]
    assert sum(spends) <= Fraction(told.budget.rho)
    assert float(sum(spends)) == pytest.approx(told.budget.rho, rel=1e-9)
    assert [spend.kind for spend in found.privacy.spends] == ["total", "measure"][relation == "replace" :]


@pytest.mark.usefixtures("unfitted")
@pytest.mark.parametrize(("relation", "squared"), [("replace", 2), ("add-remove", 1)])
def test_the_noise_of_functions_is_that_of_all_their_values(relation, squared):
    """A value of a function moves by 1 at most, a marginal by 1 in one cell, or in two."""
    told = curator(relation=relation)
    rho, total = told.remaining, told.total
    (measurement,) = SMALL(told, Workload((*PAIRS.parts, VALUES)), seed=0).measurements
    moved = (0.5 * squared + 0.5) / (2 * rho)
    assert measurement.sigma[-1] * total == pytest.approx(math.sqrt(moved / (0.5 / 4)), rel=1e-4)
    assert np.sum((measurement.sigma[:-1] * total) ** -2) == pytest.approx(0.5 / moved, rel=1e-4)


@pytest.mark.parametrize("asked", [PAIRS, marginals((0, 1, 2)), marginals((3,)), Workload((VALUES,))])
def test_the_plan_is_what_is_measured_but_for_the_share_of_columns(asked):
    told = curator(epsilon=3.0)
    (step,) = SMALL.steps_for(asked, 0.5)
    assert (step.kind, step.rho, step.blocks, step.cells) == (
        "measure",
        0.5,
        step.workload.blocks,
        step.workload.cells,
    )
    queries = planned(asked, split(told, asked))
    assert (queries.blocks, queries.cells) == (step.blocks, step.cells)
    assert shares_of(queries).keys() == shares_of(step.workload).keys()
    assert sum(share for key, share in shares_of(step.workload).items() if len(key) == 1) == pytest.approx(
        1.0 if asked.largest_block == 5 else 0.1, rel=1e-5
    )


def test_memory_grows_with_the_workload_and_the_rows():
    needed = [Auto().memory(parse_workload(f"marginals:k={order}", SCHEMA)) for order in (1, 2, 3, 4)]
    assert needed == sorted(set(needed))
    large = (100, 100, 100)
    whole, pairs = (
        Auto().memory(marginals(*sets, sizes=large, limit=1 << 10)) for sets in ([(0, 1, 2)], [(0, 1), (1, 2)])
    )
    assert whole - pairs > 8 * 10**6
    assert Auto(rows=512).memory(PAIRS) - Auto(rows=256).memory(PAIRS) >= 4 * 4 * 256 * sum(SIZES)
    assert Auto().memory(PAIRS) == Auto(rows=4096).memory(PAIRS), "the most that there may be"
    wide = marginals((0, 1), sizes=(3000, 3000))
    assert Auto().memory(wide) == Auto(rows=(1 << 23) // 6000).memory(wide)
    left, right = (Auto().memory(marginals((0, 1, 2), sizes=large, limit=1 << power)) for power in (12, 16))
    assert left < right


# --- residuals

BITS = (2,) * 6
BINARY = Schema(tuple(Codes(name=f"b{i}", values=2) for i in range(6)), dataset="bits")
BINARY_PAIRS = parse_workload("marginals:k=2", BINARY)


def bits(relation="add-remove", epsilon=1.0, count=2000, schema=BINARY):
    return curator(count, relation, epsilon, schema)


def known_by(sizes, sets, sigmas):
    """The precision of every residual inside some marginals."""
    found = {}
    for features, sigma in zip(sets, sigmas, strict=True):
        for order in range(1, len(features) + 1):
            for inner in itertools.combinations(features, order):
                outside = math.prod(sizes[f] for f in features if f not in inner)
                found[inner] = found.get(inner, 0.0) + 1 / (sigma**2 * outside)
    return found


def variance(sizes, features, known):
    """The variance of a cell of a marginal, by the precision of each residual."""
    found = 0.0
    for order in range(1, len(features) + 1):
        for inner in itertools.combinations(features, order):
            outside = math.prod(sizes[f] for f in features if f not in inner)
            found += math.prod(1 - 1 / sizes[f] for f in inner) / known[inner] / outside**2
    return found


@pytest.mark.usefixtures("unfitted")
@pytest.mark.parametrize("relation", ["add-remove", "replace"])
@pytest.mark.parametrize("order", [2, 3])
def test_residuals_leave_less_noise_for_the_same_budget(monkeypatch, order, relation):
    asked = parse_workload(f"marginals:k={order}", BINARY)
    noise = {}
    for worth in (0.0, 0.95):
        monkeypatch.setattr(auto, "WORTH", worth)
        told = bits(relation)
        found = SMALL(told, asked, seed=0)
        assert float(sum(spend.rho for spend in found.privacy.spends)) == pytest.approx(told.budget.rho, rel=1e-9)
        (item,) = found.measurements
        sets = [features for part in item.workload.parts for features in part.sets]
        if worth:
            assert {type(part) for part in item.workload.parts} == {Residuals}
            known = {features: sigma**-2.0 for features, sigma in zip(sets, item.sigma, strict=True)}
        else:
            known = known_by(BITS, sets, item.sigma)
        noise[worth] = [variance(BITS, features, known) for features in itertools.combinations(range(6), order)]
    assert np.ptp(noise[0.95]) < 1e-3 * max(noise[0.95]), "all are alike"
    assert max(noise[0.95]) < 0.85 * min(noise[0.0])


@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        (marginals((0, 1), sizes=(30, 40)), Schema((Codes(name="a", values=30), Codes(name="b", values=40)))),
        (marginals((3,)), SCHEMA),
        (marginals((0,), (1,)), SCHEMA),
        (Workload((*BINARY_PAIRS.parts, custom(lambda row: row["b1"], BINARY, name="mine:bit"))), BINARY),
    ],
)
def test_marginals_stay_where_residuals_tell_no_more_or_are_not_all(asked, schema):
    told = bits(schema=schema)
    assert in_residuals(told, asked, split(told, asked)) is None


def test_where_rows_are_replaced_residuals_must_make_up_for_what_they_cost_more(monkeypatch):
    """Of 16 binary columns, pairs: half of the variance for 1.09 of the cost, where one by one it would be twice."""
    schema = Schema(tuple(Codes(name=f"b{i}", values=2) for i in range(16)), dataset="bits")
    asked = parse_workload("marginals:k=2", schema)
    for relation, least in (("add-remove", 0.46), ("replace", 0.50)):
        for worth, measured in ((least, False), (least + 0.1, True)):
            monkeypatch.setattr(auto, "WORTH", worth)
            found = in_residuals(bits(relation, schema=schema), asked, Split(0.1, 0.2))
            assert (found is not None) == measured


def test_marginals_stay_where_residuals_are_too_many(monkeypatch):
    shares = split(bits(), BINARY_PAIRS)
    for name, least in (("MOST_INSIDE", 60), ("MOST_RESIDUAL_CELLS", 72)):
        monkeypatch.setattr(auto, name, least)
        assert in_residuals(bits(), BINARY_PAIRS, shares) is not None
        monkeypatch.setattr(auto, name, least - 1)
        assert in_residuals(bits(), BINARY_PAIRS, shares) is None
        monkeypatch.undo()


@pytest.mark.usefixtures("unfitted")
def test_marginals_stay_where_the_noise_of_residuals_is_out_of_range(monkeypatch):
    """Residuals are counted in units of 1 / cells: their noise is out of range before that of marginals."""
    (item,) = SMALL(bits(), BINARY_PAIRS, seed=0).measurements
    widths = [math.prod(BITS[f] for f in features) for part in item.workload.parts for features in part.sets]
    largest = float(np.max(item.sigma * item.total * widths))
    for factor, kind in ((2.1, Residuals), (1.9, Marginals)):
        monkeypatch.setattr(auto, "LARGEST", factor * largest)
        (item,) = SMALL(bits(), BINARY_PAIRS, seed=0).measurements
        assert {type(part) for part in item.workload.parts} == {kind}


def test_columns_that_no_marginal_has_are_measured_too():
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate((2, 2, 2, 2, 3))), dataset="few")
    pairs = list(itertools.combinations(range(4), 2))
    asked = marginals(*pairs, sizes=schema.sizes)
    told = bits(schema=schema)
    queries = in_residuals(told, asked, split(told, asked))
    assert queries is not None
    assert {features for part in queries.parts for features in part.sets} == {(f,) for f in range(5)} | set(pairs)
    assert SMALL(told, asked, seed=0).model.sizes == schema.sizes


def test_what_matters_more_is_known_better_in_residuals_too():
    sets = list(itertools.combinations(range(6), 2))
    asked = Workload((Marginals(BITS, tuple(sets[:5])), Marginals(BITS, tuple(sets[5:]))), weights=(4, 1))
    queries = in_residuals(bits(), asked, Split(0.02, 0.0))
    weight = {f: w for part, w in zip(queries.parts, queries.weights, strict=True) for f in part.sets}
    assert float(weight[sets[0]] / weight[sets[-1]]) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("asked", ["marginals:k=2", "marginals:k=3", "marginals:k=2; marginals:k=3"])
def test_a_fit_to_residuals_comes_to_the_truth(asked, tmp_path):
    told = bits(epsilon=1e4)
    found = Auto(rows=64)(told, parse_workload(asked, BINARY), seed=0)
    assert {type(part) for part in found.measurements[0].workload.parts} == {Residuals}
    rows = rows_of(2000, BITS)
    for features in itertools.combinations(range(6), 2):
        exact = np.histogramdd(rows[:, features], bins=[[-0.5, 0.5, 1.5]] * 2)[0].ravel() / 2000
        (answer,) = found.model.answers(marginals(features, sizes=BITS))
        np.testing.assert_allclose(answer, exact, atol=2e-3)
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release")
    assert loaded.measurements[0].workload.digest == found.measurements[0].workload.digest
    assert set(measured_sets(loaded)) == set(measured_sets(found))
    assert max(map(len, measured_sets(found))) == (2 if asked == "marginals:k=2" else 3)
    answered = ask(loaded, "b0 = 1 and b3 = 0")
    assert answered.low <= np.mean((rows[:, 0] == 1) & (rows[:, 3] == 0)) <= answered.high


# --- the release


@cache
def made(relation="replace"):
    return SMALL(curator(relation=relation), PAIRS, seed=3)


def test_a_release_is_that_of_its_seeds():
    first, again = made(), SMALL(curator(), PAIRS, seed=3)
    np.testing.assert_array_equal(first.measurements[0].values, again.measurements[0].values)
    np.testing.assert_array_equal(first.model.probabilities, again.model.probabilities)
    other, noisier = SMALL(curator(), PAIRS, seed=4), SMALL(curator(seed=2), PAIRS, seed=3)
    np.testing.assert_array_equal(first.measurements[0].values, other.measurements[0].values)
    for different in (other, noisier):
        assert not np.allclose(first.model.probabilities, different.model.probabilities, atol=1e-3)


def test_the_fit_is_of_what_is_said(monkeypatch):
    monkeypatch.setattr(auto, "suited", lambda estimator, *_what, **_more: estimator)
    told = auto.told(SIZES, made().measurements)
    for matters in ("balanced", "max", "average"):
        found = Auto(rows=16, effort=1.0, objective=matters)(curator(), PAIRS, seed=3)
        expected = ShrinkingProjection(rows=16, effort=1.0, objective=matters)
        np.testing.assert_array_equal(found.model.probabilities, expected.fit(SIZES, told, seed=3).probabilities)
        assert matters == "balanced" or not np.array_equal(found.model.probabilities, made().model.probabilities)
        assert found.mechanism == {"name": "auto", "objective": matters, "rows": 16, "effort": 1.0}


@pytest.mark.parametrize("relation", RELATIONS)
def test_how_much_is_shrunk_is_tried_on_halves_of_what_is_said(monkeypatch, relation):
    given = []

    def suited(estimator, asked, *halves, seed):
        given.append((asked.parts, halves, seed))
        return replace(estimator, loudness=8.0, firmness=2.0)

    monkeypatch.setattr(auto, "suited", suited)
    found = SMALL(curator(relation=relation), PAIRS, seed=3)
    ((asked, halves, seed),) = given
    assert (asked, seed) == (PAIRS.parts, 3)
    for half, expected in zip(halves, thinned(found.measurements, seed=3), strict=True):
        np.testing.assert_array_equal(half[0].values, auto.told(SIZES, expected)[0].values)
    told = auto.told(SIZES, found.measurements)
    refitted = ShrinkingProjection(rows=16, effort=1.0, loudness=8.0, firmness=2.0).fit(SIZES, told, seed=3)
    np.testing.assert_array_equal(refitted.probabilities, found.model.probabilities)
    assert found.mechanism == description(SMALL), "nobody sets it"


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_release_is_saved_loaded_sampled_and_asked(relation, tmp_path):
    found = made(relation)
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release")
    assert type(loaded.model) is RelaxedRows
    assert loaded.mechanism == found.mechanism == description(SMALL)
    assert loaded.measurements[0].workload.digest == found.measurements[0].workload.digest
    rows = loaded.model.sample(50, seed=0)
    assert rows.rows == 50
    assert np.all((rows.codes >= 0) & (rows.codes < SIZES))
    for question in ("c0 = 1 and c3 < 2", "c1 = 0 or c2 = 1"):
        before, after = ask(found, question), ask(loaded, question)
        assert 0 <= before.fraction <= 1
        assert after.fraction == pytest.approx(before.fraction, abs=1e-6)


def test_a_loss_that_is_no_number_is_told(monkeypatch):
    assert not made().degraded
    fit = ShrinkingProjection.fit

    def broken(self, sizes, measurements, *, seed):
        (item,) = measurements
        pairs = [np.full(p.tally.cells, len(p.tally.features) == 2) for p in item.workload.pieces()]
        values = np.where(np.concatenate(pairs), np.nan, item.values)
        return fit(self, sizes, (replace(item, values=values),), seed=seed)

    monkeypatch.setattr(ShrinkingProjection, "fit", broken)
    found = SMALL(curator(), PAIRS, seed=3)
    assert found.degraded
    assert np.all(np.isfinite(found.model.probabilities))


# --- numbers

NATIVE = Schema(
    (
        Codes(name="a", values=3),
        Numeric(name="x", lower=0, upper=19, integer=True, native=True),
        Codes(name="b", values=2),
        Numeric(name="y", lower=0.0, upper=1.0, native=True, missing=True),
    ),
    dataset="rows",
)
SPECS = ["bands:k=2,bands=4", "mixed:k=2,count=6,seed=1", "halfspaces:count=5,target=b,seed=1; marginals:k=2"]


def native_rows(count=400):
    """X is twice a, and something; y lies below b / 2 or above it, and is missing now and then."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 3, count), generator.integers(0, 2, count)
    x = 6 * a + generator.integers(0, 6, count)
    y = ((b + generator.random(count)) / 2 * (1 << 20)).astype(int)
    y[generator.random(count) < 0.1] = 1 << 20
    return np.stack([a, x, b, y], axis=1).astype(np.int32)


def native_curator(relation="replace", count=400, epsilon=1.0):
    return curator(relation=relation, schema=NATIVE, codes=native_rows(count), epsilon=epsilon)


@pytest.mark.parametrize("spec", [*SPECS, "marginals:k=2", "thresholds:k=2,r=1"])
def test_numbers_are_planned_as_they_are_measured(spec):
    """But for the number of bands, which a run chooses by its noise, and the shares that follow from it."""
    asked, told = parse_workload(spec, NATIVE), native_curator(count=20_000)
    found = SMALL(told, asked, seed=0)
    (step,) = Auto().for_schema(NATIVE).steps_for(asked, told.budget.rho)
    (measurement,) = found.measurements
    assert [part.sets for part in step.workload.parts] == [part.sets for part in measurement.workload.parts]
    assert (step.blocks, step.cells) == (measurement.workload.blocks, measurement.workload.cells)
    assert found.mechanism == description(SMALL)
    assert found.privacy.spent == pytest.approx(found.privacy.rho)


@pytest.mark.parametrize("spec", [*SPECS, "thresholds:k=2,r=1"])
def test_for_halfspaces_nothing_is_tried_and_for_thresholds_they_are_asked_for(monkeypatch, spec):
    given = []
    monkeypatch.setattr(auto, "suited", lambda estimator, asked, *_halves, seed: given.append(asked) or estimator)
    SMALL(native_curator(), parse_workload(spec, NATIVE), seed=0)
    assert len(given) == (not spec.startswith("halfspaces"))
    assert ("thresholds" in spec) == any(isinstance(part, Thresholds) for asked in given for part in asked.parts)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_answers_of_numbers_approach_the_truth(relation, spec):
    """X has a band for every code; where y is cut it has more than 30 bands, but for those of the workload."""
    told, asked = native_curator(relation, 4000, 1e6), parse_workload(spec, NATIVE)
    found = Auto(rows=60)(told, asked, seed=5)
    source = TableSource(Table(native_rows(4000), NATIVE.sizes), NATIVE)
    errors = [
        np.abs(answer - count(piece.tally, source) / 4000).max()
        for piece, answer in zip(asked.pieces(), found.model.answers(asked), strict=True)
    ]
    assert max(errors) < (0.004 if spec == SPECS[0] else 0.02)
    rows = TableSource(found.model.sample(4000, seed=0, keep=measured_sets(found)), NATIVE)
    drawn = [np.abs(count(p.tally, rows) - count(p.tally, source)).max() / 4000 for p in asked.pieces()]
    assert max(drawn) < 0.03


@pytest.mark.parametrize(("count", "epsilon", "bands"), [(400, 1.0, 17), (10_000, 0.1, 17), (100_000, 1.0, 33)])
def test_bands_hold_more_than_noise(count, epsilon, bands):
    asked = parse_workload("mixed:k=2,count=60,seed=1", NATIVE)
    found = SMALL(native_curator(count=count, epsilon=epsilon), asked, seed=0)
    assert isinstance(found.model, BandedRows)
    assert found.model.rulers[3].bands == bands
    sigma = max(found.measurements[0].sigma)
    assert bands == 17 or 1 / bands > 2 * sigma


def test_bands_are_few_where_there_would_be_too_many_cells(monkeypatch):
    asked = parse_workload("mixed:k=2,count=60,seed=1", NATIVE)
    most = Auto().for_schema(NATIVE).steps_for(asked, 1.0)[0].cells
    monkeypatch.setattr(auto, "BANDED_CELLS", 500)
    fewer = Auto().for_schema(NATIVE)
    assert fewer.steps_for(asked, 1.0)[0].cells < most
    assert {len(cuts) for cuts in fewer.view(asked).cuts.values()} == {15, 16}


def test_numbers_of_few_codes_are_measured_in_bands_too():
    """Each code is a band, so no column is another than it was: residuals would be worth it here."""
    schema = Schema(
        (
            Codes(name="a", values=2),
            Numeric(name="x", lower=0, upper=1, integer=True, native=True),
            Codes(name="b", values=2),
        ),
        dataset="rows",
    )
    codes = np.random.default_rng(0).integers(0, 2, (500, 3)).astype(np.int32)
    asked = parse_workload("bands:k=2,bands=2; marginals:k=2", schema)
    found = SMALL(curator(schema=schema, codes=codes, epsilon=1e5), asked, seed=0)
    assert all(isinstance(part, Banded) for part in found.measurements[0].workload.parts)
    np.testing.assert_allclose(sum(next(found.model.answers(asked))), 1, atol=1e-5)


def test_a_release_of_numbers(tmp_path):
    found = SMALL(native_curator("add-remove"), parse_workload("mixed:k=2,count=6,seed=1", NATIVE), seed=5)
    archive.save(found, tmp_path / "release")
    loaded = archive.load(tmp_path / "release")
    assert isinstance(loaded.model, BandedRows)
    for question in ("x <= 7 and a = 1", "y > 0.25 and not (x < 3 or b = 1)"):
        before, after = ask(found, question), ask(loaded, question)
        assert 0 < before.fraction < 1
        assert after.fraction == pytest.approx(before.fraction, abs=1e-6)


def test_what_matters_is_heard_with_numbers_too():
    asked = parse_workload(SPECS[0], NATIVE)
    found = [Auto(objective=matter, rows=16)(native_curator(), asked, seed=5) for matter in ("max", "average")]
    first, second = (np.concatenate(list(each.model.answers(asked))) for each in found)
    assert np.abs(first - second).max() > 1e-3


def test_functions_beside_numbers_are_refused_before_anything_is_spent():
    asked = Workload((custom(lambda row: row["b"], NATIVE, name="mine:own"),))
    told = native_curator()
    with pytest.raises(WorkloadError, match="over a table with native numbers must be of marginals, thresholds, bands"):
        SMALL(told, asked, seed=0)
    assert told.privacy().spends == ()


# --- the smallest of data


def check_rows(found, sizes):
    assert not found.degraded
    assert np.all(np.isfinite(found.model.probabilities))
    sums = np.add.reduceat(found.model.probabilities, np.cumsum((0, *sizes[:-1])), axis=0)
    np.testing.assert_allclose(sums, 1, atol=1e-4)
    table = found.model.sample(5, seed=0)
    assert np.all((table.codes >= 0) & (table.codes < sizes))


@pytest.mark.parametrize(
    ("count", "relation", "epsilon"),
    [
        (1, "replace", 1.0),
        (1, "replace", 1e-4),
        (1, "add-remove", 1e-4),
        (0, "add-remove", 1.0),
        (0, "add-remove", 1e5),
        (2000, "replace", 1e7),
    ],
)
def test_few_rows_and_budgets_of_all_sizes(count, relation, epsilon):
    told = curator(count, relation, epsilon)
    found = SMALL(told, PAIRS, seed=0)
    check_rows(found, SIZES)
    assert found.total >= 1


def test_a_noisy_total_far_below_one_counts_as_a_row():
    totals = {}
    for seed in range(8):
        told = curator(0, "add-remove", 0.01, seed=seed)
        totals[seed] = told.total
    seed = min(totals, key=totals.__getitem__)
    assert totals[seed] == 1
    check_rows(SMALL(curator(0, "add-remove", 0.01, seed=seed), PAIRS, seed=0), SIZES)


@pytest.mark.parametrize(
    ("sizes", "sets"),
    [((3,), ((0,),)), (SIZES, ((2,),))],
    ids=["one column", "one marginal"],
)
def test_small_schemas_and_workloads(sizes, sets):
    schema = Schema(tuple(Codes(name=f"c{i}", values=size) for i, size in enumerate(sizes)), dataset="rows")
    asked = marginals(*sets, sizes=sizes)
    for relation in RELATIONS:
        found = SMALL(curator(50, relation, schema=schema), asked, seed=0)
        check_rows(found, sizes)
        assert sum(answer.size for answer in found.model.answers(asked)) == asked.cells


# --- parameters


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"objective": "median"}, r"objective \('median'\) must be one of balanced, max, average"),
        ({"rows": "-1"}, r"rows \(-1\) must be a whole number of at least 1"),
        ({"rows": "x"}, r"rows \('x'\) must be a whole number"),
        ({"effort": "0"}, r"effort \(0.0\) must be above 0 and at most 10000.0"),
        ({"effort": "-1"}, r"effort \(-1.0\) must be above 0"),
        ({"effort": "nan"}, r"effort \(nan\) must be above 0"),
        ({"effort": "inf"}, r"effort \(inf\) must be above 0 and at most 10000.0"),
        ({"effort": "much"}, r"effort \('much'\) must be a number"),
        ({"steps": "5"}, r"setting \('steps'\) must be one of objective, rows, effort"),
    ],
)
def test_parameters_are_checked_in_house_words(setting, message):
    with pytest.raises(ParameterError, match=message):
        mechanism("auto", setting)
    assert mechanism("auto", {"objective": "max", "rows": "9", "effort": "2"}) == Auto(
        objective="max", rows=9, effort=2.0
    )


def test_a_plan_knows_of_native_columns():
    """Even where the workload asks about coded columns alone: a native one has a code for each of a million steps."""
    columns = {
        "income": {"type": "numeric", "lower": 0, "upper": 1e5, "native": True, "source": "public"},
        "sex": {"type": "categorical", "categories": ["F", "M"], "source": "public"},
        "town": {"type": "categorical", "categories": ["Ayr", "Oban"], "source": "public"},
    }
    schema = Schema.from_dict({"dataset": "people", "columns": columns})
    budget = Budget(epsilon=1.0, delta=1e-6)
    told = plan(schema, "marginals:k=2", Auto(), budget, neighbours="replace", rows=100)
    assert told["mechanism"] == description(Auto())
    (step,) = told["steps"]
    assert step["queries"] == 2 * 2 + 2 + 2 + MOST_BANDS + FINER * MOST_BANDS + FINEST
    assert told["memory_bytes"] < 1e9


def test_a_column_has_the_largest_weight_of_the_marginals_it_is_in():
    sizes = (2, 3, 2, 2)
    asked = Workload((Marginals(sizes, ((0, 1),)), Marginals(sizes, ((1, 2),))), weights=(Fraction(3), Fraction(1)))
    found = shares_of(planned(asked))
    assert found[(0,)] == pytest.approx(3 * found[(2,)], rel=1e-5)
    assert found[(0,)] == pytest.approx(found[(1,)], rel=1e-5)
    assert found[(2,)] == pytest.approx(found[(3,)], rel=1e-5)
