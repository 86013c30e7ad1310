"""Optimizer states in host memory, and memory that their buckets pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from moefw.plugins.memory.offload.pool import Allocate
from moefw.plugins.memory.offload.streams import Transfers
from moefw.runtime.memory.optimizer_states import OptimizerPolicy, OptimizerStates, StatePart, buckets

ALIGN_BYTES = 64


class HostStates(OptimizerStates):
    """``inner`` states, resting in memory from ``allocate``."""

    def __init__(self, inner: OptimizerStates, transfers: Transfers, allocate: Allocate, *, bucket_bytes: int) -> None:
        self.inner, self.dtype = inner, inner.dtype
        self.transfers, self.allocate, self.bucket_bytes = transfers, allocate, bucket_bytes
        self.host_bytes = 0
        """Bytes of states. None of them are on the device between steps."""

    def room(self, parameter: Tensor) -> Tensor:
        """Return zeros in host memory. Raises RunError where there is no room."""
        nbytes = parameter.numel() * self.dtype.itemsize
        self.host_bytes += nbytes
        return self.allocate(nbytes).view(self.dtype).view(parameter.shape).zero_()


@final
class Slot:
    """Memory that buckets use in turn. ``last_use``: event of the copy that must be done before the next one."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.taken = memory, 0
        self.last_use: Any = None

    def take(self, like: Tensor) -> Tensor:
        """Return the next free part of the memory, for a tensor."""
        start = self.taken
        end = start + like.numel() * like.dtype.itemsize
        self.taken = end + -end % ALIGN_BYTES
        return self.memory[start:end].view(like.dtype).view(like.shape)


def slots(
    buckets: Sequence[Sequence[Tensor]], allocate: Callable[[int], Tensor], held: Sequence[Slot] = ()
) -> Sequence[Slot]:
    """Return slots for two buckets of tensors at a time, or for the only one: those ``held`` if large enough."""
    sizes = [sum(each.numel() * each.dtype.itemsize + ALIGN_BYTES for each in bucket) for bucket in buckets]
    if len(held) >= min(2, len(sizes)) and len(held[0].memory) >= max(sizes):
        return held
    return [Slot(allocate(max(sizes))) for _ in sizes[:2]]


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


@final
class OffloadStatesPolicy(OptimizerPolicy):
    """Puts states into memory from ``allocate``, and updates them on the ``host`` or on the ``device``."""

    def __init__(
        self, transfers: Transfers, allocate: Allocate, *, update: Literal["host", "device"], bucket_bytes: int
    ) -> None:
        self.transfers, self.allocate, self.bucket_bytes = transfers, allocate, bucket_bytes
        self._kind: type[HostStates] = StreamedStates if update == "device" else StatesUpdatedThere

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """Return ``states`` in host memory."""
        return self._kind(states, self.transfers, self.allocate, bucket_bytes=self.bucket_bytes)
