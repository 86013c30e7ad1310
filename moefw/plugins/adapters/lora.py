"""``lora``: low-rank adapters of attention, MLPs and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import and_, ge, gt, lt

import moefw
from moefw.core.plugin import AdapterPlugin
from moefw.core.records import AdaptedWeight
from moefw.core.site import Site

if TYPE_CHECKING:
    from moefw.core.contracts import Adapter, StackedAdapter

USUAL = ("attention.*", "moe.experts.*")
"""What every model has whose weights get adapters if ``targets`` names none."""
ROW_MULTIPLE = 8
"""Values of 16 bits in 16 bytes, on which low rows begin in grouped products."""


@frozen(kw_only=True)
class Lora(AdapterPlugin):
    """Trains ``y = x W^T + scale (x A^T) B^T`` beside each frozen weight W (LoRA, arXiv 2106.09685).

    A ``(rank, inputs)`` and B ``(outputs, rank)`` are fp32, B is zero at first, and both are multiplied in the dtype of
    activations. Each expert has one A and B for gate and up together, and one for down, each of ``rank``.
    """

    name: ClassVar[str] = "lora"
    left_out: ClassVar[Mapping[str, str]] = {
        "bias": "biases are weights like others: leave them out of train.freeze.",
        "modules_to_save": "weights that train as a whole are those that train.freeze does not name.",
        "target_modules": "targets names weights, such as attention.q_proj and moe.experts.*.",
        "lora_alpha": "it is called alpha.",
        "r": "it is called rank.",
    }

    rank: int = field(default=16, validator=ge(1))
    """Rank of each adapter. PEFT: ``r``."""
    alpha: float = field(default=32.0, validator=gt(0.0))
    """Numerator of the scale, ``alpha / rank``. PEFT: ``lora_alpha``."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)`` (arXiv 2312.03732). PEFT: ``use_rslora``."""
    dropout: float = field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Probability with which an input of A is 0 in training; not of experts' adapters. PEFT: ``lora_dropout``."""
    targets: tuple[str, ...] | None = None
    """Patterns of the weights that get adapters, by their names in a layer; null: all that parts of the model offer.

    ``attention.q_proj``, ``mlp.*`` (of layers without experts), ``moe.shared_expert.*``, ``moe.experts.gate_up_proj``.
    """

    @property
    def scale(self) -> float:
        """Factor of ``(x A^T) B^T``."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def draws(self) -> bool:
        """Whether there is dropout."""
        return self.dropout > 0

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the need for each target to be a weight whose part asks for its adapter; and for keys of rows."""
        if self.draws:
            reason = "what it draws for a row must not depend on where the row is"
            yield moefw.need("row_keys", True, reason=reason, option="dropout")
        for target in USUAL if self.targets is None else self.targets:
            reason = "a part must multiply with the adapters of its weights"
            yield moefw.need("adapter", target, reason=reason, option="targets")

    def check(self, site: Site) -> Iterator[moefw.Problem]:
        """Yield a problem for a rank that grouped products of experts cannot have."""
        adapts_experts = any(self.adapts(f"moe.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        if adapts_experts and self.rank % ROW_MULTIPLE:
            what = f"rank {self.rank}: grouped products of experts want a rank that is a multiple of {ROW_MULTIPLE}."
            yield moefw.Problem(what, "Round it up, or name targets without experts.", "rank")
        if self.targets == ():
            yield moefw.Problem("no weight gets an adapter.", "Name some, or null for all.", "targets")

    def adapts(self, weight: str) -> bool:
        """Whether a weight is one of the targets."""
        return self.targets is None or any(fnmatchcase(weight, target) for target in self.targets)

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
