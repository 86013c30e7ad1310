"""Operands of rows, which two passes read: of inputs, fprop and wgrad; of gradients, dgrad and wgrad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moefw.core.contracts import Precision
from moefw.core.records import Role, RowGroups, SavedOperand
from moefw.runtime.memory.dropped import output_of


def both_ways(x: Tensor, role: Role, precision: Precision, rows: RowGroups) -> tuple[Any, SavedOperand] | None:
    """Operand of the first pass, and the saved one of wgrad, if the recipe makes both in one read of ``x``.

    Such a recipe has a method ``both_ways(x, role, rows)``, which returns None where it reads ``x`` for each. What
    it makes equals that of ``Precision.quantize``, bit for bit, but is not differentiable.
    """
    make = getattr(precision, "both_ways", None)
    return None if make is None else make(x, role, rows)


def input_operands(x: Tensor, precision: Precision, rows: RowGroups, *, trains: bool) -> tuple[Any, SavedOperand]:
    """Operand of fprop, and the saved operand for wgrad: ``x`` itself if it will be recomputed.

    ``trains``: whether there is a wgrad. A frozen weight has none, and nothing is saved.
    """
    if not trains:
        return precision.quantize(x, role="input", during="fprop", rows=rows), SavedOperand((), lambda _: None)
    if output_of(x) is None:
        operands = both_ways(x, "input", precision, rows)
        if operands is not None:
            return operands
        operand = precision.quantize(x, role="input", during="fprop", rows=rows)
        return operand, precision.keep(x, operand, role="input", during="wgrad", rows=rows)
    # A policy drops ``x`` and computes it again. Codes of it would stay, so they are made again, too.
    operand = precision.quantize(x, role="input", during="fprop", rows=rows)
    fields = {"ends_e": rows.ends_e, "keys_R": rows.keys_R}
    row_tensors = {name: tensor for name, tensor in fields.items() if tensor is not None}
    quantize_again = partial(_quantize_again, precision, tuple(row_tensors), rows.sizes)
    return operand, SavedOperand((x, *row_tensors.values()), quantize_again)


def grad_operands(
    grad: Tensor, precision: Precision, rows: RowGroups, *, trains: bool
) -> tuple[Any, Callable[[], Any]]:
    """Operand of dgrad, and a function that returns that of wgrad. ``trains``: whether wgrad needs it."""
    operands = both_ways(grad, "grad", precision, rows) if trains else None
    if operands is not None:
        dgrad_operand, saved = operands
        return dgrad_operand, lambda: saved.operand(saved.tensors)
    operand = precision.quantize(grad, role="grad", during="dgrad", rows=rows)
    return operand, lambda: precision.quantize(grad, role="grad", during="wgrad", rows=rows)


def _quantize_again(
    precision: Precision, names: Sequence[str], sizes: tuple[int, ...] | None, saved: Sequence[Tensor]
) -> Any:
    """Operand of wgrad. ``saved``: the input, and the tensors of its row groups, by their ``names``."""
    x, *row_tensors = saved
    rows = RowGroups(**dict(zip(names, row_tensors, strict=True)), sizes=sizes)
    return precision.quantize(x, role="input", during="wgrad", rows=rows)
