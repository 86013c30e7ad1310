"""Tiles of the products: those to choose from, and those that are used without a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple


class Tile(NamedTuple):
    """Columns of an output tile of ``ROWS`` rows, summed values an iteration, warps and load stages."""

    columns: int
    depth: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """A tile for each product of a forward and a backward."""

    gated: Tile
    down: Tile
    gated_backward: Tile
    dgrad: Tile


_OF_A_PRODUCT: Final = (
    Tile(128, 64, warps=8, stages=4),
    Tile(128, 64, warps=8, stages=3),
    Tile(128, 64, warps=4, stages=4),
    Tile(128, 128, warps=8, stages=3),
    Tile(256, 64, warps=8, stages=3),
    Tile(64, 64, warps=4, stages=4),
)
# 128 columns of gate and 128 of up, or 64 of each with four warps, would spill registers. So would four load stages of
# ``gated_backward`` with 64 columns, with Triton 3.6.
CANDIDATES: Final[Mapping[str, Sequence[Tile]]] = {
    "gated": (
        Tile(64, 64, warps=8, stages=4),
        Tile(64, 64, warps=8, stages=3),
        Tile(64, 128, warps=8, stages=2),
        Tile(32, 64, warps=8, stages=4),
        Tile(32, 64, warps=4, stages=4),
    ),
    "down": _OF_A_PRODUCT,
    "gated_backward": (
        Tile(64, 64, warps=8, stages=3),
        Tile(64, 128, warps=8, stages=3),
        Tile(32, 64, warps=8, stages=4),
        Tile(32, 64, warps=4, stages=4),
    ),
    "dgrad": _OF_A_PRODUCT,
}
"""Tiles of each product, none of which spills registers or takes more shared memory than there is."""
UNTUNED: Final = Tiles(**{name: tiles[0] for name, tiles in CANDIDATES.items()})
"""Tiles that are measured on no GPU."""
