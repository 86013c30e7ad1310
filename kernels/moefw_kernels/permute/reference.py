"""The sum of a token's rows in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gather_sum(rows_RD: Tensor, row_TK: Tensor, bags: tuple[Tensor, Tensor] | None) -> Tensor:
    """Implement ``moefw_kernels.permute.gather_sum`` for at least one row and one choice; ``bags`` is ``RowMap``'s."""
    if bags is None:
        return F.embedding_bag(row_TK, rows_RD, mode="sum")
    row_N, begin_T = bags
    return F.embedding_bag(row_N, rows_RD, begin_T, mode="sum")
