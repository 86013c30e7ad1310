"""One scale for a tensor: the rows of one expert, or its weight matrix. It serves sums along either axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from torch import Tensor

from moefw.core.records import Pass, Role, Rows
from moefw.plugins.precision.quantized.encoders import Encoder
from moefw_kernels.quantize import E4M3, E5M2, Format, Quantized, quantize_tensor

FORMATS: Final[Mapping[Role, Format]] = {"input": E4M3, "weight": E4M3, "grad": E5M2}
"""Precision where values are alike, range where they are not (arXiv 2209.05433); ``HYBRID`` of Transformer Engine."""


@final
class CurrentScales(Encoder):
    """The scale that brings a tensor's own largest magnitude to the format's largest number."""

    def encode(self, x: Tensor, role: Role, during: Pass, rows: Rows) -> Quantized:
        """Return the operand."""
        return quantize_tensor(x, fmt=FORMATS[role], ends_e=rows.ends_e)
