"""Experts as a Python loop over plain GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefw.core.contracts import ExpertGemm, Precision
from moefw.core.records import Canonical, RowGroups
from moefw.core.stages import ExpertBatch
from moefw.runtime.compute.group_bias import widened
from moefw.runtime.compute.product import keep_activation, linear, separate
from moefw_kernels.swiglu import Clamp, weighted_swiglu, weighted_swiglu_backward

if TYPE_CHECKING:
    from moefw.core.context import BuildContext


@final
class LoopExperts(nn.Module, ExpertGemm):
    """Three weights per expert: ``gate`` and ``up`` (F, D), ``down`` (D, F); perhaps a bias for each.

    If experts are split, each rank has a part of every bias, and adds it to its part of the sum.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        dims, parts = context.site.dims, context.layout.size("etp")
        d, f = dims.model_dim, dims.expert_dim // parts
        self.numbers, self.shards = context.local_experts, (context.expert_shard(0), context.expert_shard(1))
        recipe = context.recipe("moe.experts")
        self.into, self.out_of = (separate(recipe, name, len(self.numbers)) for name in ("gate_up", "down"))
        self.gate = nn.ParameterList(torch.empty(f, d) for _ in self.numbers)
        self.up = nn.ParameterList(torch.empty(f, d) for _ in self.numbers)
        self.down = nn.ParameterList(torch.empty(d, f) for _ in self.numbers)
        biased = self.numbers if dims.biased_experts else ()
        self.gate_bias = nn.ParameterList(torch.empty(f) for _ in biased)
        self.up_bias = nn.ParameterList(torch.empty(f) for _ in biased)
        self.down_bias = nn.ParameterList(torch.empty(d // parts) for _ in biased)
        self.clamp = dims.activation.clamp
        self._fc1 = context.region("expert_fc1", self._project_in)
        self._activate = context.region("moe_act", _activate)
        self._fc2 = context.region("expert_fc2", self._project_out)

    def forward(self, batch: ExpertBatch) -> Tensor:
        """Return ``rows_RD``."""
        assert batch.counts_host is not None
        outputs = []
        sizes = [*batch.counts_host, len(batch.rows_RD) - sum(batch.counts_host)]
        *groups, unused = batch.rows_RD.split(sizes)
        *weights, _ = batch.row_weights_R.split(sizes)
        keys = [None] * len(groups) if batch.keys_R is None else batch.keys_R.split(sizes)
        for expert, (x_RD, weights_R) in enumerate(zip(groups, weights, strict=True)):
            h_RH = self._fc1(expert, x_RD, keys[expert])
            a_RF = self._activate(h_RH, weights_R, self.clamp, self.out_of[expert])
            outputs.append(self._fc2(expert, a_RF, weights_R, keys[expert]))
        return torch.cat([*outputs, torch.zeros_like(unused)])

    def _project_in(self, expert: int, x_RD: Tensor, keys_R: Tensor | None) -> Tensor:
        gate_up = torch.cat([self.gate[expert], self.up[expert]])
        h_RH = linear(x_RD, gate_up, self.into[expert], RowGroups(keys_R=keys_R))
        if not self.gate_bias:
            return h_RH
        return h_RH + torch.cat([self.gate_bias[expert], self.up_bias[expert]]).to(h_RH.dtype)

    def _project_out(self, expert: int, a_RF: Tensor, weights_R: Tensor, keys_R: Tensor | None) -> Tensor:
        out_RD = linear(a_RF, self.down[expert], self.out_of[expert], RowGroups(keys_R=keys_R))
        if not self.down_bias:
            return out_RD
        bias = widened(self.down_bias[expert], self.shards[0])
        return out_RD + (weights_R.unsqueeze(1) * bias).to(out_RD.dtype)

    def canonical(self) -> Iterator[Canonical]:
        """Yield each expert's parameters."""
        into, out_of = self.shards
        for local, expert in enumerate(self.numbers):
            yield Canonical(f"{expert}.gate_proj.weight", self.gate[local], shard=into)
            yield Canonical(f"{expert}.up_proj.weight", self.up[local], shard=into)
            yield Canonical(f"{expert}.down_proj.weight", self.down[local], shard=out_of)
            if self.gate_bias:
                yield Canonical(f"{expert}.gate_proj.bias", self.gate_bias[local], shard=into)
                yield Canonical(f"{expert}.up_proj.bias", self.up_bias[local], shard=into)
                yield Canonical(f"{expert}.down_proj.bias", self.down_bias[local], shard=into)


def _activate(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None, recipe: Precision) -> Tensor:
    if not recipe.by_pass:
        return weighted_swiglu(h_RH, weights_R, clamp)
    a_RF: Tensor = _Activation.apply(h_RH, weights_R, clamp, recipe)  # type: ignore[no-untyped-call]
    return a_RF


class _Activation(torch.autograd.Function):
    """``w * act(H)``; saves H in the form that the recipe chooses."""

    @staticmethod
    def forward(ctx: Any, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None, precision: Precision) -> Tensor:
        kept = keep_activation(h_RH, precision, RowGroups())
        ctx.save_for_backward(weights_R, *kept.tensors)
        ctx.operand, ctx.clamp = kept.operand, clamp
        return weighted_swiglu(h_RH, weights_R, clamp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
        weights_R, *saved = ctx.saved_tensors
        h_RH = ctx.operand(saved)
        grad_h, grad_weights, _ = weighted_swiglu_backward(grad_RF.contiguous(), h_RH, weights_R, ctx.clamp)
        return grad_h, grad_weights, None, None
