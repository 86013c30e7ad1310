"""The sizes of blocks, and which of them fits where rows are cut. Imports no torch: ``check`` asks, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SMALLEST_BLOCK: Final = 16
LARGEST_BLOCK: Final = 4096


def fix_of_cuts(places: Sequence[int]) -> str:
    """What to do where rows are cut at these places, which are no ends of blocks."""
    block = LARGEST_BLOCK
    while any(place % block for place in places):
        block //= 2
    if block >= SMALLEST_BLOCK:
        return f"Use block: {block}, or split columns over fewer ranks."
    return "Split columns over fewer ranks, or use optimizer-bf16, which has no blocks."
