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

_PAIRS = 2048
"""Pairs that a program turns."""


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
    x, cos, sin, out, rows, length, heads, pairs, rest, batch_stride, token_stride, head_stride, table_stride, sign,
    NEIGHBOURS_IN: tl.constexpr, NEIGHBOURS_OUT: tl.constexpr, R: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
    BF16: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Turn R heads. NEIGHBOURS_IN: the numbers of a pair are neighbours in ``x``, NEIGHBOURS_OUT: in ``out``.

    Otherwise they are ``pairs`` apart there. REST: no fewer than ``rest``, the values of a head that are copied as they
    are; 0: there are none.
    """
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    p = tl.arange(0, P)[None, :]
    both = tl.arange(0, 2 * P)[None, :]
    inside = (row < rows) & (p < pairs)
    inside_both = (row < rows) & (both < 2 * pairs)
    token = row // heads
    head = row % heads
    sequence = token // length
    place = token % length
    angle = sequence * table_stride + place * pairs + p
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * sign  # -1: the rotation back, which is the gradient
    at = x + sequence * batch_stride + place * token_stride + head * head_stride
    if NEIGHBOURS_IN:
        first, second = tl.split(tl.reshape(_load(at + both, inside_both, BF16), (R, P, 2)))
    else:
        first = _load(at + p, inside, BF16)
        second = _load(at + pairs + p, inside, BF16)
    first_turned = first * c - second * s
    second_turned = second * c + first * s
    to = out + row * (2 * pairs + rest)
    if NEIGHBOURS_OUT:
        _store(to + both, tl.reshape(tl.join(first_turned, second_turned), (R, 2 * P)), inside_both, BF16, COMPILED)
    else:
        _store(to + p, first_turned, inside, BF16, COMPILED)
        _store(to + pairs + p, second_turned, inside, BF16, COMPILED)
    if REST > 0:
        other = tl.arange(0, REST)[None, :]
        inside_rest = (row < rows) & (other < rest)
        kept = _load(at + 2 * pairs + other, inside_rest, BF16)
        _store(to + 2 * pairs + other, kept, inside_rest, BF16, COMPILED)


def rotate(x_BSHd: Tensor, cos_BSp: Tensor, sin_BSp: Tensor, neighbours: bool, back: bool) -> Tensor:
    """Implement ``reference.rotate`` for fp32 and bf16."""
    if x_BSHd.stride(3) != 1:
        x_BSHd = x_BSHd.contiguous()
    out = x_BSHd.new_empty(x_BSHd.shape)
    batch, length, heads, width = x_BSHd.shape
    batch_stride, token_stride, head_stride, _ = x_BSHd.stride()
    rows = batch * length * heads
    pairs = cos_BSp.shape[-1]
    rest = width - 2 * pairs
    across = triton.next_power_of_2(pairs)
    heads_of_program = max(1, _PAIRS // across)
    if out.numel():
        _kernel[(triton.cdiv(rows, heads_of_program),)](
            x=x_BSHd,
            cos=cos_BSp.contiguous(),
            sin=sin_BSp.contiguous(),
            out=out,
            rows=rows,
            length=length,
            heads=heads,
            pairs=pairs,
            rest=rest,
            batch_stride=batch_stride,
            token_stride=token_stride,
            head_stride=head_stride,
            table_stride=length * pairs if len(cos_BSp) > 1 else 0,  # 0: one table for all sequences
            sign=-1.0 if back else 1.0,
            NEIGHBOURS_IN=neighbours and not back,
            NEIGHBOURS_OUT=neighbours and back,
            R=heads_of_program,
            P=across,
            REST=triton.next_power_of_2(rest) if rest else 0,
            BF16=x_BSHd.dtype is torch.bfloat16,
            COMPILED=is_compiled(),
        )
    return out
