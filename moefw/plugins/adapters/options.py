"""Options that low-rank adapters share. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from attrs import evolve, field, frozen
from attrs.validators import ge, gt

import moefw
from moefw.core.plugin import AdapterPlugin
from moefw.core.site import Site
from moefw.models.huggingface.adapter_config import AdapterConfig


@frozen(kw_only=True)
class LowRankOptions(AdapterPlugin):
    """Adapters that multiply with two factors of a low rank, A ``(rank, inputs)`` and B ``(outputs, rank)``."""

    left_out: ClassVar[Mapping[str, str]] = {
        "bias": "biases are weights like others: leave them out of train.freeze.",
        "modules_to_save": "weights that train as a whole are those that train.freeze does not name.",
        "target_modules": "targets names weights, such as attention.q_proj and moe.experts.*.",
        "lora_alpha": "it is called alpha.",
        "r": "it is called rank.",
    }
    usual_targets: ClassVar[tuple[str, ...]]
    """What every model has of the weights that get adapters if ``targets`` names none."""

    rank: int = field(default=16, validator=ge(1))
    """Rank of each adapter. PEFT: ``r``."""
    alpha: float = field(default=32.0, validator=gt(0.0))
    """Numerator of the scale, ``alpha / rank``. PEFT: ``lora_alpha``."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)`` (arXiv 2312.03732). PEFT: ``use_rslora``."""
    targets: tuple[str, ...] | None = None
    """Patterns of the weights that get adapters, by their names in a layer; null: all that can have some.

    ``attention.q_proj``, ``mlp.*`` (of layers without experts), ``moe.shared_expert.*``, ``moe.experts.gate_up_proj``.
    """

    weights: str | None = None
    """Folder of an adapter in files of PEFT to begin with; null: new ones, which change nothing at first."""

    @property
    def scale(self) -> float:
        """Factor of ``(x A^T) B^T``."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the need for each target to be a weight whose part asks for its adapter."""
        for target in self.usual_targets if self.targets is None else self.targets:
            reason = "a part must multiply with the adapters of its weights"
            yield moefw.need("adapter", target, reason=reason, option="targets")

    def check(self, site: Site) -> Iterator[moefw.Problem]:
        """Yield a problem if there are no targets."""
        if self.targets == ():
            yield moefw.Problem("no weight gets an adapter.", "Name some, or null for all.", "targets")

    @property
    def begins_with(self) -> str | None:
        """Folder of an adapter to begin with; None: with a new one."""
        return self.weights

    def peft_config(self, base: str | None) -> AdapterConfig:
        """Configuration of PEFT."""
        return AdapterConfig(rank=self.rank, alpha=self.alpha, rslora=self.rslora, base=base)

    def anchored(self) -> LowRankOptions:
        """Same adapters with absolute paths."""
        return self if self.weights is None else evolve(self, weights=str(Path(self.weights).absolute()))

    def adapts(self, weight: str) -> bool:
        """Whether a weight is one of the targets."""
        return self.targets is None or any(fnmatchcase(weight, target) for target in self.targets)
