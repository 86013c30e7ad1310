"""Products of groups of rows in 16 bits on a CPU, in few shapes.

oneDNN compiles a kernel for each shape that it has not met, in 0.3 to 0.4 ms: several times the product of a small
expert. The number of an expert's rows changes with every micro-batch. Rounded up to a multiple of ``ROWS`` it recurs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moefw_kernels.devices import runs_ahead

ROWS: Final = 32
"""Rows are multiplied in multiples of this number."""


def compiles_by_shape(tensor: Tensor) -> bool:
    """Whether a product of this tensor compiles a kernel for each shape: 16 bits, on a CPU."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and not runs_ahead(tensor.device)


def grouped_mm(x_RI: Tensor, w_eIO: Tensor, ends_e: Tensor) -> Tensor:
    """Product of each group of rows with its matrix, ``(R, O)``. Rows past the last end are undefined.

    ``x_RI`` and ``w_eIO`` of one dtype of 16 bits, on a CPU; ``ends_e`` int32, where each group ends. A product also
    covers rows behind its group, which the next group's product overwrites.
    """
    out_RO = x_RI.new_empty(len(x_RI), w_eIO.shape[-1])
    begin = 0
    # In ascending order: a product may write behind its group, and the next one repairs that.
    for w_IO, end in zip(w_eIO, ends_e.tolist(), strict=True):
        if end > begin:
            _multiply(x_RI, w_IO, out_RO, begin, end)
        begin = end
    return out_RO


def _multiply(x_RI: Tensor, w_IO: Tensor, out_RO: Tensor, begin: int, end: int) -> None:
    """Write the product of rows ``begin`` to ``end``. Rows behind them may change, rows before them do not."""
    num_rows = len(x_RI)
    rounded = _rounded(end - begin)
    if begin + rounded <= num_rows:
        torch.mm(x_RI[begin : begin + rounded], w_IO, out=out_RO[begin : begin + rounded])
    elif rounded <= num_rows:
        # Too near the end to round up: take rows ahead of the group along, and keep only those of the group.
        first = num_rows - rounded
        out_RO[begin:end] = torch.mm(x_RI[first:], w_IO)[begin - first : end - first]
    else:
        torch.mm(x_RI[begin:end], w_IO, out=out_RO[begin:end])


def whole_blocks(rows_RI: Tensor) -> Tensor:
    """Rows, followed by zeros up to a multiple of ``ROWS`` if their product is compiled by its shape."""
    if not compiles_by_shape(rows_RI):
        return rows_RI
    missing = _rounded(len(rows_RI)) - len(rows_RI)
    if not missing:
        return rows_RI
    return torch.cat((rows_RI, rows_RI.new_zeros(missing, rows_RI.shape[1])))


def _rounded(rows: int) -> int:
    """Number of rows, rounded up to a multiple of ``ROWS``."""
    return -(-rows // ROWS) * ROWS
