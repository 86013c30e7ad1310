"""Products with the low-rank adapters of a stack of weights: ``scale (x A^T) B^T`` for each group of rows.

Neither a tensor of a weight's size nor one of the rows' width is made for backward: it needs the rows ``x``, which a
GEMM may compute again, and the low rows ``scale x A^T`` (R, rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor

from moefw.core.contracts import StackedAdapter
from moefw.core.records import RowGroups, SavedOperand
from moefw.runtime.compute.casts import in_dtype
from moefw.runtime.compute.grouped_mm import grouped_mm
from moefw.runtime.compute.row_operands import grad_operands, input_operands
from moefw.runtime.compute.weights import WeightUse


@final
class LowRankUse:
    """Adapters of a stack of weights in one forward of their products, and its backward."""

    __slots__ = ("_a", "_b", "_precision", "_scale")

    def __init__(self, adapter: StackedAdapter, a_erI: Tensor, b_eOr: Tensor) -> None:
        self._scale = adapter.scale
        self._precision = adapter.precision
        self._a = WeightUse(a_erI)
        self._b = WeightUse(b_eOr)

    def product(
        self, x_RI: Tensor, rows: RowGroups, a_erI: Tensor, b_eOr: Tensor, *, saves_x: bool
    ) -> tuple[Tensor, Sequence[SavedOperand]]:
        """``scale (x A^T) B^T`` (R, O) in the dtype of ``x``, and the saved operands of x, A, B and the low rows.

        ``saves_x``: whether x is saved for the gradient of A. If not, backward computes it again.
        """
        precision = self._precision
        assert rows.ends_e is not None, "a stack multiplies groups of rows"
        a, kept_a = self._a.operands(a_erI, precision)
        b, kept_b = self._b.operands(b_eOr, precision)
        x, kept_x = input_operands(x_RI, precision, rows, trains=saves_x)
        low_Rr = in_dtype(grouped_mm(x, a.mT, rows.ends_e), x_RI.dtype) * self._scale
        low, kept_low = input_operands(low_Rr, precision, rows, trains=True)
        return in_dtype(grouped_mm(low, b.mT, rows.ends_e), x_RI.dtype), (kept_x, kept_a, kept_b, kept_low)

    def input_gradient(
        self, grad_RO: Tensor, saved: Sequence[Any], rows: RowGroups
    ) -> tuple[Tensor, Callable[..., tuple[Tensor | None, Tensor | None]]]:
        """Gradient of ``x``, and a function that returns those of A and B for autograd, as :meth:`_factor_gradients`.

        ``saved``: the operands of A, B and the low rows that :meth:`product` saved.
        """
        a, b, low = saved
        ends_e = rows.ends_e
        assert ends_e is not None
        grad, grad_of_wgrad = grad_operands(grad_RO, self._precision, rows, trains=True)
        grad_low_Rr = in_dtype(grouped_mm(grad, b, ends_e), grad_RO.dtype) * self._scale
        grad_low, grad_low_of_wgrad = grad_operands(grad_low_Rr, self._precision, rows, trains=True)
        grad_x_RI = in_dtype(grouped_mm(grad_low, a, ends_e), grad_RO.dtype)
        return grad_x_RI, partial(self._factor_gradients, low, grad_of_wgrad, grad_low_of_wgrad, ends_e)

    def _factor_gradients(
        self,
        low: Any,
        grad_of_wgrad: Callable[[], Any],
        grad_low_of_wgrad: Callable[[], Any],
        ends_e: Tensor,
        ctx: Any,
        places: tuple[int, int],
        x_of_wgrad: Callable[[], Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of A and B for autograd; None: see :meth:`WeightUse.gradient`.

        ``places``: the positions of A and B among the tensors that the Function ``ctx`` was given. ``x_of_wgrad``
        returns the operand of ``x``.
        """
        grad_a = self._a.gradient(ctx, places[0], lambda: (grad_low_of_wgrad(), x_of_wgrad()), ends_e)
        grad_b = self._b.gradient(ctx, places[1], lambda: (grad_of_wgrad(), low), ends_e)
        return grad_a, grad_b

    def x_of_wgrad(self, x_RI: Tensor, rows: RowGroups) -> Any:
        """Operand of an ``x`` that was computed again, for the gradient of A."""
        return self._precision.quantize(x_RI, role="input", during="wgrad", rows=rows)
