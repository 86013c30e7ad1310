"""``fp8-blockwise`` and ``mxfp8``: GEMMs on eight-bit operands, everything else in bf16."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin, patterns_of_nothing


@frozen(kw_only=True)
class FP8Blockwise(QuantizedPlugin):
    """E4M3; a scale for 1x128 values of activations and gradients, for 128x128 of weights.

    ``scales``: power_of_two as Transformer Engine does by default (rounded down), or exact fp32.
    """

    name: ClassVar[str] = "fp8-blockwise"
    rows: ClassVar[int] = 128

    scales: Literal["power_of_two", "fp32"] = "power_of_two"

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe."""
        from moefw.plugins.precision.quantized.encoders import Blockwise
        from moefw.plugins.precision.quantized.recipe import EmulatedRecipe

        encoder = Blockwise(power_of_two=self.scales == "power_of_two")
        return EmulatedRecipe(encoder, save_codes=self.saved_activations == "fp8")


@frozen(kw_only=True)
class MXFP8(QuantizedPlugin):
    """E4M3 with an E8M0 scale for each 32 values along the axis that a product sums over (OCP MX)."""

    name: ClassVar[str] = "mxfp8"
    rows: ClassVar[int] = 32

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
    return [FP8Blockwise, MXFP8]
