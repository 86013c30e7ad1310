"""Largest magnitudes of matrices and of groups of rows: one read of ``x``, then one of a number for each row.

Without atomic operations, so that the second kernel sees all of the first. Magnitudes are compared as integers, in
which NaN is above infinity, so that it is not lost.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import as_dtype, is_compiled
from moefw_kernels.hadamard.reference import SIZE
from moefw_kernels.hadamard.triton import MINUS as MINUS_SIGNS
from moefw_kernels.hadamard.triton import transformed
from moefw_kernels.quantize import reference
from moefw_kernels.quantize.triton.in_kernels import load_tile, magnitude, matrices

BLOCK: Final = 1024
"""Magnitudes of rows that a program of the second kernel reads at once."""


@triton.jit
def _row_amax_kernel(
    x, out, rows, columns, x_stride, r_stride, c_stride,
    R: tl.constexpr, C: tl.constexpr, HADAMARD: tl.constexpr, MINUS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of each of R rows; with HADAMARD of all 16, which are transformed first."""
    down = tl.cdiv(rows, R)
    program = tl.program_id(0).to(tl.int64)
    matrix = program // down
    r0 = program % down * R
    x += matrix * x_stride
    largest = tl.zeros((C, R) if HADAMARD else (R, C), tl.int32)
    for c0 in range(0, columns, C):
        tile = load_tile(x, r0, c0, rows, columns, r_stride, c_stride, R, C)
        if HADAMARD:
            tile = as_dtype(transformed(tl.trans(tile), MINUS), x.dtype.element_ty, COMPILED)
        largest = tl.maximum(largest, magnitude(tile))
    if HADAMARD:
        tl.store(out + program, tl.max(tl.max(largest, axis=1), axis=0))
    else:
        r = r0 + tl.arange(0, R)
        tl.store(out + matrix * rows + r, tl.max(largest, axis=1), mask=r < rows)


@triton.jit
def _group_amax_kernel(row_amax, ends, out, num_rows, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Largest of the magnitudes in a group, of which each is one of HEIGHT rows. No ends: groups of ``num_rows``."""
    group = tl.program_id(0)
    if ends is None:
        start = group.to(tl.int64) * num_rows
        stop = start + num_rows
    else:
        start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
        stop = tl.load(ends + group).to(tl.int64)
    stop = tl.cdiv(stop, HEIGHT)
    largest = tl.zeros((BLOCK,), tl.int32)
    for first in range(start // HEIGHT, stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(row_amax + place, mask=place < stop, other=0))
    tl.store(out + group, tl.max(largest, axis=0))


def matrix_amax(x: Tensor, hadamard: bool) -> Tensor:
    """Implement ``reference.matrix_amax``."""
    if not x.numel():
        return reference.matrix_amax(x, hadamard)
    # The largest of a matrix is that of its transpose. Rows are read along what lies side by side.
    if not hadamard and x.stride(-2) < x.stride(-1):
        x = x.mT
    return _amax(x, None, x.shape[:-2], hadamard)


def group_amax(x: Tensor, ends_e: Tensor, hadamard: bool) -> Tensor:
    """Implement ``reference.group_amax``."""
    if not x.numel():
        return reference.group_amax(x, ends_e, hadamard)
    return _amax(x, ends_e, ends_e.shape, hadamard)


def _amax(x: Tensor, ends_e: Tensor | None, shape: torch.Size, hadamard: bool) -> Tensor:
    """Largest magnitudes of matrices, or of groups, fp32 of ``shape``."""
    x_BRC = matrices(x)
    num, rows, columns = x_BRC.shape
    x_stride, r_stride, c_stride = x_BRC.stride()
    height = SIZE if hadamard else 1
    tile_rows, tile_columns = (SIZE, 128) if hadamard else (8, 256)
    row_amax = x.new_empty(num * triton.cdiv(rows, height), dtype=torch.int32)
    _row_amax_kernel[(num * triton.cdiv(rows, tile_rows),)](
        x=x_BRC,
        out=row_amax,
        rows=rows,
        columns=columns,
        x_stride=x_stride,
        r_stride=r_stride,
        c_stride=c_stride,
        R=tile_rows,
        C=tile_columns,
        HADAMARD=hadamard,
        MINUS=MINUS_SIGNS,
        COMPILED=is_compiled(),
    )
    amax = x.new_empty(shape, dtype=torch.int32)
    if amax.numel():
        _group_amax_kernel[(amax.numel(),)](
            row_amax=row_amax,
            ends=ends_e,
            out=amax,
            num_rows=rows,
            HEIGHT=height,
            BLOCK=BLOCK,
        )
    return amax.view(torch.float32)
