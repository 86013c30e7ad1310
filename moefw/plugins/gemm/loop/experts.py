"""Experts as a Python loop over plain GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefw.core.contracts import ExpertGemm, Precision
from moefw.core.records import AdaptedWeight, Canonical, RowGroups
from moefw.core.stages import ExpertBatch
from moefw.runtime.compute.group_bias import widened
from moefw.runtime.compute.product import keep_activation, linear, separate
from moefw_kernels.swiglu import Clamp, weighted_swiglu, weighted_swiglu_backward

if TYPE_CHECKING:
    from moefw.core.context import BuildContext


@final
class LoopExperts(nn.Module, ExpertGemm):
    """Two weights per expert: ``gate_up`` (2F, D), gate rows, then up rows; ``down`` (D, F); perhaps a bias for each.

    If experts are split, each rank has a part of every bias, and adds it to its part of the sum.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        dims = context.site.dims
        parts = context.layout.size("etp")
        d = dims.model_dim
        f = dims.expert_dim // parts
        self.numbers = context.local_experts
        self.shards = (context.expert_shard(0), context.expert_shard(1))
        recipe = context.recipe("moe.experts")
        self.into, self.out_of = (separate(recipe, name, len(self.numbers)) for name in ("gate_up", "down"))
        self.gate_up = nn.ParameterList(torch.empty(2 * f, d) for _ in self.numbers)
        self.down = nn.ParameterList(torch.empty(d, f) for _ in self.numbers)
        biased = self.numbers if dims.biased_experts else ()
        self.gate_up_bias = nn.ParameterList(torch.empty(2 * f) for _ in biased)
        self.down_bias = nn.ParameterList(torch.empty(d // parts) for _ in biased)
        self.clamp = dims.activation.clamp
        into, out_of = self.shards
        gate_and_up = {"gate_proj": slice(0, f), "up_proj": slice(f, 2 * f)}
        self.gate_up_adapters = _adapters(
            context, AdaptedWeight(name="moe.experts.gate_up_proj", shape=(2 * f, d), shard=into, outputs=gate_and_up)
        )
        self.down_adapters = _adapters(context, AdaptedWeight(name="moe.experts.down_proj", shape=(d, f), shard=out_of))
        self._fc1 = context.region("expert_fc1", self._project_in)
        self._activate = context.region("moe_act", _activate)
        self._fc2 = context.region("expert_fc2", self._project_out)

    def forward(self, batch: ExpertBatch) -> Tensor:
        """``rows_RD``."""
        assert batch.counts_host is not None
        outputs = []
        # Behind the last group there may be rows of no expert, whose results are zeros.
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
        """Pre-activation ``(R, 2F)`` of one expert's rows: gate, then up."""
        rows = RowGroups(keys_R=keys_R)
        h_RH = linear(x_RD, self.gate_up[expert], self.into[expert], rows)
        if self.gate_up_adapters:
            h_RH = self.gate_up_adapters[expert](x_RD, h_RH, self.gate_up[expert], rows)
        if self.gate_up_bias:
            h_RH = h_RH + self.gate_up_bias[expert].to(h_RH.dtype)
        return h_RH

    def _project_out(self, expert: int, a_RF: Tensor, weights_R: Tensor, keys_R: Tensor | None) -> Tensor:
        """Results ``(R, D)`` of one expert; its bias too is multiplied by the weights."""
        rows = RowGroups(keys_R=keys_R)
        out_RD = linear(a_RF, self.down[expert], self.out_of[expert], rows)
        if self.down_adapters:
            out_RD = self.down_adapters[expert](a_RF, out_RD, self.down[expert], rows)
        if not self.down_bias:
            return out_RD
        bias = widened(self.down_bias[expert], self.shards[0])
        return out_RD + (weights_R.unsqueeze(1) * bias).to(out_RD.dtype)

    def canonical(self) -> Iterator[Canonical]:
        """Yield each expert's parameters, and those of adapters."""
        into, out_of = self.shards
        for local, expert in enumerate(self.numbers):
            f = self.down[local].shape[1]
            for name, rows in (("gate_proj", slice(0, f)), ("up_proj", slice(f, 2 * f))):
                yield Canonical(f"{expert}.{name}.weight", self.gate_up[local], (rows,), into)
                if self.gate_up_bias:
                    yield Canonical(f"{expert}.{name}.bias", self.gate_up_bias[local], (rows,), into, role="bias")
            yield Canonical(f"{expert}.down_proj.weight", self.down[local], shard=out_of)
            if self.down_bias:
                yield Canonical(f"{expert}.down_proj.bias", self.down_bias[local], shard=into, role="bias")
        adapters: Any = (*self.gate_up_adapters, *self.down_adapters)
        for adapter in adapters:
            yield from adapter.canonical()


def _adapters(context: BuildContext, weight: AdaptedWeight) -> nn.ModuleList:
    """Adapter of the weight of each expert on this rank; empty: they have none."""
    one_by_one = (range(expert, expert + 1) for expert in context.local_experts)
    adapters = [context.adapter(evolve(weight, experts=one)) for one in one_by_one]
    return nn.ModuleList(adapter for adapter in adapters if adapter is not None)


def _activate(h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None, recipe: Precision) -> Tensor:
    """Weighted activation ``(R, F)``. A recipe by pass also chooses the form in which H is saved."""
    if not recipe.by_pass:
        return weighted_swiglu(h_RH, weights_R, clamp)
    a_RF: Tensor = _Activation.apply(h_RH, weights_R, clamp, recipe)  # type: ignore[no-untyped-call]
    return a_RF


class _Activation(torch.autograd.Function):
    """``w * act(H)``; saves H in the form that the recipe chooses."""

    @staticmethod
    def forward(ctx: Any, h_RH: Tensor, weights_R: Tensor, clamp: Clamp | None, precision: Precision) -> Tensor:
        saved = keep_activation(h_RH, precision, RowGroups())
        ctx.save_for_backward(weights_R, *saved.tensors)
        ctx.operand = saved.operand
        ctx.clamp = clamp
        return weighted_swiglu(h_RH, weights_R, clamp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
        weights_R, *saved = ctx.saved_tensors
        h_RH = ctx.operand(saved)
        grad_h, grad_weights, _ = weighted_swiglu_backward(grad_RF.contiguous(), h_RH, weights_R, ctx.clamp)
        return grad_h, grad_weights, None, None
