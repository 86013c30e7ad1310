"""Experts in two grouped GEMMs with epilogues; backward starts from only the rows and the pre-activation.

Shapes: legend in :mod:`moefw.core.stages`; ``H = 2F``, gate, then up. All products share one list of tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw.core.contracts import Precision
from moefw.core.stages import ExpertBatch
from moefw.plugins.gemm.stacked import StackedExperts
from moefw.runtime.compute.group_bias import group_sums, widened
from moefw.runtime.compute.weights import WeightUse
from moefw_kernels.expert_gemm import Tiles, gated, gated_backward, product, row_tiles
from moefw_kernels.swiglu import Clamp

if TYPE_CHECKING:
    from moefw.core.context import BuildContext


@final
class TritonExperts(StackedExperts):
    """Stacked experts whose activation is computed in the epilogues. ``chosen``: the tiles of their products."""

    def __init__(self, context: BuildContext, chosen: Tiles) -> None:
        super().__init__(context)
        self.recipe = context.recipe("moe.experts")
        self.chosen = chosen
        self._fc1 = context.region("expert_fc1", self._project_in)
        self._fc2 = context.region("expert_fc2", self._project_out)

    def forward(self, batch: ExpertBatch) -> Tensor:
        """``rows_RD``."""
        groups = batch.row_weights_R, batch.offsets_e, row_tiles(batch.offsets_e, len(batch.rows_RD))
        h_RH, a_RF = self._fc1(batch.rows_RD, *groups)
        rows_RD: Tensor = self._fc2(h_RH, a_RF, *groups)
        return rows_RD

    def _project_in(self, x_RD: Tensor, weights_R: Tensor, ends_e: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-activation ``(R, H)`` and weighted activation ``(R, F)``."""
        h_RH, a_RF = _In.apply(  # type: ignore[no-untyped-call]
            self.gate_up, self.gate_up_bias, self.recipe, self.clamp, self.chosen, x_RD, weights_R, ends_e, tiles
        )
        return h_RH, a_RF

    def _project_out(self, h_RH: Tensor, a_RF: Tensor, weights_R: Tensor, ends_e: Tensor, tiles: Tensor) -> Tensor:
        """Weighted results ``(R, D)`` of the experts; with etp > 1, this rank's part of their sum."""
        bias = None if self.down_bias is None else widened(self.down_bias, self.shards[0])
        rows_RD: Tensor = _Out.apply(  # type: ignore[no-untyped-call]
            self.down, bias, self.recipe, self.clamp, self.chosen, h_RH, a_RF, weights_R, ends_e, tiles
        )
        return rows_RD


WEIGHT, BIAS = 0, 1
"""The first tensors that both Functions are given."""


class _In(torch.autograd.Function):
    """``H = X W13^T + b`` and ``a = w * act(H)``; saves X. The gradient of a reaches H and w through :class:`_Out`."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        bias: Tensor | None,
        recipe: Precision,
        clamp: Clamp | None,
        chosen: Tiles,
        x_RD: Tensor,
        weights_R: Tensor,
        ends_e: Tensor,
        tiles: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = recipe.quantize(x_RD, role="input", during="fprop")
        ctx.weight = WeightUse(gate_up)
        ctx.chosen = chosen
        w13, saved_w13 = ctx.weight.operands(gate_up, recipe)
        h_RH, a_RF = gated(x, w13, bias, weights_R, ends_e, tiles, clamp=clamp, tile=chosen.gated)
        ctx.save_for_backward(ends_e, tiles, x if ctx.needs_input_grad[WEIGHT] else None, *saved_w13.tensors)
        ctx.make_w13 = saved_w13.operand
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(a_RF)
        ctx.set_materialize_grads(False)
        return h_RH, a_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor, _: None) -> tuple[Tensor | None, ...]:
        ends_e, tiles, x, *w13_tensors = ctx.saved_tensors
        w13 = ctx.make_w13(w13_tensors)
        grad_x = product(grad_RH, w13, ends_e, tiles, transposed=False, tile=ctx.chosen.dgrad)
        grad_w13 = ctx.weight.gradient(ctx, WEIGHT, lambda: (grad_RH, x), ends_e)
        grad_bias = group_sums(grad_RH, ends_e).to(ctx.bias_dtype) if ctx.needs_input_grad[BIAS] else None
        return grad_w13, grad_bias, None, None, None, grad_x, None, None, None


class _Out(torch.autograd.Function):
    """``Y = a W2^T + w b`` with ``a = w * act(H)``; saves H and w, not a, which the product of backward makes again."""

    @staticmethod
    def forward(
        ctx: Any,
        down: Tensor,
        bias: Tensor | None,
        recipe: Precision,
        clamp: Clamp | None,
        chosen: Tiles,
        h_RH: Tensor,
        a_RF: Tensor,
        weights_R: Tensor,
        ends_e: Tensor,
        tiles: Tensor,
    ) -> Tensor:
        ctx.weight = WeightUse(down)
        ctx.chosen = chosen
        ctx.clamp = clamp
        w2, saved_w2 = ctx.weight.operands(down, recipe)
        # A bias is saved in three dimensions: two would look like rows to a stash.
        saved_bias = None if bias is None else bias.unsqueeze(0)
        ctx.save_for_backward(weights_R, ends_e, tiles, h_RH, saved_bias, *saved_w2.tensors)
        ctx.make_w2 = saved_w2.operand
        tile = chosen.down
        return product(a_RF, w2, ends_e, tiles, transposed=True, bias_eO=bias, weights_R=weights_R, tile=tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        weights_R, ends_e, tiles, h_RH, saved_bias, *w2_tensors = ctx.saved_tensors
        bias = None if saved_bias is None else saved_bias.squeeze(0)
        grad_RD = grad_RD.contiguous()
        grad_RH, grad_weights_R, a_RF = gated_backward(
            grad_RD,
            ctx.make_w2(w2_tensors),
            bias,
            h_RH,
            weights_R,
            ends_e,
            tiles,
            clamp=ctx.clamp,
            tile=ctx.chosen.gated_backward,
        )
        grad_w2 = ctx.weight.gradient(ctx, WEIGHT, lambda: (grad_RD, a_RF), ends_e)
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[BIAS]:
            grad_bias = group_sums(grad_RD, ends_e, weights_R).to(bias.dtype)
        return grad_w2, grad_bias, None, None, None, grad_RH, None, grad_weights_R, None, None
