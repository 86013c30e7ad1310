"""Operands with one row, or column, that is much larger than all others, and errors relative to each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from moefw.core.records import GemmPass, Role

OUTLIER: Final = 2.0**20
"""More than the range of every 8-bit format: a scale that rows share rounds all others to zero."""

ROWS: Final[Mapping[tuple[Role, GemmPass], int]] = {
    ("input", "fprop"): -2,
    ("weight", "fprop"): -2,
    ("grad", "dgrad"): -2,
    ("weight", "dgrad"): -1,
}
"""The axis over which a product does not sum, by operand: that of its rows (-2) or of its columns (-1)."""


def with_outlier(x: Tensor, axis: int) -> Tensor:
    """``x`` divided by ``OUTLIER``, except in its third row (``axis`` -2) or column (-1)."""
    largest = x.narrow(axis, 2, 1).clone()
    x = x / OUTLIER
    x.narrow(axis, 2, 1).copy_(largest)
    return x


def error_by_row(got: Tensor, expected: Tensor, axis: int) -> float:
    """Largest error of a row (``axis`` -2) or column (-1), as a share of the largest right value in it."""
    other_axis = -1 if axis == -2 else -2
    error = (got.detach().double() - expected.double()).abs().amax(other_axis)
    return (error / expected.double().abs().amax(other_axis)).max().item()
