"""Optimizer states that are copied to the device bucket by bucket for their update, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from moefw.plugins.memory.offload.states import HostStates, Slot, slots
from moefw.runtime.memory.optimizer_states import StatePart, buckets


@final
class StreamedStates(HostStates):
    """Copies the next bucket into one slot of device memory while the states in the other are updated and copied back.

    The slots are freed when a step is done.
    """

    def update(self, parts: Sequence[StatePart]) -> None:
        """Update on the device."""
        if not parts:
            return
        per_element = sum(state.dtype.itemsize for state in parts[0].states.values())
        waiting = list(buckets(parts, self.bucket_bytes // per_element))
        room = slots([[state for part in bucket for state in part.states.values()] for bucket in waiting], self._memory)
        coming = self._fetch(waiting[0], room[0])
        for number, bucket in enumerate(waiting):
            here, slot = coming, room[number % 2]
            if number + 1 < len(waiting):
                coming = self._fetch(waiting[number + 1], room[(number + 1) % 2])
            self.transfers.use(slot.memory, slot.last_use)
            self.inner.update(here)
            self._send(here, bucket, slot)
        for slot in room:
            self.transfers.wait(slot.last_use)

    def _memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.transfers.device)

    def _fetch(self, bucket: Sequence[StatePart], slot: Slot) -> list[StatePart]:
        """Start copying states to the device, once the states before them have left the slot."""
        slot.taken, left, fetched = 0, slot.last_use, []
        for part in bucket:
            here = {key: slot.take(state) for key, state in part.states.items()}
            for key, state in part.states.items():
                slot.last_use = self.transfers.into(state, here[key], after=left)
            fetched.append(replace(part, states=here))
        return fetched

    def _send(self, here: Sequence[StatePart], bucket: Sequence[StatePart], slot: Slot) -> None:
        """Start copying states back to host memory."""
        for new, part in zip(here, bucket, strict=True):
            for key, state in part.states.items():
                slot.last_use = self.transfers.out(new.states[key], state, after=None)
