"""Sums over tokens and the Switch loss in plain PyTorch that never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefw_kernels.routing.balance.sums import Rows, Sums
from moefw_kernels.routing.choice import Choice
from moefw_kernels.routing.counts import count_choices
from moefw_kernels.routing.scores import SCORES


def token_sums(
    logits_TE: Tensor,
    choice: Choice,
    over: Sequence[Rows | None],
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
            scores_TE = SCORES[choice.score](logits_TE)
        shares_TE = scores_TE if choice.score == "softmax" else _shares(scores_TE)
        if ids_TK is None:
            ids_TK = scores_TE.topk(choice.k).indices
            if mask_T is not None:
                ids_TK = ids_TK.masked_fill(~mask_T.unsqueeze(-1), -1)
        sums = tuple(_sums(shares_TE, ids_TK, valid_T, rows) for rows in over)
    if z_coeff is None:
        return sums, None
    return sums, z_coeff * (logits_TE.logsumexp(-1).square() * valid_T).sum()


def switch_loss(mass_RE: Tensor, seen_RX: Tensor, k: int, coeff: float) -> Tensor:
    """Implement ``moefw_kernels.routing.switch_loss``, also for fp64."""
    per_token_R = (mass_RE * seen_RX[:, :-1]).sum(1) / seen_RX[:, -1].clamp_min(1)
    return coeff * (per_token_R.sum() * (mass_RE.shape[1] / k))


def _shares(scores_TE: Tensor) -> Tensor:
    """Scores that sum to 1. The clamp avoids only 0 / 0: under a larger one, small scores evade the loss."""
    return scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(torch.finfo(scores_TE.dtype).tiny)


def _sums(shares_TE: Tensor, ids_TK: Tensor, valid_T: Tensor, rows: Rows | None) -> Sums:
    """Sums over each row of tokens. ``ids_TK`` is -1 for tokens that do not count, ``valid_T`` 0."""
    num_experts = shares_TE.shape[1]
    valid_TE = shares_TE * valid_T.unsqueeze(1)
    if rows is None:
        seen_X = torch.cat([count_choices(ids_TK, num_experts), valid_T.sum().float().view(1)])
        return Sums(valid_TE.sum(0, keepdim=True), seen_X.unsqueeze(0))
    count = rows.count
    row_T = rows.row_T
    if row_T is None:
        row_T = torch.arange(count, device=ids_TK.device).repeat_interleave(len(ids_TK) // max(1, count))
    # One count over the numbers row * E + expert gives the counts of all rows.
    flat_TK = torch.where(ids_TK >= 0, ids_TK + row_T.unsqueeze(1) * num_experts, -1)
    counts_RE = count_choices(flat_TK, count * num_experts).view(count, num_experts)
    valid_R = torch.zeros_like(counts_RE[:, 0]).index_add_(0, row_T, valid_T.to(counts_RE.dtype))
    mass_RE = shares_TE.new_zeros(count, num_experts).index_add(0, row_T, valid_TE)
    return Sums(mass_RE, torch.cat([counts_RE, valid_R.unsqueeze(1)], 1))
