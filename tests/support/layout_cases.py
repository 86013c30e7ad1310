"""Layouts to draw: folded ones in any order, coupled ones, with shards."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from moefw.core.plugin import LayoutPlugin
from moefw.plugins.parallel.coupled import Coupled
from moefw.plugins.parallel.folded import DenseMesh, ExpertMesh, Folded
from moefw.runtime.parallel.meshes import DENSE, EXPERT, MeshPlan

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
    """Return a folded layout from options of both meshes: ``order`` and ``shard`` of the dense one, ``e_order``, ``e_shard``."""
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
