"""Choice of a token's experts: the K best by a ranking that may be biased, of its best groups if these are limited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, final

import torch
from torch import Tensor

Stats = dict[str, Tensor]


class Select(Protocol):
    """Chooses experts by a ranking, given the state of the rule that biases it."""

    def __call__(self, ranking_TE: Tensor, bias_E: Tensor | None, mask_T: Tensor | None) -> tuple[Tensor, Stats]:
        """Return ``ids_TK`` int64 and statistics to be summed over the global batch."""


@final
class Best:
    """The K best of all experts, or of the experts in the best groups: see :func:`in_best_groups`."""

    def __init__(self, k: int, groups: tuple[int, int, int] | None) -> None:
        self.k, self.groups = k, groups

    def __call__(self, ranking_TE: Tensor, bias_E: Tensor | None, mask_T: Tensor | None) -> tuple[Tensor, Stats]:
        """Choose by the ranking plus the bias."""
        if bias_E is not None:
            ranking_TE = ranking_TE + bias_E
        if self.groups is not None:
            ranking_TE = in_best_groups(ranking_TE, *self.groups)
        return ranking_TE.topk(self.k).indices, {}


def in_best_groups(ranking_TE: Tensor, count: int, keep: int, best: int) -> Tensor:
    """Return the ranking with -inf outside each token's ``keep`` best groups of ``count``.

    A group's score is the sum of its ``best`` best (DeepSeek-V3, arXiv 2412.19437 section 2.1.2).
    """
    grouped_TGe: Tensor = ranking_TE.unflatten(1, (count, -1))
    worth_TG = grouped_TGe.topk(best).values.sum(-1)
    lost_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter(1, worth_TG.topk(keep).indices, False)
    left_TGe: Tensor = grouped_TGe.masked_fill(lost_TG.unsqueeze(-1), float("-inf"))
    return left_TGe.flatten(1)


@final
class BelowQuantile:
    """The K best by ``ranking - beta``, and the beta that would have given every expert its fair share here.

    A token chooses expert e if ``l_e - beta_e`` is above alpha, its best value that is not chosen. So e is chosen by
    ``N K / E`` of N valid tokens if beta_e is the ``floor(N K / E) + 1``-th largest ``l_e - alpha``
    (Megatron Core's ``quantile_balancing``, notes 1.1).
    """

    def __init__(self, k: int, num_experts: int) -> None:
        self.k, self.num_experts = k, num_experts

    def __call__(self, ranking_TE: Tensor, bias_E: Tensor | None, mask_T: Tensor | None) -> tuple[Tensor, Stats]:
        """Choose. ``quantile_sum`` (E) is the beta wanted here times ``quantile_tokens`` (1), the valid tokens."""
        assert bias_E is not None
        with torch.no_grad():
            best = (ranking_TE - bias_E).topk(self.k + 1)
            beta_E, tokens = self._fair(ranking_TE - best.values[:, -1:], mask_T)
            stats = {"quantile_sum": beta_E * tokens, "quantile_tokens": tokens.view(1)}
            return best.indices[:, : self.k], stats

    def _fair(self, margin_TE: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
        device, num_tokens = margin_TE.device, len(margin_TE)
        if not num_tokens:
            return torch.zeros(self.num_experts, device=device), torch.zeros((), device=device)
        if mask_T is None:
            place = num_tokens * self.k // self.num_experts
            beta_E = margin_TE.topk(place + 1, dim=0).values[-1]
            return beta_E.float(), torch.full((), float(num_tokens), device=device)
        tokens = mask_T.sum()
        sorted_TE = margin_TE.masked_fill(~mask_T.unsqueeze(-1), float("-inf")).sort(dim=0, descending=True).values
        beta_E = sorted_TE.index_select(0, (tokens * self.k // self.num_experts).view(1)).squeeze(0)
        return torch.where(tokens > 0, beta_E, 0.0).float(), tokens.float()


def next_quantile(beta_E: Tensor, reduced: Mapping[str, Tensor], ema: float) -> Tensor:
    """Return ``ema * beta + (1 - ema) * (token-weighted mean of the betas wanted)``; beta where there was no token."""
    tokens = reduced["quantile_tokens"]
    wanted_E = reduced["quantile_sum"] / tokens.clamp_min(1)
    return torch.where(tokens > 0, ema * beta_E + (1.0 - ema) * wanted_E, beta_E)
