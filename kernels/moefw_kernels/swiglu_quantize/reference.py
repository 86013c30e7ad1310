"""Reference in plain PyTorch: the two ops in order."""

from __future__ import annotations

from torch import Tensor

from moefw_kernels.quantize import Quantized, Scales, quantize_rows
from moefw_kernels.swiglu import weighted_swiglu


def swiglu_quantize(h_RH: Tensor, weights_R: Tensor, scales: Scales) -> Quantized:
    """Compute the activation, then quantize it."""
    return quantize_rows(weighted_swiglu(h_RH, weights_R), scales=scales)
