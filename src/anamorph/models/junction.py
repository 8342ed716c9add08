"""Junction trees: exact inference in a Markov random field over discrete features, in plain numpy.

A field is given by potentials, arrays of logarithms over small sets of features (cliques); its distribution is
proportional to exp(sum of the potentials). A junction tree covers every potential by one of its own, larger cliques;
two passes of messages along its edges make the marginal of each of them (calibration), and any other marginal follows
by eliminating features from the part of the tree that it touches.

Nothing here is compiled: a new set of cliques costs about a millisecond, while XLA needs seconds for each, and
mechanisms that grow a model ask for a new one in every round.

References: Lauritzen & Spiegelhalter 1988; Koller & Friedman 2009, chapters 9 and 10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anamorph.curator.tallies import marginal_cells

Clique = tuple[int, ...]
"""Features, in the order of their sizes: the largest comes last, where numpy is fastest."""

Reals = NDArray[np.float64]
Potentials = Mapping[Clique, Reals]
Ranges = Mapping[int, slice]
"""The codes asked of some features; all codes of the others."""


def clique_of(sizes: tuple[int, ...], features: Iterable[int]) -> Clique:
    """Returns a set of features in the order of cliques."""
    return tuple(sorted(set(features), key=lambda feature: (sizes[feature], feature)))


def maximal(cliques: Iterable[Clique]) -> list[Clique]:
    """Returns the cliques that are inside no other, each once, larger ones first."""
    kept: list[Clique] = []
    for clique in sorted(dict.fromkeys(cliques), key=lambda clique: -len(clique)):
        if not any(set(clique) <= set(other) for other in kept):
            kept.append(clique)
    return kept


def triangulate(sizes: tuple[int, ...], cliques: Iterable[Clique]) -> list[Clique]:
    """Returns the maximal cliques of a triangulated graph: the smaller of two that greedy elimination makes.

    Eliminating a feature joins its neighbours. The one that goes next makes the smallest clique, or joins the fewest
    pairs (none at all in a graph that is triangulated already).
    """
    found = [eliminate(sizes, tuple(cliques), fill) for fill in (False, True)]
    return min(found, key=lambda kept: sum(marginal_cells(sizes, clique) for clique in kept))


def eliminate(sizes: tuple[int, ...], cliques: Iterable[Clique], fill: bool) -> list[Clique]:
    """Returns the maximal cliques that greedy elimination makes."""
    near: dict[int, set[int]] = {feature: {feature} for feature in range(len(sizes))}
    for clique in cliques:
        for feature in clique:
            near[feature].update(clique)

    def cost(feature: int) -> tuple[int, int, int]:
        around = near[feature]
        joined = sum(len(around - near[other]) for other in around) if fill else 0
        return joined, marginal_cells(sizes, tuple(around)), feature

    costs = {feature: cost(feature) for feature in near}
    found: list[set[int]] = []
    while near:
        cheapest = min(costs, key=costs.__getitem__)
        around = near.pop(cheapest)
        del costs[cheapest]
        if not any(around <= other for other in found):
            found.append(set(around))
        around.discard(cheapest)
        for feature in around:
            near[feature] |= around
            near[feature].discard(cheapest)
        touched = around.union(*(near[feature] for feature in around)) if fill else around
        costs.update((feature, cost(feature)) for feature in touched)
    return [clique_of(sizes, around) for around in found]


def megabytes(sizes: tuple[int, ...], cliques: Iterable[Clique]) -> float:
    """Returns the size of the junction tree of some cliques: 8 bytes for each cell of its cliques, in 2^20 bytes."""
    return sum(marginal_cells(sizes, clique) for clique in triangulate(sizes, cliques)) * 8 / 2**20


@dataclass(frozen=True)
class Tree:
    """A junction tree: parents come before their children."""

    sizes: tuple[int, ...]
    cliques: tuple[Clique, ...]
    parents: tuple[int, ...]
    """The parent of each clique; -1 for the root."""

    @cached_property
    def separators(self) -> tuple[Clique, ...]:
        """What each clique shares with its parent: nothing for the root, and where parts are independent."""
        pairs = zip(self.cliques, self.parents, strict=True)
        return tuple(tuple(f for f in clique if p >= 0 and f in self.cliques[p]) for clique, p in pairs)

    def home(self, features: Iterable[int]) -> int:
        """Returns the smallest clique that holds all the features, or -1."""
        wanted = set(features)
        fit = [index for index, clique in enumerate(self.cliques) if wanted <= set(clique)]
        return min(fit, key=lambda index: marginal_cells(self.sizes, self.cliques[index]), default=-1)

    def spanned(self, features: set[int]) -> list[int]:
        """Returns the least part of the tree that holds all the features, parents first."""
        kept = set(range(len(self.cliques)))
        for leaf in reversed(range(1, len(self.cliques))):
            children = [c for c in kept if self.parents[c] == leaf]
            if not children and features & set(self.cliques[leaf]) <= set(self.separators[leaf]):
                kept.discard(leaf)
        while len(kept) > 1:
            root = min(kept)
            children = [c for c in kept if self.parents[c] == root]
            if len(children) > 1 or not features & set(self.cliques[root]) <= set(self.separators[children[0]]):
                break
            kept.discard(root)
        return sorted(kept)


def junction_tree(sizes: tuple[int, ...], cliques: Iterable[Clique]) -> Tree:
    """Returns the tree that joins the triangulated cliques by their largest separators, from the largest clique on."""
    left = sorted(triangulate(sizes, cliques), key=lambda clique: (-marginal_cells(sizes, clique), clique))
    joined, parents = [left.pop(0)], [-1]
    nearest = [(len({*clique} & {*joined[0]}), 0) for clique in left]  # what is shared, and with which clique
    while left:
        child = max(range(len(left)), key=lambda index: nearest[index][0])
        joined.append(left.pop(child))
        parents.append(nearest.pop(child)[1])
        for index, clique in enumerate(left):
            shared = len({*clique} & {*joined[-1]})
            if shared > nearest[index][0]:
                nearest[index] = (shared, len(joined) - 1)
    return Tree(sizes, tuple(joined), tuple(parents))


def summed(array: Reals, within: Clique, kept: Iterable[int]) -> Reals:
    """Returns an array over `within`, summed over all features but those kept."""
    wanted = set(kept)
    axes = tuple(axis for axis, feature in enumerate(within) if feature not in wanted)
    return array.sum(axis=axes) if axes else array


def spread(array: Reals, over: Clique, within: Clique) -> Reals:
    """Returns an array over some features of `within` in a shape that broadcasts over all of them."""
    place = dict(zip(over, array.shape, strict=True))
    return array.reshape([place.get(feature, 1) for feature in within])


def calibrate(tree: Tree, potentials: Potentials) -> list[Reals]:
    """Returns the marginal of every clique of the tree: each sums to 1.

    From the leaves up, a clique becomes the distribution of its features given its separator, and its parent is told
    the logarithm of what that normalisation took; from the root down, it is multiplied by the marginal of its
    separator. All is relative to the largest potential for the same separator, so nothing overflows or vanishes.
    """
    beliefs = [np.zeros(tuple(tree.sizes[f] for f in clique)) for clique in tree.cliques]
    for clique, potential in potentials.items():
        home = tree.home(clique)
        beliefs[home] += spread(potential, clique, tree.cliques[home])
    for child in reversed(range(len(beliefs))):
        clique, separator, parent = tree.cliques[child], tree.separators[child], tree.parents[child]
        rest = tuple(axis for axis, feature in enumerate(clique) if feature not in separator)
        highest = beliefs[child].max(axis=rest, keepdims=True)
        given = np.exp(beliefs[child] - highest, out=beliefs[child])
        total = given.sum(axis=rest, keepdims=True)
        given /= total
        if parent >= 0:
            message = np.squeeze(highest + np.log(total), axis=rest)
            beliefs[parent] += spread(message, separator, tree.cliques[parent])
    for child in range(1, len(beliefs)):
        parent, separator = tree.parents[child], tree.separators[child]
        target = summed(beliefs[parent], tree.cliques[parent], separator)
        beliefs[child] *= spread(target, separator, tree.cliques[child])
    return beliefs


def marginal(tree: Tree, beliefs: Sequence[Reals], features: Sequence[int], ranges: Ranges) -> Reals:
    """Returns the marginal over some features, in their order, at the codes asked.

    The part of the tree that holds the features has the distribution of its root times those of its other cliques given
    their separators; what is not asked is summed out.
    """
    home = tree.home(features)
    part = tree.spanned(set(features)) if home < 0 else [home]
    tables = [(cut(beliefs[part[0]], tree.cliques[part[0]], ranges), tree.cliques[part[0]])]
    for index in part[1:]:
        clique, separator = tree.cliques[index], tree.separators[index]
        joint = cut(beliefs[index], clique, ranges)
        shared = spread(cut(summed(beliefs[index], clique, separator), separator, ranges), separator, clique)
        tables.append((np.divide(joint, shared, out=np.zeros_like(joint), where=shared > 0), clique))
    table, over = contracted(tables, set(features))
    return table.transpose([over.index(feature) for feature in features])


def cut(array: Reals, within: Clique, ranges: Ranges) -> Reals:
    """Returns an array at the codes asked."""
    return array[tuple(ranges.get(feature, slice(None)) for feature in within)]


Table = tuple[Reals, Clique]


def contracted(tables: Sequence[Table], wanted: set[int]) -> Table:
    """Returns the product of tables, summed over all features but those wanted; the cheapest of these goes first."""
    left = [reduced(table, wanted.union(*(over for _, over in others(tables, i)))) for i, table in enumerate(tables)]
    while hidden := set().union(*(over for _, over in left)) - wanted:
        near = {feature: [i for i, (_, over) in enumerate(left) if feature in over] for feature in hidden}
        chosen = min(hidden, key=lambda feature: (cells(left[i] for i in near[feature]), feature))
        group = [left[i] for i in near[chosen]]
        left = [table for i, table in enumerate(left) if i not in near[chosen]]
        left.append(product(group, wanted.union(*(over for _, over in left))))
    return product(left, wanted)


def others(tables: Sequence[Table], index: int) -> Sequence[Table]:
    """Returns all tables but one."""
    return (*tables[:index], *tables[index + 1 :])


def cells(tables: Iterable[Table]) -> int:
    """Returns how many cells the product of tables has."""
    sized = (zip(over, array.shape, strict=True) for array, over in tables)
    return math.prod(dict(itertools.chain.from_iterable(sized)).values())


def product(tables: Sequence[Table], kept: set[int]) -> Table:
    """Returns the product of tables, smaller ones first, summed over all features but those kept."""
    left = sorted(tables, key=lambda table: table[0].size)
    while len(left) > 1:
        found = multiplied(left[0], left[1], kept.union(*(over for _, over in left[2:])))
        left = [found, *left[2:]]
    return reduced(left[0], kept)


def reduced(table: Table, kept: set[int]) -> Table:
    """Returns a table summed over all features but those kept."""
    over = tuple(feature for feature in table[1] if feature in kept)
    return summed(*table, over), over


def multiplied(left: Table, right: Table, kept: set[int]) -> Table:
    """Returns the product of two tables, summed over all features but those kept: a batch of matrix products."""
    both = set(left[1]) & set(right[1])
    batch = tuple(feature for feature in left[1] if feature in both & kept)
    inner = tuple(feature for feature in left[1] if feature in both - kept)
    rows = tuple(feature for feature in left[1] if feature in kept - both)
    columns = tuple(feature for feature in right[1] if feature in kept - both)
    first = arranged(*left, (batch, rows, inner))
    second = arranged(*right, (batch, inner, columns))
    size = dict(zip(left[1], left[0].shape, strict=True)) | dict(zip(right[1], right[0].shape, strict=True))
    over = (*batch, *rows, *columns)
    return np.matmul(first, second).reshape([size[feature] for feature in over]), over


def arranged(table: Reals, over: Clique, groups: tuple[Clique, Clique, Clique]) -> Reals:
    """Returns a table with one axis for each group of features, summed over all others."""
    kept = tuple(feature for feature in over if any(feature in group for group in groups))
    small = summed(table, over, kept)
    ordered = small.transpose([kept.index(feature) for group in groups for feature in group])
    size = dict(zip(kept, small.shape, strict=True))
    return ordered.reshape([math.prod(size[feature] for feature in group) for group in groups])
