"""Weight gradients as sums over groups of rows, which QuACK adds to main gradients in place."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_quack.operators import wgrad


@final
class GradRows:
    """Gradient of rows ``(R, O)``: an operand that computes weight gradients itself.

    See :meth:`moefw.runtime.compute.weights.SharedWeight.add`. ``in_turn``: gate and up take turns in its columns.
    """

    def __init__(self, rows_RO: Tensor, *, in_turn: bool) -> None:
        self.rows_RO = rows_RO
        self.in_turn = in_turn

    @property
    def mT(self) -> GradRows:
        """This operand, whose only product sums over rows."""
        return self

    def grouped_mm(self, x_RI: Tensor, ends_e: Tensor) -> Tensor:
        """Gradient ``(e, O, I)`` of a weight, in fp32."""
        shape = len(ends_e), self.rows_RO.shape[1], x_RI.shape[1]
        gradient_eOI = x_RI.new_empty(shape, dtype=torch.float32)
        self.add_wgrad(gradient_eOI, x_RI, ends_e, fresh=True)
        return gradient_eOI

    def add_wgrad(self, main_eOI: Tensor, x_RI: Tensor, ends_e: Tensor, *, fresh: bool) -> None:
        """Add the gradient to ``main``, or write it if ``fresh``."""
        wgrad(main_eOI, self.rows_RO, x_RI, F.pad(ends_e, (1, 0)), in_turn=self.in_turn, fresh=fresh)
