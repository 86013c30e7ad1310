"""Modules that attentions and models are made of: linear layers and norm. They compute in the recipe's precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Named, Precision
from moefw.core.records import AdaptedWeight, Canonical, RowGroups, Shard
from moefw.core.stages import Batch
from moefw.runtime.compute.product import SharedInput, linear
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw_kernels.rmsnorm import rms_norm

Adapted = tuple[str, Callable[[AdaptedWeight], Any | None]]
"""The name of a weight in its layer, and :meth:`moefw.BuildContext.adapter`."""


@final
class Linear(nn.Module, Named):
    """``y = x W^T + b``; weight ``(out_dim, in_dim)`` in fp32, operands from the precision recipe.

    ``shard``: the part of the outputs that this rank holds. ``rows``: the only outputs that are computed. ``adapted``:
    the name of the weight in its layer, and what has its adapter, if it may have one.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        precision: Precision,
        *,
        shard: Shard | None = None,
        rows: slice | None = None,
        bias: bool = False,
        adapted: Adapted | None = None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.shard = shard
        self.rows = rows
        shape = (out_dim, in_dim) if shard is None else shard.shape((out_dim, in_dim))
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None
        self.adapter = _adapter(adapted, shape, shard, rows)

    def forward(self, x: Tensor, rows: RowGroups | None = None, shared: SharedInput | None = None) -> Tensor:
        """``(..., out_dim)``, or this rank's part of it."""
        weight = self.weight if self.rows is None else self.weight[self.rows]
        out = linear(x, weight, self.precision, rows, shared=shared)
        if self.adapter is not None:
            out = self.adapter(x, out, weight, rows)
        if self.bias is None:
            return out
        bias = self.bias if self.rows is None else self.bias[self.rows]
        return out + bias.to(out.dtype)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (out_dim, in_dim) and ``bias`` (out_dim), if there is one."""
        yield Canonical("weight", self.weight, shard=self.shard)
        if self.bias is not None:
            yield Canonical("bias", self.bias, shard=self.shard, role="bias")
        if self.adapter is not None:
            yield from self.adapter.canonical()


@final
class RowParallelLinear(nn.Module, Named):
    """``y = x W^T + b``, its inputs split over the ranks of tp, which sum their results and share the rows out.

    Weight ``(out_dim, in_dim / tp)`` and bias ``(out_dim)`` in fp32, operands from the precision recipe.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        precision: Precision,
        tp: TensorParallel,
        *,
        bias: bool = False,
        adapted: Adapted | None = None,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.tp = tp
        shape = (out_dim, in_dim // tp.size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None
        self.adapter = _adapter(adapted, shape, tp.shard(1))

    def forward(self, x_Ti: Tensor, rows: RowGroups | None = None) -> Tensor:
        """``(t, out_dim)`` for this rank's part of the tokens."""
        partial_TO = linear(x_Ti, self.weight, self.precision, rows)
        if self.adapter is not None:
            partial_TO = self.adapter(x_Ti, partial_TO, self.weight, rows)
        out_tO = self.tp.reduce(partial_TO)
        return out_tO if self.bias is None else out_tO + self.bias.to(out_tO.dtype)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (out_dim, in_dim) and ``bias`` (out_dim), if there is one."""
        yield Canonical("weight", self.weight, shard=self.tp.shard(1))
        if self.bias is not None:
            yield Canonical("bias", self.bias, role="bias")
        if self.adapter is not None:
            yield from self.adapter.canonical()


@final
class RMSNorm(nn.Module, Named):
    """``x / sqrt(mean(x^2) + eps) * weight``, the mean in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` normalised over its last dimension, in its dtype."""
        return rms_norm(x, self.weight, self.eps)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (dim)."""
        yield Canonical("weight", self.weight, role="norm")


def _adapter(
    adapted: Adapted | None, shape: Sequence[int], shard: Shard | None, rows: slice | None = None
) -> Any | None:
    """Adapter of a weight; None: it has none."""
    if adapted is None:
        return None
    name, adapter_of = adapted
    out_dim, in_dim = shape
    return adapter_of(AdaptedWeight(name=name, shape=(out_dim, in_dim), shard=shard, computed=rows))


def in_heads(x_TW: Tensor, batch: Batch, width: int) -> Tensor:
    """``(B, S, W / width, width)``: the tokens of ``batch``, their values in heads."""
    return x_TW.view(*batch.ids_BS.shape, x_TW.shape[-1] // width, width)
