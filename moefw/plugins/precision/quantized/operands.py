"""Components that make and multiply operands, and the recipe of each backend over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from moefw.plugins.precision.quantized.encoders import Encoder
from moefw.plugins.precision.quantized.products import Products
from moefw.plugins.precision.quantized.recipe import Activations, EmulatedRecipe, LowPrecisionRecipe

if TYPE_CHECKING:
    import torch

    from moefw.plugins.precision.quantized.gpus import Gpus
    from moefw.plugins.precision.quantized.te.quantizers import Quantizers


@frozen(kw_only=True)
class Operands:
    """``encoder`` makes codes, which torch multiplies through ``products``; Transformer Engine uses ``quantizers``.

    ``activations``: the format in which the experts' pre-activation is saved.
    """

    encoder: Encoder
    products: Products
    quantizers: Quantizers
    activations: Activations = "bf16"

    def recipe(
        self, backend: str, device: torch.device, te_gpus: Gpus, *, weight_dtype: torch.dtype | None
    ) -> LowPrecisionRecipe:
        """Recipe. Raises PlanError where the backend cannot multiply the operands on the device.

        ``weight_dtype``: dtype in which weights are gathered, and to which they are rounded before they are quantized;
        None: that in which they are stored.
        """
        forms: dict[str, Any] = {"activations": self.activations, "weight_dtype": weight_dtype}
        if backend == "emulate":
            return EmulatedRecipe(self.encoder, **forms)
        if backend == "torch":
            from moefw.plugins.precision.quantized.scaled import ScaledRecipe

            self.products.gpus.require(device)
            return ScaledRecipe(self.encoder, self.products, **forms)
        from moefw.plugins.precision.quantized.te.library import load
        from moefw.plugins.precision.quantized.te.recipe import TERecipe

        te_gpus.require(device)
        return TERecipe(load(), self.quantizers, self.encoder, **forms)
