"""How long ranks have not got on, in time during which somebody was there to see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

from moefw.training.faults.limits import LOOK_S


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
