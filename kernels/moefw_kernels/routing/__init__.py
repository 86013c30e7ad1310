"""Arithmetic that routers share: the choice of experts, counts, capacity and auxiliary losses. See README.md."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw_kernels.devices import takes_kernels
from moefw_kernels.routing import reference
from moefw_kernels.routing.choice import Choice, Chosen
from moefw_kernels.routing.losses import count_choices, load_loss, switch_loss, within_capacity, z_loss
from moefw_kernels.routing.reference import route_to
from moefw_kernels.routing.scores import chosen

__all__ = [
    "MOST_CHOICES",
    "MOST_EXPERTS",
    "Choice",
    "Chosen",
    "chosen",
    "count_choices",
    "load_loss",
    "route",
    "route_to",
    "switch_loss",
    "within_capacity",
    "z_loss",
]

MOST_EXPERTS: Final = 1024
"""The most experts for which the kernel chooses. With more, PyTorch does."""
MOST_CHOICES: Final = 32
"""The most choices of a token for which it does."""


def route(logits_TE: Tensor, choice: Choice, bias_E: Tensor | None = None, mask_T: Tensor | None = None) -> Chosen:
    """Return each token's experts, best first, and their weights. Differentiable in the logits. T may be 0.

    ``logits_TE`` fp32 or fp64; ``bias_E`` fp32, added to what experts are chosen by and to no weight; ``mask_T`` bool,
    False for tokens that are not routed. On a GPU fp32 takes one kernel and a sum forward, and one kernel backward; of
    experts that are equally good it chooses those with the lowest ids. Elsewhere ``torch.topk`` chooses. NaN is best.
    """
    if not _takes_kernel(logits_TE, choice):
        return reference.route(logits_TE, choice, bias_E, mask_T)
    return Chosen(*_Route.apply(logits_TE, choice, bias_E, mask_T))  # type: ignore[no-untyped-call]


def _takes_kernel(logits_TE: Tensor, choice: Choice) -> bool:
    """Return whether the kernel takes these logits; a compiler and a subclass need PyTorch operations."""
    if not takes_kernels(logits_TE) or type(logits_TE) is not Tensor or torch.compiler.is_compiling():
        return False
    fits = logits_TE.shape[1] <= MOST_EXPERTS and choice.k <= MOST_CHOICES
    return fits and logits_TE.dtype is torch.float32


class _Route(torch.autograd.Function):
    """Saves the ids and what their weights are computed from; all logits only if a gradient reaches them all."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, choice: Choice, bias_E: Tensor | None, mask_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        from moefw_kernels.routing import triton

        ids_TK, weights_TK, counts_E, scores_TE, chosen_TK = triton.route(logits_TE, choice, bias_E, mask_T)
        ctx.save_for_backward(ids_TK, chosen_TK, logits_TE if choice.through_scores else None)
        ctx.choice, ctx.num_experts = choice, logits_TE.shape[1]
        ctx.mark_non_differentiable(ids_TK, counts_E)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, counts_E, scores_TE

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, grad_TK: Tensor | None, __: None, grad_TE: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        from moefw_kernels.routing import triton

        if grad_TK is None and grad_TE is None:
            return None, None, None, None
        ids_TK, chosen_TK, logits_TE = ctx.saved_tensors
        given = (ids_TK, chosen_TK, logits_TE, grad_TK, grad_TE)
        return triton.route_backward(*given, ctx.choice, ctx.num_experts), None, None, None
