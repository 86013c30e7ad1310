"""``y = x W^T`` under a recipe: forward and both products of backward, each with operands of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw.core.contracts import Precision


def linear(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """Return ``x W^T`` in the dtype of ``x``; x ``(..., I)``, weight ``(O, I)``."""
    if not precision.by_pass:
        operand = precision.quantize(x, role="input", during="fprop")
        return F.linear(operand, precision.quantize(weight, role="weight", during="fprop"))
    out: Tensor = _Linear.apply(x, weight, precision)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """Saves ``x`` as wgrad will need it, and the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
        operand = precision.quantize(x, role="input", during="fprop")
        out = F.linear(operand, precision.quantize(weight, role="weight", during="fprop"))
        rows, used = (tensor.reshape(-1, x.shape[-1]) for tensor in (x, operand))
        kept = precision.keep(rows, used, role="input", during="wgrad")
        ctx.save_for_backward(weight, *kept.tensors)
        ctx.precision, ctx.operand, ctx.dtype = precision, kept.operand, x.dtype
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        precision: Precision = ctx.precision
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            operand = precision.quantize(grad, role="grad", during="dgrad")
            grad_x = (operand @ precision.quantize(weight, role="weight", during="dgrad")).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            rows = precision.quantize(grad.reshape(-1, grad.shape[-1]), role="grad", during="wgrad")
            grad_weight = (rows.t() @ ctx.operand(tensors)).to(weight.dtype)
        return grad_x, grad_weight, None
