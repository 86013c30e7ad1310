"""Frozen weights that stay codes compute what their decoded values compute, to the bit, and nothing holds the values."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_freeze import RECIPES, WAYS, untimed
from torch import Tensor, nn

import moefw
from coded_folders import save_fp8, save_mxfp4, save_nvfp4
from command_here import moefw_says
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.optimizer import build_optimizer
from moefw.compose.pretrained import read_weights
from moefw.core.errors import ContractError, SpecError
from moefw.core.records import Shard
from moefw.core.stages import Batch
from moefw.planner import ledger
from moefw.runtime.compute.casts import BF16Recipe, FP32Recipe
from moefw.runtime.compute.code_formats import FP8, MXFP4, NVFP4, CodeFormat
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.compute.product import linear
from moefw.runtime.naming import by_parameter, canonical_parameters, draw
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.local_shards import all_of
from moefw.testing.pool import RankPool
from moefw.training.engine import Engine
from moefw.training.measured import measure
from pairwise import deep, each_value, quick
from resolved_specs import problems_of, resolved

LORA = {"use": "lora", "rank": 8, "alpha": 4.0}
DORA = {"use": "dora", "rank": 8, "alpha": 4.0}
FOLDERS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "in_nvfp4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models in FP8, of one in MXFP4 and of one in NVFP4."""
    root = tmp_path_factory.mktemp("folders")
    save_fp8("qwen3_moe", root / "qwen3_moe")
    save_fp8("deepseek_v3", root / "deepseek_v3")
    save_mxfp4(root / "gpt_oss")
    save_nvfp4("qwen3_moe", root / "in_nvfp4")
    return root


def tree(folder: Path, form: str, **parts: Any) -> dict[str, Any]:
    own = {"weights": str(folder), "frozen_weights": form, "steps": 2, "micro_batch": 2, "seq_len": 16}
    return {
        "adapter": LORA,
        "run": {"device": "cpu"},
        **parts,
        "model": {"preset": str(folder / "config.json"), **parts.get("model", {})},
        "train": {**own, "tokens_per_step": 64, "clip_norm": None, **parts.get("train", {})},
    }


def opened(folder: Path, form: str, world: int = 1, **parts: Any) -> tuple[nn.Module, Engine]:
    """A model of a folder whose adapters have random factors, and its engine."""
    assembly = resolved(json.dumps(tree(folder, form, **parts)), world=world)
    layout = open_layout(assembly, "cpu")
    device = torch.device("cpu")
    model = build_model(assembly, layout, device, Shared())
    read_weights(model, folder, assembly, layout.host_group())
    with torch.no_grad():
        for parameter, pieces in by_parameter(model):
            if pieces[0].of_adapter:
                with all_of(parameter) as values:
                    for piece in pieces:
                        randomise(piece.name, piece.of(values), piece.shard)
    optimizer = build_optimizer(assembly, model, layout, device, Shared())
    return model.train(), Engine.of(model, optimizer, layout, assembly.spec.train)


def randomise(name: str, factor: Tensor, shard: Shard | None) -> None:
    """Fill a factor of an adapter, or the part of it that a rank has, with values that its name alone determines."""
    whole = draw(name, shard.whole(factor.shape) if shard else factor.shape, 0.05, seed=1)
    factor.copy_(shard.of(whole) if shard else whole)


def tokens() -> Tensor:
    return torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))


def batch_of(sequences: slice) -> Batch:
    ids = tokens()[sequences]
    return Batch(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], seeds_B=torch.arange(4)[sequences])


def outcome(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """Losses and gradients of a step of two micro-batches."""
    result = engine.step([batch_of(slice(0, 2)), batch_of(slice(2, 4))], 0.0, untimed)
    gradients = {
        piece.name: piece.of(piece.parameter.grad).clone()
        for piece in canonical_parameters(model)
        if piece.parameter.grad is not None
    }
    return {"loss": torch.tensor(result.loss), **gradients}


def coded_weights(model: nn.Module) -> dict[str, CodedWeight]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, CodedWeight)}


def assert_codes_compute_what_values_do(folder: Path, **parts: Any) -> None:
    model, engine = opened(folder, "as_stored", **parts)
    decoded_model, decoded_engine = opened(folder, "decoded", **parts)
    assert coded_weights(model)
    assert not coded_weights(decoded_model)
    found, wanted = outcome(model, engine), outcome(decoded_model, decoded_engine)
    assert found.keys() == wanted.keys()
    assert any(".lora_" in name for name in wanted)
    assert all(grad.any() for grad in wanted.values())
    assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *each_value(FOLDERS, ["grouped", "loop", "recomputed"]),
        *(
            pytest.param(family, way, marks=pytest.mark.deep)
            for family, way in itertools.product(FOLDERS, ["grouped, delayed", "loop, delayed", "offloaded", "merged"])
        ),
    ],
)
def test_losses_and_gradients_have_the_bits_of_decoded_weights(folders: Path, family: str, way: str) -> None:
    assert_codes_compute_what_values_do(folders / family, **WAYS[way])


@pytest.mark.parametrize("recipe", quick(["bf16", "fp8-blockwise", "fp8-tensor", "mxfp8"], "bf16", "fp8-blockwise"))
@pytest.mark.parametrize("family", ["deepseek_v3", *deep("qwen3_moe", "gpt_oss", "in_nvfp4")])
def test_every_recipe_multiplies_what_the_codes_stand_for(folders: Path, family: str, recipe: str) -> None:
    assert_codes_compute_what_values_do(folders / family, precision=RECIPES[recipe])


@pytest.mark.parametrize("family", ["qwen3_moe", *deep("deepseek_v3", "in_nvfp4")])
def test_dora_has_the_norms_of_what_the_codes_stand_for(folders: Path, family: str) -> None:
    assert_codes_compute_what_values_do(folders / family, adapter=DORA)


def test_weights_that_freeze_names_alone_stay_codes_and_the_rest_trains(folders: Path) -> None:
    parts = {"adapter": {"use": "none"}, "train": {"freeze": ["*.experts.*"]}}
    model, engine = opened(folders / "qwen3_moe", "as_stored", **parts)
    assert {name.split(".")[-2] for name in coded_weights(model)} == {"experts"}
    found = outcome(model, engine)
    wanted = outcome(*opened(folders / "qwen3_moe", "decoded", **parts))
    assert found.keys() == wanted.keys()
    assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []


# What is held.


@pytest.mark.parametrize("family", FOLDERS)
def test_codes_are_held_in_the_bytes_that_the_folder_has(folders: Path, family: str) -> None:
    model, _ = opened(folders / family, "as_stored")
    coded = coded_weights(model)
    stored = load_file(folders / family / "model.safetensors")
    own_ends = ("_scale_inv", "_blocks", "_scales", "_scale")
    of_codes = [name for name, value in stored.items() if name.endswith(own_ends) or value.itemsize == 1]
    divisors = [name for name in of_codes if name.endswith("_global_scale")]
    in_folder = sum(stored[name].nbytes for name in set(of_codes) - set(divisors))
    of_rows = sum(part.nbytes for each in coded.values() for part in each.parts[2:])  # a matrix's own, for each row
    assert sum(each.bytes_held for each in coded.values()) == in_folder + of_rows
    assert bool(of_rows) == bool(divisors)
    assert not [name for name in coded if "norm" in name or "router" in name or name.startswith(("embed", "head"))]


@pytest.mark.parametrize("precision", [FP32Recipe(), BF16Recipe()], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", [FP8, MXFP4, NVFP4], ids=lambda form: form.name)
def test_a_product_saves_neither_codes_nor_values_of_a_weight(form: CodeFormat, precision: Any) -> None:
    weight = filled(CodedWeight.empty((256, 128), form, torch.device("cpu")))
    saved: list[Tensor] = []
    x = torch.randn(8, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = linear(x, weight, precision)
    assert not saved
    out.sum().backward()
    operand = precision.quantize(weight.values(), role="weight", during="fprop")
    assert torch.equal(x.grad, (torch.ones(8, 256).to(operand.dtype) @ operand).float())


def filled(weight: CodedWeight) -> CodedWeight:
    generator = torch.Generator().manual_seed(0)
    if weight.format is FP8:
        weight.codes.copy_(torch.randn(weight.codes.shape, generator=generator))
    else:
        weight.codes.copy_(torch.randint(256, weight.codes.shape, generator=generator))
    if weight.format is MXFP4:
        weight.scales.copy_(torch.randint(120, 130, weight.scales.shape, generator=generator))
    else:
        weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator))
    for divisors in weight.parts[2:]:
        divisors.copy_(1 + torch.rand(divisors.shape, generator=generator))
    return weight


@pytest.mark.parametrize(("family", "gemm"), each_value(["deepseek_v3", "gpt_oss", "in_nvfp4"], ["grouped", "loop"]))
def test_a_plan_counts_the_bytes_of_codes_and_is_what_is_measured(folders: Path, family: str, gemm: str) -> None:
    spec = tree(folders / family, "as_stored", gemm={"use": gemm}, precision={"use": "bf16"})
    assembly = resolved(json.dumps(spec))
    plan, measured = ledger(assembly), measure(assembly)
    decoded = ledger(resolved(json.dumps({**spec, "train": {**spec["train"], "frozen_weights": "decoded"}})))
    model, _ = opened(folders / family, "as_stored", gemm={"use": gemm})
    coded = coded_weights(model).values()
    saves = sum(2 * each.numel() - each.bytes_held for each in coded)
    assert decoded.held.parameters - plan.held.parameters == saves > 0
    assert plan.held.parameters == measured.held["parameters"]
    assert plan.totals["saved"] == decoded.totals["saved"]
    assert plan.peak_bytes == pytest.approx(measured.peak, rel=0.01)


def test_a_cached_plan_is_of_the_folder_that_is_there(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "gpt_oss", tmp_path / "in")
    assembly = resolved(json.dumps(tree(tmp_path / "in", "as_stored")))
    coded = ledger(assembly, cache=tmp_path / "cache")
    assert ledger(assembly, cache=tmp_path / "cache") == coded
    moefw.save_pretrained(moefw.from_pretrained(tmp_path / "in"), tmp_path / "decoded")
    shutil.copy(tmp_path / "decoded" / "model.safetensors", tmp_path / "in")
    assert ledger(assembly, cache=tmp_path / "cache").held.parameters > coded.held.parameters


# Layouts.


def of_ranks(folder: Path, form: str, parts: Mapping[str, Any]) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients of what this rank holds, and the number of its coded weights."""
    model, engine = opened(folder, form, world=dist.get_world_size(), **parts)
    layout = engine.layout
    own = slice(0, 4)
    if layout.size("dp") > 1:
        own = slice(2 * layout.index("dp"), 2 * layout.index("dp") + 2)
    whole = batch_of(own)
    result = engine.step([whole], 0.0, untimed)
    gradients: dict[str, Tensor] = {}
    for holding in holdings(model):
        if holding.parameter.grad is not None:
            gradients |= {piece.name: piece.of(holding.parameter.grad).clone() for piece in holding.pieces}
    return result.loss, gradients, len(coded_weights(model))


LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 2": {"parallel": {"experts": {"ep": 2}}},
    "pp 2": {"parallel": {"pp": 2}, "pipeline": {"use": "1f1b"}},
    "cp 2": {"parallel": {"dense": {"cp": 2}, "experts": {"ep": 2}}},
    "tp 2 and etp 2": {"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}},
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "ep 2", "tp 2 and etp 2"))
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "in_nvfp4"])
def test_ranks_compute_with_their_codes_what_they_do_with_values(
    pool: RankPool, folders: Path, family: str, layout: str
) -> None:
    parts = LAYOUTS[layout]
    found = pool.run(of_ranks, 2, folders / family, "as_stored", parts)
    wanted = pool.run(of_ranks, 2, folders / family, "decoded", parts)
    for (loss, gradients, coded), (decoded_loss, decoded_gradients, none) in zip(found, wanted, strict=True):
        assert coded > 0 == none
        assert loss == decoded_loss
        assert gradients.keys() == decoded_gradients.keys()
        assert [name for name, grad in gradients.items() if not torch.equal(grad, decoded_gradients[name])] == []


# Refusals.


def refused(folder: Path, world: int = 1, **parts: Any) -> str:
    with pytest.raises(SpecError) as error:
        ledger(resolved(json.dumps(tree(folder, "as_stored", **parts)), world=world))
    return str(error.value)


def test_codes_that_ranks_would_cut_are_refused_by_name(folders: Path, tmp_path: Path) -> None:
    save_fp8("qwen3_moe", tmp_path / "narrow", moe_intermediate_size=128)
    says = refused(tmp_path / "narrow", world=2, parallel={"experts": {"etp": 2}})
    assert "layers.0.moe.experts.0.gate_proj.weight: a part" in says
    assert "is cut through a block that shares a scale (128 x 128)." in says
    assert "use train.frozen_weights: decoded." in says
    assert "is no folder." in refused(folders / "qwen3_moe", train={"weights": str(tmp_path / "nowhere")})


def test_widths_that_ranks_would_cut_through_16_values_are_refused(tmp_path: Path) -> None:
    save_nvfp4("qwen3_moe", tmp_path / "in", moe_intermediate_size=16)
    says = refused(tmp_path / "in", world=2, parallel={"experts": {"etp": 2}})
    assert (
        "layers.0.moe.experts.0.down_proj.weight: a part (128, 8) of a weight in NVFP4 is cut through a block" in says
    )


def test_rows_of_keys_that_a_rank_computes_alone_are_whole_blocks(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    save_fp8("qwen3_moe", tmp_path / "in", **heads)
    says = refused(tmp_path / "in", world=4, parallel={"dense": {"tp": 4}, "experts": {"ep": 4}})
    assert "layers.0.attention.k_proj.weight: a part (64, 128) of a weight in FP8 is cut through a block" in says


def test_gate_and_up_of_partial_blocks_are_refused_in_a_stack(tmp_path: Path) -> None:
    save_fp8("qwen3_moe", tmp_path / "in", moe_intermediate_size=192)
    says = refused(tmp_path / "in")
    assert "layers.0.moe.experts.0.gate_proj.weight: a part" in says


def test_an_embedding_in_codes_is_refused_by_name(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "qwen3_moe", tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    name = "model.embed_tokens.weight"
    stored |= {name: stored[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 1)}
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    assert "has embed.weight in FP8, and its rows are looked up, not multiplied." in refused(tmp_path / "in")


def test_a_head_and_a_router_in_codes_compute_what_their_values_do(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "qwen3_moe", tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight"):
        scales = torch.full([-(-size // 128) for size in stored[name].shape], 0.5)
        stored |= {name: stored[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    assert {"head.weight", "layers.0.moe.router.weight"} <= coded_weights(
        opened(tmp_path / "in", "as_stored")[0]
    ).keys()
    assert_codes_compute_what_values_do(tmp_path / "in")
    assert_codes_compute_what_values_do(tmp_path / "in", model={"loss_chunk": 4})


def test_a_form_of_frozen_weights_is_no_choice_where_none_is_frozen(folders: Path) -> None:
    spec = tree(folders / "qwen3_moe", "as_stored", adapter={"use": "none"})
    (problem,) = problems_of(json.dumps(spec))
    assert "train.frozen_weights: only frozen weights are held as their folder has them, and none is frozen." in problem


def test_what_is_one_parameter_and_not_all_codes_is_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "qwen3_moe", tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    stored[name] = stored[name].bfloat16()
    del stored[f"{name}_scale_inv"]
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    says = refused(tmp_path / "in")
    assert "layers.0.moe.experts.0.gate_proj.weight in FP8 and layers.0.moe.experts.1.up_proj.weight not" in says


def test_an_operation_that_needs_values_is_refused() -> None:
    weight = filled(CodedWeight.empty((256, 128), FP8, torch.device("cpu")))
    with pytest.raises(ContractError, match="there are no values"):
        weight.float()
    with pytest.raises(ContractError, match="there are no values"):
        torch.ones(2, 128).bfloat16() @ weight.T
    with pytest.raises(ContractError, match="is cut through a block"):
        weight[64:]
    assert torch.equal(weight[128:].values(), weight.values()[128:])


# Runs and folders.


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "in_nvfp4"])
def test_logits_and_merged_folders_of_from_pretrained_are_those_of_decoded_weights(
    folders: Path, family: str, tmp_path: Path
) -> None:
    ids = tokens()
    for form in ("as_stored", "decoded"):
        model = moefw.from_pretrained(folders / family, adapter=LORA, train={"frozen_weights": form})
        assert bool(coded_weights(model.module)) == (form == "as_stored")
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(draw(name, parameter.shape, 0.05, seed=1))
            torch.save(model.eval()(ids), tmp_path / f"{form}.pt")
        moefw.save_pretrained(model, tmp_path / form)
    assert torch.equal(torch.load(tmp_path / "as_stored.pt"), torch.load(tmp_path / "decoded.pt"))
    found, wanted = (load_file(tmp_path / form / "model.safetensors") for form in ("as_stored", "decoded"))
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("family", ["gpt_oss", *deep("qwen3_moe", "in_nvfp4")])
def test_a_run_with_codes_is_resumed_evaluated_and_exported_as_one_with_values(
    folders: Path, family: str, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a fox jumps over a dog\n" * 200)
    losses, written = {}, {}
    for form in ("as_stored", "decoded"):
        run = tmp_path / form
        train = {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 9, "eval_tokens": 64}
        sections = {"data": {"use": "text", "path": str(text)}, "run": {"dir": str(run), "device": "cpu"}}
        spec = tmp_path / f"{form}.yaml"
        spec.write_text(json.dumps(tree(folders / family, form, train=train, **sections)))
        moefw_says("train", spec)
        whole = losses_of(run)
        evaluated = json.loads(moefw_says("eval", run, "--json"))["eval_loss"]
        assert len(moefw_says("generate", run, "--prompt", "a", "--tokens", "3")) > 1
        moefw_says("convert", "export", run, tmp_path / f"{form}-out")
        moefw_says("train", spec, "--resume=2")
        assert losses_of(run) == whole
        losses[form] = [*whole, evaluated]
        written[form] = load_file(tmp_path / f"{form}-out" / "model.safetensors")
    assert losses["as_stored"] == losses["decoded"]
    assert written["as_stored"].keys() == written["decoded"].keys()
    same = [torch.equal(value, written["decoded"][name]) for name, value in written["as_stored"].items()]
    assert all(same)


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
