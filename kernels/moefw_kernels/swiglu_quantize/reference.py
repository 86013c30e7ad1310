"""The truth in plain PyTorch: one after the other."""

from __future__ import annotations

from torch import Tensor

from moefw_kernels.quantize import Quantized, Scales, quantize_rows
from moefw_kernels.swiglu import weighted_swiglu


def swiglu_quantize(h_RH: Tensor, weights_R: Tensor, scales: Scales) -> Quantized:
    """The activation, then its codes and scales."""
    return quantize_rows(weighted_swiglu(h_RH, weights_R), scales=scales)
