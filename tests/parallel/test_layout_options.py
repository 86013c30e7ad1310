"""Options of layouts: the resulting meshes of a world, and the message for one that does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st

from layout_cases import (
    MAX_WORLD,
    SHARDS,
    SIZES,
    folded,
)
from moefw.cli import cli
from moefw.compose.machine import lone_site
from moefw.compose.spec.source import Marks
from moefw.compose.spec.structure import structure
from moefw.core.errors import PlanError, Problem
from moefw.core.plugin import LayoutPlugin
from moefw.core.site import Dims, Machine
from moefw.plugins.parallel.coupled import Coupled
from moefw.plugins.parallel.folded import DenseMesh, ExpertMesh, Folded
from moefw.runtime.parallel.meshes import MeshPlan

GUIDE = (Path(__file__).parents[2] / "docs" / "parallel-layouts.md").read_text()


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
        assert problem.what.startswith("1 rank does not fit" if world == 1 else f"{world} ranks do not fit")
        smaller = {} if dp else shards
        assert folded(**sizes, **smaller, dp=dp).plan(number).world == number


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ("{dense: {zero: 2}, experts: {shard: all, zero: 1}}", "parallel.dense.zero: zero 2 says how long"),
        ("{dense: {shard: all}, experts: {zero: 1}}", "parallel.experts.zero: zero 1 says how long"),
        ("{use: coupled, zero: 2}", "parallel.zero: zero 2 says how long"),
        ("{dense: {shard: all, zero: 0}}", "parallel.dense.zero: 0 is not one of the choices. Known: 1, 2, 3."),
    ],
)
def test_a_stage_of_zero_without_shards_is_refused(tmp_path: Path, parallel: str, says: str) -> None:
    (tmp_path / "spec.yaml").write_text(f"parallel: {parallel}")
    done = CliRunner().invoke(cli, ["check", str(tmp_path / "spec.yaml")])
    assert done.exit_code
    assert says in str(done.exception)


def test_a_stage_of_zero_may_stay_where_a_small_world_has_one_copy() -> None:
    layout = Folded(dense=DenseMesh(shard="all", zero=1), experts=ExpertMesh(shard="all", zero=2))
    for world in (1, 4):
        plan = layout.plan(world)
        assert (plan.zero("dense"), plan.zero("experts")) == (1, 2)
    both = Coupled(shard="all", zero=2).plan(4)
    assert (both.zero("dense"), both.zero("experts")) == (2, 2)


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
    needs = layout.needs(lone_site(dims, Machine()))
    assert {need.option: (need.fact, need.value) for need in needs} == {
        option: ("split", axis) for option, axis in options.items()
    }
    for need in needs:
        assert need.fix == f"Use {need.option}: 1."
        assert need.reason.startswith(f"{need.option} ")


EXAMPLES = re.findall(r"```yaml\n(.*?)```\n\n```text\n\$ moefw (.*?)\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.mark.parametrize(("spec", "command", "says"), EXAMPLES)
def test_the_guide_says_what_its_specs_give(
    spec: str, command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(spec)
    result = CliRunner().invoke(cli, command.split(), catch_exceptions=False)
    assert result.output.startswith(says)


def test_the_guide_has_six_examples() -> None:
    assert len(EXAMPLES) == GUIDE.count("```yaml") == 6
