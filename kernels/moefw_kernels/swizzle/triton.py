"""Triton kernel. A program writes one tile and finds the tile's group itself, so that nothing waits for the host."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.swizzle.reference import COLUMNS, ROWS, grouped_shape


@triton.jit
def _group_of_tile(ends, tile, groups, stack, G: tl.constexpr, SIZE: tl.constexpr):
    """Return the number of a tile in its group, and the start and end of the group.

    A group has ``stack`` tiles for every SIZE rows or columns.
    """
    g = tl.arange(0, G)
    stops = tl.load(ends + g, mask=g < groups, other=0)
    starts = tl.load(ends + g - 1, mask=(g > 0) & (g < groups), other=0)
    tiles = tl.where(g < groups, tl.cdiv(stops - starts, SIZE), 0) * stack
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    before = tl.sum(tl.where(g < group, tiles, 0))
    return tile - before, tl.sum(tl.where(g == group, starts, 0)), tl.sum(tl.where(g == group, stops, 0))


@triton.jit
def _swizzle_kernel(
    scales, out, ends, groups, rows, columns, matrix_stride, row_stride, column_stride,
    G: tl.constexpr, ALONG_ROWS: tl.constexpr,
):  # fmt: skip
    """Write tiles of 128x4, row by row within a matrix or group, and zeros past the last group."""
    down = tl.cdiv(rows, 128)
    across = tl.cdiv(columns, 4)
    tile = tl.program_id(0)
    number = tile.to(tl.int64)
    first_row = 0
    last_row = rows
    first_column = 0
    last_column = columns
    if ends is None:
        scales += number // (down * across) * matrix_stride
        tile = tile % (down * across)
    elif ALONG_ROWS:
        tile, first_row, last_row = _group_of_tile(ends, tile, groups, across, G, 128)
    else:
        tile, first_column, last_column = _group_of_tile(ends, tile, groups, down, G, 4)
        across = tl.maximum(tl.cdiv(last_column - first_column, 4), 1)
    # Byte ``place`` of a tile: 32 times 16 bytes, each 4 columns of the rows r, r + 32, r + 64 and r + 96.
    place = tl.arange(0, 512)
    row = first_row + tile // across * 128 + place // 16 + place % 16 // 4 * 32
    column = first_column + tile % across * 4 + place % 4
    at = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    codes = tl.load(scales + at, mask=(row < last_row) & (column < last_column), other=0)
    tl.store(out + number * 512 + place, codes)


def swizzle(scales: Tensor, ends: Tensor | None, axis: int) -> Tensor:
    """Implement ``reference.swizzle``."""
    *leading, rows, columns = scales.shape
    if ends is None:
        groups = 0
        out = scales.new_empty(*leading, triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS) * ROWS * COLUMNS)
    else:
        groups = len(ends)
        out = scales.new_empty(grouped_shape(scales, groups, axis))
    if out.numel():
        matrices = scales.reshape(-1, rows, columns) if leading else scales.unsqueeze(0)
        matrix_stride, row_stride, column_stride = matrices.stride()
        _swizzle_kernel[(out.numel() // (ROWS * COLUMNS),)](
            scales=matrices,
            out=out,
            ends=ends,
            groups=groups,
            rows=rows,
            columns=columns,
            matrix_stride=matrix_stride,
            row_stride=row_stride,
            column_stride=column_stride,
            G=triton.next_power_of_2(max(groups, 1)),
            ALONG_ROWS=axis == -2,
        )
    return out
