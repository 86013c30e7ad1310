"""FP8 with a scale for a whole matrix, or for each group of rows, in one or in both orientations."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import casts_fp8
from moefw_kernels.quantize import reference
from moefw_kernels.quantize.formats import E5M2, Format
from moefw_kernels.quantize.quantized import Quantized
from moefw_kernels.quantize.triton.blocks import EXACT, fp32_scale
from moefw_kernels.quantize.triton.in_kernels import (
    INF,
    as_bits,
    as_float,
    divide,
    encode_e4m3,
    encode_e5m2,
    is_empty,
    load_tile,
    matrices,
    of_groups,
    place_of_tile,
    store,
)


@triton.jit
def _tensor_kernel(
    x, levels, ends, row_codes, column_codes, scales,
    rows, columns, x_stride, r_stride, c_stride, level_stride, groups, largest,
    R: tl.constexpr, C: tl.constexpr, BOTH: tl.constexpr, SCALED: tl.constexpr, E5M2: tl.constexpr,
    STEPS: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    """Quantize one tile with the scale of its matrix, or of the groups of its rows.

    ``levels`` are multipliers if SCALED, else largest magnitudes. BOTH: codes are also stored as rows of the transpose.
    Rows past the last group are zeros.
    """
    matrix, r0, c0 = place_of_tile(rows, columns, R, C)
    tile = load_tile(x + matrix * x_stride, r0, c0, rows, columns, r_stride, c_stride, R, C)
    r = r0 + tl.arange(0, R).to(tl.int64)
    if ends is None:
        # One number, loaded for each row, so that what follows is the same for matrices and groups.
        real = r < rows
        level = tl.load(levels + matrix * level_stride + r * 0)
    else:
        real = (r < rows) & (r < tl.load(ends + groups - 1))
        level = of_groups(levels, r, r0, r0 + R - 1, ends, groups, 1.0 if SCALED else 0.0, STEPS)
    if SCALED:
        multiplier = level
        scale = as_bits(divide(1.0, tl.where(level == 0, 1.0, level)))
        scale = as_float(tl.where(level == 0, INF, scale))
    else:
        multiplier, scale = fp32_scale(as_bits(level), largest, EXACT, TOP=57344.0 if E5M2 else 448.0)
    numbers = tl.where(real[:, None], tile, 0.0) * multiplier[:, None]
    code = encode_e5m2(numbers, CVT) if E5M2 else encode_e4m3(numbers, CVT)
    before = matrix * rows * columns
    store(row_codes + before, code, r0, c0, rows, columns)
    if BOTH:
        store(column_codes + before, tl.trans(code), c0, r0, columns, rows)
    if ends is None:
        # Of the programs that share a scale, the first one stores it.
        is_first = (r0 == 0) & (c0 == 0) & ((matrix == 0) | (level_stride > 0))
        tl.store(scales + matrix * level_stride + r * 0, scale, mask=is_first & (r == 0))
    else:
        tl.store(scales + r, scale, mask=(c0 == 0) & (r < rows))


def quantize_tensor(x: Tensor, fmt: Format, level: Tensor, ends_e: Tensor | None, scaled: bool) -> Quantized:
    """Implement ``reference.quantize_tensor``."""
    if is_empty(x, ends_e):
        return reference.quantize_tensor(x, fmt, level, ends_e, scaled)
    return _launch(x, fmt, level, ends_e, scaled, both=False)[0]


def quantize_tensor_both(
    x: Tensor, fmt: Format, level: Tensor, ends_e: Tensor | None, scaled: bool
) -> tuple[Quantized, Quantized]:
    """Implement ``reference.quantize_tensor_both``."""
    if is_empty(x, ends_e):
        return reference.quantize_tensor_both(x, fmt, level, ends_e, scaled)
    along, across = _launch(x, fmt, level, ends_e, scaled, both=True)
    return along, across


def _launch(
    x: Tensor, fmt: Format, level: Tensor, ends_e: Tensor | None, scaled: bool, *, both: bool
) -> list[Quantized]:
    """``x`` with codes along its last axis, and with ``both`` also along the one before."""
    x_BRC = matrices(x)
    num, rows, columns = x_BRC.shape
    x_stride, r_stride, c_stride = x_BRC.stride()
    row_codes = x.new_empty(x.shape, dtype=torch.uint8)
    column_codes = x.new_empty(x.mT.shape, dtype=torch.uint8) if both else None
    of_each = () if level.ndim == 0 else (1, 1)
    scales = level.new_empty((rows, 1) if ends_e is not None else (*level.shape, *of_each), dtype=torch.float32)
    groups = 0 if ends_e is None else len(ends_e)
    tile_rows, tile_columns = (64, 64) if both else (32, 128)
    _tensor_kernel[(num * triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns),)](
        x=x_BRC,
        levels=level.contiguous(),
        ends=ends_e,
        row_codes=row_codes,
        column_codes=column_codes,
        scales=scales,
        rows=rows,
        columns=columns,
        x_stride=x_stride,
        r_stride=r_stride,
        c_stride=c_stride,
        level_stride=int(level.ndim > 0),
        groups=groups,
        largest=torch.finfo(x.dtype).max,
        R=tile_rows,
        C=tile_columns,
        BOTH=both,
        SCALED=scaled,
        E5M2=fmt is E5M2,
        STEPS=groups.bit_length(),
        CVT=casts_fp8(x.device),
    )
    orientations = [(row_codes, -1)]
    if column_codes is not None:
        orientations.append((column_codes.mT, -2))
    return [
        Quantized(
            codes=codes.view(fmt.dtype),
            scales=scales,
            fmt=fmt,
            block=None,
            axis=axis,
            shape=tuple(x.shape),
        )
        for codes, axis in orientations
    ]
