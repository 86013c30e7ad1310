"""fp32 matrices as sums of three bf16 matrices, which tensor cores multiply: fp32 products have none.

A bf16 number has 8 bits of precision and fp32 has 24, so the sum is exact, but for what is below 2**-133. Products of
two bf16 numbers are exact in fp32. Of products of parts, those below the last bit of the largest are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor

from moefw.core.contracts import Precision
from moefw.core.records import GemmPass, Role, RowGroups, SavedOperand
from moefw_kernels.devices import takes_kernels

COUNT: Final = 3
"""Parts of an fp32 matrix, and how many orders of parts a product has."""


@final
class BF16Sum:
    """A matrix as the sum of bf16 matrices, the largest first. One of bf16 is its only part."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, x: Tensor) -> BF16Sum:
        """Parts of a bf16 or fp32 matrix."""
        if x.dtype is torch.bfloat16:
            return cls([x])
        parts = [x.bfloat16()]
        while len(parts) < COUNT:
            x = x - parts[-1]
            parts.append(x.bfloat16())
        return cls(parts)

    @property
    def mT(self) -> BF16Sum:
        """The transposed matrix."""
        return BF16Sum([part.mT for part in self.parts])

    def __matmul__(self, other: BF16Sum) -> Tensor:
        """Product in fp32. One GEMM multiplies all parts, and adds up the smallest products first."""
        left = self.parts
        right = other.parts
        if len(left) == 1:  # one product with all parts side by side, and their sum
            products = fp32_mm(left[0], torch.cat([*right], 1))
            return products.view(len(products), len(right), right[0].shape[1]).sum(1)
        if len(right) == 1:
            products = fp32_mm(torch.cat([*left]), right[0])
            return products.view(len(left), len(left[0]), products.shape[1]).sum(0)
        # Part i of the left times part j of the right has order i + j. One long product adds them up along its inner
        # dimension, so the smallest products, of the highest order, come first.
        pairs = [(i, order - i) for order in reversed(range(COUNT)) for i in range(order + 1)]
        left_side_by_side = torch.cat([left[i] for i, _ in pairs], 1)
        right_stacked = torch.cat([right[j] for _, j in pairs])
        return fp32_mm(left_side_by_side, right_stacked)


@final
class BF16Parts(Precision):
    """Operands are parts. The weights' are made once a step, the others where they are used."""

    residual_dtype: ClassVar[Any] = torch.float32

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> BF16Sum:
        """Parts of ``x``."""
        return BF16Sum.of(x)

    def keep(
        self, x: Tensor, used: Any, *, role: Role, during: GemmPass, rows: RowGroups | None = None
    ) -> SavedOperand:
        """Save ``x`` itself, which has fewer bytes than its parts."""
        return SavedOperand((x,), lambda saved: BF16Sum.of(saved[0]))


RECIPE: Final = BF16Parts()


def takes_parts(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``x W^T`` in ``dtype`` is computed from parts: on a GPU, for bf16 rows and an fp32 weight."""
    has_dtypes = (x.dtype, weight.dtype, dtype) == (torch.bfloat16, torch.float32, torch.float32)
    return has_dtypes and takes_kernels(x) and not torch.compiler.is_compiling()


def fp32_mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of bf16 matrices in fp32, which PyTorch has for CUDA only."""
    return torch.mm(a, b, out_dtype=torch.float32)
