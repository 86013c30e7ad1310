"""Skewed routing: the experts of one rank get more rows than those of any other, in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import gcd
from typing import Any, Final, final

import torch
from torch import Tensor

_TOPK: Final = torch.ops.aten.topk.default
_ROUNDED: Final = 1e-6
"""What a product of floats misses a whole number by, and more."""


@final
class Skew:
    """Choices of experts by which the first of ``ranks`` on ep gets ``factor`` times the mean of rows.

    Each token goes to ``top_k`` of ``num_experts``, of which each rank has equally many. ``factor`` is at least 1, and
    at most as many as if all tokens chose as many experts of that rank as they can. ``is_met``: whether a router has
    chosen experts. One that does not choose by scores is as it is.
    """

    def __init__(self, factor: float, *, num_experts: int, top_k: int, ranks: int) -> None:
        self.factor = factor
        self.num_experts = num_experts
        self.top_k = top_k
        self.is_met = False
        self._num_own = num_experts // ranks
        self._num_others = num_experts - self._num_own
        self._own_of_token = factor * top_k / ranks

    def chooses(self, func: Any, scores: Tensor, dim: int, num_chosen: int) -> bool:
        """Whether an operator chooses the experts of tokens: at least ``top_k`` of all, from scores ``(..., E)``."""
        is_last = dim % max(1, scores.dim()) == scores.dim() - 1
        of_experts = func is _TOPK and is_last and scores.shape[dim] == self.num_experts
        return of_experts and self.top_k <= num_chosen < self.num_experts

    def chosen(self, shape: Sequence[int]) -> Tensor:
        """Experts, int64, of shape ``(..., K)``, or with more behind the first ``top_k``, all different for a token.

        The first experts of a token are of the first rank: as many as bring the tokens so far to the rank's share, so
        that tokens differ by one at most. All experts of the rank have equally many choices, and so have all others,
        which are as far apart for a token as that allows.
        """
        self.is_met = True
        *sizes, num_chosen = shape
        token_T1 = torch.arange(torch.Size(sizes).numel()).unsqueeze(1)
        place_1K = torch.arange(num_chosen).unsqueeze(0)
        before_T1 = self._own_before(token_T1)
        own_T1 = self._own_before(token_T1 + 1) - before_T1
        own_TK = (before_T1 + place_1K) % self._num_own
        # Choices of the others are numbered from token to token. A stride without a common divisor meets each in turn.
        number_TK = token_T1 * num_chosen - before_T1 + place_1K - own_T1
        stride = _coprime(max(1, self._num_others // num_chosen), self._num_others)
        other_TK = self._num_own + number_TK * stride % self._num_others
        return torch.where(place_1K < own_T1, own_TK, other_TK).view(*shape)

    def _own_before(self, token_T1: Tensor) -> Tensor:
        """How many choices the tokens before each have at the first rank."""
        return (token_T1 * self._own_of_token + _ROUNDED).floor().long()


def _coprime(least: int, to: int) -> int:
    """Smallest number from ``least`` on that has no divisor in common with another one."""
    return next(number for number in count(least) if gcd(number, to) == 1)
