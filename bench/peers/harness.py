"""The peers: what each one is, making their environments, and running them from outside.

`python -m bench.peers.harness` makes every environment that is not ready, under `.peers/NAME/`, and prints what became
of each. An install that fails leaves the end of its output in `.peers/NAME/error.txt` and is tried again next time.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.outside import Limits, Outcome, execute, last_lines

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".peers"
DRIVERS = Path(__file__).resolve().parent
INSTALL_SECONDS = 3600
ERROR_LINES = 15


@dataclass(frozen=True)
class Method:
    """One mechanism of a peer."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments, by the peer's own names; those not named are its defaults."""
    remark: str = ""
    """What it assumes or takes from the data beyond the promise."""


@dataclass(frozen=True)
class Peer:
    """A package, and how it is installed and driven."""

    name: str
    requirements: tuple[str, ...]
    package: str
    """The distribution whose version is reported."""
    module: str
    """What must import for the environment to be ready."""
    driver: str
    methods: tuple[Method, ...]
    remark: str = ""
    """Holds for all of its methods."""


PEERS = (
    Peer(
        "smartnoise",
        ("torch==2.13.0", "smartnoise-synth==1.0.8", "packaging"),  # it imports packaging and does not ask for it
        "smartnoise-synth",
        "snsynth",
        "drive_smartnoise.py",
        (
            Method("mst", remark="exact number of rows unpaid; rows tied together by mbi 1.1"),
            Method("aim", {"max_model_size": 5}, "told the workload; rows tied together by mbi 1.1"),
            Method("mwem", {"split_factor": 2, "iterations": 5}, "pure epsilon; pairs of columns taken as independent"),
            Method("dpctgan", {"cuda": False, "verbose": False}, "exact category frequencies unpaid"),
            Method(
                "patectgan",
                {"cuda": False, "verbose": False},
                "exact category frequencies unpaid; one discriminator is all teachers and the student",
            ),
        ),
    ),
    Peer(
        "synthcity",
        ("synthcity==0.2.12", "opacus<1.5"),  # newer ones need a newer torch than synthcity admits
        "synthcity",
        "synthcity.plugins.privacy.plugin_aim",
        "drive_synthcity.py",
        (
            Method(
                "aim",
                {"max_model_size": 5},
                "told the workload; categories from the data; the fit stays near uniform",
            ),
        ),
    ),
    Peer(
        "dpmm",
        ("dpmm==0.1.9",),
        "dpmm",
        "dpmm.pipelines",
        "drive_dpmm.py",
        (
            Method("aim", {"max_model_size": 5}, "told the workload"),
            Method("mst"),
            Method("privbayes", remark="sensitivity from the number of rows; that of plain mutual information"),
        ),
    ),
    Peer(
        "opendp",
        ("opendp[mbi]==0.16.0", "pandas<3"),  # rows come as a frame, and its extra does not ask for pandas
        "opendp",
        "opendp.extras.mbi",
        "drive_opendp.py",
        (
            Method("aim", {"max_size": 5.0, "rows": "sample"}, "told the workload"),
            Method("mst", {"rows": "sample"}),
        ),
    ),
)


@dataclass(frozen=True)
class Installed:
    """What became of an environment."""

    peer: str
    version: str
    status: str
    """Ready, or the last line of the error."""

    @property
    def ready(self) -> bool:
        """Returns whether the peer can be run."""
        return self.status == "ready"


def python_of(peer: Peer, environments: Path = ENVIRONMENTS) -> Path:
    """Returns the interpreter of a peer's environment."""
    return environments / peer.name / "bin" / "python"


def state(peer: Peer, environments: Path = ENVIRONMENTS) -> Installed:
    """Returns whether an environment is there for just these requirements, without making it."""
    home = environments / peer.name
    mark, error = home / "ready.json", home / "error.txt"
    if mark.exists():
        found = json.loads(mark.read_text(encoding="utf-8"))
        if found["requirements"] == list(peer.requirements):
            return Installed(peer.name, found["version"], "ready")
    if error.exists():
        return Installed(peer.name, "-", f"failed: {last_lines(error, 1)}")
    return Installed(peer.name, "-", "not made: make peers")


def install(peer: Peer, environments: Path = ENVIRONMENTS) -> Installed:
    """Returns what became of a peer's environment, making it if it is not ready."""
    if (found := state(peer, environments)).ready:
        return found
    home, python = environments / peer.name, python_of(peer, environments)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log = home / "install.log"
    version = f"import importlib.metadata as m; import {peer.module}; print(m.version({peer.package!r}))"
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")
    commands = (
        (sys.executable, "-m", "venv", str(home)),
        (*pip, *peer.requirements),
        (str(python), "-c", version),
    )
    for command in commands:
        outcome = execute(command, log=log, limits=Limits(seconds=INSTALL_SECONDS))
        if outcome.error:
            (home / "error.txt").write_text(f"{last_lines(log, ERROR_LINES)}\n{outcome.error}\n", encoding="utf-8")
            return state(peer, environments)
    found = {"requirements": list(peer.requirements), "version": last_lines(log, 1)}
    (home / "ready.json").write_text(json.dumps(found), encoding="utf-8")
    return state(peer, environments)


@dataclass(frozen=True)
class Job:
    """Files and parameters that every peer is given alike."""

    data: Path
    schema: Path
    workload: Path
    epsilon: float
    delta: float
    seed: int = 0


def run(peer: Peer, method: Method, job: Job, output: Path, *, limits: Limits, python: Path | None = None) -> Outcome:
    """Returns how a method of a peer fared; its rows are in `output` where there is no error."""
    options = {
        "data": job.data,
        "schema": job.schema,
        "workload": job.workload,
        "epsilon": job.epsilon,
        "delta": job.delta,
        "seed": job.seed,
        "output": output,
        "method": method.name,
        "settings": json.dumps(dict(method.settings)),
    }
    command = [str(python or python_of(peer)), str(DRIVERS / peer.driver)]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    outcome = execute(command, log=output.with_suffix(".log"), limits=limits, folder=output.parent)
    if not outcome.error and not output.exists():
        return Outcome(outcome.seconds, outcome.cpu_seconds, outcome.peak_mb, "the driver wrote no rows")
    return outcome


def table(found: Sequence[Installed]) -> str:
    """Returns name, version and status of each peer, aligned."""
    lines = [("peer", "version", "status"), *((item.peer, item.version, item.status) for item in found)]
    widths = [max(len(line[place]) for line in lines) for place in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {version:{widths[1]}}  {status}" for name, version, status in lines)


def main() -> None:
    """Makes every environment and prints what became of each."""
    found = []
    for peer in PEERS:
        print(f"{peer.name}: {', '.join(peer.requirements)}", flush=True)
        found.append(install(peer))
    print(table(found))


if __name__ == "__main__":
    main()
