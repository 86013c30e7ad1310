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
from moefw.runtime.compute.coded_weight import values_of
from moefw.runtime.compute.row_operands import grad_operands, input_operands
from moefw.runtime.compute.weights import WeightUse, has_plain_gradient
from moefw.runtime.memory.dropped import output_of


class SharedInput:
    """Input ``x`` that several GEMMs read. The first one quantizes and saves it; the others reuse its operands."""

    __slots__ = ("_made", "_saves", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._made: tuple[Any, SavedOperand] | None = None
        self._saves = False

    def made_of(self, x: Tensor, precision: Precision, rows: RowGroups, *, trains: bool) -> tuple[Any, SavedOperand]:
        """Operand of fprop, and the saved operand for wgrad, if the weight ``trains``."""
        # What was made for a frozen weight saves nothing, and another GEMM may need it.
        if self._made is not None and (self._saves or not trains):
            return self._made
        made = input_operands(x, precision, rows, trains=trains)
        if precision.shares_inputs:
            self._made = made
            self._saves = trains
        return made


def separate(recipe: Precision, name: str, count: int) -> Any:
    """``count`` recipes for GEMMs called ``name`` of one group each; in a ``ModuleList`` if they have state."""
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
    """``x W^T`` in the dtype of ``x``; x ``(..., I)``, weight ``(O, I)``. ``rows`` describes the flattened rows.

    GEMMs that read the same ``x``, with recipes from one ``Precision.at``, may get one ``shared``. Raises ContractError
    if ``shared`` is of another tensor.
    """
    if not precision.by_pass and has_plain_gradient(weight):
        operand = precision.quantize(x, role="input", during="fprop")
        return F.linear(operand, precision.quantize(weight, role="weight", during="fprop"))
    groups = RowGroups() if rows is None else rows
    shared = SharedInput(x) if shared is None else shared
    if shared.x is not x:
        problem = "a GEMM reads another tensor than the one whose operand it is to share."
        raise ContractError(problem, "Make one SharedInput for each input, of the very tensor that GEMMs are given.")
    x_RI = x.reshape(-1, x.shape[-1])
    # Autograd sees only tensors that are arguments themselves, so the fields of RowGroups are passed one by one.
    out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x_RI, weight, precision, groups.ends_e, groups.keys_R, groups.sizes, shared
    )
    return out.view(*x.shape[:-1], len(weight))


def wide_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``x W^T`` computed and returned in a wider ``dtype``; saves ``x`` (T, I) as it is, not its wider copy.

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
    """Saved form of rows whose values backward reads.

    It is the rows themselves if a policy will recompute them: the recipe's compressed form would stay in memory.
    """
    if output_of(x):
        return SavedOperand((x,), lambda saved: saved[0])
    return precision.keep_activation(x, rows)


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
        rows = RowGroups(ends_e, keys_R, sizes)
        input_operand, saved_input = shared.made_of(x, precision, rows, trains=ctx.needs_input_grad[1])
        ctx.weight = WeightUse(weight)
        weight_operand, saved_weight = ctx.weight.operands(weight, precision)
        out: Tensor = input_operand @ weight_operand.mT
        ctx.save_for_backward(ends_e, keys_R, *saved_input.tensors, *saved_weight.tensors)
        ctx.num_input_tensors = len(saved_input.tensors)
        ctx.make_input_operand = saved_input.operand
        ctx.make_weight_operand = saved_weight.operand
        ctx.precision = precision
        ctx.dtype = x.dtype
        ctx.sizes = sizes
        return in_dtype(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends_e, keys_R, *tensors = ctx.saved_tensors
        input_tensors = tensors[: ctx.num_input_tensors]
        weight_tensors = tensors[ctx.num_input_tensors :]
        precision: Precision = ctx.precision
        rows = RowGroups(ends_e, keys_R, ctx.sizes)
        grad_x = None
        grad_weight = None

        needs_x, trains = ctx.needs_input_grad[:2]
        if needs_x:
            dgrad_operand, wgrad_operand = grad_operands(grad, precision, rows, trains=trains)
            grad_x = in_dtype(dgrad_operand @ ctx.make_weight_operand(weight_tensors), ctx.dtype)
        else:
            wgrad_operand = partial(precision.quantize, grad, role="grad", during="wgrad", rows=rows)
        if trains:
            grad_weight = ctx.weight.gradient(ctx, 1, lambda: (wgrad_operand(), ctx.make_input_operand(input_tensors)))
        return grad_x, grad_weight, None, None, None, None, None


class _WideLinear(torch.autograd.Function):
    """Saves ``x`` and the weight as they are, and computes in the wider dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype = x.dtype
        ctx.weight = WeightUse(weight)
        return F.linear(x.to(dtype), values_of(weight).to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = (grad @ values_of(weight).to(grad.dtype)).to(ctx.dtype)
        return grad_x, ctx.weight.gradient(ctx, 1, lambda: (grad, x.to(grad.dtype))), None


class _LinearByParts(torch.autograd.Function):
    """Saves ``x`` in bf16, and no parts of the weight where the step has them. Computes in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = WeightUse(weight)
        weight_parts, saved_weight = ctx.weight.operands(weight, bf16_parts.RECIPE)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *saved_weight.tensors)
        ctx.dtype = x.dtype
        ctx.make_weight_parts = saved_weight.operand
        product: Tensor = BF16Sum.of(x) @ weight_parts.mT
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, *weight_tensors = ctx.saved_tensors
        grad_parts = BF16Sum.of(grad)
        grad_x = (grad_parts @ ctx.make_weight_parts(weight_tensors)).to(ctx.dtype)
        return grad_x, ctx.weight.gradient(ctx, 1, lambda: (grad_parts, BF16Sum.of(x)))
