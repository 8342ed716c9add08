"""The command line: `anamorph VERB …`. Every verb imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anamorph import _console
from anamorph._console import say, tell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anamorph.curator.budget import Budget
    from anamorph.release import Release

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Answers to very large sets of statistical queries, and synthetic rows, under differential privacy.",
)
schema_app = typer.Typer(no_args_is_help=True, help="Describe the columns: what is public about the data.")
ledger_app = typer.Typer(no_args_is_help=True, help="What was spent, and the total that may be.")
app.add_typer(schema_app, name="schema")
app.add_typer(ledger_app, name="ledger")

Epsilon = Annotated[float, typer.Option("--epsilon", help="The epsilon of the promise.")]
Delta = Annotated[float, typer.Option("--delta", help="The delta of the promise; below 1 / rows.")]
SchemaPath = Annotated[Path, typer.Option("--schema", help="The schema: YAML, or mbi's {column: size} JSON.")]
Spec = Annotated[
    str, typer.Option("--workload", help="'marginals:k=3,count=64,seed=0', 'thresholds:k=4,r=2', or a YAML file.")
]
Neighbours = Annotated[str, typer.Option("--neighbours", help="What one person may change: replace or add-remove.")]
Name = Annotated[
    str,
    typer.Option(
        "--mechanism",
        help="auto, rap, gem, rap++, dp-merf, gaussian, hdmm, aim, mst, mwem, mwem-pgm, fem, sepfem, dualquery, dqrs, "
        "independent or all-zero.",
    ),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="name=value: a parameter of the mechanism.")]
LedgerPath = Annotated[Path, typer.Option("--ledger", help="The file that keeps what was spent.")]
MemorySize = Annotated[str | None, typer.Option("--memory", help="The memory to keep within, such as 4GB.")]
LARGEST_SEED = 2**31 - 1
Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON.")]
ReleasePath = Annotated[Path, typer.Argument(metavar="RELEASE", help="A directory made by fit.")]

DEFAULT_LEDGER = Path("anamorph.ledger")
INTERRUPTED = 130
MOST_LINES = 20


@schema_app.command("init")
def schema_init(
    data: Annotated[str, typer.Argument(help="A CSV or Parquet file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The schema to write.")],
    from_data: Annotated[
        bool, typer.Option("--from-data", help="Read values from the rows: marked so, NOT PRIVATE.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
) -> None:
    """Start a schema from the names and types of the columns; values are left for you to declare."""
    from anamorph.drafting import draft  # noqa: PLC0415

    text, todo = draft(data, from_data=from_data)
    write_text(output, text, overwrite=overwrite)
    say(f"wrote {output}: {todo}")


@schema_app.command("check")
def schema_check(
    path: Annotated[Path, typer.Argument(metavar="SCHEMA")],
    data: Annotated[str | None, typer.Argument(help="Also check that the data has these columns.")] = None,
) -> None:
    """Check a schema, and that a file has its columns; values are not looked at."""
    from anamorph.schema import Schema  # noqa: PLC0415

    schema = Schema.load(path)
    if data is not None:
        from anamorph.sources import check_structure  # noqa: PLC0415

        for remark in check_structure(data, schema):
            say(remark)
    for column in schema.columns:
        values = "knots to come" if column.pending else "native" if column.native else f"{column.size} values"
        tell(f"{column.name}: {column.kind}, {values}, source {column.source}")
    if schema.from_data():
        say(f"values of {', '.join(map(repr, schema.from_data()))} were read from the data: fit will refuse them")


@schema_app.command("quantiles")
def schema_quantiles(
    data: Annotated[str, typer.Argument(help="A CSV, CSV.gz or Parquet file, or duckdb:///file.db#table.")],
    schema: SchemaPath,
    epsilon: Epsilon,
    delta: Delta,
    output: Annotated[Path, typer.Option("-o", "--output", help="The schema to write, with knots.")],
    columns: Annotated[
        str | None, typer.Option("--columns", help="Names joined by commas; by default all that lack knots.")
    ] = None,
    knots: Annotated[int, typer.Option("--knots", help="Knots of a column, both bounds included.")] = 16,
    neighbours: Neighbours = "replace",
    ledger: LedgerPath = DEFAULT_LEDGER,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was cut short.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
) -> None:
    """Estimate the knots of columns that declare `transform: quantile`: private, and charged to the ledger."""
    from anamorph import fitting  # noqa: PLC0415
    from anamorph.quantiles import Quantiles  # noqa: PLC0415
    from anamorph.schema import Schema  # noqa: PLC0415

    request = fitting.Estimation(
        data=data,
        schema=Schema.load(schema),
        quantiles=Quantiles(columns=tuple(columns.split(",")) if columns else (), knots=knots),
        budget=budget(epsilon, delta),
        neighbours=neighbours,  # pyright: ignore[reportArgumentType] - the curator checks it
        ledger=ledger,
        output=output,
        overwrite=overwrite,
        resume=resume,
    )
    with _console.progress_bars():
        _, promise = fitting.estimate(request, say)
    tell(promise)
    tell(f"schema: {output}")
    tell(f"ledger: {ledger}")


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(metavar="SCHEMA")],
    workload: Spec,
    epsilon: Epsilon,
    delta: Delta,
    rows: Annotated[int | None, typer.Option("--rows", help="The number of rows, if it is public.")] = None,
    mechanism: Name = "auto",
    settings: Settings = None,
    neighbours: Neighbours = "replace",
    memory: MemorySize = None,
    as_json: Json = False,
) -> None:
    """Say what a fit would ask, spend and need. Reads no private data."""
    from anamorph.planning import parse_memory  # noqa: PLC0415
    from anamorph.planning import plan as make_plan  # noqa: PLC0415
    from anamorph.schema import Schema  # noqa: PLC0415

    figures = make_plan(
        Schema.load(path),
        workload,
        made(mechanism, settings),
        budget(epsilon, delta),
        neighbours=neighbours,
        rows=rows,
        memory=None if memory is None else parse_memory(memory),
    )
    show(figures, as_json)


@app.command()
def fit(
    data: Annotated[str, typer.Argument(help="A CSV, CSV.gz or Parquet file, or duckdb:///file.db#table.")],
    schema: SchemaPath,
    workload: Spec,
    epsilon: Epsilon,
    delta: Delta,
    output: Annotated[Path, typer.Option("-o", "--output", help="The release directory to make.")],
    mechanism: Name = "auto",
    neighbours: Neighbours = "replace",
    settings: Settings = None,
    ledger: LedgerPath = DEFAULT_LEDGER,
    memory: MemorySize = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of projection and rounding; never of noise.")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was cut short.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    unsafe_seed: Annotated[
        int | None, typer.Option("--unsafe-seed", min=0, max=LARGEST_SEED, help="Seed the noise: NOT PRIVATE.")
    ] = None,
) -> None:
    """Make a private release."""
    from anamorph import fitting  # noqa: PLC0415
    from anamorph.planning import parse_memory  # noqa: PLC0415
    from anamorph.schema import Schema  # noqa: PLC0415

    request = fitting.Fit(
        data=data,
        schema=Schema.load(schema),
        workload=workload,
        mechanism=made(mechanism, settings),
        budget=budget(epsilon, delta),
        neighbours=neighbours,  # pyright: ignore[reportArgumentType] - the curator checks it
        ledger=ledger,
        output=output,
        overwrite=overwrite,
        resume=resume,
        memory=None if memory is None else parse_memory(memory),
        seed=seed,
        unsafe_seed=unsafe_seed,
    )
    with _console.progress_bars():
        release = fitting.run(request, say)
    show_release(release)
    tell(f"release: {output}")
    if unsafe_seed is None and ledger.exists():  # a run that asks nothing keeps none
        tell(f"ledger:  {ledger}")


@app.command()
def sample(
    release: ReleasePath,
    output: Annotated[Path, typer.Option("-o", "--output", help="rows.csv or rows.parquet.")],
    rows: Annotated[
        int | None, typer.Option("--rows", help="How many; by default as many as the data (publicly) had.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED)] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
) -> None:
    """Make synthetic rows in the original schema."""
    from anamorph.tables import sample_rows, write_table  # noqa: PLC0415

    loaded = opened(release)
    with _console.progress_bars():
        write_table(sample_rows(loaded, rows, seed=seed), output, overwrite=overwrite)
    tell(f"rows: {output}")


@app.command()
def query(
    release: ReleasePath,
    questions: Annotated[
        list[str] | None, typer.Argument(help="Conditions such as \"age < 30 and sex = 'F'\".")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", help="Answer every query of a workload instead.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A CSV or Parquet file for the answers.")
    ] = None,
    confidence: Annotated[
        float, typer.Option("--confidence", help="Of the intervals, where the noise of an answer is known.")
    ] = 0.95,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    as_json: Json = False,
) -> None:
    """Answer questions from a release, as fractions and counts, with error bars where the noise is known."""
    from dataclasses import asdict  # noqa: PLC0415

    from anamorph.errors import ParameterError  # noqa: PLC0415
    from anamorph.questions import ask  # noqa: PLC0415
    from anamorph.tables import answer_table, write_table  # noqa: PLC0415

    loaded = opened(release)
    if bool(questions) == (workload is not None):
        raise ParameterError("query must be given either conditions or --workload")
    if workload is not None:
        if output is None:
            raise ParameterError("query --workload must name a file for its answers: -o answers.csv")
        with _console.progress_bars():
            write_table(answer_table(loaded, workload, confidence=confidence), output, overwrite=overwrite)
        tell(f"answers: {output}")
        return
    answers = [asdict(ask(loaded, question, confidence=confidence)) for question in questions or ()]
    if as_json:
        print(json.dumps({"private": loaded.privacy.private, "answers": answers}))
        return
    for answer in answers:
        bar = ""
        if answer["sigma"] is not None:
            bar = f", from {answer['low']:.6g} to {answer['high']:.6g} ({100 * confidence:g}%)"
        tell(f"{answer['question']}: {answer['fraction']:.6g}{bar}; about {answer['count']:.0f} rows")


@app.command()
def evaluate(
    release: ReleasePath,
    data: Annotated[str, typer.Argument(help="The private data.")],
    schema: SchemaPath,
    workload: Annotated[str | None, typer.Option("--workload", help="By default the workload of the fit.")] = None,
    ml: Annotated[
        list[str] | None, typer.Option("--ml", help="target=COLUMN, or target=COLUMN:VALUE+VALUE: train models.")
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="Rows that were no part of the fit, for the models of --ml.")
    ] = None,
    learner: Annotated[str, typer.Option("--learner", help="Of --ml: logistic or boosting.")] = "logistic",
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of the synthetic rows that are scored, and of a split."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """NOT PRIVATE: the true errors of a release against the data; with --ml, what its rows teach a model."""
    from anamorph.errors import ParameterError  # noqa: PLC0415
    from anamorph.evaluation.scoring import score  # noqa: PLC0415
    from anamorph.schema import Schema  # noqa: PLC0415

    if test is not None and not ml:
        raise ParameterError("--test must come with --ml target=COLUMN")
    for item in ml or ():
        if not item.startswith("target="):
            raise ParameterError(f"--ml ({item!r}) must be target=COLUMN or target=COLUMN:VALUE+VALUE")
    loaded, described = opened(release), Schema.load(schema)
    if workload is None and not ml and "custom:" in loaded.workload:
        raise ParameterError(
            f"the release's workload ({loaded.workload!r}) names functions: repeat it with --workload to import them"
        )
    figures: dict[str, Any] = {}
    with _console.progress_bars():
        if workload is not None or not ml:
            figures |= score(loaded, data, described, workload or loaded.workload, seed=seed)
        if ml:
            from anamorph.evaluation.learning import learn  # noqa: PLC0415

            targets = [item.removeprefix("target=") for item in ml]
            figures |= learn(loaded, data, described, targets, test=test, learner=learner, seed=seed)
    say("NOT PRIVATE: these figures are computed from the private rows without noise; do not publish them")
    show(figures, as_json)


@app.command()
def split(
    data: Annotated[str, typer.Argument(help="A CSV, CSV.gz or Parquet file.")],
    schema: SchemaPath,
    train: Annotated[Path, typer.Option("--train", help="The rows to fit, and to train on: .csv or .parquet.")],
    test: Annotated[Path, typer.Option("--test", help="The rows to test with: .csv or .parquet.")],
    fraction: Annotated[float, typer.Option("--fraction", help="Of the rows, to train.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED)] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
) -> None:
    """NOT PRIVATE: put the rows of a file into two, for an honest `evaluate --ml --test`."""
    from anamorph.evaluation.splitting import write_split  # noqa: PLC0415
    from anamorph.schema import Schema  # noqa: PLC0415

    write_split(data, Schema.load(schema), train, test, fraction=fraction, seed=seed, overwrite=overwrite)
    say("NOT PRIVATE: both files hold private rows")
    tell(f"train: {train}")
    tell(f"test:  {test}")


@ledger_app.command("show")
def ledger_show(
    dataset: Annotated[str | None, typer.Argument()] = None,
    ledger: LedgerPath = DEFAULT_LEDGER,
    as_json: Json = False,
) -> None:
    """Show accounts, or every spend of one dataset."""
    from anamorph.bookkeeping import entries, summary  # noqa: PLC0415

    show(summary(ledger) if dataset is None else entries(ledger, dataset), as_json)


@ledger_app.command("open")
def ledger_open(
    dataset: Annotated[str, typer.Argument()],
    epsilon: Epsilon,
    delta: Delta,
    schema: Annotated[Path | None, typer.Option("--schema", help="For a new account.")] = None,
    neighbours: Neighbours = "replace",
    ledger: LedgerPath = DEFAULT_LEDGER,
) -> None:
    """Open an account with a total, or raise the total of one, on record."""
    from anamorph.bookkeeping import open_account  # noqa: PLC0415

    account = open_account(ledger, dataset, budget(epsilon, delta), schema=schema, neighbours=neighbours)
    tell(f"{account.dataset}: total rho {account.total:.6g}, remaining {account.remaining:.6g}")


@ledger_app.command("verify")
def ledger_verify(
    ledger: LedgerPath = DEFAULT_LEDGER,
    release: Annotated[
        Path | None, typer.Option("--release", help="Also check that this release is on record.")
    ] = None,
) -> None:
    """Check the chain of records."""
    from anamorph.bookkeeping import verify  # noqa: PLC0415

    print(verify(ledger, release))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="The directory to make.")] = Path("demo"),
    rows: Annotated[int, typer.Option("--rows", help="Rows of the fictional survey.")] = 20000,
) -> None:
    """A fictional survey, made here: schema, private release, rows, answers; under a minute."""
    from anamorph.demonstration import demonstrate  # noqa: PLC0415

    with _console.progress_bars():
        made_here = demonstrate(out, rows, say)
    show_release(made_here.release)
    for name, path in made_here.paths.items():
        tell(f"{name + ':':10} {path}")


def main() -> None:
    """Runs the command line and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what a terminal cannot show
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    sys.exit(_console.guarded(lambda: invoke(arguments), debug=debug))


def invoke(arguments: list[str]) -> int:
    """Runs one command; returns its exit code: 2 for bad usage."""
    try:
        result = app(arguments, standalone_mode=False, prog_name="anamorph")
    except typer.TyperException as error:
        if message := error.format_message().strip():  # none where help was shown instead
            path = context.command_path if (context := getattr(error, "ctx", None)) else "anamorph"
            say(f"error: {message.rstrip('.')}. Try {path} --help")
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except SystemExit as error:  # what typer makes of a pipe that nobody reads
        raise error.__context__ if isinstance(error.__context__, BrokenPipeError) else error from None
    if result == INTERRUPTED:  # what typer makes of one
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def made(name: str, settings: list[str] | None) -> Any:  # noqa: ANN401 - any mechanism
    """Returns the mechanism of a name with its `--set` options."""
    from anamorph.errors import ParameterError  # noqa: PLC0415
    from anamorph.mechanisms.mechanism import mechanism  # noqa: PLC0415

    pairs = {}
    for item in settings or ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ParameterError(f"--set ({item!r}) must be name=value")
        if key.strip() in pairs:
            raise ParameterError(f"--set {key.strip()} must be given once")
        pairs[key.strip()] = value.strip()
    return mechanism(name, pairs)


def budget(epsilon: float, delta: float) -> Budget:
    """Returns the budget of two options."""
    from anamorph.curator.budget import Budget  # noqa: PLC0415

    return Budget(epsilon=epsilon, delta=delta)


def opened(path: Path) -> Release:
    """Returns a release; says so where it is not private."""
    from anamorph import archive  # noqa: PLC0415

    release = archive.load(path)
    if not release.privacy.private:
        say(release.privacy.statement())
    return release


def show_release(release: Release) -> None:
    """Prints the promise, and what was spent where."""
    from collections import Counter  # noqa: PLC0415

    print(release.privacy.statement())
    rounds: Counter[str] = Counter()
    for spend in release.privacy.spends:
        rounds[spend.kind] += 1
    for kind, times in rounds.items():
        mine = [spend for spend in release.privacy.spends if spend.kind == kind]
        print(f"  {kind:8} {times:4} x  rho {sum(spend.rho for spend in mine):.6g}  (first: {mine[0].what})")
    if release.degraded:
        say("degraded: the projection met a loss that was not a number; the best table before it was kept")


def show(figures: dict[str, Any], as_json: bool) -> None:
    """Prints figures by name, or as JSON."""
    if as_json:
        print(json.dumps(figures, allow_nan=False))
        return
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"{name}:")
            for line in lines(value):
                tell(f"  {line}")
        else:
            tell(f"{name}: {short(value)}")


def lines(items: list[object]) -> Iterator[str]:
    """Yields a line for each of some items: equal ones once, and of very many the first."""
    plain = [short(item) for item in items]
    groups = [(line, len(list(group))) for line, group in itertools.groupby(plain)]
    for line, times in groups[:MOST_LINES]:
        yield line if times == 1 else f"{line} ({times} times)"
    if left := sum(times for _, times in groups[MOST_LINES:]):
        yield f"and {left} more: --json lists them all"


def short(value: object) -> str:
    """Returns a figure with six digits, or a text as it is."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {short(item)}" for key, item in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Writes a small text file, whole or not at all."""
    from anamorph.tables import replace_file  # noqa: PLC0415

    replace_file(path, overwrite=overwrite, write=lambda fresh: fresh.write_text(text, encoding="utf-8"))
