"""What tests of selection share: small tables, and slow answers to every query of a block."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
from scipy import stats

from anamorph.curator.estimates import RelaxedTable
from anamorph.curator.scores import GRID

KINDS = ("softmax", "sparse", "rough")


class Rows:
    """Rows over some columns, each a number of times: a source of counts."""

    def __init__(self, codes, sizes, times=None):
        self.codes, self.sizes = np.asarray(codes, np.int64).reshape(-1, len(sizes)), sizes
        self.times = np.ones(len(self.codes), np.int64) if times is None else np.asarray(times, np.int64)

    @property
    def total(self):
        return int(self.times.sum())

    def counts(self, sets):
        for features in sets:
            dense = self.every(features, len(features))
            cells = np.flatnonzero(dense)
            yield cells, dense[cells]

    def batches(self):
        yield np.repeat(self.codes, self.times, axis=0).astype(np.int32)

    def every(self, features, least):
        """How many rows agree with each cell of a marginal in at least `least` features."""
        wanted = cells_of([self.sizes[feature] for feature in features])
        alike = (self.codes[:, None, list(features)] == wanted[None]).sum(axis=2) >= least
        return self.times @ alike


def some_rows(sizes, rows, seed, *, steep=0.5, most=1):
    """Rows whose codes are the rarer the larger they are."""
    generator = np.random.default_rng(seed)
    codes = [generator.choice(size, rows, p=skewed(size, steep)) for size in sizes]
    return Rows(np.stack(codes, axis=1), sizes, generator.integers(1, most + 1, rows))


def skewed(size, steep):
    shares = steep ** np.arange(size)
    return shares / shares.sum()


def some_table(sizes, rows, seed, *, kind="softmax", spread=2.0):
    """Relaxed rows; the sparse ones are one-hot, and the rough ones sum to 1 as closely as a sparse projection does."""
    generator = np.random.default_rng(seed)
    blocks = []
    for size in sizes:
        free = generator.normal(-np.arange(size)[:, None] * 0.7, spread, (size, rows))
        block = np.exp(free - free.max(axis=0))
        if kind == "sparse":
            block = (block == block.max(axis=0)).astype(float)
        elif kind == "rough":
            block = block * (block > 0.2) * (1 + 1e-6 * generator.normal(size=block.shape))
        blocks.append(np.minimum(block / block.sum(axis=0), 1))
        if kind == "rough":
            blocks[-1] *= 1 - 2e-6 * generator.random(rows)
    weights = generator.random(rows) + 0.1
    return RelaxedTable(
        tuple(sizes), np.vstack(blocks).astype(np.float32), (weights / weights.sum()).astype(np.float32)
    )


def cells_of(shape):
    """The codes of every cell: cells by features."""
    return np.stack(np.unravel_index(np.arange(math.prod(shape)), tuple(shape)), axis=1)


def relaxed_answers(table, features, least):
    """The answer of a relaxed table to every cell of a block, by all ways in which enough features may agree."""
    blocks = [table.blocks[feature].astype(np.float64) for feature in features]
    wanted = cells_of([len(block) for block in blocks])
    chances = [block[codes] for block, codes in zip(blocks, wanted.T, strict=True)]
    agree = np.zeros(chances[0].shape)
    for ways in itertools.product((False, True), repeat=len(blocks)):
        if sum(ways) >= least:
            agree += math.prod(p if way else 1 - p for p, way in zip(chances, ways, strict=True))
    return agree @ table.weights.astype(np.float64)


def scores_of(rows, table, features, least, *, total=None):
    """The score of every cell of a block, slowly; of another unit of the grid at most, where a sum is rounded."""
    if isinstance(table, RelaxedTable):
        answers = relaxed_answers(table, features, least)
    else:
        other = table.source if isinstance(table.source, Rows) else Rows(table.source.codes, table.source.sizes)
        answers = other.every(features, least) / max(table.rows, 1)
    expected = np.rint(answers * (rows.total if total is None else total) * (1 << GRID)).astype(np.int64)
    return np.abs(expected - (rows.every(features, least) << GRID))


def tickets_of(prior, sizes, features, mean):
    """The weight of every cell of a block, slowly."""
    if prior is None:
        return np.ones(math.prod(sizes[feature] for feature in features))
    lines = [np.split(prior.popular, np.cumsum(sizes)[:-1])[feature] for feature in features]
    codes = cells_of([line.size for line in lines])
    popular = math.prod(line[code] for line, code in zip(lines, codes.T, strict=True))
    return (1 - prior.share) + prior.share * mean * popular


def peeling(scores, weights, scale, k=1):
    """The probability of each ordered outcome: draws in proportion to weight * exp(score / scale), none twice."""
    shares = np.asarray(weights) * np.exp((scores - np.max(scores)) / scale)
    shares = shares / shares.sum()
    law = {}
    for outcome in itertools.permutations(np.flatnonzero(shares).tolist(), k):
        left, law[outcome] = 1.0, 1.0
        for chosen in outcome:
            law[outcome] *= shares[chosen] / left
            left -= shares[chosen]
    return law


def p_value(outcomes, law):
    """The chi-square p-value of outcomes, from the likely ones to the rare, in classes of a fortieth or more."""
    seen = Counter(outcomes)
    assert seen.keys() <= law.keys()
    observed, expected, least = [0], [0.0], max(10, len(outcomes) / 40)
    for outcome, share in sorted(law.items(), key=lambda item: -item[1]):
        if expected[-1] >= least:
            observed.append(0)
            expected.append(0.0)
        observed[-1] += seen[outcome]
        expected[-1] += share * len(outcomes)
    if expected[-1] < least:
        last = expected.pop(), observed.pop()
        expected[-1], observed[-1] = expected[-1] + last[0], observed[-1] + last[1]
    assert len(expected) > 3
    return stats.chisquare(observed, expected).pvalue
