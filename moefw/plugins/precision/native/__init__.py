"""``fp32`` and ``bf16``: operands in a dtype that torch multiplies natively."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.memory.ledger import BF16_FORMATS, Formats
from moefw.core.plugin import PrecisionPlugin
from moefw.core.site import Site


@frozen
class _Native(PrecisionPlugin):
    def offers(self, site: Site) -> moefw.Offers:
        """Operands are plain tensors of the dtype; rows travel as they are."""
        return moefw.offers(operand=(self.name,), wire=(self.name,), deterministic=True, differentiable=True)

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe."""
        from moefw.core.compute.casts import BF16Recipe, FP32Recipe

        return FP32Recipe() if self.name == "fp32" else BF16Recipe()


@frozen
class FP32(_Native):
    """Everything in fp32."""

    name: ClassVar[str] = "fp32"

    def formats(self) -> Formats:
        """Four bytes."""
        return Formats(stream=4)


@frozen
class BF16(_Native):
    """GEMM operands and activations in bf16; parameters, router, norms, softmax and optimizer stay in fp32."""

    name: ClassVar[str] = "bf16"

    def formats(self) -> Formats:
        """Two bytes."""
        return BF16_FORMATS


@moefw.hookimpl
def moefw_precisions() -> list[type[PrecisionPlugin]]:
    """Declare the recipes."""
    return [FP32, BF16]
