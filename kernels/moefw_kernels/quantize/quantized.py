"""Result of a quantizer: codes, the scales of blocks, and their layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moefw_kernels.quantize.formats import E2M1, Format, decode, decode_e8m0, pack, unpack


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A tensor ``(..., R, C)`` as codes and scales; ``value = code * scale * global_scale``.

    Attributes:
        codes: float8 of ``shape``, or, in E2M1, uint8 with two codes in a byte along ``axis``: ``(..., R, ceil(C/2))``
            or ``(..., ceil(R/2), C)``. Contiguous along ``axis``, which a matrix product sums over.
        scales: One for each block, ``(..., ceil(R / rows), ceil(C / columns))``: fp32, float8_e8m0fnu or
            float8_e4m3fn. Without blocks fp32: one for the tensor, shape (), one for each matrix, ``(..., 1, 1)``, or
            one for each row, ``(R, 1)``, equal within a group of rows.
        fmt: The format of the codes.
        block: (rows, columns) of a block; None without blocks. The last block may be smaller.
        axis: -1 or -2.
        shape: The shape of the tensor.
        global_scale: fp32, shape () or the leading dimensions of ``shape``, or one for each row of blocks,
            ``(ceil(R / rows), 1)``, equal within a group of rows; None without a second level.
    """

    codes: Tensor
    scales: Tensor
    fmt: Format
    block: tuple[int, int] | None
    axis: int
    shape: tuple[int, ...]
    global_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Tensor in fp32, ``shape``, contiguous."""
        if self.axis == -2:
            return self.mT.dequantize().mT.clone(memory_format=torch.contiguous_format)
        scales = decode_e8m0(self.scales) if self.scales.dtype is torch.float8_e8m0fnu else self.scales.float()
        if self.global_scale is not None:
            scales = scales * above(self.global_scale, scales.ndim)
        if self.block is not None:
            scales = spread(scales, self.block, self.shape)
        return decode(self._single_codes(), self.fmt) * scales

    @property
    def mT(self) -> Quantized:
        """Transpose of every matrix, with transposed ``axis`` and ``block``, without a copy."""
        block = self.block
        if block is not None:
            rows, columns = block
            block = (columns, rows)
        return replace(
            self,
            codes=self.codes.mT,
            scales=self.scales.mT if self.scales.ndim else self.scales,
            block=block,
            axis=-1 if self.axis == -2 else -2,
            shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]),
            global_scale=turned(self.global_scale, len(self.shape)),
        )

    def along(self, axis: int) -> Quantized:
        """Same numbers with codes contiguous along ``axis``, for square blocks or no blocks.

        Raises:
            ValueError: The blocks are not square, so another axis needs other scales, from the tensor itself.
        """
        if self.block is not None and self.block[0] != self.block[1]:
            raise ValueError(
                f"blocks of {self.block[0]}x{self.block[1]} lie along axis {self.axis}: "
                f"quantize the tensor itself for axis {axis}"
            )
        return replace(self, codes=laid(self._single_codes(), self.fmt, axis), axis=axis)

    def _single_codes(self) -> Tensor:
        """Codes in uint8, one in each byte."""
        codes = self.codes.view(torch.uint8)
        return unpack(codes, count=self.shape[self.axis], axis=self.axis) if self.fmt is E2M1 else codes


def laid(codes: Tensor, fmt: Format, axis: int) -> Tensor:
    """Single uint8 codes in the layout of ``Quantized.codes``."""
    if fmt is E2M1:
        return pack(codes, axis=axis)
    codes = codes.contiguous() if axis == -1 else codes.mT.contiguous().mT
    return codes.view(fmt.dtype)


def spread(per_block: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Return, for each element of ``shape``, the number of its block."""
    rows, columns = shape[-2:]
    wide = per_block.repeat_interleave(block[0], -2)[..., :rows, :]
    return wide.repeat_interleave(block[1], -1)[..., :columns]


def above(level: Tensor, ndim: int) -> Tensor:
    """``Quantized.global_scale``, broadcastable to the scales of blocks, which have ``ndim`` dimensions."""
    return level if level.ndim in (0, ndim) else level[..., None, None]


def turned(level: Tensor | None, ndim: int) -> Tensor | None:
    """``Quantized.global_scale`` of the transpose of a tensor with ``ndim`` dimensions."""
    return level.mT if level is not None and level.ndim == ndim else level
