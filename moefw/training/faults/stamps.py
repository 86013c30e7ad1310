"""Progress stamps of the main thread: a call of about a microsecond at each point of progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from moefw.training.faults.record import write_stamp


@final
class Stamps:
    """The stamps of one rank, written into its record. ``store``: the store that it shares with the others, if any.

    ``wake`` is called when the store is set.
    """

    def __init__(self, buffer: memoryview, *, wake: Callable[[], None]) -> None:
        self.store: Any = None
        self.wake = wake
        self._buffer = buffer
        self._count = self._step = 0

    def put(self, phase: str, step: int | None, *, slow: bool) -> None:
        """Count a stamp."""
        self._count += 1
        if step is not None:
            self._step = step
        write_stamp(self._buffer, self._count, self._step, phase, slow=slow)


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


def met(store: Any) -> None:
    """Set the store through which ranks exchange their progress, unless a launcher watches them."""
    stamps = _CURRENT.get()
    if stamps is not None:
        stamps.store = store
        stamps.wake()


@contextmanager
def stamping(stamps: Stamps) -> Iterator[None]:
    """Let :func:`stamp` in this thread write to ``stamps``."""
    token = _CURRENT.set(stamps)
    try:
        yield
    finally:
        _CURRENT.reset(token)
