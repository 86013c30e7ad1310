"""``y = x W^T`` under a recipe: forward and both products of backward, each with operands of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw.core.contracts import Precision, Rows


def linear(x: Tensor, weight: Tensor, precision: Precision, rows: Rows | None = None) -> Tensor:
    """Return ``x W^T`` in the dtype of ``x``; x ``(..., I)``, weight ``(O, I)``, ``rows`` about the flattened ones."""
    if not precision.by_pass:
        operand = precision.quantize(x, role="input", during="fprop")
        return F.linear(operand, precision.quantize(weight, role="weight", during="fprop"))
    ends, keys = (None, None) if rows is None else (rows.ends_e, rows.keys_R)
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, precision, ends, keys)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], len(weight))


def grouped_mm(a: Any, b: Any, ends_e: Tensor) -> Tensor:
    """Return the products of groups: ``a`` (R, I) with ``b`` (e, I, O), or, summing over rows, (O, R) with (R, I)."""
    if isinstance(a, Tensor):
        return F.grouped_mm(a, b, offs=ends_e)
    product: Tensor = a.grouped_mm(b, ends_e)
    return product


class _Linear(torch.autograd.Function):
    """Saves ``x`` as wgrad will need it, and the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, precision: Precision, ends_e: Tensor | None, keys_R: Tensor | None
    ) -> Tensor:
        rows = Rows(ends_e, keys_R)
        operand = precision.quantize(x, role="input", during="fprop", rows=rows)
        out: Tensor = operand @ precision.quantize(weight, role="weight", during="fprop").mT
        kept = precision.keep(x, operand, role="input", during="wgrad", rows=rows)
        ctx.save_for_backward(weight, ends_e, keys_R, *kept.tensors)
        ctx.precision, ctx.operand, ctx.dtype = precision, kept.operand, x.dtype
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends_e, keys_R, *tensors = ctx.saved_tensors
        precision: Precision = ctx.precision
        rows, grad_x, grad_weight = Rows(ends_e, keys_R), None, None
        if ctx.needs_input_grad[0]:
            operand = precision.quantize(grad, role="grad", during="dgrad", rows=rows)
            grad_x = (operand @ precision.quantize(weight, role="weight", during="dgrad")).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            operand = precision.quantize(grad, role="grad", during="wgrad", rows=rows)
            grad_weight = (operand.mT @ ctx.operand(tensors)).to(weight.dtype)
        return grad_x, grad_weight, None, None, None
