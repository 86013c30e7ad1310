"""A run starts from the weights and with the tokenizer of a Hugging Face folder, under any layout."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import checkpoint_cases
import copies
from command_here import complaint, moefw_says
from experts_read import experts_read
from hf_models import tensors_of, theirs
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.origins import origin_of
from moefw.testing.pool import RankPool
from moefw.training.session import Session
from moefw.training.trainer import Trainer

SIZES = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2},
    **{"num_experts": 8, "moe_intermediate_size": 16},
}
TEXT = "the experts see what the router sends, and the router sees what the experts send\n" * 200
NO_CHANGE = 1e-30
"""A learning rate at which no weight changes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    theirs("qwen3_moe", SIZES).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def spec_of(where: Path, folder: Path | str, **parts: Any) -> Path:
    (where / "text.txt").write_text(TEXT)
    spec = {
        "model": {"preset": str(folder)},
        "data": {"path": str(where / "text.txt")},
        "train": {
            **{"weights": str(folder), "steps": 1, "tokens_per_step": 64, "micro_batch": 2, "seq_len": 16},
            **{"lr": NO_CHANGE, "eval_tokens": 64},
        },
        "run": {"dir": str(where / "run"), "device": "cpu"},
        **parts,
    }
    path = where / "spec.yaml"
    path.write_text(json.dumps(spec))
    return path


def saved(run: Path) -> dict[str, Tensor]:
    tensors = checkpoint_cases.saved(run / "checkpoints" / "step-1")
    return {name.removeprefix("model/"): one for name, one in tensors.items() if name.startswith("model/")}


def read_by_a_run(spec: Path) -> set[int]:
    """Return the experts whose weights a run reads on this rank before its first step. Collective."""
    assembly = assemble(spec, ["parallel.experts.ep=2"], defaults=defaults(), world=2)
    layout, shared, device = open_layout(assembly, "cpu"), Shared(), torch.device("cpu")
    model, data = build_model(assembly, layout, device, shared), assembly.parts.data.prepare(spec.parent / "cache")
    session = Session(assembly=assembly, device=device, layout=layout, data=data, model=model, shared=shared)
    with experts_read() as seen:
        Trainer(session, resume=None)
    return seen


def test_a_rank_reads_its_own_experts(pool: RankPool, folder: Path, tmp_path: Path) -> None:
    assert pool.run(read_by_a_run, 2, spec_of(tmp_path, folder)) == [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.mark.parametrize(
    "parallel", [{}, {"dense": {"shard": "all"}, "experts": {"ep": 2}}], ids=["one rank", "two ranks"]
)
def test_the_weights_of_the_first_step_are_those_of_the_folder(
    parallel: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    ended = copies.run("moefw", "train", spec_of(tmp_path, folder, parallel=parallel))
    assert ended.returncode == 0, ended.stderr
    theirs, rules = tensors_of(folder), FAMILIES["qwen3_moe"].rules
    found = saved(tmp_path / "run")
    assert len(found) == len(theirs)
    for name, tensor in found.items():
        origin = origin_of(name, rules)
        assert torch.equal(tensor, origin.of(theirs[origin.name])), name
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_run_goes_on_without_the_folder(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    spec = spec_of(tmp_path, copy)
    moefw_says("train", spec)
    for path in copy.glob("*.safetensors"):
        path.unlink()
    moefw_says("train", spec, "train.steps=2", "--resume")
    assert "holds no safetensors files" in complaint("train", spec)


def positions(folder: Path) -> int:
    number: int = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return number


@pytest.mark.parametrize("taken", [32768, 8])
def test_a_model_leaves_with_the_positions_that_it_took_or_more_if_it_trained_on_them(
    taken: int, folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": taken}
    (copy / "config.json").write_text(json.dumps(config))
    moefw_says("train", spec_of(tmp_path, copy))
    shutil.rmtree(copy)
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "out")
    assert positions(tmp_path / "out") == max(taken, 16)


def test_positions_that_are_no_number_are_told_at_the_export(folder: Path, tmp_path: Path) -> None:
    moefw_says("train", spec_of(tmp_path, folder))
    base = tmp_path / "run" / "base_config.json"
    base.write_text(json.dumps(json.loads(base.read_text()) | {"max_position_embeddings": "many"}))
    said = complaint("convert", "export", tmp_path / "run", tmp_path / "out")
    assert f"{base}: max_position_embeddings 'many' is not a whole number" in said
    assert "Write the number there, or remove the line" in said


def test_weights_that_are_not_finite_are_refused_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = tensors_of(copy)
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    assert "holds NaN or infinity in model.layers.1.mlp.experts.5.up_proj.weight." in complaint(
        "train", spec_of(tmp_path, copy)
    )


def test_a_kept_spec_names_the_folder_from_anywhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    moefw_says("train", spec_of(tmp_path, f"./{folder.name}"))
    kept = (tmp_path / "run" / "spec.yaml").read_text()
    assert f"weights: {folder}" in kept
    assert f"{folder}/tokenizer.json" in kept


EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune"
SMALL = [
    "train.steps=4",
    "train.lr=0.01",
    "train.tokens_per_step=256",
    "train.micro_batch=1",
    "train.eval_tokens=128",
]


def made(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Run a script of the example."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLE / script), run_name="__main__")


def shell(*command: object) -> str:
    """What a command of moefw says."""
    ended = copies.run("moefw", *command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def loss_falls(run: str) -> bool:
    losses = [json.loads(record)["loss"] for record in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return losses[-1] < losses[0]


def test_the_example_fine_tunes_a_model_of_transformers_and_hands_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft
    import transformers

    monkeypatch.chdir(tmp_path)
    made(monkeypatch, "make_model.py", "runs/model")
    shell("train", EXAMPLE / "spec.yaml", *SMALL)
    shell("convert", "export", "runs/fine_tune", "runs/tuned")
    assert loss_falls("runs/fine_tune")
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "tuned")
    assert tuned.config.model_type == "qwen3_moe"
    assert tensors_of(tmp_path / "runs" / "tuned").keys() == tensors_of(tmp_path / "runs" / "model").keys()

    # Then its conversations, and an adapter that peft loads.
    made(monkeypatch, "make_chats.py", "runs/chats.jsonl")
    shell("train", EXAMPLE / "chats.yaml", *SMALL)
    shell("convert", "export", "runs/chats", "runs/adapter", "--adapter", "peft")
    assert loss_falls("runs/chats")
    adapted = peft.PeftModel.from_pretrained(tuned, tmp_path / "runs" / "adapter")
    assert adapted.peft_config["default"].r == 16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "runs" / "tuned")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What?"}], tokenize=False)
    assert text == "<|im_start|>user\nWhat?<|im_end|>\n"


@pytest.mark.deep
def test_the_other_example_goes_from_mxfp4_to_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its head says. vllm#22380: a tuned gpt-oss could not be written as MXFP4."""
    import transformers

    monkeypatch.chdir(tmp_path)
    made(monkeypatch, "make_chats.py", "runs/chats.jsonl")
    made(monkeypatch, "make_model.py", "runs/oss", "gpt_oss")
    base = ["model.preset=runs/oss/config.json", "train.weights=runs/oss", "run.dir=runs/oss-run"]
    shell("train", EXAMPLE / "spec.yaml", *SMALL, *base)
    shell("convert", "export", "runs/oss-run", "runs/oss-mxfp4", "--dtype", "mxfp4")
    shell("train", EXAMPLE / "mxfp4.yaml", *SMALL)
    assert loss_falls("runs/mxfp4")
    told = shell("convert", "export", "runs/mxfp4", "runs/mxfp4-tuned", "--dtype", "mxfp4")
    assert "32 weights have not trained: their MXFP4 is copied\n16 weights are encoded in MXFP4, once" in told
    before, after = (tensors_of(tmp_path / "runs" / folder) for folder in ("oss-mxfp4", "mxfp4-tuned"))
    assert before.keys() == after.keys()
    codes = [name for name in before if name.endswith(("_blocks", "_scales"))]
    changed = {name for name in codes if not torch.equal(before[name], after[name])}
    assert changed == {name for name in codes if "down_proj" in name}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "mxfp4-tuned", dtype=torch.bfloat16)
    assert model.config.model_type == "gpt_oss"
