"""The comparison: its table, its file, and which runs it makes. No mechanism and no peer is run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench.peers import harness, results
from bench.peers.outside import Limits
from bench.peers.results import Result

from anamorph.mechanisms.mechanism import NAMES
from anamorph.queries.spec import workload as parse_workload
from anamorph.schema import Schema
from anamorph.table import Table
from bench import compare, tables

SCHEMA = Schema.from_dict(
    {"dataset": "toy", "columns": {name: {"type": "codes", "values": 3, "source": "public"} for name in "abc"}}
)
TRUTH = tables.Rows(Table(np.array([[0, 1, 2], [1, 1, 0], [2, 0, 0]], np.int32), SCHEMA.sizes), SCHEMA)
COMPARISON = compare.Comparison("toy", "marginals:k=2", 1.0)


def result(name="rap", **values) -> Result:
    return Result(name=name, neighbours="add-remove", seed=0, **values)


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("marginals:k=3,count=64,seed=0", "compare-adult-marginals-k-3-count-64-seed-0-0.1"),
        ("marginals:k=2; thresholds:k=4,r=2", "compare-adult-marginals-k-2-thresholds-k-4-r-2-0.1"),
        ("../../etc/queries.yaml", "compare-adult-..-..-etc-queries.yaml-0.1"),
    ],
)
def test_file_names_hold_no_separators(workload, name):
    assert results.file_name("adult", workload, 0.1) == name


def test_results_survive_a_file(tmp_path):
    path = tmp_path / "deep" / "table.csv"
    found = [
        result(settings='{"model_size": "5"}', rows_max=0.0123456, rows_tv=0.5, seconds=1.5, remark="a, b"),
        result("dpmm/aim", error="stopped after 900 s"),
    ]
    assert results.read(path) == []
    results.write(path, found)
    assert results.read(path) == [replace(found[0], rows_max=0.012346), found[1]]


def test_a_table_is_in_the_order_of_distance_with_failures_last():
    found = [
        result("b/x", error="out of memory"),
        result("far", model_tv=15.0),
        result("near", rows_tv=0.1, rows_mean=1e-6),
    ]
    lines = results.table(found).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "near", "far", "b/x"]
    assert lines[1].split()[-4:] == ["0.1000", "-", "-", "-"]
    assert lines[3].endswith("NO RESULT: out of memory")


def test_a_result_replaces_the_one_of_the_same_name():
    first = result(rows_tv=0.2)
    again, other = result(rows_tv=0.1, settings='{"rounds": "1"}'), result("mst")
    assert results.with_result([first], again) == [again]
    assert results.with_result([first], other) == [first, other]


def test_a_run_is_the_same_with_the_same_settings_and_seed():
    first, again = result(rows_tv=0.2), result(rows_tv=0.1)
    assert first.same_run(again)
    assert not first.same_run(replace(again, seed=1))
    assert not first.same_run(replace(again, settings='{"rounds": "1"}'))


def test_workloads_are_given_to_peers_as_columns():
    spec = "marginals:k=2; thresholds:k=3,r=2"
    assert compare.column_sets(parse_workload(spec, SCHEMA)) == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_codes_are_read_by_the_names_of_their_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("b,a\n1,0\n2,1.0\n")
    assert compare.read_codes(path, ("a", "b"), (2, 3)).codes.tolist() == [[0, 1], [1, 2]]
    with pytest.raises(ValueError, match="must have the codes of the schema"):
        compare.read_codes(path, ("a", "b"), (2, 2))


def test_every_mechanism_and_every_method_is_a_line():
    found = list(compare.entries(COMPARISON))
    assert {entry.mechanism for entry in found if not entry.peer} == set(NAMES)
    assert sum(entry.peer is not None for entry in found) == sum(len(peer.methods) for peer in harness.PEERS)
    assert len({entry.result.name for entry in found}) == len(found)
    assert set(compare.VARIANTS) - set(NAMES) <= {"hdmm", "gem"}


def test_lines_are_chosen_by_mechanism_peer_or_whole_name():
    found = list(compare.entries(COMPARISON))

    def names(*only):
        return [entry.result.name for entry in found if compare.chosen(entry, only)]

    assert names() == [entry.result.name for entry in found]
    assert names("rap") == ["rap", "rap:blocks"]
    assert names("rap:blocks", "dpmm/mst") == ["rap:blocks", "dpmm/mst"]
    assert names("opendp") == ["opendp/aim", "opendp/mst"]


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Comparisons of fakes: the names of all that ran."""
    ran: list[str] = []

    def run(entry, bench):
        ran.append(entry.result.name)
        return replace(entry.result, rows_max=0.1, rows_tv=0.2, seconds=1.0)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "load", lambda _name: TRUTH)
    return ran


def test_what_is_in_the_file_is_not_run_again(runs, tmp_path):
    compare.compare(COMPARISON, only=["mst"])
    compare.compare(COMPARISON, only=["mst", "independent"])
    assert sorted(runs) == ["independent", "mst"]
    found = compare.compare(COMPARISON, only=["mst"], fresh=True)
    assert runs.count("mst") == 2
    assert {item.name for item in found} == {"mst", "independent"}
    assert (tmp_path / "compare-toy-marginals-k-2-1.svg").read_text().startswith("<svg")


def test_a_run_that_was_stopped_is_run_again_with_a_higher_limit():
    stopped, failed = result(error="stopped after 900 s"), result("mst", error="exit code 1: no")
    for limit, again in ((900, False), (600, False), (1800, True)):
        assert compare.known(stopped, [stopped, failed], Limits(seconds=limit)) is not again
        assert compare.known(failed, [stopped, failed], Limits(seconds=limit))
    assert not compare.known(result("aim"), [stopped, failed], Limits())


def test_a_peer_that_is_not_installed_is_a_line_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "state", lambda peer: harness.Installed(peer.name, "-", "failed: no wheel"))
    monkeypatch.setattr(tables, "load", lambda _name: TRUTH)
    bench = compare.Bench(COMPARISON, tmp_path)
    entry = next(entry for entry in compare.entries(COMPARISON) if entry.peer)
    assert compare.run(entry, bench).error == "failed: no wheel"


def test_peers_get_codes_sizes_and_columns(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "load", lambda _name: TRUTH)
    bench = compare.Bench(COMPARISON, tmp_path)
    job = bench.job()
    assert job.data.read_text().splitlines() == ["a,b,c", "0,1,2", "1,1,0", "2,0,0"]
    assert job.schema.read_text() == '{"a": 3, "b": 3, "c": 3}'
    assert job.workload.read_text() == '[["a", "b"], ["a", "c"], ["b", "c"]]'
    assert job.delta == 1 / 9
    assert bench.score(job.data) == {"rows_max": 0.0, "rows_mean": 0.0, "rows_tv": 0.0}
