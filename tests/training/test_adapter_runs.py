"""Whole runs with adapters over a folder: what is saved, resumed, evaluated and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from test_freeze import assert_evaluated_resumed_and_read, base, losses, tensors

import copies
from command_here import complaint, moefw_says
from moefw import Batch, from_pretrained
from moefw.commands.specs import read_run
from moefw.training.trained import open_trained
from small_spec import small_spec

__all__ = ["base"]
ADAPTER = {"use": "lora", "rank": 8, "alpha": 16.0}


@pytest.fixture
def spec(tmp_path: Path, base: Path) -> Path:
    """A run over a folder that trains adapters of all weights that may have some."""
    shutil.copytree(base, tmp_path / "base")
    path = small_spec(tmp_path, steps=4, checkpoint_every=2, eval_every=2)
    tree = json.loads(path.read_text())
    tree["train"] |= {"weights": str(tmp_path / "base"), "keep_checkpoints": 9, "lr": 0.05}
    tree["adapter"] = ADAPTER
    path.write_text(json.dumps(tree))
    return path


def test_a_run_trains_adapters_alone_and_saves_nothing_else(spec: Path, tmp_path: Path) -> None:
    told = " ".join(moefw_says("train", spec).split())
    assert "parameters train" in told
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-4" / "rank-00000.safetensors")
    assert {name.rpartition(".")[2] for name in saved if name.startswith("model/")} == {"lora_A", "lora_B"}
    factors = saved["model/layers.0.moe.experts.0.gate_up_proj.lora_A"], saved["model/layers.0.attention.q_proj.lora_B"]
    assert all(factor.dtype is torch.float32 and factor.abs().sum() > 0 for factor in factors)


def test_a_resumed_run_and_an_evaluation_have_the_adapters(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    whole = losses(tmp_path / "run")
    assert whole[-1] < whole[0]
    assert_evaluated_resumed_and_read(spec, tmp_path / "run")


@pytest.mark.deep
def test_a_run_resumes_in_another_layout(spec: Path, tmp_path: Path) -> None:
    moefw_says("train", spec)
    whole = losses(tmp_path / "run")
    for layout in ("{experts: {ep: 2}}", "{dense: {shard: all}, experts: {etp: 2}}"):
        ended = copies.run("moefw", "train", spec, "--resume=2", f"parallel={layout}")
        assert ended.returncode == 0, ended.stderr
        assert losses(tmp_path / "run") == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("gemm", ["grouped", "loop"])
def test_an_export_has_the_adapters_merged_and_computes_the_same(spec: Path, tmp_path: Path, gemm: str) -> None:
    moefw_says("train", spec, f"gemm.use={gemm}")
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")
    ids_BS = torch.arange(60).view(2, 30)
    with open_trained(read_run(str(tmp_path / "run"), ())) as (session, _, _), torch.no_grad():
        model: Any = session.model.eval()
        wanted, _ = model.logits(Batch(ids_BS=ids_BS, labels_BS=ids_BS, dropless=True))
        logits = from_pretrained(tmp_path / "out").eval()(ids_BS)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


def test_with_other_targets_experts_stay_as_they_are(spec: Path, tmp_path: Path) -> None:
    """peft#3711 read a target as another one, and trained it."""
    moefw_says("train", spec, "adapter.targets=[attention.q_proj]")
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-4" / "rank-00000.safetensors")
    trained = {name for name in saved if name.startswith("model/")}
    assert trained == {f"model/layers.{n}.attention.q_proj.lora_{factor}" for n in range(1) for factor in "AB"}
    told = complaint("train", spec, "adapter.targets=[attention.q_porj]")
    assert "adapter.targets: lora needs an adapter of attention.q_porj" in told
    assert "Did you mean 'attention.q_proj'?" in told


def test_check_asks_for_the_folder_and_for_a_rank_that_grouped_products_have(spec: Path) -> None:
    tree = json.loads(spec.read_text())
    del tree["train"]["weights"]
    spec.write_text(json.dumps(tree))
    told = moefw_says("check", spec, "adapter.rank=12", code=2)
    assert "lora trains beside the weights of a folder, and train.weights names none. Name one." in told
    assert "rank 12: grouped products of experts want a rank that is a multiple of 8." in told


def test_an_adapter_of_a_run_is_loaded_by_peft_and_by_another_run(spec: Path, tmp_path: Path) -> None:
    import transformers
    from peft import PeftModel

    moefw_says("train", spec)
    told = moefw_says("convert", "export", tmp_path / "run", tmp_path / "adapter", "--adapter", "peft")
    assert f"{tmp_path}/adapter holds the adapter of step 4, of {tmp_path}/base" in told
    ids_BS = torch.arange(60).view(2, 30)
    with open_trained(read_run(str(tmp_path / "run"), ())) as (session, _, _), torch.no_grad():
        model: Any = session.model.eval()
        wanted, _ = model.logits(Batch(ids_BS=ids_BS, labels_BS=ids_BS, dropless=True))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    logits = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids_BS).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    begins = f"adapter.weights={tmp_path}/adapter"
    moefw_says("check", spec, begins)
    assert "alpha of the adapter is 3.0, and" in moefw_says("check", spec, begins, "adapter.alpha=3", code=2)
    assert "adapter_model.safetensors is missing" in moefw_says("check", spec, f"{begins}s", code=2)
    moefw_says("train", spec, begins, f"run.dir={tmp_path}/next", "train.steps=1")
    assert losses(tmp_path / "next")[0] < losses(tmp_path / "run")[0]
    kept = YAML(typ="safe").load(tmp_path / "next" / "spec.yaml")
    assert kept["adapter"]["weights"] == f"{tmp_path}/adapter"
    assert "rank of the adapter is 16, and" in complaint("train", spec, begins, "adapter.rank=16")


def test_what_has_no_files_of_peft_is_refused(spec: Path, tmp_path: Path) -> None:
    export = ("convert", "export", tmp_path / "run", tmp_path / "out", "--adapter", "peft")
    moefw_says("train", spec, "train.freeze=['layers.*.moe.experts.*']")
    assert "also has weights that trained beside adapters, such as embed.weight." in complaint(*export)
    moefw_says("train", spec, "adapter={use: none}", "train.freeze=[embed.weight]")
    assert "PEFT has no files of adapter none. Leave adapter out" in complaint(*export)
    assert not (tmp_path / "out").exists()


def test_dora_goes_out_and_in_again(spec: Path, tmp_path: Path) -> None:
    dora = "adapter={use: dora, rank: 4, alpha: 8.0}"
    moefw_says("train", spec, dora)
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "adapter", "--adapter", "peft")
    begins = f"adapter={{use: dora, rank: 4, alpha: 8.0, weights: {tmp_path}/adapter}}"
    moefw_says("train", spec, begins, f"run.dir={tmp_path}/next", "train.steps=1", "train.lr=1e-12")
    saved, again = (
        load_file(tmp_path / run / "checkpoints" / step / "rank-00000.safetensors")
        for run, step in (("run", "step-4"), ("next", "step-1"))
    )
    names = [name for name in saved if name.startswith("model/")]
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B", "lora_magnitude"}
    for name in names:
        torch.testing.assert_close(again[name], saved[name], rtol=1e-6, atol=1e-9)
