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
from moefw.core.records import GemmPass, Role, RowGroups, SavedOperand

Asked = Counter[tuple[Role, GemmPass]]
PRODUCTS: Mapping[GemmPass, tuple[Role, Role]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad", "weight"),
    "wgrad": ("grad", "input"),
}
"""The operands of each product of a GEMM."""


class NotingRecipe(Precision):
    """fp32 with separate operands per product. ``asked`` counts their values, ``keyed`` those of rows with keys."""

    residual_dtype: ClassVar[Any] = torch.float32
    by_pass: ClassVar[bool] = True

    def __init__(self) -> None:
        self.asked: Asked = Counter()
        self.keyed: Asked = Counter()
        self.name = ""
        """Of the GEMM, as ``at`` was told it; empty for the recipe of the module."""
        self.own: Asked = Counter()
        """Values that this recipe quantizes, of all that are ``asked``."""
        self._input_widths = set[int]()
        self._grad_widths = set[int]()
        self._of_gemms: list[NotingRecipe] = []
        """Recipes that ``at`` returned; all of them have this list."""

    def clear(self) -> None:
        """Forget what was counted, and the recipes of GEMMs."""
        for counts in (self.asked, self.keyed, self.own):
            counts.clear()
        self._of_gemms.clear()

    def at(self, name: str, *, groups: int | None = None) -> Precision:
        """Recipe of a GEMM, with the same counts."""
        recipe = copy(self)
        recipe.name = "" if groups is None else name
        recipe.own = Counter()
        recipe._input_widths = set()
        recipe._grad_widths = set()
        self._of_gemms.append(recipe)
        return recipe

    def shared(self, experts: int) -> list[str]:
        """Names of the recipes that several GEMMs of so many experts use."""
        recipes = [self, *self._of_gemms]
        return sorted({recipe.name for recipe in recipes if recipe._is_shared(experts)})

    def _is_shared(self, experts: int) -> bool:
        """Whether this recipe quantizes the operands of several GEMMs."""
        if not self.own:
            return False
        if not self.name or len(self._input_widths) > 1:
            return True
        # The weights of one GEMM are experts x outputs x inputs, and its gradients have all of these outputs.
        outputs = self.own["weight", "fprop"] // (experts * max(self._input_widths, default=1))
        return outputs > sum(self._grad_widths)

    def quantize(self, x: Tensor, *, role: Role, during: GemmPass, rows: RowGroups | None = None) -> Tensor:
        """Tensor."""
        self.asked[role, during] += x.numel()
        self.own[role, during] += x.numel()
        if (role, during) == ("input", "fprop"):
            self._input_widths.add(x.shape[-1])
        if (role, during) == ("grad", "dgrad"):
            self._grad_widths.add(x.shape[-1])
        if rows is not None and rows.keys_R is not None and len(rows.keys_R) == len(x):
            self.keyed[role, during] += x.numel()
        return x.float()

    def keep(
        self, x: Tensor, used: Any, *, role: Role, during: GemmPass, rows: RowGroups | None = None
    ) -> SavedOperand:
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
        self.recipe.clear()
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
