"""``sample``: a memory policy."""

from __future__ import annotations

from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.MemoryPolicyPlugin):
    """Keeps the tensors that regions save for backward, through hooks that see each of them.

    ``mechanism`` is the treatment that a region must allow: keep.
    """

    name: ClassVar[str] = "sample"
    mechanism: ClassVar[str] = "keep"

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Policy."""
        from moefw_sample.memory_policy import SamplePolicy

        return SamplePolicy()


@moefw.hookimpl
def moefw_memory_policies() -> list[type[moefw.MemoryPolicyPlugin]]:
    """Declare the policy."""
    return [Sample]
