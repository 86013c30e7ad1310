"""Rows on the wire as E4M3 codes with the scales of blocks along each row: half the bytes of bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.quantize import E4M3, Quantized


@final
class PackedRows:
    """A row of ``dim`` codes, one byte each, then its scales; ``encode`` quantizes in blocks of ``(1, columns)``."""

    def __init__(self, encode: Callable[[Tensor], Quantized], *, dim: int, columns: int, scale: torch.dtype) -> None:
        self._encode, self._dim, self._block, self._scale = encode, dim, (1, columns), scale
        self._end = dim + -(-dim // columns) * scale.itemsize
        self.row_bytes = self._end + self._end % 2

    def pack(self, rows_ND: Tensor) -> Tensor:
        """Return codes and scales as ``(N, row_bytes / 2)`` bf16."""
        encoded = self._encode(rows_ND)
        parts = [part.contiguous().view(torch.uint8) for part in (encoded.codes, encoded.scales)]
        return F.pad(torch.cat(parts, 1), (0, self.row_bytes - self._end)).view(torch.bfloat16)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ``(N, dim)``, as the GEMM that quantizes them again will see them."""
        codes, scales, _ = packed.view(torch.uint8).split(
            [self._dim, self._end - self._dim, self.row_bytes - self._end], dim=1
        )
        values = Quantized(
            codes.contiguous().view(E4M3.dtype),
            scales.contiguous().view(self._scale),
            E4M3,
            self._block,
            -1,
            (len(packed), self._dim),
        )
        return values.dequantize().to(dtype)
