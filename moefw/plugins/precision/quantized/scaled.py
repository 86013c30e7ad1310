"""A recipe whose operands stay codes and scales, which torch and the kernels multiply as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.contracts import Pass, Role, Rows
from moefw.plugins.precision.quantized.encoders import summed_axis
from moefw.plugins.precision.quantized.recipe import QuantizedRecipe
from moefw.plugins.precision.quantized.scaled_mm import blockwise_mm
from moefw_kernels.grouped_gemm import BLOCK, blockwise_grouped_mm
from moefw_kernels.quantize import Quantized


@final
@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """An operand of ``shape`` as codes in whole blocks, what is beyond the shape being zero.

    ``dtype``: that of products, which are summed in fp32.
    """

    codes: Quantized
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def mT(self) -> Scaled:
        """The transpose of each matrix, without a copy."""
        return Scaled(self.codes.mT, (*self.shape[:-2], self.shape[-1], self.shape[-2]), self.dtype)

    def __matmul__(self, other: Scaled) -> Tensor:
        """Return the product of two matrices."""
        return _cut(blockwise_mm(self.codes, other.codes, self.dtype), self, other)

    def grouped_mm(self, other: Scaled, ends_e: Tensor) -> Tensor:
        """Return the product group by group, as ``torch.nn.functional.grouped_mm`` defines it."""
        return _cut(blockwise_grouped_mm(self.codes, other.codes, ends_e, out_dtype=self.dtype), self, other)


@final
class ScaledRecipe(QuantizedRecipe):
    """Products are bf16 in fprop and dgrad, fp32 in wgrad. Sizes that are no multiples of 128 are filled up with zeros.

    The rows of groups are not: dispatchers align them.
    """

    def encode(self, x: Tensor, role: Role, during: Pass, rows: Rows) -> Quantized:
        """Return codes and scales, laid along the axis that is summed over."""
        more_rows = 0 if rows.ends_e is not None else -x.shape[-2] % BLOCK
        more_columns = -x.shape[-1] % BLOCK
        if more_rows or more_columns:
            x = F.pad(x, (0, more_columns, 0, more_rows))
        encoded, axis = self.encoder.encode(x, role, during, rows), summed_axis(role, during)
        return encoded if encoded.axis == axis else encoded.along(axis)

    def operand_of(self, x: Tensor, during: Pass) -> Callable[[Quantized], Scaled]:
        """Return what names shape and dtype."""
        return partial(Scaled, shape=tuple(x.shape), dtype=torch.float32 if during == "wgrad" else torch.bfloat16)


def _cut(product: Tensor, a: Scaled, b: Scaled) -> Tensor:
    return product[..., : a.shape[-2], : b.shape[-1]].contiguous()
