"""Copies between the device and buffers: on a GPU they overlap with computation, ordered by events.

``record_stream`` marks device memory as used by the copy stream: once its tensor is freed, the caching allocator reuses
the memory as soon as the copies queued there are done, and the host does not wait for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from moefw_kernels.devices import is_gpu


class Transfers(ABC):
    """Copies values off the device and back. An event says when a copy is done; None: it is done."""

    device: torch.device

    @abstractmethod
    def out(self, values: Tensor, room: Tensor, *, after: Any) -> Any:
        """Copy ``values`` into ``room`` once ``after`` is done and the current stream has computed them.

        Returns the event of the copy. The caller need not keep ``values``.
        """

    @abstractmethod
    def back(self, room: Tensor, *, after: Any) -> tuple[Tensor, Any]:
        """Start copying ``room`` to the device once ``after`` is done; return the values and the event of the copy."""

    @abstractmethod
    def into(self, room: Tensor, values: Tensor, *, after: Any) -> Any:
        """Copy ``room`` into ``values`` on the device, once ``after`` and the current stream's queued work are done.

        Returns the event of the copy. The caller need not keep ``values``.
        """

    @abstractmethod
    def use(self, values: Tensor, arrived: Any) -> None:
        """Make the current stream wait for values that are being fetched."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Make the host wait for a copy."""


@final
class PlainTransfers(Transfers):
    """Synchronous copies: for a CPU, which has no streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def out(self, values: Tensor, room: Tensor, *, after: Any) -> None:
        """Copy."""
        room.copy_(values)

    def back(self, room: Tensor, *, after: Any) -> tuple[Tensor, Any]:
        """Copy."""
        return room.to(self.device, copy=True), None

    def into(self, room: Tensor, values: Tensor, *, after: Any) -> None:
        """Copy."""
        values.copy_(room)

    def use(self, values: Tensor, arrived: Any) -> None:
        """Do nothing: the copy is done."""

    def wait(self, event: Any) -> None:
        """Do nothing: the copy is done."""


@final
class CudaTransfers(Transfers):
    """Copies on two separate streams, one per direction. ``cuda`` is ``torch.cuda``, or a test double.

    Values are fetched into memory of the current stream, so a fetch waits for the work queued there before. Started one
    region ahead, it overlaps with the region in between.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._out = cuda.Stream(device)
        self._back = cuda.Stream(device)

    def out(self, values: Tensor, room: Tensor, *, after: Any) -> Any:
        """Copy on the stream of that direction, once the current stream has computed the values."""
        done = self._copy(values, room, self._out, after)
        values.record_stream(self._out)
        return done

    def back(self, room: Tensor, *, after: Any) -> tuple[Tensor, Any]:
        """Copy on the stream of that direction, once the current stream no longer uses the memory."""
        values = torch.empty(len(room), dtype=room.dtype, device=self.device)
        return values, self.into(room, values, after=after)

    def into(self, room: Tensor, values: Tensor, *, after: Any) -> Any:
        """Copy on the stream of that direction, once the current stream no longer uses the memory."""
        arrived = self._copy(room, values, self._back, after)
        values.record_stream(self._back)
        return arrived

    def use(self, values: Tensor, arrived: Any) -> None:
        """Make the current stream, which may differ from the one that started the copy, wait for it."""
        current = self._cuda.current_stream(self.device)
        current.wait_event(arrived)
        values.record_stream(current)

    def wait(self, event: Any) -> None:
        """Make the host wait for the copy."""
        event.synchronize()

    def _copy(self, source: Tensor, target: Tensor, stream: Any, after: Any) -> Any:
        """Copy on ``stream``, behind ``after`` and the current stream's queued work; return the event of the copy."""
        stream.wait_event(self._cuda.current_stream(self.device).record_event())
        if after is not None:
            stream.wait_event(after)
        with self._cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def open_transfers(device: torch.device) -> Transfers:
    """Transfers between a device and the host."""
    return CudaTransfers(device) if is_gpu(device) else PlainTransfers(device)
