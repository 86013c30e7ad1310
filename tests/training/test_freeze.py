"""Frozen weights have no gradient, no decay, no state and no place in a checkpoint, and change nothing else.

What other systems got silently wrong stands in the names of the tests: frozen weights that decay because they get zeros
for gradients, a deferred gradient of a frozen expert that crashes, a stage that has nothing to train.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_loss_masks import drawn, sequences_of
from torch import Tensor, nn

from command_here import complaint, moefw_says
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.freezing import matches
from moefw.compose.optimizer import build_optimizer
from moefw.planner import ledger
from moefw.runtime.naming import canonical_parameters, initialise
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from moefw.training.engine import Engine
from pairwise import deep, quick
from resolved_specs import problems_of, resolved
from small_spec import small_spec

EXPERTS = ["layers.*.moe.experts.*"]
FIRST_LAYERS = ["embed.*", "layers.0.*"]
NOWHERE = "of-no-folder"
"""Frozen weights then keep their first values, in bf16."""


def tree(freeze: list[str], **parts: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 256, "init_std": 0.1, "num_layers": 2}
    model = {**SMALL["model"], **sizes, **parts.pop("model", {})}
    frozen = {"weights": NOWHERE, "freeze": freeze}
    train = {**SMALL["train"], "tokens_per_step": 128, "clip_norm": None, **frozen, **parts.pop("train", {})}
    return {**SMALL, "model": model, "train": train, **parts}


def opened(freeze: list[str], **parts: Any) -> tuple[nn.Module, Engine]:
    """A model of random weights that bf16 holds, and its engine."""
    assembly = resolved(json.dumps(tree(freeze, **parts)))
    layout = open_layout(assembly, "cpu")
    device = torch.device("cpu")
    model = build_model(assembly, layout, device, Shared())
    initialise(model, seed=0, std=lambda _: 0.2)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    optimizer = build_optimizer(assembly, model, layout, device, Shared())
    return model.train(), Engine.of(model, optimizer, layout, assembly.spec.train)


def untimed(section: str, *passes: object) -> AbstractContextManager[None]:
    return nullcontext()


def gradients(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """Gradients of a step of two micro-batches, by canonical name."""
    whole = drawn()
    engine.step([sequences_of(whole, slice(0, 2)), sequences_of(whole, slice(2, 4))], 1e-2, untimed)
    return {
        piece.name: piece.of(piece.parameter.grad).clone()
        for piece in canonical_parameters(model)
        if piece.parameter.grad is not None
    }


WAYS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "loop": {"gemm": {"use": "loop"}},
    "grouped, delayed": {"train": {"delay_wgrads": True}},
    "loop, delayed": {"gemm": {"use": "loop"}, "train": {"delay_wgrads": True}},
    "recomputed": {"memory": [{"use": "recompute", "regions": ["layer"]}]},
    "offloaded": {"memory": [{"use": "offload", "regions": ["experts"], "min_bytes": 1}]},
    "merged": {"pipeline": {"use": "merged"}},
    "stashed": {
        "precision": {"use": "bf16"},
        "dispatch": {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun"},
        "memory": [{"use": "paged-stash", "regions": ["experts"], "page_rows": 4}],
    },
    "states in bf16, off the device": {"memory": [{"use": "optimizer-bf16"}, {"use": "optimizer-offload"}]},
    "latents": {
        "attention": {
            "use": "mla",
            "num_heads": 4,
            "q_rank": 10,
            "kv_rank": 12,
            "nope_dim": 6,
            "rope_dim": 4,
            "v_dim": 5,
        }
    },
    "loss in chunks": {"model": {"loss_chunk": 4}},
}


@pytest.mark.parametrize("way", quick(WAYS, "grouped, delayed", "loop, delayed", "merged"))
@pytest.mark.parametrize("freeze", [EXPERTS, FIRST_LAYERS, ["*.attention.*", "head.weight", "*norm*"]], ids=str)
def test_other_gradients_have_the_bits_of_a_model_that_trains_whole(way: str, freeze: list[str]) -> None:
    found = gradients(*opened(freeze, **WAYS[way]))
    wanted = gradients(*opened([], **WAYS[way]))
    assert found.keys() == {name for name in wanted if not matches(name, freeze)}
    assert found.keys() < wanted.keys()
    assert [name for name, grad in found.items() if not torch.equal(grad, wanted[name])] == []


def test_frozen_weights_neither_move_nor_decay_and_have_no_state() -> None:
    model, engine = opened([*EXPERTS, "embed.weight", "*.router.weight"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(3):
        gradients(model, engine)
    for name, parameter in model.named_parameters():
        is_frozen = "experts" in name or "embed" in name or "router" in name
        assert parameter.requires_grad != is_frozen
        assert parameter.dtype is (torch.bfloat16 if is_frozen else torch.float32)
        assert torch.equal(parameter, before[name]) == is_frozen, name
        assert (parameter in engine.optimizer.state) != is_frozen
        assert (parameter.grad is None) == is_frozen


def test_a_frozen_router_keeps_its_biases() -> None:
    (frozen,), (trained,) = ([short_run(tree(freeze), 2)] for freeze in (["*.router.*"], []))
    biases = [name for name in trained.state if name.endswith("expert_bias")]
    assert biases
    assert all(trained.state[name].any() and not frozen.state[name].any() for name in biases)


def test_the_norm_that_is_clipped_is_that_of_what_trains() -> None:
    model, engine = opened(EXPERTS, train={"clip_norm": 1e-3})
    result = engine.step([drawn()], 0.0, untimed)
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    assert result.grad_norm > 1e-3
    assert torch.stack(squares).sum().sqrt().item() == pytest.approx(1e-3, rel=1e-3)
    assert result.grad_norms["experts"] == 0.0
    assert sum(norm**2 for norm in result.grad_norms.values()) == pytest.approx(result.grad_norm**2, rel=1e-6)


@pytest.mark.parametrize("gemm", ["grouped", "loop"])
def test_backward_computes_no_product_for_frozen_experts_and_saves_no_rows_for_it(gemm: str) -> None:
    plain, frozen = (ledger(resolved(json.dumps(tree(freeze, gemm={"use": gemm})))) for freeze in ([], EXPERTS))

    def flops(plan: Any, phase: str) -> float:
        of_experts = [work for work in plan.work if work.region.startswith("expert") and work.phase == phase]
        return sum(work.layers * product.flops for work in of_experts for product in work.products)

    assert flops(plain, "forward") == flops(frozen, "forward") > 0
    # dgrad is left of dgrad and wgrad.
    assert flops(frozen, "backward") == flops(plain, "backward") / 2 == flops(frozen, "forward")
    assert frozen.totals["saved"] < plain.totals["saved"]
    assert frozen.held.optimizer < plain.held.optimizer
    assert frozen.held.gradients < plain.held.gradients
    assert frozen.held.parameters < plain.held.parameters


def assert_alike(runs: list[Run], alone: Run) -> None:
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-5)
    for name, weight in runs[0].last.items():
        torch.testing.assert_close(weight, alone.last[name], rtol=1e-4, atol=1e-5)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 2": {"parallel": {"experts": {"ep": 2}}},
    "pp 2, a stage that has nothing to train": {"parallel": {"pp": 2}, "pipeline": {"use": "1f1b"}},
    "FSDP": {"parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}},
    "FSDP, reduced once": {
        "parallel": {"dense": {"shard": "all", "zero": 1}, "experts": {"ep": 2}},
    },
    "tp 2 and etp 2": {"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}},
    "cp 2": {"parallel": {"dense": {"cp": 2}, "experts": {"ep": 2}}},
    "pp 2, weight gradients apart": {"parallel": {"pp": 2}, "pipeline": {"use": "zero-bubble"}},
}


@pytest.mark.parametrize("layout", ["pp 2, a stage that has nothing to train", "FSDP", *deep(*LAYOUTS)])
@pytest.mark.parametrize("freeze", [FIRST_LAYERS, *deep(EXPERTS, ["layers.1.*", "norm*", "head*"])], ids=str)
def test_a_layout_changes_nothing(pool: RankPool, layout: str, freeze: list[str]) -> None:
    (alone,) = pool.run(short_run, 1, tree(freeze), 2)
    assert_alike(pool.run(short_run, 2, tree(freeze, **LAYOUTS[layout]), 2), alone)


RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"use": "bf16"},
    "fp8-blockwise": {"use": "fp8-blockwise", "backend": "emulate"},
    "fp8-tensor": {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed"},
    "mxfp8": {"use": "mxfp8", "backend": "emulate"},
    "nvfp4": {"use": "nvfp4", "backend": "emulate", "keep_bf16": []},
}
WIDE = {"dim": 32, "expert_dim": 32, "shared_expert_dim": 32, "num_dense_layers": 1, "dense_dim": 32}


@pytest.mark.parametrize("recipe", ["fp8-blockwise", *deep(*RECIPES)])
def test_a_recipe_quantizes_frozen_weights_as_it_does_their_values_in_fp32(recipe: str) -> None:
    """Queries are the first of three products that share the codes of one input: those of the others are needed."""
    parts = {"precision": RECIPES[recipe], "model": WIDE}
    wanted = gradients(*opened([], **parts))
    for freeze in (EXPERTS, ["*.q_proj.weight"]):
        found = gradients(*opened(freeze, **parts))
        assert found.keys() < wanted.keys()
        assert [name for name, grad in found.items() if not torch.equal(grad, wanted[name])] == []


# Whole runs over a folder in bf16, which moefw itself has written.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small model in bf16."""
    folder = tmp_path_factory.mktemp("base")
    spec = small_spec(folder, steps=1)
    moefw_says("train", spec)
    moefw_says("convert", "export", folder / "run", folder / "base")
    return folder / "base"


@pytest.fixture
def spec(tmp_path: Path, base: Path) -> Path:
    """A run over the folder that trains attention, router and norms."""
    shutil.copytree(base, tmp_path / "base")
    path = small_spec(tmp_path, steps=4, checkpoint_every=2, eval_every=2)
    tree = json.loads(path.read_text())
    tree["train"] |= {"weights": str(tmp_path / "base"), "freeze": [*EXPERTS, "embed.weight"], "keep_checkpoints": 9}
    path.write_text(json.dumps(tree))
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_a_run_says_what_trains_and_its_checkpoints_leave_frozen_weights_out(spec: Path, tmp_path: Path) -> None:
    printed = moefw_says("train", spec)
    told = " ".join(printed.split())
    assert "5,264 of 12,432 parameters train (42.34%): routers 64, attention 1,056, rest 4,144;" in told
    assert "frozen: experts 3,072, rest 4,096" in told
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-4" / "rank-00000.safetensors")
    assert not [name for name in saved if ".experts." in name or "embed" in name]
    assert {name.split("/")[0] for name in saved} == {"model", "optimizer"}
    (start,) = [
        event
        for event in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if event["event"] == "start"
    ]
    assert start["frozen_parameters"] == 3072 + 4096
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / "manifest.json").read_text())
    assert manifest["origin"]["base"]["folder"] == str(tmp_path / "base")
    assert [name for name, _ in manifest["origin"]["base"]["files"]] == ["config.json", "model.safetensors"]


def assert_evaluated_resumed_and_read(spec: Path, run: Path) -> None:
    """Commands that open a finished run have its model; resumed at step 2 with another GEMM, it has the same losses."""
    whole = losses(run)
    evaluated = json.loads(moefw_says("eval", run, "--json"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluated["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    moefw_says("train", spec, "--resume=2", "gemm.use=loop")
    assert losses(run) == pytest.approx(whole, rel=1e-5)
    assert len(moefw_says("generate", run, "--prompt", "a", "--tokens", "3")) > 1


def test_a_resumed_run_and_an_evaluation_read_frozen_weights_from_the_folder(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    assert_evaluated_resumed_and_read(spec, tmp_path / "run")


def test_an_export_has_the_folders_own_bits_of_what_was_frozen(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "out")
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    frozen = {name for name in before if ".experts." in name or "embed_tokens" in name}
    assert frozen <= same
    assert not [name for name in same - frozen if "norm" not in name]


def test_a_folder_with_other_bits_is_refused_by_all_that_read_it(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] += 1
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    says = "is another one: its model.safetensors differs. Name the folder with the same files as train.weights"
    assert says in complaint("train", spec, "--resume")
    assert says in complaint("eval", tmp_path / "run")
    assert says in complaint("convert", "export", tmp_path / "run", tmp_path / "out")
    shutil.rmtree(tmp_path / "base")
    gone = "Frozen weights are not in checkpoints: bring the folder back."
    assert gone in complaint("eval", tmp_path / "run")


def test_a_resumed_run_freezes_what_it_has_frozen_before(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    line = complaint("train", spec, "train.freeze=[]", "--resume")
    assert "was saved with train.freeze ['layers.*.moe.experts.*', 'embed.weight'], and here it is []. Keep it." in line
    line = complaint("train", spec, "train.freeze=[embed.weight]", "--resume")
    assert "and here it is ['embed.weight']" in line


def test_a_folder_in_fp32_is_held_in_fp32(spec: Path, tmp_path: Path) -> None:
    """Rounding it to bf16 would be another model."""

    def dtypes() -> set[torch.dtype]:
        assembly = resolved(spec.read_text())
        model = build_model(assembly, open_layout(assembly, "cpu"), torch.device("cpu"), Shared())
        return {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}

    assert dtypes() == {torch.bfloat16}
    weights = {name: value.float() for name, value in tensors(tmp_path / "base").items()}
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    assert dtypes() == {torch.float32}


def test_patterns_that_name_nothing_a_part_or_everything_are_told_before_the_first_step(spec: Path) -> None:
    line, other = moefw_says("train", spec, "train.freeze=[embed.wieght, 'layers.9.*']", code=2).splitlines()
    assert line.endswith("no weight of the model has a name like 'embed.wieght'. Did you mean 'embed.weight'?")
    assert "no weight of the model has a name like 'layers.9.*'. Nearest: layers.0." in other
    everything = "train.freeze: it names every weight, so nothing trains. Leave some out."
    assert everything in complaint("train", spec, "train.freeze=['*']")
    line = moefw_says("train", spec, "train.freeze=['*.up_proj.*']", code=2).splitlines()[0]
    assert "names layers.0.moe.experts.0.up_proj.weight and not layers.0.moe.experts.0.gate_proj.weight" in line
    assert "which are one parameter. Freeze both or none." in line


def test_check_asks_for_the_folder() -> None:
    (problem,) = problems_of("train: {freeze: [embed.weight]}")
    assert "train.freeze: frozen weights stay those of a folder, and train.weights names none." in problem


def test_one_expert_is_frozen_where_it_has_parameters_of_its_own() -> None:
    model, engine = opened(["layers.1.moe.experts.0.*"], gemm={"use": "loop"})
    found = gradients(model, engine)
    assert not [name for name in found if name.startswith("layers.1.moe.experts.0.")]
    assert "layers.1.moe.experts.1.down_proj.weight" in found


def test_check_tells_what_training_would_refuse_of_weights_and_patterns(spec: Path, tmp_path: Path) -> None:
    moefw_says("check", spec)
    lines = moefw_says("check", spec, "train.freeze=[embed.wieght, 'layers.9.*']", code=2).splitlines()
    assert len(lines) == 2
    assert "train.freeze: no weight of the model has a name like 'embed.wieght'. Did you mean" in lines[0]
    assert "train.freeze: it names every weight" in complaint("check", spec, "train.freeze=['*']")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    assert "lacks model.norm.weight of shape" in complaint("check", spec)
    lines = moefw_says("check", spec, f"train.weights={tmp_path}/bsae", f"run.dir={tmp_path}/base", code=2).splitlines()
    assert f"train.weights: {tmp_path}/bsae does not exist. Name a Hugging Face folder: config.json" in lines[0]
    assert f"run.dir: {tmp_path}/base holds something else than a run. Use another run.dir." in lines[1]


def test_a_new_run_tells_of_weights_that_are_not_there_as_such(spec: Path, tmp_path: Path) -> None:
    line = complaint("train", spec, f"train.weights={tmp_path}/bsae", "train.freeze=[]", "adapter={use: lora}")
    assert f"train.weights: {tmp_path}/bsae does not exist. Name a Hugging Face folder" in line
    assert "bring the folder back" not in line
    (tmp_path / "empty").mkdir()
    lines = moefw_says("train", spec, f"train.weights={tmp_path}/empty", code=2).splitlines()
    assert [line.partition("holds ")[2].partition(".")[0] for line in lines] == ["no config", "no safetensors files"]


def test_weights_in_the_folder_of_the_run_are_not_moved_aside(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    shutil.move(tmp_path / "base", tmp_path / "run" / "base")
    line = complaint("train", spec, f"train.weights={tmp_path}/run/base")
    assert "train.weights: " in line
    assert "lies in run.dir, which gives way to the new run." in line
