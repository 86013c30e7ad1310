"""One number for each group of consecutive rows, such as those of an expert."""

from __future__ import annotations

import torch
from torch import Tensor


def group_of_row(ends_e: Tensor, num_rows: int) -> Tensor:
    """Group of each row, int64 ``(R,)``; ``e`` for rows past the last end. Does not wait for a GPU."""
    rows = torch.arange(num_rows, device=ends_e.device, dtype=ends_e.dtype)
    return torch.searchsorted(ends_e, rows, right=True)


def group_amax(x: Tensor, ends_e: Tensor) -> Tensor:
    """Largest magnitude of each group of the rows ``x (R, C)``, fp32 ``(e,)``.

    0 for a group without rows, NaN for a group with a NaN. Rows past the last end are ignored.
    """
    rows = x.abs().amax(1).float() if x.numel() else x.new_zeros(len(x), dtype=torch.float32)
    # An entry more than there are groups, for the rows past the last end.
    amax = rows.new_zeros(len(ends_e) + 1)
    return amax.scatter_reduce(0, group_of_row(ends_e, len(x)), rows, "amax")[:-1]


def matrix_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each matrix of ``x (..., R, C)``, fp32 ``(...)``; 0 for an empty matrix."""
    if not x.shape[-2:].numel():
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    return x.abs().amax((-2, -1)).float()
