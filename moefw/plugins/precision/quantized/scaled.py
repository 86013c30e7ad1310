"""A recipe whose operands stay codes and scales, which torch and the kernels multiply directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw.core.records import GemmPass, Role, RowGroups
from moefw.plugins.precision.quantized.encoders import Encoder, along, summed_axis
from moefw.plugins.precision.quantized.products import Products
from moefw.plugins.precision.quantized.recipe import Activations, QuantizedRecipe
from moefw_kernels.quantize import Quantized


@final
@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """An operand of ``shape`` as codes in whole blocks. Values beyond the shape are zero.

    ``dtype``: dtype of the products, which are summed in fp32.
    """

    codes: Quantized
    shape: tuple[int, ...]
    dtype: torch.dtype
    products: Products

    @property
    def mT(self) -> Scaled:
        """The transpose of each matrix, without a copy."""
        *leading, rows, columns = self.shape
        return Scaled(self.codes.mT, (*leading, columns, rows), self.dtype, self.products)

    def __matmul__(self, other: Scaled) -> Tensor:
        """Product of two matrices."""
        if self.codes.codes.numel() and other.codes.codes.numel():
            return self._cut(self.products.mm(self.codes, other.codes, self.dtype), other)
        return self._zeros(self.shape[0], other.shape[1])

    def grouped_mm(self, other: Scaled, ends_e: Tensor) -> Tensor:
        """Product group by group, as ``torch.nn.functional.grouped_mm`` defines it."""
        if self.codes.codes.numel() and other.codes.codes.numel():
            return self._cut(self.products.grouped_mm(self.codes, other.codes, ends_e, self.dtype), other)
        sums_over_rows = len(other.shape) == 2
        groups = (len(ends_e),) if sums_over_rows else ()
        return self._zeros(*groups, self.shape[0], other.shape[-1])

    def _cut(self, product: Tensor, other: Scaled) -> Tensor:
        """Product without the rows and columns of added zeros."""
        return product[..., : self.shape[-2], : other.shape[-1]].contiguous()

    def _zeros(self, *size: int) -> Tensor:
        return self.codes.codes.new_zeros(size, dtype=self.dtype)


@final
class ScaledRecipe(QuantizedRecipe):
    """Products are bf16 in fprop and dgrad, fp32 in wgrad. Sizes are padded with zeros to multiples.

    Rows of groups are not padded: dispatchers align them.
    """

    def __init__(
        self,
        encoder: Encoder,
        products: Products,
        *,
        activations: Activations,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(encoder, activations=activations, weight_dtype=weight_dtype)
        self._products = products

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Recipe with the encoder of ``name``."""
        encoder = self.encoder.at(name, groups=groups)
        return ScaledRecipe(encoder, self._products, activations=self._activations, weight_dtype=self.weight_dtype)

    def encode(self, x: Tensor, role: Role, during: GemmPass, rows: RowGroups) -> Quantized:
        """Codes and scales, contiguous along the summed axis."""
        axis = summed_axis(role, during)
        more_rows, more_columns = self._missing(x, axis, rows)
        x = _filled(x, more_rows, more_columns)
        if more_rows and rows.keys_R is not None:
            rows = replace(rows, keys_R=F.pad(rows.keys_R, (0, more_rows)))
        return along(self.encoder.encode(x, role, during, rows), axis)

    def encode_weight(self, x: Tensor, passes: Sequence[GemmPass]) -> Sequence[Quantized]:
        """Codes and scales of a weight, contiguous along the axis that each pass sums over."""
        more_rows, more_columns = self._missing(x, -2, RowGroups())
        return self.encoder.encode_weight(_filled(x, more_rows, more_columns), passes)

    def encode_both(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[Quantized, Quantized] | None:
        """Codes and scales of rows, contiguous along the axis that each pass sums over."""
        missing = self._missing(x, -1, rows)
        if missing != self._missing(x, -2, rows):
            return None
        return self.encoder.encode_both(_filled(x, *missing), role, rows)

    def fills_up(self, x: Tensor, rows: RowGroups) -> bool:
        """Whether a size is not a multiple."""
        return self._missing(x, -1, rows) != (0, 0)

    def _missing(self, x: Tensor, axis: int, rows: RowGroups) -> tuple[int, int]:
        """How many rows and columns of zeros are added for a sum along ``axis``."""
        more_rows, more_columns = (-size % self._products.multiple for size in x.shape[-2:])
        if rows.ends_e is not None and axis == -1:
            # Rows of groups are not padded: dispatchers align them, and here nothing sums over them.
            more_rows = 0
        return more_rows, more_columns

    def operand_of(self, x: Tensor, during: GemmPass) -> Callable[[Quantized], Scaled]:
        """Function that adds shape and dtype to codes."""
        dtype = torch.float32 if during == "wgrad" else torch.bfloat16
        return partial(Scaled, shape=tuple(x.shape), dtype=dtype, products=self._products)


def _filled(x: Tensor, more_rows: int, more_columns: int) -> Tensor:
    """``x`` with rows and columns of zeros added; without any, ``x`` itself."""
    if not more_rows and not more_columns:
        return x
    return F.pad(x, (0, more_columns, 0, more_rows))
