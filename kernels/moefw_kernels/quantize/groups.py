"""One number for each group of consecutive rows, such as those of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.hadamard.reference import hadamard as transform
from moefw_kernels.in_place import in_place_of_a_kernel


def group_of_row(ends_e: Tensor, num_rows: int) -> Tensor:
    """Group of each row, int64 ``(R,)``; ``e`` for rows past the last end. Does not wait for a GPU."""
    rows = torch.arange(num_rows, device=ends_e.device, dtype=ends_e.dtype)
    return torch.searchsorted(ends_e, rows, right=True)


def matrix_amax(x: Tensor, hadamard: bool) -> Tensor:
    """Largest magnitude of each matrix of ``x (..., R, C)``, fp32 ``(...)``."""
    rows = _row_amax(x, hadamard)
    with in_place_of_a_kernel():
        return rows.amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])


def group_amax(x: Tensor, ends_e: Tensor, hadamard: bool) -> Tensor:
    """Largest magnitude of each group of the rows ``x (R, C)``, fp32 ``(e,)``."""
    rows = _row_amax(x, hadamard)
    with in_place_of_a_kernel():
        # An entry more than there are groups, for the rows past the last end.
        amax = rows.new_zeros(len(ends_e) + 1)
        return amax.scatter_reduce(0, group_of_row(ends_e, len(rows)), rows, "amax")[:-1]


def _row_amax(x: Tensor, hadamard: bool) -> Tensor:
    """Largest magnitude of each row of ``x (..., R, C)``, fp32 ``(..., R)``."""
    with in_place_of_a_kernel():
        if not x.shape[-1]:
            return x.new_zeros(x.shape[:-1], dtype=torch.float32)
        if hadamard:
            x = transform(x.mT).mT
        return x.abs().amax(-1).float()
