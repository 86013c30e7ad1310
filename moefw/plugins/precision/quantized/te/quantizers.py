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
from moefw.core.records import GemmPass, Role
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
    def of(cls, role: Role, during: GemmPass, *, alone: bool) -> Usage:
        """Usage of an operand in a pass. ``alone``: whether rows can be quantized only columnwise."""
        columnwise = summed_axis(role, during) == -2
        return cls(rowwise=not columnwise or role == "weight" or not alone, columnwise=columnwise)


class Quantizers(ABC):
    """Makes the quantizers of one format. ``multiple``: sizes of operands are padded to multiples of it."""

    multiple: ClassVar[int]
    columns_alone: ClassVar[bool] = True
    """Whether columnwise codes of rows are made without rowwise ones. Those of weights never are."""
    splits_sums: ClassVar[bool] = False
    """Whether fprop, too, adds partial sums in fp32."""

    def at(self, encoder: Encoder) -> Quantizers:
        """Quantizers of the GEMM with this encoder."""
        return self

    def takes(self, x: Tensor, role: Role) -> Tensor:
        """``x`` in a dtype that the quantizers take."""
        return x

    @abstractmethod
    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Quantizer for each of ``count`` groups of rows, or stacked weights."""


@final
@dataclass(frozen=True)
class Blocks(Quantizers):
    """Blocks of 128 along an axis, 128x128 for weights."""

    power_of_two: bool
    multiple: ClassVar[int] = 128
    splits_sums: ClassVar[bool] = True

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Quantizers to E4M3."""
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
        """Quantizers to E4M3."""
        quantizer = te.quantizers["MXFP8Quantizer"](
            te.dtypes.kFloat8E4M3, rowwise=usage.rowwise, columnwise=usage.columnwise
        )
        return [_for_gemm(quantizer, role)] * count


@final
@dataclass(frozen=True)
class CurrentTensors(Quantizers):
    """One scale per tensor, from its own largest magnitude. The columnwise cast also writes rowwise codes."""

    multiple: ClassVar[int] = 16
    columns_alone: ClassVar[bool] = False

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Quantizers to E4M3, for gradients to E5M2."""
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
    """One scale per tensor from earlier steps: the kernels read our scales and raise our largest magnitudes."""

    scales: GemmScales | None = None
    multiple: ClassVar[int] = 16
    columns_alone: ClassVar[bool] = False

    def at(self, encoder: Encoder) -> Quantizers:
        """Quantizers that use the scales of one GEMM, if it is named."""
        return DelayedTensors(encoder) if isinstance(encoder, GemmScales) else self

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Quantizers to E4M3, for gradients to E5M2. In training they raise the GEMM's largest magnitudes."""
        if self.scales is None:
            raise ContractError(
                "a GEMM without a name multiplies under delayed scaling: nothing would remember its magnitudes.",
                "Assign Precision.at(name, groups=...) to the GEMM's module, or use scaling: current.",
            )
        scales = self.scales
        operand = list(FORMATS).index(role)
        # The kernels raise the magnitudes that they are given. Evaluation gives them some that nobody reads.
        largest = scales.largest if scales.training else torch.zeros_like(scales.largest)
        by_group = (
            te.quantizers["Float8Quantizer"](
                scales.scale[group, operand].reshape(1),
                largest[group, operand].reshape(1),
                _dtype(te, role),
                rowwise=usage.rowwise,
                columnwise=usage.columnwise,
            )
            for group in range(count)
        )
        return [_for_gemm(quantizer, role) for quantizer in by_group]


@final
@dataclass(frozen=True)
class FP4Blocks(Quantizers):
    """Blocks of 16, weights in 16x16 if ``square_weights``; Transformer Engine's generator makes random draws."""

    draws: bool
    turns: bool
    square_weights: bool
    multiple: ClassVar[int] = 32

    def takes(self, x: Tensor, role: Role) -> Tensor:
        """Rows in bf16, the only dtype that is transformed."""
        if self.turns and role != "weight":
            return x.bfloat16()
        return x

    def make(self, te: Library, role: Role, usage: Usage, count: int) -> list[Any]:
        """Quantizers to E2M1. Only columnwise codes, those of wgrad, are transformed."""
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
    """The library's dtype of the codes: range for gradients, precision otherwise."""
    return te.dtypes.kFloat8E5M2 if role == "grad" else te.dtypes.kFloat8E4M3


def _for_gemm(quantizer: Any, role: Role) -> Any:
    """Quantizer, set to make storage that only GEMMs read, with scales of rows in the GEMM's layout."""
    quantizer.internal = True
    quantizer.optimize_for_gemm = role != "weight"
    return quantizer
