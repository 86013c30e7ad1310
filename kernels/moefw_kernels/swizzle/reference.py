"""Reference in plain PyTorch, group by group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 128
"""Rows of a tile."""
COLUMNS = 4
"""Columns of a tile."""


def swizzle(scales: Tensor, ends: Tensor | None, axis: int) -> Tensor:
    """Implement ``moefw_kernels.swizzle.swizzle`` on bytes."""
    if ends is None:
        return _tiles(scales)
    out = scales.new_zeros(grouped_shape(scales, len(ends), axis))
    stops = ends.tolist()
    sizes = [stop - start for start, stop in zip([0, *stops], stops)]
    parts = scales.split([*sizes, scales.shape[axis] - sum(sizes)], axis)[:-1]
    tiles = torch.cat([scales.new_empty(0), *(_tiles(part) for part in parts)])
    out.view(-1)[: len(tiles)] = tiles
    return out


def grouped_shape(scales: Tensor, groups: int, axis: int) -> tuple[int, int]:
    """Largest shape of the tiles of ``groups`` groups: each adds at most one partly filled tile."""
    rows, columns = scales.shape
    if axis == -2:
        return ROWS * (rows // ROWS + groups), COLUMNS * -(-columns // COLUMNS)
    return ROWS * -(-rows // ROWS), COLUMNS * (columns // COLUMNS + groups)


def _tiles(scales: Tensor) -> Tensor:
    """Tiles of each matrix ``(..., R, C)``, row of tiles by row of tiles, ``(..., 512 * T)``."""
    padded = F.pad(scales, (0, -scales.shape[-1] % COLUMNS, 0, -scales.shape[-2] % ROWS))
    down = padded.shape[-2] // ROWS
    across = padded.shape[-1] // COLUMNS
    # Each 16 bytes of a tile hold 4 columns of the rows r, r + 32, r + 64 and r + 96.
    tiles = padded.reshape(*scales.shape[:-2], down, 4, 32, across, COLUMNS)
    return tiles.movedim(-2, -4).movedim(-2, -3).flatten(-5)
