"""Along which dimension ranks that share a parameter cut it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def even_dim(shape: Sequence[int], count: int) -> int:
    """First dimension that ``count`` divides, so that all shards are equal; 0 if there is none."""
    return next((dim for dim, size in enumerate(shape) if size % count == 0), 0)
