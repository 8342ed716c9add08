"""Bad files are refused by class, with a rule and no private value; good ones are read to the letter."""

from __future__ import annotations

import gzip
import io
import os
import stat

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anamorph.columns import Categorical, Codes
from anamorph.errors import DataError, ParameterError, ResourceError
from anamorph.schema import Schema
from anamorph.sources import encode, files, open_source
from anamorph.sources.files import structure

S = b"Zanzibar-7341"
SCHEMA = Schema(
    (
        Categorical(name="a", categories=["1", "3"], other=True, missing=True),
        Codes(name="b", values=9, missing=True),
    )
)
ONE = Schema((Codes(name="a", values=9, missing=True),))


def write(directory, content, name="data.csv"):
    path = directory / name
    path.write_bytes(content)
    return path


GOOD = {
    "plain": b"a,b\n1,2\n3,4\n",
    "no last line break": b"a,b\n1,2\n3,4",
    "CRLF": b"a,b\r\n1,2\r\n3,4\r\n",
    "mixed line breaks": b"a,b\n1,2\r\n3,4\n",
    "BOM": b"\xef\xbb\xbfa,b\n1,2\n3,4\n",
    "BOM and quotes": b'\xef\xbb\xbf"a","b"\n1,2\n3,4\n',
    "quoted": b'"a","b"\n"1","2"\n"3","4"\n',
    "other order": b"b,a\n2,1\n4,3\n",
    "more columns": b'z,a,"q\n""q",b\n,1,"x\n,",2\n,3,,4\n',
    "empty lines": b"a,b\n1,2\n\n\n3,4\n\n",
    "spaces": b"a,b\n 1 ,\t2\n3 , 4\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_good_csv(tmp_path, name):
    for content, file in (
        (GOOD[name], "data.csv"),
        (gzip.compress(GOOD[name]), "data.csv.gz"),
        (gzip.compress(GOOD[name]), "data.csv"),
    ):
        assert encode(write(tmp_path, content, file), SCHEMA).codes.tolist() == [[0, 2], [1, 4]]
    split = gzip.compress(GOOD[name][:9]) + gzip.compress(GOOD[name][9:])
    assert encode(write(tmp_path, split), SCHEMA).codes.tolist() == [[0, 2], [1, 4]]


def test_header_alone_is_no_rows(tmp_path):
    for content in (b"a,b", b"a,b\n", b"a,b\r\n\r\n", b"\xef\xbb\xbfa,b\n"):
        with open_source(write(tmp_path, content), SCHEMA) as source:
            assert source.rows() == 0
            assert [(cells.size, counts.size) for cells, counts in source.counts([(), (0,), (0, 1)])] == [(0, 0)] * 3
    pq.write_table(pa.table({"a": pa.array([], pa.string()), "b": pa.array([], pa.int8())}), tmp_path / "d.parquet")
    with open_source(tmp_path / "d.parquet", SCHEMA) as source:
        assert source.rows() == 0


def test_an_empty_line_of_one_column_is_a_cell(tmp_path):
    assert encode(write(tmp_path, b'a\n1\n\n""\n2\n'), ONE).codes[:, 0].tolist() == [1, 9, 9, 2]


def test_rows_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 1 << 12)
    body = "".join(f'{1 + 2 * (i % 2)},"{i % 8}\n"\n' for i in range(5000))
    codes = encode(write(tmp_path, b"a,b\n" + body.encode()), SCHEMA).codes
    assert codes[:, 0].tolist() == [i % 2 for i in range(5000)]
    assert codes[:, 1].tolist() == [i % 8 for i in range(5000)]


def test_a_quoted_cell_that_looks_like_rows(tmp_path):
    inner = b"9,9\n" * 400_000
    content = b"a,b\n" + b'1,"' + inner + b'"\n3,4\n' * 1 + b'"' + inner[:-1] + b'",5\n'
    assert encode(write(tmp_path, content), SCHEMA).codes.tolist() == [[0, 9], [1, 4], [2, 5]]


BAD = {
    "empty": (b"", "empty"),
    "BOM alone": (b"\xef\xbb\xbf", "empty"),
    "blank header": (b"\na,b\n1,2\n", "first line"),
    "short row": (b"a,b\n1,2\n" + S + b"\n", "header (2)"),
    "long row": (b"a,b\n1,2," + S + b"\n", "header (2)"),
    "blank row": (b"a,b\n1,2\n  \n", "header (2)"),
    "long line": (b"a,b\n1," + S * 1_500_000 + b"\n", "MiB"),
    "unclosed quote": (b'a,b\n1,"' + S + b"\n3,4\n", "quote"),
    "unclosed header": (b'a,"b\n1,2\n' + S, "first line"),
    "bare quote": (b'a,b\n1,5" ' + S + b"\n", "quote"),
    "NUL": (b"a,b\n1," + S + b"\0\n", "NUL"),
    "NUL late": (b"a,b\n" + b"1,2\n" * 600_000 + S + b"\0,1\n", "NUL"),
    "Latin-1": (b"a,b\n1,caf\xe9 " + S + b"\n", "UTF-8"),
    "cut UTF-8": (b"a,b\n1," + S + b"\xe2\x82", "UTF-8"),
    "surrogates": (b"a,b\n1," + S + b"\xed\xa0\x80\n", "UTF-8"),
    "UTF-16": (("a,b\n1," + S.decode()).encode("utf-16"), "UTF-8"),
    "UTF-16 no BOM": (("a,b\n1," + S.decode()).encode("utf-16-le"), "NUL"),
    "UTF-32": (("a,b\n1," + S.decode()).encode("utf-32"), "UTF-8"),
    "semicolons": (b"a;b\n1;" + S + b"\n", "commas"),
    "tabs": (b"a\tb\n1\t" + S + b"\n", "commas"),
    "old Mac": (b"a,b\r1," + S + b"\r", "LF"),
    "duplicate": (b"a,b,b\n1,2," + S + b"\n", "once"),
    "missing": (b"a,c\n1," + S + b"\n", "'b'"),
    "case": (b"a,B\n1," + S + b"\n", "Did you mean 'B'"),
    "space": (b"a, b\n1," + S + b"\n", "Did you mean ' b'"),
    "truncated gzip": (gzip.compress(b"a,b\n" + os.urandom(99_999).hex().encode() + S)[:-5000], "gzip"),
    "damaged gzip": (gzip.compress(b"a,b\n1,2\n")[:-8] + b"\0" * 8, "gzip"),
    "gzip of nothing": (gzip.compress(b""), "empty"),
    "zip": (b"PK\x03\x04\x14\0\0\0" + S, "NUL"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_csv(tmp_path, name, refused):
    content, word = BAD[name]
    for file in ("data.csv", "data.txt"):
        refused(DataError, lambda f=file: open_source(write(tmp_path, content, f), SCHEMA), word)


def parquet(**columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


BAD_PARQUET = {
    "truncated": (parquet(a=["1"], b=[S.decode()])[:-20], "whole Parquet"),
    "footer of another": (b"PAR1" + os.urandom(400) + b"PAR1", "whole Parquet"),
    "magic alone": (b"PAR1", "whole Parquet"),
    "CSV by content": (b"a,b\n1," + S, "Parquet"),
    "empty": (b"", "Parquet"),
    "list": (parquet(a=["1"], b=[[S.decode()]]), "'b'"),
    "binary": (parquet(a=["1"], b=[S]), "binary"),
    "struct": (parquet(a=["1"], b=[{S.decode(): 1}]), "struct"),
    "duration": (parquet(a=["1"], b=pa.array([7341], pa.duration("s"))), "duration"),
    "date": (parquet(a=["1"], b=pa.array([7341], pa.date32())), "DATE"),
    "missing": (parquet(a=["1"], B=[7341]), "Did you mean 'B'"),
    "not UTF-8": (parquet(a=["1"], b=pa.array([S + b"\xff"], pa.binary()).view(pa.string())), "UTF-8"),
}


@pytest.mark.parametrize("name", BAD_PARQUET)
def test_bad_parquet(tmp_path, name, refused):
    content, word = BAD_PARQUET[name]
    refused(DataError, lambda: open_source(write(tmp_path, content, "data.parquet"), SCHEMA), word)


def test_damaged_pages(tmp_path, refused):
    content = bytearray(parquet(a=[f"{S.decode()} {i}" for i in range(5000)], b=list(range(5000))))
    content[100:3000] = os.urandom(2900)
    refused(DataError, lambda: open_source(write(tmp_path, bytes(content), "data.parquet"), SCHEMA), "damaged")


def test_duplicate_names_of_parquet(tmp_path, refused):
    pq.write_table(pa.table([["1"], ["2"], [S.decode()]], names=["a", "b", "b"]), tmp_path / "d.parquet")
    refused(DataError, lambda: open_source(tmp_path / "d.parquet", SCHEMA), "once")


def test_other_columns_are_not_even_read(tmp_path):
    content = parquet(a=["1"], z=[[1]], b=[4])
    with open_source(write(tmp_path, content, "no suffix"), SCHEMA) as source:
        assert source.ignored == ("z",)


@pytest.mark.parametrize("name", ["glob*[1]?.csv", "quote'.csv", "year=2020.csv", "été 🦆.csv", "-.csv", "%2e.csv"])
def test_file_names_are_taken_literally(tmp_path, name):
    (tmp_path / "global1x.csv").write_bytes(b"a,b\n1,9\n")
    assert encode(write(tmp_path, GOOD["plain"], name), SCHEMA).codes.tolist() == [[0, 2], [1, 4]]


def test_paths(tmp_path, refused):
    for path in (tmp_path / "absent.csv", tmp_path, tmp_path / "data.csv" / "more", "nul\0", "", os.devnull):
        refused(ParameterError, lambda p=path: open_source(p, SCHEMA), "data")
    for url in (
        "postgresql://user:Zanzibar-7341@host/db#t",
        "s3://Zanzibar-7341/x.csv",
        "https://host/Zanzibar-7341.csv",
    ):
        refused(ParameterError, lambda u=url: open_source(u, SCHEMA), "duckdb:///")


def test_permission(tmp_path, monkeypatch, refused):
    path = write(tmp_path, GOOD["plain"])
    path.chmod(0)
    if os.geteuid() == 0:  # who may read everything

        def forbidden(*_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(files.Path, "open", forbidden)
    refused(ResourceError, lambda: open_source(path, SCHEMA), "Permission denied")
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz", "data.parquet"])
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, refused, name):
    body = b"a,b\n" + b"1,2\n" * 100
    content = parquet(a=["1"] * 100, b=[2] * 100) if name.endswith("parquet") else body
    path = write(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name)
    match = files.match_columns

    def meanwhile(*arguments):
        with path.open("ab") as file:
            file.write(S)
        return match(*arguments)

    monkeypatch.setattr(files, "match_columns", meanwhile)
    refused(ResourceError, lambda: open_source(path, SCHEMA), "change")


def test_databases(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with duckdb.connect("d.db") as connection:
        connection.execute("CREATE TABLE people AS SELECT '1' AS a, 4 AS b, 'Zanzibar-7341' AS c")
        connection.execute("CREATE TABLE lists AS SELECT '1' AS a, ['Zanzibar-7341'::ENUM('Zanzibar-7341')] AS b")
        connection.execute(f"CREATE VIEW spy AS SELECT a, b FROM read_csv('{write(tmp_path, GOOD['plain'])}')")
        connection.execute("CREATE VIEW fails AS SELECT a, CAST(c AS INTEGER) AS b FROM people")
    with open_source("duckdb:///d.db#people", SCHEMA) as source:
        assert (source.rows(), source.ignored) == (1, ("c",))
    for url in ("duckdb:///d.db", "duckdb:///#people", "duckdb:///d.db#", "duckdb:///absent.db#people"):
        refused(ParameterError, lambda u=url: open_source(u, SCHEMA), "data")
    refused(ParameterError, lambda: open_source("duckdb:///d.db#People", SCHEMA), "Did you mean 'people'")
    refused(DataError, lambda: open_source("duckdb:///d.db#lists", SCHEMA), "'b'", "LIST")
    refused(DataError, lambda: open_source("duckdb:///d.db#spy", SCHEMA), "view")
    refused(DataError, lambda: open_source("duckdb:///d.db#fails", SCHEMA))
    refused(DataError, lambda: open_source("duckdb:///d.db#people", Schema((Codes(name="A", values=2),))), "'a'")
    write(tmp_path, GOOD["plain"], "text.db")
    refused(ResourceError, lambda: open_source("duckdb:///text.db#people", SCHEMA), "DuckDB")
    with duckdb.connect("d.db") as connection:
        connection.execute("INSERT INTO people VALUES ('1', 4, '')")
        refused(ResourceError, lambda: open_source("duckdb:///d.db#people", SCHEMA), "open")


def test_reading_only_suffices(tmp_path):
    path = tmp_path / "d.db"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE people AS SELECT '1' AS a, 4 AS b")
    before = path.read_bytes()
    path.chmod(0o400)
    with open_source(f"duckdb:///{path}#people", SCHEMA) as source:
        assert source.rows() == 1
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["d.db"]


def test_spreadsheet_of_pandas(tmp_path):
    frame = pd.DataFrame({"a": ["1", "3", None], "b": [2.0, None, 5]})
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_parquet(tmp_path / "d.parquet")
    for data in (frame, tmp_path / "d.csv", tmp_path / "d.parquet"):
        assert encode(data, SCHEMA).codes.tolist() == [[0, 2], [1, 9], [3, 5]]


def test_the_structure_of_a_file_is_read_without_its_values(tmp_path):
    """Names and stored types, no more: the rows below the header are not even well formed."""
    (tmp_path / "a.csv").write_text('age,sex\n"secret\n1,2,3,4\n')
    assert structure(tmp_path / "a.csv") == {"age": None, "sex": None}
    (tmp_path / "b.csv").write_text("age,sex,age\n1,2,3\n")
    with pytest.raises(DataError, match="once"):
        structure(tmp_path / "b.csv")
