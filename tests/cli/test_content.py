"""Content made to harm: names that a terminal, a browser or a spreadsheet would act on, and files that are not ours."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil

import pytest
import yaml
from commands import explained, fit, tree
from safetensors.numpy import save

from anamorph import archive

NASTY = [
    "<script>alert(1)</script>",
    "a\x1b]0;owned\x07\x1b[31m",
    "new\nline\rx",
    "=cmd|' /C calc'!A0",
    'a"; DROP TABLE x; --',
]
CATEGORIES = ["=1+1", "+1", "-2", "@SUM(A1)", "<svg onload=x>", "two\nlines", "\x1b[2J", "a,b", 'quote"', "'=1+1'"]


@pytest.fixture
def nasty(place):
    """A dataset whose names and categories are made to harm."""
    columns = {name: {"type": "categorical", "categories": list(CATEGORIES), "other": True} for name in NASTY}
    (place / "schema.yaml").write_text(yaml.safe_dump({"dataset": "nasty", "columns": columns}, sort_keys=False))
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table([CATEGORIES * 4] * len(NASTY), names=NASTY), place / "data.parquet")
    return place


SMALL = "--mechanism rap --set blocks=true --set rounds=1 --set steps=5 --set rows=20 --workload marginals:k=1"


def test_names_do_not_reach_the_terminal(nasty, cli):
    """Every verb that speaks of columns or values; the runner looks for escapes, this test for line breaks."""
    for arguments in (
        fit(SMALL, data="data.parquet"),
        "schema check schema.yaml data.parquet",
        "plan schema.yaml --workload marginals:k=2 --epsilon 1 --delta 1e-6 --mechanism gaussian",
        "ledger show",
        "ledger show nasty",
        ["query", "release", f"\"{NASTY[1]}\" = '=1+1'"],
        ["query", "release", f"\"{NASTY[2]}\" = '=1+1'"],
    ):
        ran = cli(arguments)
        assert ran.code == 0, ran.text
        assert "\r" not in ran.text
        assert not any(line.startswith("line") for line in ran.text.splitlines())
    for question in (f'"{NASTY[1]}x" = 1', f"\"{NASTY[1]}\" = 'absent\x1b[31m'", "\x1b[31m ((", "a\x1b\nb = 1"):
        explained(cli(["query", "release", question]), 2)
    explained(cli(["fit", "\x1b[31mabsent.csv", *fit("-o x --ledger y").split()[2:]]), 2, "\\x1b[31mabsent.csv")
    explained(cli(["fit\x1b[31m"]), 2, "\\x1b[31m")
    explained(cli([*fit("--mechanism x").split(), "--\x1b[31m"]), 2, "\\x1b[31m")
    explained(cli(["sample", "release", "-o", "rows\x1b[31m.txt"]), 2, "\\x1b[31m")
    assert cli(["sample", "release", "-o", "rows\x1b[31m\n.csv"]).code == 0


def test_a_path_that_is_not_utf8(place, cli):
    """Found out after the release is written if it cannot be printed."""
    assert cli([*fit().split(), "-o", os.fsdecode(b"r\xff")]).code == 0


def test_formulas_are_disarmed_and_read_back(nasty, cli):
    assert cli(fit(SMALL + " --epsilon 15", data="data.parquet")).code == 0
    assert cli("sample release --rows 400 -o rows.csv").code == 0
    assert cli("sample release --rows 400 -o rows.parquet").code == 0
    import csv

    with (nasty / "rows.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert not any(cell[:1] in "=+-@\t\r" for line in [header, *rows] for cell in line if cell)
    assert "'=1+1" in {cell for line in rows for cell in line}
    from pyarrow import parquet

    assert parquet.read_table(nasty / "rows.parquet").column_names == NASTY
    assert "'=cmd|' /C calc'!A0" in header
    from anamorph.schema import Schema
    from anamorph.sources import encode

    schema = Schema.load(nasty / "schema.yaml")
    assert (encode(nasty / "rows.csv", schema).codes == encode(nasty / "rows.parquet", schema).codes).all()


def test_our_own_rows_can_be_fitted_again(nasty, cli):
    """What sample wrote, names and all, is data that a fit accepts."""
    assert cli(fit(SMALL, data="data.parquet")).code == 0
    assert cli("sample release --rows 50 -o rows.csv").code == 0
    assert cli(fit("--mechanism gaussian --ledger second.ledger -o second", data="rows.csv")).code == 0


@pytest.fixture
def release(place, cli):
    """A release directory to damage, small and with every kind of content."""
    assert cli(fit()).code == 0
    return place / "release"


def rewrite(release, change):
    """Changes the header and its checksum, as whoever forges a release would."""
    header = json.loads(text(release))
    del header["checksum"]
    change(header)
    (release / "release.json").write_bytes(archive.render(header))


def rehash(release):
    """Makes the header agree with changed files."""

    def change(header):
        for name in header["files"]:
            header["files"][name] = hashlib.sha256((release / name).read_bytes()).hexdigest()

    rewrite(release, change)


def linked(release, name, target):
    (release / name).unlink()
    (release / name).symlink_to(target)


def replaced(release, name, content):
    (release / name).write_bytes(content)


class Owned:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def text(release):
    return (release / "release.json").read_text()


DAMAGE = {
    "no header": lambda r: (r / "release.json").unlink(),
    "no model": lambda r: (r / "model.safetensors").unlink(),
    "empty header": lambda r: replaced(r, "release.json", b""),
    "truncated header": lambda r: replaced(r, "release.json", text(r).encode()[:-20]),
    "not UTF-8": lambda r: replaced(r, "release.json", b"\xff\xfe{}"),
    "deep JSON": lambda r: replaced(r, "release.json", b"[" * 100_000),
    "duplicate keys": lambda r: replaced(r, "release.json", text(r).replace("{", '{"private": true,', 1).encode()),
    "NaN": lambda r: replaced(r, "release.json", text(r).replace('"total": ', '"total": NaN, "x": ', 1).encode()),
    "edited": lambda r: replaced(r, "release.json", text(r).replace('"epsilon": 1.0', '"epsilon": 0.1').encode()),
    "1e999": lambda r: replaced(r, "release.json", text(r).replace('"total": ', '"total": 1e999, "x": ', 1).encode()),
    "negative total": lambda r: rewrite(r, lambda h: h.update(total=-5)),
    "of another program": lambda r: rewrite(r, lambda h: h.update(format="other")),
    "of the future": lambda r: rewrite(r, lambda h: h.update(version=99)),
    "unknown model": lambda r: rewrite(r, lambda h: h.update(model="../../x")),
    "no promise": lambda r: rewrite(r, lambda h: h.pop("privacy")),
    "paths": lambda r: rewrite(r, lambda h: h.update(files={"../../etc/passwd": "0", "/etc/passwd": "0"})),
    "a link": lambda r: linked(r, "model.safetensors", "/etc/passwd"),
    "a link to an equal file": lambda r: linked(r, "model.safetensors", shutil.copy(r / "model.safetensors", r.parent)),
    "a header that is a link": lambda r: linked(r, "release.json", "../schema.yaml"),
    "a truncated model": lambda r: replaced(r, "model.safetensors", (r / "model.safetensors").read_bytes()[:-8]),
    "a pickle": lambda r: replaced(r, "model.safetensors", pickle.dumps(Owned())),
    "a pickle, forged": lambda r: (replaced(r, "model.safetensors", pickle.dumps(Owned())), rehash(r)),
    "no arrays, forged": lambda r: (replaced(r, "measurements.safetensors", save({})), rehash(r)),
    "a huge header, forged": lambda r: (replaced(r, "model.safetensors", b"\xff" * 7 + b"\x7f{}"), rehash(r)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_release_that_is_damaged_or_foreign(release, cli, place, name):
    DAMAGE[name](release)
    before = tree(place)
    for arguments in (
        "query release 'age < 30'",
        "sample release -o rows.csv",
        "evaluate release data.csv --schema schema.yaml",
        "ledger verify --release release",
    ):
        explained(cli(arguments), 6, "release")
    assert tree(place) == before
    assert not (place / "owned").exists()


def test_every_field_of_a_header_may_be_anything(release, cli, place):
    """Whatever a field is replaced by, the release is refused or read; nothing else happens."""
    plain = json.loads(text(release))
    plain.pop("checksum")
    for key in plain:
        for value in (None, -1, 10**400, "x", [], {}, [[]], {"a": {"b": []}}, True):
            rewrite(release, lambda header, changed=plain | {key: value}: header.update(changed))
            ran = cli("query release 'age < 30'")
            assert ran.code in (0, 6), (key, value, ran.text)


def test_a_release_that_was_edited_is_not_on_record(release, cli):
    assert cli("ledger verify --release release").code == 0
    rewrite(release, lambda header: header.update(total=header["total"] + 1))
    explained(cli("ledger verify --release release"), 6, "must be on record")
    rewrite(release, lambda header: header["privacy"].update(epsilon=0.01))
    explained(cli("ledger verify --release release"), 6, "must describe a release")


def test_overwrite_harms_nothing_else(release, cli, place):
    shutil.copytree(release, place / "kept")
    explained(cli(fit("--ledger second")), 2, "--overwrite")
    assert cli(fit("--overwrite --ledger second")).code == 0
    assert (release / "release.json").read_bytes() != (place / "kept" / "release.json").read_bytes()
    (release / "notes.txt").write_text("mine")
    before = tree(place)
    explained(cli(fit("--overwrite --ledger third")), 2, "holds other files")
    (place / "link").symlink_to("kept")
    explained(cli(fit("-o link --overwrite --ledger third")), 2, "link")
    (place / "dangling").symlink_to("nowhere")
    explained(cli(fit("-o dangling --ledger third")), 2, "link")
    (place / "link").unlink()
    (place / "dangling").unlink()
    assert tree(place) == before


def test_tables_are_written_whole_or_not_at_all(release, cli, place):
    (place / "answers.csv").write_text("mine")
    explained(cli("query release --workload marginals:k=2 -o answers.csv"), 2, "--overwrite")
    explained(cli("query release --workload marginals:k=2 -o answers.txt"), 2, "must end in .csv or .parquet")
    explained(cli("query release --workload marginals:k=2 -o absent/a.csv"), 5, "'absent/a.csv'")
    explained(cli("query release --workload marginals:k=2"), 2, "-o answers.csv")
    explained(cli("query release"), 2, "conditions or --workload")
    explained(cli("sample release -o rows.csv"), 2, "rap")
    assert (place / "answers.csv").read_text() == "mine"
    assert cli("query release --workload marginals:k=2 -o answers.csv --overwrite").code == 0
    (place / "folder.csv").mkdir()
    explained(cli("query release --workload marginals:k=2 -o folder.csv --overwrite"), 5, "'folder.csv'")
    assert sorted(path.name for path in place.iterdir() if path.name.startswith(".")) == []
