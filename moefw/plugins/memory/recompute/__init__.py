"""``recompute``: a region's activations are dropped and computed again in backward."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import MemoryPolicyPlugin
from moefw.core.site import Site


@frozen
class Recompute(MemoryPolicyPlugin):
    """Runs the regions again in backward, up to the last saved tensor that is needed."""

    name: ClassVar[str] = "recompute"
    mechanism: ClassVar[str] = "recompute"
    runs_again: ClassVar[bool] = True

    def offers(self, site: Site) -> moefw.Offers:
        """Offers: the same regions run again at every step."""
        return moefw.offers(replays=moefw.ANY)

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Policy."""
        from moefw.plugins.memory.recompute.policy import RecomputePolicy

        return RecomputePolicy()


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPolicyPlugin]]:
    """Declare the policy."""
    return [Recompute]
