"""RMSNorm across the heads of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.contracts import Named
from moefw.core.records import Canonical, Shard
from moefw_kernels.rmsnorm import rms_norm


@final
class NormAcrossHeads(nn.Module, Named):
    """``x / sqrt(mean(x^2) + eps) * weight``, the mean in fp32 over all ``width`` values of a token's heads.

    ``shard``: the part of the heads that this rank holds, with the ranks of ``group``. None: all of them.
    """

    def __init__(self, width: int, eps: float, shard: Shard | None, group: ProcessGroup | None) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.shard = shard
        self.group = group
        self.weight = nn.Parameter(torch.empty(shard.shape((width,)) if shard else width))

    def forward(self, x_BSHd: Tensor) -> Tensor:
        """This rank's heads, normalised, in their dtype."""
        x_BSw = x_BSHd.flatten(2)
        if self.shard is None:
            return rms_norm(x_BSw, self.weight, self.eps).view_as(x_BSHd)
        own_squares = x_BSw.float().square().sum(-1, keepdim=True)
        squares: Tensor = _Sum.apply(own_squares, self.group)  # type: ignore[no-untyped-call]
        scale = (squares / self.width + self.eps).rsqrt()
        return (x_BSw * scale.to(x_BSw.dtype) * self.weight.to(x_BSw.dtype)).view_as(x_BSHd)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (width)."""
        yield Canonical("weight", self.weight, shard=self.shard, role="norm")


class _Sum(torch.autograd.Function):
    """Sum of a tensor over the ranks, which all of them use. So its gradient is the sum of all their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
