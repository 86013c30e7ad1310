"""Rows on the wire as E4M3 codes with the scales of blocks along each row: half the bytes of bf16."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.runtime.communication.movement import Permutation
from moefw_kernels.permute import RowMap
from moefw_kernels.permute_quantize import permute_quantize
from moefw_kernels.quantize import E4M3, Scales, quantize_rows, row_block, rows_of, scale_dtype


@final
class PackedRows:
    """A row of ``dim`` codes, one byte each, then its scales."""

    def __init__(self, scales: Scales, *, dim: int) -> None:
        self._scales, self._dim, self._scale_dtype = scales, dim, scale_dtype(scales)
        self._end = dim + -(-dim // row_block(scales)) * self._scale_dtype.itemsize
        self.row_bytes = self._end + self._end % 2

    def pack(self, rows_ND: Tensor) -> Tensor:
        """Return codes and scales as ``(N, row_bytes / 2)`` bf16."""
        encoded = quantize_rows(rows_ND, scales=self._scales)
        parts = [part.contiguous().view(torch.uint8) for part in (encoded.codes, encoded.scales)]
        return F.pad(torch.cat(parts, 1), (0, self.row_bytes - self._end)).view(torch.bfloat16)

    def pack_permuted(self, x_TD: Tensor, rows: Permutation) -> Tensor:
        """Return the packed rows of tokens, in one pass where scales are aligned to their size."""
        if not isinstance(rows, RowMap) or self._dim % self._scale_dtype.itemsize:
            return self.pack(rows.gather(x_TD))
        packed = torch.empty(len(rows.token_R), self.row_bytes, dtype=torch.uint8, device=x_TD.device)
        packed[:, self._end :] = 0
        codes, scales = packed[:, : self._dim].view(E4M3.dtype), packed[:, self._dim : self._end]
        permute_quantize(x_TD, rows, scales=self._scales, into=(codes, scales.view(self._scale_dtype)))
        return packed.view(torch.bfloat16)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ``(N, dim)``, as the GEMM that quantizes them again will see them."""
        codes, scales, _ = packed.view(torch.uint8).split(
            [self._dim, self._end - self._dim, self.row_bytes - self._end], dim=1
        )
        codes, scales = (part.clone(memory_format=torch.contiguous_format) for part in (codes, scales))
        codes, scales = codes.view(E4M3.dtype), scales.view(self._scale_dtype)
        return rows_of(codes, scales, scales=self._scales).dequantize().to(dtype)
