"""``fp8-blockwise``: a scale for 128 values of activations and gradients, and for 128x128 of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import frozen

import moefw
from moefw.core.site import Site
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin
from moefw.plugins.precision.quantized.hopper import hopper_needs


@frozen(kw_only=True)
class FP8Blockwise(QuantizedPlugin):
    """E4M3; a scale for 1x128 values of activations and gradients, for 128x128 of weights.

    ``backend`` emulate: in fp32, on any machine; torch: in FP8, on GPUs of compute capability 9.0. ``scales``:
    power_of_two as Transformer Engine does by default (rounded down), or exact fp32.
    """

    name: ClassVar[str] = "fp8-blockwise"
    rows: ClassVar[int] = 128
    wire: ClassVar[tuple[str, ...]] = ("bf16", "fp8")

    backend: Literal["emulate", "torch"]  # type: ignore[assignment]
    scales: Literal["power_of_two", "fp32"] = "power_of_two"

    def offers(self, site: Site) -> moefw.Offers:
        """Operands are codes and scales, or dequantized."""
        return {**super().offers(site), **(moefw.offers(operand=("fp8",)) if self.backend == "torch" else {})}

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the GPU that multiplies them."""
        return [*super().needs(site), *(hopper_needs() if self.backend == "torch" else ())]

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe. Raises PlanError where torch cannot multiply its operands on this GPU."""
        from moefw.plugins.precision.quantized import hopper
        from moefw.plugins.precision.quantized.encoders import Blockwise
        from moefw.plugins.precision.quantized.recipe import EmulatedRecipe
        from moefw.plugins.precision.quantized.scaled import ScaledRecipe

        encoder, save_codes = Blockwise(power_of_two=self.scales == "power_of_two"), self.saved_activations == "fp8"
        if self.backend == "emulate":
            return EmulatedRecipe(encoder, save_codes=save_codes)
        hopper.require(context.device)
        return ScaledRecipe(encoder, save_codes=save_codes)
