"""Triton kernel. A program reads a tile of tokens once and writes its codes and scales to all rows of these tokens."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import casts_fp8
from moefw_kernels.permute import RowMap
from moefw_kernels.quantize import Quantized, Scales, row_block
from moefw_kernels.quantize.triton.blocks import ROW_RULES, quantize_rows_tile

_TOKENS = 32
"""Tokens of a tile."""
_COLUMNS = 128
"""Columns of a tile: whole blocks of scales."""


@triton.jit
def _store_rows(row, c, block, code, scale, codes, scales, columns, blocks, codes_stride, scales_stride):
    """Write a tile to the rows ``row``, except where they are -1."""
    has_row = row >= 0
    tl.store(codes + row * codes_stride + c, code, mask=has_row & (c < columns))
    tl.store(scales + row * scales_stride + block, scale, mask=has_row & (block < blocks))


@triton.jit
def _permute_kernel(
    x, rows_of_token, padding, codes, scales, tokens, K, num_padding, columns,
    x_stride, codes_stride, scales_stride, largest,
    T: tl.constexpr, C: tl.constexpr, B: tl.constexpr, RULE: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    """Quantize the tokens, followed by ``num_padding`` tokens of zeros with one row each."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, C)
    blocks = tl.cdiv(columns, B)
    t = (program // across * T + tl.arange(0, T).to(tl.int64))[:, None]
    c = (program % across * C + tl.arange(0, C).to(tl.int64))[None, :]
    block = (program % across * (C // B) + tl.arange(0, C // B).to(tl.int64))[None, :]
    tile = tl.load(x + t * x_stride + c, mask=(t < tokens) & (c < columns), other=0.0).to(tl.float32)
    code, scale = quantize_rows_tile(tile, largest, B, RULE, CVT)
    for k in range(K):
        row = tl.load(rows_of_token + t * K + k, mask=t < tokens, other=-1).to(tl.int64)
        _store_rows(
            row=row, c=c, block=block, code=code, scale=scale, codes=codes, scales=scales,
            columns=columns, blocks=blocks, codes_stride=codes_stride, scales_stride=scales_stride,
        )  # fmt: skip
    if padding is not None:
        p = t - tokens
        row = tl.load(padding + p, mask=(p >= 0) & (p < num_padding), other=-1)
        _store_rows(
            row=row, c=c, block=block, code=code, scale=scale, codes=codes, scales=scales,
            columns=columns, blocks=blocks, codes_stride=codes_stride, scales_stride=scales_stride,
        )  # fmt: skip


def permute_quantize(x_TD: Tensor, rows: RowMap, scales: Scales, out: Quantized) -> None:
    """Implement ``reference.permute_quantize``."""
    if not out.codes.numel():
        return
    x_TD = x_TD.contiguous()
    row_TK = rows.row_TK.contiguous()
    tokens, columns = x_TD.shape
    num_padding = 0 if rows.padding is None else len(rows.padding)
    block_scales = out.scales if scales != "e8m0" else out.scales.view(torch.uint8)
    _permute_kernel[(triton.cdiv(tokens + num_padding, _TOKENS) * triton.cdiv(columns, _COLUMNS),)](
        x=x_TD,
        rows_of_token=row_TK,
        padding=rows.padding,
        codes=out.codes.view(torch.uint8),
        scales=block_scales,
        tokens=tokens,
        K=row_TK.shape[1],
        num_padding=num_padding,
        columns=columns,
        x_stride=x_TD.stride(0),
        codes_stride=out.codes.stride(0),
        scales_stride=block_scales.stride(0),
        largest=torch.finfo(x_TD.dtype).max,
        T=_TOKENS,
        C=_COLUMNS,
        B=row_block(scales),
        RULE=ROW_RULES[scales],
        CVT=casts_fp8(x_TD.device),
    )
