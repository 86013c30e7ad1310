"""A Hugging Face folder becomes a run at step 0, which generates, trains on and is exported with the same bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import copies
from command_here import complaint, moefw_says
from hf_models import MODELS, loaded, model_of, same, tensors_of
from pairwise import deep, each_value


def with_tokenizer(folder: Path) -> Path:
    """Add a tokenizer of a few bytes, which leaves ids of the model unused."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate("abcdefghij ")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("family", "dtype"), each_value(MODELS, ["bf16", "fp32"]))
def test_what_is_imported_and_exported_has_the_same_bits(family: str, dtype: str, tmp_path: Path) -> None:
    model = model_of(family, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    moefw_says("convert", "import", tmp_path / "in", tmp_path / "run")
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", dtype)
    assert same(tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out"))
    assert same(loaded(model, tmp_path / "out"), loaded(model, tmp_path / "in"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model_of("deepseek_v3").save_pretrained(path)
    return with_tokenizer(path)


def test_an_imported_run_generates_without_the_folder(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "in")
    moefw_says("convert", "import", copy, tmp_path / "run")
    shutil.rmtree(copy)
    said = moefw_says("generate", tmp_path / "run", "--prompt", "abc", "--tokens", "3")
    assert said.startswith("a b c")


@pytest.mark.parametrize("memory", [*deep("[]"), "[{use: optimizer-bf16}]"])
def test_an_imported_run_trains_on_in_any_layout(folder: Path, memory: str, tmp_path: Path) -> None:
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("abcdefghij " * 500)
    moefw_says("convert", "import", folder, run)
    overrides = [
        *("train.steps=1", "train.tokens_per_step=64", "train.micro_batch=2", "train.seq_len=16", "train.lr=1e-30"),
        *("parallel.experts={ep: 2, shard: all}", "parallel.dense.shard=all", f"data.path={text}", f"memory={memory}"),
        *("train.eval_tokens=32", "model.vocab_size=62", "run.device=cpu", "routing.balance[0].rate=0.0"),
    ]
    ended = copies.run("moefw", "train", f"{run}/spec.yaml", *overrides, "--resume")
    assert ended.returncode == 0, ended.stderr
    moefw_says("convert", "export", run, tmp_path / "out", "--dtype", "fp32")
    assert same(tensors_of(folder), tensors_of(tmp_path / "out"))


@pytest.mark.fault("a folder to import whose tokenizer.json is {kind}", "refused, and nothing of it is copied")
@pytest.mark.parametrize("kind", ["a link to a secret", "other JSON", "a pipe", "a dangling link"])
def test_a_tokenizer_that_is_none_is_not_imported(folder: Path, tmp_path: Path, kind: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "in")
    tokenizer, secret = copy / "tokenizer.json", tmp_path / "secret.json"
    secret.write_text('{"key": "a secret"}')
    tokenizer.unlink()
    if kind == "a pipe":
        os.mkfifo(tokenizer)
    elif kind == "other JSON":
        shutil.copyfile(secret, tokenizer)
    else:
        tokenizer.symlink_to(secret if kind == "a link to a secret" else tmp_path / "nothing")
    said = complaint("convert", "import", copy, tmp_path / "run")
    assert f"{tokenizer} is not a tokenizer.json: " in said
    assert "Download it again, or take it out of the folder." in said
    assert "a secret" not in said
    assert not (tmp_path / "run").exists()


def test_the_links_of_a_download_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    moefw_says("convert", "import", snapshot, tmp_path / "run")
    kept = tmp_path / "run" / "tokenizer.json"
    assert not kept.is_symlink()
    assert kept.read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.fault("a run to export whose tokenizer.json is a link to another file", "nothing of it is copied")
def test_a_tokenizer_that_is_none_is_not_exported(folder: Path, tmp_path: Path) -> None:
    moefw_says("convert", "import", folder, tmp_path / "run")
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "run" / "tokenizer.json").unlink()
    (tmp_path / "run" / "tokenizer.json").symlink_to(tmp_path / "secret.txt")
    said = complaint("convert", "export", tmp_path / "run", tmp_path / "out")
    assert f"{tmp_path}/run/tokenizer.json is not a tokenizer.json: " in said
    assert not (tmp_path / "out").exists()


def test_nothing_is_imported_over_something_or_from_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is there and is no empty folder" in complaint("convert", "import", folder, tmp_path / "full")
    assert "is no folder" in complaint("convert", "import", tmp_path / "nowhere", tmp_path / "run")
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-8])
    assert "model.safetensors is no whole safetensors file" in complaint("convert", "import", broken, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "full"]
