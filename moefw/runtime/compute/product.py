"""``y = x W^T`` under a recipe: forward and both products of backward, each with its own operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw.core.errors import ContractError
from moefw.core.records import RowGroups, SavedOperand
from moefw.runtime.compute import wgrads
from moefw.runtime.memory.dropped import output_of
from moefw_kernels.devices import is_gpu
from moefw_kernels.empty_groups import clear_empty_groups


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
        operand = precision.quantize(x, role="input", during="fprop", rows=rows)
        made = operand, keep_input(x, operand, precision, rows)
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
    if not precision.by_pass:
        operand = precision.quantize(x, role="input", during="fprop")
        made = precision.quantize(weight, role="weight", during="fprop")
        if wgrads.current() is None:
            return F.linear(operand, made)
        split: Tensor = _SplitLinear.apply(operand, made)  # type: ignore[no-untyped-call]
        return split
    about = RowGroups() if rows is None else rows
    shared = SharedInput(x) if shared is None else shared
    if shared.x is not x:
        what = "a GEMM reads another tensor than the one whose operand it is to share."
        raise ContractError(what, "Make one SharedInput for each input, of the very tensor that GEMMs are given.")
    given = (x.reshape(-1, x.shape[-1]), weight, precision, about.ends_e, about.keys_R, about.sizes, shared)
    out: Tensor = _Linear.apply(*given)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], len(weight))


def wide_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x W^T`` computed and returned in a wider ``dtype``; saves ``x`` (T, I) as it is, not its wider copy."""
    if x.dtype == dtype and wgrads.current() is None:
        return F.linear(x, weight.to(dtype))
    out: Tensor = _WideLinear.apply(x, weight, dtype)  # type: ignore[no-untyped-call]
    return out


def grouped_mm(a: Any, b: Any, ends_e: Tensor) -> Tensor:
    """Return the products of groups: ``a`` (R, I) with ``b`` (e, I, O), or, summing over rows, (O, R) with (R, I).

    A sum over no rows is zero.
    """
    if not isinstance(a, Tensor):
        product: Tensor = a.grouped_mm(b, ends_e)
        return product
    if not a.numel():
        groups = (len(ends_e),) if b.dim() == 2 else ()
        return a.new_zeros(*groups, len(a), b.shape[-1])
    product = F.grouped_mm(a, b, offs=ends_e)
    if b.dim() == 2 and _leaves_empty_sums_unwritten(product.device):
        clear_empty_groups(product, ends_e)
    return product


@cache
def _leaves_empty_sums_unwritten(device: torch.device) -> bool:
    """Return whether grouped products leave sums over no rows unwritten, as on Blackwell (pytorch#172439)."""
    return is_gpu(device) and torch.cuda.get_device_capability(device)[0] >= 10


def keep_input(x: Tensor, used: Any, precision: Precision, rows: RowGroups) -> SavedOperand:
    """Return the saved operand of an input for wgrad: ``x`` itself if it will be recomputed and need not be kept."""
    if output_of(x) is None:
        return precision.keep(x, used, role="input", during="wgrad", rows=rows)
    about = {name: tensor for name, tensor in (("ends_e", rows.ends_e), ("keys_R", rows.keys_R)) if tensor is not None}
    return SavedOperand((x, *about.values()), partial(_quantize_again, precision, tuple(about), rows.sizes))


def keep_activation(x: Tensor, precision: Precision, rows: RowGroups) -> SavedOperand:
    """Return the saved form of rows whose values backward reads: the rows themselves if they will be recomputed."""
    return SavedOperand((x,), lambda saved: saved[0]) if output_of(x) else precision.keep_activation(x, rows)


def _quantize_again(
    precision: Precision, about: Sequence[str], sizes: tuple[int, ...] | None, saved: Sequence[Tensor]
) -> Any:
    x, *others = saved
    rows = RowGroups(**dict(zip(about, others, strict=True)), sizes=sizes)
    return precision.quantize(x, role="input", during="wgrad", rows=rows)


class _Linear(torch.autograd.Function):
    """Saves the weight, and ``x`` in the form that wgrad needs."""

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
        out: Tensor = operand @ precision.quantize(weight, role="weight", during="fprop").mT
        ctx.save_for_backward(weight, ends_e, keys_R, *kept.tensors)
        ctx.precision, ctx.operand, ctx.dtype, ctx.sizes = precision, kept.operand, x.dtype, sizes
        ctx.later = wgrads.current()
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends_e, keys_R, *tensors = ctx.saved_tensors
        precision: Precision = ctx.precision
        rows, grad_x, grad_weight = RowGroups(ends_e, keys_R, ctx.sizes), None, None

        def wgrad() -> Tensor:
            operand = precision.quantize(grad, role="grad", during="wgrad", rows=rows)
            product: Tensor = operand.mT @ ctx.operand(tensors)
            return product.to(weight.dtype)

        if ctx.needs_input_grad[0]:
            made = precision.quantize(weight, role="weight", during="dgrad")
            grad_x = (precision.quantize(grad, role="grad", during="dgrad", rows=rows) @ made).to(ctx.dtype)
            del made
        if ctx.needs_input_grad[1]:
            grad_weight = wgrads.now_or_later(ctx, ctx.later, 1, wgrad)
        return grad_x, grad_weight, None, None, None, None, None


class _SplitLinear(torch.autograd.Function):
    """``F.linear`` of two tensors, whose weight gradient can be left for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = wgrads.current()
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors

        def wgrad() -> Tensor:
            product: Tensor = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            return product

        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, wgrads.now_or_later(ctx, ctx.later, 1, wgrad) if ctx.needs_input_grad[1] else None


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = wgrads.current()
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors

        def wgrad() -> Tensor:
            product: Tensor = grad.t() @ x.to(grad.dtype)
            return product.to(weight.dtype)

        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        return grad_x, wgrads.now_or_later(ctx, ctx.later, 1, wgrad), None
