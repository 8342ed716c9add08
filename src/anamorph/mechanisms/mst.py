"""MST: one-way marginals, and the two-way marginals of a spanning tree of the columns.

A third of rho measures all one-way marginals. A third selects the tree, an edge at a time: of the pairs of columns that
close no cycle, the exponential mechanism takes one whose joint marginal is far from independence,

    score(i, j) = | M_ij(D) - n p_i p_j |_1,    p the fitted one-way marginals,   rho / (3 (d - 1)) for each edge.

The last third measures the d - 1 marginals of the tree, and the model of all measurements is fitted.

Reference: McKenna, Miklau & Sheldon 2021 (Winning the NIST contest), algorithm 1 and section 4.
Deviations: rare values are not merged before the second measurement; instead the last fit, which starts from
independent columns, stops when it explains the measurements as well as the truth would (docs/mechanisms/mst.md compares
the two); noise is discrete, on exact counts; where rows are replaced the score has sensitivity 2.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from anamorph import progress
from anamorph.curator.budget import proportional
from anamorph.curator.curator import Curator
from anamorph.curator.scores import L1Error
from anamorph.mechanisms.independent import BASE_BYTES, answer_bytes, asked, estimator, marginals, one_way
from anamorph.mechanisms.mechanism import Step, release
from anamorph.models.graphical import Graphical, GraphicalModel
from anamorph.queries.workload import Workload
from anamorph.release import Release

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class MST(Graphical):
    """Measures a spanning tree; its other parameters are those of the fit."""

    name: ClassVar[str] = "mst"
    until_noise: bool = True
    """Whether the last fit stops when it explains the measurements as well as the truth would."""

    def steps_for(self, workload: Workload, rho: float) -> tuple[Step, ...]:
        """Returns the two measurements, and between them a selection for each edge."""
        asked(workload)
        single = one_way(workload.sizes)
        if len(workload.sizes) == 1:
            return (Step("measure", rho, single.blocks, single.cells, workload=single),)
        pairs = pairs_of(workload.sizes)
        first, edges, last = budgets(rho, len(workload.sizes))
        steps = (Step("measure", first, single.blocks, single.cells, workload=single),)
        steps += tuple(Step("select", edge, pairs.blocks, pairs.cells, 1) for edge in edges)
        return (*steps, Step("measure", last, len(edges), len(edges) * pairs.largest_block))

    def memory(self, workload: Workload) -> int:
        """Returns the bytes of the largest tree, its counts, and a piece of answers."""
        sizes = workload.sizes
        queries = pairs_of(sizes) if len(sizes) > 1 else one_way(sizes)
        return BASE_BYTES + 64 * len(sizes) * queries.largest_block + answer_bytes(workload)

    def __call__(self, curator: Curator, workload: Workload, *, seed: int) -> Release:
        """Returns the model of the one-way marginals and of the tree's."""
        self.steps_for(workload, curator.budget.rho)
        sizes, fit = curator.schema.sizes, estimator(self).fit
        if len(sizes) == 1:
            log = (curator.measure(one_way(sizes), rho=curator.remaining),)
            return release(self, curator, workload, fit(self.init(sizes), log), log)
        first, edges, last = budgets(curator.remaining, len(sizes))
        log = (curator.measure(one_way(sizes), rho=first),)
        model = fit(self.init(sizes), log)
        tree = spanning_tree(curator, model, edges)
        log += (curator.measure(marginals(sizes, *tree), rho=last),)
        return release(self, curator, workload, fit(model, log, until_noise=self.until_noise), log)


def budgets(rho: float, columns: int) -> tuple[float, tuple[float, ...], float]:
    """Returns the rho of the one-way marginals, of each edge, and of the tree's marginals: thirds."""
    first, middle, last = proportional(rho, (1, 1, 1))
    return first, proportional(middle, [1] * (columns - 1)), last


def pairs_of(sizes: tuple[int, ...]) -> Workload:
    """Returns the workload of all two-way marginals."""
    return marginals(sizes, *itertools.combinations(range(len(sizes)), 2))


def spanning_tree(curator: Curator, model: GraphicalModel, edges: tuple[float, ...]) -> tuple[Pair, ...]:
    """Returns the edges, selected one at a time among the pairs that join two parts of the forest so far."""
    sizes = curator.schema.sizes
    queries, pairs = pairs_of(sizes), list(itertools.combinations(range(len(sizes)), 2))
    part = list(range(len(sizes)))
    tree: tuple[Pair, ...] = ()
    for step, rho in enumerate(edges):
        progress.report("select", step, len(edges))
        closing = [index for index, (a, b) in enumerate(pairs) if part[a] == part[b]]
        (chosen,) = curator.select(queries, model.answers(queries), rho=rho, score=L1Error(), exclude=closing)
        a, b = pairs[chosen]
        tree += ((a, b),)
        part = [part[a] if number == part[b] else number for number in part]
    progress.report("select", len(edges), len(edges))
    return tree
