"""Embedding and cross entropy, with the vocabulary split over the ranks of tp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw.core.contracts import Named
from moefw.core.records import Canonical
from moefw.runtime.communication.gather import all_gather
from moefw.runtime.compute.weights import WeightUse, has_plain_gradient
from moefw.runtime.parallel.tensor_parallel import TensorParallel

IGNORED = -100
"""The label of tokens without loss."""


@final
class Embedding(nn.Module, Named):
    """Weight ``(vocabulary / tp, D)``, fp32. The row of ``pad_id`` gets no gradient. ``holders``: see ``Canonical``."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        tp: TensorParallel,
        pad_id: int | None = None,
        *,
        holders: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.tp = tp
        self.holders = holders
        num_rows = vocab_size // tp.size
        own_ids = range(num_rows * tp.index, num_rows * (tp.index + 1))
        self.pad_row = own_ids.index(pad_id) if pad_id is not None and pad_id in own_ids else None
        self.weight = nn.Parameter(torch.empty(num_rows, dim))

    def forward(self, ids_T: Tensor) -> Tensor:
        """``(t, D)`` for this rank's part of the tokens; ``ids_T`` are those of all tokens."""
        if self.tp.size == 1:
            return lookup(self.weight, ids_T, self.pad_row)
        own_T = ids_T - self.tp.index * len(self.weight)
        absent_T = (own_T < 0) | (own_T >= len(self.weight))
        rows_TD = lookup(self.weight, own_T.masked_fill(absent_T, 0), self.pad_row)
        return self.tp.reduce(rows_TD.masked_fill(absent_T.unsqueeze(1), 0.0))

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (vocabulary, D)."""
        yield Canonical("weight", self.weight, shard=self.tp.shard(0), holders=self.holders, role="embedding")


def lookup(weight_VD: Tensor, rows_N: Tensor, pad_row: int | None) -> Tensor:
    """Rows ``(N, D)`` of a weight. ``pad_row`` gets no gradient."""
    if has_plain_gradient(weight_VD):
        return F.embedding(rows_N, weight_VD, pad_row)
    rows_ND: Tensor = _Lookup.apply(weight_VD, rows_N, pad_row)  # type: ignore[no-untyped-call]
    return rows_ND


class _Lookup(torch.autograd.Function):
    """Rows of a weight. Backward adds their gradients to the weight's gradient of the step."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, rows_N: Tensor, pad_row: int | None) -> Tensor:
        ctx.weight = WeightUse(weight_VD)
        ctx.shape = weight_VD.shape
        ctx.pad_row = pad_row
        ctx.save_for_backward(rows_N)
        return F.embedding(rows_N, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, None, None]:
        (rows_N,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:  # a frozen weight
            return None, None, None
        if ctx.pad_row is not None:
            grad_ND = grad_ND.masked_fill((rows_N == ctx.pad_row).unsqueeze(1), 0.0)
        return ctx.weight.rows_gradient(grad_ND, rows_N, ctx.shape), None, None


def cross_entropy(logits_Tv: Tensor, labels_T: Tensor, tp: TensorParallel) -> Tensor:
    """Loss ``(t)``, fp32, of each of this rank's part of the tokens.

    ``logits_Tv``: all tokens, this rank's part of the vocabulary. ``labels_T``: -100 for tokens without loss.
    """
    loss_t: Tensor = _CrossEntropy.apply(logits_Tv, labels_T, tp)  # type: ignore[no-untyped-call]
    return loss_t


class _CrossEntropy(torch.autograd.Function):
    """``log sum exp(z - max) - (z_label - max)``; saves the shares ``softmax(z)``, fp32, from which backward begins.

    Max, sums and the label's logit are all-reduced over tp.
    """

    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, labels_T: Tensor, tp: TensorParallel) -> Tensor:
        size = logits_Tv.shape[1]
        own_T = labels_T - tp.index * size
        absent_T = (own_T < 0) | (own_T >= size)
        own_T = own_T.masked_fill(absent_T, 0)
        ignored_T = labels_T == IGNORED
        label_T = logits_Tv.gather(1, own_T.unsqueeze(1)).squeeze(1).float()
        if tp.group is None:
            shares_Tv, loss_T = _shares(logits_Tv, label_T)
        else:
            shares_Tv, loss_T = _split_shares(logits_Tv, label_T, absent_T, tp)
        ctx.save_for_backward(shares_Tv, own_T, absent_T, ignored_T)
        ctx.tp = tp
        ctx.dtype = logits_Tv.dtype
        loss_T = loss_T.masked_fill(ignored_T, 0.0)
        part = tp.shard(0)
        return loss_T if part is None else part.of(loss_T).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_t: Tensor) -> tuple[Tensor | None, ...]:
        shares_Tv, own_T, absent_T, ignored_T = ctx.saved_tensors
        grad_T = grad_t
        if ctx.tp.group is not None:
            grad_T = grad_t.new_empty(len(own_T))
            all_gather(grad_T, grad_t.contiguous(), group=ctx.tp.group)
        grad_T = grad_T.masked_fill(ignored_T, 0.0).unsqueeze(1)
        # softmax(z), less 1 at the label: only the rank that has the label's logit subtracts it.
        grad_Tv = shares_Tv * grad_T
        grad_Tv.scatter_add_(1, own_T.unsqueeze(1), -grad_T.masked_fill(absent_T.unsqueeze(1), 0.0))
        return grad_Tv.to(ctx.dtype), None, None


def _shares(logits_Tv: Tensor, label_T: Tensor) -> tuple[Tensor, Tensor]:
    """Shares and losses. The largest share is that of the largest logit, ``1 / sum exp(z - max)``."""
    shares_Tv = logits_Tv.softmax(1, dtype=torch.float32)
    return shares_Tv, logits_Tv.amax(1).float() - label_T - shares_Tv.amax(1).log()


def _split_shares(logits_Tv: Tensor, label_T: Tensor, absent_T: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Shares and losses of a vocabulary that is split over tp. ``absent_T``: another rank has the label."""
    peak_T = logits_Tv.amax(1).float()
    dist.all_reduce(peak_T, dist.ReduceOp.MAX, group=tp.group)
    shares_Tv = (logits_Tv - peak_T.unsqueeze(1)).exp_()
    sums_2T = torch.stack([shares_Tv.sum(1), (label_T - peak_T).masked_fill(absent_T, 0.0)])
    dist.all_reduce(sums_2T, group=tp.group)
    shares_Tv /= sums_2T[0].unsqueeze(1)
    return shares_Tv, sums_2T[0].log() - sums_2T[1]
