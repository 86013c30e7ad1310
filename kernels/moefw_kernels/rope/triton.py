"""Triton kernel of the rotation: each program turns heads of some tokens, whose values it reads and writes once.

bf16 is loaded and stored as integers, because the interpreter's conversion reads subnormal numbers wrongly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import as_bf16, is_compiled

_VALUES = 2048
"""Pairs of a program."""


@triton.jit
def _load(at, inside, BF16: tl.constexpr):
    if BF16:
        bits = tl.load(at, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def _store(at, x, inside, BF16: tl.constexpr, COMPILED: tl.constexpr):
    if BF16:
        bits = as_bf16(x, COMPILED).to(tl.int32, bitcast=True) >> 16
        tl.store(at, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(at, x, mask=inside)


@triton.jit
def _kernel(
    x, cos, sin, out, rows, length, heads, pairs, batch_stride, token_stride, head_stride, table_stride, sign,
    TAKEN: tl.constexpr, GIVEN: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    BF16: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Turn R heads. Pairs are neighbours in ``x`` if ``TAKEN``, and in ``out`` if ``GIVEN``; else half a head apart."""
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    p, both = tl.arange(0, P)[None, :], tl.arange(0, 2 * P)[None, :]
    inside, inside_both = (row < rows) & (p < pairs), (row < rows) & (both < 2 * pairs)
    token, head = row // heads, row % heads
    sequence, place = token // length, token % length
    angle = sequence * table_stride + place * pairs + p
    c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0) * sign
    at = x + sequence * batch_stride + place * token_stride + head * head_stride
    if TAKEN:
        first, second = tl.split(tl.reshape(_load(at + both, inside_both, BF16), (R, P, 2)))
    else:
        first, second = _load(at + p, inside, BF16), _load(at + pairs + p, inside, BF16)
    turned, other = first * c - second * s, second * c + first * s
    to = out + row * 2 * pairs
    if GIVEN:
        _store(to + both, tl.reshape(tl.join(turned, other), (R, 2 * P)), inside_both, BF16, COMPILED)
    else:
        _store(to + p, turned, inside, BF16, COMPILED)
        _store(to + pairs + p, other, inside, BF16, COMPILED)


def rotate(x_BSHd: Tensor, cos_BSp: Tensor, sin_BSp: Tensor, neighbours: bool, back: bool) -> Tensor:
    """Implement ``reference.rotate`` for fp32 and bf16."""
    x_BSHd = x_BSHd if x_BSHd.stride(3) == 1 else x_BSHd.contiguous()
    cos_BSp, sin_BSp = cos_BSp.contiguous(), sin_BSp.contiguous()
    out = x_BSHd.new_empty(x_BSHd.shape)
    batch, length, heads, width = x_BSHd.shape
    rows, pairs, across = batch * length * heads, width // 2, triton.next_power_of_2(width // 2)
    each = max(1, _VALUES // across)
    if out.numel():
        _kernel[(triton.cdiv(rows, each),)](
            x_BSHd, cos_BSp, sin_BSp, out, rows, length, heads, pairs, *x_BSHd.stride()[:3],
            length * pairs if len(cos_BSp) > 1 else 0, -1.0 if back else 1.0,
            neighbours and not back, neighbours and back, each, across,
            x_BSHd.dtype is torch.bfloat16, is_compiled(),
        )  # fmt: skip
    return out
