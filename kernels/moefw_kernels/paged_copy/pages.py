"""The state of a pool of pages: memory on the device and, where asked for, behind it on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of rows, and which of them are free: ``P`` near ones, and ``Q`` far ones, which are numbered from ``P``.

    Attributes:
        near: Integers ``(P, page_rows, C)`` on the device.
        far: The same on the host, ``(Q, page_rows, C)``, page-locked where the device is a GPU, whose kernels reach it.
        ring: int64 ``(P + Q,)``: the numbers of the free pages, a ring of the near ones and behind it one of the far.
        counters: int64 ``(2, 2)``, near and far: how many pages were ever taken from the ring, and put into it.
    """

    near: Tensor
    far: Tensor
    ring: Tensor
    counters: Tensor

    @property
    def page_rows(self) -> int:
        """How many rows a page holds."""
        return self.near.shape[1]

    def length_of(self, num_rows: int) -> int:
        """Return how many pages so many rows fill."""
        return -(-num_rows // self.page_rows)


def open_pages(near: Tensor, far: Tensor) -> Pages:
    """Return a pool over memory, all of whose pages are free. ``page_rows`` is a power of two, and P at least 1.

    Raises:
        ValueError: Pages of other numbers of rows, or near and far pages that differ.
    """
    rows = near.shape[1] if near.ndim == 3 else 0
    if rows < 1 or rows & (rows - 1) or not len(near) or near.dtype.is_floating_point:
        raise ValueError(f"near pages are {near.dtype} {tuple(near.shape)}: give integers (P, a power of two, C)")
    if far.shape[1:] != near.shape[1:] or far.dtype is not near.dtype:
        raise ValueError(f"far pages are {far.dtype} {tuple(far.shape)}, near ones {near.dtype} {tuple(near.shape)}")
    sizes = torch.tensor([[0, len(near)], [0, len(far)]], device=near.device)
    return Pages(near, far, torch.arange(len(near) + len(far), device=near.device), sizes)
