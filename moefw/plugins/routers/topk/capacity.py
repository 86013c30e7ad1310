"""The most choices that an expert takes from one rank."""

from __future__ import annotations

from fractions import Fraction
from typing import final

from torch import Tensor

from moefw.core.site import Dims
from moefw.plugins.routers.topk.options import Capacity
from moefw_kernels.routing import within_capacity


@final
class Limit:
    """``C = ceil(T * K / E * factor)``, in exact fractions: a factor of 1.1 is eleven tenths, not the nearest float."""

    def __init__(self, options: Capacity, dims: Dims) -> None:
        self.num_experts, self.by_weight, self.pad = dims.num_experts, options.drop == "probs", options.pad
        self.share = Fraction(str(options.factor)) * dims.top_k / dims.num_experts

    def of(self, num_tokens: int) -> int:
        """Return C for ``num_tokens`` tokens of one rank."""
        return -(-num_tokens * self.share.numerator // self.share.denominator)

    def kept(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | None:
        """Return which choices are kept, bool (T, K), False for -1; None if no expert can overflow."""
        capacity = self.of(len(ids_TK))
        if capacity >= len(ids_TK):
            return None
        by = weights_TK.detach() if self.by_weight else None
        return within_capacity(ids_TK, capacity, self.num_experts, by=by)
