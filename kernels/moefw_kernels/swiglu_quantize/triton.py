"""Triton kernel. A program computes one tile of ``a``: it reads gate and up once and writes codes and scales.

``a`` is rounded to bf16 where PyTorch's operations round it: after silu, after up, after the weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import as_bf16, casts_fp8, is_compiled
from moefw_kernels.quantize import Quantized, Scales, empty_rows, row_block
from moefw_kernels.quantize.triton.blocks import ROW_RULES, quantize_rows_tile
from moefw_kernels.swiglu.triton import silu

_ROWS = 32
"""Rows of a tile."""
_COLUMNS = 128
"""Columns of a tile: whole blocks of scales."""


@triton.jit
def _swiglu_kernel(
    h, weights, codes, scales, rows, columns, h_stride, largest,
    R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, RULE: tl.constexpr, COMPILED: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, C)
    r = (program // across * R + tl.arange(0, R).to(tl.int64))[:, None]
    c = (program % across * C + tl.arange(0, C).to(tl.int64))[None, :]
    inside = (r < rows) & (c < columns)
    gate = tl.load(h + r * h_stride + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + r * h_stride + columns + c, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + r, mask=r < rows, other=0.0)
    a = as_bf16(as_bf16(as_bf16(silu(gate, COMPILED), COMPILED) * up, COMPILED) * weight, COMPILED)
    code, scale = quantize_rows_tile(a, largest, B, RULE, CVT)
    tl.store(codes + r * columns + c, code, mask=inside)
    blocks = tl.cdiv(columns, B)
    block = (program % across * (C // B) + tl.arange(0, C // B).to(tl.int64))[None, :]
    tl.store(scales + r * blocks + block, scale, mask=(r < rows) & (block < blocks))


def swiglu_quantize(h_RH: Tensor, weights_R: Tensor, scales: Scales) -> Quantized:
    """Implement ``reference.swiglu_quantize``."""
    h_RH = h_RH.contiguous()
    rows = len(h_RH)
    columns = h_RH.shape[1] // 2
    quantized = empty_rows(rows, columns, scales=scales, device=h_RH.device)
    if quantized.codes.numel():
        _swiglu_kernel[(triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS),)](
            h=h_RH,
            weights=weights_R.contiguous(),
            codes=quantized.codes.view(torch.uint8),
            scales=quantized.scales if scales != "e8m0" else quantized.scales.view(torch.uint8),
            rows=rows,
            columns=columns,
            h_stride=h_RH.stride(0),
            largest=torch.finfo(h_RH.dtype).max,
            R=_ROWS,
            C=_COLUMNS,
            B=row_block(scales),
            RULE=ROW_RULES[scales],
            COMPILED=is_compiled(),
            CVT=casts_fp8(h_RH.device),
        )
    return quantized
