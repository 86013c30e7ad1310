"""From logits to scores, from scores to choices, and from the logits of the chosen experts to weights.

``logits_TE`` and ``scores_TE`` are fp32 or fp64; scores are non-negative and, except for sqrtsoftplus, at most 1.
Where each score depends on its own logit alone, weights are computed from the logits of the chosen experts, so that no
tensor as wide as all experts is saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw_kernels.routing.gating import Gating

LINEAR_ABOVE: Final = 40.0
"""Above this value softplus returns its argument: log1p(exp(-40)) is below the last bit, also in fp64."""


def softmax(logits_TE: Tensor) -> Tensor:
    """Probabilities over all experts."""
    return logits_TE.softmax(-1)


def sqrtsoftplus(logits_TE: Tensor) -> Tensor:
    """``sqrt(log(1 + e^l))``.

    Far below zero softplus underflows, and the slope of a root at zero is infinite: softplus is clamped there.
    """
    return F.softplus(logits_TE, threshold=LINEAR_ABOVE).clamp_min(torch.finfo(logits_TE.dtype).tiny).sqrt()


SCORES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "softmax": softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": sqrtsoftplus,
}


def chosen(values_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """``values_TE.gather(1, ids_TK)``; saves only the ids for backward."""
    out_TK: Tensor = _Chosen.apply(values_TE, ids_TK)  # type: ignore[no-untyped-call]
    return out_TK


def in_best_groups(ranking_TE: Tensor, count: int, keep: int, best: int) -> Tensor:
    """Ranking with -inf outside each token's ``keep`` best groups of ``count``.

    A group's score is the sum of its ``best`` best (DeepSeek-V3, arXiv 2412.19437 section 2.1.2).
    """
    grouped_TGe: Tensor = ranking_TE.unflatten(1, (count, -1))
    worth_TG = grouped_TGe.topk(best).values.sum(-1)
    lost_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter(1, worth_TG.topk(keep).indices, False)
    left_TGe: Tensor = grouped_TGe.masked_fill(lost_TG.unsqueeze(-1), float("-inf"))
    return left_TGe.flatten(1)


def weigh(
    logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, gating: Gating, absent_TK: Tensor | None = None
) -> Tensor:
    """Weights of chosen experts in the dtype of the logits.

    Choices that are ``absent`` have some valid id and get no share. The caller replaces their weights: the softmax over
    none is NaN.
    """
    if gating.pre_softmax:
        weights_TK = chosen(scores_TE, ids_TK)
    elif gating.score == "softmax":
        chosen_TK = chosen(logits_TE, ids_TK)
        if absent_TK is not None:
            chosen_TK = chosen_TK.masked_fill(absent_TK, float("-inf"))
        weights_TK = chosen_TK.softmax(-1)
    else:
        weights_TK = SCORES[gating.score](chosen(logits_TE, ids_TK))
        if gating.renormalise:
            if absent_TK is not None:
                weights_TK = weights_TK.masked_fill(absent_TK, 0.0)
            # DeepSeek-V3's constant: if all chosen scores are zero, so are the weights, instead of NaN.
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK if gating.scale == 1.0 else weights_TK * gating.scale


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_TE: Tensor, ids_TK: Tensor) -> Tensor:
        ctx.save_for_backward(ids_TK)
        ctx.num_experts = values_TE.shape[1]
        return values_TE.gather(1, ids_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, None]:
        (ids_TK,) = ctx.saved_tensors
        return grad_TK.new_zeros(len(grad_TK), ctx.num_experts).scatter_add_(1, ids_TK, grad_TK), None
