"""A recipe that counts the values that it quantizes for each role and pass, and the GEMMs that share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

import moefw
from moefw.core.contracts import Precision
from moefw.core.plugin import PrecisionPlugin
from moefw.core.records import Pass, Role, RowGroups, SavedOperand

Asked = Counter[tuple[Role, Pass]]
PRODUCTS: Mapping[Pass, tuple[Role, Role]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad", "weight"),
    "wgrad": ("grad", "input"),
}
"""The operands of each product of a GEMM."""


class NotingRecipe(Precision):
    """fp32 with separate operands per product. ``asked`` counts their values, ``keyed`` those of rows with keys.

    ``shared`` names each recipe that several GEMMs use: one that ``at`` returned, or the recipe of the module.
    """

    residual_dtype: ClassVar[Any] = torch.float32
    by_pass: ClassVar[bool] = True

    def __init__(self) -> None:
        self.asked: Asked = Counter()
        self.keyed: Asked = Counter()
        self.shared: set[str] = set()
        self._name = ""
        """Of the GEMM, as ``at`` was told it; empty for the recipe of the module."""
        self._widths = set[int]()
        """Widths of the inputs: a recipe that sees two serves two GEMMs."""

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Recipe of a GEMM, with the same counts."""
        recipe = copy(self)
        recipe._name = "" if groups is None else name
        recipe._widths = set()
        return recipe

    def quantize(self, x: Tensor, *, role: Role, during: Pass, rows: RowGroups | None = None) -> Tensor:
        """Tensor."""
        self.asked[role, during] += x.numel()
        if (role, during) == ("input", "fprop"):
            self._widths.add(x.shape[-1])
        if not self._name or len(self._widths) > 1:
            self.shared.add(self._name)
        if rows is not None and rows.keys_R is not None and len(rows.keys_R) == len(x):
            self.keyed[role, during] += x.numel()
        return x.float()

    def keep(self, x: Tensor, used: Any, *, role: Role, during: Pass, rows: RowGroups | None = None) -> SavedOperand:
        """Save the tensor."""
        self.asked[role, during] += x.numel()
        return SavedOperand((x,), lambda saved: saved[0])


@frozen
class Noting(PrecisionPlugin):
    """Declares the recipe; all layers share one."""

    name: ClassVar[str] = "noting"
    recipe: ClassVar[NotingRecipe] = NotingRecipe()

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Operands are fp32."""
        return moefw.offers(operand=("fp32",), wire=("fp32",))

    def build(self, context: moefw.BuildContext) -> Precision:
        """Recipe with its counts cleared."""
        self.recipe.asked.clear()
        self.recipe.keyed.clear()
        self.recipe.shared.clear()
        return self.recipe


def values_of_operands(rows: int, experts: int, dim: int, expert_dim: int) -> Asked:
    """Number of values in each operand of the two GEMMs, if all experts have rows.

    The first GEMM has gate and up side by side, ``dim`` to ``2 * expert_dim``; the second is ``expert_dim`` to ``dim``.
    """
    values: Mapping[Role, int] = {
        "input": rows * (dim + expert_dim),
        "weight": experts * 3 * dim * expert_dim,
        "grad": rows * (2 * expert_dim + dim),
    }
    return Counter({(role, during): values[role] for during, roles in PRODUCTS.items() for role in roles})
