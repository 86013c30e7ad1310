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
        """Pass the keys and values at hand on to the next rank while ``see`` works on them."""
        size = self.cut.size
        current = kv.contiguous()
        for step in range(size):
            rank = (self.cut.index - step) % size
            if step == size - 1:
                see(rank, current)
                break
            following, work = self._pass_on(current)
            see(rank, current)
            work.wait()
            current = following

    def visit_back(self, kv: Tensor, gradient: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Pass keys and values on, and behind them the sum of their gradients, which ends on the rank that holds them.

        Each rank adds its gradient to the sum that arrives from the rank before, while it computes.
        """
        flight: tuple[Tensor, Work] | None = None

        def add(rank: int, current: Tensor) -> None:
            nonlocal flight
            grad = gradient(rank, current)
            if flight is not None:
                sum_before, work = flight
                work.wait()
                grad += sum_before
            flight = self._pass_on(grad)

        self.visit(kv, add)
        assert flight is not None
        total, work = flight
        work.wait()
        return total

    def _pass_on(self, sent: Tensor) -> tuple[Tensor, Work]:
        """Start sending a tensor to the next rank, and return where the tensor of the rank before arrives."""
        size = self.cut.size
        received = torch.empty_like(sent)
        sent_splits = [0] * size
        sent_splits[(self.cut.index + 1) % size] = sent.numel()
        received_splits = [0] * size
        received_splits[(self.cut.index - 1) % size] = sent.numel()
        work: Work = dist.all_to_all_single(
            received.view(-1), sent.view(-1), received_splits, sent_splits, group=self.cut.group, async_op=True
        )
        return received, work
