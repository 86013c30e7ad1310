"""Triton kernels. A program computes one output tile, an iteration of its loop one block of 128 of the summed axis.

Tensor cores sum the products of one block. These sums are added in fp32 registers, scaled before the addition if
blocks have scales (``BLOCKS``), else once at the end. So Hopper's FP8 tensor cores, which accumulate with 14 bits
(arXiv 2412.19437, section 3.3.2), never sum more than 128 products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.quantize import Quantized

_TILES = [(128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4), (128, 64, 4, 4)]
"""Rows and columns of an output tile, warps, load stages. A stage takes at most 32 KiB of the SM's 227."""


def _tuned(kernel, sizes):
    """Kernel, autotuned over tiles for its sizes. The interpreter has no clock and takes the first tile."""
    tiles = _TILES[:1] if triton.knobs.runtime.interpret else _TILES
    configs = [triton.Config({"BM": m, "BN": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in tiles]
    return triton.autotune(configs, key=sizes)(kernel)


@triton.jit
def _group_of_tile(ends, tile, groups, G: tl.constexpr, BM: tl.constexpr):
    """Group of a tile of at most BM rows, the tile's first row, and the end of the group."""
    g = tl.arange(0, G)
    stops = tl.load(ends + g, mask=g < groups, other=0)
    starts = tl.load(ends + g - 1, mask=(g > 0) & (g < groups), other=0)
    tiles = tl.where(g < groups, tl.cdiv(stops - starts, BM), 0)
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    before = tl.sum(tl.where(g < group, tiles, 0))
    first = tl.sum(tl.where(g == group, starts, 0)) + (tile - before) * BM
    return group, first, tl.sum(tl.where(g == group, stops, 0))


@triton.jit
def _rows_kernel(
    a, a_scales, b, b_scales, ends, out, groups, N, K,
    a_scale_row, a_scale_block, b_scale_group, b_scale_column, b_scale_block,
    BLOCKS: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Multiply rows of K by (groups, N, K). Columns vary fastest, so that a group's weights stay in L2 for its rows."""
    across = N // BN
    group, first, stop = _group_of_tile(ends, tl.program_id(0) // across, groups, G, BM)
    if group >= groups:
        return
    n0 = tl.program_id(0) % across * BN
    m = first + tl.arange(0, BM)
    rows = tl.minimum(m, stop - 1).to(tl.int64)
    group = group.to(tl.int64)
    k = tl.arange(0, 128)
    a += rows[:, None] * K + k[None, :]
    b += (group * N + n0 + tl.arange(0, BN))[None, :] * K + k[:, None]
    a_scales += rows * a_scale_row
    b_scales += group * b_scale_group + n0 // 128 * b_scale_column
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(0, K // 128):
        products = tl.dot(tl.load(a), tl.load(b))
        if BLOCKS:
            scale = tl.load(a_scales + block * a_scale_block) * tl.load(b_scales + block * b_scale_block)
            products *= scale[:, None]
        acc += products
        a += 128
        b += 128
    if not BLOCKS:
        acc *= (tl.load(a_scales) * tl.load(b_scales))[:, None]
    at = out + m.to(tl.int64)[:, None] * N + (n0 + tl.arange(0, BN))[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < stop)[:, None])


@triton.jit
def _weight_gradient_kernel(
    a, a_scales, b, b_scales, ends, out, M, N, K,
    a_scale_row, a_scale_block, b_scale_column, b_scale_block,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Multiply (M, K) by (N, K) to (groups, M, N). Along K a group is whole blocks, or without them multiples of 16."""
    ROWS: tl.constexpr = 128 if BLOCKS else 16
    across = N // BN
    tiles = M // BM * across
    group = tl.program_id(0) // tiles
    m0 = tl.program_id(0) % tiles // across * BM
    n0 = tl.program_id(0) % across * BN
    start = tl.multiple_of(tl.load(ends + group - 1, mask=group > 0, other=0), ROWS)
    stop = tl.multiple_of(tl.load(ends + group), ROWS)
    m = (m0 + tl.arange(0, BM)).to(tl.int64)
    n = (n0 + tl.arange(0, BN)).to(tl.int64)
    k = start + tl.arange(0, 128)
    a += m[:, None] * K + k[None, :]
    b += n[None, :] * K + k[:, None]
    a_scales += m * a_scale_row
    b_scales += n * b_scale_column
    acc = tl.zeros((BM, BN), tl.float32)
    if BLOCKS:
        for block in range(start // 128, stop // 128):
            a_scale = tl.load(a_scales + block * a_scale_block)
            b_scale = tl.load(b_scales + block * b_scale_block)
            acc += tl.dot(tl.load(a), tl.load(b)) * a_scale[:, None] * b_scale[None, :]
            a += 128
            b += 128
    else:
        for first in range(start, stop, 128):
            inside = first + tl.arange(0, 128) < stop
            acc += tl.dot(tl.load(a, mask=inside[None, :], other=0.0), tl.load(b, mask=inside[:, None], other=0.0))
            a += 128
            b += 128
        a_scale = tl.load(a_scales + start * a_scale_block, mask=start < stop, other=0.0)
        b_scale = tl.load(b_scales + start * b_scale_block, mask=start < stop, other=0.0)
        acc *= a_scale[:, None] * b_scale[None, :]
    at = out + (group.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty))


# The number of rows is not a key, because it changes at every step.
_rows_by_weights = _tuned(_rows_kernel, ["N", "K", "BLOCKS"])
_weight_gradient = _tuned(_weight_gradient_kernel, ["M", "N", "BLOCKS"])


def blockwise_grouped_mm(a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Implement ``reference.grouped_mm``, except that rows past the last end are not written."""
    return _grouped_mm(a, b, ends_e, out_dtype, blocks=True)


def tensorwise_grouped_mm(a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Implement ``reference.grouped_mm``, except that rows past the last end are not written."""
    return _grouped_mm(a, b, ends_e, out_dtype, blocks=False)


def _grouped_mm(a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype, *, blocks: bool) -> Tensor:
    if len(b.shape) == 3:
        return _multiply_rows(a, b, ends_e, out_dtype, blocks=blocks)
    return _sum_over_rows(a, b, ends_e, out_dtype, blocks=blocks)


def _multiply_rows(a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype, *, blocks: bool) -> Tensor:
    """Products of rows (R, I) and weights (e, I, O), ``(R, O)``."""
    num_rows, k = a.shape
    n = b.shape[-1]
    groups = len(ends_e)
    out_RO = a.codes.new_empty(num_rows, n, dtype=out_dtype)
    if not out_RO.numel():
        return out_RO
    a_row, a_block = a.scales.stride()
    b_group, b_block, b_column = b.scales.stride()

    def grid(tile: Mapping[str, int]) -> tuple[int]:
        # The host does not know the sizes of groups: each adds at most one partly filled tile of rows.
        return ((triton.cdiv(num_rows, tile["BM"]) + groups) * (n // tile["BN"]),)

    _rows_by_weights[grid](
        a=a.codes,
        a_scales=a.scales,
        b=b.codes,
        b_scales=b.scales,
        ends=ends_e,
        out=out_RO,
        groups=groups,
        N=n,
        K=k,
        a_scale_row=a_row,
        a_scale_block=a_block,
        b_scale_group=b_group,
        b_scale_column=b_column if blocks else 0,  # without blocks, one scale for all columns
        b_scale_block=b_block,
        BLOCKS=blocks,
        G=triton.next_power_of_2(groups),
    )
    return out_RO


def _sum_over_rows(a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype, *, blocks: bool) -> Tensor:
    """Products of (O, R) and (R, I) over each group of the R rows, ``(e, O, I)``."""
    m, num_rows = a.shape
    n = b.shape[-1]
    groups = len(ends_e)
    out_eOI = a.codes.new_empty(groups, m, n, dtype=out_dtype)
    if not out_eOI.numel():
        return out_eOI
    a_row, a_block = a.scales.stride()
    b_block, b_column = b.scales.stride()
    _weight_gradient[lambda tile: (groups * (m // tile["BM"]) * (n // tile["BN"]),)](
        a=a.codes,
        a_scales=a.scales,
        b=b.codes,
        b_scales=b.scales,
        ends=ends_e,
        out=out_eOI,
        M=m,
        N=n,
        K=num_rows,
        # Without blocks, the scale of a group is the same for all rows of ``a`` and all columns of ``b``.
        a_scale_row=a_row if blocks else 0,
        a_scale_block=a_block,
        b_scale_column=b_column if blocks else 0,
        b_scale_block=b_block,
        BLOCKS=blocks,
    )
    return out_eOI
