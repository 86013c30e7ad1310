"""Parallel layouts: rank -> coordinates -> groups by arithmetic, held against arrays of ranks that are cut up."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st

from moefw.cli import cli
from moefw.core.contracts import Side
from moefw.core.errors import PlanError, Problem
from moefw.core.meshes import COPIES, DENSE, EXPERT, Mesh, MeshPlan
from moefw.core.plugin import LayoutPlugin
from moefw.core.site import Dims, Machine, Site
from moefw.core.source import Marks
from moefw.core.structure import structure
from moefw.plugins.parallel.coupled import Coupled
from moefw.plugins.parallel.folded import DenseMesh, ExpertMesh, Folded

GUIDE = (Path(__file__).parent.parent / "docs" / "parallel-layouts.md").read_text()
MAX_WORLD = 4096
SIZES = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 8, 16])
SHARDS = st.sampled_from([1, 1, 2, 3, 4, "all"])
DENSE_ORDERS = list(itertools.permutations(("dp", "cp", "tp")))
EXPERT_ORDERS = [("edp", "ep", "etp"), ("ep", "edp", "etp"), ("ep", "etp", "edp")]
ALL_AXES = [axes for mesh in (DENSE, EXPERT) for count in range(5) for axes in itertools.combinations(mesh, count)]

Built = tuple[LayoutPlugin, MeshPlan]


def folded(
    *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1, ep: int = 1, etp: int = 1, **also: Any
) -> Folded:
    """The options of both meshes in one row: ``order`` and ``shard`` of the dense one, ``e_order`` and ``e_shard``."""
    dense = {key: value for key, value in also.items() if not key.startswith("e_")}
    experts = {key.removeprefix("e_"): value for key, value in also.items() if key.startswith("e_")}
    return Folded(pp=pp, dense=DenseMesh(dp=dp, cp=cp, tp=tp, **dense), experts=ExpertMesh(ep=ep, etp=etp, **experts))


def drawn_plan(draw: st.DrawFn, layout: LayoutPlugin, max_world: int) -> MeshPlan:
    smallest = layout.plan(None).world
    assume(smallest <= max_world)
    plan = layout.plan(smallest * draw(st.integers(1, max_world // smallest)))
    assert isinstance(plan, MeshPlan)
    return plan


@st.composite
def foldings(draw: st.DrawFn, max_world: int = MAX_WORLD) -> Built:
    sizes = {axis: draw(SIZES) for axis in ("pp", "cp", "tp", "ep", "etp")}
    orders = {"order": draw(st.sampled_from(DENSE_ORDERS)), "e_order": draw(st.sampled_from(EXPERT_ORDERS))}
    layout = folded(**sizes, **orders, shard=draw(SHARDS), e_shard=draw(SHARDS))
    return layout, drawn_plan(draw, layout, max_world)


@st.composite
def couplings(draw: st.DrawFn, max_world: int = MAX_WORLD) -> Built:
    sizes = {axis: draw(SIZES) for axis in ("pp", "cp", "tp", "ep")}
    layout = Coupled(**sizes, shard=draw(SHARDS), expert_shard=draw(SHARDS))
    return layout, drawn_plan(draw, layout, max_world)


def layouts(max_world: int = MAX_WORLD) -> st.SearchStrategy[Built]:
    return st.one_of(foldings(max_world), couplings(max_world))


def plans(max_world: int = MAX_WORLD) -> st.SearchStrategy[MeshPlan]:
    return layouts(max_world).map(lambda built: built[1])


def cut(world: int, places: Sequence[tuple[str, int]], over: Sequence[str]) -> set[tuple[int, ...]]:
    """The groups over axes by another way: an array with a dimension for each place, cut up along the others."""
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


@given(st.one_of(SIZES, st.none()), SIZES, SIZES, SIZES, SIZES, SHARDS, SHARDS, st.data())
def test_the_smallest_world_is_the_first_that_fits(
    dp: int | None,
    pp: int,
    cp: int,
    tp: int,
    ep: int,
    shard: int | str,
    e_shard: int | str,
    data: st.DataObject,
) -> None:
    etp = data.draw(SIZES)
    for layout in (
        folded(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, shard=shard, e_shard=e_shard),
        Coupled(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, shard=shard, expert_shard=e_shard),
    ):
        smallest = fits(layout, None)
        assume(smallest is None or smallest.world < 2000)
        fitting = [world for world in range(1, 300) if fits(layout, world)]
        if smallest is None:
            assert dp
            assert not fitting
        else:
            assert fitting[:1] == [smallest.world] * (smallest.world < 300)
            assert fits(layout, smallest.world) == smallest


def fits(layout: LayoutPlugin, world: int | None) -> MeshPlan | None:
    try:
        plan = layout.plan(world)
    except PlanError as error:
        (problem,) = error.problems
        assert problem.what.endswith(".")
        assert problem.fix.endswith(".")
        return None
    assert isinstance(plan, MeshPlan)
    assert world in (None, plan.world)
    return plan


def number_in(fix: str) -> int:
    *_, number = (int(word) for word in fix.replace(".", " ").replace(",", " ").split() if word.isdigit())
    return number


@given(st.data(), st.integers(1, 64) | st.none(), st.integers(-1, MAX_WORLD) | st.none())
def test_an_error_names_a_number_that_helps(data: st.DataObject, dp: int | None, world: int | None) -> None:
    sizes = {axis: data.draw(SIZES) for axis in ("pp", "cp", "tp", "ep", "etp")}
    shards = {"shard": data.draw(SHARDS), "e_shard": data.draw(SHARDS)}
    try:
        plan = folded(**sizes, **shards, dp=dp).plan(world)
    except PlanError as error:
        (problem,) = error.problems
    else:
        assert plan.sizes.items() >= sizes.items()
        assert dp in (None, plan.sizes["dp"])
        return
    number = number_in(problem.fix)
    if "dense.dp" in problem.fix:
        assert folded(**sizes, dp=number).plan(None).sizes["dp"] == number
        assert folded(**sizes).plan(None)
    elif "shard" in problem.fix:
        key = "shard" if "dense.shard" in problem.fix else "e_shard"
        assert shards[key] != "all"
        assert 1 <= number < int(shards[key])
        after = fits(folded(**sizes, dp=dp, **{key: number}), world)
        assert after is not None
        assert number in after.shards.values()
    else:
        assert world is not None
        assert problem.what.startswith(f"{world} ranks do not fit")
        smaller = {} if dp else shards
        assert folded(**sizes, **smaller, dp=dp).plan(number).world == number


@pytest.mark.parametrize(
    ("layout", "world", "says"),
    [
        (
            folded(ep=2),
            3,
            "3 ranks do not fit this layout, which wants a multiple of 2 = pp 1 x lcm(dp x cp x tp = 1, ep x etp = 2)."
            " Start 4 ranks, or change the sizes.",
        ),
        (
            folded(pp=2, dp=4, ep=2),
            16,
            "16 ranks do not fit this layout, which wants exactly 8 = pp 2 x lcm(dp x cp x tp = 4, ep x etp = 2)."
            " Start 8 ranks, or change the sizes.",
        ),
        (
            folded(dp=2, tp=3, ep=4),
            None,
            "ep 4 x etp 1 = 4 does not divide dp x cp x tp = 6. Leave dense.dp out, or use dense.dp: 4.",
        ),
        (
            folded(cp=2, shard=8),
            12,
            "dense.shard 8 does not divide dp x cp = 12, the copies of each parameter. Use dense.shard: 6.",
        ),
        (
            folded(ep=4, e_shard=5),
            24,
            "experts.shard 5 does not divide edp = 6, the copies of each parameter. Use experts.shard: 3.",
        ),
        (
            folded(dp=4, shard=8),
            None,
            "dense.shard 8 does not divide dp x cp = 4, the copies of each parameter. Use dense.shard: 4.",
        ),
        (Coupled(dp=4, ep=3), None, "ep 3 does not divide dp 4. Leave dp out, or use dp: 3."),
        (
            Coupled(ep=2, tp=2),
            6,
            "6 ranks do not fit this layout, which wants a multiple of 4 = pp 1 x ep 2 x cp 1 x tp 2."
            " Start 8 ranks, or change the sizes.",
        ),
        (
            Coupled(dp=4, ep=2, tp=2),
            16,
            "16 ranks do not fit this layout, which wants exactly 8 = pp 1 x dp 4 x cp 1 x tp 2."
            " Start 8 ranks, or change the sizes.",
        ),
        (
            Coupled(ep=2, cp=2, expert_shard=3),
            8,
            "expert_shard 3 does not divide dp / ep x cp = 4, the copies of each parameter. Use expert_shard: 2.",
        ),
    ],
)
def test_errors_are_sentences(layout: LayoutPlugin, world: int | None, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        layout.plan(world)
    assert str(caught.value) == says


def read(options: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    structure(Folded, options, (), Marks("spec"), problems)
    return problems


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"dense": {"order": ["dp", "dp", "tp"]}},
            "this is no order of a mesh: cp is missing, dp stands there 2 times. Name each of dp, cp, tp once.",
        ),
        (
            {"experts": {"order": ["ep", "etp"]}},
            "this is no order of a mesh: edp is missing. Name each of edp, ep, etp once.",
        ),
        (
            {"experts": {"order": ["etp", "edp", "ep"]}},
            "etp stands before ep, and dispatch libraries (DeepEP, HybridEP) number the experts of a group by "
            "consecutive ranks. Name etp after ep.",
        ),
        ({"dense": {"shard": 0}}, "shard 0 is less than one rank. Use a number from 1, or all."),
        ({"experts": {"shard": "full"}}, "'full' is not a whole number or all."),
    ],
)
def test_options_that_cannot_be_are_refused_as_sentences(options: dict[str, Any], says: str) -> None:
    (problem,) = read(options)
    assert f"{problem.what} {problem.fix}".strip() == says


def test_an_axis_of_the_other_mesh_is_not_in_the_order() -> None:
    (problem,) = read({"dense": {"order": ["dp", "cp", "etp"]}})
    assert problem.fix == "Did you mean 'tp'?"
    with pytest.raises(ValueError, match="etp is not one of its axes"):
        DenseMesh(order=("dp", "cp", "tp", "etp"))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (folded(pp=2, cp=3, tp=4, ep=5, etp=6), {"pp": "pp", "dense.cp": "cp", "dense.tp": "tp"}),
        (folded(tp=2), {"dense.tp": "tp"}),
        (folded(ep=2, etp=2, shard="all"), {}),
        (Coupled(pp=2, cp=3, tp=4, ep=5), {"pp": "pp", "cp": "cp", "tp": "tp"}),
        (Coupled(ep=2), {}),
    ],
)
def test_a_layout_asks_for_a_model_that_splits_along_its_axes(layout: LayoutPlugin, options: dict[str, str]) -> None:
    dims = Dims(model_dim=8, expert_dim=8, num_experts=4, top_k=1)
    needs = layout.needs(Site(dims=dims, layer=0, world=8, machine=Machine()))
    assert {need.option: (need.fact, need.value) for need in needs} == {
        option: ("split", axis) for option, axis in options.items()
    }
    for need in needs:
        assert need.fix == f"Use {need.option}: 1."
        assert need.reason.startswith(f"{need.option} ")


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
        (dense_mesh(), expert_mesh(), {"dense": 2, "experts": 2}, "shards of experts divide the copies"),
    ],
)
def test_meshes_that_do_not_go_together_are_no_plan(dense: Mesh, experts: Mesh, shards: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        MeshPlan(dense=dense, experts=experts, shards=shards)


@pytest.mark.parametrize(
    "layout",
    [
        folded(pp=8, cp=2, tp=8, ep=64, etp=1),
        folded(tp=8, ep=32, etp=4, order=("tp", "cp", "dp"), e_order=("ep", "etp", "edp"), shard="all", e_shard=2),
        Coupled(pp=4, cp=2, tp=8, ep=16, shard="all", expert_shard=2),
    ],
)
def test_a_world_of_4096_ranks_is_listed_within_a_second(layout: LayoutPlugin) -> None:
    start = time.process_time()
    plan = layout.plan(MAX_WORLD)
    assert isinstance(plan, MeshPlan)
    for rank in range(plan.world):
        plan.coordinates(rank)
    for axes in ALL_AXES:
        assert sum(map(len, groups(plan, axes))) == MAX_WORLD
    for side in COPIES:
        assert plan.copies(MAX_WORLD - 1, side)
    assert time.process_time() - start < 1.0


def test_no_size_is_too_large_for_arithmetic() -> None:
    start = time.process_time()
    assert folded(ep=2**40).plan(2**62).sizes["edp"] == 2**22
    with pytest.raises(PlanError, match=r"Use dense.shard: 1\."):
        folded(shard=2**60).plan(2**61 - 1)
    assert time.process_time() - start < 0.1


EXAMPLES = re.findall(r"```yaml\n(.*?)```\n\n```text\n\$ moefw (.*?)\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.mark.parametrize(("spec", "command", "says"), EXAMPLES)
def test_the_guide_says_what_its_specs_give(
    spec: str, command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(spec)
    result = CliRunner().invoke(cli, command.split(), catch_exceptions=False)
    assert result.output.startswith(says)


def test_the_guide_has_three_examples() -> None:
    assert len(EXAMPLES) == GUIDE.count("```yaml") == 3
