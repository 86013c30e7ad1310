"""``keep``: a region's activations stay in memory."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import MemoryPlugin


@frozen
class Keep(MemoryPlugin):
    """Keeps what the regions save. This is what happens without a policy; naming it refuses regions that cannot."""

    name: ClassVar[str] = "keep"
    treatment: ClassVar[str] = "keep"
    passive: ClassVar[bool] = True

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Return the policy."""
        from moefw.plugins.memory.keep.policy import KeepPolicy

        return KeepPolicy()


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPlugin]]:
    """Declare the policy."""
    return [Keep]
