"""A copy in host memory of what a rank saves, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from attrs import evolve
from torch import Tensor

from moefw.training.checkpoint.parts import Part
from moefw_kernels.devices import runs_ahead


@final
class Snapshot:
    """Host memory for the parts of a rank, made at the first save and used again by later ones.

    For a GPU it is page-locked, and filled by copies on a stream of their own, which no kernel of a step waits for.
    ``cuda`` is ``torch.cuda``, or a test double; None: that of the device, if it is one that runs ahead of the host.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._device = device
        self._pinned = runs_ahead(device)
        self._cuda: Any = torch.get_device_module(device) if self._pinned else cuda
        self._stream: Any = None if self._cuda is None else self._cuda.Stream(device)

    def now(self) -> Any:
        """Mark of the work that a GPU has been given so far; None on a CPU, where it is done. For :meth:`taken`."""
        return None if self._cuda is None else self._cuda.current_stream(self._device).record_event()

    def taken(self, parts: Sequence[Part], after: Any) -> list[Part]:
        """Copies of parts, once the work before the mark ``after`` is done. Returns when all of them are there.

        A thread may call it, while no other one writes into the parts. The values of an earlier call change.
        """
        copies = [evolve(part, values=self._buffer(part)) for part in parts]
        if self._cuda is None:
            _copy(parts, copies)
            return copies
        # The device of a new thread is the first GPU, and CUDA opens a context on it where a stream of it is chosen
        # again: half a gigabyte, of every rank of the machine.
        with self._cuda.device(self._device):
            self._stream.wait_event(after)
            with self._cuda.stream(self._stream):
                _copy(parts, copies)
            self._stream.record_event().synchronize()
        return copies

    def _buffer(self, part: Part) -> Tensor:
        like = part.values
        buffer = self._buffers.get(part.name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._pinned)
            self._buffers[part.name] = buffer
        return buffer


def _copy(parts: Sequence[Part], copies: Sequence[Part]) -> None:
    for part, copy in zip(parts, copies, strict=True):
        copy.values.copy_(part.values, non_blocking=True)
