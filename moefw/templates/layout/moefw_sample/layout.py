"""The runtime part of ``sample``: its process groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

import moefw
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from moefw_sample.meshes import SamplePlan


@final
class SampleLayout(moefw.Layout):
    """Groups of one rank are None; without an initialised world, only a world of one can be opened."""

    def __init__(self, plan: SamplePlan, device: str) -> None:
        self.plan = plan
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", plan.world))
        self._mesh = None
        if plan.world > 1:
            shape = (plan.sizes["edp"], plan.ep)
            self._mesh = init_device_mesh(device, shape, mesh_dim_names=("edp", "ep"))

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return the process group over axes of one mesh, or None where it is this rank alone."""
        size = self.size(*axes)
        if size == 1 or self._mesh is None:
            return None
        if size == self.plan.world:
            return dist.group.WORLD
        return self._mesh.get_group("ep" if "ep" in axes else "edp")
