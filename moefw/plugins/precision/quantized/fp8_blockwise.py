"""``fp8-blockwise``: a scale for 128 values of activations and gradients, and for 128x128 of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

from attrs import frozen

import moefw
from moefw.core.records import Side
from moefw.core.site import Site
from moefw.ledger.parts import Formats
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin
from moefw.plugins.precision.quantized.gpus import BLOCKS_OF_128, Gpus
from moefw.plugins.precision.quantized.te.machine import BLOCKS, EXACT_BLOCKS


@frozen(kw_only=True)
class FP8Blockwise(QuantizedPlugin):
    """E4M3; a scale for 1x128 values of activations and gradients, for 128x128 of weights.

    ``scales``: power_of_two as Transformer Engine does by default (rounded down), or exact fp32. ``primary_weights``:
    as what weights are gathered that the layout shares out; fp8: each rank quantizes its shard of the fp32 masters.
    """

    name: ClassVar[str] = "fp8-blockwise"
    rows: ClassVar[int] = 128
    wire: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    gpus: ClassVar[Gpus] = BLOCKS_OF_128

    scales: Literal["power_of_two", "fp32"] = "power_of_two"
    primary_weights: Literal["fp32", "fp8"] = "fp32"

    @property
    def te_gpus(self) -> Gpus:
        """Hopper, and Blackwell where scales are powers of two."""
        return BLOCKS if self.scales == "power_of_two" else EXACT_BLOCKS

    def formats(self) -> Formats | None:
        """Nothing is known yet of weights that are gathered as codes, whose gradients are fp32."""
        return super().formats() if self.primary_weights == "fp32" else None

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Transformer Engine quantizes weights itself."""
        if self.primary_weights == "fp32" or self.backend != "te":
            return ()
        what = "Transformer Engine quantizes weights itself, from values: it takes no codes that were gathered."
        return [moefw.Problem(what, "Use backend: torch or emulate, or primary_weights: fp32.", "primary_weights")]

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe. Raises PlanError where the backend cannot multiply its operands on this GPU."""
        from moefw.plugins.precision.quantized.blockwise_products import BlockwiseProducts
        from moefw.plugins.precision.quantized.encoders import Blockwise
        from moefw.plugins.precision.quantized.primary import SquareBlocks
        from moefw.plugins.precision.quantized.recipe import EmulatedRecipe
        from moefw.plugins.precision.quantized.scaled import scaled_recipe
        from moefw.plugins.precision.quantized.te.quantizers import Blocks
        from moefw.plugins.precision.quantized.te.recipe import te_recipe

        power_of_two = self.scales == "power_of_two"
        primary = SquareBlocks(power_of_two=power_of_two) if self.primary_weights == "fp8" else None
        encoder = Blockwise(power_of_two=power_of_two, primary=primary)
        if self.backend == "torch":
            return scaled_recipe(
                encoder, BlockwiseProducts(), device=context.device, activations=self.saved_activations
            )
        if self.backend == "te":
            blocks = Blocks(power_of_two=power_of_two)
            return te_recipe(encoder, blocks, self.te_gpus, device=context.device, activations=self.saved_activations)
        return EmulatedRecipe(encoder, activations=self.saved_activations)


def nothing_to_gather(assembly: moefw.Assembly) -> list[moefw.Problem]:
    """Return a problem where weights should be gathered as FP8, and every one of several ranks has all of them."""
    recipe, sides = assembly.parts.precision, get_args(Side)
    if not isinstance(recipe, FP8Blockwise) or recipe.primary_weights == "fp32" or assembly.layout.world == 1:
        return []
    if any(len(assembly.layout.copies(0, side)[0]) > 1 for side in sides):
        return []
    what = "with primary_weights: fp8, weights are gathered as codes, and this layout shares out none."
    fix = "Share out parameters (shard: all, in parallel), or use primary_weights: fp32."
    return [moefw.Problem(what, fix, "precision.primary_weights")]
