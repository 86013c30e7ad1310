"""The list of tiles of rows: what programs of a persistent grid compute, written by the device for the device.

It is a flat int32 tensor. Its first number is the number of tiles; behind ``NUMBERS`` numbers, each tile has its group,
its first row and the end of the group.
"""

from __future__ import annotations

from typing import Final

ROWS: Final = 128
"""Most rows of a tile, all of one group."""
NUMBERS: Final = 4
"""Numbers of a tile. The fourth is not used: it lets a tile begin on 16 bytes."""


def most_tiles(num_rows: int, groups: int) -> int:
    """Most tiles that so many rows can have: each group adds at most one that is partly filled."""
    return -(-num_rows // ROWS) + groups
