"""Formats that the GPUs of a cluster multiply: plans refuse others, and no search recommends to emulate them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner

from moefw.commands.plan import plan
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.planner import cluster as clusters
from moefw.planner.time.software import Software
from moefw.planner.tune.candidates import NOT_MULTIPLIED, REFUSED
from moefw.planner.tune.excerpts import Excerpts
from moefw.planner.tune.reasons import reasons
from moefw.planner.tune.search import Search, Where
from moefw.planner.tune.settings import PRECISION, Settings, with_settings
from moefw.planner.tune.space import space_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
TREE = {
    "model": {"preset": "qwen3-moe-tiny", "num_layers": 2},
    "train": {"tokens_per_step": 2048, "micro_batch": 2},
}


def planned(use: str, backend: str, *words: str) -> dict[str, Any]:
    """What ``plan --json`` says of the quickstart with a recipe."""
    precision = f"precision={{use: {use}, backend: {backend}}}"
    told = CliRunner().invoke(plan, [str(QUICKSTART), precision, *words, "--json"], catch_exceptions=False)
    data: dict[str, Any] = json.loads(told.stdout)
    return data


@pytest.mark.parametrize("cluster", clusters.names())
def test_each_cluster_has_the_compute_capability_of_its_gpus(cluster: str) -> None:
    capability = {"h100": "9.0", "h200": "9.0", "b200": "10.0", "gb200": "10.0", "b300": "10.3", "gb300": "10.3"}
    assert clusters.read(cluster).gpu.capability == capability[cluster]


@pytest.mark.parametrize("use", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("software", [[], ["--as", "megatron"]], ids=["moefw", "megatron"])
def test_a_plan_refuses_formats_that_the_gpus_do_not_multiply_and_says_which_do(use: str, software: list[str]) -> None:
    (problem,) = planned(use, "emulate", "--cluster", "h100", *software)["problems"]
    assert problem["where"] == "precision"
    assert "those of h100 have 9.0" in problem["what"]
    assert problem["fix"] == "Use another recipe, or one of b200, b300, gb200, gb300."
    assert planned(use, "emulate")["ok"], "without a cluster, memory is told"


def test_a_plan_is_checked_for_the_gpus_of_its_cluster_and_not_for_this_machine() -> None:
    (problem,) = planned("fp8-blockwise", "torch", "--cluster", "gb300")["problems"]
    assert "needs compute capability 9.0" in problem["what"]
    assert "a GPU of gb300 offers 10.3" in problem["what"]
    assert planned("fp8-blockwise", "torch", "--cluster", "h100")["ok"]
    (problem,) = planned("fp8-blockwise", "torch", "run.device=cpu", "--cluster", "h100")["problems"]
    assert "this machine offers cpu" in problem["what"]


def test_the_time_of_an_emulated_format_says_that_it_is_of_gpus_that_multiply_it() -> None:
    (note,) = planned("fp8-blockwise", "emulate", "--cluster", "h100")["time"]["notes"]
    assert note.startswith("fp8-blockwise is timed as GPUs multiply its formats; emulated")
    assert planned("fp8-blockwise", "torch", "--cluster", "h100")["time"]["notes"] == []
    as_megatron = planned("fp8-blockwise", "emulate", "--cluster", "h100", "--as", "megatron")
    assert as_megatron["time"]["notes"] == [], "it has kernels of its own"


def test_a_format_without_a_peak_is_not_timed_as_another_one(tmp_path: Path) -> None:
    h100 = clusters.read("h100")
    peaks = evolve(h100.gpu.peak_tflops, fp8=None)
    path = tmp_path / "mine.yaml"
    path.write_text(clusters.written(evolve(h100, gpu=evolve(h100.gpu, peak_tflops=peaks))))
    assert "time" not in planned("fp8-blockwise", "torch", "--cluster", str(path))
    words = [str(QUICKSTART), "precision={use: fp8-blockwise, backend: torch}", "--cluster", str(path)]
    assert "the cluster has no gpu.peak_tflops.fp8." in CliRunner().invoke(plan, words).output


def search_of_precision(cluster: str, runs: Software, own: Mapping[str, Any]) -> Search:
    """All recipes for one GPU of a cluster, on a machine of any kind. ``own``: the spec's."""
    registry = Registry()
    where = Where(world=1, cluster=clusters.read(cluster), name=cluster, runs=runs)

    def resolve(settings: Settings, world: int) -> Any:
        tree = with_settings({**TREE, "precision": own}, settings)
        return assemble_tree(
            tree, Marks("spec"), defaults=defaults(), registry=registry, world=world, machine=where.machine
        )

    assembly = resolve({}, 1)
    registry.load_all()
    space = space_of(assembly, registry.parts(), ("precision",), {}, world=where.world)
    search = Search(space, where, resolve, Excerpts(resolve, None))
    search.run(20, seed=0)
    return search


def test_a_search_leaves_out_emulation_and_formats_of_other_gpus_and_says_why() -> None:
    search = search_of_precision("gb300", Software(), {"use": "bf16"})
    chosen = {candidate.settings[PRECISION]["use"]: candidate.settings[PRECISION] for candidate in search.candidates}
    assert {"bf16", "mxfp8", "nvfp4", "fp8-tensor"} <= chosen.keys()
    assert "fp8-blockwise" not in chosen
    assert {choice.get("backend", "torch") for choice in chosen.values()} == {"torch"}
    outcomes = {json.dumps(each.settings[PRECISION]): each.outcome for each in search.known.values()}
    assert outcomes['{"use": "mxfp8", "backend": "emulate"}'] == NOT_MULTIPLIED
    assert outcomes['{"use": "fp8-blockwise", "backend": "torch"}'] == REFUSED
    told = [line for line in reasons(search, search.own) if line.startswith("precision: not ")]
    assert len(told) == sum(bool(each.problems) for each in search.known.values())
    assert any("mxfp8, as it is set, emulates its products:" in line for line in told)
    assert any("fp8-blockwise needs compute capability 9.0" in line and "gb300 offers 10.3" in line for line in told)


@pytest.mark.parametrize(("software", "emulated"), [("moefw", set()), ("megatron", {"mxfp8"})])
def test_other_software_has_kernels_for_the_recipe_that_a_spec_emulates_and_for_no_other(
    software: str, emulated: set[str]
) -> None:
    own = {"use": "mxfp8", "backend": "emulate"}
    search = search_of_precision("gb300", Software(implementation=software), own)
    chosen = [candidate.settings[PRECISION] for candidate in search.candidates]
    assert {"use": "mxfp8", "backend": "torch"} in chosen
    assert {choice["use"] for choice in chosen if choice.get("backend") == "emulate"} == emulated
