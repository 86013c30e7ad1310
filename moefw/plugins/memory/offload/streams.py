"""Copies between the device and buffers: on a GPU beside its computation, ordered by events.

Memory of the device is lent to the copying stream by ``record_stream``: once its tensor is gone, the caching allocator
gives it out again as soon as the copies queued there are done, and nobody waits for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor


class Transfers(ABC):
    """Copies values off the device and back. An event says when a copy is done; None: it is."""

    device: torch.device

    @abstractmethod
    def out(self, values: Tensor, room: Tensor, *, after: Any) -> Any:
        """Copy ``values`` into ``room`` once ``after`` is done and the current stream has computed them.

        Returns the event of the copy. The caller need not hold on to ``values``.
        """

    @abstractmethod
    def back(self, room: Tensor, *, after: Any) -> tuple[Tensor, Any]:
        """Start copying ``room`` to the device once ``after`` is done; return the values and the event of the copy."""

    @abstractmethod
    def into(self, room: Tensor, values: Tensor, *, after: Any) -> Any:
        """Copy ``room`` into ``values``, memory of the device, once ``after`` and what the current stream has are done.

        Returns the event of the copy. The caller need not hold on to ``values``.
        """

    @abstractmethod
    def use(self, values: Tensor, arrived: Any) -> None:
        """Let the current stream wait for values that come back."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Let the host wait for a copy."""


@final
class PlainTransfers(Transfers):
    """Copies that are done when they return: for a CPU, which has no streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def out(self, values: Tensor, room: Tensor, *, after: Any) -> None:
        """Copy."""
        room.copy_(values)

    def back(self, room: Tensor, *, after: Any) -> tuple[Tensor, Any]:
        """Return a copy."""
        return room.to(self.device, copy=True), None

    def into(self, room: Tensor, values: Tensor, *, after: Any) -> None:
        """Copy."""
        values.copy_(room)

    def use(self, values: Tensor, arrived: Any) -> None:
        """Wait for nothing."""

    def wait(self, event: Any) -> None:
        """Wait for nothing."""


@final
class CudaTransfers(Transfers):
    """Copies on two streams of their own, one a direction. ``cuda`` is ``torch.cuda``, or what a test puts for it.

    Values come back into memory of the current stream, so a fetch waits for what that stream has been given before:
    started one region ahead, it overlaps with the region in between.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self._cuda = device, cuda
        self._out, self._back = cuda.Stream(device), cuda.Stream(device)

    def out(self, values: Tensor, room: Tensor, *, after: Any) -> Any:
        """Copy on the stream of that direction, once the current stream has computed the values."""
        done = self._copy(values, room, self._out, after)
        values.record_stream(self._out)
        return done

    def back(self, room: Tensor, *, after: Any) -> tuple[Tensor, Any]:
        """Copy on the stream of that direction, once the current stream has no more use for the memory."""
        values = torch.empty(len(room), dtype=room.dtype, device=self.device)
        return values, self.into(room, values, after=after)

    def into(self, room: Tensor, values: Tensor, *, after: Any) -> Any:
        """Copy on the stream of that direction, once the current stream has no more use for the memory."""
        arrived = self._copy(room, values, self._back, after)
        values.record_stream(self._back)
        return arrived

    def use(self, values: Tensor, arrived: Any) -> None:
        """Let the current stream, which need not be the one that asked, wait for the copy."""
        current = self._cuda.current_stream(self.device)
        current.wait_event(arrived)
        values.record_stream(current)

    def wait(self, event: Any) -> None:
        """Let the host wait for the copy."""
        event.synchronize()

    def _copy(self, source: Tensor, target: Tensor, stream: Any, after: Any) -> Any:
        stream.wait_event(self._cuda.current_stream(self.device).record_event())
        if after is not None:
            stream.wait_event(after)
        with self._cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def open_transfers(device: torch.device) -> Transfers:
    """Return what copies between a device and the host."""
    return CudaTransfers(device) if device.type == "cuda" else PlainTransfers(device)
