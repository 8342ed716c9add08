"""DP-MERF: one Gaussian release of the kernel mean embedding of the rows, and a generator fitted to it.

The embedding of a row with numbers x, coded columns c_1 .. c_d and label y is

    ( phi(x) / sqrt(D),  onehot(c_1) / sqrt(d), .., onehot(c_d) / sqrt(d) )  times  onehot(y),

phi the cosines and sines of D random frequencies: a kernel of the numbers, the mean of Gaussian ones of many lengths,
plus an agreement of the coded columns, given the label. Its mean over the rows is measured once, and that is all; a
network that makes rows is fitted to it by least squares (models/embedding.py).

    add-remove: squared sensitivity 1 + a, replace: 4 + 2 a,      sigma = sqrt(that / (2 rho)), in counts,

where a weighs the coded columns (1 in the paper). The one-hot vectors are the marginals of the label with each column,
each of weight a / d, and the label alone is one of them; a native number that may be missing is also a coded column
(present, missing). All are parts of the one measurement.

The label is the column that all queries of the workload have in common (`target=` in its spec); without one, rows have
none. Columns that no query names have their part in rows as all others.

Reference: Harder, Adamczewski & Park 2021 (DP-MERF: differentially private mean embeddings with random features for
practical privacy-preserving data generation), algorithm 1 and sections 3 and 4.
Deviations: those of models/embedding.py; the kernel has many lengths, fixed fractions of the declared ranges, where the
paper takes one, the median of the private rows' distances (long ones tell a fit the way from afar); the shares of the
labels come from the embedding itself, not from a second release; replaced rows change one-hot vectors by sqrt 2, not by
2; rho follows from (epsilon, delta) by the tight conversion; noise is discrete, on exact sums.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from anamorph import progress
from anamorph.curator.curator import Curator
from anamorph.curator.where import Where
from anamorph.errors import ParameterError, WorkloadError, require_positive
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.embedding import EmbeddingProjection
from anamorph.models.mixed import Columns
from anamorph.queries.embeddings import embedding
from anamorph.queries.marginals import Marginals
from anamorph.queries.numbers import Tested
from anamorph.queries.workload import Queries, Workload
from anamorph.release import Release

MOST_CODES = 1 << 10
"""A column that no query names is planned as a native number if it has more codes."""


@dataclass(frozen=True, kw_only=True)
class DPMERF(EmbeddingProjection):
    """DP-MERF's own parameters; the others are those of the fit."""

    name: ClassVar[str] = "dp-merf"
    native: ClassVar[bool] = True
    features: int = 500
    """D, the number of frequencies."""
    length: float = 0.05
    """The shortest length of a Gaussian kernel, as a fraction of the range of a number."""
    longest: float = 1.0
    """The longest one; those of the frequencies lie between them, each as much longer than the one before."""
    coded: float = 1.0
    """a, how much the coded columns weigh in the embedding; the numbers weigh 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("features", self.features)
        for name in ("length", "longest", "coded"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
                raise ParameterError(f"{name} ({value!r}) must be a number from 1e-6 to 1e6")
        if self.longest < self.length:
            raise ParameterError(f"longest ({self.longest!r}) must be at least length ({self.length!r})")

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the one measurement; refuses what mixed rows do not answer."""
        queries = self.queries(planned(workload), label_of(workload), seed=0)
        return (Step("measure", rho, queries.blocks, queries.cells, workload=queries),)

    def queries(self, columns: Columns, label: int | None, *, seed: int) -> Workload:
        """Returns what is measured: marginals with the label, numbers that are present, and the embedding."""
        given = () if label is None else (label,)
        sizes, limits = columns.sizes, dict(zip(columns.numbers, columns.limits, strict=True))
        others = tuple((*given, column) for column in columns.coded if column != label)
        sets = (given, *others) if given else others
        parts: list[Queries] = [Marginals(sizes, sets)] if sets else []
        for number in columns.flagged:
            bounds = np.array([[limits[number] - 1]], np.int64)
            parts.append(Tested(Where(sizes, given, (number,), (limits[number],), bounds)))
        coded = Fraction(self.coded) / max(1, len(sets) + len(columns.flagged))
        weights = [coded] * len(parts)
        if limits:
            lengths = np.geomspace(self.length, self.longest, self.features)[:, None]
            frequencies = np.random.default_rng((seed, 3)).standard_normal((self.features, len(limits))) / lengths
            parts.append(embedding(sizes, given, limits, frequencies))
            weights.append(Fraction(1, self.features))
        return Workload(tuple(parts), weights=tuple(weights))

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the network, its rows, the cosines of all of them, and of what is measured."""
        columns, label = planned(workload), label_of(workload)
        labels = 1 if label is None else workload.sizes[label]
        lines, rows = sum(columns.relaxed) + len(columns.numbers), max(self.rows, labels)
        width = self.latent + labels + self.layers * self.hidden
        network = width * (self.layers * self.hidden + lines)
        cells = self.queries(columns, label, seed=0).cells
        waves = 10 * self.features * (1 + len(columns.flagged)) * rows
        return (450 << 20) + 4 * (6 * network + (6 * width + 12 * lines) * rows + waves) + 64 * cells

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns rows fitted to the measured embedding."""
        self.steps_for(workload, curator.budget.rho)
        schema, label = curator.schema, label_of(workload)
        columns = Columns(schema.sizes, schema.numbers, tuple(schema.columns[n].regular for n in schema.numbers))
        progress.report("measure", 0, 1)
        measured = curator.measure(self.queries(columns, label, seed=seed), rho=curator.remaining)
        progress.report("measure", 1, 1)
        model = projection(self).fit(columns, label, measured, seed=seed)
        return release(self, curator, workload, model, (measured,))


def label_of(workload: Workload) -> int | None:
    """Returns the first of the coded columns that all queries have in common; None if there is none."""
    named = [set(features) for part in workload.parts for features in coded_sets(part)]
    return min(set.intersection(*named), default=None)


def coded_sets(part: Queries) -> tuple[tuple[int, ...], ...]:
    """Returns the coded columns of each block; refuses what mixed rows do not answer."""
    if isinstance(part, Tested):
        return (part.tally.given,)
    if not isinstance(part, Marginals):
        raise WorkloadError("the workload must be of whole marginals, thresholds and tests of numbers")
    return part.sets


def planned(workload: Workload) -> Columns:
    """Returns the columns as far as a workload tells which are native: numbers of tests, and large ones not named."""
    coded = {column for part in workload.parts for features in coded_sets(part) for column in features}
    limits = {column: size for column, size in enumerate(workload.sizes) if size > MOST_CODES and column not in coded}
    for part in workload.parts:
        if isinstance(part, Tested):
            limits |= dict(zip(part.tally.numbers, part.tally.limits, strict=True))
    numbers = tuple(sorted(limits))
    return Columns(workload.sizes, numbers, tuple(limits[number] for number in numbers))


def projection(made: DPMERF) -> EmbeddingProjection:
    """Returns the estimator alone."""
    values: dict[str, Any] = {item.name: getattr(made, item.name) for item in fields(EmbeddingProjection)}
    return EmbeddingProjection(**values)
