"""The example of a third-party dispatcher is certified. ``scripts/certify_third_party.sh`` does it from a wheel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.testing.layer_case import LayerCase, assert_matches, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_dispatcher"
sys.path.insert(0, str(EXAMPLE))

import moefw_ring  # noqa: E402

_spec = importlib.util.spec_from_file_location("ring_tests", EXAMPLE / "tests" / "test_ring.py")
assert _spec is not None
assert _spec.loader is not None
_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tests)

TestRing = _tests.TestRing
test_rows_go_to_neighbours_and_no_further_than_they_are_needed = (
    _tests.test_rows_go_to_neighbours_and_no_further_than_they_are_needed
)


def test_a_spec_takes_it_and_its_option(tmp_path: Path) -> None:
    from moefw.compose.defaults import defaults

    path = tmp_path / "spec.yaml"
    path.write_text("model: {preset: qwen3-moe-tiny}\ndispatch: {use: ring, both_ways: false}")
    registry = Registry(extra=[moefw_ring])
    assert assemble(path, defaults=defaults(), registry=registry).parts.dispatch == moefw_ring.Ring(both_ways=False)


@pytest.mark.parametrize("tokens", [(5, 3, 0, 2), (0, 0, 0, 3)])
def test_one_way_round_equals_the_oracle(pool: RankPool, tokens: tuple[int, ...]) -> None:
    parts = {
        "dispatch": {"use": "ring", "both_ways": False},
        "routing": {"use": "topk", "score": "softmax"},
        "parallel": {"experts": {"ep": 2, "etp": 2}},
    }
    case = LayerCase(tokens=tokens, masked=True, row_alignment=16, parts=parts, plugins=(moefw_ring.Ring,))
    assert_matches(pool.run(solve, 4, case), truth(case, Rule(score="softmax", top_k=2)), rtol=1e-5)


def test_it_imports_no_plugin_of_ours() -> None:
    for path in (EXAMPLE / "moefw_ring").glob("*.py"):
        assert "moefw.plugins" not in path.read_text()
