"""``nvfp4``: four-bit operands, gradients rounded at random, the first and the last layer in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import frozen

import moefw
from moefw.core.site import Site
from moefw.plugins.precision.quantized.declaration import LowPrecisionPlugin
from moefw.plugins.precision.quantized.gpus import NVFP4 as GPUS_OF_NVFP4
from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.te.machine import FP4

if TYPE_CHECKING:
    from moefw.plugins.precision.quantized.operands import Operands


@frozen(kw_only=True)
class NVFP4(LowPrecisionPlugin):
    """E2M1 in blocks of 16 with E4M3 scales, and an fp32 scale per expert's rows or weight matrix (arXiv 2509.25149).

    The first and the last layer stay in bf16, unless ``keep_bf16`` says otherwise.
    """

    name: ClassVar[str] = "nvfp4"
    rows: ClassVar[int] = 16
    rtol: ClassVar[float | None] = 0.4
    row_scales: ClassVar[tuple[str, ...]] = ()
    codes: ClassVar[str] = "fp4"
    gpus: ClassVar[Gpus] = GPUS_OF_NVFP4
    te_gpus: ClassVar[Gpus] = FP4

    keep_bf16: tuple[str, ...] = ("layers.0.*", "layers.-1.*")
    stochastic_rounding: bool = True
    """Whether gradients are rounded at random, without bias up to six times the scale of their block."""
    hadamard: bool = True
    """Whether a Hadamard transform mixes every 16 rows of both operands of the weight gradient.

    No token is then rounded away by a larger one; the product of the operands stays the same.
    """
    square_weights: bool = True
    """Whether blocks of weights are 16x16, so that forward and backward multiply the same numbers.

    false: 1x16 along the summed axis.
    """
    gradient_scales: Literal["nearest", "up"] = "nearest"
    """Rounding of the scales of blocks of gradients.

    ``nearest``, as in Transformer Engine: where a scale is rounded down, the largest numbers of its block saturate, and
    lose 1 % in the mean over all blocks. ``up``: no number saturates and there is no bias, but a larger error; only
    with ``stochastic_rounding``.
    """

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Also a problem for scales rounded up by Transformer Engine, or of what is rounded to nearest."""
        problems = list(super().check(site))
        if self.gradient_scales == "up" and self.backend == "te":
            what = "Transformer Engine rounds the scales of blocks to nearest."
            fix = "Use backend: torch or emulate, or gradient_scales: nearest."
            problems.append(moefw.Problem(what, fix, "gradient_scales"))
        if self.gradient_scales == "up" and not self.stochastic_rounding:
            what = (
                "scales that are rounded up make the largest numbers of blocks too large where codes round to nearest."
            )
            fix = "Use stochastic_rounding: true, or gradient_scales: nearest."
            problems.append(moefw.Problem(what, fix, "gradient_scales"))
        return problems

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the needs of row keys for random rounding and of row alignments for grouped GEMMs."""
        needs = list(super().needs(site))
        if self.backend == "torch":
            reason = "torch's grouped GEMM sums over rows in steps of 32 codes, 16 bytes"
            needs.append(moefw.need("row_alignment", 32, reason=reason, option="backend"))
        if self.backend == "te":
            reason = "Transformer Engine quantizes groups of rows to NVFP4 in tiles of 128"
            needs.append(moefw.need("row_alignment", 128, reason=reason, option="backend"))
        elif self.stochastic_rounding:
            needs.append(
                moefw.need(
                    "row_keys",
                    True,
                    reason="what it draws for a row must not depend on where the row is",
                    fix="Use parts that offer row_keys, or stochastic_rounding: false.",
                    option="stochastic_rounding",
                )
            )
        return needs

    def operands(self, site: Site) -> Operands:
        """Operands with two levels of scales. Transformer Engine draws its own random numbers."""
        from moefw.plugins.precision.quantized.four_bits import FourBits
        from moefw.plugins.precision.quantized.operands import Operands
        from moefw.plugins.precision.quantized.swizzled_products import NVFP4Products
        from moefw.plugins.precision.quantized.te.quantizers import FP4Blocks

        encoder = FourBits(
            f"layers.{site.layer}",
            draws=self.stochastic_rounding and self.backend != "te",
            turns=self.hadamard,
            square_weights=self.square_weights,
            drawn_scales=self.gradient_scales,
        )
        quantizers = FP4Blocks(
            draws=self.stochastic_rounding,
            turns=self.hadamard,
            square_weights=self.square_weights,
        )
        return Operands(encoder=encoder, products=NVFP4Products(), quantizers=quantizers)
