"""Products of FP8 in blocks of 128, in the layout that ``torch.nn.functional.scaled_mm`` requires.

Only on Hopper (compute capability 9.0) with cuBLASLt 12.9 or later: ``_scaled_block1x128_block128x128`` and
``_scaled_block1x128_block1x128`` in ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` of torch (read at 0174dfa). ``a``
(M, K) is row-major and ``b`` (K, N) column-major; K and N are multiples of 16. Scales are fp32
(pytorch/pytorch#166752):

| blocks | of ``a`` | of ``b`` |
|---|---|---|
| 1x128 | ``[M, K / 128]``, strides ``[1, M]`` | ``[N, K / 128]``, strides ``[1, N]`` |
| 128x128 | | ``[L, N / 128]``, strides ``[1, L]``, L being K / 128 rounded up to a multiple of 4 |

Results are bf16 or fp32. torch refuses fast accumulation for these blocks. Our own kernel multiplies groups.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from moefw.plugins.precision.quantized.gpus import BLOCKS_OF_128, Gpus
from moefw.plugins.precision.quantized.products import Products
from moefw_kernels.grouped_gemm import BLOCK, blockwise_grouped_mm
from moefw_kernels.quantize import Quantized

_SCALING = {(1, 128): ScalingType.BlockWise1x128, (128, 128): ScalingType.BlockWise128x128}


@final
class BlockwiseProducts(Products):
    """``a`` in blocks of 1x128 times ``b`` in blocks of 128x1 or 128x128."""

    gpus: ClassVar[Gpus] = BLOCKS_OF_128
    multiple: ClassVar[int] = BLOCK

    def mm(self, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
        """See ``Products.mm``."""
        return F.scaled_mm(a.codes, b.codes, *_in_rows(a), *_in_rows(b.mT), output_dtype=out_dtype)

    def grouped_mm(self, a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
        """See ``Products.grouped_mm``."""
        return blockwise_grouped_mm(a, b, ends_e, out_dtype=out_dtype)


def _in_rows(operand: Quantized) -> tuple[Tensor, ScalingType]:
    """Scales, in torch's layout, and the scaling type of an operand whose last axis is summed over."""
    assert operand.block is not None
    scales = operand.scales
    scaling = _SCALING[operand.block]
    if scaling is ScalingType.BlockWise1x128:
        return scales.mT.contiguous().mT, scaling
    # The rows of scales of 128x128 blocks begin on 16 bytes: L in the table above.
    return F.pad(scales, (0, -scales.shape[-1] % 4)).contiguous().mT, scaling
