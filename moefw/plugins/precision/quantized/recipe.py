"""Quantized recipes: the tensors they save for backward, and the recipe that multiplies in fp32 on any machine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Codec, Precision, WeightCodec
from moefw.core.records import GemmPass, Role, RowGroups, SavedOperand
from moefw.plugins.precision.quantized.encoders import Encoder
from moefw.runtime.accounting import standing_for
from moefw.runtime.compute.casts import in_dtype
from moefw_kernels.quantize import E2M1, Quantized, from_integers, integer_rows
from moefw_kernels.swiglu_quantize import swiglu_quantize

Activations = Literal["bf16", "fp8", "int8"]
_NO_ROWS = RowGroups()


class LowPrecisionRecipe(nn.Module, Precision):
    """Quantizes tensors that are not operands: rows on the wire, and the experts' pre-activation by ``activations``.

    Backward then reads the rounded pre-activation. A module, because ``encoder`` may keep state.
    """

    residual_dtype: ClassVar[Any] = torch.bfloat16
    by_pass: ClassVar[bool] = True

    def __init__(self, encoder: Encoder, *, activations: Activations, weight_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self._activations = activations
        self.weight_dtype = weight_dtype  # type: ignore[misc]  # of the class, in recipes without options
        self.draws = encoder.draws
        self.shares_inputs = encoder.shares_inputs

    def codec(self, dim: int) -> Codec | None:
        """Codec that packs rows in the blocks of fprop; None if the format has none."""
        return self.encoder.codec(dim)

    def weight_values(self, weight: Tensor) -> Tensor:
        """Values of a weight that are quantized: as it is, or rounded as it would be to be gathered."""
        return weight if self.weight_dtype is None else in_dtype(weight, self.weight_dtype)

    def weight_codec(self) -> WeightCodec | None:
        """Codec that quantizes shards of weights before they are gathered; None if none does."""
        return self.encoder.weight_codec()

    def keep_activation(self, x: Tensor, rows: RowGroups | None = None) -> SavedOperand:
        """Saved form of ``x``: codes in blocks along its last axis, or ``x`` itself."""
        if self._activations == "bf16":
            return super().keep_activation(x, rows)
        dtype = x.dtype
        if self._activations == "int8":
            return SavedOperand(integer_rows(x), lambda saved: from_integers(saved[0], saved[1], dtype))
        encoded = self.encoder.encode_activation(x, rows or _NO_ROWS)
        return _saved(encoded, lambda codes: codes.dequantize().to(dtype))


class QuantizedRecipe(LowPrecisionRecipe):
    """Saves inputs as codes and scales for wgrad. Weights that are gathered for each use are quantized for each."""

    @abstractmethod
    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Codes and scales of ``x``."""

    @abstractmethod
    def encode_weight(self, x: Tensor, passes: Sequence[GemmPass]) -> Sequence[Quantized]:
        """Codes and scales of a weight for each pass."""

    @abstractmethod
    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized] | None:
        """Codes and scales of rows ``x``, summed along and across rows, made in one read; None: it takes two."""

    @abstractmethod
    def operand_of(self, x: Tensor, during: GemmPass) -> Callable[[Quantized], Any]:
        """Function that makes an operand of the codes of ``x``. It keeps no reference to ``x``."""

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Recipe with the encoder of ``name``."""
        encoder = self.encoder.at(name, groups=groups)
        return type(self)(encoder, activations=self._activations, weight_dtype=self.weight_dtype)

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> Any:
        """Operand."""
        values = self.weight_values(x) if role == "weight" else x
        return self.operand_of(x, during)(self.encode(values, role, during, rows or _NO_ROWS))

    def both_ways(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Any, SavedOperand] | None:
        """Operand of the first pass, and the codes for wgrad, where rows are read once."""
        both = self.encode_both(x, role, rows)
        if both is None:
            return None
        along, across = both
        first: GemmPass = "fprop" if role == "input" else "dgrad"
        return self.operand_of(x, first)(along), _saved(across, self.operand_of(x, "wgrad"))

    def weight_operands(self, weight: Tensor, passes: Sequence[GemmPass]) -> Mapping[GemmPass, Callable[[], Any]]:
        """Function for each pass that returns the operand of a weight, of codes and scales that it holds."""
        encoded = self.encode_weight(self.weight_values(weight), passes)
        return {
            during: partial(self.operand_of(weight, during), codes)
            for during, codes in zip(passes, encoded, strict=True)
        }

    def quantize_swiglu(self, h_RH: Tensor, weights_R: Tensor, *, rows: RowGroups | None = None) -> Any | None:
        """Operand if ``h_RH`` is bf16 without gradients, blocks run along rows and no zeros are added."""
        scales = self.encoder.row_scales
        if scales is None or h_RH.dtype is not torch.bfloat16:
            return None
        if torch.is_grad_enabled() and h_RH.requires_grad:
            return None
        like_a_RF = h_RH.chunk(2, dim=-1)[0]  # a tensor of the activation's shape
        if self.fills_up(like_a_RF, rows or _NO_ROWS):
            return None
        return self.operand_of(like_a_RF, "fprop")(swiglu_quantize(h_RH, weights_R, scales=scales))

    def fills_up(self, x: Tensor, rows: RowGroups) -> bool:
        """Whether zeros are added to an input ``x`` in fprop."""
        return False

    def keep(
        self, x: Tensor, used: Any, *, role: Role, during: GemmPass, rows: RowGroups | None = None
    ) -> SavedOperand:
        """Codes of an input, or a weight itself."""
        if role == "weight":
            return SavedOperand((x,), lambda saved: self.quantize(saved[0], role=role, during=during))
        return _saved(self.encode(x, role, during, rows or _NO_ROWS), self.operand_of(x, during))


@final
class EmulatedRecipe(QuantizedRecipe):
    """Operands are fp32 tensors with values that the format can represent."""

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Codes and scales."""
        return self.encoder.encode(x, role, during, rows)

    def encode_weight(self, x: Tensor, passes: Sequence[GemmPass]) -> Sequence[Quantized]:
        """Codes and scales of a weight."""
        return self.encoder.encode_weight(x, passes)

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized] | None:
        """Codes and scales of rows."""
        return self.encoder.encode_both(x, role, rows)

    def operand_of(self, x: Tensor, during: GemmPass) -> Callable[[Quantized], Tensor]:
        """Function that dequantizes."""
        return _values

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> Any:
        """Dequantized operand, fp32, through which gradients flow."""
        if torch.is_grad_enabled() and x.requires_grad:
            return _StraightThrough.apply(x, self, role, during, rows)  # type: ignore[no-untyped-call]
        return super().quantize(x, role=role, during=during, rows=rows)


def _values(codes: Quantized) -> Tensor:
    """Values of codes, fp32, in whose place a GPU multiplies the codes."""
    dtype = torch.float4_e2m1fn_x2 if codes.fmt is E2M1 else codes.fmt.dtype
    with standing_for(codes.codes, dtype):
        return codes.dequantize()


def _saved(encoded: Quantized, operand: Callable[[Quantized], Any]) -> SavedOperand:
    """Codes and scales to save, and the function that makes the operand of them.

    The function keeps no reference to them: a memory policy that takes them away from autograd frees them.
    """
    names = [name for name in ("codes", "scales", "global_scale") if getattr(encoded, name) is not None]
    empty = encoded.codes.new_empty(0)

    def filled(form: Quantized, tensors: Iterable[Tensor]) -> Quantized:
        parts: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return replace(form, **parts)

    form = filled(encoded, [empty] * len(names))
    tensors = tuple(getattr(encoded, name) for name in names)
    return SavedOperand(tensors, lambda saved: operand(filled(form, saved)))


class _StraightThrough(torch.autograd.Function):
    """Quantizes and dequantizes. Gradients pass unchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recipe: EmulatedRecipe, role: Role, during: GemmPass, rows: RowGroups | None
    ) -> Tensor:
        ctx.dtype = x.dtype
        operand: Tensor = recipe.quantize(x.detach(), role=role, during=during, rows=rows)
        return operand

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, None, None, None
