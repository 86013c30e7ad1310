"""SwiGLU with the routing weight folded in; on a GPU one kernel for forward, one for backward. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.swiglu import reference
from moefw_kernels.swiglu.reference import Clamp, swiglu

__all__ = ["Clamp", "swiglu", "weighted_swiglu", "weighted_swiglu_backward"]


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Return ``a_RF = w * silu(g) * u`` in the dtype of ``h_RH`` (H = 2F: gate g, then up u); ``weights_R`` is fp32.

    With ``clamp = (limit, alpha)``: ``w * g' * sigmoid(alpha * g') * (u' + 1)``, with ``g' = min(g, limit)`` and
    ``u' = min(max(u, -limit), limit)`` (gpt-oss, arXiv 2508.10925).

    Differentiable. For bf16 on a GPU without autograd, one kernel gives the same bits.
    """
    if not _takes_kernel(h_RH, weights_R):
        return reference.weighted_swiglu(h_RH, weights_R, clamp)
    from moefw_kernels.swiglu import triton

    return triton.weighted_swiglu(h_RH, weights_R, clamp)


def weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``h_RH`` and ``weights_R`` (fp32), and ``a_RF`` recomputed from ``h_RH``.

    The first and the last are in the dtype of ``h_RH``. For bf16 on a GPU, one kernel gives the same bits for these
    two, and sums the gradient of the weights over F in another, fixed order.
    """
    if not _takes_kernel(h_RH, weights_R, grad_RF):
        return reference.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    from moefw_kernels.swiglu import triton

    return triton.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)


def _takes_kernel(h_RH: Tensor, weights_R: Tensor, *grad_RF: Tensor) -> bool:
    """Return whether the kernels take these tensors; a compiler, a subclass and autograd need PyTorch operations."""
    given = (h_RH, weights_R, *grad_RF)
    if not all(type(tensor) is Tensor and takes_kernels(tensor) for tensor in given) or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    if h_RH.ndim != 2 or h_RH.shape[1] % 2 or weights_R.shape != h_RH.shape[:1]:
        return False
    if any(grad.shape != (len(h_RH), h_RH.shape[1] // 2) for grad in grad_RF):
        return False
    bf16 = all(tensor.dtype is torch.bfloat16 for tensor in (h_RH, *grad_RF))
    return bf16 and weights_R.dtype is torch.float32
