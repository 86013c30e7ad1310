"""``fp8-blockwise``, ``mxfp8``, ``fp8-tensor`` and ``nvfp4``: GEMMs on small operands, everything else in bf16."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin, patterns_of_nothing
from moefw.plugins.precision.quantized.fp8_blockwise import FP8Blockwise
from moefw.plugins.precision.quantized.fp8_tensor import FP8Tensor
from moefw.plugins.precision.quantized.nvfp4 import NVFP4


@frozen(kw_only=True)
class MXFP8(QuantizedPlugin):
    """E4M3 with an E8M0 scale for each 32 values along the axis that a product sums over (OCP MX)."""

    name: ClassVar[str] = "mxfp8"
    rows: ClassVar[int] = 32
    wire: ClassVar[tuple[str, ...]] = ("bf16", "fp8")

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe."""
        from moefw.plugins.precision.quantized.encoders import MX
        from moefw.plugins.precision.quantized.recipe import EmulatedRecipe

        return EmulatedRecipe(MX(), save_codes=self.saved_activations == "fp8")


@moefw.hookimpl
def moefw_check(assembly: moefw.Assembly) -> list[moefw.Problem]:
    """A pattern that names no module is a mistake."""
    return patterns_of_nothing(assembly)


@moefw.hookimpl
def moefw_precisions() -> list[type[PrecisionPlugin]]:
    """Declare the recipes."""
    return [FP8Blockwise, MXFP8, FP8Tensor, NVFP4]
