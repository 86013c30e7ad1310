"""How a folder stores a tensor: as it is, or as codes and scales in a format, each under names of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from attrs import frozen
from torch import Tensor

from moefw.models.huggingface.origins import Origin
from moefw.runtime.compute.code_formats import FP8, MXFP4, NVFP4, CodeFormat
from moefw.runtime.compute.coded_weight import CodedWeight

Description = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""


class Stored(Protocol):
    """A tensor of a folder, perhaps as codes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""

    def read(self, first: int | None) -> Tensor:
        """Values: all, or those at ``first`` of the first dimension."""


@frozen(eq=False)
class Plain:
    """A tensor that is stored as it is. ``lazy`` is a slice of an open file."""

    lazy: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, first: int | None) -> Tensor:
        """Values."""
        values: Tensor = self.lazy[:] if first is None else self.lazy[first]
        return values

    def without_bytes(self) -> Tensor:
        """All of the tensor, on ``meta``."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@frozen(eq=False)
class Fp8:
    """A weight in FP8 and its scales, one for each block of 128 by 128 (DeepSeek-V3, arXiv 2412.19437 section 3.3)."""

    codes: Plain
    scales: Plain
    dtype: torch.dtype = torch.bfloat16
    format: ClassVar[CodeFormat] = FP8

    @staticmethod
    def names(name: str) -> tuple[str, ...]:
        """Names of the codes and the scales of a weight."""
        return name, f"{name}_scale_inv"

    @classmethod
    def described(cls, name: str, shape: tuple[int, ...]) -> dict[str, Description]:
        """Codes and scales of a weight of ``shape``, by name."""
        codes, scales = cls.names(name)
        return {codes: (FP8.code_dtype, shape), scales: (FP8.scale_dtype, FP8.shape_of_scales(shape))}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.codes.shape

    @property
    def tensors(self) -> tuple[Plain, ...]:
        """Codes and scales, as they are stored."""
        return self.codes, self.scales

    def read(self, first: int | None) -> Tensor:
        """``codes * scale``, rounded once."""
        return FP8.decode(self.codes.read(first), self.scales.read(first).float())

    @staticmethod
    def arranged(codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        """Codes and scales in the order of the values, the scales in fp32."""
        return codes, scales.float()


@frozen(eq=False)
class Mxfp4:
    """A stack of weights in MXFP4, 32 codes a scale (OCP MX 1.0); as values each is the transpose of what is stored.

    ``codes`` (E, O, I / 32, 16), two in a byte, the lower one first; ``scales`` (E, O, I / 32), exponents plus 127.
    """

    codes: Plain
    scales: Plain
    dtype: torch.dtype = torch.bfloat16
    format: ClassVar[CodeFormat] = MXFP4

    @staticmethod
    def names(name: str) -> tuple[str, ...]:
        """Names of the codes and the scales of a stack."""
        return f"{name}_blocks", f"{name}_scales"

    @classmethod
    def described(cls, name: str, shape: tuple[int, ...]) -> dict[str, Description]:
        """Codes and scales of a stack whose values have ``shape``, (E, I, O), by name."""
        codes, scales = cls.names(name)
        experts, in_dim, out_dim = shape
        blocks = (experts, out_dim, in_dim // MXFP4.columns)
        bytes_of_block = MXFP4.columns // MXFP4.codes_per_element
        return {codes: (MXFP4.code_dtype, (*blocks, bytes_of_block)), scales: (MXFP4.scale_dtype, blocks)}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, (E, I, O)."""
        experts, rows, blocks, _ = self.codes.shape
        return experts, 32 * blocks, rows

    @property
    def tensors(self) -> tuple[Plain, ...]:
        """Codes and scales, as they are stored."""
        return self.codes, self.scales

    def read(self, first: int | None) -> Tensor:
        """Values, exact in bf16."""
        return MXFP4.decode(self.codes.read(first).flatten(-2), self.scales.read(first)).mT

    @staticmethod
    def arranged(codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        """Codes (..., I / 2, O) and scales (..., I / 32, O), in the order of the values."""
        return codes.flatten(-2).mT, scales.mT


@frozen(eq=False)
class Nvfp4:
    """A weight in NVFP4 as ``compressed-tensors`` stores it: codes (O, I / 2), scales (O, I / 16), a divisor (1).

    ``input_scale`` (1) is that of the rows that it multiplies, for servers that quantize these: no recipe of ours does.
    """

    codes: Plain
    scales: Plain
    divisor: Plain
    input_scale: Plain | None = None
    dtype: torch.dtype = torch.bfloat16
    format: ClassVar[CodeFormat] = NVFP4

    @staticmethod
    def names(name: str) -> tuple[str, ...]:
        """Names of the codes, the scales and the divisor of a weight."""
        return f"{name}_packed", f"{name}_scale", f"{name}_global_scale"

    @staticmethod
    def name_of_input_scale(name: str) -> str:
        """Name of the scale of the rows that a weight multiplies."""
        return f"{name.removesuffix('.weight')}.input_global_scale"

    @classmethod
    def described(cls, name: str, shape: tuple[int, ...]) -> dict[str, Description]:
        """Codes, scales and divisor of a weight of ``shape``, by name."""
        codes, scales, divisor = cls.names(name)
        return {
            codes: (NVFP4.code_dtype, NVFP4.shape_of_codes(shape)),
            scales: (NVFP4.scale_dtype, NVFP4.shape_of_scales(shape)),
            divisor: (torch.float32, (1,)),
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        out_dim, pairs = self.codes.shape
        return out_dim, 2 * pairs

    @property
    def tensors(self) -> tuple[Plain, ...]:
        """Codes, scales and divisor, as they are stored."""
        return self.codes, self.scales, self.divisor

    def read(self, first: int | None) -> Tensor:
        """``code * (scale / divisor)``, rounded once."""
        assert first is None, "a matrix has no matrices"
        return NVFP4.decode(*self.arranged(*(tensor.read(None) for tensor in self.tensors)))

    @staticmethod
    def arranged(codes: Tensor, scales: Tensor, divisor: Tensor) -> tuple[Tensor, ...]:
        """Codes, scales, and the divisor for each row."""
        return codes, scales, divisor.expand(len(codes), 1)


Coded = Fp8 | Mxfp4 | Nvfp4
"""A tensor that is stored as codes."""


def coded_piece(stored: Coded | type[Coded], tensors: Iterable[Tensor], piece: Origin) -> CodedWeight:
    """Piece, a view, of stored codes and scales. Raises ContractError if it cuts a block."""
    arranged = stored.arranged(*tensors)
    return CodedWeight(tuple(piece.of(part) for part in arranged), stored.format)


def write_piece(piece: CodedWeight, codes: CodedWeight) -> None:
    """Write codes and scales into a piece of tensors of a file."""
    for place, tensor in zip(piece.parts, codes.parts, strict=True):
        if place.stride(0) == 0:  # one number of a file, which belongs to every row
            place[:1].copy_(tensor[:1])
        else:
            place.copy_(tensor)
