"""``fp8-blockwise``, ``mxfp8``, ``fp8-tensor`` and ``nvfp4``: GEMMs on quantized operands, everything else in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.core.site import Site
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin
from moefw.plugins.precision.quantized.fp8_blockwise import FP8Blockwise
from moefw.plugins.precision.quantized.fp8_tensor import FP8Tensor
from moefw.plugins.precision.quantized.gpus import MXFP8 as GPUS_OF_MXFP8
from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.nvfp4 import NVFP4
from moefw.plugins.precision.quantized.te.machine import MX_BLOCKS

if TYPE_CHECKING:
    from moefw.plugins.precision.quantized.operands import Operands


@frozen(kw_only=True)
class MXFP8(QuantizedPlugin):
    """E4M3 with an E8M0 scale for each 32 values along the axis that a product sums over (OCP MX)."""

    name: ClassVar[str] = "mxfp8"
    rows: ClassVar[int] = 32
    scale_bytes: ClassVar[int] = 1
    wire: ClassVar[tuple[str, ...]] = ("bf16", "fp8")
    gpus: ClassVar[Gpus] = GPUS_OF_MXFP8
    te_gpus: ClassVar[Gpus] = MX_BLOCKS

    def operands(self, site: Site) -> Operands:
        """Operands with E8M0 scales of 32 values."""
        from moefw.plugins.precision.quantized.encoders import MX
        from moefw.plugins.precision.quantized.operands import Operands
        from moefw.plugins.precision.quantized.swizzled_products import MXProducts
        from moefw.plugins.precision.quantized.te.quantizers import MXBlocks

        activations = self.saved_activations
        return Operands(encoder=MX(), products=MXProducts(), quantizers=MXBlocks(), activations=activations)


@moefw.hookimpl
def moefw_precisions() -> list[type[PrecisionPlugin]]:
    """Declare the recipes."""
    return [FP8Blockwise, MXFP8, FP8Tensor, NVFP4]
