"""The small modules of a transformer: linear, norm, RoPE, SwiGLU. They compute in the recipe's precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefw.core.contracts import Named, Precision
from moefw.core.records import Canonical, RowGroups, Shard
from moefw.core.stages import Batch
from moefw.models.tensor_parallel import TensorParallel
from moefw.runtime.compute.product import SharedInput, linear
from moefw_kernels.rmsnorm import rms_norm


@final
class Linear(nn.Module, Named):
    """``y = x W^T``; weight ``(out_dim, in_dim)`` in fp32, operands from the precision recipe.

    ``shard``: the part of the weight that this rank holds. ``rows``: the only outputs that are computed.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        precision: Precision,
        *,
        shard: Shard | None = None,
        rows: slice | None = None,
    ) -> None:
        super().__init__()
        self.precision, self.shard, self.rows = precision, shard, rows
        shape = (out_dim, in_dim)
        self.weight = nn.Parameter(torch.empty(shard.shape(shape) if shard else shape))

    def forward(self, x: Tensor, rows: RowGroups | None = None, shared: SharedInput | None = None) -> Tensor:
        """Return ``(..., out_dim)``, or this rank's part of it; a partial sum if ``in_dim`` is split."""
        weight = self.weight if self.rows is None else self.weight[self.rows]
        return linear(x, weight, self.precision, rows, shared=shared)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (out_dim, in_dim)."""
        yield Canonical("weight", self.weight, shard=self.shard)


@final
class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, the mean in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dimension, in its dtype."""
        return rms_norm(x, self.weight, self.eps)


@final
class SwiGLU(nn.Module):
    """``W2 (silu(W1 x) * (W3 x))``: a dense MLP or a shared expert, its hidden dim split over the ranks of tp."""

    def __init__(self, dim: int, hidden_dim: int, precision: Precision, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        gate, up, down = (precision.at(f"{name}_proj", groups=1) for name in ("gate", "up", "down"))
        self.gate_proj = Linear(dim, hidden_dim, gate, shard=tp.shard(0))
        self.up_proj = Linear(dim, hidden_dim, up, shard=tp.shard(0))
        self.down_proj = Linear(hidden_dim, dim, down, shard=tp.shard(1))

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        """Return ``(t, D)`` for this rank's part of the tokens of ``batch``."""
        x_TD, rows = self.tp.gather(x_tD), batch.rows
        shared = SharedInput(x_TD)
        gate_TF, up_TF = self.gate_proj(x_TD, rows, shared), self.up_proj(x_TD, rows, shared)
        return self.tp.reduce(self.down_proj(F.silu(gate_TF) * up_TF, rows))


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``(S, head_dim/2)`` in fp32 (arXiv 2104.09864 eq. 15)."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), theta ** (-pairs / head_dim))
    return angles.cos(), angles.sin()


def apply_rope(x_BSHd: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) by the angle of its position."""
    cos, sin = (part.to(x_BSHd.dtype).unsqueeze(1) for part in table)
    first, second = x_BSHd.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
