"""How long is waited for what; ``timeout_s`` is the spec's ``run.timeout_s``."""

from __future__ import annotations

from typing import Final

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
