"""``sample``: an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import ge

moefw_api = ">=3.4,<4"


@frozen
class Sample(moefw.AdapterPlugin):
    """Trains a product of two small matrices beside each weight of attention (LoRA, arXiv 2106.09685)."""

    name: ClassVar[str] = "sample"

    rank: int = field(default=8, validator=ge(1))
    """Number of values between both matrices."""

    def needs(self, site: moefw.Site) -> Sequence[moefw.Need]:
        """Require an attention that multiplies with adapters."""
        return [moefw.need("adapter", "attention.*", reason="it trains beside the weights of attention")]

    def adapts(self, weight: str) -> bool:
        """Whether a weight is one of attention."""
        return weight.startswith("attention.")

    def build(self, context: moefw.BuildContext, weight: moefw.AdaptedWeight) -> moefw.Adapter:
        """Adapter of one weight on this rank."""
        from moefw_sample.adapter import SampleAdapter

        return SampleAdapter(context, weight, self.rank)


@moefw.hookimpl
def moefw_adapters() -> list[type[moefw.AdapterPlugin]]:
    """Declare the adapter."""
    return [Sample]
