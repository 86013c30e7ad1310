"""``offload``: a region's activations wait in host memory, or on a disk, between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, le, min_len, optional

import moefw
from moefw.core.plugin import MemoryPlugin
from moefw.core.site import Site

MIN_BYTES = 1 << 20


@frozen
class Offload(MemoryPlugin):
    """Copies what the regions save off the device in forward, and back before their backward.

    ``to`` host: into memory of the machine, page-locked for a GPU; nvme: into files under ``path``, a folder on a
    local disk, that have no name and are gone with the process. Tensors below ``min_bytes`` stay. ``fraction``: at most
    this share of the other bytes that a region saves goes; the same tensors go every time. Parameters stay.
    """

    name: ClassVar[str] = "offload"
    treatment: ClassVar[str] = "offload"

    to: Literal["host", "nvme"] = "host"
    path: str | None = field(default=None, validator=optional(min_len(1)))
    min_bytes: int = field(default=MIN_BYTES, validator=ge(0))
    fraction: float = field(default=1.0, validator=[ge(0.0), le(1.0)])

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Files need a folder, and memory has none."""
        if (self.to == "nvme") == (self.path is not None):
            return []
        if self.path is None:
            what = "with to: nvme, activations wait in files, and nothing says where."
            return [moefw.Problem(what, "Set path to a folder on a local disk.", "to")]
        what = "path is where files lie, and with to: host there are none."
        return [moefw.Problem(what, "Leave path out, or use to: nvme.", "path")]

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Return the policy. Raises PlanError where ``path`` is no folder to write to."""
        from moefw.plugins.memory.offload.policy import OffloadPolicy
        from moefw.plugins.memory.offload.pool import open_pool

        key = (self.name, self.to, self.path)
        pool = context.shared(key, lambda: open_pool(context.device, self.path))
        return OffloadPolicy(pool, min_bytes=self.min_bytes, fraction=self.fraction)


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPlugin]]:
    """Declare the policy."""
    return [Offload]
