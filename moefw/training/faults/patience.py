"""How long is waited for what, and how long ranks have not got on; ``timeout_s`` is the spec's ``run.timeout_s``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, final

START_S: Final = 300.0
"""What imports libraries has at least so long, from the start of a process on: from a shared disk that is slow."""
LOOK_S: Final = 1.0
"""A rank looks at itself and at others at least so often."""


def limit_s(timeout_s: float, *, slow: bool) -> float:
    """Return how long a rank may go without progress, in a phase that is known to be ``slow`` or in another one."""
    return max(timeout_s, START_S) if slow else timeout_s


def look_every_s(timeout_s: float) -> float:
    """Return how often a rank looks at where its main thread is."""
    return min(LOOK_S, timeout_s / 4)


def collective_timeout_s(timeout_s: float) -> float:
    """Return a time-out for collectives, which name nobody: the watch has spoken long before."""
    return 2 * max(timeout_s, START_S) + 60.0


@final
class Stillness:
    """Counts from the last change that was seen.

    A watcher that was itself stopped (Ctrl-Z, a suspended laptop) counts no more than two looks of that time: nobody
    else may have run either.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s, self._awake_s = now(), 0.0
        self._changed: dict[int, tuple[int, float]] = {}

    def of(self, counts: Mapping[int, int]) -> dict[int, float]:
        """Return the seconds since each rank's count was another, as far as has been seen."""
        now_s = self._now()
        self._awake_s += min(now_s - self._last_s, 2 * LOOK_S)
        self._last_s = now_s
        for rank, count in counts.items():
            if rank not in self._changed or self._changed[rank][0] != count:
                self._changed[rank] = (count, self._awake_s)
        return {rank: self._awake_s - self._changed[rank][1] for rank in counts}
