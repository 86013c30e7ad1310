"""``a = w * silu(g) * u`` with ``[g, u] = h``: the routing weight is applied before the second GEMM, in fp32.

With ``clamp = (limit, alpha)``, in place of ``silu(g) * u``: ``g' * sigmoid(alpha * g') * (u' + 1)``, where
``g' = min(g, limit)`` and ``u' = min(max(u, -limit), limit)`` (gpt-oss, arXiv 2508.10925).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Clamp = tuple[float, float]
"""``limit`` and ``alpha`` of the clamped form."""


def swiglu(gate_RF: Tensor, up_RF: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Product of gate and up, without weights, in their dtype."""
    if clamp is None:
        return F.silu(gate_RF) * up_RF
    _, activated, factor = _clamped(gate_RF, up_RF, clamp)
    return activated * factor


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> Tensor:
    """``a_RF`` in the dtype of ``h_RH`` (H = 2F: gate, then up). ``weights_R`` is fp32."""
    gate, up = h_RH.chunk(2, dim=-1)
    return (swiglu(gate, up, clamp) * weights_R.unsqueeze(-1)).to(h_RH.dtype)


def weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h_RH`` and ``weights_R`` (fp32), and ``a_RF`` recomputed from ``h_RH``.

    d silu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g))). It is also the slope of ``g * sigmoid(alpha * g)``, at
    ``alpha * g``. Where a value is clamped, its gradient is zero.
    """
    gate, up = h_RH.chunk(2, dim=-1)
    if clamp is None:
        x = gate
        activated = F.silu(gate)
        factor = up
    else:
        x, activated, factor = _clamped(gate, up, clamp)
    unweighted = activated * factor
    grad_weights = torch.linalg.vecdot(grad_RF.float(), unweighted.float())
    weights_R1 = weights_R.unsqueeze(-1)
    weighted_grad = grad_RF * weights_R1
    grad_h = torch.empty_like(h_RH)
    grad_gate, grad_up = grad_h.chunk(2, dim=-1)
    torch.mul(weighted_grad, activated, out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(weighted_grad * factor, x.to(weighted_grad.dtype)))
    if clamp is not None:
        grad_gate.masked_fill_(gate.clamp(max=clamp[0]) != gate, 0.0)
        grad_up.masked_fill_(up.clamp(-clamp[0], clamp[0]) != up, 0.0)
    return grad_h, grad_weights, (unweighted * weights_R1).to(h_RH.dtype)


def _clamped(gate_RF: Tensor, up_RF: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor, Tensor]:
    """Argument of the sigmoid, the activated gate, and the factor that is made of up."""
    limit, alpha = clamp
    gate = gate_RF.clamp(max=limit)
    x = gate * alpha
    return x, gate * torch.sigmoid(x), up_RF.clamp(-limit, limit) + 1.0
