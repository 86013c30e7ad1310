"""The opened layout: two device meshes over an initialised world."""

from __future__ import annotations

import os
from typing import final

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moefw.core.contracts import Layout
from moefw.plugins.parallel.folded.meshes import DENSE, EXPERT, FoldedPlan


@final
class FoldedLayout(Layout):
    """Groups of one rank are None; without an initialised world, only a world of one can be opened."""

    def __init__(self, plan: FoldedPlan, device: str, ranks_per_node: int | None) -> None:
        self.plan: FoldedPlan = plan
        self.ranks_per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", plan.world))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        if plan.world > 1:
            for axes in (DENSE, EXPERT):
                shape = tuple(plan.sizes[axis] for axis in axes)
                self._meshes[axes] = init_device_mesh(device, shape, mesh_dim_names=axes)

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return the process group over axes of one mesh, or None where it is this rank alone. Collective."""
        if self.size(*axes) == 1:
            return None
        if axes not in self._groups:
            mesh = self._meshes[DENSE if set(axes) <= set(DENSE) else EXPERT]
            over = mesh[axes]
            self._groups[axes] = (over if len(axes) == 1 else over._flatten()).get_group()
        return self._groups[axes]
