"""FP8 in blocks, with fp32 or E8M0 scales. One read of ``x`` gives the codes and scales of both orientations.

Column copies are written as rows of the transpose.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import casts_fp8
from moefw_kernels.quantize.formats import E4M3
from moefw_kernels.quantize.quantized import Quantized
from moefw_kernels.quantize.reference import axis_of
from moefw_kernels.quantize.rows import Scales
from moefw_kernels.quantize.triton.in_kernels import (
    E4M3_MAX,
    INF,
    NAN,
    ONE,
    as_bits,
    as_float,
    divide,
    encode_e4m3,
    load_tile,
    magnitude,
    matrices,
    place_of_tile,
    store,
)

EXACT: Final = tl.constexpr(0)
_POWER_OF_TWO: Final = tl.constexpr(1)
_E8M0: Final = tl.constexpr(2)
ROW_RULES: Final[Mapping[Scales, Any]] = {"fp32": EXACT, "power_of_two": _POWER_OF_TWO, "e8m0": _E8M0}


@triton.jit
def fp32_scale(amax, largest, RULE: tl.constexpr, TOP: tl.constexpr = 448.0):
    """Multiplier of numbers and the scale: ``scales.tensor_scale`` and its reciprocal. TOP: the format's maximum."""
    finite = (amax > 0) & (amax < INF)
    multiplier = divide(TOP, as_float(tl.where(finite, amax, ONE)))
    multiplier = tl.where(as_bits(multiplier) == INF, largest, multiplier)
    if RULE == _POWER_OF_TWO:
        multiplier = as_float(as_bits(multiplier) & -0x800000)
    scale = as_bits(divide(1.0, multiplier))
    # Blocks of zeros: 1 and 1. With an infinity: 0 and infinity. With NaN: NaN and NaN.
    multiplier = tl.where(finite, as_bits(multiplier), tl.where(amax == 0, ONE, tl.where(amax == INF, 0, NAN)))
    scale = tl.where(finite, scale, tl.where(amax == 0, ONE, tl.where(amax == INF, INF, NAN)))
    return as_float(multiplier), as_float(scale)


@triton.jit
def _e8m0_scale(amax):
    """Multiplier of numbers and the E8M0 code: ``scales.mx_scale``."""
    code = (amax >> 23) - ((E4M3_MAX >> 23) - 127)
    code = tl.where((amax & 0x7FFFFF) > (E4M3_MAX & 0x7FFFFF), code + 1, code)
    code = tl.where(amax == INF, 254, code)
    code = tl.where(amax > INF, 255, tl.maximum(code, 0))
    # The multiplier is 2^(127 - code); for code 254 that is 2^-127, which is subnormal.
    multiplier = tl.where(code == 254, 0x00400000, (254 - code) << 23)
    return as_float(tl.where(code == 255, NAN, multiplier)), code.to(tl.uint8)


@triton.jit
def _quantize_tile(tile, largest, B: tl.constexpr, SQUARE: tl.constexpr, RULE: tl.constexpr, CVT: tl.constexpr):
    """E4M3 codes (R, C) and scales of a tile in blocks of 1 x B, or with SQUARE of one block of B x B.

    ``largest`` is the largest number of the dtype of ``x``.
    """
    R: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    blocks = tl.reshape(tile, (R, C // B, B))
    amax = tl.max(magnitude(blocks), axis=2, keep_dims=True)
    if SQUARE:
        amax = tl.max(amax, axis=0, keep_dims=True)
    if RULE == _E8M0:
        multiplier, scale = _e8m0_scale(amax)
    else:
        multiplier, scale = fp32_scale(amax, largest, RULE)
    code = tl.reshape(encode_e4m3(blocks * multiplier, CVT), (R, C))
    S: tl.constexpr = 1 if SQUARE else R
    return code, tl.reshape(scale, (S, C // B))


@triton.jit
def quantize_rows_tile(tile, largest, B: tl.constexpr, RULE: tl.constexpr, CVT: tl.constexpr):
    """E4M3 codes (R, C) and scales (R, C / B) of an fp32 tile in blocks of 1 x B.

    RULE is one of ``ROW_RULES``, CVT the result of ``casts_fp8``.
    """
    return _quantize_tile(tile, largest, B=B, SQUARE=False, RULE=RULE, CVT=CVT)


@triton.jit
def _store_blocks(
    tile, r0, c0, rows, columns, codes, scales, largest,
    B: tl.constexpr, SQUARE: tl.constexpr, RULE: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    """Quantize and store a tile of a (rows, columns) matrix in blocks along its columns, or in one block of B x B."""
    code, scale = _quantize_tile(tile, largest, B=B, SQUARE=SQUARE, RULE=RULE, CVT=CVT)
    store(codes, code, r0, c0, rows, columns)
    first = r0 // B if SQUARE else r0
    height = tl.cdiv(rows, B) if SQUARE else rows
    store(scales, scale, first, c0 // B, height, tl.cdiv(columns, B))


@triton.jit
def _blocks_kernel(
    x, row_codes, row_scales, column_codes, column_scales,
    rows, columns, x_stride, r_stride, c_stride, largest,
    R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr, BOTH: tl.constexpr, RULE: tl.constexpr,
    CVT: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of a matrix in blocks along columns, and with BOTH also along rows, from one read.

    The second result is stored as rows of the transpose, so that its codes are contiguous along the axis of its blocks.
    """
    matrix, r0, c0 = place_of_tile(rows, columns, R, C)
    tile = load_tile(x + matrix * x_stride, r0, c0, rows, columns, r_stride, c_stride, R, C)
    row_codes += matrix * rows * columns
    row_scales += matrix * (tl.cdiv(rows, B) if SQUARE else rows) * tl.cdiv(columns, B)
    _store_blocks(
        tile, r0=r0, c0=c0, rows=rows, columns=columns, codes=row_codes, scales=row_scales, largest=largest,
        B=B, SQUARE=SQUARE, RULE=RULE, CVT=CVT,
    )  # fmt: skip
    if BOTH:
        column_codes += matrix * rows * columns
        column_scales += matrix * (tl.cdiv(columns, B) if SQUARE else columns) * tl.cdiv(rows, B)
        _store_blocks(
            tl.trans(tile), r0=c0, c0=r0, rows=columns, columns=rows, codes=column_codes, scales=column_scales,
            largest=largest, B=B, SQUARE=SQUARE, RULE=RULE, CVT=CVT,
        )  # fmt: skip


def quantize_fp8(x: Tensor, block: tuple[int, int], power_of_two: bool) -> Quantized:
    """Implement ``reference.quantize_fp8``."""
    return _blocks(x, block, _POWER_OF_TWO if power_of_two else EXACT)


def quantize_fp8_both(x: Tensor, power_of_two: bool, square: bool = False) -> tuple[Quantized, Quantized]:
    """Implement ``reference.quantize_fp8_both``."""
    return _both(x, 128, _POWER_OF_TWO if power_of_two else EXACT, square=square)


def quantize_mxfp8(x: Tensor, block: tuple[int, int]) -> Quantized:
    """Implement ``reference.quantize_mxfp8``."""
    return _blocks(x, block, _E8M0)


def quantize_mxfp8_both(x: Tensor) -> tuple[Quantized, Quantized]:
    """Implement ``reference.quantize_mxfp8_both``."""
    return _both(x, 32, _E8M0)


def _blocks(x: Tensor, block: tuple[int, int], rule: Any) -> Quantized:
    """``x`` in blocks along rows, along columns, or in square blocks."""
    if axis_of(block) == -2:
        return _launch(x.mT, block[0], rule, square=False)[0].mT
    return _launch(x, block[1], rule, square=block[0] > 1)[0]


def _both(x: Tensor, size: int, rule: Any, *, square: bool = False) -> tuple[Quantized, Quantized]:
    """``x`` in blocks of 1 x size, and of size x 1; or in square blocks, with codes along rows, and along columns."""
    row, column = _launch(x, size, rule, square=square, both=True)
    return row, column.mT


def _launch(x: Tensor, size: int, rule: Any, *, square: bool, both: bool = False) -> tuple[Quantized, ...]:
    """``x`` in blocks along its last axis, and with ``both`` its transpose in blocks along *its* last axis."""
    x_BRC = matrices(x)
    num, rows, columns = x_BRC.shape
    x_stride, r_stride, c_stride = x_BRC.stride()
    scale_dtype = torch.uint8 if rule == _E8M0 else torch.float32
    outputs: list[tuple[Tensor, Tensor]] = []
    for matrix in (x, x.mT) if both else (x,):
        *leading, height, width = matrix.shape
        blocks_down = -(-height // size) if square else height
        blocks_across = -(-width // size)
        codes = matrix.new_empty(matrix.shape, dtype=torch.uint8)
        scales = x.new_empty(*leading, blocks_down, blocks_across, dtype=scale_dtype)
        outputs.append((codes, scales))
    if x.numel():
        tile_rows, tile_columns, warps = _tiling(size, square=square, both=both, along_rows=c_stride == 1)
        row_codes, row_scales = outputs[0]
        column_codes, column_scales = outputs[1] if both else (None, None)
        _blocks_kernel[(num * triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns),)](
            x=x_BRC,
            row_codes=row_codes,
            row_scales=row_scales,
            column_codes=column_codes,
            column_scales=column_scales,
            rows=rows,
            columns=columns,
            x_stride=x_stride,
            r_stride=r_stride,
            c_stride=c_stride,
            largest=torch.finfo(x.dtype).max,
            R=tile_rows,
            C=tile_columns,
            B=size,
            SQUARE=square,
            BOTH=both,
            RULE=rule,
            CVT=casts_fp8(x.device),
            num_warps=warps,
        )
    block = (size if square else 1, size)
    results = []
    for codes, scales in outputs:
        if scale_dtype is torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        results.append(
            Quantized(
                codes=codes.view(E4M3.dtype),
                scales=scales,
                fmt=E4M3,
                block=block,
                axis=-1,
                shape=tuple(codes.shape),
            )
        )
    return tuple(results)


def _tiling(size: int, *, square: bool, both: bool, along_rows: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: at most 64 numbers a thread, which stay in registers.

    ``along_rows``: numbers of a row lie side by side. Else those of a column do, and a tile reads 128 bytes of each.
    """
    if square or both:
        side = size if square else max(size, 64)
        warps = 8 if side == 128 else 4
        return side, side, warps
    return (32, 128, 4) if along_rows else (64, 128, 8)
