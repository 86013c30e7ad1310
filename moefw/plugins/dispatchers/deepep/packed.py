"""Packed rows as a DeepEP buffer moves them: bytes in a bf16 tensor, in units that both buffers copy."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.contracts import Codec

ROW_BYTES_MULTIPLE: Final = 32
"""``Buffer`` copies half rows of 16 bytes, ``ElasticBuffer`` aligns rows to 32 (``kNumTMAAlignBytes``)."""


@final
class PaddedRows:
    """The rows of a codec, each padded to a multiple of 32 bytes.

    They take the place of bf16 rows. The library's own FP8 rows, codes and scales apart, take the same bytes: they
    would be cut out of the packed rows before, and joined to packed rows after.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._extra = -codec.row_bytes % ROW_BYTES_MULTIPLE // 2
        self.row_bytes = codec.row_bytes + 2 * self._extra

    def pack(self, rows_ND: Tensor) -> Tensor:
        """Packed rows ``(N, row_bytes / 2)``."""
        packed = self._codec.pack(rows_ND)
        return F.pad(packed, (0, self._extra)) if self._extra else packed

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``(N, D)`` in ``dtype``."""
        return self._codec.unpack(packed[:, : packed.shape[1] - self._extra], dtype)
