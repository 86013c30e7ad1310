"""Common declarations of quantized recipes: modules kept in high precision, and needs of GEMMs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import evolve, frozen

import moefw
from moefw.core.plugin import Plugin, PrecisionPlugin
from moefw.core.site import Site
from moefw.plugins.precision.quantized.gpus import Gpus
from moefw.plugins.precision.quantized.te.machine import te_needs

if TYPE_CHECKING:
    from moefw.plugins.precision.quantized.operands import Operands

MODULES = ("attention", "mlp", "moe.experts", "moe.shared_expert")
"""The modules of a layer whose GEMMs a recipe quantizes."""


@frozen(kw_only=True)
class LowPrecisionPlugin(PrecisionPlugin):
    """Quantizes the operands of the GEMMs of attention, MLPs and experts for each of their three products.

    Router, norms, embedding, head and softmax compute as in bf16; parameters, gradients and optimizer are fp32.
    """

    rows: ClassVar[int]
    """Rows of a block in the product that sums over rows. A block must not span two experts."""

    wire: ClassVar[tuple[str, ...]] = ("bf16",)
    """Formats in which rows may travel to the experts."""

    rtol: ClassVar[float | None] = 0.15

    codes: ClassVar[str] = "fp8"
    """Format of operands whose codes are multiplied directly."""

    gpus: ClassVar[Gpus]
    """GPUs on which torch multiplies the codes."""

    replays: ClassVar[bool] = False
    """Whether a graph of a step with ``backend: torch`` was seen to replay with the bits of an eager step."""

    backend: Literal["emulate", "torch", "te"]
    """Implementation of the products.

    ``emulate`` quantizes to the codes and scales of the format, dequantizes them and multiplies in fp32, on any
    machine; ``torch`` multiplies the codes directly, on GPUs that can; ``te`` quantizes and multiplies with Transformer
    Engine.
    """
    primary_weights: Literal["fp32", "bf16"] = "fp32"
    """Format in which sharded weights are gathered, and from which weights are quantized in any layout.

    ``bf16`` halves the bytes, and rounds weights twice, as Megatron Core does in MXFP8.
    """
    keep_bf16: tuple[str, ...] = ()
    """Patterns of modules that stay in bf16: ``layers.0.*``, ``layers.-1.*`` for the last layer, ``*.attention``."""

    @property
    @abstractmethod
    def te_gpus(self) -> Gpus:
        """GPUs on which Transformer Engine multiplies the codes."""

    @property
    def emulates(self) -> bool:
        """Whether operands are dequantized."""
        return self.backend == "emulate"

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities of the GPUs on which torch or Transformer Engine multiplies the codes."""
        return tuple(dict.fromkeys((*self.gpus.capabilities, *self.te_gpus.capabilities)))

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: operands are codes and scales, or dequantized to fp32."""
        operand = "fp32" if self.emulates else self.codes
        replays = moefw.ANY if self.replays and self.backend == "torch" else ("never",)
        return moefw.offers(operand=(operand,), wire=self.wire, replays=replays)

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Needs: whole blocks of rows, GEMMs that quantize for each pass, a GPU that multiplies codes."""
        needs = [
            moefw.need(
                "row_alignment",
                self.rows,
                reason=f"the weight gradient takes rows in blocks of {self.rows}, each of one expert",
            ),
            moefw.need(
                "by_pass",
                True,
                reason="backward multiplies operands that are quantized along other axes than those of forward",
                fix="Use parts that multiply through moefw.linear.",
            ),
        ]
        if self.backend == "torch":
            needs += self.gpus.needs()
        if self.backend == "te":
            needs += te_needs(self.te_gpus)
        return needs

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem for each pattern of ``keep_bf16`` that names no module."""
        layers = range(-site.num_layers, site.num_layers)
        modules = [f"layers.{layer}.{module}" for layer in layers for module in MODULES]
        problems = []
        for number, pattern in enumerate(self.keep_bf16):
            if not any(fnmatchcase(module, pattern) for module in modules):
                problems.append(
                    moefw.Problem(
                        f"{pattern!r} names no module.",
                        "Use for example layers.0.* or *.attention.",
                        f"keep_bf16[{number}]",
                    )
                )
        return problems

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Recipe. Raises PlanError where the backend cannot multiply its operands on this GPU."""
        import torch

        weight_dtype = torch.bfloat16 if self.primary_weights == "bf16" else None
        operands = self.operands(context.site)
        return operands.recipe(self.backend, context.device, self.te_gpus, weight_dtype=weight_dtype)

    @abstractmethod
    def operands(self, site: Site) -> Operands:
        """Components that make and multiply the operands of a layer."""

    def planned_as(self) -> Plugin:
        """The emulation, which makes and saves the same codes. Its temporary tensors are larger."""
        return evolve(self, backend="emulate")

    def fallback(self, context: moefw.BuildContext) -> moefw.Precision:
        """Bf16."""
        from moefw.runtime.compute.casts import BF16Recipe

        return BF16Recipe()

    def keeps_high_precision(self, module: str) -> bool:
        """Whether a pattern of ``keep_bf16`` names the module."""
        return any(fnmatchcase(module, pattern) for pattern in self.keep_bf16)


@frozen(kw_only=True)
class QuantizedPlugin(LowPrecisionPlugin):
    """An eight-bit recipe, which can also save the experts' pre-activation as codes."""

    saved_activations: Literal["bf16", "fp8", "int8"] = "bf16"
    """Format of the experts' saved pre-activation.

    ``fp8``: codes of the recipe; ``int8``: integers in blocks of 128, which backward reads with twice the accuracy.
    """

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the need of a GEMM that lets the recipe save its activations."""
        needs = list(super().needs(site))
        if self.saved_activations != "bf16":
            needs.append(
                moefw.need(
                    "activations_kept",
                    True,
                    reason=f"saved_activations is {self.saved_activations}",
                    fix="Use gemm: grouped or loop, or saved_activations: bf16.",
                    option="saved_activations",
                )
            )
        return needs
