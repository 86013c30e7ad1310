"""``sample``: an optimizer."""

from __future__ import annotations

from typing import Any, ClassVar

import moefw
from attrs import field, frozen
from attrs.validators import and_, ge, lt

moefw_api = ">=3,<4"


@frozen(kw_only=True)
class Sample(moefw.OptimizerPlugin):
    """Follows a running sum of gradients."""

    name: ClassVar[str] = "sample"

    beta: float = field(default=0.9, validator=and_(ge(0.0), lt(1.0)))
    """Share of the sum that a step keeps."""

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Offer an elementwise update, with the sum in bf16, off the device, or both."""
        return moefw.offers(update=("elementwise",), region=(("optimizer", "bf16"), ("optimizer", "offload")))

    def states(self) -> tuple[str, ...]:
        """Name of the sum."""
        return ("momentum",)

    def build(self, parameters: moefw.TrainedParameters, lr: float) -> Any:
        """Optimizer of all parameters."""
        from moefw_sample.optimizer import SampleOptimizer

        return SampleOptimizer(parameters.values(), lr=lr, beta=self.beta)


@moefw.hookimpl
def moefw_optimizers() -> list[type[moefw.OptimizerPlugin]]:
    """Declare the optimizer."""
    return [Sample]
