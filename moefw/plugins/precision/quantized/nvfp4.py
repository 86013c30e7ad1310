"""``nvfp4``: four-bit operands whose gradients are rounded at random, the first and the last layer in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import frozen

import moefw
from moefw.core.site import Site
from moefw.plugins.precision.quantized.declaration import LowPrecisionPlugin


@frozen(kw_only=True)
class NVFP4(LowPrecisionPlugin):
    """E2M1 in blocks of 16 with E4M3 scales, and an fp32 scale for an expert's rows or matrix above (arXiv 2509.25149).

    ``stochastic_rounding``: gradients have no bias. ``hadamard`` turns every 16 rows of both operands of the weight
    gradient, so that no token is rounded away beside a larger one, and leaves their product. ``square_weights``: blocks
    of 16x16, so that forward and backward multiply the same numbers; false: 1x16 along what a product sums over.
    """

    name: ClassVar[str] = "nvfp4"
    rows: ClassVar[int] = 16

    backend: Literal["emulate"]
    keep_bf16: tuple[str, ...] = ("layers.0.*", "layers.-1.*")
    stochastic_rounding: bool = True
    hadamard: bool = True
    square_weights: bool = True

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the keys of rows, from which random rounding draws."""
        needs = list(super().needs(site))
        if self.stochastic_rounding:
            reason = "what it draws for a row must not depend on where the row is"
            fix = "Use parts that offer row_keys, or stochastic_rounding: false."
            needs.append(moefw.need("row_keys", True, reason=reason, fix=fix, option="stochastic_rounding"))
        return needs

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe."""
        from moefw.plugins.precision.quantized.four_bits import FourBits
        from moefw.plugins.precision.quantized.recipe import EmulatedRecipe

        encoder = FourBits(
            f"layers.{context.site.layer}",
            draws=self.stochastic_rounding,
            turns=self.hadamard,
            square_weights=self.square_weights,
        )
        return EmulatedRecipe(encoder, save_codes=False)
