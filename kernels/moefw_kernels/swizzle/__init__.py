"""Scales of blocks in the order in which Blackwell's tensor cores read them; see README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.swizzle import reference

__all__ = ["swizzle"]


def swizzle(scales: Tensor, *, ends: Tensor | None = None, axis: int = -2) -> Tensor:
    """Scales ``(..., R, C)``, of one byte each, in tiles of 128 rows by 4 columns, padded with 0.

    Without ``ends``, returns the tiles of each matrix, row of tiles by row of tiles: ``(..., 512 * T)``, with
    ``T = ceil(R / 128) * ceil(C / 4)``.

    With ``ends``, int32 ``(e,)``, read only on the device: groups of rows (``axis`` -2) or of columns (-1) of one
    matrix end there. Each group has its own tiles, in order of groups. The host does not know their number, so the
    result has the largest possible size, with zeros after the last tile: ``(128 * (R // 128 + e), 4 * ceil(C / 4))``
    for rows, ``(128 * ceil(R / 128), 4 * (C // 4 + e))`` for columns. Rows or columns past the last end are left out.

    Raises:
        ValueError: Scales of more bytes, an axis that is neither -1 nor -2, ends of another dtype or for more matrices.
    """
    if scales.ndim < 2 or scales.dtype.itemsize != 1:
        raise ValueError(f"cannot swizzle {scales.dtype} {tuple(scales.shape)}: give one byte each, (..., R, C)")
    if ends is not None and (scales.ndim > 2 or ends.dtype is not torch.int32 or axis not in (-1, -2)):
        raise ValueError(
            f"cannot swizzle groups that end at {ends.dtype} along axis {axis} of {tuple(scales.shape)}: "
            "give torch.int32 for the rows (-2) or columns (-1) of one matrix"
        )
    codes = scales.view(torch.uint8)
    if not takes_kernels(scales):
        return reference.swizzle(codes, ends, axis).view(scales.dtype)
    from moefw_kernels.swizzle import triton

    return triton.swizzle(codes, ends, axis).view(scales.dtype)
