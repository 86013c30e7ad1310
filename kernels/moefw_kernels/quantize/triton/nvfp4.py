"""NVFP4: E2M1 in blocks of 16 or 16x16 with E4M3 scales, and one scale above for a matrix or for a group of rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import as_dtype, is_compiled
from moefw_kernels.hadamard.triton import MINUS as MINUS_SIGNS
from moefw_kernels.hadamard.triton import transformed
from moefw_kernels.quantize import reference
from moefw_kernels.quantize.formats import E2M1
from moefw_kernels.quantize.quantized import Quantized
from moefw_kernels.quantize.reference import axis_of
from moefw_kernels.quantize.scales import BlockScales
from moefw_kernels.quantize.triton.in_kernels import (
    E2M1_MAX,
    E4M3_MAX,
    FP32_MAX,
    INF,
    NAN,
    ONE,
    as_bits,
    as_float,
    divide,
    encode,
    is_empty,
    load_tile,
    magnitude,
    matrices,
    of_groups,
    place_of_tile,
    store,
)
from moefw_kernels.random.triton import mix

_GAMMA: Final = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))


@triton.jit
def _global_scale(amax):
    """Numbers that encode and decode above the scales of blocks: ``scales.nvfp4_global_scale``."""
    bits = as_bits(amax)
    finite = (bits > 0) & (bits < INF)
    encoder = as_bits(divide(2688.0, as_float(tl.where(finite, bits, ONE))))
    encoder = tl.where(finite, tl.minimum(encoder, FP32_MAX), tl.where(bits == 0, ONE, tl.where(bits == INF, 0, NAN)))
    decoder = as_bits(divide(1.0, as_float(tl.where(finite, encoder, ONE))))
    decoder = tl.where(finite, decoder, tl.where(bits == 0, ONE, tl.where(bits == INF, INF, NAN)))
    return as_float(encoder), as_float(decoder)


@triton.jit
def _block_scale(amax, encoder, decoder, UP: tl.constexpr):
    """E4M3 codes of blocks with magnitudes ``amax`` (bits), and the multipliers of their numbers: ``nvfp4_scale``."""
    unrounded = as_float(amax) * (encoder * 0.16666666666666666)
    unrounded = as_float(tl.where(amax >= INF, NAN, as_bits(unrounded)))
    scale = encode(unrounded, 0.0 if UP else None, M=3, LEAST=-6, MAX=E4M3_MAX, SIGN=7, OF_NAN=0x7F)
    fraction = (scale & 7).to(tl.float32) * 0.001953125
    value = as_float(tl.where(scale < 8, as_bits(fraction), (((scale >> 3) + 120) << 23) | ((scale & 7) << 20)))
    value = value * decoder
    usable = (magnitude(value) > 0) & (magnitude(value) < INF)
    inverse = as_bits(divide(1.0, as_float(tl.where(usable, as_bits(value), ONE))))
    inverse = tl.where(usable, tl.minimum(inverse, FP32_MAX), tl.where(as_bits(value) == 0, FP32_MAX, 0))
    broken = (scale == 0x7F) | (magnitude(value) > INF)
    return scale, as_float(tl.where(broken, NAN, inverse))


@triton.jit
def _packed(code):
    """Two codes of four bits of (R, C) in each byte, the even one low."""
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def _nvfp4_kernel(
    x, global_amax, ends, keys, codes, across_codes, scales, decoders,
    rows, columns, x_stride, r_stride, c_stride, amax_stride, key_rows, groups,
    R: tl.constexpr, C: tl.constexpr, SQUARE: tl.constexpr, BOTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    KEYED: tl.constexpr, UP: tl.constexpr, HADAMARD: tl.constexpr, MINUS: tl.constexpr, STEPS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Quantize in blocks of 16 along columns, or of 16 x 16 (R is 16). TRANSPOSED: keys and groups are of columns.

    BOTH: codes of blocks of 16 x 16 are also stored as rows of the transpose. UP: scales of blocks are rounded up, as
    by a draw of 0. HADAMARD: blocks are transformed first.
    """
    matrix, r0, c0 = place_of_tile(rows, columns, R, C)
    tile = load_tile(x + matrix * x_stride, r0, c0, rows, columns, r_stride, c_stride, R, C)
    if HADAMARD:
        turned = transformed(tl.reshape(tile, (R * C // 16, 16)), MINUS)
        tile = tl.reshape(as_dtype(turned, x.dtype.element_ty, COMPILED), (R, C))
    r = r0 + tl.arange(0, R)[:, None].to(tl.int64)
    c = c0 + tl.arange(0, C)[None, :].to(tl.int64)
    inside = (r < rows) & (c < columns)
    if TRANSPOSED:
        r, c = c, r
    if ends is not None:
        tile = tl.where(r < tl.load(ends + groups - 1), tile, 0.0)
    blocks = tl.reshape(tile, (R, C // 16, 16))
    amax = tl.max(magnitude(blocks), axis=2, keep_dims=True)
    if SQUARE:
        amax = tl.max(amax, axis=0, keep_dims=True)

    # The scale above each block, in a tile (R or 1, C / 16 or 1, 1): one for each of the rows of blocks of ``x`` as the
    # caller has it, which are columns of blocks here if TRANSPOSED.
    if TRANSPOSED:
        place = (c0 // 16 + tl.arange(0, C // 16).to(tl.int64))[None, :, None]
        count = tl.cdiv(columns, 16)
        is_first = r0 == 0
    elif SQUARE:
        place = (r0 // 16 + tl.arange(0, 1).to(tl.int64))[:, None, None]
        count = tl.cdiv(rows, 16)
        is_first = c0 == 0
    else:
        place = (r0 + tl.arange(0, R).to(tl.int64))[:, None, None]
        count = rows
        is_first = c0 == 0
    if ends is None:
        encoder, decoder = _global_scale(tl.load(global_amax + matrix * amax_stride + place * 0))
        # Of the programs that share it, the first one stores it.
        is_first = (r0 == 0) & (c0 == 0) & ((matrix == 0) | (amax_stride > 0))
        tl.store(decoders + matrix * amax_stride + place * 0, decoder, mask=is_first & (place == 0))
    else:
        row = place * 16 if TRANSPOSED or SQUARE else place
        first = c0 if TRANSPOSED else r0
        last = first + (C if TRANSPOSED else R) - 1
        encoder, decoder = _global_scale(of_groups(global_amax, row, first, last, ends, groups, 0.0, STEPS))
        tl.store(decoders + place, decoder, mask=is_first & (place < count))
    scale, multiplier = _block_scale(amax, encoder, decoder, UP)

    draws = None
    if KEYED:
        key = tl.load(keys + matrix * key_rows + r, mask=r < key_rows, other=0)
        word = (mix(key + (c + 1) * _GAMMA) >> 40) & 0xFFFFFF
        draws = tl.reshape(word.to(tl.float32) * 5.9604644775390625e-08, (R, C // 16, 16))
    code = encode(blocks * multiplier, draws, M=1, LEAST=0, MAX=E2M1_MAX, SIGN=3, OF_NAN=7)
    code = tl.where(inside, tl.reshape(code, (R, C)), 0)
    width = tl.cdiv(columns, 2)
    store(codes + matrix * rows * width, _packed(code), r0, c0 // 2, rows, width)
    if BOTH:
        height = tl.cdiv(rows, 2)
        store(across_codes + matrix * columns * height, _packed(tl.trans(code)), c0, r0 // 2, columns, height)
    S: tl.constexpr = 1 if SQUARE else R
    first = r0 // 16 if SQUARE else r0
    down = tl.cdiv(rows, 16) if SQUARE else rows
    across = tl.cdiv(columns, 16)
    store(scales + matrix * down * across, tl.reshape(scale.to(tl.uint8), (S, C // 16)), first, c0 // 16, down, across)


def quantize_nvfp4(
    x: Tensor,
    block: tuple[int, int],
    global_amax: Tensor,
    keys: Tensor | None,
    scales: BlockScales = "nearest",
    ends_e: Tensor | None = None,
    hadamard: bool = False,
) -> Quantized:
    """Implement ``reference.quantize_nvfp4``."""
    if is_empty(x, ends_e):
        return reference.quantize_nvfp4(x, block, global_amax, keys, scales, ends_e, hadamard)
    transposed = axis_of(block) == -2
    quantized, _ = _launch(
        x.mT if transposed else x,
        block[1] if transposed else block[0],
        global_amax,
        keys=keys,
        ends_e=ends_e,
        transposed=transposed,
        up=scales == "up",
        hadamard=hadamard,
    )
    return quantized.mT if transposed else quantized


def quantize_nvfp4_both(x: Tensor, global_amax: Tensor) -> tuple[Quantized, Quantized]:
    """Implement ``reference.quantize_nvfp4_both``."""
    if not x.numel():
        return reference.quantize_nvfp4_both(x, global_amax)
    along, across_codes = _launch(x, 16, global_amax, both=True)
    assert across_codes is not None
    return along, replace(along, codes=across_codes.mT, axis=-2)


def _launch(
    x: Tensor,
    height: int,
    global_amax: Tensor,
    *,
    keys: Tensor | None = None,
    ends_e: Tensor | None = None,
    transposed: bool = False,
    up: bool = False,
    hadamard: bool = False,
    both: bool = False,
) -> tuple[Quantized, Tensor | None]:
    """``x`` in blocks of ``height`` x 16 along its last axis, and with ``both`` the codes of its transpose."""
    x_BRC = matrices(x)
    num, rows, columns = x_BRC.shape
    x_stride, r_stride, c_stride = x_BRC.stride()
    codes = x.new_empty(*x.shape[:-1], -(-columns // 2), dtype=torch.uint8)
    across_codes = x.new_empty(*x.shape[:-2], columns, -(-rows // 2), dtype=torch.uint8) if both else None
    scales = x.new_empty(*x.shape[:-2], -(-rows // height), -(-columns // 16), dtype=torch.uint8)
    groups = 0 if ends_e is None else len(ends_e)
    if ends_e is None:
        levels: tuple[int, ...] = tuple(global_amax.shape)
    elif transposed:
        levels = (1, scales.shape[-1])
    else:
        levels = (scales.shape[-2], 1)
    decoders = x.new_empty(levels, dtype=torch.float32)
    # Numbers that lie side by side are read together: those of a row, or of a column of the caller's transpose.
    tile_rows, tile_columns, warps = (64, 64, 8) if transposed else (16, 64, 4)
    _nvfp4_kernel[(num * triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns),)](
        x=x_BRC,
        global_amax=global_amax.float().contiguous(),
        ends=ends_e,
        keys=None if keys is None else keys.contiguous(),
        codes=codes,
        across_codes=across_codes,
        scales=scales,
        decoders=decoders,
        rows=rows,
        columns=columns,
        x_stride=x_stride,
        r_stride=r_stride,
        c_stride=c_stride,
        amax_stride=int(global_amax.ndim > 0),
        key_rows=columns if transposed else rows,
        groups=groups,
        R=tile_rows,
        C=tile_columns,
        SQUARE=height == 16,
        BOTH=both,
        TRANSPOSED=transposed,
        KEYED=keys is not None,
        UP=up,
        HADAMARD=hadamard,
        MINUS=MINUS_SIGNS,
        STEPS=groups.bit_length(),
        COMPILED=is_compiled(),
        num_warps=warps,
    )
    quantized = Quantized(
        codes=codes,
        scales=scales.view(torch.float8_e4m3fn),
        fmt=E2M1,
        block=(height, 16),
        axis=-1,
        shape=tuple(x.shape),
        global_scale=decoders,
    )
    return quantized, across_codes
