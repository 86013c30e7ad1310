"""Encoders as Triton kernels, which equal those of ``reference.py`` bit for bit."""

from moefw_kernels.quantize.triton.amax import group_amax, matrix_amax
from moefw_kernels.quantize.triton.blocks import quantize_fp8, quantize_fp8_both, quantize_mxfp8, quantize_mxfp8_both
from moefw_kernels.quantize.triton.nvfp4 import quantize_nvfp4, quantize_nvfp4_both
from moefw_kernels.quantize.triton.tensors import quantize_tensor, quantize_tensor_both

__all__ = [
    "group_amax",
    "matrix_amax",
    "quantize_fp8",
    "quantize_fp8_both",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_tensor",
    "quantize_tensor_both",
]
