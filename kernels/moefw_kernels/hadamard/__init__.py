"""Random Hadamard transform of 16 numbers, with which NVFP4 training spreads outliers."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.hadamard import reference
from moefw_kernels.hadamard.reference import SIZE
from moefw_kernels.in_place import in_place_of_a_kernel

__all__ = ["SIZE", "hadamard"]


def hadamard(x: Tensor, *, axis: int = -1) -> Tensor:
    """``x`` (..., R, C) with every 16 numbers along ``axis``, -1 or -2, multiplied by ``diag(signs) @ H / 4``.

    H is Sylvester's matrix in natural order, and the signs are those of Transformer Engine. Computed in fp32, rounded
    once to the dtype of ``x``; contiguous along ``axis``. The matrix is orthogonal, so
    ``hadamard(a) @ hadamard(b, axis=-2)`` is ``a @ b`` up to rounding. Not differentiable. Source: ``_apply_rht`` in
    ``reference_nvfp4.py`` of Transformer Engine.

    Raises:
        ValueError: ``axis`` is neither -1 nor -2, its size is no multiple of 16, or ``x`` is not fp32, bf16 or fp16.
    """
    if axis not in (-1, -2) or x.ndim < 2 or x.shape[axis] % SIZE:
        raise ValueError(
            f"the transform mixes {SIZE} numbers, so axis {axis} of {tuple(x.shape)} must be -1 or -2 "
            f"and a multiple of {SIZE}: pad with zeros, which leaves a product as it is"
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"cannot transform {x.dtype}: give fp32, bf16 or fp16")
    with torch.no_grad():
        rows = x if axis == -1 else x.mT
        if takes_kernels(x):
            from moefw_kernels.hadamard import triton

            out = triton.hadamard(rows)
        else:
            with in_place_of_a_kernel():
                out = reference.hadamard(rows)
        return out if axis == -1 else out.mT
