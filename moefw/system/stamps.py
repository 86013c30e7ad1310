"""Progress stamps of the main thread: a call of about a microsecond at each point of progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Stamps(Protocol):
    """What counts the stamps of a thread."""

    def put(self, phase: str, step: int | None, *, slow: bool) -> None:
        """Count a stamp."""


_CURRENT: ContextVar[Stamps | None] = ContextVar("stamps", default=None)
"""The stamps of this thread. A new thread has none, so that only the main thread counts as progress."""


def stamp(phase: str, *, step: int | None = None, slow: bool = False) -> None:
    """Record that ``phase`` begins. ``step`` (from 1) is kept until it is given again.

    ``slow``: the phase imports libraries, and gets a limit that is long enough for this.
    Does nothing outside of :func:`stamping`, and in other threads than the one that called it.
    """
    stamps = _CURRENT.get()
    if stamps is not None:
        stamps.put(phase, step, slow=slow)


def current_stamps() -> Stamps | None:
    """Stamps of this thread; None outside of :func:`stamping`."""
    return _CURRENT.get()


@contextmanager
def stamping(stamps: Stamps) -> Iterator[None]:
    """Let :func:`stamp` in this thread write to ``stamps``."""
    token = _CURRENT.set(stamps)
    try:
        yield
    finally:
        _CURRENT.reset(token)
