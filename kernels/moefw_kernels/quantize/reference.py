"""Encoders in plain PyTorch. Kernels must equal them bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.hadamard.reference import hadamard as transform
from moefw_kernels.in_place import in_place_of_a_kernel
from moefw_kernels.quantize.formats import E2M1, E4M3, Format, encode
from moefw_kernels.quantize.groups import group_of_row
from moefw_kernels.quantize.quantized import Quantized, above, laid, spread, turned
from moefw_kernels.quantize.scales import BlockScales, mx_scale, nvfp4_global_scale, nvfp4_scale, tensor_scale
from moefw_kernels.random import uniform


def matrix_amax(x: Tensor, hadamard: bool) -> Tensor:
    """Largest magnitude of each matrix of ``x (..., R, C)``, fp32 ``(...)``."""
    rows = _row_amax(x, hadamard)
    with in_place_of_a_kernel():
        return rows.amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])


def group_amax(x: Tensor, ends_e: Tensor, hadamard: bool) -> Tensor:
    """Largest magnitude of each group of the rows ``x (R, C)``, fp32 ``(e,)``."""
    rows = _row_amax(x, hadamard)
    with in_place_of_a_kernel():
        # An entry more than there are groups, for the rows past the last end.
        amax = rows.new_zeros(len(ends_e) + 1)
        return amax.scatter_reduce(0, group_of_row(ends_e, len(rows)), rows, "amax")[:-1]


def _row_amax(x: Tensor, hadamard: bool) -> Tensor:
    """Largest magnitude of each row of ``x (..., R, C)``, fp32 ``(..., R)``."""
    with in_place_of_a_kernel():
        if not x.shape[-1]:
            return x.new_zeros(x.shape[:-1], dtype=torch.float32)
        if hadamard:
            x = transform(x.mT).mT
        return x.abs().amax(-1).float()


def quantize_tensor(x: Tensor, fmt: Format, level: Tensor, ends_e: Tensor | None, scaled: bool) -> Quantized:
    """Quantize with one scale for each matrix or each group of rows: ``level`` if ``scaled``, else from this amax."""
    scale = level if scaled else tensor_scale(level, fmt, largest=torch.finfo(x.dtype).max)
    if ends_e is not None:
        group_R = group_of_row(ends_e, len(x))
        x = x.where((group_R < len(ends_e)).unsqueeze(1), 0)
        # One entry more, for the rows past the last end, which are zeros.
        scale = F.pad(scale, (0, 1), value=1.0)[group_R].unsqueeze(1)
    elif scale.ndim:
        scale = scale[..., None, None]
    codes = encode(x.float() * scale, fmt)
    return Quantized(
        codes=laid(codes, fmt, -1),
        scales=scale.reciprocal(),
        fmt=fmt,
        block=None,
        axis=-1,
        shape=tuple(x.shape),
    )


def quantize_tensor_both(
    x: Tensor, fmt: Format, level: Tensor, ends_e: Tensor | None, scaled: bool
) -> tuple[Quantized, Quantized]:
    """``quantize_tensor`` with codes along rows, and along columns."""
    quantized = quantize_tensor(x, fmt, level, ends_e, scaled)
    return quantized, quantized.along(-2)


def quantize_fp8(x: Tensor, block: tuple[int, int], power_of_two: bool) -> Quantized:
    """Quantize in blocks with fp32 scales."""
    largest = torch.finfo(x.dtype).max
    multiplier = tensor_scale(block_amax(x, block), E4M3, power_of_two=power_of_two, largest=largest)
    return _quantized(x, multiplier=multiplier, scales=multiplier.reciprocal(), block=block, fmt=E4M3)


def quantize_fp8_both(x: Tensor, power_of_two: bool, square: bool = False) -> tuple[Quantized, Quantized]:
    """Quantize in blocks of 1x128, and of 128x1; or of 128x128, with codes along rows, and along columns."""
    if square:
        quantized = quantize_fp8(x, (128, 128), power_of_two)
        return quantized, quantized.along(-2)
    return quantize_fp8(x, (1, 128), power_of_two), quantize_fp8(x, (128, 1), power_of_two)


def quantize_mxfp8(x: Tensor, block: tuple[int, int]) -> Quantized:
    """Quantize in blocks with E8M0 scales."""
    codes, multiplier = mx_scale(block_amax(x, block))
    return _quantized(x, multiplier=multiplier, scales=codes.view(torch.float8_e8m0fnu), block=block, fmt=E4M3)


def quantize_mxfp8_both(x: Tensor) -> tuple[Quantized, Quantized]:
    """Quantize in blocks of 1x32, and of 32x1."""
    return quantize_mxfp8(x, (1, 32)), quantize_mxfp8(x, (32, 1))


def quantize_nvfp4(
    x: Tensor,
    block: tuple[int, int],
    global_amax: Tensor,
    keys: Tensor | None,
    scales: BlockScales = "nearest",
    ends_e: Tensor | None = None,
    hadamard: bool = False,
) -> Quantized:
    """Quantize in blocks with E4M3 scales and an fp32 global scale: one, or one for each matrix or group of rows.

    With ``hadamard``, every 16 rows are transformed first.
    """
    if hadamard:
        x = transform(x.mT).mT
    if ends_e is not None:
        group_R = group_of_row(ends_e, len(x))
        x = x.where((group_R < len(ends_e)).unsqueeze(1), 0)
        # One entry more, for the rows past the last end; then one for each row of blocks.
        global_amax = F.pad(global_amax, (0, 1))[group_R[:: block[0]]].unsqueeze(1)
    encoder, decoder = nvfp4_global_scale(global_amax)
    levels = (above(level, x.ndim) for level in (encoder, decoder))
    codes, multiplier = nvfp4_scale(block_amax(x, block), *levels, scales=scales)
    draws = None if keys is None else uniform(keys.flatten(), x.shape[-1]).view(x.shape)
    return _quantized(
        x,
        multiplier=multiplier,
        scales=codes.view(torch.float8_e4m3fn),
        block=block,
        fmt=E2M1,
        global_scale=decoder,
        draws=draws,
    )


def quantize_nvfp4_both(x: Tensor, global_amax: Tensor) -> tuple[Quantized, Quantized]:
    """``quantize_nvfp4`` in blocks of 16x16, with codes along rows, and along columns."""
    quantized = quantize_nvfp4(x, (16, 16), global_amax, None)
    return quantized, quantized.along(-2)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block, ``(..., R / rows, C / columns)`` fp32; NaN if the block has one."""
    rows, columns = block
    padded = F.pad(x.float(), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    down = padded.shape[-2] // rows
    across = padded.shape[-1] // columns
    return padded.reshape(*x.shape[:-2], down, rows, across, columns).abs().amax((-3, -1))


def _quantized(
    x: Tensor,
    *,
    multiplier: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    fmt: Format,
    global_scale: Tensor | None = None,
    draws: Tensor | None = None,
) -> Quantized:
    """Codes of ``x`` times its blocks' ``multiplier``, with the ``scales`` that undo it.

    Quantizes along rows; a tensor with blocks along columns is transposed first.
    """
    if axis_of(block) == -2:
        return _quantized(
            x.mT.contiguous(),
            multiplier=multiplier.mT,
            scales=scales.mT,
            block=(block[1], block[0]),
            fmt=fmt,
            global_scale=turned(global_scale, x.ndim),
            draws=None if draws is None else draws.mT,
        ).mT
    shape = tuple(x.shape)
    codes = encode(x.float() * spread(multiplier, block, shape), fmt, draws=draws)
    return Quantized(
        codes=laid(codes, fmt, -1),
        scales=scales,
        fmt=fmt,
        block=block,
        axis=-1,
        shape=shape,
        global_scale=global_scale,
    )


def axis_of(block: tuple[int, int]) -> int:
    """Axis that a matrix product sums over: -2 for blocks along columns, else -1."""
    return -2 if block[0] > 1 and block[1] == 1 else -1
