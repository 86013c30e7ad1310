"""Times of several ways to do the same thing. They alternate, in reverse order every second round."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from moefw.training.host_pages import KEEP_PAGES

Way = Callable[[], object]


def racing(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark whose ways race: its rounds, and ``--dry``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--dry", action="store_true", help="small shapes on a CPU")
    return parser


def device_to_measure(*, dry: bool) -> torch.device:
    """Return the GPU, or in a dry run the CPU. Exits with 2 where there is no GPU."""
    if not dry and not torch.cuda.is_available():
        print("torch sees no GPU. Run it where there is one, with a CUDA build of torch, or --dry.", file=sys.stderr)
        sys.exit(2)
    return torch.device("cpu" if dry else "cuda")


def as_a_rank_on_a_cpu() -> None:
    """Start this program again with the settings of the C library that ``moefw train`` gives to ranks on a CPU."""
    if not KEEP_PAGES.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**KEEP_PAGES, **os.environ})


def race(
    ways: Mapping[str, Way], rounds: int, *, warm_up: int, before_round: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median time of each way in seconds over ``rounds`` rounds, after ``warm_up`` others.

    On a GPU, the ways of a round are queued one behind the other, as in training: what the host does while the GPU is
    busy costs nothing, and a wait of the host does.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_up + rounds):
        before_round()
        readings = [(name, timed(ways[name])) for name in sorted(ways, reverse=turn % 2 == 1)]
        for name, seconds in readings:
            taken[name].append(seconds())
    return {name: median(each[warm_up:]) for name, each in taken.items()}


def timed(way: Way) -> Callable[[], float]:
    """Run ``way`` and return a function for its seconds, which waits for the GPU if there is one."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        way()
        seconds = time.perf_counter() - begun
        return lambda: seconds
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    way()
    stop.record()

    def read() -> float:
        stop.synchronize()
        return 1e-3 * float(start.elapsed_time(stop))

    return read
