"""What the device of a tensor means for the host and for kernels: nothing else asks for the type of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def is_gpu(device: torch.device) -> bool:
    """Whether the device is a CUDA GPU, with streams, a compute capability and an allocator of its own."""
    return device.type == "cuda"


def takes_kernels(tensor: Tensor) -> bool:
    """Whether kernels in Triton, and the fused ones of PyTorch, run on the tensor."""
    return tensor.is_cuda


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of the device, so that it waits where it reads or uploads a value."""
    return device.type != "cpu"


class HostCopy:
    """Tensors of one dtype on their way to the host, through one asynchronous copy where the host would wait."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._arrived: Any = None
        self._flat = torch.cat([tensor.flatten() for tensor in tensors])
        device = self._flat.device
        if runs_ahead(device):
            # Only a copy into page-locked memory is asynchronous.
            pinned = torch.empty_like(self._flat, device="cpu", pin_memory=True)
            self._flat = pinned.copy_(self._flat, non_blocking=True)
            self._arrived = torch.get_device_module(device).Event()
            self._arrived.record()

    @property
    def waits(self) -> bool:
        """Whether :meth:`read` waits for a device."""
        return self._arrived is not None

    def read(self) -> Iterator[Tensor]:
        """Wait, and return the copies in order."""
        if self._arrived is not None:
            self._arrived.synchronize()
        pieces = self._flat.split([shape.numel() for shape in self._shapes])
        return (piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True))


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Values of a tensor of the CPU, or of the device, on the device. The host does not wait."""
    return values if values.device == device else values.pin_memory().to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> list[Any]:
    """Values of tensors of one dtype as nested lists. The host waits at most once."""
    copies = HostCopy(tensors).read() if runs_ahead(tensors[0].device) else tensors
    return [copy.tolist() for copy in copies]
