"""Permutation with gathers and no scatter: deterministic, with the same sums on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefw_kernels.devices import runs_ahead, takes_kernels
from moefw_kernels.permute import reference


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """Map between rows and tokens: the token of each row and the rows of each token. Both int32, mutually inverse.

    ``padding``, int64, lists the rows that come from no token (their ``token_R`` is 0); None: there are none; bool: a
    mask, where the host does not know how many.
    ``row_TK`` holds -1 for a dropped choice, if any is ``dropped``. ``bags``, the arguments of ``embedding_bag``, are
    then the rows of all tokens, concatenated, and the start of each token's rows; None where their number would have
    to be read from the device.
    """

    token_R: Tensor
    row_TK: Tensor
    padding: Tensor | None
    dropped: bool
    bags: tuple[Tensor, Tensor] | None

    def gather(self, x_TD: Tensor) -> Tensor:
        """Call the function ``gather``."""
        return gather(x_TD, self)

    def gather_sum(self, rows_RD: Tensor) -> Tensor:
        """Call the function ``gather_sum``."""
        return gather_sum(rows_RD, self)


def row_map(token_R: Tensor, row_TK: Tensor, *, padding: Tensor | None = None, dropped: bool = False) -> RowMap:
    """Map of ``token_R`` and ``row_TK``; ``dropped``: whether ``row_TK`` holds -1."""
    if not dropped or runs_ahead(row_TK.device):
        return RowMap(token_R, row_TK, padding, dropped, None)
    kept_TK = row_TK >= 0
    counts_T = kept_TK.sum(1, dtype=torch.int32)
    begin_T = counts_T.cumsum(0, dtype=torch.int32) - counts_T
    return RowMap(token_R, row_TK, padding, dropped, (row_TK[kept_TK], begin_T))


def tokens_and_rows(order_N: Tensor, num_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Token of each row, and the row of each choice or -1, given the choices in order of rows; all int32.

    ``order_N`` lists the choices, ``token * K + k``, those that have no row last.
    """
    if type(order_N) is not Tensor or not takes_kernels(order_N) or torch.compiler.is_compiling():
        return reference.tokens_and_rows(order_N, num_rows, k)
    from moefw_kernels.permute import triton

    return triton.tokens_and_rows(order_N, num_rows, k)


def gather(x_TD: Tensor, rows: RowMap) -> Tensor:
    """``rows_RD`` with ``rows_RD[r] = x_TD[token_R[r]]``, zero for padding. Differentiable."""
    out: Tensor = _Gather.apply(x_TD, rows)  # type: ignore[no-untyped-call]
    return out


def gather_sum(rows_RD: Tensor, rows: RowMap) -> Tensor:
    """``out_TD[t] = sum_k rows_RD[row_TK[t, k]]`` without dropped choices, in the order of k. Differentiable.

    The sum is fp32 for bf16 and fp16, and rounded once: to nearest even, but for bf16 on a CPU, where
    ``embedding_bag`` of torch may round ties away from zero.
    """
    out: Tensor = _GatherSum.apply(rows_RD, rows)  # type: ignore[no-untyped-call]
    return out


def _rows(x_TD: Tensor, rows: RowMap) -> Tensor:
    """``gather``'s result, without autograd. Rows may have any number of axes."""
    if not len(x_TD):
        return x_TD.new_zeros(len(rows.token_R), *x_TD.shape[1:])
    taken = x_TD.index_select(0, rows.token_R)
    return taken if rows.padding is None else clear(taken, rows.padding)


def clear(rows_RD: Tensor, padding: Tensor) -> Tensor:
    """Set the ``padding`` of rows of one axis or more to zero, in place, and return them."""
    if padding.dtype is torch.bool:
        return rows_RD.masked_fill_(padding.view(-1, *[1] * (rows_RD.dim() - 1)), 0)
    return rows_RD.index_fill_(0, padding, 0)


def _sums(rows_RD: Tensor, rows: RowMap) -> Tensor:
    """``gather_sum``'s result, without autograd."""
    if not rows.row_TK.numel() or not len(rows_RD):
        return rows_RD.new_zeros(len(rows.row_TK), *rows_RD.shape[1:])
    if not _takes_kernel(rows_RD):
        if rows.dropped and rows.bags is None:
            return reference.sum_of_kept(rows_RD, rows.row_TK)
        return reference.gather_sum(rows_RD, rows.row_TK, rows.bags)
    from moefw_kernels.permute import triton

    return triton.gather_sum(rows_RD, rows.row_TK)


def _takes_kernel(rows_RD: Tensor) -> bool:
    """Whether the kernel takes these rows; a compiler and a subclass need PyTorch operations."""
    if type(rows_RD) is not Tensor or not takes_kernels(rows_RD) or torch.compiler.is_compiling():
        return False
    return rows_RD.ndim == 2 and rows_RD.dtype in (torch.bfloat16, torch.float16, torch.float32)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return _rows(x_TD, rows)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _sums(grad_RD.contiguous(), ctx.rows), None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return _sums(rows_RD, rows)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return _rows(grad_TD, ctx.rows), None
