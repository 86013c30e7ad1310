"""Times of several ways to do the same thing. They alternate, in reverse order every second round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Way = Callable[[], object]


def race(ways: Mapping[str, Way], rounds: int, *, warm_up: int) -> dict[str, float]:
    """Return the median time of each way in seconds over ``rounds`` rounds, after ``warm_up`` others."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + rounds):
        for name in sorted(ways, reverse=turn % 2 == 1):
            seconds = timed(ways[name])
            if turn >= warm_up:
                taken[name].append(seconds)
    return {name: median(seconds) for name, seconds in taken.items()}


def timed(way: Way) -> float:
    """Return the seconds that ``way`` takes, until the device is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begun = time.perf_counter()
    way()
    wait()
    return time.perf_counter() - begun
