"""A recipe whose operands Transformer Engine quantizes and multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw.core.contracts import Precision
from moefw.core.errors import ContractError
from moefw.core.records import GemmPass, Role, RowGroups, SavedOperand
from moefw.plugins.precision.quantized.encoders import Encoder
from moefw.plugins.precision.quantized.recipe import Activations, LowPrecisionRecipe
from moefw.plugins.precision.quantized.te.library import Library
from moefw.plugins.precision.quantized.te.operand import Form, TEOperand, only
from moefw.plugins.precision.quantized.te.quantizers import Quantizers, Usage


@final
class TERecipe(LowPrecisionRecipe):
    """Products are bf16 in fprop and dgrad, fp32 in wgrad. Sizes are padded with zeros; dispatchers align groups.

    ``encoder`` quantizes rows on the wire and saved activations, and holds delayed scales.
    """

    def __init__(
        self,
        te: Library,
        quantizers: Quantizers,
        encoder: Encoder,
        *,
        activations: Activations,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(encoder, activations=activations, weight_dtype=weight_dtype)
        self._te = te
        self._quantizers = quantizers.at(encoder)

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Recipe with the encoder of ``name``."""
        encoder = self.encoder.at(name, groups=groups)
        return TERecipe(
            self._te,
            self._quantizers,
            encoder,
            activations=self._activations,
            weight_dtype=self.weight_dtype,
        )

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> TEOperand:
        """Operand. Raises ContractError where rows are in groups whose sizes the host does not know."""
        return self._operands(x, role, (during,), rows)[0]

    def both_ways(self, x: Tensor, role: Role, rows: RowGroups) -> tuple[TEOperand, SavedOperand]:
        """Operand of the first pass, and the codes for wgrad. The quantizers make both in one call."""
        first_pass: GemmPass = "fprop" if role == "input" else "dgrad"
        first, second = self._operands(x, role, (first_pass, "wgrad"), rows)
        return first, second.kept()

    def weight_operands(self, weight: Tensor, passes: Sequence[GemmPass]) -> Mapping[GemmPass, Callable[[], TEOperand]]:
        """Functions that hold codes and scales, made in one call."""
        operands = self._operands(weight, "weight", passes, None)
        return {during: _returns(operand) for during, operand in zip(passes, operands, strict=True)}

    def _operands(self, x: Tensor, role: Role, passes: Sequence[GemmPass], rows: RowGroups | None) -> list[TEOperand]:
        """Operand of each pass, with only the codes that it multiplies."""
        sizes = _sizes(rows)
        quantizers = self._quantizers
        usages = [Usage.of(role, during, alone=quantizers.columns_alone) for during in passes]
        all_codes = Usage(
            rowwise=any(usage.rowwise for usage in usages),
            columnwise=any(usage.columnwise for usage in usages),
        )
        forms = [
            Form(
                te=self._te,
                shape=tuple(x.shape),
                multiple=quantizers.multiple,
                sizes=sizes,
                dtype=torch.float32 if during == "wgrad" else torch.bfloat16,
                splits_sums=quantizers.splits_sums or during != "fprop",
            )
            for during in passes
        ]
        more_rows = 0 if sizes is not None else forms[0].filled[0] - x.shape[-2]
        more_columns = forms[0].filled[1] - x.shape[-1]
        values = self.weight_values(x.detach()) if role == "weight" else x.detach()
        x = quantizers.takes(values, role)
        if more_rows or more_columns:
            x = F.pad(x, (0, more_columns, 0, more_rows))
        matrices = self._matrices(x.contiguous(), role, all_codes, sizes)
        if not (all_codes.rowwise and all_codes.columnwise):
            return [TEOperand(matrices, form) for form in forms]
        operands = []
        for usage, form in zip(usages, forms, strict=True):
            # Codes that this pass does not multiply would be held as long as the operand.
            needed = [only(matrix, columnwise=usage.columnwise) for matrix in matrices]
            operands.append(TEOperand(needed, form))
        return operands

    def _matrices(self, x: Tensor, role: Role, usage: Usage, sizes: tuple[int, ...] | None) -> list[Any]:
        """Quantized matrices: one for each group of rows, or for each weight of a stack, or one."""
        if sizes is not None and not any(sizes):
            return []
        if sizes is not None:
            quantizers = self._quantizers.make(self._te, role, usage, len(sizes))
            return list(self._te.split_quantize(x[: sum(sizes)], list(sizes), quantizers))
        stacked = list(x) if x.ndim > 2 else [x]
        quantizers = self._quantizers.make(self._te, role, usage, len(stacked))
        return [quantizer(matrix) for quantizer, matrix in zip(quantizers, stacked, strict=True)]

    def keep(
        self, x: Tensor, used: Any, *, role: Role, during: GemmPass, rows: RowGroups | None = None
    ) -> SavedOperand:
        """Codes of an input, or a weight itself."""
        if role == "weight":
            return SavedOperand((x,), lambda saved: self.quantize(saved[0], role=role, during=during))
        return self.quantize(x, role=role, during=during, rows=rows).kept()


def _returns(operand: TEOperand) -> Callable[[], TEOperand]:
    """Function that returns the operand. A lambda in a loop would return the last one."""
    return lambda: operand


def _sizes(rows: RowGroups | None) -> tuple[int, ...] | None:
    """Sizes of groups of rows; None if there are no groups. Raises ContractError if the host lacks them."""
    if rows is None or rows.ends_e is None:
        return None
    if rows.sizes is None:
        raise ContractError(
            "backend: te quantizes rows in groups, and nobody told it their sizes on the host.",
            "Give RowGroups(ends_e, sizes=ExpertBatch.counts_host), or use backend: emulate.",
        )
    return rows.sizes
