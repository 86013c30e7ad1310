"""Optimizer states updated on the host: gradients and parameters are copied there, and new parameters back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from moefw.plugins.memory.offload.pool import Allocate
from moefw.plugins.memory.offload.states import HostStates, Slot, slots
from moefw.plugins.memory.offload.streams import Transfers
from moefw.runtime.memory.optimizer_states import OptimizerStates, StatePart, buckets


@final
class StatesUpdatedThere(HostStates):
    """Copies the next bucket into one slot of host memory while the bucket in the other is updated and copied back.

    The parameter on the device is the only master: the next step reads nothing that is left in the slots.
    """

    def __init__(self, inner: OptimizerStates, transfers: Transfers, allocate: Allocate, *, bucket_bytes: int) -> None:
        super().__init__(inner, transfers, allocate, bucket_bytes=bucket_bytes)
        self._slots: Sequence[Slot] = ()

    def update(self, parts: Sequence[StatePart]) -> None:
        """Update on the host."""
        if not parts:
            return
        per_element = parts[0].parameter.dtype.itemsize + parts[0].grad.dtype.itemsize
        waiting = list(buckets(parts, self.bucket_bytes // per_element))
        passing = [[each for part in bucket for each in (part.parameter, part.grad)] for bucket in waiting]
        self._slots = slots(passing, self.allocate, self._slots)
        coming = self._bring(waiting[0], self._slots[0])
        for number, bucket in enumerate(waiting):
            there, slot = coming, self._slots[number % 2]
            if number + 1 < len(waiting):
                coming = self._bring(waiting[number + 1], self._slots[(number + 1) % 2])
            self.transfers.wait(slot.last_use)
            self.inner.update(there)
            for part, new in zip(bucket, there, strict=True):
                slot.last_use = self.transfers.into(new.parameter, part.parameter, after=None)
        self.transfers.use(bucket[-1].parameter, slot.last_use)

    def _bring(self, bucket: Sequence[StatePart], slot: Slot) -> list[StatePart]:
        """Start copying parameters and gradients to the host, once the parameters before them have left the slot."""
        slot.taken, left, brought = 0, slot.last_use, []
        for part in bucket:
            there = replace(part, parameter=slot.take(part.parameter), grad=slot.take(part.grad))
            self.transfers.out(part.parameter, there.parameter, after=left)
            slot.last_use = self.transfers.out(part.grad, there.grad, after=left)
            brought.append(there)
        return brought
