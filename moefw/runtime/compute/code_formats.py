"""Formats in which folders store weights as codes and scales, and the values that these stand for.

A format does not depend on the number of matrices in a stack: ``codes`` are ``(..., O, I / codes_per_element)``, and
``scales`` ``(..., O / rows, I / columns)``, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from moefw_kernels.quantize import E2M1, encode, nvfp4_global_scale, pack, quantize_fp8, quantize_nvfp4
from moefw_kernels.quantize.formats import decode_e2m1

ROWS_AT_A_TIME: Final = 128
"""The rows that are decoded together, so that little is held in wider dtypes."""


@frozen(kw_only=True)
class Part:
    """A tensor of a format, codes or scales: an element for each block of ``rows`` by ``columns`` of a matrix.

    ``columns`` None: all of them.
    """

    name: str
    rows: int = 1
    columns: int | None
    dtype: torch.dtype

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this part of a weight ``(..., O, I)``. A last block may be smaller."""
        *leading, out_dim, in_dim = shape
        return *leading, -(-out_dim // self.rows), 1 if self.columns is None else -(-in_dim // self.columns)


@frozen(kw_only=True)
class CodeFormat:
    """A format of codes. ``rows`` and ``columns``: the block of a matrix that shares a scale.

    ``codes_per_element``: the number of codes, neighbours along a row, in an element of the tensor of codes.
    ``divisor_dtype``: the dtype of the number that divides the scales of a row; None: there is none. It is one for a
    matrix in a folder, and here one for each row, so that matrices may be cut and stacked. ``decode`` returns values,
    bf16, of the parts; ``encode`` returns the parts of values, fp32 or bf16.
    """

    name: str
    rows: int
    columns: int
    codes_per_element: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype
    decode: Callable[..., Tensor]
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    divisor_dtype: torch.dtype | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors that a weight consists of, codes first, as ``decode`` takes them."""
        codes = Part(name="codes", columns=self.codes_per_element, dtype=self.code_dtype)
        scales = Part(name="scales", rows=self.rows, columns=self.columns, dtype=self.scale_dtype)
        if self.divisor_dtype is None:
            return codes, scales
        return codes, scales, Part(name="divisors", columns=None, dtype=self.divisor_dtype)

    def shape_of_codes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes of a weight ``(..., O, I)``."""
        return self.parts[0].shape(shape)

    def shape_of_scales(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a weight ``(..., O, I)``. A last block may be smaller."""
        return self.parts[1].shape(shape)


def _decode_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """``codes * scale``, rounded once."""
    values = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for block, start in enumerate(range(0, codes.shape[-2], FP8.rows)):
        rows = codes[..., start : start + FP8.rows, :].float()
        of_columns = scales[..., block : block + 1, :].repeat_interleave(FP8.columns, -1)[..., : rows.shape[-1]]
        values[..., start : start + FP8.rows, :] = rows.mul_(of_columns)
    return values


def _encode_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales with which the largest magnitude of each block becomes 448, E4M3's largest."""
    quantized = quantize_fp8(values, block=(FP8.rows, FP8.columns), power_of_two=False)
    return quantized.codes, quantized.scales


def _decode_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """``code * 2^(scale - 127)``, exact in bf16."""
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    values = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    for start in range(0, shape[-2], ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        exponents = scales[..., rows, :].int() - 127
        blocks = _numbers(codes[..., rows, :]).view(*exponents.shape, MXFP4.columns)
        values[..., rows, :] = torch.ldexp(blocks, exponents.unsqueeze(-1)).flatten(-2)
    return values


def _encode_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales whose exponent is that of the block's largest magnitude less that of 4 (OCP MX 1.0 section 6.3).

    Magnitudes of 6 to 8 times the scale become 6 of them. What has been decoded is encoded as the same values.
    """
    blocks = values.float().unflatten(-1, (-1, MXFP4.columns))
    # frexp returns a mantissa below 1, so its exponent is greater by 1; the exponent of 4, E2M1's largest power, is 2.
    exponents = (torch.frexp(blocks.abs().amax(-1)).exponent - 3).clamp_(min=-127)
    codes = encode(torch.ldexp(blocks, -exponents.unsqueeze(-1)), E2M1)
    return pack(codes.flatten(-2)), (exponents + 127).to(torch.uint8)


def _decode_nvfp4(codes: Tensor, scales: Tensor, divisors: Tensor) -> Tensor:
    """``code * (scale / divisor)`` in fp32, rounded once, as ``compressed-tensors`` 0.20 computes it."""
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    values = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    for start in range(0, shape[-2], ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        of_blocks = scales[..., rows, :].float() / divisors[..., rows, :]
        blocks = _numbers(codes[..., rows, :]).view(*of_blocks.shape, NVFP4.columns)
        values[..., rows, :] = blocks.mul_(of_blocks.unsqueeze(-1)).flatten(-2)
    return values


def _encode_nvfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and divisors with which the largest magnitude of all becomes ``6 * 448``, as in Transformer Engine.

    The scale of a block is its largest magnitude over 6, rounded to E4M3 after the multiplication by the divisor.
    """
    largest = values.abs().amax().float()
    quantized = quantize_nvfp4(values, block=(NVFP4.rows, NVFP4.columns), global_amax=largest)
    divisor, _ = nvfp4_global_scale(largest)
    return quantized.codes, quantized.scales, divisor.expand(*values.shape[:-1], 1)


def _numbers(pairs: Tensor) -> Tensor:
    """Numbers ``(..., 2 C)``, fp32, of bytes ``(..., C)`` that have two codes each, the lower one first.

    By arithmetic: a table would be copied to the device, which no CUDA graph can hold.
    """
    return torch.stack([decode_e2m1(pairs & 15), decode_e2m1(pairs >> 4)], dim=-1).flatten(-2)


FP8: Final = CodeFormat(
    name="FP8",
    rows=128,
    columns=128,
    codes_per_element=1,
    code_dtype=torch.float8_e4m3fn,
    scale_dtype=torch.float32,
    decode=_decode_fp8,
    encode=_encode_fp8,
)
"""E4M3, a scale for 128 by 128 values (DeepSeek-V3, arXiv 2412.19437 section 3.3)."""
MXFP4: Final = CodeFormat(
    name="MXFP4",
    rows=1,
    columns=32,
    codes_per_element=2,
    code_dtype=torch.uint8,
    scale_dtype=torch.uint8,
    decode=_decode_mxfp4,
    encode=_encode_mxfp4,
)
"""E2M1, a scale for 32 values of a row, an exponent plus 127 (OCP MX 1.0). Two codes in a byte, the lower one first."""
NVFP4: Final = CodeFormat(
    name="NVFP4",
    rows=1,
    columns=16,
    codes_per_element=2,
    code_dtype=torch.uint8,
    scale_dtype=torch.float8_e4m3fn,
    divisor_dtype=torch.float32,
    decode=_decode_nvfp4,
    encode=_encode_nvfp4,
)
"""E2M1, a scale in E4M3 for 16 values of a row, and a number in fp32 that divides the scales of a matrix
(``nvfp4-pack-quantized`` of ``compressed-tensors``). Two codes in a byte, the lower one first."""
