"""Triton kernels. A program adds up some columns of some tokens' rows, in fp32 and in the order of the choices.

bf16 is loaded and stored as integers, because the interpreter reads subnormal numbers wrongly and truncates.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefw_kernels.casts import as_bf16, is_compiled

_SUMS = 2048
"""Sums of a program: of fewer tokens if rows are wide."""
_COLUMNS = 256
"""Most columns of rows that a program adds up."""
_ROWS = 1024
"""Rows that are looked at together."""


@triton.jit
def _gather_sum_kernel(
    rows, row_of_token, out, tokens, columns, stride,
    T: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BF16: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Leave out a choice whose row is -1. The loop is unrolled, so that loads of all choices are under way at once."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, C)
    t = (program // across * T + tl.arange(0, T).to(tl.int64))[:, None]
    c = (program % across * C + tl.arange(0, C).to(tl.int64))[None, :]
    total = tl.zeros((T, C), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of_token + t * K + k, mask=t < tokens, other=-1).to(tl.int64)
        values = tl.load(rows + row * stride + c, mask=(row >= 0) & (c < columns), other=0)
        if BF16:
            values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        total += values.to(tl.float32)
    if BF16:
        bits = as_bf16(total, COMPILED).to(tl.int32, bitcast=True) >> 16
        tl.store(out + t * columns + c, bits.to(tl.int16), mask=(t < tokens) & (c < columns))
    else:
        tl.store(out + t * columns + c, total, mask=(t < tokens) & (c < columns))


@triton.jit
def _tokens_and_rows_kernel(order, tokens, rows, length, num_rows, k, ROWS: tl.constexpr):
    """Store the token of each of some rows, and the rows of their choices.

    ``order`` lists first the choices that have a row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.load(order + row, mask=row < length, other=0)
    tl.store(tokens + row, choice // k, mask=row < num_rows)
    tl.store(rows + choice, tl.where(row < num_rows, row, -1), mask=row < length)


def gather_sum(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Implement ``reference.gather_sum`` for bf16, fp16 and fp32; ``row_TK`` is -1 for a dropped choice."""
    tokens, choices = row_TK.shape
    columns = rows_RD.shape[1]
    if rows_RD.stride(1) != 1:
        rows_RD = rows_RD.contiguous()
    out_TD = rows_RD.new_empty(tokens, columns)
    if out_TD.numel():
        is_bf16 = rows_RD.dtype is torch.bfloat16
        columns_of_program = min(_COLUMNS, triton.next_power_of_2(columns))
        tokens_of_program = _SUMS // columns_of_program
        programs = triton.cdiv(tokens, tokens_of_program) * triton.cdiv(columns, columns_of_program)
        _gather_sum_kernel[(programs,)](
            rows=rows_RD.view(torch.int16) if is_bf16 else rows_RD,
            row_of_token=row_TK.contiguous(),
            out=out_TD.view(torch.int16) if is_bf16 else out_TD,
            tokens=tokens,
            columns=columns,
            stride=rows_RD.stride(0),
            T=tokens_of_program,
            C=columns_of_program,
            K=choices,
            BF16=is_bf16,
            COMPILED=is_compiled(),
        )
    return out_TD


def tokens_and_rows(order_N: Tensor, num_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Implement ``reference.tokens_and_rows``."""
    order_N = order_N.contiguous()
    length = len(order_N)
    token_R = order_N.new_empty(num_rows)
    row_N = torch.empty_like(order_N)
    if length:
        _tokens_and_rows_kernel[(triton.cdiv(length, _ROWS),)](
            order=order_N,
            tokens=token_R,
            rows=row_N,
            length=length,
            num_rows=num_rows,
            k=k,
            ROWS=_ROWS,
        )
    return token_R, row_N
