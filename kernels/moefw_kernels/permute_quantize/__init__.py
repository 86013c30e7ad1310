"""Fused permutation of tokens to rows and quantization, once for each token; see README.md."""

from __future__ import annotations

from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.in_place import in_place_of_a_kernel
from moefw_kernels.permute import RowMap
from moefw_kernels.permute_quantize import reference
from moefw_kernels.quantize import E4M3, Quantized, Scales, empty_rows, row_block, rows_of, scale_dtype

__all__ = ["permute_quantize"]


def permute_quantize(
    x_TD: Tensor, rows: RowMap, *, scales: Scales, into: tuple[Tensor, Tensor] | None = None
) -> Quantized:
    """``quantize_rows(gather(x_TD, rows), scales=scales)`` (R, D), bit for bit. Not differentiable.

    ``x_TD`` is fp32, bf16 or fp16. A row of padding has codes 0 and the scale of a block of zeros. ``into``: codes
    (R, D) and scales (R, blocks) to write to, contiguous along rows, with any row stride.

    Raises:
        ValueError: Another dtype, another number of tokens than the map's, or ``into`` of other sizes.
    """
    size = (len(rows.token_R), x_TD.shape[-1])
    if x_TD.ndim != 2 or len(x_TD) != len(rows.row_TK):
        raise ValueError(f"tokens are {tuple(x_TD.shape)}; give (T, D) with T = {len(rows.row_TK)}, as the map has")
    if into is None:
        quantized = empty_rows(*size, scales=scales, device=x_TD.device)
    else:
        _check(into, size, scales)
        quantized = rows_of(*into, scales=scales)
    if not takes_kernels(x_TD):
        with in_place_of_a_kernel():
            reference.permute_quantize(x_TD, rows, scales, quantized)
        return quantized
    from moefw_kernels.permute_quantize import triton

    triton.permute_quantize(x_TD, rows, scales, quantized)
    return quantized


def _check(into: tuple[Tensor, Tensor], size: tuple[int, int], scales: Scales) -> None:
    num_rows, columns = size
    codes, block_scales = into
    blocks = -(-columns // row_block(scales))
    for name, tensor, shape, dtype in (
        ("codes", codes, size, E4M3.dtype),
        ("scales", block_scales, (num_rows, blocks), scale_dtype(scales)),
    ):
        if tensor.shape != shape or tensor.dtype is not dtype or (tensor.numel() and tensor.stride(1) != 1):
            raise ValueError(
                f"{name} are {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
                f"give {dtype} {shape}, contiguous along rows"
            )
