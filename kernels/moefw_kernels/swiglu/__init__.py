"""SwiGLU with the routing weight folded in; on a GPU one kernel for forward, one for backward. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from moefw_kernels.devices import takes_kernels
from moefw_kernels.swiglu import blocks, reference
from moefw_kernels.swiglu.reference import Clamp, swiglu

__all__ = ["Clamp", "swiglu", "weighted_swiglu", "weighted_swiglu_backward"]


def weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None) -> Tensor:
    """``a_RF = w * silu(g) * u`` in the dtype of ``h_RH`` (H = 2F: gate g, then up u); ``weights_R`` is fp32.

    With ``clamp = (limit, alpha)``: ``w * g' * sigmoid(alpha * g') * (u' + 1)``, with ``g' = min(g, limit)`` and
    ``u' = min(max(u, -limit), limit)`` (gpt-oss, arXiv 2508.10925).

    Differentiable. Without autograd it is the operator ``moefw::weighted_swiglu``, for bf16 on a GPU one kernel that
    gives the same bits.
    """
    if not _is_operator(h_RH, weights_R):
        return reference.weighted_swiglu(h_RH, weights_R, clamp)
    a_RF: Tensor = torch.ops.moefw.weighted_swiglu(h_RH, weights_R, clamp)
    return a_RF


def weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h_RH`` and ``weights_R`` (fp32), and ``a_RF`` recomputed from ``h_RH``.

    The first and the last are in the dtype of ``h_RH``. Without autograd it is the operator
    ``moefw::weighted_swiglu_backward``. For bf16 on a GPU, one kernel gives the same bits for these two, and sums the
    gradient of the weights over F in another, fixed order.
    """
    if not _is_operator(h_RH, weights_R, grad_RF):
        return reference.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    grad_h, grad_weights, a_RF = torch.ops.moefw.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    return grad_h, grad_weights, a_RF


def _is_operator(h_RH: Tensor, weights_R: Tensor, *grad_RF: Tensor) -> bool:
    """Whether the operators take these tensors; a compiler, a subclass and autograd need PyTorch operations."""
    tensors = (h_RH, weights_R, *grad_RF)
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    # A fake tensor is a subclass that operators take: their implementation for "Meta" serves it.
    if active_fake_mode() is None and any(type(tensor) is not Tensor for tensor in tensors):
        return False
    if h_RH.ndim != 2 or h_RH.shape[1] % 2:
        return False
    rows, width = h_RH.shape
    return weights_R.shape == (rows,) and all(grad.shape == (rows, width // 2) for grad in grad_RF)


def _takes_kernel(h_RH: Tensor, weights_R: Tensor, *grad_RF: Tensor) -> bool:
    if not takes_kernels(h_RH) or weights_R.dtype is not torch.float32:
        return False
    return all(tensor.dtype is torch.bfloat16 for tensor in (h_RH, *grad_RF))


def _weighted_swiglu(h_RH: Tensor, weights_R: Tensor, clamp: Sequence[float] | None) -> Tensor:
    if not _takes_kernel(h_RH, weights_R):
        return blocks.weighted_swiglu(h_RH, weights_R, _pair(clamp))
    from moefw_kernels.swiglu import triton

    return triton.weighted_swiglu(h_RH, weights_R, _pair(clamp))


def _weighted_swiglu_backward(
    grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Sequence[float] | None
) -> tuple[Tensor, Tensor, Tensor]:
    if not _takes_kernel(h_RH, weights_R, grad_RF):
        return blocks.weighted_swiglu_backward(grad_RF, h_RH, weights_R, _pair(clamp))
    from moefw_kernels.swiglu import triton

    return triton.weighted_swiglu_backward(grad_RF, h_RH, weights_R, _pair(clamp))


def _pair(clamp: Sequence[float] | None) -> Clamp | None:
    return None if clamp is None else (clamp[0], clamp[1])


def _backward_results(grad_RF: Tensor, h_RH: Tensor, weights_R: Tensor, clamp: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Results of ``weighted_swiglu_backward`` without values, for tensors without memory."""
    grad_weights = h_RH.new_empty(len(h_RH), dtype=torch.float32)
    return h_RH.new_empty(h_RH.shape), grad_weights, h_RH.new_empty(grad_RF.shape)


_OPERATORS = torch.library.Library("moefw", "FRAGMENT")
_OPERATORS.define("weighted_swiglu(Tensor h, Tensor weights, float[]? clamp) -> Tensor")
_OPERATORS.define(
    "weighted_swiglu_backward(Tensor grad, Tensor h, Tensor weights, float[]? clamp) -> (Tensor, Tensor, Tensor)"
)
_OPERATORS.impl("weighted_swiglu", _weighted_swiglu, "CompositeExplicitAutograd")
_OPERATORS.impl("weighted_swiglu", lambda h, _, __: h.new_empty(len(h), h.shape[1] // 2), "Meta")
_OPERATORS.impl("weighted_swiglu_backward", _weighted_swiglu_backward, "CompositeExplicitAutograd")
_OPERATORS.impl("weighted_swiglu_backward", _backward_results, "Meta")
