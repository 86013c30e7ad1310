"""Attention of a share of the heads with all positions."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import final

from torch import Tensor

import moefw
from moefw.core.contracts import Layout
from moefw.runtime.attention.mask import Mask
from moefw.runtime.communication.exchange import exchange
from moefw.runtime.communication.movement import finish
from moefw.runtime.parallel.sequence_cut import SequenceCut


@final
class UlyssesAttention(moefw.ContextAttention):
    """See :class:`moefw.plugins.context_parallel.ulysses.Ulysses`."""

    def __init__(self, layout: Layout) -> None:
        self.cut = SequenceCut(layout)

    def __call__(
        self,
        q_BHSd: Tensor,
        k_BGSd: Tensor,
        v_BGSe: Tensor,
        mask: Mask,
        *,
        attend: Callable[..., tuple[Tensor, Tensor]],
        sinks_H: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """``out_BHSe`` of this rank's queries."""
        copies = self._copies(q_BHSd.shape[1], k_BGSd.shape[1])
        if copies > 1:
            k_BGSd = k_BGSd.repeat_interleave(copies, 1)
            v_BGSe = v_BGSe.repeat_interleave(copies, 1)
        # (B, H, S, d) -> (cp, B, H / cp, S, d), a row for each rank
        q, k, v = self._exchange(*(self._heads_by_rank(x) for x in (q_BHSd, k_BGSd, v_BGSe)))
        # -> (B, H / cp, cp * S, d), positions in the order of their sequences
        q, k, v = (self.cut.whole(x.permute(1, 2, 0, 3, 4).flatten(2, 3), 2, mask.lengths) for x in (q, k, v))
        own_sinks = None if sinks_H is None else sinks_H.chunk(self.cut.size)[self.cut.index]
        out, _ = attend(q, k, v, mask, sinks_H=own_sinks, scale=scale)
        # -> (cp, B, H / cp, S, e), a row for each rank
        by_rank = self.cut.by_rank(out, 2, mask.lengths).unflatten(2, (self.cut.size, -1)).permute(2, 0, 1, 3, 4)
        (heads,) = self._exchange(by_rank)
        # -> (B, H, S, e)
        out_BHSe: Tensor = heads.permute(1, 0, 2, 3, 4).flatten(1, 2)
        return out_BHSe

    def _copies(self, heads: int, groups: int) -> int:
        """How often each head of keys is copied, so that each rank gets as many, and those of its queries.

        As few copies as make their number a multiple of cp, unless queries would then share them unevenly: then one
        for each query.
        """
        copies = lcm(groups, self.cut.size) // groups
        return copies if heads % (groups * copies) == 0 else heads // groups

    def _heads_by_rank(self, x_BHSd: Tensor) -> Tensor:
        """Heads ``(cp, B, H / cp, S, d)``."""
        by_rank: Tensor = x_BHSd.unflatten(1, (self.cut.size, -1)).movedim(1, 0)
        return by_rank

    def _exchange(self, *by_rank: Tensor) -> tuple[Tensor, ...]:
        """Send a row of each tensor to each rank, and return the rows that the ranks sent, in order of rank."""
        ones = [1] * self.cut.size
        return finish(exchange([x.contiguous() for x in by_rank], ones, ones, self.cut.group))
