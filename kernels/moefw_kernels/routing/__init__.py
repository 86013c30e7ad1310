"""Arithmetic that routers share: the choice of experts, counts, capacity and auxiliary losses. See README.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw_kernels.routing import reference
from moefw_kernels.routing.balance import Segments, Sums, switch_loss, token_sums, z_loss
from moefw_kernels.routing.counts import count_choices, within_capacity
from moefw_kernels.routing.gating import Chosen, Gating
from moefw_kernels.routing.limits import MOST_CHOICES, MOST_EXPERTS, kernels_take
from moefw_kernels.routing.reference import route_to
from moefw_kernels.routing.scores import chosen

__all__ = [
    "MOST_CHOICES",
    "MOST_EXPERTS",
    "Chosen",
    "Gating",
    "Segments",
    "Sums",
    "chosen",
    "count_choices",
    "route",
    "route_to",
    "switch_loss",
    "token_sums",
    "within_capacity",
    "z_loss",
]


def route(logits_TE: Tensor, gating: Gating, bias_E: Tensor | None = None, mask_T: Tensor | None = None) -> Chosen:
    """Each token's experts, best first, and their weights. Differentiable in the logits. T may be 0.

    ``logits_TE`` fp32 or fp64; ``bias_E`` fp32, which changes the choice of experts and no weight; ``mask_T`` bool,
    False for tokens that are not routed. On a GPU fp32 takes one kernel and a sum forward, and one kernel backward; of
    experts that are equally good it chooses those with the lowest ids. Elsewhere ``torch.topk`` chooses. NaN is best.
    """
    if not kernels_take(logits_TE, gating):
        return reference.route(logits_TE, gating, bias_E, mask_T)
    routed = _Route.apply(logits_TE, gating, bias_E, mask_T)  # type: ignore[no-untyped-call]
    ids_TK, weights_TK, counts_E, entropy = routed
    return Chosen(ids_TK, weights_TK, counts_E, None, entropy)


class _Route(torch.autograd.Function):
    """Saves the ids and the logits from which weights are computed: the chosen ones, or all with ``pre_softmax``."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, gating: Gating, bias_E: Tensor | None, mask_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from moefw_kernels.routing import triton

        routed, chosen_TK = triton.route(logits_TE, gating, bias_E, mask_T)
        ids_TK, weights_TK, counts_E, entropy = routed
        ctx.save_for_backward(ids_TK, chosen_TK, logits_TE if gating.pre_softmax else None)
        ctx.gating = gating
        ctx.num_experts = logits_TE.shape[1]
        # Both share one storage. ``data`` hides from autograd that they are views of it: it refuses to change those.
        counts_E = counts_E.data
        entropy = entropy.data
        ctx.mark_non_differentiable(ids_TK, counts_E, entropy)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, counts_E, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad_TK: Tensor | None, *__: None) -> tuple[Tensor | None, None, None, None]:
        from moefw_kernels.routing import triton

        if grad_TK is None:
            return None, None, None, None
        ids_TK, chosen_TK, logits_TE = ctx.saved_tensors
        grad_TE = triton.route_backward(ids_TK, chosen_TK, logits_TE, grad_TK, ctx.gating, ctx.num_experts)
        return grad_TE, None, None, None
