"""Groups of consecutive rows, such as those of an expert."""

from __future__ import annotations

import torch
from torch import Tensor


def group_of_row(ends_e: Tensor, num_rows: int) -> Tensor:
    """Group of each row, int64 ``(R,)``; ``e`` for rows past the last end. Does not wait for a GPU."""
    rows = torch.arange(num_rows, device=ends_e.device, dtype=ends_e.dtype)
    return torch.searchsorted(ends_e, rows, right=True)
