"""Triton kernels. Forward and backward read each input once and write only their results.

``LIMIT`` and ``ALPHA`` are those of the clamped form; None: plain SwiGLU. Numbers are rounded to bf16 where PyTorch's
operations round them. bf16 is loaded and stored as integers, because the interpreter's conversion reads subnormal
numbers wrongly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from moefw_kernels.casts import as_bf16, is_compiled
from moefw_kernels.swiglu.reference import Clamp

_ROWS = 8
"""Rows of a tile."""
_COLUMNS = 128
"""Columns of a tile of the activation."""


@triton.jit
def _one_and_exp_of_minus(x, COMPILED: tl.constexpr):
    """``1 + exp(-x)`` with CUDA's exp, as PyTorch does. The interpreter has only NumPy's."""
    if COMPILED:  # noqa: SIM108
        power = libdevice.exp(-x)
    else:
        power = tl.exp(-x)
    return 1.0 + power


@triton.jit
def silu(x, COMPILED: tl.constexpr):
    """``x / (1 + exp(-x))``."""
    return tl.div_rn(x, _one_and_exp_of_minus(x, COMPILED))


@triton.jit
def _sigmoid(x, COMPILED: tl.constexpr):
    """``1 / (1 + exp(-x))``."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), _one_and_exp_of_minus(x, COMPILED))


@triton.jit
def factors(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, COMPILED: tl.constexpr):
    """Argument of the sigmoid, the activated gate and its factor. NaN stays NaN where values are clamped."""
    if LIMIT is None:
        x = gate
        activated = as_bf16(silu(gate, COMPILED), COMPILED)
        factor = up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        x = as_bf16(gate * ALPHA, COMPILED)
        activated = as_bf16(gate * as_bf16(_sigmoid(x, COMPILED), COMPILED), COMPILED)
        factor = as_bf16(tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0, COMPILED)
    return x, activated, factor


@triton.jit
def _silu_slope(x, COMPILED: tl.constexpr):
    """``s = sigmoid(x)`` and ``1 + x * (1 - s)``, whose product is the slope of ``x * sigmoid(x)``."""
    s = _sigmoid(x, COMPILED)
    if COMPILED:  # noqa: SIM108
        # An FMA, as the compiler makes of PyTorch's kernel: with two roundings, the bits would differ.
        rest = tl.fma(x, 1.0 - s, 1.0)
    else:
        rest = 1.0 + x * (1.0 - s)
    return s, rest


@triton.jit
def backward_of_tile(dy, gate, up, weight, LIMIT: tl.constexpr, ALPHA: tl.constexpr, COMPILED: tl.constexpr):
    """Gradients of gate and up, and the activation without weights, of which ``dy`` is the weighted one's gradient."""
    x, activated, factor = factors(gate, up, LIMIT, ALPHA, COMPILED)
    weighted_dy = dy * weight
    s, rest = _silu_slope(x, COMPILED)
    grad_gate = as_bf16(weighted_dy * factor * s * rest, COMPILED)
    grad_up = as_bf16(weighted_dy * activated, COMPILED)
    if LIMIT is not None:
        grad_gate = tl.where(gate <= LIMIT, grad_gate, 0.0)
        grad_up = tl.where(tl.abs(up) <= LIMIT, grad_up, 0.0)
    return grad_gate, grad_up, as_bf16(activated * factor, COMPILED)


@triton.jit
def _load(at, inside):
    """Load bf16 numbers as fp32, 0 outside."""
    bits = tl.load(at, mask=inside, other=0.0).to(tl.int16, bitcast=True)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_bf16(at, x, inside):
    """Store fp32 numbers that are exact in bf16."""
    bits = x.to(tl.int32, bitcast=True) >> 16
    tl.store(at, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)


@triton.jit
def _forward_kernel(
    h, weights, a, rows, columns, h_stride,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, R: tl.constexpr, C: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``a`` in each program."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, C)
    r = program // across * R + tl.arange(0, R).to(tl.int64)
    c = (program % across * C + tl.arange(0, C).to(tl.int64))[None, :]
    weight = tl.load(weights + r, mask=r < rows, other=0.0)[:, None]
    r_R1 = r[:, None]
    inside = (r_R1 < rows) & (c < columns)
    gate = _load(h + r_R1 * h_stride + c, inside)
    up = _load(h + r_R1 * h_stride + columns + c, inside)
    _, activated, factor = factors(gate, up, LIMIT, ALPHA, COMPILED)
    unweighted = as_bf16(activated * factor, COMPILED)
    store_bf16(a + r_R1 * columns + c, as_bf16(unweighted * weight, COMPILED), inside)


@triton.jit
def _backward_kernel(
    grad, h, weights, grad_h, grad_weights, a, rows, columns, grad_stride, h_stride,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, R: tl.constexpr, C: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute R whole rows in each program, so no sum spans two. Products of two bf16 numbers are exact in fp32."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R).to(tl.int64)
    weight = tl.load(weights + r, mask=r < rows, other=0.0)[:, None]
    total = tl.zeros((R, C), tl.float32)
    r_R1 = r[:, None]
    for start in range(0, columns, C):
        c = (start + tl.arange(0, C)).to(tl.int64)[None, :]
        inside = (r_R1 < rows) & (c < columns)
        dy = _load(grad + r_R1 * grad_stride + c, inside)
        gate = _load(h + r_R1 * h_stride + c, inside)
        up = _load(h + r_R1 * h_stride + columns + c, inside)
        grad_gate, grad_up, unweighted = backward_of_tile(dy, gate, up, weight, LIMIT, ALPHA, COMPILED)
        total += dy * unweighted
        to = grad_h + r_R1 * 2 * columns + c
        store_bf16(to, grad_gate, inside)
        store_bf16(to + columns, grad_up, inside)
        store_bf16(a + r_R1 * columns + c, as_bf16(unweighted * weight, COMPILED), inside)
    tl.store(grad_weights + r, tl.sum(total, 1), mask=r < rows)


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Implement ``reference.weighted_swiglu`` for bf16."""
    h_RH = _along_rows(h_RH)
    rows = len(h_RH)
    columns = h_RH.shape[1] // 2
    limit, alpha = in_bf16(clamp)
    a_RF = h_RH.new_empty(rows, columns)
    if a_RF.numel():
        _forward_kernel[(triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS),)](
            h=h_RH,
            weights=weights_R.contiguous(),
            a=a_RF,
            rows=rows,
            columns=columns,
            h_stride=h_RH.stride(0),
            LIMIT=limit,
            ALPHA=alpha,
            R=_ROWS,
            C=_COLUMNS,
            COMPILED=is_compiled(),
        )
    return a_RF


def weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``reference.weighted_swiglu_backward`` for bf16."""
    grad_RF = _along_rows(grad_RF)
    h_RH = _along_rows(h_RH)
    rows, columns = grad_RF.shape
    limit, alpha = in_bf16(clamp)
    grad_h = h_RH.new_empty(rows, 2 * columns)
    a_RF = h_RH.new_empty(rows, columns)
    grad_weights = h_RH.new_empty(rows, dtype=torch.float32)
    if rows:
        _backward_kernel[(triton.cdiv(rows, _ROWS),)](
            grad=grad_RF,
            h=h_RH,
            weights=weights_R.contiguous(),
            grad_h=grad_h,
            grad_weights=grad_weights,
            a=a_RF,
            rows=rows,
            columns=columns,
            grad_stride=grad_RF.stride(0),
            h_stride=h_RH.stride(0),
            LIMIT=limit,
            ALPHA=alpha,
            R=_ROWS,
            C=_COLUMNS,
            COMPILED=is_compiled(),
        )
    return grad_h, grad_weights, a_RF


@cache
def in_bf16(clamp: Clamp | None) -> tuple[float | None, float | None]:
    """``LIMIT`` and ``ALPHA`` of the kernels.

    PyTorch clamps bf16 values to a limit rounded to bf16, and multiplies by an ``alpha`` that it keeps in fp32.
    """
    if clamp is None:
        return None, None
    limit, alpha = clamp
    return torch.tensor(limit, device="cpu").bfloat16().item(), alpha


def _along_rows(x_RC: Tensor) -> Tensor:
    """``x`` with contiguous rows, of any row stride."""
    return x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
