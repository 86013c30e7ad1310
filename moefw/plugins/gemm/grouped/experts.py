"""Experts in two grouped GEMMs; backward starts from the rows and the pre-activation alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefw.core.contracts import Canonical, ExpertGemm, Precision, Rows
from moefw.core.product import grouped_mm
from moefw.core.stages import ExpertBatch
from moefw_kernels.swiglu import weighted_swiglu, weighted_swiglu_backward

if TYPE_CHECKING:
    from moefw.core.build import BuildContext


@final
class GroupedExperts(nn.Module, ExpertGemm):
    """``gate_up`` (e, 2F, D): gate rows, then up rows; ``down`` (e, D, F)."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        d, f = context.site.dims.model_dim, context.site.dims.expert_dim // context.layout.size("etp")
        self.numbers, self.shards = context.local_experts, (context.expert_shard(0), context.expert_shard(1))
        assert context.precision is not None
        experts = len(self.numbers)
        self.into, self.out_of = (context.precision.at(name, groups=experts) for name in ("gate_up", "down"))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * f, d))
        self.down = nn.Parameter(torch.empty(experts, d, f))

    def forward(self, batch: ExpertBatch) -> Tensor:
        """Return ``rows_RD``."""
        rows_RD: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            (self.into, self.out_of),
            batch.rows_RD,
            batch.row_weights_R,
            batch.offsets_e,
            batch.keys_R,
            self.gate_up,
            self.down,
        )
        return rows_RD

    def canonical(self) -> Iterator[Canonical]:
        """Yield each expert's three weights as pieces of the stacked ones."""
        f = self.down.shape[-1]
        into, out_of = self.shards
        for local, expert in enumerate(self.numbers):
            yield Canonical(f"{expert}.gate_proj.weight", self.gate_up, (local, slice(0, f)), into)
            yield Canonical(f"{expert}.up_proj.weight", self.gate_up, (local, slice(f, 2 * f)), into)
            yield Canonical(f"{expert}.down_proj.weight", self.down, (local,), out_of)


class _Experts(torch.autograd.Function):
    """``Y = a W2^T`` with ``a = w * swiglu(X W13^T)``; saves X, H and w, not a and not Y."""

    @staticmethod
    def forward(
        ctx: Any,
        recipes: tuple[Precision, Precision],
        x_RD: Tensor,
        weights_R: Tensor,
        ends_e: Tensor,
        keys_R: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        (into, out_of), rows = recipes, Rows(ends_e, keys_R)
        x = into.quantize(x_RD, role="input", during="fprop", rows=rows)
        w13 = into.quantize(gate_up, role="weight", during="fprop")
        h_RH = grouped_mm(x, w13.mT, ends_e).to(x_RD.dtype)
        a = out_of.quantize(weighted_swiglu(h_RH, weights_R), role="input", during="fprop", rows=rows)
        w2 = out_of.quantize(down, role="weight", during="fprop")
        rows_RD = grouped_mm(a, w2.mT, ends_e).to(x_RD.dtype)
        kept = (
            into.keep_activation(h_RH, rows),
            into.keep(x_RD, x, role="input", during="wgrad", rows=rows),
            into.keep(gate_up, w13, role="weight", during="dgrad"),
            out_of.keep(down, w2, role="weight", during="dgrad"),
        )
        ctx.save_for_backward(weights_R, ends_e, keys_R, *(tensor for one in kept for tensor in one.tensors))
        ctx.operands = [(one.operand, len(one.tensors)) for one in kept]
        ctx.recipes, ctx.dtypes = recipes, (x_RD.dtype, gate_up.dtype, down.dtype)
        return rows_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        weights_R, ends_e, keys_R, *saved = ctx.saved_tensors
        (into, out_of), rows = ctx.recipes, Rows(ends_e, keys_R)
        h_RH, x, w13, w2 = (operand([saved.pop(0) for _ in range(count)]) for operand, count in ctx.operands)
        dtype, into_dtype, out_dtype = ctx.dtypes
        grad_RD = grad_RD.contiguous()
        grad_y = out_of.quantize(grad_RD, role="grad", during="dgrad", rows=rows)
        grad_a = grouped_mm(grad_y, w2, ends_e).to(dtype)
        grad_h, grad_weights, a_RF = weighted_swiglu_backward(grad_a, h_RH, weights_R)
        grad_y = out_of.quantize(grad_RD, role="grad", during="wgrad", rows=rows)
        a = out_of.quantize(a_RF, role="input", during="wgrad", rows=rows)
        grad_down = grouped_mm(grad_y.mT, a, ends_e).to(out_dtype)
        grad_x = grouped_mm(into.quantize(grad_h, role="grad", during="dgrad", rows=rows), w13, ends_e).to(dtype)
        grad_h = into.quantize(grad_h, role="grad", during="wgrad", rows=rows)
        grad_gate_up = grouped_mm(grad_h.mT, x, ends_e).to(into_dtype)
        return None, grad_x, grad_weights, None, None, grad_gate_up, grad_down
