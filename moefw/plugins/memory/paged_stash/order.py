"""One use of the pools after the other: streams of a GPU that share them wait for each other, and the host for none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor


class Order(ABC):
    """Puts what is started on the current stream behind what was started before."""

    @abstractmethod
    def enter(self) -> None:
        """Let the current stream come next."""

    @abstractmethod
    def lend(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from others until the current stream has used it; the caller lets go of it."""


@final
class PlainOrder(Order):
    """That of a CPU, which has no streams."""

    def enter(self) -> None:
        """Come next anyhow."""

    def lend(self, tensor: Tensor) -> None:
        """It is used already."""


@final
class CudaOrder(Order):
    """Waits only where the stream changes. ``cuda`` is ``torch.cuda``, or what a test puts for it."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._last: Any = None

    def enter(self) -> None:
        """Wait for all that the last stream has been given, if it is another one."""
        current = self._cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def lend(self, tensor: Tensor) -> None:
        """Tell the allocator."""
        tensor.record_stream(self._last)


def open_order(device: torch.device) -> Order:
    """Return the order of a device's streams."""
    return CudaOrder(device) if device.type == "cuda" else PlainOrder()
