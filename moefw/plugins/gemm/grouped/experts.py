"""Experts in two grouped GEMMs; backward starts from only the rows and the pre-activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw.core.contracts import Precision, StackedAdapter
from moefw.core.records import AdaptedWeight, Canonical, RowGroups, SavedOperand
from moefw.core.stages import ExpertBatch
from moefw.plugins.gemm.stacked import StackedExperts
from moefw.runtime.compute.casts import in_dtype
from moefw.runtime.compute.group_bias import add_group_bias, widened
from moefw.runtime.compute.grouped_mm import grouped_mm
from moefw.runtime.compute.low_rank import LowRankUse
from moefw.runtime.compute.product import keep_activation
from moefw.runtime.compute.row_operands import grad_operands, input_operands
from moefw.runtime.compute.weights import WeightUse
from moefw_kernels.swiglu import Clamp, weighted_swiglu, weighted_swiglu_backward

if TYPE_CHECKING:
    from moefw.core.context import BuildContext

Sizes = tuple[int, ...] | None
"""``ExpertBatch.counts_host``."""


@final
class GroupedExperts(StackedExperts):
    """Stacked experts in PyTorch's grouped GEMMs, perhaps with adapters."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        recipe = context.recipe("moe.experts")
        self.into, self.out_of = (recipe.at(name, groups=len(self.numbers)) for name in ("gate_up", "down"))
        _, d, f = self.down.shape
        into, out_of = self.shards
        self.gate_up_adapter = context.stacked_adapter(
            AdaptedWeight(
                name="moe.experts.gate_up_proj",
                shape=(2 * f, d),
                shard=into,
                experts=self.numbers,
                outputs={"gate_proj": slice(0, f), "up_proj": slice(f, 2 * f)},
            )
        )
        self.down_adapter = context.stacked_adapter(
            AdaptedWeight(name="moe.experts.down_proj", shape=(d, f), shard=out_of, experts=self.numbers)
        )
        self._fc1 = context.region("expert_fc1", self._project_in)
        self._fc2 = context.region("expert_fc2", self._activate_and_project_out)

    def forward(self, batch: ExpertBatch) -> Tensor:
        """``rows_RD``."""
        h_RH = self._fc1(batch.rows_RD, batch.offsets_e, batch.keys_R, batch.counts_host)
        rows_RD: Tensor = self._fc2(h_RH, batch.row_weights_R, batch.offsets_e, batch.keys_R, batch.counts_host)
        return rows_RD

    def _project_in(self, x_RD: Tensor, ends_e: Tensor, keys_R: Tensor | None, sizes: Sizes) -> Tensor:
        """Pre-activation ``(R, 2F)``: gate, then up."""
        h_RH: Tensor = _In.apply(  # type: ignore[no-untyped-call]
            self.gate_up, *_factors(self.gate_up_adapter), self.into, x_RD, ends_e, keys_R, sizes
        )
        return h_RH if self.gate_up_bias is None else add_group_bias(h_RH, self.gate_up_bias, ends_e)

    def _activate_and_project_out(
        self, h_RH: Tensor, weights_R: Tensor, ends_e: Tensor, keys_R: Tensor | None, sizes: Sizes
    ) -> Tensor:
        """Weighted results ``(R, D)`` of the experts; with etp > 1, this rank's part of their sum."""
        rows_RD: Tensor = _Out.apply(  # type: ignore[no-untyped-call]
            self.down, *_factors(self.down_adapter), self.out_of, self.clamp, h_RH, weights_R, ends_e, keys_R, sizes
        )
        if self.down_bias is None:
            return rows_RD
        return add_group_bias(rows_RD, widened(self.down_bias, self.shards[0]), ends_e, weights_R)

    def canonical(self) -> Iterator[Canonical]:
        """Yield each expert's parameters as pieces of the stacked ones, and those of adapters."""
        yield from super().canonical()
        for adapter in (self.gate_up_adapter, self.down_adapter):
            if adapter is not None:
                yield from adapter.canonical()


WEIGHT, A, B = 0, 1, 2
"""The first tensors that both Functions are given: a weight and the factors of its adapter."""


def _factors(adapter: StackedAdapter | None) -> tuple[Tensor | None, Tensor | None, StackedAdapter | None]:
    """Factors of an adapter, as tensors that autograd sees, and the adapter."""
    return (None, None, None) if adapter is None else (adapter.a, adapter.b, adapter)


class _In(torch.autograd.Function):
    """``H = X W13^T``, adapted; saves X."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        adapter: StackedAdapter | None,
        recipe: Precision,
        x_RD: Tensor,
        ends_e: Tensor,
        keys_R: Tensor | None,
        sizes: Sizes,
    ) -> Tensor:
        rows = RowGroups(ends_e, keys_R, sizes)
        x, kept_x = input_operands(x_RD, recipe, rows, trains=ctx.needs_input_grad[WEIGHT])
        ctx.weight = WeightUse(gate_up)
        w13, kept_w13 = ctx.weight.operands(gate_up, recipe)
        h_RH = in_dtype(grouped_mm(x, w13.mT, ends_e), x_RD.dtype)
        kept = [kept_x, kept_w13]
        ctx.low_rank = None
        if adapter is not None:
            assert a is not None
            assert b is not None
            ctx.low_rank = LowRankUse(adapter, a, b)
            delta_RH, kept_of_adapter = ctx.low_rank.product(x_RD, rows, a, b, saves_x=True)
            h_RH += delta_RH
            kept += kept_of_adapter
        _save(ctx, recipe=recipe, tensors=(ends_e, keys_R), sizes=sizes, operands=kept, dtype=x_RD.dtype)
        return h_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        (ends_e, keys_R), (x, w13, *of_adapter) = _saved(ctx, 2)
        rows = RowGroups(ends_e, keys_R, ctx.sizes)
        grad, grad_of_wgrad = grad_operands(grad_RH, ctx.recipe, rows, trains=ctx.needs_input_grad[WEIGHT])
        grad_x = in_dtype(grouped_mm(grad, w13, ends_e), ctx.dtype)
        grad_w13 = ctx.weight.gradient(ctx, WEIGHT, lambda: (grad_of_wgrad(), x), ends_e)
        grad_a = grad_b = None
        if ctx.low_rank is not None:
            x_of_a, *factors = of_adapter
            through_adapter, gradients_of_factors = ctx.low_rank.input_gradient(grad_RH, factors, rows)
            grad_x += through_adapter
            grad_a, grad_b = gradients_of_factors(ctx, (A, B), lambda: x_of_a)
        return grad_w13, grad_a, grad_b, None, None, grad_x, None, None, None


class _Out(torch.autograd.Function):
    """``Y = a W2^T``, adapted, with ``a = w * act(H)``; saves H and w, not a and not Y."""

    @staticmethod
    def forward(
        ctx: Any,
        down: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        adapter: StackedAdapter | None,
        recipe: Precision,
        clamp: Clamp | None,
        h_RH: Tensor,
        weights_R: Tensor,
        ends_e: Tensor,
        keys_R: Tensor | None,
        sizes: Sizes,
    ) -> Tensor:
        rows = RowGroups(ends_e, keys_R, sizes)
        act_RF = None
        # A recipe may fuse the activation with its quantization; None: it does not. An adapter reads it as it is.
        act = recipe.quantize_swiglu(h_RH, weights_R, rows=rows) if clamp is None and adapter is None else None
        if act is None:
            act_RF = weighted_swiglu(h_RH, weights_R, clamp)
            act = recipe.quantize(act_RF, role="input", during="fprop", rows=rows)
        ctx.weight = WeightUse(down)
        ctx.clamp = clamp
        w2, kept_w2 = ctx.weight.operands(down, recipe)
        y_RD = in_dtype(grouped_mm(act, w2.mT, ends_e), h_RH.dtype)
        kept = [keep_activation(h_RH, recipe, rows), kept_w2]
        ctx.low_rank = None
        if adapter is not None:
            assert a is not None
            assert b is not None
            assert act_RF is not None
            ctx.low_rank = LowRankUse(adapter, a, b)
            delta_RD, kept_of_adapter = ctx.low_rank.product(act_RF, rows, a, b, saves_x=False)
            y_RD += delta_RD
            kept += kept_of_adapter
        _save(
            ctx,
            recipe=recipe,
            tensors=(weights_R, ends_e, keys_R),
            sizes=sizes,
            operands=kept,
            dtype=h_RH.dtype,
        )
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (weights_R, ends_e, keys_R), (h_RH, w2, *of_adapter) = _saved(ctx, 3)
        recipe = ctx.recipe
        rows = RowGroups(ends_e, keys_R, ctx.sizes)
        grad_RD = grad_RD.contiguous()
        grad, grad_of_wgrad = grad_operands(grad_RD, recipe, rows, trains=ctx.needs_input_grad[WEIGHT])
        grad_act = in_dtype(grouped_mm(grad, w2, ends_e), ctx.dtype)
        gradients_of_factors = None
        if ctx.low_rank is not None:
            _, *factors = of_adapter
            through_adapter, gradients_of_factors = ctx.low_rank.input_gradient(grad_RD, factors, rows)
            grad_act += through_adapter
        # The activation is computed again from H, for the weight gradients.
        grad_h, grad_weights, act_RF = weighted_swiglu_backward(grad_act, h_RH, weights_R, ctx.clamp)

        def wgrad() -> tuple[Any, Any]:
            return grad_of_wgrad(), recipe.quantize(act_RF, role="input", during="wgrad", rows=rows)

        grad_w2 = ctx.weight.gradient(ctx, WEIGHT, wgrad, ends_e)
        grad_a = grad_b = None
        if gradients_of_factors is not None:
            low_rank = ctx.low_rank
            grad_a, grad_b = gradients_of_factors(ctx, (A, B), lambda: low_rank.x_of_wgrad(act_RF, rows))
        return grad_w2, grad_a, grad_b, None, None, None, grad_h, grad_weights, None, None, None


def _save(
    ctx: Any,
    *,
    recipe: Precision,
    tensors: Sequence[Tensor | None],
    sizes: Sizes,
    operands: Sequence[SavedOperand],
    dtype: torch.dtype,
) -> None:
    """Save tensors and operands for backward. ``ctx`` holds only what makes operands of tensors, and no tensor.

    So memory policies see every tensor, and free those that they drop.
    """
    of_operands = [tensor for saved in operands for tensor in saved.tensors]
    ctx.save_for_backward(*tensors, *of_operands)
    ctx.operands = [(saved.operand, len(saved.tensors)) for saved in operands]
    ctx.recipe = recipe
    ctx.sizes = sizes
    ctx.dtype = dtype


def _saved(ctx: Any, num_tensors: int) -> tuple[tuple[Any, ...], list[Any]]:
    """``num_tensors`` tensors that ``_save`` was given, and the operands."""
    saved = iter(ctx.saved_tensors)
    tensors = tuple(islice(saved, num_tensors))
    operands = [operand(list(islice(saved, count))) for operand, count in ctx.operands]
    return tensors, operands
