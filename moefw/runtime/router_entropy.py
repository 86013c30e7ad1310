"""How undecided a router is: the entropy of its scores."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

ROUTER_ENTROPY: Final = "router_entropy"
"""Statistic (2): the sum over valid tokens of the entropy of their scores, and the number of these tokens."""


@torch.no_grad()
def entropy_of_scores(scores_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Statistic ``ROUTER_ENTROPY``: entropies in nats of each valid token's scores divided by their sum.

    A token all of whose scores are 0 counts as 0. It is not finite if a score is negative, as a logit may be.
    """
    smallest = torch.finfo(scores_TE.dtype).tiny
    shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(smallest)
    # torch.special.entr takes logarithms one by one on a CPU, five times as slowly. What is added is lost in any share
    # but 0, whose logarithm it makes finite, so that 0 log 0 is 0.
    negative_TE = shares_TE.add(smallest).log_().mul_(shares_TE)
    if mask_T is None:
        entropy = 0.0 - negative_TE.sum()  # the entropy of a sure router is 0.0, not -0.0
        return torch.stack((entropy, entropy.new_full((), len(scores_TE))))
    entropy_T = 0.0 - negative_TE.sum(-1)
    return torch.stack((entropy_T.where(mask_T, 0.0).sum(), mask_T.sum().to(entropy_T.dtype)))
