"""Rows in E4M3 with blocks along the row: the form of inputs in fprop, and of rows that travel to experts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moefw_kernels.quantize.formats import E4M3
from moefw_kernels.quantize.quantized import Quantized

Scales = Literal["fp32", "power_of_two", "e8m0"]
"""Scales of blocks: of 1x128 fp32, exact or a power of two; of 1x32 E8M0."""


def row_block(scales: Scales) -> int:
    """Number of columns that share a scale."""
    return 32 if scales == "e8m0" else 128


def scale_dtype(scales: Scales) -> torch.dtype:
    """Dtype in which a scale is stored."""
    return torch.float8_e8m0fnu if scales == "e8m0" else torch.float32


def empty_rows(num_rows: int, columns: int, *, scales: Scales, device: torch.device) -> Quantized:
    """Allocate rows without initializing them."""
    codes = torch.empty(num_rows, columns, dtype=E4M3.dtype, device=device)
    blocks = -(-columns // row_block(scales))
    return rows_of(codes, torch.empty(num_rows, blocks, dtype=scale_dtype(scales), device=device), scales=scales)


def rows_of(codes: Tensor, block_scales: Tensor, *, scales: Scales) -> Quantized:
    """E4M3 codes ``(R, C)`` and the scales of their blocks in the form that ``quantize_rows`` returns."""
    return Quantized(
        codes=codes,
        scales=block_scales,
        fmt=E4M3,
        block=(1, row_block(scales)),
        axis=-1,
        shape=tuple(codes.shape),
    )
