"""``a = w * silu(g) * u`` with ``[g, u] = h``: the routing weight is applied before the second GEMM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor) -> Tensor:
    """Return ``a_RF`` in the dtype of ``h_RH`` (H = 2F: gate, then up). ``weights_R`` is fp32."""
    gate, up = h_RH.chunk(2, dim=-1)
    return F.silu(gate) * up * weights_R.unsqueeze(-1).to(h_RH.dtype)


def weighted_swiglu_backward(grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``h_RH`` and ``weights_R`` (fp32), and ``a_RF`` recomputed from ``h_RH``.

    d silu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
    """
    gate, up = h_RH.chunk(2, dim=-1)
    silu = F.silu(gate)
    unweighted = silu * up
    grad_weights = torch.linalg.vecdot(grad_RF.float(), unweighted.float())
    weights = weights_R.unsqueeze(-1).to(h_RH.dtype)
    weighted_grad = grad_RF * weights
    grad_h = torch.empty_like(h_RH)
    grad_gate, grad_up = grad_h.chunk(2, dim=-1)
    torch.mul(weighted_grad, silu, out=grad_up)
    torch.mul(weighted_grad, up, out=grad_gate)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad_gate, gate))
    return grad_h, grad_weights, unweighted.mul_(weights)
