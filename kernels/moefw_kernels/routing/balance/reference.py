"""Sums over tokens and the Switch loss in plain PyTorch that never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefw_kernels.routing.balance.sums import Segments, Sums
from moefw_kernels.routing.counts import count_choices
from moefw_kernels.routing.gating import Gating
from moefw_kernels.routing.scores import SCORES


def token_sums(
    logits_TE: Tensor,
    gating: Gating,
    over: Sequence[Segments | None],
    scores_TE: Tensor | None,
    ids_TK: Tensor | None,
    mask_T: Tensor | None,
    z_coeff: float | None,
) -> tuple[tuple[Sums, ...], Tensor | None]:
    """Implement ``moefw_kernels.routing.token_sums``, also for fp64."""
    valid_T = logits_TE.new_ones(len(logits_TE)) if mask_T is None else mask_T.to(logits_TE.dtype)
    sums: tuple[Sums, ...] = ()
    if over:
        if scores_TE is None:
            scores_TE = SCORES[gating.score](logits_TE)
        shares_TE = scores_TE if gating.score == "softmax" else _shares(scores_TE)
        if ids_TK is None:
            ids_TK = scores_TE.topk(gating.k).indices
            if mask_T is not None:
                ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
        sums = tuple(_sums(shares_TE, ids_TK, valid_T, segments) for segments in over)
    if z_coeff is None:
        return sums, None
    return sums, z_coeff * (logits_TE.logsumexp(-1).square() * valid_T).sum()


def switch_loss(mass_GE: Tensor, seen_GX: Tensor, k: int, coeff: float) -> Tensor:
    """Implement ``moefw_kernels.routing.switch_loss``, also for fp64."""
    per_token_R = (mass_GE * seen_GX[:, :-1]).sum(1) / seen_GX[:, -1].clamp_min(1)
    return coeff * (per_token_R.sum() * (mass_GE.shape[1] / k))


def _shares(scores_TE: Tensor) -> Tensor:
    """Scores that sum to 1. The clamp avoids only 0 / 0: under a larger one, small scores evade the loss."""
    return scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(torch.finfo(scores_TE.dtype).tiny)


def _sums(shares_TE: Tensor, ids_TK: Tensor, valid_T: Tensor, segments: Segments | None) -> Sums:
    """Sums over each segment of tokens. ``ids_TK`` is -1 for tokens that do not count, ``valid_T`` 0."""
    num_experts = shares_TE.shape[1]
    valid_TE = shares_TE * valid_T.unsqueeze(1)
    if segments is None:
        seen_X = torch.cat([count_choices(ids_TK, num_experts), valid_T.sum().float().view(1)])
        return Sums(valid_TE.sum(0, keepdim=True), seen_X.unsqueeze(0))
    count = segments.count
    segment_T = segments.segment_T
    if segment_T is None:
        segment_T = torch.arange(count, device=ids_TK.device).repeat_interleave(len(ids_TK) // max(1, count))
    # One count over the numbers segment * E + expert gives the counts of all segments.
    flat_TK = torch.where(ids_TK >= 0, ids_TK + segment_T.unsqueeze(1) * num_experts, -1)
    counts_GE = count_choices(flat_TK, count * num_experts).view(count, num_experts)
    valid_G = torch.zeros_like(counts_GE[:, 0]).index_add_(0, segment_T, valid_T.to(counts_GE.dtype))
    mass_GE = shares_TE.new_zeros(count, num_experts).index_add(0, segment_T, valid_TE)
    return Sums(mass_GE, torch.cat([counts_GE, valid_G.unsqueeze(1)], 1))
