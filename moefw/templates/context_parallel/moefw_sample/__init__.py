"""``sample``: context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.ContextParallelPlugin):
    """Gathers the keys and values of all ranks, and attends with a mask of the true places."""

    name: ClassVar[str] = "sample"

    def needs(self, site: moefw.Site) -> Iterator[moefw.Need]:
        """Require an attention that leaves its core to the algorithm, where ranks share sequences."""
        if site.layout.sizes["cp"] > 1:
            yield moefw.need("core", ("sdpa", "flex", "own"), reason="keys are gathered around the core")

    def build(self, context: moefw.BuildContext) -> moefw.ContextAttention:
        """Core of the attention of one layer."""
        from moefw_sample.context_parallel import SampleAttention

        return SampleAttention(context.layout)


@moefw.hookimpl
def moefw_context_parallels() -> list[type[moefw.ContextParallelPlugin]]:
    """Declare the algorithm."""
    return [Sample]
