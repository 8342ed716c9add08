"""What the command line shows: progress, remarks, faults as exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anamorph.errors import AnamorphError

STAGES = {
    "read": "reading the data",
    "measure": "measuring",
    "round": "rounds",
    "try": "trying how much to tell",
    "project": "projecting",
    "again": "projecting with more rows",
    "sample": "drawing rows",
    "answer": "answering",
    "compare": "comparing",
    "learn": "training models",
}
"""What people read for each stage that is reported."""


def say(message: str) -> None:
    """Prints a remark for people, away from figures that programs read."""
    print(printable(message), file=sys.stderr)


def tell(message: str) -> None:
    """Prints a line of the result."""
    print(printable(message))


def printable(message: str) -> str:
    """Returns a message on one line, without control characters: names may hold them."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in message)


@contextmanager
def progress_bars() -> Iterator[None]:
    """Shows a bar for each stage of long work, on a terminal; one line a stage elsewhere."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    from anamorph import progress  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_terminal:
        started: set[int] = set()

        def once(stage: str, done: int, total: int) -> None:
            if stage == "round" and done < total and done not in started:
                started.add(done)
                say(f"round {done + 1} of {total}")

        with progress.listening(once):
            yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        with progress.listening(show):
            yield


def guarded(command: Callable[[], object], *, debug: bool) -> int:
    """Runs a command; returns its exit code, after saying in one message what went wrong."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        result = command()
        sys.stdout.flush()  # here, where a failure still has a code and a message
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        forget_output()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            say("--debug: what follows may hold private values; do not share it")
            traceback.print_exc()
        code, message = verdict(error)
        say(message)
        if isinstance(error, OSError):
            forget_output()
        return code


def forget_output() -> None:
    """Drops what cannot be written, so that the end of the program does not try again."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def verdict(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the message of an exception.

    One that is not ours says no more than its type: its text could hold a private value.
    """
    resumable = "a run that was charged can go on with --resume"
    if isinstance(error, AnamorphError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, f"interrupted; {resumable}"
    if isinstance(error, MemoryError):
        return 5, f"error: memory is exhausted; {resumable}"
    if isinstance(error, OSError):
        return 5, f"error: the system refused: {error.strerror or type(error).__name__}; {resumable}"
    return 1, f"error: internal fault ({type(error).__name__}); --debug shows where. Please report it."


def terminate(number: int, _frame: object) -> None:
    """Ends the program as a terminated one."""
    say("terminated; a run that was charged can go on with --resume")
    sys.exit(128 + number)
