"""Every request that must be refused: one row each. What is refused leaves the directory as it was, to the byte."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import DATA, HEADER, SCHEMA, SECRET, explained, fit, planted, tree


@dataclass(frozen=True)
class Fault:
    """A command, the files it meets, and how it must be refused."""

    name: str
    arguments: str
    code: int
    words: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)


def parquet(**columns) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


PARQUET = parquet(town=["Ayr", SECRET] * 60, age=[7341.0, None] * 60, kind=[1, 2] * 60)


def data(name: str, content: str | bytes, *said: str, file: str = "data.csv") -> Fault:
    """Data that does not fit: exit code 3."""
    return Fault(name, fit(data=file), 3, said, {file: content})


FILES = [
    Fault("missing", fit(data="absent.csv"), 2, ("'absent.csv'", "must be a file that exists")),
    Fault("a directory", fit(data="."), 2, ("must be a file, not a directory",)),
    Fault("a device", fit(data="/dev/null"), 2, ("must be a file",)),
    Fault("a URL", fit(data=f"s3://{SECRET}/x.csv"), 2, ("s3://", "must be a path")),
    Fault("no table", fit(data="duckdb:///data.db"), 2, ("duckdb:///file.db#table",)),
    Fault("not a database", fit(data="duckdb:///data.csv#people"), 5, ("must be a DuckDB file",)),
    data("empty", "", "must not be empty"),
    data("BOM alone", b"\xef\xbb\xbf", "must not be empty"),
    data("header alone", HEADER, "at least one row", "add-remove"),
    data("short row", planted(f"{SECRET}\n"), "as many fields as the header (3)"),
    data("long row", planted(f"{SECRET},1,1,1\n"), "as many fields as the header (3)"),
    data("unclosed quote", planted(f'"{SECRET},1,1\n'), "close every quote"),
    data("semicolons", planted().replace(",", ";"), "commas"),
    data("tabs", planted().replace(",", "\t"), "commas"),
    data("UTF-16", planted().encode("utf-16"), "UTF-8"),
    data("UTF-16 without BOM", planted().encode("utf-16-le"), "NUL"),
    data("Latin-1", planted(f"{SECRET} é,1,1\n").encode("latin-1"), "UTF-8"),
    data("NUL", planted(f"{SECRET}\0,1,1\n"), "NUL"),
    data("truncated gzip", gzip.compress(planted().encode())[:-30], "gzip", "cut off"),
    data("truncated Parquet", PARQUET[:-40], "whole Parquet", file="data.parquet"),
    data("CSV named Parquet", planted(), "Parquet, as its name says", file="data.parquet"),
    data("Parquet of lists", parquet(town=[[SECRET]], age=[1], kind=[1]), "'town'", "list", file="d.parquet"),
    data("Parquet of bytes", parquet(town=[b"x"], age=[1], kind=[1]), "'town'", "binary", file="d.parquet"),
    data("a pickle", pickle.dumps({"town": SECRET}), "UTF-8"),
    data("a pickle named Parquet", pickle.dumps([SECRET]), "Parquet", file="data.parquet"),
    data("duplicate names", planted().replace("age", "town", 1), "'town'", "once"),
    data("column missing", planted().replace(",kind", ",sort", 1), "'kind'", "must be in the data"),
    data("other case", planted().replace("town", "Town", 1), "'town'", "Did you mean 'Town'"),
    data("a space", planted().replace("town", "town ", 1), "'town'", "Did you mean 'town '"),
    data("a terminal escape", planted().replace("town", "\x1b[31mtown", 1), "'town'", "must be in the data"),
]


def schema(name: str, content: str | bytes, *said: str) -> Fault:
    """A schema that cannot be used: exit code 2."""
    return Fault(name, fit(), 2, said, {"schema.yaml": content})


def column(name: str, declared: str, *said: str) -> Fault:
    return schema(name, f"columns:\n  town: {{{declared}}}\n  b: {{type: codes, values: 2}}\n", "'town'", *said)


BOMB = "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(9))
WIDE = "".join(f"  c{i}: {{type: numeric, lower: 0, upper: 1, bins: 100000}}\n" for i in range(6))
MANY = "".join(f"  c{i}: {{type: codes, values: 2}}\n" for i in range(100))

SCHEMAS = [
    Fault("schema missing", fit("--schema absent.yaml"), 2, ("'absent.yaml'", "No such file")),
    Fault("schema a directory", fit("--schema ."), 2, ("schema '.'", "Is a directory")),
    Fault("schema without end", fit("--schema /dev/zero"), 2, ("must be at most 16 MiB",)),
    schema("malformed YAML", "columns: {a: [1\nb: }", "schema.yaml, line 2", "plain YAML"),
    schema("YAML tag", "columns: !!python/object/apply:os.system ['touch owned']\n", "tags are not allowed"),
    schema("YAML bomb", BOMB, "aliases are not allowed"),
    schema("deep YAML", "[" * 20000, "plain YAML"),
    schema("too large", "# " + "x" * (16 << 20), "at most 16 MiB"),
    schema("not UTF-8", b"columns: \xff", "UTF-8"),
    schema("a pickle", pickle.dumps({"columns": 1}), "UTF-8"),
    schema("an empty file", "", "must be a mapping with `columns`"),
    schema("a list", "[1, 2]", "must be a mapping"),
    schema("no columns", "columns: {}\n", "columns must be a mapping", "not empty"),
    schema("duplicate keys", SCHEMA + "  town: {type: codes, values: 3}\n", "'town' stands twice"),
    schema("unknown key", SCHEMA.replace("dataset", "datset", 1), "'datset'", "Did you mean 'dataset'"),
    column("unknown type", "type: categoric", "'categoric'", "Did you mean 'categorical'"),
    column("unknown key of a column", "type: codes, valuse: 3", "'valuse'", "Did you mean 'values'"),
    column("empty domain", "type: categorical, categories: []", "categories", "not empty"),
    column("one value", "type: categorical, categories: [Ayr]", "at least 2 values", "missing: true"),
    column("no categories", "type: categorical", "must declare categories"),
    column("left to fill in", "type: categorical, categories: null", "categories must be filled in"),
    column("duplicate categories", "type: categorical, categories: [Ayr, 'Ayr ']", "'Ayr'", "listed once"),
    column("NFC and NFD", 'type: categorical, categories: ["\u00e9", "e\u0301"]', "listed once"),
    column("other twice", "type: categorical, categories: [Ayr, other], other: true", "'other'", "listed once"),
    column("lower above upper", "type: numeric, lower: 9, upper: 1", "lower (9) must be below upper (1)"),
    column("lower equal to upper", "type: numeric, lower: 1, upper: 1", "must be below upper"),
    column("NaN bound", "type: numeric, lower: .nan, upper: 1", "lower (nan) must be a finite number"),
    column("infinite bound", "type: numeric, lower: 0, upper: .inf", "upper (inf) must be a finite number"),
    column("huge bound", f"type: numeric, lower: 0, upper: 1{'0' * 400}", "upper", "1.8e308"),
    column("bound as text", "type: numeric, lower: low, upper: 1", "lower ('low') must be a finite number"),
    column("no bins", "type: numeric, lower: 0, upper: 1, bins: 0", "bins (0)", "from 1 to"),
    column("unknown source", "type: codes, values: 2, source: guess", "source ('guess')", "declared, public"),
    column("from data", "type: codes, values: 2, source: data", "write `source: declared`"),
    schema("path in the name", SCHEMA.replace("people", "../../people"), "'../../people'", "without slashes"),
    schema("hidden name", SCHEMA.replace("people", ".people"), "does not begin with a dot"),
    schema("escape in the name", SCHEMA.replace("people", '"a\\e[31m"'), "printable"),
    Fault(
        "10^30 cells",
        fit("--workload marginals:k=6"),
        2,
        ("c0 x c1 x c2 x c3 x c4 x c5", "1.00e+30 cells", "at most 9.22e+18", "smaller k"),
        {"schema.yaml": "columns:\n" + WIDE},
    ),
    Fault(
        "10^29 marginals",
        fit("--workload marginals:k=50"),
        2,
        ("1.01e+29 50-way marginals", "smaller k", "count"),
        {"schema.yaml": "columns:\n" + MANY},
    ),
    Fault(
        "some of 10^29 marginals",
        fit("--workload marginals:k=50,count=3"),
        2,
        ("k (50)", "1.01e+29 marginals"),
        {"schema.yaml": "columns:\n" + MANY},
    ),
]


def asked(name: str, options: str, *said: str) -> Fault:
    """Parameters that cannot be used: exit code 2."""
    return Fault(name, fit(options), 2, said)


PARAMETERS = [
    asked("k = 0", "--workload marginals:k=0", "k (0) must be from 1 to 3"),
    asked("k > columns", "--workload marginals:k=4", "k (4) must be from 1 to 3, the number of columns"),
    asked("no k", "--workload marginals", "must give k"),
    asked("k not a number", "--workload marginals:k=two", "'two'", "whole number"),
    asked("unknown class", "--workload margin:k=2", "'margin:k=2'", "Did you mean 'marginals'"),
    asked("unknown option", "--workload marginals:k=2,cuont=3", "Did you mean 'count'"),
    asked("count 0", "--workload marginals:k=2,count=0", "count (0) must be at least 1"),
    asked("count > marginals", "--workload marginals:k=2,count=4", "count (4) must be at most 3"),
    asked("absent column", "--workload marginals:of=age+twon", "'twon'", "Did you mean 'town'"),
    asked("column twice", "--workload marginals:of=age+age", "each column once"),
    asked("workload file missing", "--workload absent.yaml", "'absent.yaml'", "readable"),
    Fault("empty workload", fit("--workload w.yaml"), 2, ("must list specs",), {"w.yaml": "workload: []\n"}),
    Fault(
        "duplicate queries",
        fit("--workload w.yaml"),
        2,
        ("town x age", "listed once"),
        {"w.yaml": "['marginals:k=2', 'marginals:of=age+town']"},
    ),
    Fault("workload of bytes", fit("--workload w.yaml"), 2, ("'w.yaml'", "text"), {"w.yaml": b"\xff\xfe"}),
    Fault(
        "workload tag",
        fit("--workload w.yaml"),
        2,
        ("tags are not",),
        {"w.yaml": "!!python/name:os.system x"},
    ),
    asked("no r", "--workload thresholds:k=2", "must give r"),
    asked("r = 0", "--workload thresholds:k=2,r=0", "r (0) must be from 1 to k"),
    asked("r > k", "--workload thresholds:k=2,r=3", "r (3) must be from 1 to k"),
    asked("r of a marginal", "--workload marginals:k=2,r=1", "'r=1'", "one of k, count, seed, of, target, weight"),
    asked("thresholds, k > columns", "--workload thresholds:k=4,r=1", "k (4) must be from 1 to 3"),
    asked("thresholds misspelt", "--workload thresold:k=2,r=1", "Did you mean 'thresholds'"),
    asked("listed twice", "--workload 'thresholds:k=2,r=2;marginals:of=town+kind'", "town x kind", "listed once"),
    asked("an empty part", "--workload 'marginals:k=1;'", "must begin with one of"),
    asked("weight 0", "--workload marginals:k=2,weight=0", "weight ('0') must be a number from 1e-6 to 1e6"),
    asked("weight negative", "--workload marginals:k=2,weight=-2", "weight ('-2') must be"),
    asked("weight NaN", "--workload marginals:k=2,weight=nan", "weight ('nan') must be"),
    asked("weight beyond reason", "--workload marginals:k=2,weight=1e999999999", "weight ('1e999999999') must be"),
    asked("weight twice", "--workload marginals:k=2,weight=2,weight=2", "weight must be given once"),
    asked("no function", "--workload custom:", "module:function"),
    asked("a function by its path", "--workload custom:../mine.py:f", "module:function"),
    asked("absent module", "--workload custom:absent_module:f", "'absent_module'", "that Python can import"),
    asked("absent function", "--workload custom:math:sqroot", "'math:sqroot'", "Did you mean 'sqrt'"),
    asked("not a function", "--workload custom:math:pi", "must be a jax function", "float"),
    asked("not a function of rows", "--workload custom:math:sqrt", "must be a jax function of one row"),
    asked("option of a function", "--workload custom:math:sqrt,k=2", "'k=2'", "one of weight"),
    Fault(
        "weight in a file",
        fit("--workload w.yaml"),
        2,
        ("weight ('much') must be",),
        {"w.yaml": "['marginals:k=1', 'thresholds:k=2,r=1,weight=much']"},
    ),
    asked("memory not a size", "--memory much", "memory ('much') must be a size such as 4GB"),
    asked("memory without unit", "--memory 4000", "memory ('4000') must be a size"),
    asked("memory negative", "--memory -4GB", "memory ('-4GB') must be a size"),
    Fault(
        "too large for a ledger",
        fit("--workload marginals:k=3 --memory 1TB"),
        2,
        ("a measurement (of up to 125000000 queries) must have at most 100000000",),
        {"schema.yaml": "columns:\n" + "".join(f"  c{i}: {{type: codes, values: 500}}\n" for i in range(3))},
    ),
    asked(
        "K > queries",
        "--mechanism rap --set rounds=2 --set per_round=400",
        "(800) must be at most",
        "queries",
    ),
    asked(
        "T K > queries",
        "--mechanism rap --set rounds=99 --set per_round=9",
        "(891) must be at most",
        "rounds=1",
    ),
    asked(
        "T K > marginals",
        "--mechanism rap --set blocks=true --set rounds=2 --set per_round=2",
        "(4)",
        "marginals",
    ),
    asked("rounds 0", "--mechanism rap --set rounds=0", "rounds (0)", "at least 1"),
    asked("rows -1", "--mechanism rap --set rows=-1", "rows (-1)", "at least 1"),
    asked("split 1", "--mechanism rap --set split=1", "split (1.0) must be in (0, 1)"),
    asked("split NaN", "--mechanism rap --set split=nan", "split (nan) must be in (0, 1)"),
    asked("rate beyond reason", "--mechanism rap --set rate=1e38", "rate (1e+38) must be at most 100"),
    asked("start not a number", "--mechanism rap --set start=nan", "start (nan) must be a finite number"),
    asked("rounds not a number", "--mechanism rap --set rounds=1.5", "'1.5'", "whole number"),
    asked("blocks not a truth value", "--set blocks=yes", "'yes'", "true or false"),
    asked("unknown setting", "--mechanism rap --set round=3", "'round'", "Did you mean 'rounds'"),
    asked("setting twice", "--set blocks=true --set blocks=false", "--set blocks must be given once"),
    asked("setting without value", "--set blocks", "'blocks'", "name=value"),
    asked("unknown mechanism", "--mechanism rapp", "'rapp'", "Did you mean 'rap'"),
    asked("epsilon 0", "--epsilon 0", "epsilon (0) must be a finite number above 0"),
    asked("epsilon negative", "--epsilon -1", "epsilon (-1) must be"),
    asked("epsilon NaN", "--epsilon nan", "epsilon (nan) must be"),
    asked("epsilon infinite", "--epsilon inf", "epsilon (inf) must be"),
    asked("epsilon not a number", "--epsilon much", "--epsilon", "number"),
    asked("delta 0", "--delta 0", "delta (0) must be above 0 and below 1"),
    asked("delta negative", "--delta -1e-6", "delta (-1e-06) must be"),
    asked("delta 1", "--delta 1", "delta (1) must be"),
    asked("delta NaN", "--delta nan", "delta (nan) must be"),
    asked("unknown relation", "--neighbours swap", "neighbours ('swap') must be replace or add-remove"),
    asked("unknown option of fit", "--epsilom 1", "No such option", "--epsilom"),
    asked("negative seed", "--seed -1", "seed", "greater than or equal to 0"),
    asked("negative unsafe seed", "--unsafe-seed -1", "seed", "greater than or equal to 0"),
    Fault("no arguments of fit", "fit", 2, ("Missing",)),
    Fault("unknown verb", "fti data.csv", 2, ("No such command", "fti")),
]

OUTPUTS = [
    Fault("output exists", fit(), 2, ("'release'", "must not exist yet", "--overwrite"), {"release/x": "mine"}),
    Fault("output holds other files", fit("--overwrite"), 2, ("holds other files",), {"release/x": "mine"}),
    Fault("output is a file", fit(), 2, ("must not exist yet",), {"release": "mine"}),
    Fault("output over a file", fit("--overwrite"), 2, ("'release'", "must be a release"), {"release": "mine"}),
    Fault("output without parent", fit("-o absent/release"), 5, ("'absent/release'", "No such file")),
    Fault("output in a file", fit("-o data.csv/release"), 5, ("cannot be written", "Not a directory")),
    Fault("output name too long", fit("-o " + "x" * 300), 5, ("File name too long",)),
    Fault("output is the ledger", fit("-o x --ledger x"), 2, ("must not be the ledger",)),
    Fault("output the root", fit("-o /"), 2, ("'/'",)),
    Fault("ledger is not one", fit("--ledger data.csv"), 6, ("data.csv", "not a database")),
    Fault("ledger is a pickle", fit("--ledger p"), 6, ("not a database",), {"p": pickle.dumps([1] * 99)}),
    Fault("ledger a directory", fit("--ledger ."), 5, ("ledger",)),
    Fault("ledger without parent", fit("--ledger absent/l"), 5, ("absent/l",)),
    Fault("witness without ledger", fit("--ledger l"), 6, ("missing",), {"l.witness": "3 " + "0" * 64 + "\n"}),
    Fault("witness damaged", fit("--ledger l"), 6, ("witness",), {"l.witness": "x"}),
    Fault("nothing to resume", fit("--resume"), 2, ("'people'", "to resume")),
]

OTHER_VERBS = [
    Fault("sample of nothing", "sample absent -o r.csv", 2, ("'absent'", "anamorph fit")),
    Fault("sample of a file", "sample data.csv -o r.csv", 2, ("must be a directory",)),
    Fault("sample of a directory", "sample . -o r.csv", 6, ("must hold the file release.json",)),
    Fault("query of nothing", "query absent 'age < 30'", 2, ("'absent'",)),
    Fault("evaluate nothing", "evaluate absent data.csv --schema schema.yaml", 2, ("'absent'",)),
    Fault("no ledger to show", "ledger show", 2, ("anamorph.ledger", "--ledger")),
    Fault("no ledger to verify", "ledger verify", 2, ("must exist",)),
    Fault("an account without schema", "ledger open people --epsilon 1 --delta 1e-6", 2, ("--schema",)),
    Fault(
        "an account of another name",
        "ledger open poeple --epsilon 1 --delta 1e-6 --schema schema.yaml",
        2,
        ("'poeple'", "'people'"),
    ),
    Fault(
        "an account of an unknown relation",
        "ledger open people --epsilon 1 --delta 1e-6 --schema schema.yaml --neighbours swap",
        2,
        ("'swap'", "add-remove"),
    ),
    Fault("an account of no budget", "ledger open people --epsilon 0 --delta 1e-6", 2, ("epsilon (0)",)),
    Fault("check of a bad schema", "schema check data.csv", 2, ("data.csv",)),
    Fault("check of missing data", "schema check schema.yaml absent.csv", 2, ("'absent.csv'",)),
    Fault(
        "check of other data",
        "schema check schema.yaml d.csv",
        3,
        ("'town'", "must be in the"),
        {"d.csv": "a,b\n1,2\n"},
    ),
    Fault("draft of nothing", "schema init absent.csv -o s.yaml", 2, ("'absent.csv'",)),
    Fault("draft over a file", "schema init data.csv -o schema.yaml", 2, ("must not exist", "--overwrite")),
    Fault("draft of an empty file", "schema init d.csv -o s.yaml", 3, ("empty",), {"d.csv": ""}),
    Fault(
        "draft of a pickle",
        "schema init d.parquet -o s.yaml",
        3,
        ("Parquet",),
        {"d.parquet": pickle.dumps([1])},
    ),
    Fault(
        "draft into nowhere",
        "schema init data.csv -o absent/s.yaml",
        5,
        ("'absent/s.yaml'", "cannot be written"),
    ),
    Fault(
        "values of a ragged file",
        "schema init d.csv --from-data -o s.yaml",
        3,
        ("header",),
        {"d.csv": planted("x\n")},
    ),
    Fault(
        "plan of no rows",
        "plan schema.yaml --workload marginals:k=2 --epsilon 1 --delta 1e-6 --rows 0",
        2,
        ("rows (0)",),
    ),
    Fault(
        "plan of an unknown relation",
        "plan schema.yaml --workload marginals:k=2 --epsilon 1 --delta 1e-6 --neighbours swap",
        2,
        ("'swap'",),
    ),
    Fault("a demonstration over files", "demo --out .", 2, ("must be an empty directory",)),
    Fault("a demonstration in a file", "demo --out data.csv", 2, ("'data.csv'", "directory")),
    Fault("a demonstration of nobody", "demo --out demo --rows 0", 2, ("rows (0)",)),
]

ALL = FILES + SCHEMAS + PARAMETERS + OUTPUTS + OTHER_VERBS


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_refused_and_nothing_changed(fault, place, cli):
    for name, content in fault.files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = tree(place)
    explained(cli(fault.arguments), fault.code, *fault.words)
    assert tree(place) == before


def test_parameters_are_refused_before_anything_is_read(place, cli):
    """What is wrong with the request is said, though the data is not there at all."""
    (place / "data.csv").unlink()
    for fault in SCHEMAS + PARAMETERS:
        for name, content in ({"schema.yaml": SCHEMA} | fault.files).items():
            (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        explained(cli(fault.arguments), 2, *fault.words)


def test_data_is_refused_by_evaluate_in_the_same_words(place, cli):
    assert cli(fit("--mechanism all-zero")).code == 0
    for fault in FILES:
        for name, content in fault.files.items():
            (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        if fault.name != "header alone":  # errors against no rows are figures, too
            path = fault.arguments.split()[1]
            explained(cli(f"evaluate release {path} --schema schema.yaml --json"), fault.code, *fault.words)


def test_a_file_that_changes_while_it_is_read(place, cli, monkeypatch):
    from anamorph.sources import files

    match = files.match_columns

    def meanwhile(*arguments):
        with (place / "data.csv").open("a") as file:
            file.write(f"{SECRET},1,1\n")
        return match(*arguments)

    monkeypatch.setattr(files, "match_columns", meanwhile)
    explained(cli(fit()), 5, "must not change while it is read")
    assert not (place / "anamorph.ledger").exists()


def test_a_run_that_would_not_fit_in_memory(place, cli):
    wide = "".join(f"  c{i}: {{type: numeric, lower: 0, upper: 1, bins: 2000}}\n" for i in range(3))
    (place / "schema.yaml").write_text("columns:\n" + wide)
    before = tree(place)
    explained(cli(fit("--workload marginals:k=3")), 5, "GB) must be at least", "smaller workload")
    explained(cli(fit("--workload marginals:k=3 --memory 300GB")), 5, "memory (300 GB) must be at least 341 GB")
    (place / "schema.yaml").write_text(SCHEMA)
    small = "--mechanism rap --set rounds=2 --memory 200MB"
    explained(cli(fit(small)), 5, "memory (0.2 GB) must be at least", "--set rows")
    asked = "schema.yaml --workload marginals:k=2 --epsilon 1 --delta 1e-6"
    explained(cli(f"plan {asked} {small}"), 5, "memory (0.2 GB) must be at least")
    (place / "schema.yaml").write_text("columns:\n" + wide)
    assert tree(place) == before


@pytest.mark.parametrize(
    "raised", [MemoryError(SECRET), OSError(28, "No space left on device", SECRET), KeyError(SECRET)]
)
def test_faults_that_are_not_ours_keep_their_text(place, capsys, monkeypatch, raised):
    """A foreign exception could quote a private value: only its kind is said."""
    from anamorph import _console, fitting

    def fails(*_):
        raise raised

    monkeypatch.setattr(fitting, "run", fails)
    from anamorph.cli import invoke

    code = _console.guarded(lambda: invoke(fit().split()), debug=False)
    said = capsys.readouterr()
    assert code == (1 if isinstance(raised, KeyError) else 5)
    assert SECRET not in said.err
    assert "Traceback" not in said.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions(place, cli):
    for name in ("closed", "closed/inner"):
        (place / name).mkdir()
    (place / "closed").chmod(0o500)
    explained(cli(fit("-o closed/release")), 5, "Permission denied")
    explained(cli(fit("--ledger closed/l")), 5, "closed/l")
    (place / "data.csv").chmod(0)
    explained(cli(fit()), 5, "Permission denied")
    (place / "closed").chmod(0o700)


def test_data_is_what_the_schema_says(place, cli):
    assert DATA.startswith(HEADER)
    assert cli(fit()).code == 0
