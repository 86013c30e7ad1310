"""What a node is to a plan on a cluster: that of the cluster, where the spec leaves it to the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import say
from small_spec import small_spec

EXPERTS = ("model.num_layers=2", "model.num_experts=16", "parallel.experts.ep=16", "train.tokens_per_step=2048")
OVER_NODES = "dispatch={use: hybridep, backend: torch}"
"""A dispatcher whose work depends on the nodes over which its ranks lie."""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path))
    return small_spec(tmp_path)


def planned(spec: Path, *asked: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(say("plan", spec, *EXPERTS, OVER_NODES, *asked, "--json").out)
    assert said["ok"], said["problems"]
    return said


def test_a_plan_on_a_cluster_lies_on_its_nodes(spec: Path) -> None:
    left_out, told = planned(spec, "--cluster", "h100"), planned(spec, "--cluster", "h100", "parallel.ranks_per_node=8")
    assert left_out["time"]["wire_bytes"]["network"] > 0
    assert left_out == told


def test_a_plan_that_fits_a_node_of_the_cluster_is_in_one(spec: Path) -> None:
    assert planned(spec, "--cluster", "gb200")["ranks_per_node"] == 16


def test_the_nodes_of_a_spec_stay(spec: Path) -> None:
    assert planned(spec, "--cluster", "h100", "parallel.ranks_per_node=4")["ranks_per_node"] == 4


def test_a_plan_without_a_cluster_knows_no_nodes(spec: Path) -> None:
    assert planned(spec)["ranks_per_node"] == 16


def test_what_a_search_finds_is_planned_with_the_same_time(spec: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.yaml"
    asked = ("--cluster", "h100", "--gpus", 16, "--vary", "micro-batch", "--output", best, "--json")
    found = json.loads(say("tune", spec, *EXPERTS, OVER_NODES, *asked).out)
    again = json.loads(say("plan", best, "--cluster", "h100", "--world", 16, "--json").out)
    assert again["time"] == found["best"]["time"]


def test_a_search_says_why_a_model_of_one_layer_has_no_candidate(spec: Path) -> None:
    said = say("tune", spec, "--cluster", "h100", "--gpus", 1)
    assert said.code == 2
    assert "a search measures layers in 2 stages, and the model has 1 layer." in said.err
