"""An opened layout: the process groups of a plan, in a world that the caller has initialised."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moefw.core.contracts import Layout, LayoutPlan
from moefw.core.plugin import LayoutPlugin
from moefw.system.environment import ranks_of_this_machine

TIMEOUT: Final = timedelta(days=1)
"""Timeout of collectives. It is long, because its error names no rank; the watchdog names a rank that hangs earlier."""


@final
class OpenedLayout(Layout):
    """Layout that opens a process group at first use, once for equal ranks. Without a world, there is one rank."""

    def __init__(self, plan: LayoutPlan, device: str, ranks_per_node: int | None = None) -> None:
        self.plan = plan
        self.device = device
        self.ranks_per_node = ranks_per_node or ranks_of_this_machine(plan.world)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._opened: dict[tuple[int, ...], ProcessGroup] = {}
        self._host: ProcessGroup | None = None

    def open(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Process group of ``ranks``, or None if it is this rank alone. Collective over ``ranks``."""
        if len(ranks) == 1:
            return None
        if ranks not in self._opened:
            group = dist.group.WORLD
            if len(ranks) < self.plan.world:
                group = _connected(ranks)
            assert group is not None
            self._opened[ranks] = group
        return self._opened[ranks]

    def host_group(self) -> ProcessGroup | None:
        """Gloo group of all ranks, independent of the backend of the devices."""
        if self._host is None and self.plan.world > 1:
            self._host = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return self._host


def second_group(ranks: tuple[int, ...]) -> ProcessGroup | None:
    """Process group of ``ranks`` with a communicator of its own, or None if it is this rank alone. Collective."""
    if len(ranks) == 1:
        return None
    return _connected(ranks)


def _connected(ranks: tuple[int, ...]) -> ProcessGroup:
    """New process group of ranks, which connect without the others: these may not have such a group, or open it later.

    Of a world that is bound to its GPUs, PyTorch makes groups by ``ncclCommSplit``, and waits there for every rank of
    the world. So the world is not bound meanwhile. The group is told the GPU instead, to connect at once as well.
    """
    world: Any = dist.group.WORLD
    gpu = world.bound_device_id
    world.bound_device_id = None
    try:
        group: ProcessGroup = dist.new_group(
            list(ranks), timeout=TIMEOUT, use_local_synchronization=True, device_id=gpu
        )
    finally:
        world.bound_device_id = gpu
    return group


def open_by(plugin: LayoutPlugin, plan: LayoutPlan, device: str) -> Layout:
    """``plan``, opened by its plugin on this rank of an initialised world."""
    layout = plugin.build(plan, device)
    return OpenedLayout(plan, device, plugin.ranks_per_node) if layout is None else layout
