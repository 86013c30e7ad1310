"""Optimizer states in host memory, and memory that their buckets pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from moefw.plugins.memory.offload.pool import Allocate
from moefw.plugins.memory.offload.streams import Transfers
from moefw.runtime.memory.optimizer_states import OptimizerStates

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
