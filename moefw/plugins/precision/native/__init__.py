"""``fp32`` and ``bf16``: operands in a dtype that torch multiplies natively."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.core.site import Site


@frozen
class _Native(PrecisionPlugin):
    def offers(self, site: Site) -> moefw.Offers:
        """Offers: operands are plain tensors of the dtype; rows travel unpacked.

        torch multiplies groups of rows in fp32 one by one, and reads their sizes for it.
        """
        replays = moefw.ANY if self.name == "bf16" else ("never",)
        return moefw.offers(operand=(self.name,), wire=(self.name,), replays=replays)

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Recipe."""
        from moefw.runtime.compute.casts import BF16Recipe, FP32Recipe

        return FP32Recipe() if self.name == "fp32" else BF16Recipe()


@frozen
class FP32(_Native):
    """Everything in fp32."""

    name: ClassVar[str] = "fp32"


@frozen
class BF16(_Native):
    """GEMM operands and activations in bf16; parameters, router, norms, softmax and optimizer stay in fp32."""

    name: ClassVar[str] = "bf16"


@moefw.hookimpl
def moefw_precisions() -> list[type[PrecisionPlugin]]:
    """Declare the recipes."""
    return [FP32, BF16]
