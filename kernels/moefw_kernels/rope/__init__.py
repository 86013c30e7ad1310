"""Rotation of queries and keys by the angles of their positions; on a GPU one kernel each way. See README.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.rope import reference

_DTYPES = (torch.float32, torch.bfloat16)


def rotate(x_BSHd: Tensor, cos_BSp: Tensor, sin_BSp: Tensor, *, neighbours: bool) -> Tensor:
    """``x`` (B, S, H, d), of which the first 2p values of a head are turned, in its dtype; the others are as they were.

    ``cos`` and ``sin`` (1 or B, S, p), fp32: those of the angle of each token and pair; p is at most d/2.
    ``neighbours``: pairs are (2i, 2i + 1), else (i, i + p); they come out as (i, i + p). Differentiable by ``x``. It is
    the operator ``moefw::rotate``.
    """
    out: Tensor = _Rotate.apply(x_BSHd, cos_BSp, sin_BSp, neighbours)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        out: Tensor = torch.ops.moefw.rotate(x, cos, sin, neighbours, False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.moefw.rotate(grad, *ctx.saved_tensors, ctx.neighbours, True), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool, back: bool) -> Tensor:
    if not takes_kernels(x) or x.dtype not in _DTYPES:
        return reference.rotate(x, cos, sin, neighbours, back)
    from moefw_kernels.rope import triton

    return triton.rotate(x, cos, sin, neighbours, back)


_OPERATORS = torch.library.Library("moefw", "FRAGMENT")
_OPERATORS.define("rotate(Tensor x, Tensor cos, Tensor sin, bool neighbours, bool back) -> Tensor")
_OPERATORS.impl("rotate", _rotate, "CompositeExplicitAutograd")
_OPERATORS.impl("rotate", lambda x, *others: x.new_empty(x.shape), "Meta")
