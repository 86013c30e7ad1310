"""Order of uses of the pools: GPU streams that share them wait for each other; the host does not wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor


class Order(ABC):
    """Orders work on the current stream behind work that was started before."""

    @abstractmethod
    def enter(self) -> None:
        """Make the current stream the next user."""

    @abstractmethod
    def lend(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from reuse until the current stream has used it. The caller then drops the tensor."""


@final
class PlainOrder(Order):
    """Order on a CPU, which has no streams."""

    def enter(self) -> None:
        """Do nothing: work runs in order."""

    def lend(self, tensor: Tensor) -> None:
        """Do nothing: the tensor has been used."""


@final
class CudaOrder(Order):
    """Waits only where the stream changes. ``cuda`` is ``torch.cuda``, or a test double."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._last: Any = None

    def enter(self) -> None:
        """Wait for all work queued on the last stream, if it is another one."""
        current = self._cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def lend(self, tensor: Tensor) -> None:
        """Tell the allocator that the stream uses the tensor."""
        tensor.record_stream(self._last)


def open_order(device: torch.device) -> Order:
    """Return the order of a device's streams."""
    return CudaOrder(device) if device.type == "cuda" else PlainOrder()
