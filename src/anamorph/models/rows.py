"""The row that agrees best with weighted conjunctions: the oracle of oracle-efficient mechanisms.

Looked for is the row x, one code for each column, that maximises

    sum_i w_i [x agrees with conjunction i] + <linear, one-hot(x)>,

where `linear` is the perturbation of a perturbed leader (models/conjunctions.py has the terms). The problem is NP-hard.
`climbed` (models/climbing.py) is a local search over many vectors `linear` at once; `best_rows` improves what it finds
to a proven optimum by integer programming, or until its time is over. Both see public queries and noise that depends on
nothing: privacy never depends on whether they find the optimum.

Reference: Vietri, Tian, Bun, Steinke & Wu 2020 (FEM), section 6, "Optimizing over k-way marginals". Deviations: a
column has exactly one code (the paper's rows are any bits, so that a column may have several codes or none); equal
queries are one conjunction of a larger weight; codes that cannot be part of a better row are dropped before solving;
the solvers are OR-Tools CP-SAT and HiGHS.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.errors import ParameterError, ResourceError, require_positive
from anamorph.models.climbing import climbed
from anamorph.models.conjunctions import Best, Codes, Conjunctions, Places, Reals, merged

__all__ = ["Best", "Conjunctions", "best_rows", "climbed"]

TOLERANCE = 1e-6
"""How far a proven row may be below the optimum, relative to the largest coefficient that is left to the solver."""

Flags = NDArray[np.bool_]


def best_rows(
    conjunctions: Conjunctions,
    linear: ArrayLike,
    *,
    solver: str = "cp-sat",
    seconds: float = 10.0,
    workers: int | None = None,
    rows: ArrayLike | None = None,
) -> Best:
    """Returns a best row for each line of `linear`, by integer programming.

    Every problem has `seconds` for its solver (cp-sat or highs), and is solved on one of `workers` threads, by default
    as many as there are cores. A row is never worse than the one that the local search from `rows` finds, which is the
    solver's start; where the time is over, the best row so far is returned and is not proven. Proven rows do not depend
    on the number of workers.

    A proven value is within TOLERANCE of the optimum, relative to the largest coefficient of the reduced problem.
    """
    if solver not in SOLVERS:
        raise ParameterError(f"solver ({solver!r}) must be one of {', '.join(SOLVERS)}")
    if not isinstance(seconds, int | float) or not 0 <= seconds < np.inf:
        raise ParameterError(f"seconds ({seconds!r}) must be a finite number of at least 0")
    workers = (os.cpu_count() or 1) if workers is None else workers
    require_positive("workers", workers)
    module, solve = _module(solver), SOLVERS[solver]
    vectors = conjunctions.vectors(linear)
    start = climbed(conjunctions, vectors, rows=rows)

    def solved(problem: int) -> tuple[Codes, bool]:
        left = reduced(conjunctions, vectors[problem])
        found = left.leading()
        if not len(left.conjunctions):
            return found, True
        program = program_of(left, start.rows[problem])
        chosen, proven = solve(module, program, seconds)
        found[program.columns[chosen]] = program.codes[chosen]
        return found, proven

    with ThreadPoolExecutor(workers) as pool:
        outcomes = list(pool.map(solved, range(len(vectors))))
    found = np.array([row for row, _ in outcomes], np.int32).reshape(start.rows.shape)
    values, proven = conjunctions.values(found, vectors), np.array([proven for _, proven in outcomes], bool)
    worse = values < start.values
    found[worse], values[worse] = start.rows[worse], start.values[worse]
    return Best(found, values, proven)


def _module(solver: str) -> Any:  # noqa: ANN401
    """Returns the module of a solver, which is imported only now."""
    package, other = ("ortools", "highspy") if solver == "cp-sat" else ("highspy", "ortools")
    if sys.modules.get(other):  # each brings a libhighs.so.1 of its own, but a process loads one file of that name
        raise ResourceError(f"solver ({solver!r}) must not be used where {other} is loaded: use a process for each")
    try:
        return importlib.import_module("ortools.sat.python.cp_model" if solver == "cp-sat" else package)
    except ImportError:
        message = f"{package} must be installed for solver {solver!r}: pip install 'anamorph[oracle]'"
        raise ResourceError(message) from None


@dataclass(frozen=True)
class Reduced:
    """What one problem leaves open: some optimum has only codes that are kept."""

    kept: Flags
    """Which places are still possible; the last entry is the padding place."""
    linear: Reals
    """The worth of each place, with the weights of conjunctions that came to test it alone; 0 for the padding."""
    conjunctions: Conjunctions
    """Those that are not decided, without the tests that every row passes."""

    def leading(self) -> Codes:
        """Returns the kept code of each column that is best by `linear` alone: an optimum if no conjunction is left."""
        return self.conjunctions.leading(np.where(self.kept, self.linear, -np.inf)[None, :-1])[0]


def reduced(conjunctions: Conjunctions, linear: Reals) -> Reduced:
    """Returns a problem with an optimum of this one, of fewer codes and conjunctions.

    A code of a column is dropped if another one is worth more even though it had all its negative weights and none of
    its positive ones, and the dropped code the reverse. So all codes that no conjunction names go but the best of them,
    and columns that none tests are decided. Conjunctions that name a dropped code go too; tests of a column with one
    code left are passed; conjunctions with one test left are part of `linear`: which may let more codes be dropped.
    """
    kept, linear = np.ones(conjunctions.total + 1, bool), np.append(linear, 0.0)
    before = 0
    while before != np.count_nonzero(kept):
        before = np.count_nonzero(kept)
        conjunctions = _undecided(conjunctions, linear, kept)
        kept &= ~_beaten(conjunctions, linear, kept)
    return Reduced(kept, linear, conjunctions)


def _beaten(conjunctions: Conjunctions, linear: Reals, kept: Flags) -> Flags:
    """Returns which places another one of their column beats in every row."""
    tests, weights, width = conjunctions.tests, conjunctions.weights, conjunctions.tests.shape[1]
    total, columns = conjunctions.total, conjunctions.columns
    spread = np.repeat(weights, width)
    gain = np.bincount(tests.ravel(), np.maximum(spread, 0), total + 1)[:-1]
    loss = np.bincount(tests.ravel(), np.minimum(spread, 0), total + 1)[:-1]
    least, most = np.where(kept[:-1], linear[:-1] + loss, -np.inf), linear[:-1] + gain
    floor = np.maximum.reduceat(least, conjunctions.offsets)
    tied = np.flatnonzero(least == floor[columns])
    tied = tied[np.lexsort((-most[tied], columns[tied]))]  # of those sure of as much, who may gain most comes first
    leaders = tied[np.searchsorted(columns[tied], np.arange(len(conjunctions.sizes)))]
    found = np.append(most <= floor[columns], False)
    found[leaders] = False
    return found


def _undecided(conjunctions: Conjunctions, linear: Reals, kept: Flags) -> Conjunctions:
    """Returns the conjunctions that kept places leave open; adds those of one test to `linear`."""
    total, weights = conjunctions.total, conjunctions.weights
    possible = kept[conjunctions.tests].all(axis=1)
    tests, weights = conjunctions.tests[possible], weights[possible]
    passed = np.append(conjunctions.choices(kept)[conjunctions.columns] == 1, True)
    tests = np.sort(np.where(passed[tests], total, tests), axis=1)
    single = (tests[:, 1:] == total).all(axis=1)
    np.add.at(linear, tests[single, 0], weights[single])
    linear[-1] = 0.0  # of those that every row agrees with
    tests, weights = merged(tests[~single], weights[~single])
    return Conjunctions(conjunctions.sizes, tests, weights)


@dataclass(frozen=True)
class Program:
    """The integer program of a reduced problem.

    Maximise sum_p worth_p x_p + sum_i weights_i c_i over bits x, one of each column, and bits c. A conjunction of
    positive weight needs c <= x for its tests only, one of negative weight c >= sum x - (tests - 1) only: the objective
    does the rest.
    """

    columns: Places
    """The column of each variable x."""
    codes: Places
    worth: Reals
    """`linear` less its largest value in the column."""
    tests: list[list[int]]
    """The variables that each conjunction tests."""
    weights: Reals
    hint: Flags
    """The values of x in a good row."""

    @property
    def largest(self) -> float:
        """The largest coefficient."""
        return float(max(np.abs(self.worth).max(), np.abs(self.weights).max()))

    @property
    def groups(self) -> list[list[int]]:
        """The variables of each column."""
        edges = np.flatnonzero(np.diff(self.columns)) + 1
        return [part.tolist() for part in np.split(np.arange(len(self.columns)), edges)]


def program_of(problem: Reduced, row: Codes) -> Program:
    """Returns the program of what is left of a problem; the hint is the row, with its dropped codes replaced."""
    whole = problem.conjunctions
    open_columns = whole.choices(problem.kept) > 1
    places = np.flatnonzero(problem.kept[:-1] & open_columns[whole.columns])
    columns = whole.columns[places]
    codes = places - whole.offsets[columns]
    hint = np.where(problem.kept[row + whole.offsets], row, problem.leading())
    peaks = np.maximum.reduceat(np.where(problem.kept, problem.linear, -np.inf)[:-1], whole.offsets)
    number = np.full(whole.total + 1, -1)
    number[places] = np.arange(len(places))
    tests = [[variable for variable in line if variable >= 0] for line in number[whole.tests].tolist()]
    return Program(
        columns, codes, problem.linear[places] - peaks[columns], tests, whole.weights, codes == hint[columns]
    )


def _cp_sat(cp_model: Any, program: Program, seconds: float) -> tuple[Places, bool]:  # noqa: ANN401
    """Returns the variables x that CP-SAT chooses, and whether they are proven to be optimal.

    CP-SAT wants whole coefficients. A row has one worth for each column and at most all weights; scaled and rounded
    they are wrong by 1/2 each, so that the difference of two rows is wrong by the number of these terms at most. The
    scale makes that TOLERANCE of the largest coefficient. It is a power of two: weights that are whole stay exact.
    """
    groups = program.groups
    terms = len(groups) + len(program.tests)
    scale = 2.0 ** np.ceil(np.log2(terms / (TOLERANCE * program.largest)))
    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in program.columns]
    agreed = [model.new_bool_var("") for _ in program.tests]
    for group in groups:
        model.add_exactly_one([chosen[variable] for variable in group])
    for agrees, tests, weight in zip(agreed, program.tests, program.weights.tolist(), strict=True):
        passed = [chosen[variable] for variable in tests]
        if weight > 0:
            model.add_bool_and(passed).only_enforce_if(agrees)
        else:
            model.add_bool_or([agrees, *(~literal for literal in passed)])
    whole = np.rint(np.append(program.worth, program.weights) * scale).astype(np.int64)
    model.maximize(cp_model.LinearExpr.weighted_sum(chosen + agreed, whole.tolist()))
    for literal, value in zip(chosen, program.hint.tolist(), strict=True):
        model.add_hint(literal, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.linearization_level = 2  # the relaxation is tight: three times faster than the default
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return np.flatnonzero(program.hint), False
    found = [variable for variable, literal in enumerate(chosen) if solver.boolean_value(literal)]
    return np.array(found), status == cp_model.OPTIMAL


def _highs(highspy: Any, program: Program, seconds: float) -> tuple[Places, bool]:  # noqa: ANN401
    """Returns the variables x that HiGHS chooses, and whether they are proven to be optimal.

    Coefficients are relative to the largest one, so that the gap at which HiGHS stops is, too. Only x are asked to be
    whole: the best c are, then.
    """
    solver = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "time_limit": float(seconds), "mip_rel_gap": 0.0}
    options |= {"mip_abs_gap": TOLERANCE / 2, "mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(_linear_program(highspy, program))
    variables = len(program.columns)
    hint = program.hint.astype(np.float64)
    agreed = [float(all(program.hint[variable] for variable in tests)) for tests in program.tests]
    start = highspy.HighsSolution()
    start.col_value = [*hint.tolist(), *agreed]
    solver.setSolution(start)
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return np.flatnonzero(program.hint), False
    share = np.array(solver.getSolution().col_value[:variables])
    found = [group[int(share[group].argmax())] for group in program.groups]
    return np.array(found), solver.getModelStatus() == highspy.HighsModelStatus.kOptimal


def _linear_program(highspy: Any, program: Program) -> Any:  # noqa: ANN401
    """Returns the program as HiGHS takes it."""
    variables, groups = len(program.columns), program.groups
    rows: list[tuple[list[int], list[float], float, float]] = [
        (group, [1.0] * len(group), 1.0, 1.0) for group in groups
    ]
    for agreed, (tests, weight) in enumerate(zip(program.tests, program.weights, strict=True), start=variables):
        if weight > 0:
            rows.extend(([agreed, variable], [1.0, -1.0], -np.inf, 0.0) for variable in tests)
        else:
            rows.append(([agreed, *tests], [1.0] + [-1.0] * len(tests), 1.0 - len(tests), np.inf))
    made = highspy.HighsLp()
    made.num_col_, made.num_row_ = variables + len(program.tests), len(rows)
    made.col_cost_ = np.append(program.worth, program.weights) / program.largest
    made.col_lower_, made.col_upper_ = np.zeros(made.num_col_), np.ones(made.num_col_)
    made.row_lower_ = np.array([row[2] for row in rows])
    made.row_upper_ = np.array([row[3] for row in rows])
    whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    made.integrality_ = [whole] * variables + [real] * len(program.tests)
    made.sense_ = highspy.ObjSense.kMaximize
    made.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    made.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in rows)])
    made.a_matrix_.index_ = np.concatenate([row[0] for row in rows])
    made.a_matrix_.value_ = np.concatenate([row[1] for row in rows])
    return made


Solve = Callable[[Any, Program, float], tuple[Places, bool]]
SOLVERS: dict[str, Solve] = {"cp-sat": _cp_sat, "highs": _highs}
