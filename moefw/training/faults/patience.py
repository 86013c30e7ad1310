"""Time limits, and the time that ranks go without progress; ``timeout_s`` is the spec's ``run.timeout_s``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, final

START_S: Final = 300.0
"""Least limit of phases that import libraries, from the start of a process on: a shared disk may be slow."""
LOOK_S: Final = 1.0
"""Longest interval between two checks of a rank on itself and on others."""


def limit_s(timeout_s: float, *, slow: bool) -> float:
    """Seconds that a rank may go without progress; ``slow``: in a phase that is known to be slow."""
    return max(timeout_s, START_S) if slow else timeout_s


def look_every_s(timeout_s: float) -> float:
    """Seconds between two checks of a rank on its main thread."""
    return min(LOOK_S, timeout_s / 4)


def collective_timeout_s(timeout_s: float) -> float:
    """Time-out of collectives. It names no rank, so the watch reports long before it."""
    return 2 * max(timeout_s, START_S) + 60.0


@final
class Stillness:
    """Measures the time since the last change of each rank's count.

    If the watcher itself was stopped (Ctrl-Z, a suspended laptop), at most ``2 * LOOK_S`` of that time count, as the
    other ranks may not have run either.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s = now()
        self._awake_s = 0.0
        self._changed: dict[int, tuple[int, float]] = {}

    def of(self, counts: Mapping[int, int]) -> dict[int, float]:
        """Seconds since each rank's count was last seen to change."""
        now_s = self._now()
        self._awake_s += min(now_s - self._last_s, 2 * LOOK_S)
        self._last_s = now_s
        for rank, count in counts.items():
            if rank not in self._changed or self._changed[rank][0] != count:
                self._changed[rank] = (count, self._awake_s)
        return {rank: self._awake_s - self._changed[rank][1] for rank in counts}
