"""Experts in two grouped GEMMs of QuACK; backward starts from only the rows and the pre-activation.

Shapes: legend in :mod:`moefw.core.stages`; ``H = 2F``, gate and up in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import moefw
from moefw.runtime.compute.weights import WeightUse
from moefw_quack.machine import require
from moefw_quack.operators import dgated, gated, product
from moefw_quack.wgrads import GradRows


@final
class QuackExperts(nn.Module, moefw.ExpertGemm):
    """``gate_up`` (e, 2F, D): gate rows, then up rows; ``down`` (e, D, F). F is this rank's part of an expert."""

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__()
        require(context.device)
        dims = context.site.dims
        d = dims.model_dim
        f = dims.expert_dim // context.layout.size("etp")
        self.numbers = context.local_experts
        self.shards = (context.expert_shard(0), context.expert_shard(1))
        self.recipe = context.recipe("moe.experts")
        self.gate_up = nn.Parameter(torch.empty(len(self.numbers), 2 * f, d))
        self.down = nn.Parameter(torch.empty(len(self.numbers), d, f))
        self._fc1 = context.region("expert_fc1", self._project_in)
        self._fc2 = context.region("expert_fc2", self._project_out)

    def forward(self, batch: moefw.ExpertBatch) -> Tensor:
        """``rows_RD``. Rows behind the last group are not read; in the result they are undefined."""
        cu_seqlens = F.pad(batch.offsets_e, (1, 0))  # where each group begins, and where the last one ends
        h_RH, a_RF = self._fc1(batch.rows_RD, cu_seqlens)
        rows_RD: Tensor = self._fc2(h_RH, a_RF, batch.row_weights_R, cu_seqlens)
        return rows_RD

    def _project_in(self, x_RD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-activation ``(R, H)`` and activation ``(R, F)``."""
        h_RH, a_RF = _In.apply(self.recipe, x_RD, cu_seqlens, self.gate_up)  # type: ignore[no-untyped-call]
        return h_RH, a_RF

    def _project_out(self, h_RH: Tensor, a_RF: Tensor, weights_R: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Weighted results ``(R, D)`` of the experts; with etp > 1, this rank's part of their sum."""
        rows_RD: Tensor = _Out.apply(  # type: ignore[no-untyped-call]
            self.recipe, h_RH, a_RF, weights_R, cu_seqlens, self.down
        )
        return rows_RD

    def canonical(self) -> Iterator[moefw.Canonical]:
        """Yield each expert's three weights as pieces of the stacked ones."""
        f = self.down.shape[-1]
        into, out_of = self.shards
        for local, expert in enumerate(self.numbers):
            yield moefw.Canonical(f"{expert}.gate_proj.weight", self.gate_up, (local, slice(0, f)), into)
            yield moefw.Canonical(f"{expert}.up_proj.weight", self.gate_up, (local, slice(f, 2 * f)), into)
            yield moefw.Canonical(f"{expert}.down_proj.weight", self.down, (local,), out_of)


class _In(torch.autograd.Function):
    """``H = X W13^T`` and ``a = act(H)``; saves X. The gradient of a reaches H through :class:`_Out`."""

    @staticmethod
    def forward(
        ctx: Any, recipe: moefw.Precision, x_RD: Tensor, cu_seqlens: Tensor, gate_up: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = recipe.quantize(x_RD, role="input", during="fprop")
        ctx.weight = WeightUse(gate_up)
        w13, saved_w13 = ctx.weight.operands(gate_up, recipe)
        h_RH, a_RF = gated(x, w13, cu_seqlens)
        trains = ctx.needs_input_grad[-1]
        ctx.save_for_backward(cu_seqlens, x if trains else None, *saved_w13.tensors)
        ctx.make_w13 = saved_w13.operand
        ctx.mark_non_differentiable(a_RF)
        ctx.set_materialize_grads(False)
        return h_RH, a_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor, _: None) -> tuple[Tensor | None, ...]:
        cu_seqlens, x, *w13_tensors = ctx.saved_tensors
        _, needs_x, _, trains = ctx.needs_input_grad
        grad_x = None
        grad_w13 = None
        if needs_x:
            grad_x = product(grad_RH, ctx.make_w13(w13_tensors), cu_seqlens, in_turn=True)
        if trains:
            ends_e = cu_seqlens[1:]
            grad_w13 = ctx.weight.gradient(ctx, -1, lambda: (GradRows(grad_RH, in_turn=True), x), ends_e)
        return None, grad_x, None, grad_w13


class _Out(torch.autograd.Function):
    """``Y = (w * a) W2^T``; saves H and w, not a, which the product of backward computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        recipe: moefw.Precision,
        h_RH: Tensor,
        a_RF: Tensor,
        weights_R: Tensor,
        cu_seqlens: Tensor,
        down: Tensor,
    ) -> Tensor:
        ctx.weight = WeightUse(down)
        w2, saved_w2 = ctx.weight.operands(down, recipe)
        ctx.save_for_backward(cu_seqlens, weights_R, h_RH, *saved_w2.tensors)
        ctx.make_w2 = saved_w2.operand
        # QuACK's epilogue of the first product does not scale rows. In place: nobody else reads a.
        weighted_RF = a_RF.mul_(weights_R.unsqueeze(1))
        return product(weighted_RF, w2.mT, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        cu_seqlens, weights_R, h_RH, *w2_tensors = ctx.saved_tensors
        grad_RD = grad_RD.contiguous()
        w2 = ctx.make_w2(w2_tensors)
        grad_RH, weighted_RF, grad_R = dgated(grad_RD, w2, h_RH, weights_R, cu_seqlens)
        grad_w2 = None
        if ctx.needs_input_grad[-1]:
            ends_e = cu_seqlens[1:]
            grad_w2 = ctx.weight.gradient(ctx, -1, lambda: (GradRows(grad_RD, in_turn=False), weighted_RF), ends_e)
        return None, grad_RH, None, grad_R, None, grad_w2
