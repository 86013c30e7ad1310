"""The ledger against a measured step: memory held, saved bytes of each region under each policy, and the peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from attrs import evolve, frozen
from click.testing import CliRunner

from ledger_cases import (
    LOOPING,
    PEAK,
    POLICIES,
    SHARED_OUT,
    TRAIN,
    WORLDS,
    check,
    with_policies,
)
from memory_cases import qwen3_235b
from moefw.commands.plan import plan
from moefw.compose.build import Shared, build_model, open_layout
from moefw.core.plugin import DispatcherPlugin, MemoryPlugin
from moefw.ledger.parts import LayerMemory, Placement, RankShape, Region, Tensor
from moefw.planner import Ledger, ledger
from moefw.planner.placement import place
from moefw.testing.fake_world import fake_assembly
from moefw.training.optimizer_under_policies import build_optimizer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", WORLDS)
def test_a_step_holds_what_the_ledger_says(world: str, policy: str) -> None:
    tree, ranks = WORLDS[world]
    check(fake_assembly(with_policies(tree, *POLICIES[policy]), ranks))


def test_gradients_are_not_there_yet_in_a_single_micro_batch() -> None:
    check(fake_assembly({**SHARED_OUT, "train": {**TRAIN, "tokens_per_step": 2048}}, 8))


def test_a_rank_of_256_with_some_layers_of_qwen3_235b_holds_what_the_ledger_says() -> None:
    check(qwen3_235b(3))


@pytest.mark.skipif("MOEFW_ALL_LAYERS" not in os.environ, reason="measures 94 layers, half a minute")
def test_a_rank_of_256_with_all_layers_of_qwen3_235b_holds_what_the_ledger_says() -> None:
    check(qwen3_235b(94))


@cache
def of_optimizer(*policies: str) -> tuple[Ledger, dict[str, int]]:
    """Return the ledger, and the bytes of a real optimizer's states by device."""
    assembly = fake_assembly(with_policies({**LOOPING, "parallel": {}}, *({"use": name} for name in policies)), 1)
    shared, device = Shared(), torch.device("cpu")
    layout = open_layout(assembly, "cpu")
    model = build_model(assembly, layout, device, shared)
    optimizer = build_optimizer(assembly, model, layout, device, shared)
    found: Counter[str] = Counter()
    for state in optimizer.state.values():
        for key, value in state.items():
            found["step" if key == "step" else "moments"] += value.nbytes
    shared.close()
    return ledger(assembly), dict(found)


def test_states_rest_as_policies_say() -> None:
    half, states = of_optimizer("optimizer-bf16")
    assert half.held is not None
    assert half.held.optimizer == states["moments"] + states["step"]
    both, states = of_optimizer("optimizer-offload", "optimizer-bf16")
    assert both.held is not None
    assert (both.held.optimizer, both.held.host) == (states["step"], states["moments"])


def test_what_a_policy_stashes_is_not_saved_but_in_its_pool() -> None:
    @frozen
    class Stash(MemoryPlugin):
        name: ClassVar[str] = "stash"

        def placements(self, saved: Any, shape: Any) -> Any:
            return [Placement(stashed=tensor.nbytes // 2) for tensor in saved]

    region = Region(name="layer", inside=(Region(name="a", saves=(Tensor(name="x", nbytes=8),)),))
    layer = place(
        LayerMemory(kind="moe", region=region, weights=()), {"a": Stash(regions=("a",))}, cast(RankShape, None)
    )
    assert (layer.kept, layer.stashed) == (0, 4)


@frozen(kw_only=True)
class Silent(DispatcherPlugin):
    name: ClassVar[str] = "ring"


def test_a_part_without_a_formula_is_named() -> None:
    assembly = fake_assembly(SHARED_OUT, 8)
    found = ledger(evolve(assembly, parts=evolve(assembly.parts, dispatch=Silent())))
    assert found.silent == ("dispatch: ring",)
    assert "dispatch" not in {row.region for row in found.regions}


def test_plan_prints_one_object_and_reports_what_is_wrong_first() -> None:
    done = CliRunner().invoke(plan, [str(QUICKSTART), "--json"], standalone_mode=False)
    data = json.loads(done.output)
    assert data["ok"]
    assert data["silent"] == []
    assert data["peak_bytes"] == sum(
        data["peak"][part] for part in ("saved", "gathered", "passing", "gradients")
    ) + data["pools"] + sum(data["held"][part] for part in ("parameters", "gradients", "optimizer", "buffers", "batch"))
    refused = CliRunner().invoke(plan, [str(QUICKSTART), "model.top_k=99", "--json"], standalone_mode=False)
    assert refused.return_value == 2
    assert "cannot be chosen" in refused.output


def test_plan_shows_its_tables() -> None:
    shown = CliRunner().invoke(plan, [str(QUICKSTART), "memory=[{use: recompute, regions: [attn_norm]}]"]).output
    for word in ("parameters", "peak", "expert_fc1", "recomputed", "the peak is in"):
        assert word in shown


def test_train_writes_what_is_predicted_and_measured(tmp_path: Path) -> None:
    arguments = [
        "train",
        str(QUICKSTART),
        f"run.dir={tmp_path}/run",
        "parallel={}",
        "train.steps=1",
        "train.eval_every=0",
    ]
    small = ["model.num_layers=1", "train.seq_len=64", "train.tokens_per_step=512", "train.eval_tokens=512", "--ledger"]
    done = subprocess.run(
        [sys.executable, "-m", "moefw", *arguments, *small], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert found["predicted"]["peak_bytes"] == pytest.approx(found["measured"]["peak"], rel=PEAK)
