"""State of a pool of pages: memory on the device and, optionally, further memory on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages of rows and the list of free ones: ``P`` near pages, and ``Q`` far pages, which are numbered from ``P``.

    Attributes:
        near: Integers ``(P, page_rows, C)`` on the device.
        far: The same on the host, ``(Q, page_rows, C)``. Page-locked if the device is a GPU, so its kernels reach it.
        ring: int64 ``(P + Q,)``: the numbers of the free pages, a ring of the near pages, then a ring of the far ones.
        counters: int64 ``(2, 2)``: for near, then far, the pages ever taken from the ring and ever put into it.
    """

    near: Tensor
    far: Tensor
    ring: Tensor
    counters: Tensor

    @property
    def page_rows(self) -> int:
        """Number of rows of a page."""
        return self.near.shape[1]

    def length_of(self, num_rows: int) -> int:
        """Number of pages that ``num_rows`` rows need."""
        return -(-num_rows // self.page_rows)


def open_pages(near: Tensor, far: Tensor) -> Pages:
    """Pool over the given memory, with all pages free.

    Raises:
        ValueError: ``page_rows`` is no power of two, P is 0, pages are not integers, or near and far pages differ.
    """
    rows = near.shape[1] if near.ndim == 3 else 0
    if rows < 1 or rows & (rows - 1) or not len(near) or near.dtype.is_floating_point:
        raise ValueError(f"near pages are {near.dtype} {tuple(near.shape)}: give integers (P, a power of two, C)")
    if far.shape[1:] != near.shape[1:] or far.dtype is not near.dtype:
        raise ValueError(f"far pages are {far.dtype} {tuple(far.shape)}, near ones {near.dtype} {tuple(near.shape)}")
    sizes = torch.tensor([[0, len(near)], [0, len(far)]], device=near.device)
    return Pages(near, far, torch.arange(len(near) + len(far), device=near.device), sizes)
