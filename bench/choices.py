"""Each choice of `auto` against what else it could have been. NOT PRIVATE: true errors, and noise that can be foretold.

`make choices` runs `auto`, `auto` with 256 rows, and variants of the latter that change one thing each, on the same
noise where the same is measured (`unsafe_seed` is 1000 + the seed), with five seeds. Each run is added to
`bench/results/choices.csv` when it ends; one that is there is not run again: delete the file after `auto` has changed.
Then `choices.md` has the errors relative to those with 256 rows. The seconds of a first seed have compilation in them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np

from anamorph.compilation import forget_compiled
from anamorph.curator.budget import Budget, Relation
from anamorph.curator.curator import Curator
from anamorph.evaluation.errors import merged, model_errors
from anamorph.mechanisms.auto import Auto, chosen, planned, split, told
from anamorph.models import shrinking
from anamorph.models.shrinking import Aims, Layout, Parameters, ShrinkingProjection, counted, noise, whole_marginals
from anamorph.models.thinning import thinned
from anamorph.models.trials import BESIDE, FIRMER, LOUDNESS, suited
from anamorph.queries.marginals import Marginals
from anamorph.queries.spec import workload as parse_workload
from anamorph.queries.workload import Workload
from anamorph.release import Measurement
from bench import tables
from bench.peers.results import rounded

DATA = ("nltcs", "titanic", "adult")
TRIPLES = "marginals:k=3,count=64,seed=0"
WORKLOADS = ("marginals:k=2", TRIPLES)
SLOW = ("adult", TRIPLES)
EPSILONS = (0.1, 1.0, 10.0)
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Varied(ShrinkingProjection):
    """The estimator of `auto`, with other aims or another start."""

    change: Callable[[Aims, Sequence[Measurement]], Aims] = lambda aims, _: aims
    uniform: bool = False

    def aims(self, layout: Layout, measurements: Sequence[Measurement]) -> Aims:
        """Returns the aims of `auto`, changed."""
        return self.change(super().aims(layout, measurements), measurements)

    def begin(self, layout: Layout, measurements: Sequence[Measurement], seed: int) -> Parameters:
        """Returns the logits that `auto` begins with, or logits around 0."""
        return super().begin(layout, () if self.uniform else measurements, seed)


FIXED = Varied(rows=256, effort=Auto().effort, objective=Auto().objective)
"""`auto` but for its rows, and for trials: numbers of its own for each noise would blur what else is changed."""


def measuring(curator: Curator, workload: Workload, **shares: float) -> Workload:
    """Returns what `auto` measures, with fixed shares of the budget for some orders."""
    return chosen(curator, workload, split(curator, workload)._replace(**shares))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`auto` with one choice made otherwise."""

    estimator: ShrinkingProjection = FIXED
    plan: Callable[[Curator, Workload], Workload] = measuring
    constants: dict[str, float] = field(default_factory=dict)
    """Of models/shrinking.py, by name; they are compiled into the steps."""
    workloads: tuple[str, ...] = WORKLOADS
    """Where it differs from `auto`."""
    neighbours: Relation = "add-remove"
    tried: bool = False
    """Whether it tries how firmly to shrink, what to weigh and what to quiet; others do as public numbers say, or as
    their change."""


def changed(change: Callable[[Aims, Sequence[Measurement]], Aims]) -> Variant:
    """Returns a variant with other aims."""
    return Variant(estimator=replace(FIXED, change=change))


def penalised(factor: Callable[[Sequence[Measurement]], float]) -> Variant:
    """Returns a variant with the penalty of `auto` times a factor."""
    return changed(lambda aims, log: aims._replace(penalty=aims.penalty * factor(log)))


def largest_order_sigma(log: Sequence[Measurement]) -> float:
    """Returns the sigma of the measured marginals of the largest order, in counts: they share the budget alike."""
    return counted(log) * max((len(tally.features), sigma) for tally, _, sigma in whole_marginals(log))[1]


def in_marginals(curator: Curator, workload: Workload) -> Workload:
    """Returns the marginals that `auto` would measure were it not for residuals."""
    return planned(workload, split(curator, workload))


def up_to_pairs(curator: Curator, workload: Workload) -> Workload:
    """Returns single columns and the pairs inside the marginals that are asked for."""
    found = [features for part in workload.parts if isinstance(part, Marginals) for features in part.sets]
    smaller = {pair for features in found for pair in itertools.combinations(features, 2)}
    pairs = Marginals(workload.sizes, tuple(sorted(smaller)))
    return measuring(curator, replace(workload, parts=(pairs,)))


BASE = "256 rows"
"""What all are compared with."""

VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "auto": Variant(estimator=replace(FIXED, rows=Auto().rows), tried=True),
    "tried": Variant(tried=True),
    "always quieted": Variant(estimator=replace(FIXED, loudness=LOUDNESS)),
    "always firmer": Variant(estimator=replace(FIXED, firmness=FIRMER[0])),
    "always weighed": Variant(estimator=replace(FIXED, weighing=True, firmness=BESIDE[0])),
    "no penalty": penalised(lambda _: 0.0),
    "strength x 0.5": penalised(lambda _: 0.5),
    "strength x 2": penalised(lambda _: 2.0),
    "flatter in crowding": penalised(lambda log: noise(log).crowding ** -0.2),
    "steeper in crowding": penalised(lambda log: noise(log).crowding ** 0.2),
    "sigma of a marginal": penalised(lambda log: 4 * noise(log).sigma / largest_order_sigma(log)),
    "as much where noise is below a row": penalised(lambda log: 1 + 1 / noise(log).sigma),
    "no tail": changed(lambda aims, _: aims._replace(tail=aims.tail._replace(weight=0.0))),
    "reach 2": changed(lambda aims, log: aims._replace(tail=aims.tail._replace(reach=2 / math.sqrt(counted(log))))),
    "64 rows": Variant(estimator=replace(FIXED, rows=64)),
    "1024 rows": Variant(estimator=replace(FIXED, rows=1024)),
    "start 0.3": Variant(estimator=replace(FIXED, start=0.3)),
    "uniform start": Variant(estimator=replace(FIXED, uniform=True)),
    "no level rows": Variant(constants={"LEVEL": 1 << 30}),
    "large last steps": Variant(constants={"FLOOR": 0.02}),
    "effort x 0.5": Variant(estimator=replace(FIXED, effort=FIXED.effort / 2)),
    "effort x 2": Variant(estimator=replace(FIXED, effort=FIXED.effort * 2)),
    "no residuals": Variant(plan=in_marginals),
    "singles 0.1": Variant(plan=partial(measuring, singles=0.1)),
    "singles 0.3": Variant(plan=partial(measuring, singles=0.3)),
    "between 0.45": Variant(plan=partial(measuring, between=0.45), workloads=(TRIPLES,)),
    "largest order only": Variant(plan=lambda _, workload: workload),
    "orders 1 and 2": Variant(plan=up_to_pairs, workloads=(TRIPLES,)),
    "objective max": Variant(estimator=replace(FIXED, objective="max")),
    "objective average": Variant(estimator=replace(FIXED, objective="average")),
    "no more where faint": Variant(constants={"FAINT": 0.0}),
    "usual Adam": Variant(estimator=replace(FIXED, rate=0.03), constants={"FORGET": 0.999, "FLOOR": 1.0}),
    "rows replaced": Variant(neighbours="replace"),
    "rows replaced, no residuals": Variant(neighbours="replace", plan=in_marginals),
}


class Key(NamedTuple):
    """One run."""

    data: str
    workload: str
    epsilon: float
    variant: str
    seed: int


Figures = tuple[float, ...]
Runs = dict[Key, Figures]


def asked(data: Sequence[str], *, slow: bool = False) -> list[Key]:
    """Returns the runs of the experiment, or of a part of it, those of a variant one after the other."""
    keys = itertools.starmap(Key, itertools.product(data, WORKLOADS, EPSILONS, VARIANTS, SEEDS))
    return [key for key in keys if key.workload in VARIANTS[key.variant].workloads and (slow or key[:2] != SLOW)]


def measured(key: Key) -> Figures:
    """Returns the true errors of one run."""
    forget_compiled()
    variant, rows = VARIANTS[key.variant], tables.load(key.data)
    workload = parse_workload(key.workload, rows.schema)
    begin = perf_counter()
    budget = Budget(epsilon=key.epsilon, delta=1 / rows.rows() ** 2)
    curator = Curator(rows, budget, neighbours=variant.neighbours, unsafe_seed=1000 + key.seed)
    log = (curator.measure(variant.plan(curator, workload), rho=curator.remaining),)
    estimator = variant.estimator
    if variant.tried:
        halves = (told(workload.sizes, half) for half in thinned(log, seed=key.seed))
        estimator = suited(estimator, workload, *halves, seed=key.seed)
    model = estimator.fit(workload.sizes, told(workload.sizes, log), seed=key.seed)
    seconds = perf_counter() - begin
    errors = merged(model_errors(rows, model, workload))
    return errors.max_error, errors.tv or 0.0, seconds


@contextlib.contextmanager
def in_place(constants: dict[str, float]) -> Iterator[None]:
    """Has constants in models/shrinking.py for a while, and nothing compiled with others."""
    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)
        stack.enter_context(mock.patch.dict(vars(shrinking), constants))
        jax.clear_caches()
        yield


def complete(path: Path, keys: Iterable[Key], run: Callable[[Key], Figures] = measured) -> None:
    """Runs what is not in a file yet, and adds each run to it."""
    missing = itertools.filterfalse(read(path).__contains__, keys)
    for variant, group in itertools.groupby(missing, key=lambda key: key.variant):
        with in_place(changes) if (changes := VARIANTS[variant].constants) else contextlib.nullcontext():
            for key in group:
                add(path, key, run(key))


def read(path: Path) -> Runs:
    """Returns the runs of a file; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return {Key(d, w, float(e), v, int(s)): tuple(map(float, rest)) for d, w, e, v, s, *rest in csv.reader(lines)}


def add(path: Path, key: Key, figures: Figures) -> None:
    """Adds a run at the end of a file."""
    with path.open("a", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        if not file.tell():
            lines.writerow((*Key._fields, "max", "tv", "seconds"))
        lines.writerow((*key, *map(rounded, figures)))


def ratios(runs: Runs, keys: Iterable[Key]) -> Figures | None:
    """Returns the medians of a variant over those of `BASE` with the same seeds, their geometric mean over cells."""
    logarithms = []
    for cell in keys:
        pairs = [(cell._replace(seed=seed), cell._replace(seed=seed, variant=BASE)) for seed in SEEDS]
        if both := [(runs[theirs], runs[ours]) for theirs, ours in pairs if theirs in runs and ours in runs]:
            logarithms.append(-np.diff(np.log(np.median(both, axis=0)), axis=0)[0])
    return tuple(np.exp(np.mean(logarithms, axis=0)).tolist()) if logarithms else None


def table(runs: Runs, data: Sequence[str]) -> str:
    """Returns a table in Markdown: a line for each variant, max and tv over those of `BASE`, means over data sets."""
    cells = list(itertools.product(WORKLOADS, EPSILONS))
    heads = ["variant", *(f"`{workload}` {epsilon:g}" for workload, epsilon in cells), "all", "seconds"]
    lines = [heads, ["---"] * len(heads)]
    for variant in list(VARIANTS)[1:]:
        keys = [[Key(name, *cell, variant, 0) for name in data] for cell in cells]
        found = [ratios(runs, group) for group in (*keys, itertools.chain(*keys))]
        errors = [f"{item[0]:.2f} / {item[1]:.2f}" if item else "-" for item in found]
        lines.append([variant, *errors, f"{found[-1][2]:.2f}" if found[-1] else "-"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(runs: Runs) -> str:
    """Returns the table of all data sets, and that of each."""
    data = [name for name in DATA if any(key.data == name for key in runs)]
    text = f"Errors over those of `auto` with {BASE}: max / tv, medians over seeds; below 1 the variant is better."
    titles = {f"{', '.join(data)}: geometric means": data} | {name: [name] for name in data}
    return "\n\n".join([text, *(f"## {title}\n\n{table(runs, names)}" for title, names in titles.items())]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--all", action="store_true", help="3-way marginals of adult too, which take the longest")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results", help="where the results are")
    given = parser.parse_args(arguments)
    if not given.summary:
        complete(given.folder / "choices.csv", asked(given.data, slow=given.all))
    text = summary(read(given.folder / "choices.csv"))
    (given.folder / "choices.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
