"""``adamw``: AdamW with decay of matrices only."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from attrs import field, frozen
from attrs.validators import and_, ge, gt, lt

import moefw
from moefw.core.facts import Offers
from moefw.core.plugin import OPTIMIZER, OptimizerPlugin
from moefw.core.records import ParameterRole, TrainedParameters
from moefw.core.site import Site
from moefw.plugins.optimizers.torch_adamw import fused_adamw

DECAYING: Final[tuple[ParameterRole, ...]] = ("matrix", "head")
"""The roles of the parameters that decay."""


@frozen(kw_only=True)
class AdamW(OptimizerPlugin):
    """Decoupled weight decay (arXiv 1711.05101) of matrices and the head alone."""

    name: ClassVar[str] = "adamw"

    beta1: float = field(default=0.9, validator=and_(ge(0.0), lt(1.0)))
    """Share of the first moment, a mean of gradients, that a step keeps."""
    beta2: float = field(default=0.95, validator=and_(ge(0.0), lt(1.0)))
    """Share of the second moment, a mean of their squares, that a step keeps."""
    eps: float = field(default=1e-8, validator=gt(0.0))
    """Number added to the root of the second moment."""
    weight_decay: float = field(default=0.1, validator=ge(0.0))
    """Weight decay: a step takes this share, times the learning rate, off each weight that decays."""

    def offers(self, site: Site) -> Offers:
        """Offer an elementwise update, with the moments in bf16 or in 8 bits, and off the device."""
        regions = ((OPTIMIZER, "bf16"), (OPTIMIZER, "8bit"), (OPTIMIZER, "offload"))
        return moefw.offers(update=("elementwise",), region=regions)

    def states(self) -> tuple[str, ...]:
        """Names of the moments."""
        return ("exp_avg", "exp_avg_sq")

    def nonnegative_states(self) -> tuple[str, ...]:
        """Name of the second moment."""
        return ("exp_avg_sq",)

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        """Fused ``torch.optim.AdamW``."""
        return fused_adamw(
            parameters,
            lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            decaying=DECAYING,
        )


@moefw.hookimpl
def moefw_optimizers() -> list[type[OptimizerPlugin]]:
    """Declare the optimizer."""
    return [AdamW]
