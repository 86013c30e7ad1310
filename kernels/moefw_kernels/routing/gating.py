"""How a router chooses experts and weighs them, and the experts and weights. E experts, K choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """A token goes to its ``k`` best experts, by logits if ``by_logits``, else by scores; a bias is added before.

    ``groups`` (count, keep, best): only to experts of its ``keep`` groups whose ``best`` best have the largest sum.
    Weights are the softmax over the chosen logits, or with ``pre_softmax`` the chosen scores of a softmax over all
    experts. With another ``score`` they are the chosen scores, divided by their sum if ``renormalise``. All are
    multiplied by ``scale``. ``needs_scores``: the scores of all experts, if PyTorch makes them, are differentiable.
    """

    k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    pre_softmax: bool = False
    renormalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int, int] | None = None
    needs_scores: bool = False

    @property
    def by_logits(self) -> bool:
        """Whether experts compete by logits."""
        return self.score == "softmax" and not self.pre_softmax

    @property
    def through_scores(self) -> bool:
        """Whether a gradient passes through the scores of all experts."""
        return self.pre_softmax or self.needs_scores


class Chosen(NamedTuple):
    """``ids_TK`` int64 and ``weights_TK`` fp32, -1 and 0 where a choice is absent; ``counts_E`` fp32: how many tokens
    chose each expert; ``scores_TE`` in the dtype of the logits, None from a kernel, which keeps them to itself.

    ``entropy`` (2) fp32 comes from a kernel alone: the sum over routed tokens of the entropy, in nats, of their scores
    divided by their sum, and the number of these tokens.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    scores_TE: Tensor | None
    entropy: Tensor | None = None
