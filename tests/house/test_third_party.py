"""The examples of third-party dispatchers are certified. ``scripts/certify_third_party.sh`` does it from wheels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

from ledger_cases import MODEL, RUN, in_all
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble, assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.plugin import Plugin
from moefw.planner import ledger
from moefw.planner.report import Transfer
from moefw.testing.layer_case import LayerCase, assert_matches, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from moefw.testing.profiles import PROFILES, Profile
from pairwise import deep

EXAMPLES = Path(__file__).parents[2] / "examples"
RING, TWO_HOP = EXAMPLES / "third_party_dispatcher", EXAMPLES / "two_hop_dispatcher"
sys.path[:0] = [str(RING), str(TWO_HOP)]

import moefw_ring  # noqa: E402
import moefw_two_hop  # noqa: E402


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def moefw_profile(request: pytest.FixtureRequest) -> Profile:
    return evolve(PROFILES["quick"], worlds=request.param)


def on(*worlds: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("moefw_profile", worlds, ids=str, indirect=True)


_ring, _two_hop = load(RING / "tests" / "test_ring.py"), load(TWO_HOP / "tests" / "test_two_hop.py")
TestRing = on((2,), *deep((1, 4)))(_ring.TestRing)
TestTwoHop = on(*deep((1, 2, 4)))(_two_hop.TestTwoHop)
test_rows_go_to_neighbours_and_no_further_than_they_are_needed = (
    _ring.test_rows_go_to_neighbours_and_no_further_than_they_are_needed
)
test_a_token_enters_a_node_once = _two_hop.test_a_token_enters_a_node_once


def test_a_spec_takes_it_and_its_option(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {preset: qwen3-moe-tiny}\ndispatch: {use: ring, both_ways: false}")
    registry = Registry(extra=[moefw_ring])
    assert assemble(path, defaults=defaults(), registry=registry).parts.dispatch == moefw_ring.Ring(both_ways=False)


def assert_equals_the_oracle(
    pool: RankPool, tokens: tuple[int, ...], parallel: dict[str, Any], plugin: type[Plugin], **options: Any
) -> None:
    parts = {
        "dispatch": {"use": plugin.name, **options},
        "routing": {"use": "topk", "score": "softmax"},
        "parallel": parallel,
    }
    case = LayerCase(tokens=tokens, masked=True, row_alignment=16, parts=parts, plugins=(plugin,))
    assert_matches(pool.run(solve, 4, case), truth(case, Rule(score="softmax", top_k=2)), rtol=1e-5)


@pytest.mark.parametrize("tokens", [(5, 3, 0, 2), (0, 0, 0, 3)])
def test_one_way_round_equals_the_oracle(pool: RankPool, tokens: tuple[int, ...]) -> None:
    assert_equals_the_oracle(pool, tokens, {"experts": {"ep": 2, "etp": 2}}, moefw_ring.Ring, both_ways=False)


@pytest.mark.parametrize("tokens", [(5, 3, 0, 2), (0, 0, 0, 3)])
def test_two_hops_equal_the_oracle(pool: RankPool, tokens: tuple[int, ...]) -> None:
    assert_equals_the_oracle(pool, tokens, {"experts": {"ep": 4}, "ranks_per_node": 2}, moefw_two_hop.TwoHop)


def test_the_groups_of_two_hops_are_planned_at_1024_ranks() -> None:
    """Each token crosses to seven other nodes of its 64 ranks, and there to the seven other ranks of the node."""
    tree = {
        "model": {**MODEL, "num_experts": 64, "top_k": 64},
        "dispatch": {"use": "two_hop"},
        "parallel": {"experts": {"ep": 64}, "ranks_per_node": 8},
        "train": {"micro_batch": 1, "seq_len": 64, "tokens_per_step": 64 * 1024},
        "run": RUN,
    }
    found = ledger(
        assemble_tree(
            tree, Marks("two hops"), defaults=defaults(), world=1024, registry=Registry(extra=[moefw_two_hop])
        )
    )
    rows = 64 * MODEL["dim"] * 4
    sent = in_all(found.work, "transfers")
    between_nodes = Transfer("all-to-all", "8 ranks", 8, 0, 7 * rows, span=7 * 8)
    wanted = [between_nodes, Transfer("all-to-all", "8 ranks", 8, 7 * 8 * rows, 0)]
    for phase in ("forward", "backward"):
        assert [sent[phase, transfer] for transfer in wanted] == [2 * MODEL["num_layers"]] * 2


@pytest.mark.parametrize("package", [RING / "moefw_ring", TWO_HOP / "moefw_two_hop"], ids=lambda path: path.name)
def test_they_import_no_plugin_of_ours(package: Path) -> None:
    for path in package.glob("*.py"):
        assert "moefw.plugins" not in path.read_text()
