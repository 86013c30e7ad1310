"""``fp8-blockwise``, ``mxfp8``, ``fp8-tensor`` and ``nvfp4``: GEMMs on small operands, everything else in bf16."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin, patterns_of_nothing
from moefw.plugins.precision.quantized.fp8_blockwise import FP8Blockwise, nothing_to_gather
from moefw.plugins.precision.quantized.fp8_tensor import FP8Tensor
from moefw.plugins.precision.quantized.gpus import MXFP8 as GPUS_OF_MXFP8
from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.nvfp4 import NVFP4
from moefw.plugins.precision.quantized.te.machine import MX_BLOCKS


@frozen(kw_only=True)
class MXFP8(QuantizedPlugin):
    """E4M3 with an E8M0 scale for each 32 values along the axis that a product sums over (OCP MX)."""

    name: ClassVar[str] = "mxfp8"
    rows: ClassVar[int] = 32
    scale_bytes: ClassVar[int] = 1
    wire: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    gpus: ClassVar[Gpus] = GPUS_OF_MXFP8
    te_gpus: ClassVar[Gpus] = MX_BLOCKS

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe. Raises PlanError where the backend cannot multiply its operands on this GPU."""
        from moefw.plugins.precision.quantized.encoders import MX
        from moefw.plugins.precision.quantized.recipe import EmulatedRecipe
        from moefw.plugins.precision.quantized.scaled import scaled_recipe
        from moefw.plugins.precision.quantized.swizzled_products import MXProducts
        from moefw.plugins.precision.quantized.te.quantizers import MXBlocks
        from moefw.plugins.precision.quantized.te.recipe import te_recipe

        if self.backend == "torch":
            return scaled_recipe(MX(), MXProducts(), device=context.device, activations=self.saved_activations)
        if self.backend == "te":
            return te_recipe(MX(), MXBlocks(), self.te_gpus, device=context.device, activations=self.saved_activations)
        return EmulatedRecipe(MX(), activations=self.saved_activations)


@moefw.hookimpl
def moefw_check(assembly: moefw.Assembly) -> list[moefw.Problem]:
    """A pattern that names no module is a mistake, and so is an option that nothing comes of."""
    return patterns_of_nothing(assembly) + nothing_to_gather(assembly)


@moefw.hookimpl
def moefw_precisions() -> list[type[PrecisionPlugin]]:
    """Declare the recipes."""
    return [FP8Blockwise, MXFP8, FP8Tensor, NVFP4]
