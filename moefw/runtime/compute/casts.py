"""Recipes that cast operands to a dtype that torch multiplies, the same in all passes."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moefw.core.contracts import Precision
from moefw.core.records import Pass, Role, RowGroups


class _Cast(Precision):
    operand_dtype: ClassVar[torch.dtype]

    def quantize(self, x: Tensor, *, role: Role, during: Pass, rows: RowGroups | None = None) -> Tensor:
        """Return ``x`` in the operand dtype."""
        return x if x.dtype is self.operand_dtype else x.to(self.operand_dtype)


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
