"""Ranks that are late: whether they compute, on cores that others use, or hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, final

LOOK_S: Final = 2.0
"""Seconds between two looks at the clocks of ranks that are late. On a busy machine, a rank computes in parts of it."""
_TICKS: Final = slice(11, 13)
"""Fields of ``/proc/PID/task/TID/stat`` behind the name: clock ticks in user and in system mode."""


@final
class Lateness:
    """Decides, after a time limit, whether ranks that are late are waited for.

    A rank that computes is late because others use its cores: it is waited for until it has computed for ``limit_s``
    since the first look. One that does not compute hangs. ``clock`` returns a number that grows while a rank computes,
    in seconds of a processor.
    """

    def __init__(self, limit_s: float, clock: Callable[[int], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def any_computes(self, ranks: Iterable[int]) -> bool:
        """Whether one of the ranks has computed since the last look, and not for too long. True at the first look."""
        computing = []
        for rank in ranks:
            now = self._clock(rank)
            first = self._first.setdefault(rank, now)
            advances = now > self._last.get(rank, -1.0)
            self._last[rank] = now
            computing.append(advances and now - first < self._limit_s)
        return any(computing)


def main_thread_s(pid: int) -> float:
    """Seconds of a processor that a process's main thread has used; 0 where the system does not tell them.

    Those of other threads are left out: gloo's wake up while a rank waits.
    """
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[_TICKS])) / os.sysconf("SC_CLK_TCK")
