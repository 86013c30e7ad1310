"""Tensor parallelism with sequence parallelism: the part of each matrix and of the tokens that a rank holds.

Attention, MLPs, embedding and head are split over the ranks of tp (Megatron-LM, arXiv 1909.08053). Between them, each
rank has its own part of the tokens (arXiv 2205.05198), so norms, routers and MoE layers see every token once.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from moefw.core.contracts import Layout
from moefw.core.records import Shard
from moefw.runtime.communication.gather import gather, reduce
from moefw.runtime.communication.movement import finish


@final
class TensorParallel:
    """This rank's position among the ranks that split the dense matrices. With one rank, nothing is split or sent."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size("tp")
        self.index = layout.index("tp")
        self.group = layout.group("tp")

    def shard(self, dim: int) -> Shard | None:
        """Part of a tensor that this rank holds if it is split along ``dim``; None: all of it."""
        return Shard(dim, self.index, self.size, "tp") if self.size > 1 else None

    def gather(self, x_tD: Tensor) -> Tensor:
        """Tokens of all ranks, ``(T, D)``, from each rank's part."""
        (x_TD,) = finish(gather([x_tD], self.group))
        return x_TD

    def reduce(self, partial_TD: Tensor) -> Tensor:
        """This rank's part of the tokens, summed over the partial results of all ranks."""
        (x_tD,) = finish(reduce([partial_TD], self.group))
        return x_tD
