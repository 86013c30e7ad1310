"""Attention to keys and values that are gathered from all ranks of cp."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from moefw.runtime.attention.partial import PartialAttention
from moefw.runtime.communication.gather import all_gather, reduce_scatter


@final
class AllGatherKVAttention(PartialAttention):
    """See :class:`moefw.plugins.context_parallel.allgather_kv.AllGatherKV`."""

    def visit(self, kv: Tensor, see: Callable[[int, Tensor], None]) -> None:
        """Gather the keys and values of all ranks while ``see`` works on this rank's."""
        cut = self.cut
        kv = kv.contiguous()
        gathered = kv.new_empty((cut.size * len(kv), *kv.shape[1:]))
        work = all_gather(gathered, kv, group=cut.group, async_op=True)
        see(cut.index, kv)
        work.wait()
        for rank, part in enumerate(gathered.chunk(cut.size)):
            if rank != cut.index:
                see(rank, part)

    def visit_back(self, kv: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Gather again, and add up the gradients of each rank's keys and values on that rank."""
        cut = self.cut
        # Summed over ranks in fp32, or in what is wider.
        grads = kv.new_empty((cut.size, *kv.shape), dtype=torch.promote_types(kv.dtype, torch.float32))

        def keep(rank: int, part: Tensor) -> None:
            grads[rank] = gradient(rank, part)

        self.visit(kv, keep)
        total = grads.new_empty(kv.shape)
        reduce_scatter(total, grads.flatten(0, 1), group=cut.group)
        return total
