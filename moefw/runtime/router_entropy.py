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
    entropy_T = torch.special.entr(shares_TE).sum(-1)
    if mask_T is None:
        return torch.stack((entropy_T.sum(), entropy_T.new_full((), len(entropy_T))))
    return torch.stack((entropy_T.where(mask_T, 0.0).sum(), mask_T.sum().to(entropy_T.dtype)))
