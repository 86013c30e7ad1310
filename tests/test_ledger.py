"""The ledger against a measured step: what is held, what each region saves under each policy, and the peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from attrs import evolve, frozen
from click.testing import CliRunner
from memory_cases import qwen3_235b

from moefw.commands.plan import plan
from moefw.core.assembly import Assembly
from moefw.core.build import Shared, build_model
from moefw.core.ledger import Extent, Fate, LayerMemory, Region, Tensor
from moefw.core.plugin import DispatcherPlugin, MemoryPlugin
from moefw.planner import Ledger, ledger
from moefw.planner.extents import ask
from moefw.planner.treated import treat
from moefw.testing.fake_world import fake_assembly
from moefw.testing.measured import Measured, measure
from moefw.training.treated_optimizer import build_optimizer

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
SAVED, PEAK = 0.01, 0.03
"""How far a prediction may be off."""
KEY_BYTES = 8
"""The key of a token, from which nvfp4 draws."""

MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "dense_dim": 512,
    "num_experts": 16,
    "top_k": 4,
    "expert_dim": 128,
}
TRAIN = {"micro_batch": 2, "seq_len": 256, "tokens_per_step": 4096}
BRIEF = {**TRAIN, "tokens_per_step": 2048}
"""One micro-batch where dp is 4."""
RUN = {"device": "cpu"}
SHARED_OUT: dict[str, Any] = {
    "model": {**MODEL, "num_layers": 3, "num_dense_layers": 1},
    "precision": {"use": "bf16"},
    "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 4, "shard": "all"}},
    "train": TRAIN,
    "run": RUN,
}
LOOPING: dict[str, Any] = {
    "model": {**MODEL, "shared_expert_dim": 128, "qk_norm": False},
    "routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}, {"kind": "z_loss"}]},
    "gemm": {"use": "loop"},
    "parallel": {"experts": {"ep": 4}},
    "train": TRAIN,
    "run": RUN,
}
ONCE_A_RANK: dict[str, Any] = {
    "model": MODEL,
    "precision": {"use": "bf16"},
    "routing": {"use": "topk", "balance": [{"kind": "aux_loss", "over": "sequence"}]},
    "dispatch": {"use": "deepep", "backend": "torch"},
    "parallel": {"experts": {"ep": 4}},
    "train": TRAIN,
    "run": RUN,
}
IN_PARTS: dict[str, Any] = {
    "model": {**MODEL, "tie_embeddings": True},
    "precision": {"use": "bf16"},
    "routing": {"use": "forced"},
    "dispatch": {"use": "allgather"},
    "parallel": {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2, "shard": 2}},
    "train": TRAIN,
    "run": RUN,
}
WORLDS = {
    "shared out": (SHARED_OUT, 8),
    "looping": (LOOPING, 4),
    "once a rank": (ONCE_A_RANK, 4),
    "in parts": (IN_PARTS, 8),
}


def recompute(*regions: str) -> dict[str, Any]:
    return {"use": "recompute", "regions": list(regions)}


def offload(*regions: str) -> dict[str, Any]:
    return {"use": "offload", "regions": list(regions), "min_bytes": 1}


POLICIES: dict[str, list[dict[str, Any]]] = {
    "keep": [{"use": "keep", "regions": ["attention"]}],
    "norms and dispatch": [recompute("attn_norm", "mlp_norm", "dispatch")],
    "layer": [recompute("layer")],
    "inside": [recompute("qkv", "router", "expert_fc1")],
    "offload": [offload("experts")],
    "offload and recompute": [offload("attention"), recompute("attn_norm", "experts")],
}


def with_policies(tree: Mapping[str, Any], *policies: Mapping[str, Any]) -> dict[str, Any]:
    return {**tree, "memory": list(policies)}


def predicted(measured: Measured, assembly: Assembly) -> Ledger:
    return ledger(assembly, micro_batches=measured.micro_batches)


def check_held(found: Ledger, measured: Measured) -> None:
    held = found.held
    assert held is not None
    kinds = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "other": held.batch,
    }
    kinds |= {"buffers": held.buffers} if held.buffers else {}
    assert kinds == measured.held


def by_region(saved: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by region; of a dispatcher's indices, some are made in ``dispatch`` and some in ``layer``."""
    movement = {"dispatch": saved.get("dispatch", 0) + saved.get("layer", 0)}
    return {name: nbytes for name, nbytes in {**saved, **movement}.items() if nbytes and name != "layer"}


def check_saved(found: Ledger, measured: Measured, *, roaming: int = 512) -> None:
    """``roaming``: bytes that count where they are first saved, or where they are made."""
    saved: Counter[str] = Counter()
    for row in found.regions:
        saved[row.region] += row.saved
    assert by_region(saved) == pytest.approx(by_region(measured.by_region()), rel=SAVED, abs=roaming)
    assert found.totals["saved"] == pytest.approx(measured.saved_bytes, rel=SAVED)


def check(assembly: Assembly) -> None:
    measured = measure(assembly)
    found = predicted(measured, assembly)
    assert not found.silent
    check_held(found, measured)
    if all(not plugin.runs_again or "layer" not in plugin.regions for plugin in assembly.parts.memory):
        check_saved(found, measured)
    assert found.totals["saved"] == pytest.approx(measured.saved_bytes, rel=SAVED)
    assert found.peak_bytes == pytest.approx(measured.peak, rel=PEAK), (found.peak, measured.peak_place)


def check_quantized(tree: Mapping[str, Any], ranks: int) -> None:
    """Hold what is held and saved against a step whose quantizing is not counted."""
    assembly = fake_assembly(tree, ranks)
    measured = measure(assembly)
    found = predicted(measured, assembly)
    check_held(found, measured)
    train = tree["train"]
    check_saved(found, measured, roaming=max(512, train["micro_batch"] * train["seq_len"] * KEY_BYTES))
    assert found.silent == (f"precision: {assembly.parts.precision.name}, of what passes while it quantizes",)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", WORLDS)
def test_a_step_holds_what_the_ledger_says(world: str, policy: str) -> None:
    tree, ranks = WORLDS[world]
    check(fake_assembly(with_policies(tree, *POLICIES[policy]), ranks))


SIGMOID: dict[str, Any] = {"score": "sigmoid"}


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 2.5},
        {"pre_softmax": True},
        SIGMOID,
        {**SIGMOID, "renormalise": False},
        {**SIGMOID, "renormalise": False, "scale": 2.5},
        {"score": "sqrtsoftplus"},
    ],
    ids=str,
)
def test_a_router_saves_what_its_formula_says(options: dict[str, Any], balanced: bool) -> None:
    balance = [{"kind": "aux_loss", "over": "global_batch"}, {"kind": "aux_loss"}]
    routing = {"use": "topk", **options, "balance": balance if balanced else []}
    check(fake_assembly({**ONCE_A_RANK, "routing": routing, "dispatch": {"use": "alltoall"}}, 4))


QUANTILE: dict[str, Any] = {"balance": [{"kind": "quantile"}]}
LOSSES = [{"kind": "z_loss"}, {"kind": "aux_loss", "over": "sequence"}]


@pytest.mark.parametrize(
    "options",
    [
        {"groups": {"count": 4, "keep": 2}},
        {"jitter": 0.1},
        {"jitter": 0.1, "dtype": "fp64"},
        {"dtype": "fp64"},
        {"dtype": "fp64", **SIGMOID, "balance": LOSSES},
        QUANTILE,
        {"capacity": {"factor": 1.0}},
        {"capacity": {"factor": 4.0}, "balance": LOSSES},
        {"capacity": {"factor": 1.5, "pad": True}, **SIGMOID},
    ],
    ids=str,
)
def test_options_of_a_router_are_counted(options: dict[str, Any]) -> None:
    routing = {"use": "topk", **options}
    check(fake_assembly({**ONCE_A_RANK, "routing": routing, "dispatch": {"use": "alltoall"}, "train": BRIEF}, 4))


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_groups_that_a_router_fills_have_as_many_rows_on_every_rank(dispatch: str) -> None:
    routing = {"use": "topk", "capacity": {"factor": 1.5, "pad": True}}
    check(fake_assembly({**IN_PARTS, "routing": routing, "dispatch": {"use": dispatch}, "train": BRIEF}, 8))


def test_a_capacity_that_drops_from_even_routing_has_no_formula() -> None:
    routing = {"use": "topk", "capacity": {"factor": 0.5}}
    assert ledger(fake_assembly({**ONCE_A_RANK, "routing": routing}, 4)).silent == ("routing: topk",)


@pytest.mark.parametrize(
    ("options", "top_k", "precision"),
    [
        ({}, 4, "bf16"),
        ({}, 1, "bf16"),
        ({"z_loss": 0.1}, 4, "fp32"),
        ({"z_loss": 0.1, "dtype": "fp64"}, 4, "bf16"),
        ({"dtype": "fp64"}, 1, "fp32"),
    ],
    ids=str,
)
def test_sinkhorn_saves_the_scores_of_all_experts(options: dict[str, Any], top_k: int, precision: str) -> None:
    parts = {"routing": {"use": "sinkhorn", **options}, "precision": {"use": precision}}
    model = {**MODEL, "top_k": top_k}
    check(fake_assembly({**ONCE_A_RANK, **parts, "model": model, "train": BRIEF}, 4))


@pytest.mark.parametrize("policy", ["norms and dispatch", "inside"])
def test_sinkhorn_under_policies(policy: str) -> None:
    tree = {**ONCE_A_RANK, "routing": {"use": "sinkhorn", "z_loss": 0.1}, "train": BRIEF}
    check(fake_assembly(with_policies(tree, *POLICIES[policy]), 4))


def test_what_hybridep_keeps_is_counted() -> None:
    dispatch = {"use": "hybridep", "backend": "torch"}
    train = {**TRAIN, "tokens_per_step": 1024}
    check(fake_assembly({**ONCE_A_RANK, "dispatch": dispatch, "parallel": {}, "train": train}, 1))


EMULATED: dict[str, Any] = {"backend": "emulate", "keep_bf16": ["layers.0.*"]}
DELAYED = {"scaling": "delayed", "history": 4}


@pytest.mark.parametrize("saved_activations", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("recipe", ["fp8-blockwise", "mxfp8"])
def test_codes_are_saved_and_what_passes_is_not_counted(recipe: str, saved_activations: str) -> None:
    precision = {**EMULATED, "use": recipe, "saved_activations": saved_activations}
    check_quantized({**ONCE_A_RANK, "precision": precision, "train": BRIEF}, 4)


@pytest.mark.parametrize(
    "options",
    [{}, {"saved_activations": "fp8"}, {"saved_activations": "int8"}, {**DELAYED, "saved_activations": "fp8"}],
    ids=str,
)
def test_a_scale_for_a_whole_tensor_is_one_for_each_row_where_experts_share_it(options: dict[str, Any]) -> None:
    check_quantized({**ONCE_A_RANK, "precision": {**EMULATED, "use": "fp8-tensor", **options}, "train": BRIEF}, 4)


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": False, "hadamard": False}], ids=str)
def test_of_four_bits_two_codes_share_a_byte_and_keys_are_saved_with_the_rows(options: dict[str, Any]) -> None:
    precision = {"use": "nvfp4", "backend": "emulate", **options}
    check_quantized({**ONCE_A_RANK, "model": {**MODEL, "num_layers": 3}, "precision": precision, "train": BRIEF}, 4)


@pytest.mark.parametrize(
    "precision",
    [{"use": "mxfp8"}, {"use": "fp8-tensor", **DELAYED}, {"use": "nvfp4", "keep_bf16": []}],
    ids=lambda precision: precision["use"],
)
def test_each_expert_of_a_loop_has_codes_and_scales_of_its_own(precision: dict[str, Any]) -> None:
    """Beside a dense layer and a shared expert, whose keys are those of all tokens of tp."""
    model = {**LOOPING["model"], "num_experts": 8, "num_dense_layers": 1}
    sizes = {"model": model, "parallel": {"dense": {"tp": 2}, "experts": {"ep": 4}}}
    train = {**BRIEF, "tokens_per_step": 1024}
    check_quantized({**LOOPING, **sizes, "precision": {**precision, "backend": "emulate"}, "train": train}, 4)


@pytest.mark.parametrize(
    ("dispatch", "recipe"),
    [("alltoall", "fp8-blockwise"), ("alltoall", "mxfp8"), ("allgather", "mxfp8"), ("deepep", "mxfp8")],
)
def test_packed_rows_do_not_change_what_is_saved(dispatch: str, recipe: str) -> None:
    backend = {"backend": "torch"} if dispatch == "deepep" else {}
    parts = {"precision": {**EMULATED, "use": recipe}, "dispatch": {"use": dispatch, "wire": "fp8", **backend}}
    check_quantized({**ONCE_A_RANK, **parts, "train": BRIEF}, 4)


def test_packed_rows_land_in_fewer_bytes() -> None:
    """A row of 256 columns has two fp32 scales: 264 bytes, and in layers that are spared 512."""

    def landed(layer: str) -> int:
        precision = {**EMULATED, "use": "fp8-blockwise", "keep_bf16": [layer]}
        tree = {**ONCE_A_RANK, "precision": precision, "dispatch": {"use": "alltoall", "wire": "fp8"}}
        said = ask(fake_assembly(tree, 4))
        assert said.model is not None
        regions = said.model.layers[0].region.inside
        return next(region.leaves_bytes for region in regions if region.name == "dispatch")

    rows = 512 * MODEL["top_k"]
    assert (landed("layers.1.*"), landed("layers.0.*")) == (rows * 264, rows * 512)


def test_gradients_are_not_there_yet_in_a_single_micro_batch() -> None:
    check(fake_assembly({**SHARED_OUT, "train": {**TRAIN, "tokens_per_step": 2048}}, 8))


def test_a_rank_of_256_with_some_layers_of_qwen3_235b_holds_what_the_ledger_says() -> None:
    check(qwen3_235b(3))


@pytest.mark.skipif("MOEFW_ALL_LAYERS" not in os.environ, reason="measures 94 layers, half a minute")
def test_a_rank_of_256_with_all_layers_of_qwen3_235b_holds_what_the_ledger_says() -> None:
    check(qwen3_235b(94))


@cache
def of_optimizer(*policies: str) -> tuple[Ledger, dict[str, int]]:
    """Return the ledger, and the bytes of states by device as a real optimizer has them."""
    assembly = fake_assembly(with_policies({**LOOPING, "parallel": {}}, *({"use": name} for name in policies)), 1)
    shared, device = Shared(), torch.device("cpu")
    layout = assembly.parts.parallel.build(assembly.layout, "cpu")
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

        def fates(self, saved: Any, extent: Any) -> Any:
            return [Fate(stashed=tensor.nbytes // 2) for tensor in saved]

    region = Region(name="layer", inside=(Region(name="a", saves=(Tensor(name="x", nbytes=8),)),))
    layer = treat(LayerMemory(kind="moe", region=region, weights=()), {"a": Stash(regions=("a",))}, cast(Extent, None))
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
    small = ["model.num_layers=1", "train.seq_len=64", "train.tokens_per_step=256", "train.eval_tokens=256", "--ledger"]
    done = subprocess.run(
        [sys.executable, "-m", "moefw", *arguments, *small], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert found["predicted"]["peak_bytes"] == pytest.approx(found["measured"]["peak"], rel=PEAK)
