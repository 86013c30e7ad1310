"""``optimizer-8bit``: the optimizer's states rest as codes of one byte, with a scale for each block of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from attrs import Attribute, field, frozen

import moefw
from moefw.core.plugin import MemoryPolicyPlugin, OptimizerMemoryPolicyPlugin
from moefw.core.site import Site
from moefw.plugins.memory.optimizer_8bit.cuts import LARGEST_BLOCK, SMALLEST_BLOCK, fix_of_cuts


def _check_block(plugin: Any, attribute: Attribute[int], value: int) -> None:
    """Raise ValueError unless ``value`` is a power of two within the limits."""
    if not SMALLEST_BLOCK <= value <= LARGEST_BLOCK or value & (value - 1):
        raise ValueError(f"is {value}; it must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}")


@frozen
class Optimizer8bit(OptimizerMemoryPolicyPlugin):
    """Keeps the optimizer's states of matrices in 8 bits between steps. Every update is the optimizer's, in fp32."""

    name: ClassVar[str] = "optimizer-8bit"
    mechanism: ClassVar[str] = "8bit"
    rounds: ClassVar[bool] = True
    update_rtol: ClassVar[float] = 0.2

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of states to codes. ``stochastic``: up or down at random, without bias.

    ``nearest``: the codes of torchao's 8-bit optimizers. A state that changes by less than half the distance of two
    codes per step does not change.
    """
    block: int = field(default=256, validator=_check_block)
    """Number of neighbouring values of a row that share a scale, a power of two from 16 to 4096.

    No rank may store a part of a block.
    """

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem if the down projections of experts are cut inside blocks by expert tensor parallelism."""
        etp = site.layout.size("etp")
        columns = site.dims.expert_dim // etp
        if etp == 1 or columns % self.block == 0:
            return []
        what = (
            f"blocks of {self.block} values have one scale, and the layout, with etp: {etp}, cuts the "
            f"{site.dims.expert_dim} columns of the experts' down projections into parts of {columns}."
        )
        return [moefw.Problem(what, fix_of_cuts([columns]), "block")]

    def build(self, context: moefw.BuildContext) -> moefw.OptimizerPolicy:
        """Policy."""
        from moefw.plugins.memory.optimizer_8bit.states import EightBitPolicy

        return EightBitPolicy(stochastic=self.rounding == "stochastic", block=self.block)


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPolicyPlugin]]:
    """Declare the policy."""
    return [Optimizer8bit]
