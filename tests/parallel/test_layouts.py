"""Parallel layouts: rank -> coordinates -> groups by arithmetic, compared with slices of arrays of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layout_cases import (
    ALL_AXES,
    MAX_WORLD,
    Built,
    couplings,
    folded,
    foldings,
    layouts,
    plans,
)
from moefw.core.errors import PlanError, PluginError
from moefw.core.plugin import LayoutPlugin
from moefw.core.records import Side
from moefw.plugins.parallel.coupled import Coupled
from moefw.plugins.parallel.folded import Folded
from moefw.runtime.parallel.meshes import COPIES, DENSE, EXPERT, Mesh, MeshPlan
from python_lines import at_most


def cut(world: int, places: Sequence[tuple[str, int]], over: Sequence[str]) -> set[tuple[int, ...]]:
    """Return the groups over axes in another way: from an array with a dimension for each place, sliced along the others."""
    ranks = np.arange(world).reshape([size for _, size in places])
    kept = [n for n, (axis, _) in enumerate(places) if axis not in over]
    rows = ranks.transpose([*kept, *(n for n in range(len(places)) if n not in kept)])
    size = math.prod(size for axis, size in places if axis in over)
    return {tuple(sorted(row.tolist())) for row in rows.reshape(-1, size)}


def groups(plan: MeshPlan, axes: Sequence[str]) -> set[tuple[int, ...]]:
    met: set[int] = set()
    found = set()
    for rank in range(plan.world):
        if rank not in met:
            group = plan.group(rank, axes)
            assert rank in group
            assert met.isdisjoint(group), "groups overlap"
            met.update(group)
            found.add(group)
    return found


@given(foldings(), st.data())
def test_folded_groups_are_an_array_of_ranks_in_the_order_cut_along_the_axes(built: Built, data: st.DataObject) -> None:
    layout, plan = built
    assert isinstance(layout, Folded)
    dense, experts = layout.dense, layout.experts
    stage = plan.world // layout.pp
    sizes = {"dp": stage // dense.cp // dense.tp, "cp": dense.cp, "tp": dense.tp}
    sizes |= {"edp": stage // experts.ep // experts.etp, "ep": experts.ep, "etp": experts.etp}
    order = data.draw(st.sampled_from([dense.order, experts.order]))
    places = [("pp", layout.pp), *((axis, sizes[axis]) for axis in order)]
    axes = data.draw(st.lists(st.sampled_from(["pp", *order]), unique=True))
    assert groups(plan, axes) == cut(plan.world, places, axes)


@given(couplings(), st.data())
def test_coupled_groups_are_one_array_of_ranks_cut_along_the_axes(built: Built, data: st.DataObject) -> None:
    layout, plan = built
    assert isinstance(layout, Coupled)
    pp, cp, tp, ep = layout.pp, layout.cp, layout.tp, layout.ep
    outer = plan.world // (pp * ep * cp * tp)
    mesh = data.draw(st.sampled_from([DENSE, EXPERT]))
    names = ("dp", "dp", "cp", "tp") if mesh == DENSE else ("edp", "ep", "edp", "etp")
    places = [("pp", pp), *zip(names, (outer, ep, cp, tp), strict=True)]
    axes = data.draw(st.lists(st.sampled_from(mesh), unique=True))
    assert groups(plan, axes) == cut(plan.world, places, axes)


@given(plans(max_world=96), st.data())
def test_a_group_is_the_ranks_that_share_all_other_coordinates(plan: MeshPlan, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([DENSE, EXPERT]))
    axes = data.draw(st.lists(st.sampled_from(mesh), unique=True))
    places = [plan.coordinates(rank) for rank in range(plan.world)]
    others = [axis for axis in mesh if axis not in axes]
    for rank, place in enumerate(places):
        alike = tuple(r for r, other in enumerate(places) if all(other[axis] == place[axis] for axis in others))
        assert plan.group(rank, axes) == alike


@given(plans(), st.data())
def test_a_coordinate_is_the_position_in_the_group_over_the_axis(plan: MeshPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.world - 1))
    place = plan.coordinates(rank)
    assert place.keys() == plan.sizes.keys() == {*DENSE, *EXPERT}
    for axis, size in plan.sizes.items():
        group = plan.group(rank, (axis,))
        assert (len(group), group.index(rank)) == (size, place[axis])


@given(plans(), st.data())
def test_both_meshes_have_the_same_pipeline_stages(plan: MeshPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.world - 1))
    stage = plan.world // plan.sizes["pp"]
    first = rank // stage * stage
    assert plan.coordinates(rank)["pp"] == rank // stage
    assert plan.group(rank, ("edp", "ep", "etp")) == plan.group(rank, ("dp", "cp", "tp"))
    assert plan.group(rank, ("dp", "cp", "tp")) == tuple(range(first, first + stage))
    assert plan.group(rank, ("pp",)) == tuple(range(rank % stage, plan.world, stage))
    assert plan.group(rank, EXPERT) == plan.group(rank, DENSE) == tuple(range(plan.world))


@given(plans(), st.data())
def test_a_group_meets_each_group_over_the_other_axes_once(plan: MeshPlan, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([DENSE, EXPERT]))
    axes = data.draw(st.lists(st.sampled_from(mesh), unique=True))
    others = [axis for axis in mesh if axis not in axes]
    group = plan.group(data.draw(st.integers(0, plan.world - 1)), axes)
    met = [one for member in group for one in plan.group(member, others)]
    assert sorted(met) == list(range(plan.world))


@given(plans(), st.data())
def test_the_parts_of_an_expert_are_neighbours_in_its_group(plan: MeshPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.world - 1))
    place, etp = plan.group(rank, ("ep", "etp")).index(rank), plan.sizes["etp"]
    assert place // etp == plan.group(rank, ("ep",)).index(rank)
    assert place % etp == plan.group(rank, ("etp",)).index(rank)


@given(couplings(), st.data())
def test_coupled_experts_go_by_the_groups_of_attention(built: Built, data: st.DataObject) -> None:
    _, plan = built
    rank = data.draw(st.integers(0, plan.world - 1))
    assert plan.group(rank, ("etp",)) == plan.group(rank, ("tp",))
    assert set(plan.group(rank, ("ep",))) <= set(plan.group(rank, ("dp",)))
    assert set(plan.group(rank, ("edp",))) <= set(plan.group(rank, ("dp", "cp")))
    assert set(plan.group(rank, ("edp",))) >= set(plan.group(rank, ("cp",)))
    assert plan.group(rank, ("edp", "ep")) == plan.group(rank, ("dp", "cp"))


@given(couplings(max_world=64))
def test_coupled_is_folded_where_each_expert_axis_has_one_place(built: Built) -> None:
    layout, plan = built
    assert isinstance(layout, Coupled)
    assume(layout.cp == 1 or plan.sizes["dp"] == layout.ep)
    order = ("edp", "ep", "etp") if layout.cp == 1 else ("ep", "edp", "etp")
    same = folded(pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep, etp=layout.tp, e_order=order)
    other = same.plan(plan.world)
    assert plan.sizes == other.sizes
    for axes in ALL_AXES:
        assert groups(plan, axes) == groups(other, axes)


@given(layouts(), st.sampled_from(list(COPIES)), st.data())
def test_copies_are_the_ranks_with_the_same_parameters_in_rows_of_neighbours(
    built: Built, side: Side, data: st.DataObject
) -> None:
    layout, plan = built
    if isinstance(layout, Folded):
        asked = layout.dense.shard if side == "dense" else layout.experts.shard
    else:
        assert isinstance(layout, Coupled)
        asked = layout.shard if side == "dense" else layout.expert_shard
    rank = data.draw(st.integers(0, plan.world - 1))
    sharing = ("dp", "cp") if side == "dense" else ("edp",)
    alike = list(plan.group(rank, sharing))
    rows = plan.copies(rank, side)
    each = len(alike) if asked == "all" else asked
    assert [len(row) for row in rows] == [each] * (len(alike) // each)
    assert list(itertools.chain(*rows)) == alike
    assert plan.copies(data.draw(st.sampled_from(alike)), side) == rows


def test_a_world_of_16_as_in_megatron() -> None:
    plan = folded(pp=2, tp=2, ep=8).plan(16)
    assert plan.sizes == {"pp": 2, "dp": 4, "cp": 1, "tp": 2, "edp": 1, "ep": 8, "etp": 1}
    assert groups(plan, ("tp",)) == {(rank, rank + 1) for rank in range(0, 16, 2)}
    assert groups(plan, ("dp",)) == {(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)}
    assert groups(plan, ("pp",)) == {(rank, rank + 8) for rank in range(8)}
    assert groups(plan, ("ep",)) == {tuple(range(8)), tuple(range(8, 16))}


def test_a_world_of_256_as_in_megatron() -> None:
    plan = folded(pp=4, tp=4, cp=2, ep=64).plan(256)
    assert plan.sizes == {"pp": 4, "dp": 8, "cp": 2, "tp": 4, "edp": 1, "ep": 64, "etp": 1}
    assert plan.group(70, ("tp",)) == (68, 69, 70, 71)
    assert plan.group(70, ("cp",)) == (66, 70)
    assert plan.group(70, ("dp",)) == tuple(range(70, 128, 8))
    assert plan.group(70, ("ep",)) == tuple(range(64, 128))


def test_ranks_of_a_sequence_are_the_ranks_of_the_experts() -> None:
    plan = folded(cp=8, ep=8).plan(8)
    assert plan.group(3, ("cp",)) == plan.group(3, ("ep",)) == tuple(range(8))


def test_without_ep_the_copies_of_an_expert_hold_the_ranks_of_tp() -> None:
    plan = folded(tp=2, ep=1, etp=1).plan(4)
    assert plan.copies(0, "experts") == ((0,), (1,), (2,), (3,))
    assert plan.copies(0, "dense") == ((0,), (2,))
    assert set(plan.group(1, ("edp",))) > set(plan.group(1, ("tp",)))
    halved = folded(tp=4, ep=1, etp=2).plan(8)
    assert halved.group(5, ("edp",)) == (1, 3, 5, 7)
    assert halved.group(5, ("tp",)) == (4, 5, 6, 7)


def test_the_last_axis_of_an_order_joins_neighbours() -> None:
    plan = folded(tp=2, cp=2, ep=2, order=("tp", "dp", "cp"), e_order=("ep", "etp", "edp")).plan(8)
    assert plan.group(5, ("cp",)) == (4, 5)
    assert plan.group(5, ("dp",)) == (5, 7)
    assert plan.group(5, ("tp",)) == (1, 5)
    assert plan.group(5, ("ep",)) == (1, 5)
    assert plan.group(5, ("edp",)) == (4, 5, 6, 7)
    assert plan.group(5, ()) == (5,)


def test_coupled_expert_groups_by_hand() -> None:
    plan = Coupled(dp=4, cp=2, tp=2, ep=2).plan(None)
    assert plan.sizes == {"pp": 1, "dp": 4, "cp": 2, "tp": 2, "edp": 4, "ep": 2, "etp": 2}
    assert plan.group(0, ("ep",)) == (0, 4)
    assert plan.group(0, ("ep", "etp")) == (0, 1, 4, 5)
    assert plan.group(0, ("edp",)) == (0, 2, 8, 10)
    assert [plan.coordinates(rank)["edp"] for rank in (0, 2, 8, 10)] == [0, 1, 2, 3]


def test_copies_by_hand() -> None:
    assert folded(tp=2, shard="all").plan(8).copies(3, "dense") == ((1, 3, 5, 7),)
    assert folded(tp=2, shard=2).plan(8).copies(3, "dense") == ((1, 3), (5, 7))
    assert folded(ep=2, e_shard=2).plan(8).copies(3, "experts") == ((1, 3), (5, 7))
    assert folded(ep=2, shard=2).plan(8).shards == {"dense": 2, "experts": 1}
    assert folded(shard=4, tp=2).plan(None).world == 8
    assert folded(e_shard=4, ep=2).plan(None).world == 8


def test_axes_of_two_meshes_have_no_group() -> None:
    plan = folded(ep=2).plan(2)
    for axes in (("dp", "ep"), ("zp",), ("pp", "tp", "etp")):
        with pytest.raises(ValueError, match="not axes of one mesh"):
            plan.group(0, axes)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_place(rank: int) -> None:
    plan = folded(ep=2).plan(8)
    for ask in (plan.coordinates, lambda rank: plan.group(rank, ("ep",)), lambda rank: plan.copies(rank, "dense")):
        with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 8"):
            ask(rank)


def dense_mesh(*, pp: int = 1, dp: int = 2) -> Mesh:
    return Mesh((("pp", pp), ("dp", dp), ("cp", 1), ("tp", 1)))


def expert_mesh(*, pp: int = 1, ep: int = 2) -> Mesh:
    return Mesh((("pp", pp), ("edp", 1), ("ep", ep), ("etp", 1)))


@pytest.mark.parametrize(
    ("dense", "experts", "shards", "says"),
    [
        (dense_mesh(), expert_mesh(ep=4), {"dense": 1, "experts": 1}, "the same ranks"),
        (dense_mesh(), expert_mesh(pp=2, ep=1), {"dense": 1, "experts": 1}, "the same pipeline stages"),
        (
            Mesh((("dp", 2), ("pp", 1))),
            Mesh((("dp", 2), ("ep", 1))),
            {"dense": 1, "experts": 1},
            "stages are outermost",
        ),
        (dense_mesh(), dense_mesh(), {"dense": 1, "experts": 1}, "all of its axes"),
        (
            dense_mesh(),
            expert_mesh(),
            {"dense": 2, "experts": 2},
            "shards of experts divide the copies: there are 2 shards and edp = 1 copies",
        ),
    ],
)
def test_meshes_that_do_not_go_together_are_no_plan(dense: Mesh, experts: Mesh, shards: Any, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        MeshPlan(dense=dense, experts=experts, shards=shards)


@pytest.mark.parametrize(
    "layout",
    [
        folded(pp=8, cp=2, tp=8, ep=64, etp=1),
        folded(tp=8, ep=32, etp=4, order=("tp", "cp", "dp"), e_order=("ep", "etp", "edp"), shard="all", e_shard=2),
        Coupled(pp=4, cp=2, tp=8, ep=16, shard="all", expert_shard=2),
    ],
)
def test_a_world_of_4096_ranks_is_listed_in_1000_lines_of_python_a_rank(layout: LayoutPlugin) -> None:
    with at_most(lines=1000 * MAX_WORLD):
        plan = layout.plan(MAX_WORLD)
        assert isinstance(plan, MeshPlan)
        for rank in range(plan.world):
            plan.coordinates(rank)
        for axes in ALL_AXES:
            assert sum(map(len, groups(plan, axes))) == MAX_WORLD
        for side in COPIES:
            assert plan.copies(MAX_WORLD - 1, side)


def test_no_size_is_too_large_for_arithmetic() -> None:
    with at_most(lines=200_000):
        assert folded(ep=2**40).plan(2**62).sizes["edp"] == 2**22
        with pytest.raises(PlanError, match=r"Use dense.shard: 1\."):
            folded(shard=2**60).plan(2**61 - 1)
