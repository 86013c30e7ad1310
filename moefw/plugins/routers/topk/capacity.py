"""Capacity: which choices an expert keeps."""

from __future__ import annotations

from fractions import Fraction
from typing import final

from torch import Tensor

from moefw.core.site import Dims
from moefw.core.stages import Batch
from moefw.plugins.routers.topk.options import Capacity
from moefw.runtime.parallel.shared_tokens import TokenGroups, WholeMicroBatch
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
        """Limit for ``num_tokens`` tokens."""
        return -(-num_tokens * self.share.numerator // self.share.denominator)

    def kept(self, ids_TK: Tensor, weights_TK: Tensor, batch: Batch) -> Tensor | None:
        """Which choices are kept, bool (T, K), False for -1; None if no expert can overflow."""
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
        whole = WholeMicroBatch(batch, len(ids_TK), group)
        by_NK = None if by is None else whole.of(by)
        return whole.own(within_capacity(whole.of(ids_TK), capacity, self.num_experts, by=by_NK))
