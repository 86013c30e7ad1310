"""Seeds of the sequences of a run, from which the random draws for their tokens start."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def sequence_seeds(run_seed: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Seed for each sequence by its number in the whole run; only equal numbers give equal seeds.

    A seed is the value of the SplitMix64 stream of ``run_seed`` at that number: a pure function, equal on all ranks.
    """
    start = _mix(np.array([run_seed % (1 << 64)], dtype=np.uint64))
    return _mix(start + (numbers.astype(np.uint64) + np.uint64(1)) * _GAMMA).view(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bijective hash of 64 bits (SplitMix64's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
