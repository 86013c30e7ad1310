"""``sample``: a memory policy."""

from __future__ import annotations

from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=2,<3"


@frozen
class Sample(moefw.MemoryPlugin):
    """Keeps what the regions save for backward, through hooks that see every saved tensor.

    ``mechanism`` is what a region must allow: that it is kept.
    """

    name: ClassVar[str] = "sample"
    mechanism: ClassVar[str] = "keep"

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Return the policy."""
        from moefw_sample.memory import SamplePolicy

        return SamplePolicy()


@moefw.hookimpl
def moefw_memory_policies() -> list[type[moefw.MemoryPlugin]]:
    """Declare the policy."""
    return [Sample]
