"""The quantizers of Transformer Engine, set up for each role as its own recipes set them up.

``Float8BlockScaling``, ``MXFP8BlockScaling``, ``Float8CurrentScaling``, ``DelayedScaling`` and ``NVFP4BlockScaling`` of
``transformer_engine.common.recipe``, by their ``RecipeState`` in ``transformer_engine/pytorch/quantization.py``. These
read defaults from environment variables; the quantizers here are given every option.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.records import Pass, Role
from moefw.plugins.precision.quantized.encoders import Encoder, summed_axis
from moefw.plugins.precision.quantized.te.library import Library
from moefw.plugins.precision.quantized.tensorwise import FORMATS, GemmScales


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """Which codes are made: ``rowwise``, scaled along rows, and ``columnwise``, scaled along columns.

    A GEMM takes one of them. Where a quantizer cannot make the columnwise codes alone, both are made.
    """

    rowwise: bool
    columnwise: bool

    @classmethod
    def of(cls, role: Role, during: Pass, *, alone: bool) -> Usage:
        """Return that of an operand in a pass. ``alone``: whether rows can be quantized columnwise alone."""
        columnwise = summed_axis(role, during) == -2
        return cls(rowwise=not columnwise or role == "weight" or not alone, columnwise=columnwise)


class Quantizers(ABC):
    """Makes the quantizers of one format. ``multiple``: sizes of operands are filled up to multiples of it."""

    multiple: ClassVar[int]
    columns_alone: ClassVar[bool] = True
    """Whether columnwise codes of rows are made without rowwise ones; never those of weights."""
    splits_sums: ClassVar[bool] = False
    """Whether partial sums are added in fp32 in fprop, too."""

    def at(self, encoder: Encoder) -> Quantizers:
        """Return those of the GEMM whose encoder this is."""
        return self

    def takes(self, x: Tensor, role: Role) -> Tensor:
        """Return ``x`` in a dtype that is quantized."""
        return x

    @abstractmethod
    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Return a quantizer for each of ``count`` groups of rows, or stacked weights."""


@final
@dataclass(frozen=True)
class Blocks(Quantizers):
    """Blocks of 128 along an axis, 128x128 for weights."""

    power_of_two: bool
    multiple: ClassVar[int] = 128
    splits_sums: ClassVar[bool] = True

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Return quantizers to E4M3."""
        quantizer = te.quantizers["Float8BlockQuantizer"](
            te.dtypes.kFloat8E4M3,
            rowwise=usage.rowwise,
            columnwise=usage.columnwise,
            amax_epsilon=0.0,
            force_pow_2_scales=self.power_of_two,
            block_scaling_dim=2 if role == "weight" else 1,
        )
        return [_for_gemm(quantizer, role)] * count


@final
@dataclass(frozen=True)
class MXBlocks(Quantizers):
    """Blocks of 32 along an axis with E8M0 scales."""

    multiple: ClassVar[int] = 32

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Return quantizers to E4M3."""
        quantizer = te.quantizers["MXFP8Quantizer"](
            te.dtypes.kFloat8E4M3, rowwise=usage.rowwise, columnwise=usage.columnwise
        )
        return [_for_gemm(quantizer, role)] * count


@final
@dataclass(frozen=True)
class CurrentTensors(Quantizers):
    """A scale for a tensor, from its own largest magnitude. Its cast to columns writes rows, too."""

    multiple: ClassVar[int] = 16
    columns_alone: ClassVar[bool] = False

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Return quantizers to E4M3, of gradients to E5M2."""
        quantizer = te.quantizers["Float8CurrentScalingQuantizer"](
            _dtype(te, role),
            device=torch.device("cuda"),
            rowwise=usage.rowwise,
            columnwise=usage.columnwise,
            force_pow_2_scales=False,
            amax_epsilon=0.0,
        )
        return [_for_gemm(quantizer, role)] * count


@final
@dataclass(frozen=True)
class DelayedTensors(Quantizers):
    """A scale for a tensor from earlier steps: our scales and histories, which its kernels read and raise."""

    scales: GemmScales | None = None
    multiple: ClassVar[int] = 16
    columns_alone: ClassVar[bool] = False

    def at(self, encoder: Encoder) -> Quantizers:
        """Return those that use the scales of one GEMM, if it is named."""
        return DelayedTensors(encoder) if isinstance(encoder, GemmScales) else self

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Return quantizers to E4M3, of gradients to E5M2, whose largest magnitudes are the GEMM's in training."""
        if self.scales is None:
            what = "a GEMM without a name multiplies under delayed scaling: nothing would remember its magnitudes."
            raise ContractError(
                what, "Assign Precision.at(name, groups=...) to the GEMM's module, or use scaling: current."
            )
        scales, operand = self.scales, [*FORMATS].index(role)
        largest = scales.largest if scales.training else torch.zeros_like(scales.largest)
        made = (
            te.quantizers["Float8Quantizer"](
                scales.scale[group, operand].reshape(1),
                largest[group, operand].reshape(1),
                _dtype(te, role),
                rowwise=usage.rowwise,
                columnwise=usage.columnwise,
            )
            for group in range(count)
        )
        return [_for_gemm(quantizer, role) for quantizer in made]


@final
@dataclass(frozen=True)
class FP4Blocks(Quantizers):
    """Blocks of 16, weights in 16x16 if ``square_weights``; random draws are those of its own generator."""

    draws: bool
    turns: bool
    square_weights: bool
    multiple: ClassVar[int] = 32

    def takes(self, x: Tensor, role: Role) -> Tensor:
        """Return rows in bf16, which alone it transforms."""
        return x.bfloat16() if self.turns and role != "weight" else x

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Return quantizers to E2M1; what is transformed is the columnwise codes, those of wgrad."""
        turns = self.turns and role != "weight"
        quantizer = te.quantizers["NVFP4Quantizer"](
            te.dtypes.kFloat4E2M1,
            rowwise=usage.rowwise,
            columnwise=usage.columnwise,
            with_rht=turns,
            with_post_rht_amax=turns,
            with_2d_quantization=role == "weight" and self.square_weights,
            stochastic_rounding=role == "grad" and self.draws,
        )
        return [_for_gemm(quantizer, role)] * count


def _dtype(te: Library, role: Role) -> Any:
    return te.dtypes.kFloat8E5M2 if role == "grad" else te.dtypes.kFloat8E4M3


def _for_gemm(quantizer: Any, role: Role) -> Any:
    """Have it make storage that only GEMMs read; scales of rows are laid as a GEMM wants them."""
    quantizer.internal = True
    quantizer.optimize_for_gemm = role != "weight"
    return quantizer
