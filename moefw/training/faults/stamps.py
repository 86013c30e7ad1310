"""The stamps of a rank, in the record of its progress that its watch reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from moefw.system.stamps import current_stamps
from moefw.training.faults.record import write_stamp


@final
class RankStamps:
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


def met(store: Any) -> None:
    """Set the store through which ranks exchange their progress, unless a launcher watches them."""
    stamps = current_stamps()
    if isinstance(stamps, RankStamps):
        stamps.store = store
        stamps.wake()
