"""``optimizer-bf16``: the optimizer's states rest in bf16, two bytes each; parameters stay fp32 masters."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

import moefw
from moefw.core.plugin import MemoryPolicyPlugin, OptimizerMemoryPolicyPlugin


@frozen
class OptimizerBF16(OptimizerMemoryPolicyPlugin):
    """Keeps the optimizer's states in bf16 between steps. Every update is the optimizer's own, in fp32."""

    name: ClassVar[str] = "optimizer-bf16"
    mechanism: ClassVar[str] = "bf16"
    rounds: ClassVar[bool] = True

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of states to bf16. ``stochastic``: up or down at random, without bias.

    ``nearest``: a state that changes by less than half a unit in its last place per step does not change, as happens to
    second moments with ``beta2`` near 1.
    """

    def build(self, context: moefw.BuildContext) -> moefw.OptimizerPolicy:
        """Policy."""
        from moefw.plugins.memory.optimizer_bf16.states import BF16Policy

        return BF16Policy(stochastic=self.rounding == "stochastic")


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPolicyPlugin]]:
    """Declare the policy."""
    return [OptimizerBF16]
