"""The pools of a process, the order of their uses, and the rows in their pages.

Only the device knows which pages are free. GPU streams that share pools wait for each other; the host does not wait.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from typing import Any, Final, final

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.errors import RunError
from moefw.runtime.accounting import in_host_memory, without_memory
from moefw.runtime.memory.dropped import in_backward
from moefw_kernels.devices import is_gpu, runs_ahead
from moefw_kernels.paged_copy import Pages, free, load, open_pages, store, take

ROUNDING: Final = 1e-6
"""Fraction of a page that does not require another page."""


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
    """Waits only where the stream changes. ``cuda`` is ``torch.cuda``, or a test double.

    A step that is captured as a graph begins when the GPU is idle, and may not wait for what was not captured.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._last: Any = None
        self._last_was_captured = False

    def enter(self) -> None:
        """Wait for all work queued on the last stream, if it is another one."""
        current = self._cuda.current_stream(self._device)
        is_captured = self._cuda.is_current_stream_capturing()
        begins_capture = is_captured and not self._last_was_captured
        if self._last is not None and self._last != current and not begins_capture:
            current.wait_stream(self._last)
        self._last = current
        self._last_was_captured = is_captured

    def lend(self, tensor: Tensor) -> None:
        """Tell the allocator that the stream uses the tensor."""
        tensor.record_stream(self._last)


def open_order(device: torch.device) -> Order:
    """Order of a device's streams."""
    return CudaOrder(device) if is_gpu(device) else PlainOrder()


def num_pages(rows: float, page_rows: int) -> int:
    """Number of pages of ``page_rows`` for ``rows``, which may be fractional."""
    return math.ceil(rows / page_rows - ROUNDING)


@frozen
class Kind:
    """Kind of tensor that layers save: rows of ``width`` integers, in a region."""

    region: str
    width: int
    dtype: torch.dtype


@final
class Pool:
    """Pages for ``num_tensors`` tensors of one kind and of up to ``num_rows`` static rows; it holds ``num_held``."""

    def __init__(self, pages: Pages, *, num_tensors: int, num_rows: int) -> None:
        self.pages = pages
        self.num_tensors = num_tensors
        self.num_rows = num_rows
        self.num_held = 0

    def takes(self, num_rows: int) -> bool:
        """Whether the pool has room for one more tensor of ``num_rows`` static rows."""
        return self.num_held < self.num_tensors and num_rows <= self.num_rows


@final
class Held:
    """The valid rows of a tensor, in pages until nothing refers to this any more."""

    def __init__(self, stash: Stash, pool: Pool, table: Tensor, num_valid: Tensor) -> None:
        self._stash = stash
        self._pool = pool
        self._table = table
        self._num_valid = num_valid

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self._table.device

    def load(self, into: Tensor) -> None:
        """Copy the rows back into the first rows of ``into``."""
        self._stash.settle()
        self._stash.settle_behind_backward()
        load(self._pool.pages, self._table, self._num_valid, into=into)


@final
class Stash:
    """Pools by kind, each with room for one tensor per layer. One stash serves all micro-batches of a process.

    Pages are released when a graph of autograd is freed. That may be anywhere, also in the garbage collector, so the
    device frees them not then but before the next request for pages or rows, and at the end of the backward that reads
    rows: a step that is captured as a graph of the device frees what it took, and nothing else.

    Where more tensors are held at a time, of a layer or of micro-batches in flight, another pool is opened.
    ``num_layers``: number of layers that have a region.

    ``fills_what_is_freed``: whether a micro-batch fills layer by layer what another one frees, so that both together
    hold hardly more than one. Another pool then has room for one tensor.
    """

    def __init__(
        self, order: Order, *, page_rows: int, spill: bool, pinned: bool, fills_what_is_freed: bool = False
    ) -> None:
        self.num_layers: Counter[str] = Counter()
        self.pools: defaultdict[Kind, list[Pool]] = defaultdict(list)
        self._order = order
        self._page_rows = page_rows
        self._spill = spill
        self._pinned = pinned
        self._fills_what_is_freed = fills_what_is_freed
        self._let_go: deque[tuple[Pool, Tensor]] = deque()
        self._settles_behind_backward = False

    @property
    def nbytes(self) -> int:
        """The bytes of all pages on the device."""
        return sum(pool.pages.near.nbytes for pools in self.pools.values() for pool in pools)

    def hold(self, kind: Kind, bits_RC: Tensor, num_valid: Tensor, *, share: float) -> tuple[Held, Tensor]:
        """First ``num_valid`` rows in pages, and the number of them that found none, fp32 of shape ().

        A pool that is opened for it has pages on the device for ``share`` of the rows. Raises RunError without memory.
        """
        self.settle()
        num_rows = len(bits_RC)
        pool = next((pool for pool in self.pools[kind] if pool.takes(num_rows)), None)
        if pool is None:
            pool = self._open(kind, bits_RC, share)
            self.pools[kind].append(pool)
        table, unsaved = take(pool.pages, num_valid, max_rows=num_rows)
        store(bits_RC, pool.pages, table, num_valid)
        pool.num_held += 1
        held = Held(self, pool, table, num_valid)
        weakref.finalize(held, self._let_go.append, (pool, table))
        return held, unsaved

    def settle(self) -> None:
        """Free the pages of released tensors. Later work on the current stream may take them."""
        self._order.enter()
        while self._let_go:
            pool, table = self._let_go.popleft()
            free(pool.pages, table)
            self._order.lend(table)
            pool.num_held -= 1

    def settle_behind_backward(self) -> None:
        """Free the pages that the running backward releases when it ends. Does nothing outside of one."""
        if self._settles_behind_backward or not in_backward():
            return
        self._settles_behind_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._settles_behind_backward = False
        self.settle()

    def close(self) -> None:
        """Free the pools; may be called twice. A pool that still holds tensors is freed with the last of them."""
        self.pools.clear()
        self._let_go.clear()

    def _open(self, kind: Kind, bits_RC: Tensor, share: float) -> Pool:
        """New pool for one tensor of each layer, with near pages for ``share`` of the rows of each.

        With spill there are far pages for all other rows.
        """
        is_first = not self.pools[kind]
        num_rows = len(bits_RC)
        all_pages = math.ceil(num_rows / self._page_rows)
        near_pages = min(all_pages, num_pages(share * num_rows, self._page_rows))
        far_pages = all_pages - near_pages if self._spill else 0
        num_tensors = max(1, self.num_layers[kind.region]) if is_first or not self._fills_what_is_freed else 1
        shape = (self._page_rows, kind.width)
        pages = open_pages(
            bits_RC.new_empty(num_tensors * near_pages, *shape),
            self._far_memory(bits_RC, num_tensors * far_pages, *shape),
        )
        return Pool(pages, num_tensors=num_tensors, num_rows=num_rows)

    def _far_memory(self, bits_RC: Tensor, *shape: int) -> Tensor:
        """Host memory of the dtype of ``bits_RC``; where tensors have no memory, a tensor without it."""
        if not without_memory():
            return self._host_memory(*shape, dtype=bits_RC.dtype)
        with in_host_memory():
            return bits_RC.new_empty(shape)

    def _host_memory(self, *shape: int, dtype: torch.dtype) -> Tensor:
        pinned = self._pinned and shape[0] > 0
        try:
            with in_host_memory():
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            nbytes = math.prod(shape) * dtype.itemsize
            memory = "page-locked host memory" if pinned else "host memory"
            first_line = str(error).partition("\n")[0]
            raise RunError(
                f"memory policy paged-stash: {nbytes} bytes of {memory} for rows that spill cannot be had "
                f"({first_line}).",
                "Leave spill out, raise factor, or stash fewer regions.",
            ) from error


def open_stash(device: torch.device, *, page_rows: int, spill: bool, fills_what_is_freed: bool) -> Stash:
    """Stash for tensors of a device."""
    return Stash(
        open_order(device),
        page_rows=page_rows,
        spill=spill,
        pinned=runs_ahead(device),
        fills_what_is_freed=fills_what_is_freed,
    )
