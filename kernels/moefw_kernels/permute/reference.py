"""The sum of a token's rows, and where rows and choices lie, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gather_sum(rows_RD: Tensor, row_TK: Tensor, bags: tuple[Tensor, Tensor] | None) -> Tensor:
    """Implement ``moefw_kernels.permute.gather_sum`` for at least one row and one choice; ``bags`` is ``RowMap``'s."""
    if bags is None:
        return F.embedding_bag(row_TK, rows_RD, mode="sum")
    row_N, begin_T = bags
    return F.embedding_bag(row_N, rows_RD, begin_T, mode="sum")


def sum_of_kept(rows_RD: Tensor, row_TK: Tensor) -> Tensor:
    """Implement ``gather_sum`` where choices are dropped and the host does not read how many: choice by choice."""
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    total_TD = rows_RD.new_zeros(len(row_TK), *rows_RD.shape[1:], dtype=dtype)
    for row_T in row_TK.unbind(1):
        taken_TD = rows_RD.index_select(0, row_T.clamp_min(0)).to(dtype)
        total_TD += taken_TD.masked_fill_((row_T < 0).view(-1, *[1] * (rows_RD.dim() - 1)), 0)
    return total_TD.to(rows_RD.dtype)


def tokens_and_rows(order_N: Tensor, num_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Implement ``moefw_kernels.permute.rows.tokens_and_rows``."""
    choice_R = order_N[:num_rows]
    row_N = torch.full_like(order_N, -1)
    row_N[choice_R] = torch.arange(num_rows, dtype=torch.int32, device=order_N.device)
    return choice_R // k if k else choice_R, row_N
