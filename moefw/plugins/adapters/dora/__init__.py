"""``dora``: low-rank adapters of directions, and a trained magnitude of each output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, frozen

import moefw
from moefw.core.plugin import AdapterPlugin
from moefw.core.records import AdaptedWeight
from moefw.core.site import Site
from moefw.models.huggingface.adapter_config import AdapterConfig
from moefw.plugins.adapters.options import LowRankOptions

if TYPE_CHECKING:
    from moefw.core.contracts import Adapter

EXPERTS = "moe.experts."


@frozen(kw_only=True)
class Dora(LowRankOptions):
    """Trains ``y = x V^T m / |V|`` with ``V = W + scale B A`` beside each frozen weight W (DoRA, arXiv 2402.09353).

    ``|V|`` is the norm of each row, without a gradient (its section 4.3), and m begins with that of W. For attention,
    MLPs and shared experts; routed experts stay as they are.
    """

    name: ClassVar[str] = "dora"
    usual_targets: ClassVar[tuple[str, ...]] = ("attention.*",)
    left_out: ClassVar[Mapping[str, str]] = {
        **LowRankOptions.left_out,
        "dropout": "the frozen product would have to be computed twice, with and without it: use lora.",
    }

    def peft_config(self, base: str | None) -> AdapterConfig:
        """Configuration of PEFT."""
        return evolve(super().peft_config(base), dora=True)

    def check(self, site: Site) -> Iterator[moefw.Problem]:
        """Yield a problem for targets that are experts, or if there are no targets."""
        yield from super().check(site)
        for number, target in enumerate(self.targets or ()):
            if target.startswith(EXPERTS):
                what = f"{target}: dora has no adapters of routed experts, as PEFT has none."
                yield moefw.Problem(what, "Use lora for them.", f"targets[{number}]")

    def adapts(self, weight: str) -> bool:
        """Whether a weight is one of the targets, and not of routed experts."""
        return super().adapts(weight) and not weight.startswith(EXPERTS)

    def build(self, context: moefw.BuildContext, weight: AdaptedWeight) -> Adapter:
        """Adapter of one matrix."""
        from moefw.plugins.adapters.dora.adapter import DirectionAndMagnitude

        return DirectionAndMagnitude(
            weight,
            rank=self.rank,
            scale=self.scale,
            precision=context.fallback.at(weight.name),
            group=context.layout.group(weight.of_inputs.axis) if weight.of_inputs else None,
        )


@moefw.hookimpl
def moefw_adapters() -> list[type[AdapterPlugin]]:
    """Declare the adapters."""
    return [Dora]
