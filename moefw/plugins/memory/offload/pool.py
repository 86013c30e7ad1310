"""Buffers off the device, and the copies in them. One pool serves all layers and micro-batches of a process."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from moefw.plugins.memory.offload.buffers import UnnamedFiles, host_memory
from moefw.plugins.memory.offload.span import Span
from moefw.plugins.memory.offload.streams import Transfers, open_transfers
from moefw.runtime.accounting import without_memory
from moefw_kernels.devices import runs_ahead

Allocate = Callable[[int], Tensor]
"""Allocates n bytes, ``(n,)`` uint8 on the CPU. Raises RunError where there is no room."""


@final
class Buffer:
    """Bytes to copy to and from. ``last_use``: event of the copy that must be done before the next one starts."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last_use: Any = None

    def values(self, span: Span) -> Tensor:
        """Part that holds a span's values, ``(length,)``."""
        return self.memory[: span.nbytes].view(span.dtype)


@final
class Copy:
    """The values of a span off the device, from pack until no tensor of the span is needed.

    The buffer is released as soon as the fetch has started, or nothing refers to the copy any more.
    """

    def __init__(self, pool: Pool, span: Span, values: Tensor) -> None:
        self._span = span
        self._transfers = pool.transfers
        self._buffer = pool.take(span.nbytes)
        self._give_back = weakref.finalize(self, pool.give, self._buffer)
        self._back: tuple[Tensor, Any] | None = None
        buffer = self._buffer
        buffer.last_use = self._transfers.out(values, buffer.values(span), after=buffer.last_use)

    def fetch(self) -> None:
        """Start fetching the values, once."""
        if self._back is not None:
            return
        buffer = self._buffer
        values, arrived = self._transfers.back(buffer.values(self._span), after=buffer.last_use)
        self._back = (values, arrived)
        # The next user of the buffer waits for the fetch, on the device: the host gives the buffer back at once.
        buffer.last_use = arrived
        self._give_back()

    def values(self) -> Tensor:
        """Fetched values, for use on the current stream. Every call returns the same tensor."""
        assert self._back is not None
        values, arrived = self._back
        self._transfers.use(values, arrived)
        return values


@final
class Pool:
    """Reuses buffers by size, rounded up to a power of two as page-locked memory is anyway.

    ``copies`` holds copies, offloaded or fetched, while they are referenced; ``latest`` is the last call of a region
    that offloaded something. ``num_buffers`` were ever allocated, ``num_idle`` of them are not in use.
    """

    def __init__(self, allocate: Allocate, transfers: Transfers) -> None:
        self.transfers = transfers
        self.device = transfers.device
        self.copies: weakref.WeakValueDictionary[Span, Copy] = weakref.WeakValueDictionary()
        self.latest: Callable[[], Any] = lambda: None
        self.num_buffers = 0
        self._allocate = allocate
        self._idle: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        self._closed = False

    @property
    def num_idle(self) -> int:
        """The number of buffers that are not in use."""
        return sum(map(len, self._idle.values()))

    def copy(self, tensor: Tensor, span: Span) -> Copy:
        """Copy of the tensor's span off the device. Raises RunError where there is no room."""
        copy = Copy(self, span, span.values(tensor))
        self.copies[span] = copy
        return copy

    def take(self, nbytes: int) -> Buffer:
        """Buffer of at least ``nbytes``, an idle one if there is one."""
        size = 1 << (nbytes - 1).bit_length()
        try:
            return self._idle[size].pop()
        except IndexError:
            self.num_buffers += 1
            return Buffer(self._allocate(size))

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Runs wherever a graph is freed, so it does not wait."""
        if not self._closed:
            self._idle[len(buffer.memory)].append(buffer)

    def close(self) -> None:
        """Free the idle buffers; may be called twice. The others are freed with the copies in them."""
        self._closed = True
        self._idle.clear()


def open_pool(device: torch.device, folder: str | None) -> Pool:
    """Pool for a device: of host memory, or of files in ``folder``. Raises PlanError if it is not writable."""
    if folder is None or without_memory():
        return Pool(host_memory(pinned=runs_ahead(device)), open_transfers(device))
    return Pool(UnnamedFiles(Path(folder)), open_transfers(device))
