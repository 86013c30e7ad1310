"""Grouped FP8 GEMMs that torch has no kernel for; see README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.grouped_gemm import reference
from moefw_kernels.quantize import E4M3, E5M2, Quantized

__all__ = ["BLOCK", "blockwise_grouped_mm", "tensorwise_grouped_mm"]

BLOCK = 128


def blockwise_grouped_mm(
    a: Quantized, b: Quantized, ends_e: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Products of groups, as ``torch.nn.functional.grouped_mm`` defines them.

    Rows by weights: ``a`` (R, I) in blocks of 1x128 and ``b`` (e, I, O) of 128x128 give ``(R, O)``. Groups may begin
    anywhere, and rows past the last end are undefined. Sum over rows: ``a`` (O, R) in blocks of 1x128 and ``b``
    (R, I) of 128x1 give ``(e, O, I)``, zero where a group is empty. Ends are then multiples of 128, so that no block
    spans two groups. ``ends_e``, int32, is read only on the device. I and O are multiples of 128. Codes are
    contiguous along the summed axis. Each block's sum is fp32 and is scaled in fp32.

    Raises:
        ValueError: Other blocks, sizes, strides or formats.
    """
    by_weights = len(b.shape) == 3
    blocks = (BLOCK, BLOCK) if by_weights else (BLOCK, 1)
    if a.block != (1, BLOCK) or b.block != blocks or {a.fmt, b.fmt} != {E4M3}:
        raise ValueError(
            f"cannot multiply {a.fmt.name} in blocks of {a.block} by {b.fmt.name} in blocks of {b.block}: "
            f"give e4m3 in blocks of {(1, BLOCK)} by {blocks}"
        )
    _check(a, b, ends_e)
    if not takes_kernels(a.codes):
        return reference.grouped_mm(a, b, ends_e, out_dtype)
    from moefw_kernels.grouped_gemm import triton

    return triton.blockwise_grouped_mm(a, b, ends_e, out_dtype)


def tensorwise_grouped_mm(
    a: Quantized, b: Quantized, ends_e: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Products of groups that have one scale for their rows and one for their weights.

    These are the scales that ``quantize_tensor`` makes with ``ends_e``. Shapes are those of ``blockwise_grouped_mm``.

    ``a`` (R, I) has a scale for each row and ``b`` (e, I, O) one for each matrix. In the sum over rows, ``a`` (O, R)
    and ``b`` (R, I) both have a scale for each of the R rows, and ends are multiples of 16. ``a`` and ``b`` are each
    E4M3 or E5M2, and a group's sum is scaled once, in fp32. The rest is as in ``blockwise_grouped_mm``.

    Raises:
        ValueError: Scales of blocks or of the tensor, other sizes, strides or formats.
    """
    by_weights = len(b.shape) == 3
    needed = [(a.shape[0], 1), (b.shape[0], 1, 1)] if by_weights else [(1, a.shape[-1]), (b.shape[0], 1)]
    shapes = [tuple(a.scales.shape), tuple(b.scales.shape)]
    if (a.block, b.block) != (None, None) or shapes != needed or {a.fmt, b.fmt} - {E4M3, E5M2}:
        raise ValueError(
            f"cannot multiply {a.fmt.name} with scales {shapes[0]} by {b.fmt.name} with scales {shapes[1]}: "
            f"give float8 with scales {needed[0]} by {needed[1]}, without blocks"
        )
    _check(a, b, ends_e)
    if not takes_kernels(a.codes):
        return reference.grouped_mm(a, b, ends_e, out_dtype)
    from moefw_kernels.grouped_gemm import triton

    return triton.tensorwise_grouped_mm(a, b, ends_e, out_dtype)


def _check(a: Quantized, b: Quantized, ends_e: Tensor) -> None:
    by_weights = len(b.shape) == 3
    sizes = b.shape[1:] if by_weights else (a.shape[0], b.shape[1])
    if len(a.shape) != 2 or a.shape[1] != b.shape[-2] or any(size % BLOCK for size in sizes):
        raise ValueError(
            f"cannot multiply {a.shape} by {b.shape}: give (R, I) by (e, I, O) or (O, R) by (R, I), "
            f"with I and O multiples of {BLOCK}"
        )
    if not (a.codes.is_contiguous() and b.codes.mT.is_contiguous()):
        raise ValueError(
            f"codes have strides {a.codes.stride()} and {b.codes.stride()}: lay them along the axis that is summed "
            "over, as Quantized.along does"
        )
    if ends_e.dtype is not torch.int32 or ends_e.shape != ((b.shape[0],) if by_weights else (ends_e.numel(),)):
        raise ValueError(
            f"ends are {ends_e.dtype} {tuple(ends_e.shape)}: give one torch.int32 for each group, {b.shape[:-2]}"
        )
