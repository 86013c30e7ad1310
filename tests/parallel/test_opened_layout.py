"""Process groups of a layout, as PyTorch is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from moefw.runtime.parallel.meshes import Mesh, MeshPlan
from moefw.runtime.parallel.opened_layout import OpenedLayout, second_group

GPU = torch.device("cuda", 3)


@pytest.fixture(params=[GPU, None], ids=["nccl", "gloo"])
def bound(request: pytest.FixtureRequest) -> Iterator[torch.device | None]:
    """The GPU to which a world is bound, as NCCL's is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = request.param
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["the layout", "a second group"])
def test_ranks_connect_without_those_that_are_not_in_their_group(
    way: str, bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a world that is bound to its GPUs, PyTorch splits a group with ncclCommSplit, for which all its ranks must call."""
    seen: list[Any] = []

    def opened(*_: Any, **options: Any) -> Any:
        seen.append((dist.group.WORLD.bound_device_id, options["use_local_synchronization"], options["device_id"]))
        return dist.group.WORLD

    monkeypatch.setattr(dist, "new_group", create_autospec(dist.new_group, side_effect=opened))
    of_four = MeshPlan(
        dense=Mesh((("pp", 4), ("dp", 1), ("cp", 1), ("tp", 1))),
        experts=Mesh((("pp", 4), ("edp", 1), ("ep", 1), ("etp", 1))),
    )
    open_group = OpenedLayout(of_four, "cuda").open if way == "the layout" else second_group
    assert open_group((0, 3)) is dist.group.WORLD
    assert seen == [(None, True, bound)]
    assert dist.group.WORLD.bound_device_id == bound, "what others open is as it was"
