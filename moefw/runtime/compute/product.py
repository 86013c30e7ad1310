"""``y = x W^T`` under a recipe: forward and both products of backward, each with its own operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw.core.errors import ContractError
from moefw.core.records import RowGroups, SavedOperand
from moefw.runtime.compute import bf16_parts
from moefw.runtime.compute.bf16_parts import BF16Sum
from moefw.runtime.compute.casts import in_dtype
from moefw.runtime.compute.row_operands import grad_operands, input_operands
from moefw.runtime.compute.weights import WeightUse, has_plain_gradient
from moefw.runtime.memory.dropped import output_of


class SharedInput:
    """Input ``x`` that several GEMMs read. The first one quantizes and saves it; the others reuse its operands."""

    __slots__ = ("_made", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._made: tuple[Any, SavedOperand] | None = None

    def made_of(self, x: Tensor, precision: Precision, rows: RowGroups) -> tuple[Any, SavedOperand]:
        """Return the operand of fprop, and the saved operand for wgrad."""
        if self._made is not None:
            return self._made
        made = input_operands(x, precision, rows)
        if precision.shares_inputs:
            self._made = made
        return made


def separate(recipe: Precision, name: str, count: int) -> Any:
    """Return ``count`` recipes for GEMMs ``name`` of one group each; a ``ModuleList`` if they have state."""
    recipes = [recipe.at(name, groups=1) for _ in range(count)]
    return nn.ModuleList(recipes) if isinstance(recipes[0], nn.Module) else recipes  # type: ignore[arg-type]


def linear(
    x: Tensor,
    weight: Tensor,
    precision: Precision,
    rows: RowGroups | None = None,
    *,
    shared: SharedInput | None = None,
) -> Tensor:
    """Return ``x W^T`` in the dtype of ``x``; x ``(..., I)``, weight ``(O, I)``. ``rows`` describes the flattened rows.

    GEMMs that read the same ``x``, with recipes from one ``Precision.at``, may get one ``shared``. Raises ContractError
    if ``shared`` is of another tensor.
    """
    if not precision.by_pass and has_plain_gradient(weight):
        operand = precision.quantize(x, role="input", during="fprop")
        return F.linear(operand, precision.quantize(weight, role="weight", during="fprop"))
    about = RowGroups() if rows is None else rows
    shared = SharedInput(x) if shared is None else shared
    if shared.x is not x:
        what = "a GEMM reads another tensor than the one whose operand it is to share."
        raise ContractError(what, "Make one SharedInput for each input, of the very tensor that GEMMs are given.")
    given = (x.reshape(-1, x.shape[-1]), weight, precision, about.ends_e, about.keys_R, about.sizes, shared)
    out: Tensor = _Linear.apply(*given)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], len(weight))


def wide_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x W^T`` computed and returned in a wider ``dtype``; saves ``x`` (T, I) as it is, not its wider copy.

    On a GPU, fp32 products with bf16 rows are sums of bf16 products that are as exact: see ``bf16_parts``.
    """
    if x.dtype == dtype and has_plain_gradient(weight):
        return F.linear(x, in_dtype(weight, dtype))
    if bf16_parts.takes_parts(x, weight, dtype):
        product: Tensor = _LinearByParts.apply(x, weight)  # type: ignore[no-untyped-call]
        return product
    out: Tensor = _WideLinear.apply(x, weight, dtype)  # type: ignore[no-untyped-call]
    return out


def keep_activation(x: Tensor, precision: Precision, rows: RowGroups) -> SavedOperand:
    """Return the saved form of rows whose values backward reads: the rows themselves if they will be recomputed."""
    return SavedOperand((x,), lambda saved: saved[0]) if output_of(x) else precision.keep_activation(x, rows)


class _Linear(torch.autograd.Function):
    """Saves ``x`` and the weight in the forms that wgrad and dgrad need."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        precision: Precision,
        ends_e: Tensor | None,
        keys_R: Tensor | None,
        sizes: tuple[int, ...] | None,
        shared: SharedInput,
    ) -> Tensor:
        operand, kept = shared.made_of(x, precision, RowGroups(ends_e, keys_R, sizes))
        ctx.weight = WeightUse(weight)
        made, kept_weight = ctx.weight.operands(weight, precision)
        out: Tensor = operand @ made.mT
        ctx.save_for_backward(ends_e, keys_R, *kept.tensors, *kept_weight.tensors)
        ctx.operand, ctx.made, ctx.inputs = kept.operand, kept_weight.operand, len(kept.tensors)
        ctx.precision, ctx.dtype, ctx.sizes = precision, x.dtype, sizes
        return in_dtype(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends_e, keys_R, *tensors = ctx.saved_tensors
        precision: Precision = ctx.precision
        rows, grad_x, grad_weight = RowGroups(ends_e, keys_R, ctx.sizes), None, None
        inputs, weights = tensors[: ctx.inputs], tensors[ctx.inputs :]

        needs_x, trains = ctx.needs_input_grad[:2]
        if needs_x:
            operand, of_wgrad = grad_operands(grad, precision, rows, trains=trains)
            grad_x = in_dtype(operand @ ctx.made(weights), ctx.dtype)
        else:
            of_wgrad = partial(precision.quantize, grad, role="grad", during="wgrad", rows=rows)
        if trains:
            grad_weight = ctx.weight.gradient(ctx, 1, lambda: (of_wgrad(), ctx.operand(inputs)))
        return grad_x, grad_weight, None, None, None, None, None


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = WeightUse(weight)
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        return grad_x, ctx.weight.gradient(ctx, 1, lambda: (grad, x.to(grad.dtype))), None


class _LinearByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = WeightUse(weight)
        made, kept = ctx.weight.operands(weight, bf16_parts.RECIPE)
        ctx.save_for_backward(x, *kept.tensors)
        ctx.made = kept.operand
        product: Tensor = BF16Sum.of(x) @ made.mT
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, *tensors = ctx.saved_tensors
        parts = BF16Sum.of(grad)
        grad_x = (parts @ ctx.made(tensors)).to(x.dtype)
        return grad_x, ctx.weight.gradient(ctx, 1, lambda: (parts, BF16Sum.of(x)))
