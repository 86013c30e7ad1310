"""Optimizer states in host memory, and memory that their buckets pass through."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from moefw.core.errors import Problem
from moefw.plugins.memory.offload.pool import Allocate
from moefw.plugins.memory.offload.streams import Transfers
from moefw.runtime.optimizer_states import OptimizerPolicy, OptimizerStates, Room, StatePart, buckets, bytes_of_states
from moefw.runtime.parallel.boxes import Box

ALIGN_BYTES = 64
"""Tensors in a slot begin at multiples of this."""


class HostStates(OptimizerStates):
    """The states of ``inner``, in memory from ``allocate`` between steps."""

    def __init__(self, inner: OptimizerStates, transfers: Transfers, allocate: Allocate, *, bucket_bytes: int) -> None:
        self.inner = inner
        self.dtype = inner.dtype
        self.transfers = transfers
        self.allocate = allocate
        self.bucket_bytes = bucket_bytes

    def room(self, parameter: Tensor) -> Tensor:
        """Zeros in host memory. Raises RunError where there is no room."""
        return self._zeros(parameter.shape, self.dtype)

    def rooms(self, key: str, parameter: Tensor, dims: int) -> dict[str, Room]:
        """Zeros in host memory, in the form of ``inner``. Raises RunError where there is no room."""
        # On the meta device tensors have a form and no memory.
        forms = self.inner.rooms(key, torch.empty_like(parameter, device="meta"), dims)
        return {
            name: Room(self._zeros(form.values.shape, form.values.dtype), form.block) for name, form in forms.items()
        }

    def problems(self, boxes: Sequence[Box]) -> Sequence[Problem]:
        """Those of ``inner``."""
        return self.inner.problems(boxes)

    def values(self, part: StatePart) -> dict[str, Tensor]:
        """Those of ``inner``, which reads the host's memory."""
        return self.inner.values(part)

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        return self.allocate(nbytes).view(dtype).view(tuple(shape)).zero_()


@final
class Slot:
    """Memory that buckets use in turn. ``last_use``: event of the copy that must be done before the next one."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.taken = 0
        self.last_use: Any = None

    def take(self, like: Tensor) -> Tensor:
        """Next free part of the memory, of the dtype and shape of ``like``. ``taken`` 0 frees all parts."""
        start = self.taken
        end = start + like.numel() * like.dtype.itemsize
        self.taken = end + -end % ALIGN_BYTES
        return self.memory[start:end].view(like.dtype).view(like.shape)


def slots(
    buckets: Sequence[Sequence[Tensor]], allocate: Callable[[int], Tensor], held: Sequence[Slot] = ()
) -> Sequence[Slot]:
    """Slots for two buckets of tensors at a time, or for the only one: those ``held`` if large enough."""
    sizes = [sum(tensor.numel() * tensor.dtype.itemsize + ALIGN_BYTES for tensor in bucket) for bucket in buckets]
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
        in_turn = list(buckets(parts, self.bucket_bytes, bytes_of_states))
        states = [[state for part in bucket for state in part.states.values()] for bucket in in_turn]
        device_slots = slots(states, self._memory)
        fetched = self._fetch(in_turn[0], device_slots[0])
        for number, bucket in enumerate(in_turn):
            slot = device_slots[number % 2]
            current = fetched
            if number + 1 < len(in_turn):
                # Into the other slot, while the states in this one are updated.
                fetched = self._fetch(in_turn[number + 1], device_slots[(number + 1) % 2])
            self.transfers.use(slot.memory, slot.last_use)
            self.inner.update(current)
            self._send(current, bucket, slot)
        # Whoever reads the states next, such as a checkpoint, reads them on the host.
        for slot in device_slots:
            self.transfers.wait(slot.last_use)

    def _memory(self, nbytes: int) -> Tensor:
        """Memory of the device for a slot, ``(nbytes)`` uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.transfers.device)

    def _fetch(self, bucket: Sequence[StatePart], slot: Slot) -> list[StatePart]:
        """Start copying states to the device, once the states before them have left the slot."""
        slot.taken = 0
        slot_is_free = slot.last_use
        fetched = []
        for part in bucket:
            on_device = {key: slot.take(state) for key, state in part.states.items()}
            for key, state in part.states.items():
                slot.last_use = self.transfers.into(state, on_device[key], after=slot_is_free)
            fetched.append(replace(part, states=on_device))
        return fetched

    def _send(self, updated: Sequence[StatePart], bucket: Sequence[StatePart], slot: Slot) -> None:
        """Start copying states back to host memory."""
        for new, part in zip(updated, bucket, strict=True):
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
        in_turn = list(buckets(parts, self.bucket_bytes, _bytes_to_copy))
        copied = [[tensor for part in bucket for tensor in (part.parameter, part.grad)] for bucket in in_turn]
        self._slots = slots(copied, self.allocate, self._slots)
        fetched = self._fetch(in_turn[0], self._slots[0])
        for number, bucket in enumerate(in_turn):
            slot = self._slots[number % 2]
            current = fetched
            if number + 1 < len(in_turn):
                # Into the other slot, while the bucket in this one is updated.
                fetched = self._fetch(in_turn[number + 1], self._slots[(number + 1) % 2])
            # The host itself is about to read the slot.
            self.transfers.wait(slot.last_use)
            self.inner.update(current)
            for part, new in zip(bucket, current, strict=True):
                slot.last_use = self.transfers.into(new.parameter, part.parameter, after=None)
        # Copies run in order, so that with the last one all parameters have arrived.
        self.transfers.use(bucket[-1].parameter, slot.last_use)

    def _fetch(self, bucket: Sequence[StatePart], slot: Slot) -> list[StatePart]:
        """Start copying parameters and gradients to the host, once the parameters before them have left the slot."""
        slot.taken = 0
        slot_is_free = slot.last_use
        fetched = []
        for part in bucket:
            on_host = replace(part, parameter=slot.take(part.parameter), grad=slot.take(part.grad))
            self.transfers.out(part.parameter, on_host.parameter, after=slot_is_free)
            slot.last_use = self.transfers.out(part.grad, on_host.grad, after=slot_is_free)
            fetched.append(on_host)
        return fetched


def _bytes_to_copy(part: StatePart) -> int:
    """Bytes of the parameter and of its gradient."""
    return part.parameter.nbytes + part.grad.nbytes


@final
class OffloadStatesPolicy(OptimizerPolicy):
    """Puts states into memory from ``allocate``, and updates them on the ``host`` or on the ``device``."""

    def __init__(
        self, transfers: Transfers, allocate: Allocate, *, update: Literal["host", "device"], bucket_bytes: int
    ) -> None:
        self.transfers = transfers
        self.allocate = allocate
        self.bucket_bytes = bucket_bytes
        self._kind: type[HostStates] = StreamedStates if update == "device" else StatesUpdatedThere

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """``states`` in host memory."""
        return self._kind(states, self.transfers, self.allocate, bucket_bytes=self.bucket_bytes)
