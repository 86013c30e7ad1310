"""The head: logits of the vocabulary, or the loss of tokens without holding all of their logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefw.core.contracts import Named, Precision
from moefw.core.records import Canonical
from moefw.models.embedding import IGNORED
from moefw.runtime.accounting import done_again
from moefw.runtime.communication.gather import all_gather
from moefw.runtime.compute.product import linear
from moefw.runtime.compute.weights import WeightUse
from moefw.runtime.parallel.tensor_parallel import TensorParallel


@final
class Head(nn.Module, Named):
    """Weight ``(vocabulary / tp, D)``, fp32, operands from the precision recipe."""

    def __init__(self, vocab_size: int, dim: int, precision: Precision, tp: TensorParallel) -> None:
        super().__init__()
        self.precision = precision
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(vocab_size // tp.size, dim))

    def forward(self, x_TD: Tensor, labels_NT: Tensor | None = None, chunk: int = 0) -> Tensor:
        """Logits ``(T, v)``, or with labels, :func:`losses` ``(N, t)``."""
        if labels_NT is None:
            return linear(x_TD, self.weight, self.precision)
        return losses(x_TD, self.weight, labels_NT, precision=self.precision, tp=self.tp, chunk=chunk)

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (vocabulary, D)."""
        yield Canonical("weight", self.weight, shard=self.tp.shard(0), role="head")


def losses(
    x_MD: Tensor, weight_vD: Tensor, labels_NT: Tensor, *, precision: Precision, tp: TensorParallel, chunk: int
) -> Tensor:
    """Cross entropy ``(N, t)``, fp32, of this rank's part of the tokens; 0 where the label is -100.

    At most ``chunk`` of the M = N T rows have logits at a time, in fp32; backward computes them again. ``x_MD`` and
    ``labels_NT`` are of all tokens, ``weight_vD`` is this rank's part of the vocabulary. ``precision`` must not be
    ``by_pass``.
    """
    x_MD = precision.quantize(x_MD, role="input", during="fprop")
    loss_Nt: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        x_MD, weight_vD, labels_NT, precision, tp, chunk
    )
    return loss_Nt


class _Losses(torch.autograd.Function):
    """``log sum exp(z) - z_label`` with ``z = x W^T``, of all ranks of tp; saves x and the logarithms."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        weight_vD: Tensor,
        labels_NT: Tensor,
        precision: Precision,
        tp: TensorParallel,
        chunk: int,
    ) -> Tensor:
        ctx.weight = WeightUse(weight_vD)
        operand_vD, saved_weight = ctx.weight.operands(weight_vD, precision)
        own_M = labels_NT.flatten() - tp.index * len(weight_vD)
        absent_M = (own_M < 0) | (own_M >= len(weight_vD))
        own_M = own_M.masked_fill(absent_M, 0)
        log_sums_M, label_M = x_MD.new_empty(2, len(x_MD), dtype=torch.float32)
        for rows in _chunks(len(x_MD), chunk):
            z_cv = (x_MD[rows] @ operand_vD.mT).float()
            log_sums_M[rows] = z_cv.logsumexp(1)
            label_M[rows] = z_cv.gather(1, own_M[rows].unsqueeze(1)).squeeze(1)
        if tp.group is not None:
            log_sums_M, label_M = _of_all_parts(log_sums_M, label_M.masked_fill(absent_M, 0.0), tp)
        ignored_NT = labels_NT == IGNORED
        ctx.save_for_backward(x_MD, own_M, absent_M, ignored_NT, log_sums_M, *saved_weight.tensors)
        ctx.make_weight_operand = saved_weight.operand
        ctx.tp = tp
        ctx.chunk = chunk
        loss_NT = (log_sums_M - label_M).view_as(labels_NT).masked_fill(ignored_NT, 0.0)
        part = tp.shard(1)
        return loss_NT if part is None else part.of(loss_NT).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Nt: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, own_M, absent_M, ignored_NT, log_sums_M, *weight_tensors = ctx.saved_tensors
        operand_vD = ctx.make_weight_operand(weight_tensors)
        grad_x_MD = torch.empty_like(x_MD)
        grad_weight = None
        grad_M = _of_all_tokens(grad_Nt, ctx.tp).masked_fill(ignored_NT, 0.0).flatten()
        minus_M = -grad_M.masked_fill(absent_M, 0.0)
        for rows in _chunks(len(x_MD), ctx.chunk):
            # The gradient of logits is softmax(z), less 1 at the label, each times the gradient of the row's loss.
            with done_again():
                z_cv = x_MD[rows] @ operand_vD.mT
            grad_cv = z_cv.float().sub_(log_sums_M[rows].unsqueeze(1)).exp_()
            del z_cv
            grad_cv.mul_(grad_M[rows].unsqueeze(1))
            grad_cv.scatter_add_(1, own_M[rows].unsqueeze(1), minus_M[rows].unsqueeze(1))
            wgrad_operands = (grad_cv.to(x_MD.dtype), x_MD[rows])
            del grad_cv  # fp32: before the products, which need memory of their own
            torch.mm(wgrad_operands[0], operand_vD, out=grad_x_MD[rows])
            # Bound now, not by a closure: weight gradients may be computed after the loop, in a pass of their own.
            grad_of_chunk = ctx.weight.gradient(ctx, 1, partial(tuple, wgrad_operands))
            grad_weight = grad_of_chunk if grad_weight is None else grad_weight.add_(grad_of_chunk)
        return grad_x_MD, grad_weight, None, None, None, None


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(first, first + chunk) for first in range(0, tokens, chunk))


def _of_all_parts(log_sums_M: Tensor, label_M: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Logarithms of the sums over the whole vocabulary, and the logits of the labels."""
    peak_M = log_sums_M.clone()
    dist.all_reduce(peak_M, dist.ReduceOp.MAX, group=tp.group)
    sums_2M = torch.stack([(log_sums_M - peak_M).exp_(), label_M])
    dist.all_reduce(sums_2M, group=tp.group)
    return sums_2M[0].log() + peak_M, sums_2M[1]


def _of_all_tokens(grad_Nt: Tensor, tp: TensorParallel) -> Tensor:
    """Gradients of all tokens, ``(N, T)``, given those of each rank's part."""
    if tp.group is None:
        return grad_Nt
    by_rank = grad_Nt.new_empty(tp.size, *grad_Nt.shape)
    all_gather(by_rank.flatten(0, 1), grad_Nt.contiguous(), group=tp.group)
    return by_rank.transpose(0, 1).flatten(1)
