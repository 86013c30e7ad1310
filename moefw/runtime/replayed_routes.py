"""Routes that a batch brings for routers to replay: what fills their gaps, and how far a router would differ.

The routes of rollouts (R3, arXiv 2510.11370) come from another engine, whose rounding and kernels choose other experts
here and there. Choices are replayed, and weights are made of today's scores, so gradients reach the router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from moefw.core.stages import FREE

GIVEN: Final = "given_choices"
"""Statistic of a layer that replays: the choices that were given. Padding has none."""
DIFFERING: Final = "differing_choices"
"""How many of these the router would not have made. Their order does not count."""


def filled(given_TK: Tensor, chosen_TK: Tensor) -> Tensor:
    """Given choices, and those of the router where it is to choose."""
    return torch.where(given_TK == FREE, chosen_TK, given_TK)


def differences(given_TK: Tensor, chosen_TK: Tensor) -> Mapping[str, Tensor]:
    """Numbers of given choices, and of those that are none of the router's, fp32 scalars."""
    is_given_TK = given_TK >= 0
    is_chosen_TK = (given_TK.unsqueeze(2) == chosen_TK.unsqueeze(1)).any(2)
    return {GIVEN: is_given_TK.sum().float(), DIFFERING: (is_given_TK & ~is_chosen_TK).sum().float()}


def wrong_ids(ids_BSK: Tensor, num_experts: int) -> Iterator[tuple[str, int, int]]:
    """Yield what is wrong with expert ids, and the first sequence and position where: out of range, or one twice."""
    outside = (ids_BSK < -1) | (ids_BSK >= num_experts)
    best = ids_BSK.sort(-1).values
    twice = (best[..., 1:] == best[..., :-1]) & (best[..., 1:] >= 0)
    for wrong, what in ((outside, f"an id outside of the {num_experts} experts"), (twice, "an expert twice")):
        if wrong.any():
            sequence, position = wrong.any(-1).nonzero()[0].tolist()
            yield what, sequence, position
