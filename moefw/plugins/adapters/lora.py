"""``lora``: low-rank adapters of attention, MLPs and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, field, frozen
from attrs.validators import and_, ge, lt

import moefw
from moefw.core.plugin import AdapterPlugin
from moefw.core.records import AdaptedWeight
from moefw.core.site import Site
from moefw.models.huggingface.adapter_config import AdapterConfig
from moefw.plugins.adapters.options import LowRankOptions

if TYPE_CHECKING:
    from moefw.core.contracts import Adapter, StackedAdapter

ROW_MULTIPLE = 8
"""Values of 16 bits in 16 bytes, on which low rows begin in grouped products."""


@frozen(kw_only=True)
class Lora(LowRankOptions):
    """Trains ``y = x W^T + scale (x A^T) B^T`` beside each frozen weight W (LoRA, arXiv 2106.09685).

    A ``(rank, inputs)`` and B ``(outputs, rank)`` are fp32, B is zero at first, and both are multiplied in the dtype of
    activations. Each expert has one A and B for gate and up together, and one for down, each of ``rank``.
    """

    name: ClassVar[str] = "lora"
    usual_targets: ClassVar[tuple[str, ...]] = ("attention.*", "moe.experts.*")

    dropout: float = field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Probability with which an input of A is 0 in training; not of experts' adapters. PEFT: ``lora_dropout``."""

    def peft_config(self, base: str | None) -> AdapterConfig:
        """Configuration of PEFT."""
        return evolve(super().peft_config(base), dropout=self.dropout)

    @property
    def draws(self) -> bool:
        """Whether there is dropout."""
        return self.dropout > 0

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the needs: parts that ask for the adapters of the targets; with dropout, keys of rows."""
        yield from super().needs(site)
        if self.draws:
            reason = "what it draws for a row must not depend on where the row is"
            yield moefw.need("row_keys", True, reason=reason, option="dropout")

    def check(self, site: Site) -> Iterator[moefw.Problem]:
        """Yield a problem for a rank that grouped products of experts cannot have, or if there are no targets."""
        yield from super().check(site)
        adapts_experts = any(self.adapts(f"moe.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        if adapts_experts and self.rank % ROW_MULTIPLE:
            what = f"rank {self.rank}: grouped products of experts want a rank that is a multiple of {ROW_MULTIPLE}."
            yield moefw.Problem(what, "Round it up, or name targets without experts.", "rank")

    def build(self, context: moefw.BuildContext, weight: AdaptedWeight) -> Adapter:
        """Adapter of one matrix."""
        from moefw.runtime.adapters import Dropout, LowRank

        recipe = context.fallback.at(weight.name)
        # No dropout for experts: PEFT has none for parameters that hold a stack.
        drops = self.draws and weight.experts is None
        dropout = Dropout(rate=self.dropout, place=f"layers.{context.site.layer}.{weight.name}") if drops else None
        return LowRank(weight, rank=self.rank, scale=self.scale, precision=recipe, dropout=dropout)

    def build_stacked(self, context: moefw.BuildContext, weight: AdaptedWeight) -> StackedAdapter:
        """Adapters of the matrices of all experts of ``weight``."""
        from moefw.runtime.adapters import LowRankStack

        recipe = context.fallback.at(weight.name)
        return LowRankStack(weight, rank=self.rank, scale=self.scale, precision=recipe)


@moefw.hookimpl
def moefw_adapters() -> list[type[AdapterPlugin]]:
    """Declare the adapters."""
    return [Lora]
