"""The runtime part of ``sample``."""

from __future__ import annotations

from typing import Any, ClassVar, final

import moefw
import torch
from moefw.core.records import GemmPass, Role, RowGroups
from torch import Tensor


@final
class SampleRecipe(moefw.Precision):
    """fp32 in, fp32 out. A recipe of lower precision rounds here, and passes gradients straight through."""

    residual_dtype: ClassVar[Any] = torch.float32

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> Tensor:
        """Operand that replaces ``x`` in a GEMM."""
        return x.to(torch.float32)
