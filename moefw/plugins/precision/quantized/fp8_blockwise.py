"""``fp8-blockwise``: one scale per 128 values of activations and gradients, and per 128x128 of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from attrs import frozen

import moefw
from moefw.core.records import Side
from moefw.core.site import Site
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin
from moefw.plugins.precision.quantized.gpus import BLOCKS_OF_128, Gpus
from moefw.plugins.precision.quantized.te.machine import BLOCKS, EXACT_BLOCKS

if TYPE_CHECKING:
    from moefw.plugins.precision.quantized.operands import Operands


@frozen(kw_only=True)
class FP8Blockwise(QuantizedPlugin):
    """E4M3 with one scale per 1x128 values of activations and gradients, and per 128x128 of weights."""

    name: ClassVar[str] = "fp8-blockwise"
    rows: ClassVar[int] = 128
    wire: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    row_scales: ClassVar[tuple[str, ...]] = ("input", "grad")
    gpus: ClassVar[Gpus] = BLOCKS_OF_128
    replays: ClassVar[bool] = True

    scales: Literal["power_of_two", "fp32"] = "power_of_two"
    """Scales: ``power_of_two``, rounded down as in Transformer Engine's default, or exact ``fp32``."""
    primary_weights: Literal["fp32", "bf16", "fp8"] = "fp32"  # type: ignore[assignment]  # one format more
    """Format in which sharded weights are gathered, and from which weights are quantized in any layout.

    ``bf16`` halves the bytes, and rounds weights twice. ``fp8``: each rank quantizes its shard of the fp32 masters,
    with the codes of ``fp32``.
    """

    @property
    def te_gpus(self) -> Gpus:
        """Hopper, and Blackwell where scales are powers of two."""
        return BLOCKS if self.scales == "power_of_two" else EXACT_BLOCKS

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Also a problem if fp8 primary weights meet Transformer Engine, or a layout that shards none."""
        problems = [*super().check(site)]
        if self.primary_weights != "fp8":
            return problems
        if self.backend == "te":
            problems.append(
                moefw.Problem(
                    "Transformer Engine quantizes weights itself, from values: it takes no codes that were gathered.",
                    "Use backend: torch or emulate, or primary_weights: fp32.",
                    "primary_weights",
                )
            )
        elif site.layout.world > 1 and all(site.layout.num_shards(side) == 1 for side in get_args(Side)):
            problems.append(
                moefw.Problem(
                    "with primary_weights: fp8, weights are gathered as codes, and this layout shards none.",
                    "Shard parameters (shard: all, in parallel), or use primary_weights: fp32.",
                    "primary_weights",
                )
            )
        return problems

    def operands(self, site: Site) -> Operands:
        """Operands in blocks of 128, and primary weights in square blocks."""
        from moefw.plugins.precision.quantized.blockwise_products import BlockwiseProducts
        from moefw.plugins.precision.quantized.encoders import Blockwise
        from moefw.plugins.precision.quantized.operands import Operands
        from moefw.plugins.precision.quantized.primary import SquareBlocks
        from moefw.plugins.precision.quantized.te.quantizers import Blocks

        power_of_two = self.scales == "power_of_two"
        primary = SquareBlocks(power_of_two=power_of_two) if self.primary_weights == "fp8" else None
        return Operands(
            encoder=Blockwise(power_of_two=power_of_two, primary=primary),
            products=BlockwiseProducts(),
            quantizers=Blocks(power_of_two=power_of_two),
            activations=self.saved_activations,
        )
