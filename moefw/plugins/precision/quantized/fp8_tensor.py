"""``fp8-tensor``: one scale per tensor, from the tensor itself or from earlier steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from attrs import field, frozen
from attrs.validators import ge, optional

import moefw
from moefw.core.site import Site
from moefw.plugins.precision.quantized.declaration import QuantizedPlugin
from moefw.plugins.precision.quantized.gpus import TENSORS, Gpus
from moefw.plugins.precision.quantized.te.machine import WHOLE_TENSORS

if TYPE_CHECKING:
    from moefw.plugins.precision.quantized.operands import Operands

DELAYED: Final[Mapping[str, Any]] = {"history": 16, "margin": 0, "algorithm": "max"}
"""The options of delayed scaling, with their defaults."""


@frozen(kw_only=True)
class FP8Tensor(QuantizedPlugin):
    """E4M3, gradients E5M2, with one fp32 scale per tensor; for experts, per expert's rows or weight matrix."""

    name: ClassVar[str] = "fp8-tensor"
    rows: ClassVar[int] = 16
    rtol: ClassVar[float | None] = 0.2
    row_scales: ClassVar[tuple[str, ...]] = ()
    gpus: ClassVar[Gpus] = TENSORS
    te_gpus: ClassVar[Gpus] = WHOLE_TENSORS

    scaling: Literal["current", "delayed"] = "current"
    """Source of a scale: ``current``, the tensor's own largest magnitude, or ``delayed``, that of earlier steps."""
    history: int | None = field(default=None, validator=optional(ge(1)))
    """Number of the last steps whose largest magnitudes ``delayed`` scaling remembers; null: 16."""
    margin: int | None = field(default=None, validator=optional(ge(0)))
    """Headroom of ``delayed`` scaling, as a power of two: 2^``margin``; null: 0."""
    algorithm: Literal["max", "most_recent"] | None = None
    """Magnitude of ``delayed`` scaling: ``max``, the largest of ``history``, or ``most_recent``; null: ``max``."""

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the need of delayed scaling for GEMMs that remember magnitudes, each its own."""
        needs = [*super().needs(site)]
        if self.scaling == "delayed":
            needs.append(
                moefw.need(
                    "named_products",
                    True,
                    reason="delayed scaling remembers the largest magnitudes of each GEMM",
                    fix="Use parts that take Precision.at(name, groups=...) for each GEMM, or scaling: current.",
                    option="scaling",
                )
            )
        return needs

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Also a problem for each option of delayed scaling that is set under current scaling."""
        problems = [*super().check(site)]
        if self.scaling == "current":
            for name in DELAYED:
                if getattr(self, name) is not None:
                    what = f"{name} is no option of scaling: current."
                    problems.append(moefw.Problem(what, "Leave it out, or use scaling: delayed.", name))
        return problems

    def _delayed_options(self) -> dict[str, Any]:
        """Options of delayed scaling, with defaults for those that are not set."""
        options = {}
        for name, default in DELAYED.items():
            value = getattr(self, name)
            options[name] = default if value is None else value
        return options

    def operands(self, site: Site) -> Operands:
        """Operands with one scale per tensor, of this step or of earlier steps."""
        from moefw.plugins.precision.quantized.operands import Operands
        from moefw.plugins.precision.quantized.te.quantizers import CurrentTensors, DelayedTensors
        from moefw.plugins.precision.quantized.tensorwise import CurrentScales, DelayedScales
        from moefw.plugins.precision.quantized.tensorwise_products import TensorwiseProducts

        current = self.scaling == "current"
        return Operands(
            encoder=CurrentScales() if current else DelayedScales(**self._delayed_options()),
            products=TensorwiseProducts(),
            quantizers=CurrentTensors() if current else DelayedTensors(),
            activations=self.saved_activations,
        )
