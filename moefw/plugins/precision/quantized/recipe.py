"""A recipe that quantizes, dequantizes and multiplies in fp32: exact on any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moefw.core.contracts import Kept, Pass, Precision, Role, Rows
from moefw.plugins.precision.quantized.encoders import Encoder
from moefw_kernels.quantize import Quantized

_NO_ROWS = Rows()


@final
class EmulatedRecipe(Precision):
    """Operands are fp32 tensors whose values the format holds; what wgrad needs is saved as codes and scales.

    ``save_codes``: so is the experts' pre-activation, which backward then reads rounded.
    """

    residual_dtype: ClassVar[Any] = torch.bfloat16
    by_pass: ClassVar[bool] = True

    def __init__(self, encoder: Encoder, *, save_codes: bool) -> None:
        self._encoder, self._save_codes = encoder, save_codes

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Return the recipe with the encoder of that place."""
        return EmulatedRecipe(self._encoder.at(name, groups=groups), save_codes=self._save_codes)

    def quantize(self, x: Tensor, *, role: Role, during: Pass, rows: Rows | None = None) -> Tensor:
        """Return the dequantized operand, fp32."""
        if torch.is_grad_enabled() and x.requires_grad:
            operand: Tensor = _StraightThrough.apply(x, self, role, during, rows)  # type: ignore[no-untyped-call]
            return operand
        return self._encode(x, role, during, rows).dequantize()

    def keep(self, x: Tensor, used: Any, *, role: Role, during: Pass, rows: Rows | None = None) -> Kept:
        """Return the codes of an input; a weight is there in backward anyway, and is quantized again."""
        if role == "weight":
            return Kept((x,), lambda saved: self.quantize(saved[0], role=role, during=during))
        return _kept(self._encode(x, role, during, rows))

    def keep_activation(self, x: Tensor, rows: Rows | None = None) -> Kept:
        """Return the codes of ``x`` in blocks along its last axis, if they are to be saved."""
        if not self._save_codes:
            return super().keep_activation(x, rows)
        return _kept(self._encode(x, "input", "fprop", rows), x.dtype)

    def _encode(self, x: Tensor, role: Role, during: Pass, rows: Rows | None) -> Quantized:
        return self._encoder.encode(x, role, during, rows or _NO_ROWS)


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
    def forward(ctx: Any, x: Tensor, recipe: EmulatedRecipe, role: Role, during: Pass, rows: Rows | None) -> Tensor:
        ctx.dtype = x.dtype
        return recipe.quantize(x.detach(), role=role, during=during, rows=rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, None, None, None
