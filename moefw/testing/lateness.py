"""Ranks that are late: whether they compute, on cores that others use, or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, final

LOOK_S: Final = 2.0
"""Seconds between two looks at the clocks of ranks that are late. On a busy machine, a rank computes in parts of it."""
LEAST_SHARE: Final = 0.1
"""The share of a processor that a rank gets on a busy machine, at least. One that has less of it over a long time
sleeps between two looks at something that does not come."""
_TICKS: Final = slice(11, 13)
"""Fields of ``/proc/PID/task/TID/stat`` behind the name: clock ticks in user and in system mode."""


@final
class Lateness:
    """Decides, after a time limit, whether ranks that are late are waited for.

    A rank that computes is late because others use its cores: it is waited for until it has computed for ``limit_s``
    since the first look, which takes ``limit_s / LEAST_SHARE`` at most. One that does not compute hangs. ``clock``
    returns a number that grows while a rank computes, in seconds of a processor; ``now_s`` one that always grows.
    """

    def __init__(
        self, limit_s: float, clock: Callable[[int], float], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._now_s = now_s
        self._longest_s = limit_s / LEAST_SHARE
        self._began_s: float | None = None
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def any_computes(self, ranks: Iterable[int]) -> bool:
        """Whether one of the ranks has computed since the last look, and not for too long. True at the first look."""
        if self._began_s is None:
            self._began_s = self._now_s()
        computing = []
        for rank in ranks:
            computed_s = self._clock(rank)
            first_s = self._first.setdefault(rank, computed_s)
            advances = computed_s > self._last.get(rank, -1.0)
            self._last[rank] = computed_s
            computing.append(advances and computed_s - first_s < self._limit_s)
        return any(computing) and self._now_s() - self._began_s < self._longest_s


def main_thread_s(pid: int) -> float:
    """Seconds of a processor that a process's main thread has used; 0 where the system does not tell them.

    Those of other threads are left out: gloo's wake up while a rank waits.
    """
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[_TICKS])) / os.sysconf("SC_CLK_TCK")
