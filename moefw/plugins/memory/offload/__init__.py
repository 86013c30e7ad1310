"""``offload`` and ``optimizer-offload``: activations and optimizer states stay off the device until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, le, min_len, optional

import moefw
from moefw.core.plugin import MemoryPolicyPlugin, OptimizerMemoryPolicyPlugin
from moefw.core.site import Site

MIN_BYTES = 1 << 20
BUCKET_BYTES = 1 << 26


@frozen
class Offload(MemoryPolicyPlugin):
    """Copies the tensors that regions save off the device in forward, and back before their backward.

    Parameters stay.
    """

    name: ClassVar[str] = "offload"
    mechanism: ClassVar[str] = "offload"

    to: Literal["host", "nvme"] = "host"
    """Place of the copies. ``host``: host memory, page-locked for a GPU.

    ``nvme``: unnamed files under ``path``, which are freed with the process.
    """
    path: str | None = field(default=None, validator=optional(min_len(1)))
    """Folder on a local disk for ``to: nvme``; null with ``to: host``."""
    min_bytes: int = field(default=MIN_BYTES, validator=ge(0))
    """Size in bytes below which a tensor stays."""
    fraction: float = field(default=1.0, validator=[ge(0.0), le(1.0)])
    """Largest share of the other bytes that a region saves which is offloaded, every time the same tensors."""

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problem unless ``path`` is set exactly for ``to``: nvme."""
        if (self.to == "nvme") == (self.path is not None):
            return []
        if self.path is None:
            return [
                moefw.Problem(
                    "with to: nvme, activations wait in files, and nothing says where.",
                    "Set path to a folder on a local disk.",
                    "to",
                )
            ]
        return [
            moefw.Problem(
                "path is where files lie, and with to: host there are none.",
                "Leave path out, or use to: nvme.",
                "path",
            )
        ]

    def build(self, context: moefw.BuildContext) -> moefw.MemoryPolicy:
        """Policy. Raises PlanError where ``path`` is not a writable folder."""
        from moefw.plugins.memory.offload.policy import OffloadPolicy
        from moefw.plugins.memory.offload.pool import open_pool

        key = (self.name, self.to, self.path)
        pool = context.shared(key, lambda: open_pool(context.device, self.path))
        return OffloadPolicy(pool, min_bytes=self.min_bytes, fraction=self.fraction)


@frozen
class OptimizerOffload(OptimizerMemoryPolicyPlugin):
    """Keeps the optimizer's states in host memory, page-locked for a GPU; parameters stay on the device."""

    name: ClassVar[str] = "optimizer-offload"
    mechanism: ClassVar[str] = "offload"

    update: Literal["host", "device"] = "device"
    """Place of the update.

    ``host``: the CPU updates states; gradients and parameters are copied to the host, new parameters back. ``device``:
    states are copied to the device for their update, and back.
    """
    bucket_bytes: int = field(default=BUCKET_BYTES, validator=ge(1 << 10))
    """Largest size of a bucket in bytes, at least 1024. Two buckets are in flight."""

    def build(self, context: moefw.BuildContext) -> moefw.OptimizerPolicy:
        """Policy."""
        from moefw.plugins.memory.offload.buffers import STATES, host_memory
        from moefw.plugins.memory.offload.states import OffloadStatesPolicy
        from moefw.plugins.memory.offload.streams import open_transfers
        from moefw_kernels.devices import runs_ahead

        transfers = context.shared(self.name, lambda: open_transfers(context.device))
        allocate = host_memory(pinned=runs_ahead(context.device), words=STATES)
        return OffloadStatesPolicy(transfers, allocate, update=self.update, bucket_bytes=self.bucket_bytes)


@moefw.hookimpl
def moefw_memory_policies() -> list[type[MemoryPolicyPlugin]]:
    """Declare the policies."""
    return [Offload, OptimizerOffload]
