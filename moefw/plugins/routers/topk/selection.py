"""Choice of a token's experts below a quantile, which is kept for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

Stats = dict[str, Tensor]


@final
class BelowQuantile:
    """The K best by ``ranking - beta``, and the beta that would have given every expert its fair share here.

    A token chooses expert e if ``l_e - beta_e`` is above alpha, its best value that is not chosen. So e is chosen by
    ``N K / E`` of N valid tokens if beta_e is the ``floor(N K / E) + 1``-th largest ``l_e - alpha``
    (Megatron Core's ``quantile_balancing``, notes 1.1).
    """

    def __init__(self, k: int, num_experts: int) -> None:
        self.k = k
        self.num_experts = num_experts

    def __call__(self, ranking_TE: Tensor, bias_E: Tensor | None, mask_T: Tensor | None) -> tuple[Tensor, Stats]:
        """Return the ids (T, K), and as statistics the fair beta of these tokens, to be averaged over the global batch.

        ``quantile_sum`` (E) is that beta times ``quantile_tokens`` (1), the number of valid tokens.
        """
        assert bias_E is not None
        with torch.no_grad():
            best = (ranking_TE - bias_E).topk(self.k + 1)
            beta_E, tokens = self._fair(ranking_TE - best.values[:, -1:], mask_T)
            stats = {"quantile_sum": beta_E * tokens, "quantile_tokens": tokens.view(1)}
            return best.indices[:, : self.k], stats

    def _fair(self, margin_TE: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the fair beta (E), given ``l_e - alpha``, and the number of valid tokens; both fp32."""
        device = margin_TE.device
        num_tokens = len(margin_TE)
        if not num_tokens:
            return torch.zeros(self.num_experts, device=device), torch.zeros((), device=device)
        if mask_T is None:
            place = num_tokens * self.k // self.num_experts
            beta_E = margin_TE.topk(place + 1, dim=0).values[-1]
            return beta_E.float(), torch.full((), float(num_tokens), device=device)
        # How many tokens are valid is known only on the device: sort all, and take the place by index.
        tokens = mask_T.sum()
        sorted_TE = margin_TE.masked_fill(~mask_T.unsqueeze(-1), float("-inf")).sort(dim=0, descending=True).values
        beta_E = sorted_TE.index_select(0, (tokens * self.k // self.num_experts).view(1)).squeeze(0)
        return torch.where(tokens > 0, beta_E, 0.0).float(), tokens.float()


def next_quantile(beta_E: Tensor, reduced: Mapping[str, Tensor], ema: float) -> Tensor:
    """Return ``ema * beta + (1 - ema) * (token-weighted mean of the fair betas)``; beta where there was no token."""
    tokens = reduced["quantile_tokens"]
    fair_E = reduced["quantile_sum"] / tokens.clamp_min(1)
    return torch.where(tokens > 0, ema * beta_E + (1.0 - ema) * fair_E, beta_E)
