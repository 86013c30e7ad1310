"""RMSNorm with a hand-written gradient: few passes; saves the input, the weight and one scale a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.devices import takes_kernels


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) normalised over its last dimension and scaled, in its own dtype. Differentiable.

    A compiler fuses the passes itself. In that of torch 2.11, the gradient of a Function's output is zero if two
    operations in its forward return that tensor.
    """
    if takes_kernels(x) or torch.compiler.is_compiling():
        return F.rms_norm(x, weight_D.shape, weight_D.to(x.dtype), eps)
    out: Tensor = _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x)).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        out: Tensor = (x * scale.to(x.dtype)).mul_(weight_D.to(x.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """With n = x s: dx = s (g w - n mean(g w n)), dw = sum(g n)."""
        x, weight_D, scale = ctx.saved_tensors
        normed = x * scale.to(x.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0, dtype=_wide(x)).to(weight_D.dtype)
        weighted = grad * weight_D.to(x.dtype)
        mean = torch.linalg.vecdot(weighted, normed).unsqueeze(-1).div_(x.shape[-1])
        return weighted.sub_(normed.mul_(mean)).mul_(scale.to(x.dtype)), grad_weight, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
