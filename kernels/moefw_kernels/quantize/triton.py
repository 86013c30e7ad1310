"""Encoders as Triton kernels. One read of ``x`` gives the codes and scales of both orientations.

Casts to FP8 are instructions of the GPU where it has them. Everywhere else, and for E2M1, casts work on bits and on
products with powers of two, which are exact. Column copies are written as rows of the transpose.
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
from moefw_kernels.quantize.formats import E2M1, E4M3
from moefw_kernels.quantize.quantized import Quantized
from moefw_kernels.quantize.reference import axis_of
from moefw_kernels.quantize.rows import Scales
from moefw_kernels.quantize.scales import BlockScales, nvfp4_global_scale
from moefw_kernels.random.triton import mix

_EXACT: Final = tl.constexpr(0)
_POWER_OF_TWO: Final = tl.constexpr(1)
_E8M0: Final = tl.constexpr(2)
ROW_RULES: Final[Mapping[Scales, Any]] = {"fp32": _EXACT, "power_of_two": _POWER_OF_TWO, "e8m0": _E8M0}
_INF: Final = tl.constexpr(0x7F800000)
_NAN: Final = tl.constexpr(0x7FC00000)
_FP32_MAX: Final = tl.constexpr(0x7F7FFFFF)
_E4M3_MAX: Final = tl.constexpr(0x43E00000)
_GAMMA: Final = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x):
    """Bits of |x|: integers in the order of the numbers, with infinity and then NaN above all."""
    return _bits(x) & 0x7FFFFFFF


@triton.jit
def _encode_e4m3(x, CVT: tl.constexpr):
    """Codes of E4M3, rounded to nearest, in uint8. CVT: by a saturating instruction of the GPU."""
    if CVT:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        code = tl.where(_magnitude(x) > _INF, 0x7F, code)
    else:
        code = _encode(x, None, M=3, LEAST=-6, MAX=_E4M3_MAX, SIGN=7, NAN=0x7F)
    return code.to(tl.uint8)


@triton.jit
def _encode(x, draws, M: tl.constexpr, LEAST: tl.constexpr, MAX: tl.constexpr, SIGN: tl.constexpr, NAN: tl.constexpr):
    """Codes of ``formats.encode`` in int32. LEAST: smallest normal exponent, MAX: bits of the largest number."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF  # as integers, in the order of the numbers
    is_nan = magnitude > _INF
    magnitude = tl.minimum(magnitude, MAX)
    exponent = tl.maximum((magnitude >> 23) - 127, LEAST)
    steps = _float(magnitude) * _float((127 + M - exponent) << 23)
    lower = steps.to(tl.int32)
    rest = steps - lower.to(tl.float32)
    if draws is None:  # noqa: SIM108
        up = (rest > 0.5) | ((rest == 0.5) & ((lower & 1) == 1))
    else:
        up = rest > draws
    code = ((exponent - LEAST) << M) + lower + up.to(tl.int32)
    return tl.where(is_nan, NAN, code | (((bits >> 31) & 1) << SIGN))


@triton.jit
def _divide(number: tl.constexpr, by):
    """``number / by`` rounded once, as ``scales.divide``."""
    return tl.div_rn(tl.full(by.shape, number, tl.float32), by)


@triton.jit
def _fp32_scale(amax, largest, RULE: tl.constexpr):
    """Multiplier of numbers and the scale: ``scales.tensor_scale`` and its reciprocal."""
    finite = (amax > 0) & (amax < _INF)
    multiplier = _divide(448.0, _float(tl.where(finite, amax, 0x3F800000)))
    multiplier = tl.where(_bits(multiplier) == _INF, largest, multiplier)
    if RULE == _POWER_OF_TWO:
        multiplier = _float(_bits(multiplier) & -0x800000)
    scale = _bits(_divide(1.0, multiplier))
    # Blocks of zeros: 1 and 1. With an infinity: 0 and infinity. With NaN: NaN and NaN.
    multiplier = tl.where(finite, _bits(multiplier), tl.where(amax == 0, 0x3F800000, tl.where(amax == _INF, 0, _NAN)))
    scale = tl.where(finite, scale, tl.where(amax == 0, 0x3F800000, tl.where(amax == _INF, _INF, _NAN)))
    return _float(multiplier), _float(scale)


@triton.jit
def _e8m0_scale(amax):
    """Multiplier of numbers and the E8M0 code: ``scales.mx_scale``."""
    code = (amax >> 23) - ((_E4M3_MAX >> 23) - 127)
    code = tl.where((amax & 0x7FFFFF) > (_E4M3_MAX & 0x7FFFFF), code + 1, code)
    code = tl.where(amax == _INF, 254, code)
    code = tl.where(amax > _INF, 255, tl.maximum(code, 0))
    # The multiplier is 2^(127 - code); for code 254 that is 2^-127, which is subnormal.
    multiplier = tl.where(code == 254, 0x00400000, (254 - code) << 23)
    return _float(tl.where(code == 255, _NAN, multiplier)), code.to(tl.uint8)


@triton.jit
def _quantize_tile(tile, largest, B: tl.constexpr, SQUARE: tl.constexpr, RULE: tl.constexpr, CVT: tl.constexpr):
    """E4M3 codes (R, C) and scales of a tile in blocks of 1 x B, or with SQUARE of one block of B x B.

    ``largest`` is the largest number of the dtype of ``x``.
    """
    R: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    blocks = tl.reshape(tile, (R, C // B, B))
    amax = tl.max(_magnitude(blocks), axis=2, keep_dims=True)
    if SQUARE:
        amax = tl.max(amax, axis=0, keep_dims=True)
    if RULE == _E8M0:
        multiplier, scale = _e8m0_scale(amax)
    else:
        multiplier, scale = _fp32_scale(amax, largest, RULE)
    code = tl.reshape(_encode_e4m3(blocks * multiplier, CVT), (R, C))
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
    _store(codes, code, r0, c0, rows, columns)
    first = r0 // B if SQUARE else r0
    height = tl.cdiv(rows, B) if SQUARE else rows
    _store(scales, scale, first, c0 // B, height, tl.cdiv(columns, B))


@triton.jit
def _store(pointer, tile, r0, c0, rows, columns):
    """Store the tile at row ``r0`` and column ``c0`` of a (rows, columns) matrix."""
    r = r0 + tl.arange(0, tile.shape[0])[:, None].to(tl.int64)
    c = c0 + tl.arange(0, tile.shape[1])[None, :].to(tl.int64)
    tl.store(pointer + r * columns + c, tile, mask=(r < rows) & (c < columns))


@triton.jit
def _tile(x, r0, c0, rows, columns, r_stride, c_stride, R: tl.constexpr, C: tl.constexpr):
    """Load a tile (R, C) of a (rows, columns) matrix in fp32, with zeros outside."""
    r = r0 + tl.arange(0, R)[:, None].to(tl.int64)
    c = c0 + tl.arange(0, C)[None, :].to(tl.int64)
    inside = (r < rows) & (c < columns)
    return tl.load(x + r * r_stride + c * c_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _place(rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Matrix of this program and the first row and column of its tile."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, C)
    tiles = tl.cdiv(rows, R) * across
    return program // tiles, program % tiles // across * R, program % tiles % across * C


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
    matrix, r0, c0 = _place(rows, columns, R, C)
    tile = _tile(x + matrix * x_stride, r0, c0, rows, columns, r_stride, c_stride, R, C)
    row_codes += matrix * rows * columns
    row_scales += matrix * (tl.cdiv(rows, B) if SQUARE else rows) * tl.cdiv(columns, B)
    _store_blocks(
        tile, r0=r0, c0=c0, rows=rows, columns=columns, codes=row_codes, scales=row_scales, largest=largest,
        B=B, SQUARE=SQUARE, RULE=RULE, CVT=CVT,
    )  # fmt: skip
    if BOTH:
        column_codes += matrix * rows * columns
        column_scales += matrix * columns * tl.cdiv(rows, B)
        _store_blocks(
            tl.trans(tile), r0=c0, c0=r0, rows=columns, columns=rows, codes=column_codes, scales=column_scales,
            largest=largest, B=B, SQUARE=SQUARE, RULE=RULE, CVT=CVT,
        )  # fmt: skip


@triton.jit
def _nvfp4_kernel(
    x, encoders, decoders, keys, codes, scales,
    rows, columns, x_stride, r_stride, c_stride, level_stride, block_stride, key_rows,
    R: tl.constexpr, C: tl.constexpr, SQUARE: tl.constexpr, KEYED: tl.constexpr, TRANSPOSED: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """Quantize in blocks of 16 along columns, or of 16 x 16 (R is 16). TRANSPOSED: keys and groups are of columns.

    UP: scales of blocks are rounded up, as by a draw of 0.
    """
    matrix, r0, c0 = _place(rows, columns, R, C)
    tile = _tile(x + matrix * x_stride, r0, c0, rows, columns, r_stride, c_stride, R, C)
    blocks = tl.reshape(tile, (R, C // 16, 16))
    amax = tl.max(_magnitude(blocks), axis=2, keep_dims=True)
    if SQUARE:
        amax = tl.max(amax, axis=0, keep_dims=True)
    # The global scale of each block, in a tile (R or 1, C / 16 or 1, 1): one for each of the rows of blocks of ``x`` as
    # the caller has it, which are columns of blocks here if TRANSPOSED.
    if TRANSPOSED:
        place = (c0 // 16 + tl.arange(0, C // 16).to(tl.int64))[None, :, None]
        count = tl.cdiv(columns, 16)
    elif SQUARE:
        place = (r0 // 16 + tl.arange(0, 1).to(tl.int64))[:, None, None]
        count = tl.cdiv(rows, 16)
    else:
        place = (r0 + tl.arange(0, R).to(tl.int64))[:, None, None]
        count = rows
    level = matrix * level_stride + place * block_stride
    inside = place < count
    unrounded = _float(amax) * tl.load(encoders + level, mask=inside, other=1.0)
    unrounded = _float(tl.where(amax >= _INF, _NAN, _bits(unrounded)))
    scale = _encode(unrounded, 0.0 if UP else None, 3, -6, _E4M3_MAX, 7, 0x7F)
    fraction = (scale & 7).to(tl.float32) * 0.001953125
    value = _float(tl.where(scale < 8, _bits(fraction), (((scale >> 3) + 120) << 23) | ((scale & 7) << 20)))
    value = value * tl.load(decoders + level, mask=inside, other=1.0)
    usable = (_magnitude(value) > 0) & (_magnitude(value) < _INF)
    inverse = _bits(_divide(1.0, _float(tl.where(usable, _bits(value), 0x3F800000))))
    inverse = tl.where(usable, tl.minimum(inverse, _FP32_MAX), tl.where(_bits(value) == 0, _FP32_MAX, 0))
    broken = (scale == 0x7F) | (_magnitude(value) > _INF)
    draws = None
    r = r0 + tl.arange(0, R)[:, None].to(tl.int64)
    c = c0 + tl.arange(0, C)[None, :].to(tl.int64)
    real = c < columns
    if KEYED:
        if TRANSPOSED:
            r, c = c, r
        key = tl.load(keys + matrix * key_rows + r, mask=r < key_rows, other=0)
        word = (mix(key + (c + 1) * _GAMMA) >> 40) & 0xFFFFFF
        draws = tl.reshape(word.to(tl.float32) * 5.9604644775390625e-08, (R, C // 16, 16))
    code = _encode(blocks * _float(tl.where(broken, _NAN, inverse)), draws, 1, 0, 0x40C00000, 3, 7)
    code = tl.where(real, tl.reshape(code, (R, C)), 0)
    low, high = tl.split(tl.reshape(code, (R, C // 2, 2)))
    _store(codes + matrix * rows * tl.cdiv(columns, 2), (low | (high << 4)).to(tl.uint8),
           r0, c0 // 2, rows, tl.cdiv(columns, 2))  # fmt: skip
    height = tl.cdiv(rows, 16) if SQUARE else rows
    S: tl.constexpr = 1 if SQUARE else R
    _store(scales + matrix * height * tl.cdiv(columns, 16), tl.reshape(scale.to(tl.uint8), (S, C // 16)),
           r0 // 16 if SQUARE else r0, c0 // 16, height, tl.cdiv(columns, 16))  # fmt: skip


def quantize_fp8(x: Tensor, block: tuple[int, int], power_of_two: bool) -> Quantized:
    """Implement ``reference.quantize_fp8``."""
    return _blocks(x, block, _POWER_OF_TWO if power_of_two else _EXACT)


def quantize_fp8_both(x: Tensor, power_of_two: bool) -> tuple[Quantized, Quantized]:
    """Implement ``reference.quantize_fp8_both``."""
    return _both(x, 128, _POWER_OF_TWO if power_of_two else _EXACT)


def quantize_mxfp8(x: Tensor, block: tuple[int, int]) -> Quantized:
    """Implement ``reference.quantize_mxfp8``."""
    return _blocks(x, block, _E8M0)


def quantize_mxfp8_both(x: Tensor) -> tuple[Quantized, Quantized]:
    """Implement ``reference.quantize_mxfp8_both``."""
    return _both(x, 32, _E8M0)


def quantize_nvfp4(
    x: Tensor, block: tuple[int, int], global_amax: Tensor, keys: Tensor | None, scales: BlockScales = "nearest"
) -> Quantized:
    """Implement ``reference.quantize_nvfp4``."""
    if axis_of(block) == -2:
        level = global_amax.mT if global_amax.ndim == x.ndim else global_amax
        return _nvfp4(x.mT, 1, level, keys, transposed=True, up=scales == "up").mT
    return _nvfp4(x, block[0], global_amax, keys, transposed=False, up=scales == "up")


def _nvfp4(
    x: Tensor, height: int, global_amax: Tensor, keys: Tensor | None, *, transposed: bool, up: bool
) -> Quantized:
    encoder, decoder = nvfp4_global_scale(global_amax)
    x_BRC = _matrices(x)
    num, rows, columns = x_BRC.shape
    codes = x.new_empty(*x.shape[:-1], -(-columns // 2), dtype=torch.uint8)
    scales = x.new_empty(*x.shape[:-2], -(-rows // height), -(-columns // 16), dtype=torch.uint8)
    if x.numel():
        grid = (num * triton.cdiv(rows, 16) * triton.cdiv(columns, 64),)
        _nvfp4_kernel[grid](
            x_BRC, encoder * (1.0 / 6.0), decoder, keys if keys is None else keys.contiguous(), codes, scales,
            rows, columns, *x_BRC.stride(), int(0 < encoder.ndim < x.ndim), int(encoder.ndim == x.ndim),
            columns if transposed else rows, 16, 64, height == 16, keys is not None, transposed, up,
        )  # fmt: skip
    scales = scales.view(torch.float8_e4m3fn)
    return Quantized(codes, scales, E2M1, (height, 16), -1, tuple(x.shape), decoder)


def _blocks(x: Tensor, block: tuple[int, int], rule: Any) -> Quantized:
    """``x`` in blocks along rows, along columns, or in square blocks."""
    if axis_of(block) == -2:
        return _launch(x.mT, block[0], rule, square=False)[0].mT
    return _launch(x, block[1], rule, square=block[0] > 1)[0]


def _both(x: Tensor, size: int, rule: Any) -> tuple[Quantized, Quantized]:
    """``x`` in blocks of 1 x size, and of size x 1."""
    row, column = _launch(x, size, rule, square=False, both=True)
    return row, column.mT


def _launch(x: Tensor, size: int, rule: Any, *, square: bool, both: bool = False) -> tuple[Quantized, ...]:
    """``x`` in blocks along its last axis, and with ``both`` its transpose in blocks along *its* last axis."""
    x_BRC = _matrices(x)
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


def _matrices(x: Tensor) -> Tensor:
    """``x`` (..., R, C) as one batch of matrices (B, R, C)."""
    return x.reshape(-1, *x.shape[-2:]) if x.numel() else x.new_empty(0, *x.shape[-2:])
