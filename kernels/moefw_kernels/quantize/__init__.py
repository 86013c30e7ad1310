"""Quantization to eight and four bits, bit for bit as Transformer Engine defines it; see README.md."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from moefw_kernels.devices import takes_kernels
from moefw_kernels.hadamard.reference import SIZE
from moefw_kernels.in_place import in_place_of_a_kernel
from moefw_kernels.quantize import reference
from moefw_kernels.quantize.formats import E2M1, E4M3, E5M2, Format, decode, decode_e8m0, encode, pack, unpack
from moefw_kernels.quantize.groups import group_of_row
from moefw_kernels.quantize.integers import from_integers, integer_rows
from moefw_kernels.quantize.quantized import Quantized
from moefw_kernels.quantize.rows import Scales, empty_rows, row_block, rows_of, scale_dtype
from moefw_kernels.quantize.scales import (
    BlockScales,
    delayed_scale,
    mx_scale,
    nvfp4_global_scale,
    nvfp4_scale,
    tensor_scale,
)

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "BlockScales",
    "Format",
    "Quantized",
    "Scales",
    "decode",
    "decode_e8m0",
    "delayed_scale",
    "empty_rows",
    "encode",
    "from_integers",
    "group_amax",
    "group_of_row",
    "integer_rows",
    "matrix_amax",
    "mx_scale",
    "nvfp4_global_scale",
    "nvfp4_scale",
    "pack",
    "quantize_fp8",
    "quantize_fp8_both",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_rows",
    "quantize_tensor",
    "quantize_tensor_both",
    "row_block",
    "rows_of",
    "scale_dtype",
    "tensor_scale",
    "unpack",
]

Block = tuple[int, int]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix_amax(x: Tensor, *, hadamard: bool = False) -> Tensor:
    """Largest magnitude of each matrix of ``x (..., R, C)``, fp32 ``(...)``.

    0 for an empty matrix, NaN for one with a NaN. ``hadamard``: of ``x`` after the transform along its rows, of which
    there are a multiple of 16.

    Raises:
        ValueError: A dtype other than fp32, bf16 and fp16, or another number of rows to transform.
    """
    _check(x)
    _check_transform(x, hadamard)
    amax: Tensor = _encoders(x).matrix_amax(x, hadamard)
    return amax


def group_amax(x: Tensor, ends_e: Tensor, *, hadamard: bool = False) -> Tensor:
    """Largest magnitude of each group of the rows ``x (R, C)``, fp32 ``(e,)``; ``ends_e`` says where groups end.

    0 for a group without rows, NaN for a group with a NaN. Rows past the last end are ignored. ``hadamard`` as in
    ``matrix_amax``; groups then end at multiples of 16.

    Raises:
        ValueError: A dtype other than fp32, bf16 and fp16, or another number of rows to transform.
    """
    _check(x)
    _check_transform(x, hadamard)
    amax: Tensor = _encoders(x).group_amax(x, ends_e, hadamard)
    return amax


def quantize_tensor(
    x: Tensor,
    *,
    fmt: Format = E4M3,
    scale: Tensor | None = None,
    ends_e: Tensor | None = None,
) -> Quantized:
    """``x`` (..., R, C) in E4M3 or E5M2 with an fp32 scale for each matrix, or one if ``scale`` has shape ().

    ``scale``, of shape () or of the leading dimensions, multiplies ``x`` before the cast, as ``delayed_scale`` returns
    it; None takes ``tensor_scale`` of each matrix.

    With ``ends_e``, int32, the rows ``(R, C)`` form groups that end there. Each group has one scale, from ``scale``
    ``(e,)`` or from its largest magnitude, so that its codes and scale are those that it would have alone. Rows past
    the last end are ignored and come back as zeros.

    Raises:
        ValueError: E2M1, a dtype other than fp32, bf16 and fp16, or shapes that do not fit together.
    """
    level = _level_of_tensor(x, fmt, scale, ends_e)
    with _one_kernel(x):
        quantized: Quantized = _encoders(x).quantize_tensor(x, fmt, level, ends_e, scale is not None)
    return quantized


def quantize_tensor_both(
    x: Tensor,
    *,
    fmt: Format = E4M3,
    scale: Tensor | None = None,
    ends_e: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """``quantize_tensor`` with codes contiguous along rows, and along columns. The kernel reads ``x`` once.

    Raises:
        ValueError: As ``quantize_tensor`` does.
    """
    level = _level_of_tensor(x, fmt, scale, ends_e)
    with _one_kernel(x):
        along, across = _encoders(x).quantize_tensor_both(x, fmt, level, ends_e, scale is not None)
    return along, across


def _level_of_tensor(x: Tensor, fmt: Format, scale: Tensor | None, ends_e: Tensor | None) -> Tensor:
    """Scale that is given, or else the magnitude from which it comes. Raises ValueError as ``quantize_tensor``."""
    _check(x)
    if fmt is E2M1:
        raise ValueError("e2m1 has six for its largest number, too little without a second level: use quantize_nvfp4")
    groups = x.shape[:-2] if ends_e is None else ends_e.shape
    if ends_e is not None and x.ndim > 2:
        raise ValueError(f"ends_e divides the rows of one matrix (R, C), and x is {tuple(x.shape)}")
    if scale is not None and scale.shape != groups and (scale.ndim or ends_e is not None):
        raise ValueError(f"scale has shape {tuple(scale.shape)}; give one for each of what it serves: {tuple(groups)}")
    if scale is not None:
        return scale.float()
    return matrix_amax(x) if ends_e is None else group_amax(x, ends_e)


def quantize_fp8(x: Tensor, *, block: Block, power_of_two: bool = True) -> Quantized:
    """``x`` (..., R, C) in E4M3, in blocks of 1x128, 128x1 or 128x128, each with an fp32 scale.

    The scale is the reciprocal of ``tensor_scale`` of the block's largest magnitude: a power of two, or exact.

    Raises:
        ValueError: Another block, a dtype other than fp32, bf16 and fp16.
    """
    _check(x, block, ((1, 128), (128, 1), (128, 128)))
    with _one_kernel(x):
        quantized: Quantized = _encoders(x).quantize_fp8(x, block, power_of_two)
    return quantized


def quantize_fp8_both(x: Tensor, *, power_of_two: bool = True, square: bool = False) -> tuple[Quantized, Quantized]:
    """``quantize_fp8`` with blocks of 1x128 and of 128x1. The kernel reads ``x`` once.

    ``square``: with blocks of 128x128, and codes contiguous along rows, and along columns.
    """
    _check(x)
    with _one_kernel(x):
        row, column = _encoders(x).quantize_fp8_both(x, power_of_two, square)
    return row, column


def quantize_mxfp8(x: Tensor, *, block: Block = (1, 32)) -> Quantized:
    """``x`` (..., R, C) in E4M3, in blocks of 1x32, 32x1 or 32x32, each with an E8M0 scale as in ``mx_scale``.

    Raises:
        ValueError: Another block, a dtype other than fp32, bf16 and fp16.
    """
    _check(x, block, ((1, 32), (32, 1), (32, 32)))
    with _one_kernel(x):
        quantized: Quantized = _encoders(x).quantize_mxfp8(x, block)
    return quantized


def quantize_mxfp8_both(x: Tensor) -> tuple[Quantized, Quantized]:
    """``quantize_mxfp8`` with blocks of 1x32 and of 32x1. The kernel reads ``x`` once."""
    _check(x)
    with _one_kernel(x):
        row, column = _encoders(x).quantize_mxfp8_both(x)
    return row, column


def quantize_rows(x: Tensor, *, scales: Scales) -> Quantized:
    """``x`` (R, C) in E4M3, in blocks along rows: of 1x128 as ``quantize_fp8``, or 1x32 as ``quantize_mxfp8``.

    Raises:
        ValueError: A dtype other than fp32, bf16 and fp16.
    """
    if scales == "e8m0":
        return quantize_mxfp8(x)
    return quantize_fp8(x, block=(1, 128), power_of_two=scales == "power_of_two")


def quantize_nvfp4(
    x: Tensor,
    *,
    block: Block = (1, 16),
    global_amax: Tensor | None = None,
    keys: Tensor | None = None,
    ends_e: Tensor | None = None,
    scales: BlockScales = "nearest",
    hadamard: bool = False,
) -> Quantized:
    """``x`` (..., R, C) in E2M1, in blocks of 1x16, 16x1 or 16x16, each with an E4M3 scale.

    ``global_amax``, fp32, sets the global scale: shape () for the tensor, or the leading dimensions of ``x``, one for
    each expert; None takes the largest magnitude of ``x``. With ``keys``, int64 ``(..., R)``, rounds stochastically:
    element ``c`` of a row takes draw ``c`` of ``moefw_kernels.random.uniform`` of the row's key. With blocks of 16x16,
    the result of ``x.mT`` is the transpose of the result, bit for bit.

    ``scales`` nearest, as in Transformer Engine: where a scale is rounded down, by up to 1/17, the block's numbers
    beyond six times the scale saturate, so that their mean over draws is too small. ``scales`` up: nothing saturates,
    and stochastic rounding has no bias.

    With ``ends_e``, int32, the rows ``(R, C)`` form groups that end there; no block may span two groups. Each group
    has one global scale, from ``global_amax`` ``(e,)`` or from its largest magnitude, so that its codes and scales
    are those that it would have alone. Rows past the last end are ignored and come back as zeros.

    With ``hadamard``, in blocks of 16x1, the result is that of ``hadamard(x, axis=-2)``, whose largest magnitude
    ``global_amax`` then is. R is a multiple of 16.

    Raises:
        ValueError: Another block, a dtype other than fp32, bf16 and fp16, or shapes that do not fit together.
    """
    _check(x, block, ((1, 16), (16, 1), (16, 16)))
    _check_transform(x, hadamard)
    if hadamard and block != (16, 1):
        raise ValueError(f"the transform mixes the numbers of a block of 16x1: these are {block[0]}x{block[1]}")
    if ends_e is not None and x.ndim > 2:
        raise ValueError(f"ends_e divides the rows of one matrix (R, C), and x is {tuple(x.shape)}")
    if global_amax is None and ends_e is not None:
        global_amax = group_amax(x, ends_e, hadamard=hadamard)
    elif global_amax is None:
        # One scale for all matrices, so they are rows of one.
        global_amax = matrix_amax(x.flatten(0, -2) if x.ndim > 2 else x, hadamard=hadamard)
    if ends_e is not None and global_amax.shape != ends_e.shape:
        raise ValueError(
            f"global_amax has shape {tuple(global_amax.shape)}; give one number for each group: {tuple(ends_e.shape)}"
        )
    if ends_e is None:
        _check_global_amax(x, global_amax)
    if keys is not None and (keys.shape != x.shape[:-1] or keys.dtype is not torch.int64):
        raise ValueError(
            f"keys are {keys.dtype} {tuple(keys.shape)}; give one for each row: torch.int64 {tuple(x.shape[:-1])}"
        )
    with _one_kernel(x):
        quantized: Quantized = _encoders(x).quantize_nvfp4(x, block, global_amax, keys, scales, ends_e, hadamard)
    return quantized


def quantize_nvfp4_both(x: Tensor, *, global_amax: Tensor) -> tuple[Quantized, Quantized]:
    """``quantize_nvfp4`` in blocks of 16x16, with codes contiguous along rows, and along columns.

    The kernel reads ``x`` once. ``global_amax``: fp32, of shape () or of the leading dimensions of ``x``.

    Raises:
        ValueError: A dtype other than fp32, bf16 and fp16, or another shape of ``global_amax``.
    """
    _check(x)
    _check_global_amax(x, global_amax)
    with _one_kernel(x):
        along, across = _encoders(x).quantize_nvfp4_both(x, global_amax)
    return along, across


def _encoders(x: Tensor) -> ModuleType:
    """Module that quantizes this tensor: that of the kernels, or ``reference``."""
    if not takes_kernels(x):
        return reference
    from moefw_kernels.quantize import triton

    return triton


def _one_kernel(x: Tensor) -> AbstractContextManager[None]:
    """Block of the one kernel that quantizes this tensor, whichever module does."""
    return nullcontext() if takes_kernels(x) else in_place_of_a_kernel()


def _check_global_amax(x: Tensor, global_amax: Tensor) -> None:
    if global_amax.shape not in ((), x.shape[:-2]):
        raise ValueError(
            f"global_amax has shape {tuple(global_amax.shape)}; "
            f"give one number, or one for each matrix: {tuple(x.shape[:-2])}"
        )


def _check_transform(x: Tensor, hadamard: bool) -> None:
    if hadamard and x.shape[-2] % SIZE:
        raise ValueError(
            f"the transform mixes {SIZE} rows, and {tuple(x.shape)} has {x.shape[-2]}: "
            "pad with zeros, which leaves a product as it is"
        )


def _check(x: Tensor, block: Block | None = None, blocks: tuple[Block, ...] = ()) -> None:
    if x.dtype not in _DTYPES or x.ndim < 2:
        raise ValueError(f"cannot quantize {x.dtype} {tuple(x.shape)}: give fp32, bf16 or fp16 (..., rows, columns)")
    if block is not None and block not in blocks:
        raise ValueError(
            f"no blocks of {block[0]}x{block[1]} here: use one of {', '.join(f'{r}x{c}' for r, c in blocks)}"
        )
