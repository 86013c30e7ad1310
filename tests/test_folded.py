"""Folded layouts: two meshes over the same ranks, by arithmetic, held against the plain definition of a group."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefw.core.errors import PlanError
from moefw.plugins.parallel.folded import DenseMesh, ExpertMesh, Folded
from moefw.plugins.parallel.folded.meshes import DENSE, EXPERT, FoldedPlan

MAX_WORLD = 4096
SIZES = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 8, 16])


def folded(pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1, ep: int = 1, etp: int = 1) -> Folded:
    return Folded(pp=pp, dense=DenseMesh(dp=dp, cp=cp, tp=tp), experts=ExpertMesh(ep=ep, etp=etp))


@st.composite
def plans(draw: st.DrawFn, max_world: int = MAX_WORLD) -> FoldedPlan:
    layout = folded(**{axis: draw(SIZES) for axis in ("pp", "cp", "tp", "ep", "etp")})
    smallest = layout.plan(None).world
    assume(smallest <= max_world)
    return layout.plan(smallest * draw(st.integers(1, max_world // smallest)))


MESHES = st.sampled_from([DENSE, EXPERT])


@st.composite
def plan_and_axes(draw: st.DrawFn, max_world: int = MAX_WORLD) -> tuple[FoldedPlan, tuple[str, ...], tuple[str, ...]]:
    """A plan, one of its meshes, and some axes of that mesh in any order."""
    mesh = draw(MESHES)
    axes = draw(st.lists(st.sampled_from(mesh), unique=True))
    return draw(plans(max_world)), mesh, tuple(axes)


@given(plans())
def test_both_meshes_cover_the_world(plan: FoldedPlan) -> None:
    for mesh in (DENSE, EXPERT):
        assert math.prod(plan.sizes[axis] for axis in mesh) == plan.world
    assert set(plan.sizes) == {"pp", "dp", "cp", "tp", "edp", "ep", "etp"}


@given(plans(), st.data())
def test_coordinates_lead_back_to_the_rank(plan: FoldedPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.world - 1))
    place = plan.coordinates(rank)
    assert all(0 <= place[axis] < size for axis, size in plan.sizes.items())
    for mesh in (DENSE, EXPERT):
        back = 0
        for axis in mesh:
            back = back * plan.sizes[axis] + place[axis]
        assert back == rank


@given(plan_and_axes(max_world=96))
def test_a_group_is_the_ranks_that_share_all_other_coordinates(
    case: tuple[FoldedPlan, tuple[str, ...], tuple[str, ...]],
) -> None:
    plan, mesh, axes = case
    places = [plan.coordinates(rank) for rank in range(plan.world)]
    others = [axis for axis in mesh if axis not in axes]
    for rank, place in enumerate(places):
        alike = tuple(r for r, other in enumerate(places) if all(other[axis] == place[axis] for axis in others))
        assert plan.group(rank, axes) == alike


@given(plan_and_axes(), st.data())
def test_groups_partition_the_world(
    case: tuple[FoldedPlan, tuple[str, ...], tuple[str, ...]], data: st.DataObject
) -> None:
    plan, _, axes = case
    size = math.prod(plan.sizes[axis] for axis in axes)
    left = set(range(plan.world))
    while left:
        group = plan.group(min(left), axes)
        assert len(group) == size
        assert left.issuperset(group)
        left -= set(group)
    rank = data.draw(st.integers(0, plan.world - 1))
    group = plan.group(rank, axes)
    assert rank in group
    assert all(plan.group(other, axes) == group for other in group[:8])


@given(plans(), st.data())
def test_both_meshes_have_the_same_pipeline_stages(plan: FoldedPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.world - 1))
    stage = plan.world // plan.pp
    assert plan.coordinates(rank)["pp"] == rank // stage
    across_experts = plan.group(rank, ("pp", "edp", "ep", "etp"))
    within_stage = plan.group(rank, ("edp", "ep", "etp"))
    assert (
        within_stage
        == plan.group(rank, ("dp", "cp", "tp"))
        == tuple(range(rank // stage * stage, (rank // stage + 1) * stage))
    )
    assert across_experts == tuple(range(plan.world))
    place = plan.coordinates(rank)
    alike = [
        other
        for other in range(plan.world)
        if all(plan.coordinates(other)[axis] == place[axis] for axis in ("edp", "ep", "etp"))
    ]
    assert plan.group(rank, ("pp",)) == tuple(alike)


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_the_smallest_world_is_the_first_that_fits(pp: int, cp: int, tp: int, ep: int, etp: int) -> None:
    smallest = pp * math.lcm(cp * tp, ep * etp)
    layout = folded(pp=pp, cp=cp, tp=tp, ep=ep, etp=etp)
    assert layout.plan(None).world == smallest
    for world in range(max(1, smallest - 8), smallest):
        with pytest.raises(PlanError):
            layout.plan(world)


@given(st.integers(1, 64), SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(-1, 4096) | st.none())
def test_a_world_fits_or_its_error_names_the_numbers_and_a_way_that_works(
    dp: int, pp: int, cp: int, tp: int, ep: int, etp: int, world: int | None
) -> None:
    for fixed_dp in (dp, None):
        layout = folded(pp=pp, dp=fixed_dp, cp=cp, tp=tp, ep=ep, etp=etp)
        spread, fixed = ep * etp, (fixed_dp or 1) * cp * tp
        try:
            plan = layout.plan(world)
        except PlanError as error:
            (problem,) = error.problems
        else:
            assert world in (None, plan.world)
            assert plan.dp == (fixed_dp or plan.dp)
            assert (plan.pp, plan.cp, plan.tp, plan.ep, plan.etp) == (pp, cp, tp, ep, etp)
            continue
        *_, number = (int(word) for word in problem.fix.replace(".", " ").replace(",", " ").split() if word.isdigit())
        if "dense.dp" in problem.fix:
            assert fixed % spread
            assert str(spread) in problem.what
            assert str(fixed) in problem.what
            assert folded(pp=pp, dp=number, cp=cp, tp=tp, ep=ep, etp=etp).plan(None).dp == number
            assert folded(pp=pp, cp=cp, tp=tp, ep=ep, etp=etp).plan(None)
        else:
            assert world is not None
            assert problem.what.startswith(f"{world} ranks do not fit")
            assert layout.plan(number).world == number


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
    ],
)
def test_errors_are_sentences(layout: Folded, world: int | None, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        layout.plan(world)
    assert str(caught.value) == says


def test_expert_parallel_ranks_are_neighbours_when_the_mesh_says_so() -> None:
    plan = folded(tp=2, ep=4).plan(8)
    assert plan.sizes == {"pp": 1, "dp": 4, "cp": 1, "tp": 2, "edp": 2, "ep": 4, "etp": 1}
    assert plan.group(0, ("tp",)) == (0, 1)
    assert plan.group(1, ("dp",)) == (1, 3, 5, 7)
    assert plan.group(5, ("ep",)) == (4, 5, 6, 7)
    assert plan.group(5, ("edp",)) == (1, 5)
    assert plan.group(5, ()) == (5,)


def test_axes_of_two_meshes_have_no_group() -> None:
    plan = folded(ep=2).plan(2)
    for axes in (("dp", "ep"), ("zp",), ("pp", "tp", "etp")):
        with pytest.raises(ValueError, match="not axes of one mesh"):
            plan.group(0, axes)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_place(rank: int) -> None:
    plan = folded(ep=2).plan(8)
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 8"):
        plan.coordinates(rank)
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 8"):
        plan.group(rank, ("ep",))


def test_a_plan_whose_meshes_differ_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        FoldedPlan(pp=1, dp=2, cp=1, tp=1, edp=1, ep=4, etp=1)


def test_a_layout_of_4096_ranks_is_resolved_and_listed_quickly() -> None:
    start = time.process_time()
    plan = folded(pp=8, cp=2, tp=8, ep=64, etp=1).plan(MAX_WORLD)
    axes = [set(axes) for mesh in (DENSE, EXPERT) for n in range(5) for axes in itertools.combinations(mesh, n)]
    for one in axes:
        assert 3000 in plan.group(3000, tuple(one))
    assert time.process_time() - start < 0.2
    start = time.process_time()
    assert folded(ep=2**40).plan(2**62).edp == 2**22
    assert time.process_time() - start < 0.01
