"""SwiGLU of the experts fused with its quantization for the second GEMM; see README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.in_place import in_place_of_a_kernel
from moefw_kernels.quantize import Quantized, Scales
from moefw_kernels.swiglu_quantize import reference

__all__ = ["swiglu_quantize"]


def swiglu_quantize(h_RH: Tensor, weights_R: Tensor, *, scales: Scales) -> Quantized:
    """``quantize_rows(weighted_swiglu(h_RH, weights_R), scales=scales)`` (R, F), bit for bit.

    ``h_RH`` is bf16 (H = 2F: gate, then up) and ``weights_R`` fp32. The activation itself is not written.

    Raises:
        ValueError: Another dtype, or shapes that do not fit together.
    """
    if h_RH.dtype is not torch.bfloat16 or h_RH.ndim != 2 or h_RH.shape[1] % 2:
        raise ValueError(f"h is {h_RH.dtype} {tuple(h_RH.shape)}; give torch.bfloat16 (R, 2F)")
    if weights_R.shape != h_RH.shape[:1] or weights_R.dtype is not torch.float32:
        raise ValueError(
            f"weights are {weights_R.dtype} {tuple(weights_R.shape)}; "
            f"give one for each row: torch.float32 {tuple(h_RH.shape[:1])}"
        )
    if not takes_kernels(h_RH):
        with in_place_of_a_kernel():
            return reference.swiglu_quantize(h_RH, weights_R, scales)
    from moefw_kernels.swiglu_quantize import triton

    return triton.swiglu_quantize(h_RH, weights_R, scales)
