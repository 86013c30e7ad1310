"""Experts whose weights are stacked in two parameters: what GEMMs that multiply groups of rows have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from moefw.core.contracts import ExpertGemm
from moefw.core.records import Canonical

if TYPE_CHECKING:
    from moefw.core.context import BuildContext


class StackedExperts(nn.Module, ExpertGemm):
    """``gate_up`` (e, 2F, D): gate rows, then up rows; ``down`` (e, D, F); perhaps a bias for each.

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
        experts = len(self.numbers)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * f, d))
        self.down = nn.Parameter(torch.empty(experts, d, f))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * f)) if dims.biased_experts else None
        self.down_bias = nn.Parameter(torch.empty(experts, d // parts)) if dims.biased_experts else None
        self.clamp = dims.activation.clamp

    def canonical(self) -> Iterator[Canonical]:
        """Yield each expert's parameters as pieces of the stacked ones."""
        f = self.down.shape[-1]
        into, out_of = self.shards
        for local, expert in enumerate(self.numbers):
            gate, up = (local, slice(0, f)), (local, slice(f, 2 * f))
            yield Canonical(f"{expert}.gate_proj.weight", self.gate_up, gate, into)
            yield Canonical(f"{expert}.up_proj.weight", self.gate_up, up, into)
            yield Canonical(f"{expert}.down_proj.weight", self.down, (local,), out_of)
            if self.gate_up_bias is not None and self.down_bias is not None:
                yield Canonical(f"{expert}.gate_proj.bias", self.gate_up_bias, gate, into, role="bias")
                yield Canonical(f"{expert}.up_proj.bias", self.gate_up_bias, up, into, role="bias")
                yield Canonical(f"{expert}.down_proj.bias", self.down_bias, (local,), into, role="bias")
