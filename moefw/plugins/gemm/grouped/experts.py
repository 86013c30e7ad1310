"""Experts in two grouped GEMMs; backward starts from the rows and the pre-activation alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from moefw.core.contracts import Canonical, ExpertGemm
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
        self.precision = context.precision
        self.gate_up = nn.Parameter(torch.empty(len(self.numbers), 2 * f, d))
        self.down = nn.Parameter(torch.empty(len(self.numbers), d, f))

    def forward(self, batch: ExpertBatch) -> Tensor:
        """Return ``rows_RD``."""
        rows_RD: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            self.precision.quantize(batch.rows_RD, role="input", during="fprop"),
            batch.row_weights_R,
            batch.offsets_e,
            self.precision.quantize(self.gate_up, role="weight", during="fprop"),
            self.precision.quantize(self.down, role="weight", during="fprop"),
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
    def forward(ctx: Any, x_RD: Tensor, weights_R: Tensor, offsets_e: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        h_RH = grouped_mm(x_RD, gate_up.transpose(1, 2), offs=offsets_e)
        ctx.save_for_backward(x_RD, h_RH, weights_R, offsets_e, gate_up, down)
        return grouped_mm(weighted_swiglu(h_RH, weights_R), down.transpose(1, 2), offs=offsets_e)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, h_RH, weights_R, offsets_e, gate_up, down = ctx.saved_tensors
        grad_RD = grad_RD.contiguous()
        grad_a = grouped_mm(grad_RD, down, offs=offsets_e)
        grad_h, grad_weights, a_RF = weighted_swiglu_backward(grad_a, h_RH, weights_R)
        grad_down = grouped_mm(grad_RD.t(), a_RF, offs=offsets_e)
        grad_x = grouped_mm(grad_h, gate_up, offs=offsets_e)
        grad_gate_up = grouped_mm(grad_h.t(), x_RD, offs=offsets_e)
        return grad_x, grad_weights, None, grad_gate_up, grad_down
