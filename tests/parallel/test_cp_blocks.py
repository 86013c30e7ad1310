"""Blocks of ranks that share sequences of their own are a layout with a smaller cp and more copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layout_cases import folded
from moefw import ContractError
from moefw.compose.build import LayerContext
from moefw.runtime.attention.mask import Mask
from moefw.runtime.parallel.cp_blocks import BlockPlan, block_sizes
from moefw.runtime.parallel.meshes import Mesh, MeshPlan


@pytest.mark.parametrize(("cp", "sizes"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 6)), (12, (1, 2, 4, 12)), (9, (1, 9))])
def test_each_size_of_a_block_is_whole_smaller_ones(cp: int, sizes: tuple[int, ...]) -> None:
    assert block_sizes(cp) == sizes


@pytest.mark.parametrize("order", ["dp cp tp", "cp tp dp", "tp dp cp"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_block_is_the_cp_of_a_mesh_with_more_copies(order: str, size: int) -> None:
    whole = folded(cp=4, tp=2, order=tuple(order.split()), ep=4).plan(16)
    assert isinstance(whole, MeshPlan)
    places = [
        place
        for axis, ranks in whole.dense.places
        for place in ([("dp", ranks // size), ("cp", size)] if axis == "cp" else [(axis, ranks)])
    ]
    mesh, blocks = Mesh(tuple(places)), BlockPlan(whole, size)
    assert blocks.sizes["cp"] == size
    assert blocks.sizes["dp"] == mesh.size("dp")
    for rank in range(16):
        assert blocks.coordinates(rank)["cp"] == mesh.coordinates(rank)["cp"]
        assert blocks.copies(rank, "experts") == whole.copies(rank, "experts")
        for axes in (("cp",), ("dp",), ("dp", "cp"), ("cp", "tp"), ("dp", "tp"), ("tp",), ("dp", "cp", "tp")):
            assert blocks.group(rank, axes) == mesh.group(rank, axes), axes
        assert blocks.group(rank, ("ep",)) == whole.group(rank, ("ep",))


def test_an_attention_whose_mask_does_not_say_who_shares_its_batch_is_told() -> None:
    """It would compute with the keys of other sequences, or wait for ranks that do not come."""
    context: Any = SimpleNamespace(context_attentions={None: 0, 2: 0}, layouts={None: 0, 1: 0, 2: 0})
    core = LayerContext._core(context, lambda q, k, v, mask, **options: (q + 1, q))
    q = torch.zeros(1, 1, 2, 4)
    assert torch.equal(core(q, q, q, Mask(cp=1)), q + 1)
    with pytest.raises(ContractError, match=r"does not say how many ranks share its batch\. Make it by Mask\.of"):
        core(q, q, q, Mask())
