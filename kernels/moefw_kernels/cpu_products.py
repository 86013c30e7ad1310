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
    """Return whether products of such a tensor take a kernel for each shape."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and not runs_ahead(tensor.device)


def grouped_mm(x_RI: Tensor, w_eIO: Tensor, ends_e: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix, ``(R, O)``. Rows past the last end are undefined.

    ``x_RI`` and ``w_eIO`` of one dtype of 16 bits, on a CPU; ``ends_e`` int32, where each group ends. A product also
    covers rows behind its group, which the next group's product overwrites.
    """
    out_RO, begin = x_RI.new_empty(len(x_RI), w_eIO.shape[-1]), 0
    for w_IO, end in zip(w_eIO, ends_e.tolist(), strict=True):
        if end > begin:
            _multiply(x_RI, w_IO, out_RO, begin, end)
        begin = end
    return out_RO


def _multiply(x_RI: Tensor, w_IO: Tensor, out_RO: Tensor, begin: int, end: int) -> None:
    """Write the product of rows ``begin`` to ``end``. Rows behind them may change, rows before them do not."""
    rows, most = _rounded(end - begin), len(x_RI)
    if begin + rows <= most:
        torch.mm(x_RI[begin : begin + rows], w_IO, out=out_RO[begin : begin + rows])
    elif rows <= most:
        first = most - rows
        out_RO[begin:end] = torch.mm(x_RI[first:], w_IO)[begin - first : end - first]
    else:
        torch.mm(x_RI[begin:end], w_IO, out=out_RO[begin:end])


def whole_blocks(rows_RI: Tensor) -> Tensor:
    """Return the rows, followed by zeros up to a multiple of ``ROWS`` if their product is compiled by its shape."""
    missing = _rounded(len(rows_RI)) - len(rows_RI) if compiles_by_shape(rows_RI) else 0
    return torch.cat((rows_RI, rows_RI.new_zeros(missing, rows_RI.shape[1]))) if missing else rows_RI


def _rounded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS
