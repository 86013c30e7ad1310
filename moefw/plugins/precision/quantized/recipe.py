"""Recipes that quantize, dequantize and multiply in fp32: exact on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moefw.core.contracts import Kept, Pass, Precision, Role, Rows
from moefw_kernels.quantize import Quantized, quantize_fp8, quantize_mxfp8

Encode = Callable[[Tensor, Role, int], Quantized]
"""``(x, role, axis) -> codes and scales`` for a product that sums over ``axis``, -1 or -2."""


@final
class EmulatedRecipe(Precision):
    """Operands are fp32 tensors whose values the format holds; what wgrad needs is saved as codes and scales.

    ``save_codes``: so is the experts' pre-activation, which backward then reads rounded.
    """

    residual_dtype: ClassVar[Any] = torch.bfloat16
    by_pass: ClassVar[bool] = True

    def __init__(self, encode: Encode, *, save_codes: bool) -> None:
        self._encode, self._save_codes = encode, save_codes

    def quantize(self, x: Tensor, *, role: Role, during: Pass, rows: Rows | None = None) -> Tensor:
        """Return the dequantized operand, fp32."""
        if torch.is_grad_enabled() and x.requires_grad:
            operand: Tensor = _StraightThrough.apply(x, self._encode, role, summed_axis(role, during))  # type: ignore[no-untyped-call]
            return operand
        return self._encode(x, role, summed_axis(role, during)).dequantize()

    def keep(self, x: Tensor, used: Any, *, role: Role, during: Pass, rows: Rows | None = None) -> Kept:
        """Return the codes of an input; a weight is there in backward anyway, and is quantized again."""
        if role == "weight":
            return Kept((x,), lambda saved: self.quantize(saved[0], role=role, during=during))
        return _kept(self._encode(x, role, summed_axis(role, during)))

    def keep_activation(self, x: Tensor) -> Kept:
        """Return the codes of ``x`` in blocks along its last axis, if they are to be saved."""
        if not self._save_codes:
            return super().keep_activation(x)
        return _kept(self._encode(x, "input", -1), x.dtype)


def summed_axis(role: Role, during: Pass) -> int:
    """Return the axis of an operand over which the product of a pass sums."""
    return -2 if during == "wgrad" or (role, during) == ("weight", "dgrad") else -1


def blockwise(*, power_of_two: bool) -> Encode:
    """Return E4M3 in blocks of 128 along the axis, 128x128 for weights."""

    def encode(x: Tensor, role: Role, axis: int) -> Quantized:
        block = (128, 128) if role == "weight" else (1, 128) if axis == -1 else (128, 1)
        return quantize_fp8(x, block=block, power_of_two=power_of_two)

    return encode


def mx(x: Tensor, role: Role, axis: int) -> Quantized:
    """Return E4M3 in blocks of 32 along the axis with E8M0 scales."""
    return quantize_mxfp8(x, block=(1, 32) if axis == -1 else (32, 1))


def _kept(encoded: Quantized, dtype: torch.dtype = torch.float32) -> Kept:
    """Return codes and scales; the operand holds on to neither, nor to what they stand for."""
    empty = encoded.codes.new_empty(0)
    form = replace(encoded, codes=empty, scales=empty)
    return Kept(
        (encoded.codes, encoded.scales),
        lambda saved: replace(form, codes=saved[0], scales=saved[1]).dequantize().to(dtype),
    )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, encode: Encode, role: Role, axis: int) -> Tensor:
        ctx.dtype = x.dtype
        return encode(x, role, axis).dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, None, None
