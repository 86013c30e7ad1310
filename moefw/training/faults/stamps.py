"""Progress, stamped by the main thread: a call of about a microsecond wherever a run gets on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from moefw.training.faults.record import write_stamp


@final
class Stamps:
    """The stamps of one rank, written into its record; ``store``: where it has met the others, if anywhere.

    ``wake`` is called when it has.
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
"""Those of this thread: a new thread has none, so that nothing but the main thread counts as progress."""


def stamp(phase: str, *, step: int | None = None, slow: bool = False) -> None:
    """Say that the run has got as far as ``phase``, which begins. ``step`` (from 1) holds until it is given again.

    ``slow``: the phase imports libraries, and is given the time that takes at worst.
    Nothing happens outside of :func:`stamping`, and in other threads than the one that called it.
    """
    stamps = _CURRENT.get()
    if stamps is not None:
        stamps.put(phase, step, slow=slow)


def met(store: Any) -> None:
    """Say that the ranks share a store: there they tell each other how they get on, unless a launcher watches them."""
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
