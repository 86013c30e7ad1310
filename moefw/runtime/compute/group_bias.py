"""A bias for each group of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefw.core.records import Shard
from moefw.runtime.compute.grouped_mm import grouped_mm

COLUMNS = 8
"""Columns of a product that sums rows: as few as grouped products take in bf16."""


def add_group_bias(x_RC: Tensor, bias_eC: Tensor, ends_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """``x + w * b`` in the dtype of ``x``, with b of the row's group, and w = 1 without ``weights_R`` (fp32).

    ``ends_e``: the ends of the groups, int32. Rows behind the last group are undefined.
    """
    out_RC: Tensor = _AddGroupBias.apply(x_RC, bias_eC, ends_e, weights_R)  # type: ignore[no-untyped-call]
    return out_RC


class _AddGroupBias(torch.autograd.Function):
    """Saves the biases only for the gradient of weights, in three dimensions: two would look like rows to a stash."""

    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, bias_eC: Tensor, ends_e: Tensor, weights_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(ends_e, weights_R, None if weights_R is None else bias_eC.unsqueeze(0))
        ctx.bias_dtype = bias_eC.dtype
        added_RC = bias_eC.to(x_RC.dtype)[_groups(ends_e, len(x_RC))]
        if weights_R is not None:
            added_RC.mul_(weights_R.unsqueeze(1).to(x_RC.dtype))
        return x_RC + added_RC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RC: Tensor) -> tuple[Tensor | None, ...]:
        ends_e, weights_R, bias = ctx.saved_tensors
        grad_bias = group_sums(grad_RC, ends_e, weights_R).to(ctx.bias_dtype)
        if weights_R is None:
            return grad_RC, grad_bias, None, None
        added_RC = bias.squeeze(0)[_groups(ends_e, len(grad_RC))]
        return grad_RC, grad_bias, None, torch.linalg.vecdot(grad_RC.float(), added_RC.float())


def group_sums(x_RC: Tensor, ends_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """Sums of the rows of each group, each times its weight if there are weights: ``(e, C)`` in the dtype of ``x``.

    It is a grouped product with a column of ones, or of the rows' weights. ``ends_e``: the ends of the groups, int32.
    """
    factors_R = x_RC.new_ones(len(x_RC)) if weights_R is None else weights_R.to(x_RC.dtype)
    columns = factors_R.unsqueeze(1).repeat(1, COLUMNS)
    return grouped_mm(x_RC.contiguous().mT, columns, ends_e)[..., 0]


def _groups(ends_e: Tensor, rows: int) -> Tensor:
    """Group of each row, ``(R)``; the last one for rows behind it."""
    rows_R = torch.arange(rows, dtype=ends_e.dtype, device=ends_e.device)
    return torch.searchsorted(ends_e, rows_R, right=True).clamp_(max=len(ends_e) - 1)


def widened(part: Tensor, shard: Shard | None) -> Tensor:
    """Bias (..., D) that is zero outside this rank's part (..., d): a sum over ranks contains it once."""
    if shard is None:
        return part
    zeros_before = shard.index * part.shape[-1]
    zeros_behind = (shard.count - 1 - shard.index) * part.shape[-1]
    return F.pad(part, (zeros_before, zeros_behind))
