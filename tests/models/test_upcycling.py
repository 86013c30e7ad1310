"""A dense model gets experts and computes what it did; then it trains on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import moefw
from checkpoint_cases import spoil
from command_here import complaint, moefw_says
from hf_models import VOCABULARY, tensors_of, theirs
from moefw.commands import specs
from moefw.compose.build import Shared, build_model, open_layout
from moefw.core.stages import Batch
from moefw.training import checkpoint
from moefw.training.upcycling import Upcycling

IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "tie_word_embeddings": False},
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4, "head_dim": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 6},
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    return saved("qwen3", tmp_path_factory.mktemp("qwen3"))


def saved(family: str, folder: Path) -> tuple[Path, Tensor]:
    """Save a dense model of ``transformers``; return its folder and its logits."""
    model = theirs(family, {**SIZES, **DENSE[family]})
    model.save_pretrained(folder)
    return folder, model(input_ids=IDS).logits.detach()


@torch.no_grad()
def of_run(run: Path, *overrides: str) -> tuple[Tensor, Any]:
    """Return the logits of a run's checkpoint of step 0, and each layer's statistics."""
    assembly = specs.read_run(str(run), ["run.device=cpu", *overrides])
    model: Any = build_model(assembly, open_layout(assembly, "cpu"), torch.device("cpu"), Shared())
    checkpoint.load(run / "checkpoints" / "step-0", model, None, tokenizer="")
    logits, layers = model.logits(Batch(ids_BS=IDS, labels_BS=IDS))
    return logits, layers


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


@pytest.mark.parametrize("family", DENSE)
def test_a_dense_folder_is_a_model(family: str, tmp_path: Path) -> None:
    folder, wanted = saved(family, tmp_path)
    assert near(moefw.from_pretrained(folder)(IDS), wanted)


@pytest.mark.parametrize(
    "options", ["--experts=4 --top-k=4", "--experts=4 --top-k=2", "--experts=1 --top-k=1 --pre-softmax"]
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_whole_copies_compute_what_the_dense_model_does(family: str, options: str, tmp_path: Path) -> None:
    folder, wanted = saved(family, tmp_path / "in")
    moefw_says("convert", "upcycle", folder, tmp_path / "run", *options.split())
    assert near(of_run(tmp_path / "run")[0], wanted)


@pytest.mark.parametrize(
    "options", ["--experts=12 --top-k=3", "--experts=12 --top-k=6", "--experts=12 --top-k=12 --pre-softmax"]
)
def test_so_do_copies_of_slices(options: str, qwen3: tuple[Path, Tensor], tmp_path: Path) -> None:
    moefw_says("convert", "upcycle", qwen3[0], tmp_path / "run", *options.split(), "--granularity=3")
    assert near(of_run(tmp_path / "run")[0], qwen3[1])


def test_a_token_gets_every_slice_as_often(qwen3: tuple[Path, Tensor], tmp_path: Path) -> None:
    moefw_says("convert", "upcycle", qwen3[0], tmp_path / "run", "--experts=12", "--top-k=6", "--granularity=3")
    for layer in of_run(tmp_path / "run")[1].values():
        slices_TK, groups_TK = (layer.expert_ids_TK % 3).sort(1).values, (layer.expert_ids_TK // 3).sort(1).values
        assert (slices_TK == torch.tensor([0, 0, 1, 1, 2, 2])).all()
        assert (groups_TK[:, ::3] == groups_TK[:, 2::3]).all()
        assert len(groups_TK.unique()) == 4


def test_a_softmax_over_all_experts_keeps_the_output_where_the_router_does_not_know(
    qwen3: tuple[Path, Tensor], tmp_path: Path
) -> None:
    how = ["--experts=12", "--top-k=3", "--granularity=3", "--pre-softmax"]
    moefw_says("convert", "upcycle", qwen3[0], tmp_path / "run", *how)
    assert near(of_run(tmp_path / "run")[0], qwen3[1], 0.1)
    assert not near(of_run(tmp_path / "run")[0], qwen3[1])


@pytest.mark.parametrize("pre_softmax", [True, False])
def test_the_scale_is_that_of_the_paper(pre_softmax: bool) -> None:
    how = Upcycling(num_experts=64, top_k=8, granularity=4, pre_softmax=pre_softmax, scaling="paper")
    assert how.scale == (16 * 4 * 4 / 8 if pre_softmax else 4)
    assert [how.factor(matrix) ** 3 for matrix in ("gate", "up", "down")] == pytest.approx([how.scale] * 3)


def test_weights_are_slices_times_their_factor(qwen3: tuple[Path, Tensor], tmp_path: Path) -> None:
    how = ["--experts=4", "--top-k=2", "--granularity=2", "--scaling=paper"]
    moefw_says("convert", "upcycle", qwen3[0], tmp_path / "run", *how)
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype=fp32")
    dense, found = tensors_of(qwen3[0]), tensors_of(tmp_path / "out")
    down, up = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}"
        cut = slice(24 * (expert % 2), 24 * (expert % 2) + 24)
        torch.testing.assert_close(found[f"{name}.down_proj.weight"], dense[down][:, cut] * 2 ** (1 / 3))
        torch.testing.assert_close(found[f"{name}.up_proj.weight"], dense[up][cut] * 2 ** (1 / 3))
    router_ED = found["model.layers.1.mlp.gate.weight"]
    assert torch.equal(router_ED[0::2], router_ED[1::2])
    assert not torch.equal(router_ED[0], router_ED[2])


def test_no_dense_model_is_upcycled_that_is_not_finite(qwen3: tuple[Path, Tensor], tmp_path: Path) -> None:
    how = ["--experts=4", "--top-k=2"]
    moefw_says("convert", "import", qwen3[0], tmp_path / "dense")
    spoil(tmp_path / "dense" / "checkpoints" / "step-0", "model/layers.0.mlp.up_proj.weight")
    said = complaint("convert", "upcycle", tmp_path / "dense", tmp_path / "run", *how)
    assert (
        "step-0 holds NaN or infinity in layers.0.mlp.up_proj.weight. No other checkpoint of the run is whole" in said
    )
    folder = shutil.copytree(qwen3[0], tmp_path / "in")
    tensors = tensors_of(folder)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    said = complaint("convert", "upcycle", folder, tmp_path / "run", *how)
    assert "in holds NaN or infinity in model.layers.0.mlp.up_proj.weight." in said
    assert not (tmp_path / "run").exists()


def test_a_dense_run_is_a_source_and_the_result_trains_on(tmp_path: Path) -> None:
    theirs("qwen3", {**SIZES, "head_dim": 6, "vocab_size": 256}).save_pretrained(tmp_path / "in")
    dense, run, text = tmp_path / "dense", tmp_path / "run", tmp_path / "text.txt"
    moefw_says("convert", "import", tmp_path / "in", dense)
    moefw_says("convert", "upcycle", dense, run, "--experts=4", "--top-k=2", "--granularity=2")
    assert near(of_run(run)[0], of_run(dense)[0])
    text.write_text("what a router sends, experts see\n" * 100)
    sizes = ["tokens_per_step=64", "micro_batch=2", "seq_len=16", "eval_tokens=32", "steps=1"]
    overrides = [f"data.path={text}", "run.device=cpu", "routing.balance=[{kind: aux_loss}]"]
    moefw_says("train", run / "spec.yaml", *(f"train.{size}" for size in sizes), *overrides, "--resume")
    assert (run / "checkpoints" / "step-1").is_dir()


def test_all_that_does_not_fit_is_told_at_once(qwen3: tuple[Path, Tensor], tmp_path: Path) -> None:
    how = ["--experts=6", "--top-k=7", "--granularity=5"]
    said = moefw_says("convert", "upcycle", qwen3[0], tmp_path / "run", *how, code=2)
    for what in (
        "granularity 5 does not divide 6 experts",
        "granularity 5 does not divide top-k 7",
        "granularity 5 does not divide the MLP's 48 hidden values",
        "top_k 7 of 6 experts cannot be chosen",
    ):
        assert what in said
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_upcycled_is_named(qwen3: tuple[Path, Tensor], tmp_path: Path) -> None:
    moefw_says("convert", "upcycle", qwen3[0], tmp_path / "run", "--experts=4", "--top-k=2")
    again = ["convert", "upcycle", tmp_path / "run"]
    assert "layers [0, 1] have experts." in complaint(*again, tmp_path / "twice", "--experts=4", "--top-k=2")
    assert "is there and is no empty folder" in complaint(
        "convert", "upcycle", qwen3[0], tmp_path / "run", "--experts=4", "--top-k=2"
    )
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text('{"model_type": "gemma"}')
    upcycled = complaint("convert", "upcycle", tmp_path / "gemma", tmp_path / "new", "--experts=4", "--top-k=2")
    assert "models of type 'gemma' cannot be read" in upcycled
    assert not (tmp_path / "new").exists()
