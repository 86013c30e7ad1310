"""Operands of rows in the first pass that reads them, and in wgrad: of inputs in fprop, of gradients in dgrad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moefw.core.contracts import Precision
from moefw.core.records import Role, RowGroups, SavedOperand
from moefw.runtime.memory.dropped import output_of


def both_ways(x: Tensor, role: Role, precision: Precision, rows: RowGroups) -> tuple[Any, SavedOperand] | None:
    """Return the operand of the first pass, and the saved one of wgrad, if the recipe makes both in one read of ``x``.

    Such a recipe has a method ``both_ways(x, role, rows)``, which returns None where it reads ``x`` for each. What
    it makes equals that of ``Precision.quantize``, bit for bit, but is not differentiable.
    """
    make = getattr(precision, "both_ways", None)
    return None if make is None else make(x, role, rows)


def input_operands(x: Tensor, precision: Precision, rows: RowGroups) -> tuple[Any, SavedOperand]:
    """Return the operand of fprop, and the saved operand for wgrad: ``x`` itself if it will be recomputed."""
    recomputed = output_of(x) is not None
    if not recomputed and (made := both_ways(x, "input", precision, rows)) is not None:
        return made
    operand = precision.quantize(x, role="input", during="fprop", rows=rows)
    if not recomputed:
        return operand, precision.keep(x, operand, role="input", during="wgrad", rows=rows)
    about = {name: tensor for name, tensor in (("ends_e", rows.ends_e), ("keys_R", rows.keys_R)) if tensor is not None}
    again = partial(_quantize_again, precision, tuple(about), rows.sizes)
    return operand, SavedOperand((x, *about.values()), again)


def grad_operands(
    grad: Tensor, precision: Precision, rows: RowGroups, *, trains: bool
) -> tuple[Any, Callable[[], Any]]:
    """Return the operand of dgrad, and a function that returns that of wgrad. ``trains``: whether wgrad needs it."""
    if trains and (made := both_ways(grad, "grad", precision, rows)) is not None:
        operand, kept = made
        return operand, lambda: kept.operand(kept.tensors)
    operand = precision.quantize(grad, role="grad", during="dgrad", rows=rows)
    return operand, lambda: precision.quantize(grad, role="grad", during="wgrad", rows=rows)


def _quantize_again(
    precision: Precision, about: Sequence[str], sizes: tuple[int, ...] | None, saved: Sequence[Tensor]
) -> Any:
    x, *others = saved
    rows = RowGroups(**dict(zip(about, others, strict=True)), sizes=sizes)
    return precision.quantize(x, role="input", during="wgrad", rows=rows)
