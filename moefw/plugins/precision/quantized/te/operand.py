"""Operand that Transformer Engine quantizes and multiplies.

Its GEMMs return ``B A^T`` for layout TN, ``B A`` for NN and ``B^T A`` for NT: the products of fprop, dgrad and wgrad,
where ``A`` is the right operand here. A letter says whether its operand is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from moefw.core.errors import ContractError
from moefw.core.records import SavedOperand
from moefw.plugins.precision.quantized.te.library import Library


@final
@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Metadata of an operand.

    Zeros pad ``shape`` to multiples of ``multiple``. ``sizes``: sizes of its groups of rows, which are not padded;
    None: it has none. Products are of ``dtype``; ``splits_sums``: partial sums are added in fp32.
    """

    te: Library
    shape: tuple[int, ...]
    multiple: int
    sizes: tuple[int, ...] | None
    dtype: torch.dtype
    splits_sums: bool
    turned: bool = False

    @property
    def filled(self) -> tuple[int, int]:
        """The padded sizes of a matrix."""
        rows, columns = (size + -size % self.multiple for size in self.shape[-2:])
        return rows, columns

    @property
    def letter(self) -> str:
        """The letter of the operand in a GEMM layout."""
        return "T" if self.turned else "N"


@final
@dataclass(frozen=True, slots=True, eq=False)
class TEOperand:
    """``matrices``: a matrix, or one for each group of rows or stacked weight, in Transformer Engine's storage."""

    matrices: Sequence[Any]
    form: Form

    @property
    def mT(self) -> TEOperand:
        """The transpose of each matrix, without a copy."""
        *leading, rows, columns = self.form.shape
        turned = replace(self.form, shape=(*leading, columns, rows), turned=not self.form.turned)
        return TEOperand(self.matrices, turned)

    def __matmul__(self, other: TEOperand) -> Tensor:
        """Product of two matrices. Raises ContractError where rows are in groups."""
        form = self.form
        if form.sizes is not None:
            raise ContractError(
                "rows in groups have scales of their own, and are multiplied as one matrix.",
                "Multiply them with moefw.runtime.compute.product.grouped_mm.",
            )
        (left,) = self.matrices
        (right,) = other.matrices
        product: Tensor = form.te.gemm(
            right,
            left,
            out_dtype=form.dtype,
            layout=other.form.letter + form.letter,
            use_split_accumulator=form.splits_sums,
        )[0]
        # Without the padding of both operands.
        return product[: form.shape[-2], : other.form.shape[-1]].contiguous()

    def grouped_mm(self, other: TEOperand, ends_e: Tensor) -> Tensor:
        """Product group by group, as ``torch.nn.functional.grouped_mm`` defines it.

        Rows outside all groups are zero. Without any rows the library is not called, because its products may hang.
        """
        form = self.form
        assert form.sizes is not None
        # Turned, rows are summed over: a matrix for each group. Otherwise rows of all groups, which are not padded.
        sums_over_rows = form.turned
        rows = form.shape[-2]
        columns = other.form.shape[-1]
        leading = (len(form.sizes),) if sums_over_rows else ()
        if not any(form.sizes):
            return torch.zeros(*leading, rows, columns, dtype=form.dtype, device=ends_e.device)
        height = form.filled[0] if sums_over_rows else rows
        width = other.form.filled[1]
        out = torch.empty(*leading, height, width, dtype=form.dtype, device=ends_e.device)
        if not sums_over_rows:
            out[sum(form.sizes) :].zero_()
        form.te.grouped_gemm(
            list(other.matrices),
            list(self.matrices),
            list(out) if sums_over_rows else [out],
            [None] * len(form.sizes),
            form.dtype,
            layout=other.form.letter + form.letter,
            m_splits=list(form.sizes),
            single_output=not sums_over_rows,
            use_split_accumulator=form.splits_sums,
        )
        return out[..., :rows, :columns].contiguous()

    def kept(self) -> SavedOperand:
        """Tensors to save. The function that makes the operand again keeps no reference to codes."""
        storages: list[tuple[type, list[str], dict[str, Any]]] = []
        to_save: list[Tensor] = []
        for matrix in self.matrices:
            storage, names, others, tensors = _taken_apart(matrix)
            storages.append((storage, names, others))
            to_save += tensors
        form = self.form

        def operand(saved: Sequence[Tensor]) -> TEOperand:
            tensors = iter(saved)
            matrices = [
                storage(**others, **{name: next(tensors) for name in names}) for storage, names, others in storages
            ]
            return TEOperand(matrices, form)

        return SavedOperand(tuple(to_save), operand)


def only(matrix: Any, *, columnwise: bool) -> Any:
    """Storage without the codes that are scaled along rows, or without those along columns."""
    own = type(matrix)(**matrix.get_metadata())
    own.update_usage(rowwise_usage=not columnwise, columnwise_usage=columnwise)
    return own


def _taken_apart(matrix: Any) -> tuple[type, list[str], dict[str, Any], list[Tensor]]:
    """Class of a storage, the names of its tensor fields, the other fields, and the tensors."""
    fields: dict[str, Any] = matrix.get_metadata()
    names = [name for name, value in fields.items() if isinstance(value, Tensor)]
    others = {name: value for name, value in fields.items() if name not in names}
    return type(matrix), names, others, [fields[name] for name in names]
