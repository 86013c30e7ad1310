"""Choice of a token's experts below a quantile, which is kept for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from moefw.core.site import Dims
from moefw.core.stages import Batch
from moefw.runtime.parallel.shared_tokens import TokenGroups, WholeMicroBatch

Stats = dict[str, Tensor]


@final
class BelowQuantile:
    """The K best by ``ranking - beta``, and the beta that would have given every expert its fair share here.

    A token chooses expert e if ``l_e - beta_e`` is above alpha, its best value that is not chosen. So e is chosen by
    ``N K / E`` of N valid tokens if beta_e is the ``floor(N K / E) + 1``-th largest ``l_e - alpha``
    (Megatron Core's ``quantile_balancing``, notes 1.1). The N tokens are those of a micro-batch, which the ranks in
    ``groups`` share.
    """

    def __init__(self, dims: Dims, groups: TokenGroups) -> None:
        self.k = dims.top_k
        self.num_experts = dims.num_experts
        self.groups = groups

    @torch.no_grad()
    def __call__(self, ranking_TE: Tensor, bias_E: Tensor | None, batch: Batch) -> tuple[Tensor, Stats]:
        """Ids (T, K), and as statistics the fair beta, to be averaged over the global batch.

        ``quantile_sum`` (E) is that beta times ``quantile_tokens`` (1), the number of valid tokens of this rank.
        """
        assert bias_E is not None
        best = (ranking_TE - bias_E).topk(self.k + 1)
        mask_T = batch.mask_T
        whole = WholeMicroBatch(batch, len(ranking_TE), self.groups[batch.cp])
        margin_NE = whole.of(ranking_TE - best.values[:, -1:])
        beta_E = self._fair(margin_NE, None if mask_T is None else whole.of(mask_T))
        tokens = beta_E.new_full((), float(len(ranking_TE))) if mask_T is None else mask_T.sum().float()
        stats = {"quantile_sum": beta_E * tokens, "quantile_tokens": tokens.view(1)}
        return best.indices[:, : self.k], stats

    def _fair(self, margin_NE: Tensor, mask_N: Tensor | None) -> Tensor:
        """Fair beta (E) in fp32, given ``l_e - alpha`` of all tokens; 0 if no token is valid."""
        num_tokens = len(margin_NE)
        if not num_tokens:
            return torch.zeros(self.num_experts, device=margin_NE.device)
        if mask_N is None:
            place = num_tokens * self.k // self.num_experts
            return margin_NE.topk(place + 1, dim=0).values[-1].float()
        # How many tokens are valid is known only on the device: sort all, and take the place by index.
        num_valid = mask_N.sum()
        sorted_NE = margin_NE.masked_fill(~mask_N.unsqueeze(-1), float("-inf")).sort(dim=0, descending=True).values
        beta_E = sorted_NE.index_select(0, (num_valid * self.k // self.num_experts).view(1)).squeeze(0)
        return torch.where(num_valid > 0, beta_E, 0.0).float()


def next_quantile(beta_E: Tensor, reduced: Mapping[str, Tensor], ema: float) -> Tensor:
    """``ema * beta + (1 - ema) * (token-weighted mean of the fair betas)``; beta where there was no token."""
    tokens = reduced["quantile_tokens"]
    fair_E = reduced["quantile_sum"] / tokens.clamp_min(1)
    return torch.where(tokens > 0, ema * beta_E + (1.0 - ema) * fair_E, beta_E)
