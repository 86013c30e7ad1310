"""Reference in plain PyTorch: dequantized values, multiplied in fp32 expert by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.quantize import Quantized


def grouped_mm(a: Quantized, b: Quantized, ends_e: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Products of the kernels, except for the order of their sums."""
    left = a.dequantize()
    right = b.dequantize()
    ends = ends_e.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if right.ndim == 3:
        products = [left[rows] @ weight for rows, weight in zip(groups, right)]
        unused = left.new_zeros(len(left) - (ends or [0])[-1], right.shape[-1])
        return torch.cat([*products, unused]).to(out_dtype)
    out_eOI = left.new_empty(len(groups), left.shape[0], right.shape[1], dtype=out_dtype)
    for out_OI, rows in zip(out_eOI, groups):
        out_OI.copy_(left[:, rows] @ right[rows])
    return out_eOI
