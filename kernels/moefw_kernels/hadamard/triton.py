"""Hadamard transform as a Triton kernel: one read, one write, sixteen numbers in a row of registers.

``transformed`` is also part of the kernels that quantize what is transformed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import as_bf16, is_compiled
from moefw_kernels.hadamard.reference import SIGNS

MINUS: Final = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)
"""Bit mask of the negative signs. A tensor of signs would have to be copied to the device."""
GROUPS: Final = 64
"""Groups of 16 numbers that a program transforms."""


@triton.jit
def transformed(values, MINUS: tl.constexpr):
    """Sixteen numbers in each row of ``values`` (G, 16), fp32, after the transform; not rounded.

    The bits of ``MINUS`` mark those that change their sign.
    """
    G: tl.constexpr = values.shape[0]
    lane = tl.arange(0, 16).to(tl.int64)
    values = values * (1 - 2 * ((MINUS >> lane) & 1)).to(tl.float32)[None, :]
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(values, (G, 8, 2)))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (G, 16))
    return values * 0.25


@triton.jit
def _hadamard_kernel(
    x, out, groups, rows, per_row, x_stride, r_stride, c_stride,
    G: tl.constexpr, MINUS: tl.constexpr, AS_BITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Transform ``groups`` groups of 16, ``per_row`` in each of a matrix's ``rows`` rows; ``out`` is contiguous."""
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G).to(tl.int64)
    row = group // per_row
    start = row // rows * x_stride + row % rows * r_stride + group % per_row * 16 * c_stride
    lane = tl.arange(0, 16).to(tl.int64)
    inside = (group < groups)[:, None]
    values = tl.load(x + start[:, None] + lane[None, :] * c_stride, mask=inside, other=0.0).to(tl.float32)
    values = transformed(values, MINUS)
    to = out + group[:, None] * 16 + lane[None, :]
    if AS_BITS:
        bits = as_bf16(values, COMPILED).to(tl.int32, bitcast=True) >> 16
        tl.store(to, bits.to(tl.int16), mask=inside)
    else:
        tl.store(to, values, mask=inside)


def hadamard(x: Tensor) -> Tensor:
    """Implement ``reference.hadamard``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = x.numel() // 16
    if groups:
        x_BRC = x.reshape(-1, *x.shape[-2:])
        x_stride, r_stride, c_stride = x_BRC.stride()
        is_bf16 = x.dtype is torch.bfloat16
        _hadamard_kernel[(triton.cdiv(groups, GROUPS),)](
            x=x_BRC,
            out=out.view(torch.int16) if is_bf16 else out,
            groups=groups,
            rows=x.shape[-2],
            per_row=x.shape[-1] // 16,
            x_stride=x_stride,
            r_stride=r_stride,
            c_stride=c_stride,
            G=GROUPS,
            MINUS=MINUS,
            AS_BITS=is_bf16,
            COMPILED=is_compiled(),
        )
    return out
