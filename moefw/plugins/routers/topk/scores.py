"""From logits to scores, and from the logits of the chosen experts to weights.

``logits_TE`` and ``scores_TE`` are in the router's dtype; scores are non-negative and, except for sqrtsoftplus, at
most 1. Where each score depends on its own logit alone, weights are computed from the logits of the chosen experts, so
that no tensor as wide as all experts is saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.routing import chosen

LINEAR_ABOVE: Final = 40.0
"""Above this value softplus returns its argument: log1p(exp(-40)) is below the last bit, also in fp64."""


class Weigh(Protocol):
    """Computes the weights of chosen experts."""

    def __call__(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, absent_TK: Tensor | None = None) -> Tensor:
        """Return ``(T, K)``, not scaled. Choices that are ``absent`` have some valid id and get no share.

        The caller replaces the weights of absent choices: the softmax over none is NaN.
        """


def softmax(logits_TE: Tensor) -> Tensor:
    """Return probabilities over all experts."""
    return logits_TE.softmax(-1)


def sqrtsoftplus(logits_TE: Tensor) -> Tensor:
    """Return ``sqrt(log(1 + e^l))``.

    Far below zero softplus underflows, and the slope of a root at zero is infinite: softplus is clamped there.
    """
    return F.softplus(logits_TE, threshold=LINEAR_ABOVE).clamp_min(torch.finfo(logits_TE.dtype).tiny).sqrt()


Score = Callable[[Tensor], Tensor]

SCORES: Final[dict[str, Score]] = {
    "softmax": softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": sqrtsoftplus,
}


def softmax_of_chosen(logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, absent_TK: Tensor | None = None) -> Tensor:
    """Return the softmax over the chosen logits."""
    chosen_TK = chosen(logits_TE, ids_TK)
    if absent_TK is not None:
        chosen_TK = chosen_TK.masked_fill(absent_TK, float("-inf"))
    return chosen_TK.softmax(-1)


def chosen_scores(logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, absent_TK: Tensor | None = None) -> Tensor:
    """Return the chosen scores, whose gradient reaches all experts."""
    return chosen(scores_TE, ids_TK)


def scores_of_chosen(
    score: Score, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, absent_TK: Tensor | None = None
) -> Tensor:
    """Return the scores of the chosen experts, each from its own logit alone."""
    return score(chosen(logits_TE, ids_TK))


def share_of_chosen(
    score: Score, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, absent_TK: Tensor | None = None
) -> Tensor:
    """Return the scores of the chosen experts divided by their sum."""
    weights_TK = score(chosen(logits_TE, ids_TK))
    if absent_TK is not None:
        weights_TK = weights_TK.masked_fill(absent_TK, 0.0)
    return weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
