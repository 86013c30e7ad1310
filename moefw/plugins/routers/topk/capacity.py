"""Capacity: which choices an expert keeps."""

from __future__ import annotations

from fractions import Fraction
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.site import Dims
from moefw.core.stages import Batch
from moefw.plugins.routers.topk.options import Capacity
from moefw.plugins.routers.topk.token_groups import TokenGroups
from moefw.runtime.communication.gather import all_gather
from moefw_kernels.routing import within_capacity


@final
class Limit:
    """The most choices that an expert takes of the tokens of a rank, or of a micro-batch: ``ceil(T * K / E * factor)``.

    In exact fractions: a factor of 1.1 is eleven tenths, not the nearest float. The ranks in ``groups`` have equally
    many tokens.
    """

    def __init__(self, options: Capacity, dims: Dims, groups: TokenGroups) -> None:
        self.num_experts = dims.num_experts
        self.by_weight = options.drop == "probs"
        self.pad = options.pad
        self.share = Fraction(str(options.factor)) * dims.top_k / dims.num_experts
        self.groups = groups if options.over == "micro_batch" else None

    def of(self, num_tokens: int) -> int:
        """Return the limit for ``num_tokens`` tokens."""
        return -(-num_tokens * self.share.numerator // self.share.denominator)

    def kept(self, ids_TK: Tensor, weights_TK: Tensor, batch: Batch) -> Tensor | None:
        """Return which choices are kept, bool (T, K), False for -1; None if no expert can overflow."""
        group = None if self.groups is None else self.groups[batch.cp]
        num_tokens = len(ids_TK) if group is None else len(ids_TK) * group.size()
        capacity = self.of(num_tokens)
        if capacity >= num_tokens:
            # A token chooses an expert once, so that no expert has more choices than there are tokens.
            return None
        by = weights_TK.detach() if self.by_weight else None
        if group is None:
            return within_capacity(ids_TK, capacity, self.num_experts, by=by)
        # The choices of all ranks (N, K), in the order of the whole micro-batch: which are dropped depends on no split.
        order = _gathered(_place_in_batch(batch).unsqueeze(1), group).squeeze(1).argsort()
        ids_NK = _gathered(ids_TK, group)[order]
        by_NK = None if by is None else _gathered(by, group)[order]
        kept_NK = torch.empty_like(ids_NK, dtype=torch.bool)
        kept_NK[order] = within_capacity(ids_NK, capacity, self.num_experts, by=by_NK)
        return kept_NK.chunk(group.size())[group.rank()]


def _gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks, in order of rank."""
    of_ranks = own.new_empty(len(own) * group.size(), *own.shape[1:])
    all_gather(of_ranks, own.contiguous(), group=group)
    return of_ranks


def _place_in_batch(batch: Batch) -> Tensor:
    """Return a number for each of this rank's tokens that grows with its sequence, then with its place there."""
    places_T = batch.own(batch.places.repeat(len(batch.ids_BS)))
    return (batch.sequence_T << 40) + places_T
