"""The load of experts over a run, as a picture has room for it: few windows of steps, one byte an expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from moefw.training.records.expert_load import Window, merged

Floats = np.ndarray[Any, np.dtype[np.float64]]

MOST_BYTES: Final = 800_000
"""Bytes of all loads of a page; in base64 they are a third more."""
MOST_WINDOWS: Final = 64
FINE: Final = 200
"""The level of a share of 2: up to there levels are 0.01 apart. The 55 above grow by a factor, up to the largest."""


def num_windows(cells: int, *, runs: int) -> int:
    """Number of windows for each of ``runs`` runs of this many ``cells``, layers times experts."""
    return max(min(MOST_BYTES // max(cells * runs, 1), MOST_WINDOWS), 2)


def at_most(windows: Iterable[Window], most: int) -> list[Window]:
    """Windows of a stream, of which neighbours are merged so that never more than ``most`` are held."""
    kept: list[Window] = []
    most_steps = 1
    for window in windows:
        kept.append(window)
        while len(kept) > most:
            kept = list(merged(iter(kept), most_steps))
            if len(kept) > most:
                most_steps *= 2
    return kept


def levels(largest: float) -> Floats:
    """Share of tokens of each of the 256 levels, ascending."""
    fine = np.arange(FINE + 1) / 100
    coarse = 2.0 * (max(largest, 2.01) / 2.0) ** (np.arange(1, 256 - FINE) / (255 - FINE))
    return np.concatenate([fine, coarse])


def as_levels(share: Floats, levels: Floats) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Nearest level of each share. Only a share of 0, an expert without a token, has level 0."""
    between = (levels[1:] + levels[:-1]) / 2
    nearest = np.searchsorted(between, share)
    return np.where(share > 0, np.maximum(nearest, 1), 0).astype(np.uint8)
