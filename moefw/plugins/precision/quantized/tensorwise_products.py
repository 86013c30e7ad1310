"""FP8 products with one scale per tensor, which torch supports from compute capability 8.9 on.

``_scaled_tensorwise_tensorwise`` in ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` of torch (read at 0174dfa): ``a``
(M, K) is row-major and ``b`` (K, N) column-major, K and N are multiples of 16. Each has an fp32 scale of one element.
At most one is E5M2: only gradients are, and they are multiplied only with weights and inputs. Grouped,
``scaled_grouped_mm`` takes only E4M3 (``_f8_f8_bf16_rowwise_grouped_mm_cuda`` in ``GroupedBlas.cpp``), so our own
kernel multiplies.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from moefw.plugins.precision.quantized.gpus import TENSORS, Gpus
from moefw.plugins.precision.quantized.products import Products
from moefw_kernels.grouped_gemm import BLOCK, tensorwise_grouped_mm
from moefw_kernels.quantize import Quantized


@final
class TensorwiseProducts(Products):
    """``multiple`` is the tile of the grouped kernel."""

    gpus: ClassVar[Gpus] = TENSORS
    multiple: ClassVar[int] = BLOCK

    def mm(self, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
        """See ``Products.mm``."""
        kind = ScalingType.TensorWise
        return F.scaled_mm(a.codes, b.codes, a.scales, kind, b.scales, kind, output_dtype=out_dtype)

    def grouped_mm(self, a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
        """See ``Products.grouped_mm``."""
        return tensorwise_grouped_mm(a, b, ends_e, out_dtype=out_dtype)
