"""What the declarations of quantized recipes have in common: what stays high, and what a GEMM must do for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import frozen

import moefw
from moefw.core.plugin import PrecisionPlugin
from moefw.core.site import Site
from moefw.ledger.parts import BF16_FORMATS, FP32, Codes, Formats
from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.te.machine import te_needs

if TYPE_CHECKING:
    from moefw.plugins.precision.quantized.operands import Operands

INTEGERS = Codes(value_bits=8, block=(1, 128), scale_bytes=4)
MODULES = ("attention", "mlp", "moe.experts", "moe.shared_expert")
"""The modules of a layer whose GEMMs a recipe quantizes."""


@frozen(kw_only=True)
class LowPrecisionPlugin(PrecisionPlugin):
    """Operands of the GEMMs of attention, MLPs and experts are quantized for each of their three products.

    Router, norms, embedding, head and softmax are those of bf16; parameters, gradients and optimizer are fp32.
    ``backend`` emulate quantizes, dequantizes and multiplies in fp32: the codes and scales of the format, on any
    machine; torch multiplies these as they are, on GPUs that can; te has Transformer Engine quantize and multiply.
    ``keep_bf16``: patterns of modules that are left out, such as ``layers.0.*``, ``layers.-1.*`` for the last layer, or
    ``*.attention``.
    """

    rows: ClassVar[int]
    """Rows of a block in the product that sums over rows: a block must not reach over two experts."""

    wire: ClassVar[tuple[str, ...]] = ("bf16",)
    """As what rows may travel to the experts."""

    codes: ClassVar[str] = "fp8"
    """What operands are that are multiplied as they are."""

    gpus: ClassVar[Gpus]
    """Those on which torch multiplies these."""

    backend: Literal["emulate", "torch", "te"]
    keep_bf16: tuple[str, ...] = ()

    @property
    @abstractmethod
    def te_gpus(self) -> Gpus:
        """Those on which Transformer Engine does."""

    def offers(self, site: Site) -> moefw.Offers:
        """Operands are codes and scales, or dequantized to fp32."""
        operand = "fp32" if self.backend == "emulate" else self.codes
        return moefw.offers(operand=(operand,), wire=self.wire)

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Whole blocks of rows, GEMMs that quantize for each pass, and the GPU that multiplies codes."""
        blocks = f"the weight gradient takes rows in blocks of {self.rows}, each of one expert"
        passes = "backward multiplies operands that are quantized along other axes than those of forward"
        return [
            moefw.need("row_alignment", self.rows, reason=blocks),
            moefw.need("by_pass", True, reason=passes, fix="Use parts that multiply through moefw.linear."),
            *(self.gpus.needs() if self.backend == "torch" else ()),
            *(te_needs(self.te_gpus) if self.backend == "te" else ()),
        ]

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """A pattern of ``keep_bf16`` that names no module is a mistake."""
        layers = range(-site.num_layers, site.num_layers)
        modules = [f"layers.{layer}.{module}" for layer in layers for module in MODULES]
        return [
            moefw.Problem(f"{name!r} names no module.", "Use for example layers.0.* or *.attention.", f"keep_bf16[{i}]")
            for i, name in enumerate(self.keep_bf16)
            if not any(fnmatchcase(module, name) for module in modules)
        ]

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return the recipe. Raises PlanError where the backend cannot multiply its operands on this GPU."""
        return self.operands(context.site).recipe(self.backend, context.device, self.te_gpus)

    @abstractmethod
    def operands(self, site: Site) -> Operands:
        """Return what makes the operands of a layer."""

    def fallback(self, context: moefw.BuildContext) -> moefw.Precision:
        """Return bf16."""
        from moefw.runtime.compute.casts import BF16Recipe

        return BF16Recipe()

    def fallback_formats(self) -> Formats:
        """Those of bf16."""
        return BF16_FORMATS

    def keeps_high_precision(self, module: str) -> bool:
        """Whether a pattern of ``keep_bf16`` names the module."""
        return any(fnmatchcase(module, pattern) for pattern in self.keep_bf16)


@frozen(kw_only=True)
class QuantizedPlugin(LowPrecisionPlugin):
    """One with eight bits, which are enough for ``saved_activations`` too: the experts' pre-activation as codes.

    fp8: those of the recipe; int8: integers in blocks of 128, which backward reads twice as exactly.
    """

    scale_bytes: ClassVar[int] = FP32
    """Of the scale of a block of ``rows``."""

    saved_activations: Literal["bf16", "fp8", "int8"] = "bf16"

    def formats(self) -> Formats | None:
        """Inputs are saved as codes, weights as they are. None of Transformer Engine's."""
        if self.backend == "te":
            return None
        inputs, along = self.saved_codes()
        activations = {"bf16": None, "fp8": along, "int8": INTEGERS}[self.saved_activations]
        packed = along if "fp8" in self.wire else None
        return Formats(stream=2, inputs=inputs, activations=activations, packed=packed, passing_counted=False)

    def saved_codes(self) -> tuple[Codes, Codes]:
        """Return what is saved of inputs, in blocks of rows, and of activations, in blocks along them."""
        down, along = (
            Codes(value_bits=8, block=block, scale_bytes=self.scale_bytes) for block in ((self.rows, 1), (1, self.rows))
        )
        return down, along

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also a GEMM that has its activations saved by the recipe."""
        needs = list(super().needs(site))
        if self.saved_activations != "bf16":
            reason = f"saved_activations is {self.saved_activations}"
            fix = "Use gemm: grouped or loop, or saved_activations: bf16."
            needs.append(moefw.need("activations_kept", True, reason=reason, fix=fix, option="saved_activations"))
        return needs
