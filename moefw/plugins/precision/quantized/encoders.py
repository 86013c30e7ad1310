"""Encoders of operands: codes and scales in blocks along the axis that a product sums over; and of rows on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.contracts import Codec, WeightCodec
from moefw.core.records import GemmPass, Role, RowGroups
from moefw.plugins.precision.quantized.primary import SquareBlocks, quantized_weight
from moefw.runtime.communication.movement import Permutation
from moefw.runtime.compute.primary_weights import GatheredWeight
from moefw_kernels.permute import RowMap
from moefw_kernels.permute_quantize import permute_quantize
from moefw_kernels.quantize import (
    E4M3,
    Quantized,
    Scales,
    quantize_fp8,
    quantize_fp8_both,
    quantize_mxfp8,
    quantize_mxfp8_both,
    quantize_rows,
    row_block,
    rows_of,
    scale_dtype,
)


@final
class PackedRows:
    """A row of ``dim`` codes, one byte each, then its scales, which end at byte ``_end``; an even number of bytes.

    Packed rows are tensors of bf16, so that their bytes travel as other rows do.
    """

    def __init__(self, scales: Scales, *, dim: int) -> None:
        self._scales = scales
        self._dim = dim
        self._scale_dtype = scale_dtype(scales)
        num_blocks = -(-dim // row_block(scales))
        self._end = dim + num_blocks * self._scale_dtype.itemsize
        self.row_bytes = self._end + self._end % 2

    def pack(self, rows_ND: Tensor) -> Tensor:
        """Codes and scales as ``(N, row_bytes / 2)`` bf16."""
        encoded = quantize_rows(rows_ND, scales=self._scales)
        parts = [part.contiguous().view(torch.uint8) for part in (encoded.codes, encoded.scales)]
        return F.pad(torch.cat(parts, 1), (0, self.row_bytes - self._end)).view(torch.bfloat16)

    def pack_permuted(self, x_TD: Tensor, rows: Permutation) -> Tensor:
        """Packed rows of tokens, in one pass where scales are aligned to their size."""
        if not isinstance(rows, RowMap) or self._dim % self._scale_dtype.itemsize:
            return self.pack(rows.gather(x_TD))
        packed = torch.empty(len(rows.token_R), self.row_bytes, dtype=torch.uint8, device=x_TD.device)
        packed[:, self._end :] = 0
        codes = packed[:, : self._dim].view(E4M3.dtype)
        scales = packed[:, self._dim : self._end].view(self._scale_dtype)
        permute_quantize(x_TD, rows, scales=self._scales, into=(codes, scales))
        return packed.view(torch.bfloat16)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``(N, dim)``, as the GEMM that quantizes them again will see them."""
        as_bytes = packed.view(torch.uint8)
        # Copies: scales may begin at any byte of the packed rows, and a view of bytes as a wider dtype may not.
        code_bytes = as_bytes[:, : self._dim].clone(memory_format=torch.contiguous_format)
        scale_bytes = as_bytes[:, self._dim : self._end].clone(memory_format=torch.contiguous_format)
        codes = code_bytes.view(E4M3.dtype)
        scales = scale_bytes.view(self._scale_dtype)
        return rows_of(codes, scales, scales=self._scales).dequantize().to(dtype)


class Encoder(ABC):
    """Makes codes and scales of an operand.

    ``draws``: rounding is random, from the keys of rows. ``shares_inputs``: as in ``Precision``. ``square_weights``:
    the codes of a weight are the same in fprop and dgrad. ``row_scales``: an input in fprop is ``quantize_rows`` with
    these scales, which a kernel can fuse with computing the input. None where it is not: a scale for a whole tensor
    needs a separate pass.
    """

    draws: bool = False
    shares_inputs: bool = True
    square_weights: bool = False
    row_scales: Scales | None = None

    def at(self, name: str, *, groups: int | None = None) -> Encoder:
        """Encoder of a module or a GEMM inside, as ``Precision.at`` does."""
        return self

    @abstractmethod
    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Operand of ``x`` (..., R, C) in a product."""

    def encode_weight(self, x: Tensor, passes: Sequence[GemmPass]) -> Sequence[Quantized]:
        """Operands of a weight in ``passes``, fprop or dgrad."""
        both = None
        if "dgrad" in passes and (self.square_weights or "fprop" in passes):
            both = self.encode_both(x, "weight", RowGroups())
        if both is not None:
            by_pass = {"fprop": both[0], "dgrad": both[1]}
            return [by_pass[during] for during in passes]
        if self.square_weights:
            encoded = self.encode(x, "weight", passes[0], RowGroups())
            return [along(encoded, summed_axis("weight", during)) for during in passes]
        return [self.encode(x, "weight", during, RowGroups()) for during in passes]

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized] | None:
        """Operands of ``x``, summed along its last axis and the one before, made in one read; None: it takes two."""
        return None

    def codec(self, dim: int) -> Codec | None:
        """Codec of rows sent to experts, as ``Precision.codec`` does."""
        return None

    def weight_codec(self) -> WeightCodec | None:
        """Codec of gathered weights, as ``Precision.weight_codec`` does."""
        return None

    def encode_activation(self, x: Tensor, rows: RowGroups) -> Quantized:
        """Codes of rows ``x`` (R, C) that are saved for backward and are not an operand."""
        return self.encode(x, "input", "fprop", rows)


def summed_axis(role: Role, during: GemmPass) -> int:
    """Axis of an operand over which the product of a pass sums."""
    if during == "wgrad" or (role == "weight" and during == "dgrad"):
        return -2
    return -1


def along(encoded: Quantized, axis: int) -> Quantized:
    """Same numbers with codes contiguous along ``axis``. Another axis takes square blocks or none."""
    return encoded if encoded.axis == axis else encoded.along(axis)


@final
class Blockwise(Encoder):
    """E4M3 in blocks of 128 along the summed axis, 128x128 for weights. Groups of rows are aligned to blocks."""

    square_weights = True

    def __init__(self, *, power_of_two: bool, primary: SquareBlocks | None = None) -> None:
        self._power_of_two = power_of_two
        self._primary = primary
        self.row_scales: Scales = "power_of_two" if power_of_two else "fp32"

    def weight_codec(self) -> WeightCodec | None:
        """Codec of shards of weights; None if weights are not gathered as codes."""
        return self._primary

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Operand. A weight that was gathered as codes keeps them."""
        if isinstance(x, GatheredWeight):
            return quantized_weight(x)
        if role == "weight":
            block = (128, 128)
        elif summed_axis(role, during) == -1:
            block = (1, 128)
        else:
            block = (128, 1)
        return quantize_fp8(x, block=block, power_of_two=self._power_of_two)

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized] | None:
        """Operands of rows, or of a weight in square blocks. What was gathered as codes has them already."""
        if isinstance(x, GatheredWeight):
            return None
        return quantize_fp8_both(x, power_of_two=self._power_of_two, square=role == "weight")

    def codec(self, dim: int) -> Codec:
        """Codec with an fp32 scale per 128 values."""
        return PackedRows(self.row_scales, dim=dim)


@final
class MX(Encoder):
    """E4M3 in blocks of 32 along the summed axis with E8M0 scales."""

    row_scales: Scales = "e8m0"

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Operand."""
        return quantize_mxfp8(x, block=(1, 32) if summed_axis(role, during) == -1 else (32, 1))

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized]:
        """Operands of rows, or of a weight."""
        return quantize_mxfp8_both(x)

    def codec(self, dim: int) -> Codec:
        """Codec with an E8M0 scale per 32 values."""
        return PackedRows(self.row_scales, dim=dim)
