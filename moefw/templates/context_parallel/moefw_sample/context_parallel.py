"""The runtime part of ``sample``.

Shapes: legend in :mod:`moefw.runtime.attention.attend`; S is this rank's positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import moefw
from moefw.core.contracts import Layout
from moefw.runtime.attention.mask import Mask
from moefw.runtime.communication.gather import gather
from moefw.runtime.communication.movement import finish
from moefw.runtime.parallel.sequence_cut import SequenceCut
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@final
class SampleAttention(moefw.ContextAttention):
    """Every rank attends with whole sequences, and returns its own positions. It runs again in backward."""

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

        def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            whole = (self._whole(x, mask) for x in (q, k, v))
            out_BHSe, _ = attend(*whole, mask, sinks_H=sinks, scale=scale)
            return self.cut.own(out_BHSe, 2, mask.lengths)

        out: Tensor = checkpoint(run, q_BHSd, k_BGSd, v_BGSe, sinks_H, use_reentrant=False)
        return out

    def _whole(self, own_BHSd: Tensor, mask: Mask) -> Tensor:
        """All positions of the heads. Differentiable: gradients of a position add up on its rank."""
        (by_rank,) = finish(gather([own_BHSd.movedim(2, 0)], self.cut.group))
        return self.cut.whole(by_rank, 0, mask.lengths).movedim(0, 2)
