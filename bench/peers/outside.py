"""Commands measured from outside: seconds, processor time and memory of a whole process tree, within limits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 1 << 20
PAUSE = 0.2
"""Seconds between two looks at a running command."""


@dataclass(frozen=True)
class Limits:
    """What a command may take before it is stopped."""

    seconds: float = 900.0
    megabytes: float = 14_000.0


@dataclass(frozen=True)
class Outcome:
    """How a command fared."""

    seconds: float
    cpu_seconds: float
    """Processor time: on a busy machine it says more than seconds do."""
    peak_mb: float
    error: str = ""
    """One line; empty where the command ended well."""


def execute(command: Sequence[str], *, log: Path, limits: Limits, folder: Path | None = None) -> Outcome:
    """Returns how a command fared; what it prints is added to `log`.

    Memory is the resident memory of all its processes together, looked at many times a second, or the high-water mark
    of one of them if that is more. (The mark that `wait4` gives is not used: a process inherits that of its parent.)
    """
    start, peak = time.perf_counter(), 0.0
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True
        )
    error = ""
    try:
        while True:
            peak = max(peak, *memory(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if not error:
                error = excess(time.perf_counter() - start, peak, limits)
                if error:
                    end(process.pid)
            time.sleep(PAUSE)
    except BaseException:  # we are interrupted: so is what we started
        end(process.pid)
        process.wait()
        raise
    seconds = time.perf_counter() - start
    end(process.pid)  # what it may have left running
    process.returncode = os.waitstatus_to_exitcode(status)
    if not error and process.returncode:
        error = f"{ending(process.returncode)}: {last_lines(log, 1)}"
    return Outcome(seconds, usage.ru_utime + usage.ru_stime, peak, error)


def excess(seconds: float, megabytes: float, limits: Limits) -> str:
    """Returns which limit is exceeded, or nothing."""
    if seconds > limits.seconds:
        return f"stopped after {limits.seconds:.0f} s"
    if megabytes > limits.megabytes:
        return f"stopped above {limits.megabytes:.0f} MB"
    return ""


def end(session: int) -> None:
    """Ends every process of a session that `execute` started."""
    for pid in members(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def members(session: int) -> list[int]:
    """Returns the processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def memory(session: int) -> tuple[float, float]:
    """Returns the megabytes that the processes of a session hold together, and the most that one of them ever held."""
    resident, highest = 0.0, 0.0
    for pid in members(session):
        try:
            text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith("VmRSS:"):
                resident += int(line.split()[1]) * 1024 / MEGABYTE
            elif line.startswith("VmHWM:"):
                highest = max(highest, int(line.split()[1]) * 1024 / MEGABYTE)
    return resident, highest


def ending(code: int) -> str:
    """Returns how a command ended that did not end well."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def last_lines(log: Path, number: int) -> str:
    """Returns the last lines of a file that are not empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line.rstrip() for line in lines if line.strip()][-number:])
