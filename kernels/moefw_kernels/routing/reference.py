"""The router's choice in plain PyTorch that never waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.routing.counts import count_choices, count_ids
from moefw_kernels.routing.gating import Chosen, Gating
from moefw_kernels.routing.scores import SCORES, in_best_groups, weigh


def route(logits_TE: Tensor, gating: Gating, bias_E: Tensor | None, mask_T: Tensor | None) -> Chosen:
    """Implement ``moefw_kernels.routing.route``, also for fp64. Always returns scores."""
    detached_TE = logits_TE.detach()
    scores_TE = SCORES[gating.score](logits_TE if gating.through_scores else detached_TE)
    ranking_TE = detached_TE if gating.by_logits else scores_TE
    if bias_E is not None:
        ranking_TE = ranking_TE + bias_E
    if gating.groups is not None:
        ranking_TE = in_best_groups(ranking_TE, *gating.groups)
    ids_TK = ranking_TE.topk(gating.k).indices
    return _routed(ids_TK, weigh(logits_TE, scores_TE, ids_TK, gating), mask_T, None, scores_TE)


def route_to(
    ids_TK: Tensor, logits_TE: Tensor, gating: Gating, mask_T: Tensor | None, dropped_TK: Tensor | None = None
) -> Chosen:
    """Routing to experts that were chosen elsewhere. Dropped choices have some valid id and get no share."""
    scores_TE = SCORES[gating.score](logits_TE if gating.through_scores else logits_TE.detach())
    weights_TK = weigh(logits_TE, scores_TE, ids_TK, gating, dropped_TK)
    return _routed(ids_TK, weights_TK, mask_T, dropped_TK, scores_TE)


def _routed(
    ids_TK: Tensor, weights_TK: Tensor, mask_T: Tensor | None, dropped_TK: Tensor | None, scores_TE: Tensor
) -> Chosen:
    """Routing, with id -1 and weight 0 for dropped choices and those of tokens that are not routed."""
    num_experts = scores_TE.shape[1]
    if weights_TK.dtype is not torch.float32:
        weights_TK = weights_TK.float()
    absent_TK = dropped_TK
    if mask_T is not None:
        unrouted_T1 = ~mask_T.unsqueeze(-1)
        absent_TK = unrouted_T1 if dropped_TK is None else dropped_TK | unrouted_T1
    if absent_TK is None:
        return Chosen(ids_TK, weights_TK, count_ids(ids_TK, num_experts), scores_TE)
    ids_TK = ids_TK.masked_fill(absent_TK, -1)
    weights_TK = weights_TK.masked_fill(absent_TK, 0.0)
    return Chosen(ids_TK, weights_TK, count_choices(ids_TK, num_experts), scores_TE)
