"""Recipes that cast operands to a dtype that torch multiplies, the same in all passes."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moefw.core.contracts import Precision
from moefw.core.records import GemmPass, Role, RowGroups


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the call where ``x`` has the dtype: it takes PyTorch microseconds to see that."""
    return x if x.dtype is dtype else x.to(dtype)


class _Cast(Precision):
    operand_dtype: ClassVar[torch.dtype]

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> Tensor:
        """``x`` in the operand dtype."""
        return in_dtype(x, self.operand_dtype)


@final
class FP32Recipe(_Cast):
    """fp32 operands and residual stream."""

    operand_dtype: ClassVar[torch.dtype] = torch.float32
    residual_dtype: ClassVar[Any] = torch.float32


@final
class BF16Recipe(_Cast):
    """bf16 operands and residual stream."""

    operand_dtype: ClassVar[torch.dtype] = torch.bfloat16
    residual_dtype: ClassVar[Any] = torch.bfloat16
    weight_dtype: ClassVar[Any] = torch.bfloat16
