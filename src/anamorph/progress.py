"""Progress: long public work says how far it is; whoever shows it listens.

Only the public side reports, and only public quantities: which stage, how many steps of how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def report(stage: str, done: int, total: int) -> None:
    """Tells the listener, if any, that `done` of `total` units of a stage are done."""
    listener = _listener.get()
    if listener is not None:
        listener(stage, min(done, total), total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Sends reports to a listener for the length of the context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
