"""The runtime part of ``sample``.

Shapes: legend in :mod:`moefw.core.stages`; ``H = 2F`` is gate, then up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import moefw
import torch
from moefw.runtime.compute.product import separate
from moefw_kernels.swiglu import weighted_swiglu
from torch import Tensor, nn


@final
class SampleExperts(nn.Module, moefw.ExpertGemm):
    """Owns the experts' parameters, stacked: gate and up ``(e, F, D)``, down ``(e, D, F)``, F this rank's part."""

    def __init__(self, context: moefw.BuildContext) -> None:
        super().__init__()
        dims = context.site.dims
        self.numbers = context.local_experts
        e = len(self.numbers)
        d = dims.model_dim
        f = dims.expert_dim // context.layout.size("etp")
        self.gate = nn.Parameter(torch.empty(e, f, d))
        self.up = nn.Parameter(torch.empty(e, f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))
        self._shards = {"gate": context.expert_shard(0), "up": context.expert_shard(0), "down": context.expert_shard(1)}
        recipe = context.recipe("moe.experts")
        self.into, self.out_of = (separate(recipe, name, e) for name in ("gate_up", "down"))
        self._activate = context.region("moe_act", self._activate_and_project)

    def forward(self, batch: moefw.ExpertBatch) -> Tensor:
        """``rows_RD``; rows past the last group are not read and come out as zero."""
        assert batch.counts_host is not None, "needs() asks for counts on the host"
        unused = len(batch.rows_RD) - sum(batch.counts_host)
        sizes = [*batch.counts_host, unused]
        *groups, tail_RD = batch.rows_RD.split(sizes)
        *weights, _ = batch.row_weights_R.split(sizes)
        out = [self._run(local, *rows) for local, rows in enumerate(zip(groups, weights, strict=True))]
        return torch.cat([*out, torch.zeros_like(tail_RD)])

    def _run(self, local: int, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        gate_up_HD = torch.cat([self.gate[local], self.up[local]])
        h_RH = moefw.linear(x_RD, gate_up_HD, self.into[local])
        return self._activate(local, h_RH, weights_R)

    def _activate_and_project(self, local: int, h_RH: Tensor, weights_R: Tensor) -> Tensor:
        return moefw.linear(weighted_swiglu(h_RH, weights_R), self.down[local], self.out_of[local])

    def canonical(self) -> Iterator[moefw.Canonical]:
        """Yield each expert's three weights under names that no layout changes."""
        for local, expert in enumerate(self.numbers):
            for part, shard in self._shards.items():
                name = f"{expert}.{part}_proj.weight"
                yield moefw.Canonical(name, getattr(self, part), index=(local,), shard=shard)
