"""Curator: holds one source and one budget; the only object that sees private rows.

It measures and selects, and for the methods of the query release game it draws queries and keeps some of those drawn;
always in this order: check the request, charge it durably, count, randomise, store the answer durably, return it.
What it returns is public. PROOFS.md has a paragraph for each method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anamorph.curator.bands import Bands
from anamorph.curator.budget import Budget, Relation, gaussian_sigma, gumbel_scale, round_up
from anamorph.curator.cache import Cache
from anamorph.curator.candidates import Prior
from anamorph.curator.contest import Comparison, Pool
from anamorph.curator.cosines import Cosines
from anamorph.curator.estimates import Estimate, RelaxedTable, RowTable
from anamorph.curator.keeping import excesses, keeping_rho, kept
from anamorph.curator.ledger import Ledger, Run
from anamorph.curator.noise import EXCLUDED, Bits, SeededBits, SystemBits, discrete_gaussian, top_k
from anamorph.curator.purse import Purse
from anamorph.curator.residuals import Residual
from anamorph.curator.rowwise import RowFunction
from anamorph.curator.scores import GRID, LARGEST, SCORES, AbsoluteError, L1Error, Score, errors, times
from anamorph.curator.tallies import (
    WHOLE,
    Counts,
    GroupBy,
    Settled,
    Tally,
    check_tally,
    copied,
    count,
    grid,
    marginal_cells,
    numbers_asked,
    scale,
    squared_sensitivity,
)
from anamorph.curator.where import Where
from anamorph.errors import BudgetError, DataError, ParameterError, SchemaError, WorkloadError
from anamorph.release import Measurement, Privacy, Spend
from anamorph.schema import Schema
from anamorph.table import Table

if TYPE_CHECKING:
    from anamorph.queries.piece import Piece
    from anamorph.queries.workload import Workload

LARGEST_ANSWER = 100_000_000
"""The most numbers of one measurement: what a ledger can store as one record."""

MOST_CELLS = 1 << 63
"""What the cells of a marginal are fewer than: sources refuse more, and that would be after the charge."""

LARGEST_SCALE = 2.0**60
"""The largest scale of the noise of a selection against a table, in grid units."""

FINEST = 1 << 10
"""The resolution of weights in a selection."""

LARGEST_OFFSET = float(1 << 38)
"""The most counts that are subtracted from an error; times FINEST, on the grid, they are half the bound on scores."""

TOTAL_SHARE = 0.02
"""The share of the budget that measures the number of rows, where that is private."""


class Source(Counts, Protocol):
    """Where private rows live, as far as a curator needs it."""

    @property
    def schema(self) -> Schema: ...
    def rows(self) -> int: ...


class Curator:
    """Charges, counts, randomises, returns."""

    def __init__(
        self,
        source: Source,
        budget: Budget,
        *,
        neighbours: Relation = "replace",
        ledger: Ledger | None = None,
        terms: Mapping[str, Any] | None = None,
        resume: bool = False,
        unsafe_seed: int | None = None,
    ) -> None:
        """Opens the account of the source's dataset, or takes a further run from it.

        Args:
            source: the private rows.
            budget: what this run may spend.
            neighbours: what one person may change: one row replaced, or one row added or removed.
            ledger: where spends are kept; without one this object alone keeps them, and forgets.
            terms: the public description of the run that a resumed one must match.
            resume: continue the newest unfinished run of the same terms instead of beginning one.
            unsafe_seed: makes the noise reproducible: NOT PRIVATE, and no ledger is touched.
        """
        check_request(source.schema, neighbours)
        self.schema = source.schema
        self.budget = budget
        self.neighbours: Relation = neighbours
        self._bits: Bits = SystemBits() if unsafe_seed is None else SeededBits(unsafe_seed)
        self._source = source
        self._cache = Cache(source)
        if neighbours == "replace" and source.rows() == 0:
            raise DataError(
                "the data must have at least one row where rows are replaced; or use --neighbours add-remove"
            )
        self._run = self._begin(ledger if unsafe_seed is None else None, dict(terms or {}), resume)
        self._spends: tuple[Spend, ...] = ()
        self._total: float | None = None

    def _begin(self, ledger: Ledger | None, terms: dict[str, Any], resume: bool) -> Purse | Run:
        if ledger is None:
            return Purse(self.budget.rho)
        budget, name = self.budget, self.schema.dataset
        if resume and ledger.account(name) is None:
            raise ParameterError(
                f"dataset ({name!r}) must have a run to resume in this ledger: name another, or begin one"
            )
        ledger.open(
            dataset=name,
            relation=self.neighbours,
            schema=self.schema.fingerprint,
            epsilon=budget.epsilon,
            delta=budget.delta,
            rho=budget.rho,
        )
        if resume:
            run = ledger.resume(name, terms=terms)
            if run.rho > budget.rho:
                raise BudgetError("the run to resume must have this budget; it began with a larger one")
            return run
        return ledger.begin(name, terms=terms, rho=budget.rho)

    @property
    def remaining(self) -> float:
        """The rho that this run may still spend, after what the total costs."""
        self.total  # noqa: B018 - the total is charged before anybody plans with the rest
        return self._run.remaining

    @property
    def total(self) -> float:
        """The public number of rows: exact where rows are replaced, else a noisy one, charged at the first use."""
        if self._total is None:
            self._total = float(self._source.rows()) if self.neighbours == "replace" else self._measure_total()
        return self._total

    def privacy(self) -> Privacy:
        """Returns the promise of this run, and what was spent where."""
        budget, private = self.budget, isinstance(self._bits, SystemBits)
        return Privacy(self.neighbours, budget.epsilon, budget.delta, budget.rho, self._spends, private)

    def finish(self, digest: str) -> None:
        """Tells the ledger that the release of this run is safely written."""
        self._run.finish(digest)

    def measure(
        self, workload: Workload, *, rho: float, compose: Literal["jointly", "by block"] = "jointly"
    ) -> Measurement:
        """Returns the answers of a workload with discrete Gaussian noise: rho-zCDP.

        sigma = Delta / sqrt(2 rho) in counts, with Delta the joint L2 sensitivity of all numbers of the workload. By
        block, Delta^2 is the number of blocks times that of one block, as in the papers: never less noise.
        """
        total, rho, pieces = self.total, float(rho), self._pieces(workload)
        if workload.cells > LARGEST_ANSWER:
            raise WorkloadError(
                f"a measurement ({workload.cells} queries) must have at most {LARGEST_ANSWER}: split it"
            )
        tallies, weights = [piece.tally for piece in pieces], [piece.weight for piece in pieces]
        squared = squared_sensitivity(tallies, self.neighbours, weights)
        if compose == "by block":
            squared = max(squared, sum((piece.weight * piece.blocks for piece in pieces), Fraction(0)))
        sigmas = {weight: gaussian_sigma(squared / weight, rho) for weight in sorted(set(weights))}
        noise = [  # drawn before the charge: it looks at nothing
            discrete_gaussian(tally.cells, round_up(Fraction(sigmas[weight]) * scale(tally)), self._bits)
            for tally, weight in zip(tallies, weights, strict=True)
        ]
        what = f"{workload.cells} queries in {workload.blocks} blocks, sigma {min(sigmas.values()):.6g}"
        answer = self._charge("measure", rho, what, (workload.digest, compose))
        if answer is None:
            self._cache.prepare(tallies)
            exact = (count(tally, self._cache) for tally in tallies)
            answer = np.concatenate([number + random for number, random in zip(exact, noise, strict=True)])
            self._run.store(answer.tobytes())
        sigma = np.concatenate([np.full(piece.blocks, sigmas[piece.weight] / total) for piece in pieces])
        return Measurement(workload, fractions(answer, tallies, total), sigma, total)

    def select(  # noqa: PLR0913 - two of them are for special cases
        self,
        workload: Workload,
        estimate: Estimate | Iterable[NDArray[np.floating]],
        *,
        rho: float,
        k: int = 1,
        score: Score = AbsoluteError(),  # noqa: B008 - frozen
        exclude: ArrayLike = (),
        prior: Prior | None = None,
        offset: Sequence[float] | None = None,
    ) -> NDArray[np.int64]:
        """Returns the ids of k blocks with large error, best first: rho-zCDP.

        One-shot top-k: the k largest of score + Gumbel(beta), beta = Delta sqrt(k / (2 rho)), are k rounds of the
        exponential mechanism by peeling. The score of a block is its error times its weight relative to the largest.

        The estimate is public: an array for each piece of the workload, or, for single queries, a table. With a table
        no query is listed that need not be (candidates.py), so their number hardly matters; and a prior, public too,
        may weigh the candidates: a query is drawn in proportion to weight * exp(score / beta). It costs nothing,
        since it is the same for neighbours; where it says rightly which queries may matter, it spares the noise of
        all the others.

        The offset is public, a number of counts for each block, subtracted from its error before the weight: such as
        the error that a measurement of the block would have anyway. It moves no score between neighbours.
        """
        _, rho, pieces = self.total, float(rho), self._pieces(workload)
        excluded = np.unique(np.asarray(exclude, np.int64))
        table = isinstance(estimate, RowTable | RelaxedTable)
        if table and (workload.blocks != workload.cells or type(score) is not AbsoluteError):
            raise WorkloadError("estimate must be arrays, not a table, where blocks of several queries are selected")
        if prior is not None and not table:
            raise WorkloadError("prior must come with single queries and a table as the estimate")
        if table:
            check_table(estimate, prior, pieces, self.schema.sizes)
            estimate = own_table(estimate)
        if offset is not None and table:
            raise WorkloadError("offset must come with arrays as the estimate, not with a table")
        streamed = [] if table else [settled(piece) for piece in workload.pieces()]
        for piece in streamed:
            check_tally(piece.tally, self.schema.sizes)
        check_selectable((*pieces, *streamed), table)
        check_blocks(streamed, score)
        check_cut(pieces if table else streamed, pieces)
        score = type(score)()  # one of its own: it is told of errors
        if excluded.size and not (excluded[0] >= 0 and excluded[-1] < workload.blocks):
            raise WorkloadError(f"exclude must be ids from 0 to {workload.blocks - 1}")
        if not 1 <= k <= workload.blocks - excluded.size:
            raise WorkloadError(
                f"k ({k}) must be from 1 to {workload.blocks - excluded.size}, the number of blocks left to select"
            )
        shares = relative([piece.weight for piece in pieces])
        bonus = None if offset is None else advantages(pieces, shares, offset)
        beta = max(gumbel_scale(score.sensitivity(self.neighbours) * max(shares.values()) << GRID, k, rho), 2.0)
        if table and beta > LARGEST_SCALE:
            raise ParameterError(f"rho ({rho!r}) must be larger: the noise of this selection would drown everything")
        request = (workload.digest, k, type(score).__name__, hashlib.sha256(excluded.tobytes()).hexdigest())
        what = f"{k} of {workload.blocks - excluded.size} blocks by {type(score).__name__}"
        answer = self._charge("select", rho, what, request)
        if answer is None:
            self._cache.prepare([piece.tally for piece in pieces])
            if isinstance(estimate, RowTable | RelaxedTable):
                compared = Comparison(self._cache, estimate, self.total, beta, prior)
                pool = Pool(list(compared.contests(pieces, [shares[piece.weight] for piece in pieces])), excluded)
                answer = pool.draw(k, beta, self._bits)
            else:
                scores = self._scores(streamed, estimate, score, excluded, shares)
                answer = top_k(raised(scores, bonus), k, beta, self._bits)
            self._run.store(answer.tobytes())
        return answer

    def draw(self, workload: Workload, estimate: Estimate, *, rho: float, draws: int = 1) -> NDArray[np.int64]:
        """Returns independent draws from single queries and their negations: rho-zCDP in all.

        2 i is query i, 2 i + 1 its negation, 1 less the query. Each draw is an exponential mechanism, with replacement,
        whose score is count - n * estimate, of a negation the same with the other sign: how much the rows have more
        than the public table. Weights are exp(score / beta), beta = Delta sqrt(draws / (2 rho)); a score is times its
        query's weight relative to the largest, as in `select`.
        """
        _, rho, pieces = self.total, float(rho), self._single(workload, estimate)
        estimate = own_table(estimate)
        if not isinstance(draws, int) or draws < 1:
            raise ParameterError(f"draws ({draws!r}) must be a whole number of at least 1")
        shares = relative([piece.weight for piece in pieces])
        beta = max(gumbel_scale(max(shares.values()) << GRID, draws, rho), 2.0)
        if beta > LARGEST_SCALE:
            raise ParameterError(f"rho ({rho!r}) must be larger: the noise of this selection would drown everything")
        what = f"{draws} of {workload.blocks} queries and their negations"
        answer = self._charge("draw", rho, what, (workload.digest, draws))
        if answer is None:
            self._cache.prepare([piece.tally for piece in pieces])
            compared = Comparison(self._cache, estimate, self.total, beta)
            contests = list(compared.contests(pieces, [shares[piece.weight] for piece in pieces]))
            answer = Pool(contests, np.zeros(0, np.int64)).draw_signed(draws, beta, self._bits)
            self._run.store(answer.tobytes())
        return answer

    def keep(
        self, workload: Workload, estimate: Estimate, drawn: ArrayLike, *, rate: float, margin: float
    ) -> NDArray[np.bool_]:
        """Returns which of some drawn queries are kept, each with probability exp(rate (a - 1) - margin).

        a, at most 1, is the fraction of the rows that a query, or a negation, has more than the public table, whatever
        its weight. The cost is `keeping_rho`: of a draw for which nothing is drawn from all queries.
        """
        total, rate, margin = self.total, float(rate), float(margin)
        pieces, ids = self._single(workload, estimate), np.array(drawn, np.int64)
        estimate = own_table(estimate)
        rho = keeping_rho(ids.size, rate, margin, total)
        if ids.ndim != 1 or not ids.size or not np.all((ids >= 0) & (ids < 2 * workload.blocks)):
            raise WorkloadError(f"drawn must be one or more numbers from 0 to {2 * workload.blocks - 1}")
        request = (workload.digest, hashlib.sha256(ids.tobytes()).hexdigest(), rate, margin)
        answer = self._charge("keep", rho, f"some of {ids.size} queries", request)
        if answer is None:
            self._cache.prepare([piece.tally for piece in pieces])
            compared = Comparison(self._cache, estimate, total, 1.0)
            answer = kept(excesses(compared, pieces, ids), total, rate, margin, self._bits).astype(np.int64)
            self._run.store(answer.tobytes())
        return answer.astype(np.bool_)

    def _single(self, workload: Workload, estimate: Estimate) -> list[Settled]:
        """Returns the pieces of a workload of single queries, after checking them and the table."""
        pieces = self._pieces(workload)
        if workload.blocks != workload.cells:
            raise WorkloadError("queries must be single ones to be drawn: take the workload by cell")
        check_table(estimate, None, pieces, self.schema.sizes)
        check_selectable(pieces, True)
        check_blocks(pieces, AbsoluteError())
        return pieces

    def _pieces(self, workload: Workload) -> list[Settled]:
        """Returns the pieces of a workload, after checking each: what a query class says is not believed."""
        pieces, following, cells = [settled(piece) for piece in workload.pieces(WHOLE)], 0, 0
        for piece in pieces:
            check_tally(piece.tally, self.schema.sizes)
            if any(marginal_cells(self.schema.sizes, features) >= MOST_CELLS for features in piece.tally.sets):
                raise WorkloadError("a marginal must have fewer than 2^63 cells: take fewer columns")
            if type(piece.weight) is not Fraction or not piece.weight > 0:
                raise WorkloadError("a piece must have a Fraction above 0 as its weight")
            if piece.first != following or piece.blocks not in divisions(piece.tally):
                raise WorkloadError("a piece must be of single queries, or of one block, in the order of their ids")
            following, cells = piece.first + piece.blocks, cells + piece.tally.cells
        if (following, cells) != (workload.blocks, workload.cells):
            raise WorkloadError("a workload's pieces must be all of its queries")
        if following > 1 << 62:
            raise WorkloadError("single queries must be at most 2^62: take whole blocks, or fewer")
        return pieces

    def _scores(
        self,
        pieces: Sequence[Settled],
        estimate: Iterable[NDArray[np.floating]],
        score: Score,
        excluded: NDArray[np.int64],
        shares: Mapping[Fraction, int],
    ) -> Iterator[NDArray[np.int64]]:
        """Yields the score of each block in order: single cells a piece at a time, a larger block when it is whole."""
        block, merged, share = -1, 0, 1
        for piece, guess in zip(pieces, estimate, strict=True):
            if guess.shape != (piece.tally.cells,):
                raise ParameterError(f"estimate {guess.shape} must have {piece.tally.cells} numbers for this piece")
            wrong = errors(count(piece.tally, self._cache), guess, self.total, grid(piece.tally))
            if piece.first != block and block >= 0:
                yield without(times(np.array([merged]), share), block, excluded)
                block, merged = -1, 0
            share = shares[piece.weight]
            if piece.blocks > 1:
                each = wrong.reshape(piece.blocks, -1)
                scores = wrong if each.shape[1] == 1 else np.array([score.merge(block, 0) for block in each])
                yield without(times(scores, share), piece.first, excluded)
            else:
                block, merged = piece.first, score.merge(wrong, merged)
        if block >= 0:
            yield without(times(np.array([merged]), share), block, excluded)

    def _measure_total(self) -> float:
        rho = self._run.remaining * TOTAL_SHARE
        sigma = gaussian_sigma(1, rho)
        answer = self._charge("total", rho, f"the number of rows, sigma {sigma:.6g}", ())
        if answer is None:
            answer = discrete_gaussian(1, sigma, self._bits) + self._source.rows()
            self._run.store(answer.tobytes())
        return float(max(int(answer[0]), 1))

    def _charge(self, kind: str, rho: float, what: str, request: Sequence[object]) -> NDArray[np.int64] | None:
        """Charges a step; returns its stored answer where a resumed run was charged for it before."""
        if not 0 < rho < float("inf"):
            raise ParameterError(f"rho ({rho!r}) must be a finite number above 0")
        encoding = self.schema.knots.items()  # the part of it that the account does not fix
        digest = hashlib.sha256(repr((kind, rho, self.neighbours, *request, *encoding)).encode()).hexdigest()
        stored = self._run.charge(kind=kind, rho=rho, what=what, digest=digest)
        self._spends += (Spend(kind, rho, what),)
        return None if stored is None else np.frombuffer(stored, np.int64)


def fractions(numbers: NDArray[np.int64], tallies: Sequence[Tally], total: float) -> NDArray[np.float64]:
    """Returns the numbers of tallies as fractions of the rows."""
    values, first = numbers / total, 0
    for tally in tallies:
        values[first : first + tally.cells] /= scale(tally)
        first += tally.cells
    return values


def check_request(schema: Schema, neighbours: str) -> None:
    """Refuses an unknown relation, and a schema that was read from private rows; looks at none."""
    if neighbours not in get_args(Relation):
        raise ParameterError(f"neighbours ({neighbours!r}) must be {' or '.join(get_args(Relation))}")
    if schema.from_data():
        names = ", ".join(map(repr, schema.from_data()))
        raise SchemaError(
            f"columns {names}: source (data) must be declared, public or dp: values read from private rows "
            "are not covered by the promise; review them in the schema and write `source: declared`"
        )


def check_table(estimate: object, prior: object, pieces: Iterable[Settled], sizes: tuple[int, ...]) -> None:
    """Refuses a table over other columns, and foreign types: which cells are asked of a table is private."""
    if type(estimate) not in (RowTable, RelaxedTable) or type(prior) not in (Prior, type(None)):
        raise ParameterError("estimate must be a RowTable or a RelaxedTable, and prior a Prior")
    if isinstance(estimate, RelaxedTable) and estimate.sizes != sizes:
        raise ParameterError("estimate must be a table over the columns of this schema")
    if isinstance(estimate, RowTable) and not is_encoded(estimate.source, sizes, estimate.rows):
        raise ParameterError("estimate must be of rows encoded by this schema, as a Table")
    known = estimate.functions if isinstance(estimate, RelaxedTable) else {}
    asked = [piece.tally.function for piece in pieces if isinstance(piece.tally, RowFunction)]
    if not all(np.shape(known.get(function, 0)) == (function.count,) for function in asked):
        raise ParameterError("estimate must hold the answers of the workload's functions")
    if isinstance(prior, Prior):
        prior.check(sizes)


def own_table(estimate: Estimate) -> Estimate:
    """Returns a table with nothing but the fields of the one that was checked: which cells it is asked is private."""
    if isinstance(estimate, RelaxedTable):
        return RelaxedTable(estimate.sizes, estimate.lines, estimate.weights, estimate.functions)
    rows = estimate.source
    return RowTable(Table(rows.codes, rows.sizes) if isinstance(rows, Table) else rows, estimate.rows)


def is_encoded(rows: object, sizes: tuple[int, ...], count: int) -> bool:
    """Returns whether rows are a Table with codes of these columns; other objects might tell when they are asked."""
    if type(rows) is not Table or type(rows.codes) is not np.ndarray or rows.sizes != sizes or rows.rows != count:
        return False
    return not count or bool(np.all((rows.codes >= 0) & (rows.codes < np.array(sizes))))


def check_selectable(pieces: Iterable[Settled], table: bool) -> None:
    """Refuses tallies that have no scores, or none against a table."""
    if any(isinstance(piece.tally, Residual) for piece in pieces):
        raise WorkloadError("residuals must be measured: they cannot be selected")
    if any(isinstance(piece.tally, Cosines) for piece in pieces):
        raise WorkloadError("embeddings must be measured: they cannot be selected")
    if table and any(isinstance(piece.tally, Where | Bands) for piece in pieces):
        raise WorkloadError("estimate must be arrays, not a table, where numbers are tested or cut into bands")


def check_blocks(pieces: Iterable[Settled], score: Score) -> None:
    """Refuses what the sensitivity of a score does not cover.

    Ids run through the pieces without a gap; a piece is of single cells, each a block, of tests, each a block, or of
    one block; the pieces of one block are disjoint slabs of one marginal, threshold or function, or one test; only a
    score of blocks is used on blocks of several cells, and only marginals and tests, whose cells are disjoint, by the
    sum of their errors.
    """
    if type(score) not in SCORES:
        raise ParameterError(f"score must be one of {', '.join(kind.__name__ for kind in SCORES)}")
    following, slabs = 0, {}
    for piece in pieces:
        single = piece.blocks == piece.tally.cells
        tested = isinstance(piece.tally, Where) and piece.blocks == piece.tally.tests > 1
        if tested and not single and type(score) is AbsoluteError:
            raise WorkloadError("a block of several queries must be selected by L1Error or MaxError")
        continued = piece.blocks == 1 and piece.first == following - 1 and piece.first in slabs
        if not (single or tested or piece.blocks == 1) or not (continued or piece.first == following):
            raise WorkloadError("a piece must be of single queries, or of one block, in the order of their ids")
        if piece.blocks == 1:
            slabs.setdefault(piece.first, []).append(piece.tally)
        following = piece.first + piece.blocks
    for tallies in slabs.values():
        several = len(tallies) > 1 or tallies[0].cells > 1
        if several and type(score) is AbsoluteError:
            raise WorkloadError("a block of several queries must be selected by L1Error or MaxError")
        if (
            several
            and type(score) is L1Error
            and not all(isinstance(tally, GroupBy | Where | Bands) for tally in tallies)
        ):
            raise WorkloadError("a block of several queries that is not a marginal must be selected by MaxError")
        if several and len(numbers_asked(tallies, [Fraction(1)] * len(tallies))) > 1:
            raise WorkloadError("a block must be of one marginal, one threshold, one function or one test")


def check_cut(streamed: Iterable[Settled], pieces: Iterable[Settled]) -> None:
    """Refuses pieces of another number of blocks, or of other weights, than those that cut no block."""
    ends = [max((piece.first + piece.blocks for piece in some), default=0) for some in (streamed, pieces)]
    weights = [{piece.weight for piece in some} for some in (streamed, pieces)]
    if ends[0] != ends[1] or weights[0] != weights[1]:
        raise WorkloadError("a workload must have the same blocks and weights however it is cut into pieces")


def divisions(tally: Tally) -> tuple[int, ...]:
    """Returns into how many blocks a tally may be divided: one, single queries, or its tests."""
    return (1, tally.cells, tally.tests) if isinstance(tally, Where) else (1, tally.cells)


def relative(weights: Iterable[Fraction]) -> dict[Fraction, int]:
    """Returns what errors of each weight are multiplied by in scores: 1 for equal weights, else up to FINEST."""
    distinct = sorted(set(weights))
    if len(distinct) == 1:
        return {distinct[0]: 1}
    return {weight: max(1, round(weight / distinct[-1] * FINEST)) for weight in distinct}


def settled(piece: Piece) -> Settled:
    """Returns a piece with numbers of its own: what is checked is what is counted, whatever is done to it later."""
    return Settled(copied(piece.tally), int(piece.first), int(piece.blocks), piece.weight)


def without(scores: NDArray[np.int64], first: int, excluded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the scores of consecutive blocks, those excluded marked so."""
    start, stop = np.searchsorted(excluded, (first, first + scores.size))
    scores[excluded[start:stop] - first] = EXCLUDED
    return scores


def advantages(pieces: Iterable[Settled], shares: Mapping[Fraction, int], offset: Sequence[float]) -> NDArray[np.int64]:
    """Returns what is added to the score of each block, in grid units: the largest weighted offset less its own.

    To subtract the offsets would be the same selection; this way no score is negative.
    """
    weights = np.concatenate([np.full(piece.blocks, shares[piece.weight], np.int64) for piece in pieces])
    counts = np.array(offset, np.float64)
    if counts.shape != weights.shape or not np.all(np.abs(counts) <= LARGEST_OFFSET):
        raise ParameterError(f"offset must be a number for each block, of at most {LARGEST_OFFSET:.3g} counts")
    weighted = np.rint(counts * float(1 << GRID)).astype(np.int64) * weights
    return weighted.max() - weighted


def raised(scores: Iterable[NDArray[np.int64]], bonus: NDArray[np.int64] | None) -> Iterator[NDArray[np.int64]]:
    """Yields scores with what is added to each; those excluded stay so, and none exceeds the bound on scores."""
    first = 0
    for chunk in scores:
        if bonus is None:
            yield chunk
        else:
            higher = np.minimum(chunk + bonus[first : first + chunk.size], LARGEST)
            yield np.where(chunk == EXCLUDED, EXCLUDED, higher)
        first += chunk.size
