"""Attention to keys and values that go around the ranks of cp."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.runtime.attention.partial import PartialAttention
from moefw.runtime.communication.movement import Work


@final
class RingAttention(PartialAttention):
    """See :class:`moefw.plugins.context_parallel.ring_attention.Ring`."""

    def visit(self, kv: Tensor, see: Callable[[int, Tensor], None]) -> None:
        """Pass on each rank's while they are seen."""
        size, here = self.cut.size, kv.contiguous()
        for step in range(size):
            following, work = self._pass_on(here) if step < size - 1 else (here, None)
            see((self.cut.index - step) % size, here)
            if work is not None:
                work.wait()
            here = following

    def visit_back(self, kv: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Pass on each rank's, and behind them the sum of their gradients, which ends on the rank that they are of."""
        flight: tuple[Tensor, Work] | None = None

        def add(rank: int, here: Tensor) -> None:
            nonlocal flight
            grad = gradient(rank, here)
            if flight is not None:
                before, work = flight
                work.wait()
                grad += before
            flight = self._pass_on(grad)

        self.visit(kv, add)
        assert flight is not None
        total, work = flight
        work.wait()
        return total

    def _pass_on(self, sent: Tensor) -> tuple[Tensor, Work]:
        """Start sending a tensor to the next rank, and return where that of the rank before arrives."""
        size, index = self.cut.size, self.cut.index
        received, rows = torch.empty_like(sent), sent.numel()
        to, from_ = ([rows if rank == (index + way) % size else 0 for rank in range(size)] for way in (1, -1))
        work: Work = dist.all_to_all_single(
            received.view(-1), sent.view(-1), from_, to, group=self.cut.group, async_op=True
        )
        return received, work
