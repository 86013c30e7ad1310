"""The adapter of DoRA: a low-rank change of directions, and a magnitude of each output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.contracts import Precision
from moefw.core.records import AdaptedWeight, Canonical, RowGroups
from moefw.runtime.adapters import LowRank
from moefw.runtime.compute.coded_weight import values_of
from moefw.runtime.parallel.local_shards import all_of


@final
class DirectionAndMagnitude(LowRank):
    """``y = (x W^T + scale (x A^T) B^T) m / |W + scale B A|``, with ``magnitude`` m ``(O)``, fp32.

    ``group``: the ranks that split the inputs of the weight, which sum the squares of their parts of each row.
    """

    def __init__(
        self, weight: AdaptedWeight, *, rank: int, scale: float, precision: Precision, group: ProcessGroup | None
    ) -> None:
        super().__init__(weight, rank=rank, scale=scale, precision=precision)
        self.group = group
        self.magnitude = nn.Parameter(torch.empty(weight.shape[0]))

    def forward(self, x: Tensor, out: Tensor, weight: Tensor, rows: RowGroups | None = None) -> Tensor:
        """``(..., O)``, adapted."""
        computed = self.weight.computed
        magnitude = self.magnitude if computed is None else self.magnitude[computed]
        b = self.b if computed is None else self.b[computed]
        factor = magnitude / self._norms(weight, b)
        adapted: Tensor = super().forward(x, out, weight, rows)
        return adapted * factor.to(adapted.dtype)

    @torch.no_grad()
    def _norms(self, weight: Tensor, b: Tensor) -> Tensor:
        """Norm of each row of ``W + scale B A``, fp32 ``(O)``, without a tensor of the weight's size.

        ``|w + s b A|^2 = |w|^2 + 2 s b . (A w) + s^2 b (A A^T) b^T`` for each row w of W and b of B.
        """
        weight = values_of(weight)
        a = self.a.float()
        b = b.float() * self.scale
        through_a = (weight @ a.to(weight.dtype).mT).float()  # (O, r)
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        squares += 2.0 * (b * through_a).sum(1) + ((b @ (a @ a.mT)) * b).sum(1)
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        norms: Tensor = squares.clamp_min(0.0).sqrt()
        return norms

    def begin(self, weight: Tensor) -> None:
        """Let the magnitude be the norms of the weight's rows."""
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        with torch.no_grad(), all_of(self.magnitude) as values:
            values.copy_(squares.sqrt())

    def merged(self, weight: Tensor) -> Tensor:
        """``(W + scale B A) m / |W + scale B A|``."""
        factor = self.magnitude / self._norms(weight, self.b)
        return super().merged(weight) * factor.unsqueeze(1)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``lora_A`` (rank, I), ``lora_B`` (O, rank) and ``lora_magnitude`` (O)."""
        yield from super().canonical()
        yield Canonical("lora_magnitude", self.magnitude, shard=self.weight.of_outputs, adapter_std=0.0, role="vector")
