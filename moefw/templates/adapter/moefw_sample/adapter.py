"""The runtime part of ``sample``.

A weight is ``(O, I)``, of which this rank may have a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import moefw
import torch
from torch import Tensor, nn


@final
class SampleAdapter(nn.Module, moefw.Adapter):
    """``x W^T + (x A^T) B^T``, with A ``(rank, I)`` and B ``(O, rank)``. B is zero at first."""

    def __init__(self, context: moefw.BuildContext, weight: moefw.AdaptedWeight, rank: int) -> None:
        super().__init__()
        out_dim, in_dim = weight.shape
        self.weight = weight
        self._recipe = context.fallback.at(weight.name)
        self.a = nn.Parameter(torch.empty(rank, in_dim))
        self.b = nn.Parameter(torch.empty(out_dim, rank))

    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: moefw.RowGroups | None = None) -> Tensor:
        """``(..., O)``, adapted. Two narrow products: ``B A`` would have the size of the weight."""
        b = self.b if self.weight.computed is None else self.b[self.weight.computed]
        low = moefw.linear(x, self.a, self._recipe, rows)
        return out + moefw.linear(low, b, self._recipe, rows)

    def merged(self, weight: Tensor) -> Tensor:
        """``W + B A``."""
        return weight + self.b @ self.a

    def canonical(self) -> Iterator[moefw.Canonical]:
        """Yield A and B. Where ranks split the weight, each has the part of one, and all of the other."""
        yield moefw.Canonical("lora_A", self.a, shard=self.weight.of_inputs, adapter_std=0.02)
        yield moefw.Canonical("lora_B", self.b, shard=self.weight.of_outputs, adapter_std=0.0)
