"""Damage of a checkpoint is named by file and tensor, and the newest complete one is offered."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import checkpoint_cases
from checkpoint_cases import SHARD, forge, forge_shard, refused, tiny, with_header
from moefw.core.errors import CheckpointError
from moefw.training import checkpoint
from moefw.training.checkpoint.shards import described


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint, the only one of its run."""
    return checkpoint_cases.save(tmp_path / "run", 4)[0]


@pytest.mark.fault("each byte of a shard flips", "refused; the damaged tensor is named")
def test_every_flipped_byte_of_a_shard_is_named(folder: Path) -> None:
    """In header or tensor: the first bit of one byte, the second of the next, and so on."""
    path = folder / SHARD
    whole, names = path.read_bytes(), described(path).tensors
    start = min(tensor.begin for tensor in names.values())
    words = {"model": "parameter {}", "optimizer/step": "optimizer state step of {}"}
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        said = refused(folder)
        if place < start:
            assert f"{path} is damaged in its header." in said, place
        else:
            (name,) = (name for name, tensor in names.items() if tensor.begin <= place < tensor.end)
            kind, _, of = name.rpartition("/")
            told = words.get(kind, f"optimizer state {kind.split('/')[-1]} of {{}}").format(of)
            assert f"{path} is damaged: {told}." in said, place


def test_several_damaged_tensors_are_counted(folder: Path) -> None:
    path = folder / SHARD
    data = path.read_bytes()
    path.write_bytes(data[:-60] + bytes(60))
    assert "and " in refused(folder).split("is damaged: ")[1].split(".")[0]


def test_a_file_of_another_length_is_told(folder: Path) -> None:
    path = folder / SHARD
    data = path.read_bytes()
    path.write_bytes(data + b"\0")
    assert f"{path} is damaged: it has another length" in refused(folder)
    path.write_bytes(data[:-4])
    assert f"{path} is damaged: " in refused(folder)
    path.write_bytes(data[:3])
    assert f"{path} is damaged in its header" in refused(folder)
    path.unlink()
    assert f"{path} is missing" in refused(folder)
    path.mkdir()
    assert f"{path} is no file" in refused(folder)


@pytest.mark.fault("two shards are exchanged", "refused; both are named")
def test_exchanged_shards_are_named(folder: Path) -> None:
    one, other = folder / SHARD, folder / "rank-00001.safetensors"
    other.write_bytes(save({"model/more": torch.ones(2)}))
    forge(folder, lambda content: content["shards"].append(described(other).to_data()))
    assert "holds also parameter more" in refused(folder)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert f"{one} holds what {other.name} held: files were exchanged" in refused(folder)


def overlapping(header: dict[str, Any]) -> None:
    header["model/norm"]["data_offsets"] = header["model/embed"]["data_offsets"]


def renamed(header: dict[str, Any]) -> None:
    header["model/other"] = header.pop("model/norm")


def regrown(header: dict[str, Any]) -> None:
    header["model/embed"]["shape"] = [3, 2]


def retyped(header: dict[str, Any]) -> None:
    header["model/embed"]["dtype"] = "I32"


@pytest.mark.fault("a shard's header is changed under a hash that is right ({id})", "refused by name")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (overlapping, "is no safetensors file"),
        (renamed, "name other tensors: 'model/norm'"),
        (regrown, "parameter embed is F32 (3, 2), and F32 (2, 3) in the manifest"),
        (retyped, "parameter embed is I32 (2, 3), and F32 (2, 3) in the manifest"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_header_that_says_something_else_is_told_though_the_hash_is_right(
    folder: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    forge_shard(folder, with_header((folder / SHARD).read_bytes(), change))
    assert told in refused(folder)


@pytest.mark.fault("a shard is no safetensors file under a hash that is right ({id})", "refused by name")
@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 40, struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 100_000) + b"[" * 100_000],
    ids=["empty", "letters", "endless", "nested"],
)
def test_what_is_no_safetensors_file_is_told_though_the_hash_is_right(folder: Path, data: bytes) -> None:
    forge_shard(folder, data)
    assert f"{folder / SHARD} is no safetensors file" in refused(folder)


def put(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor, its description and the hashes; None removes it."""
    tensors = load_file(folder / SHARD)
    tensors.pop(name, None)
    (folder / SHARD).write_bytes(save(tensors | ({} if tensor is None else {name: tensor})))
    forge(folder, lambda content: content.update(shards=[described(folder / SHARD).to_data()]))


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("model/embed", torch.zeros(2, 3).double(), "parameter embed is F64 there and F32 here"),
        ("model/norm", torch.zeros(3).int(), "parameter norm is I32 there and F32 here"),
        ("model/norm", torch.zeros(3).bfloat16(), "parameter norm is BF16 there and F32 here"),
        ("model/norm", torch.zeros(1), "parameter norm is (1,) there and (3,) here"),
        ("model/norm", None, "it lacks parameter norm"),
        ("model/gate", torch.zeros(1), "it holds also parameter gate"),
        ("optimizer/exp_avg/norm", torch.zeros(3).long(), "optimizer state exp_avg of norm is I64 there and F32 here"),
        ("optimizer/exp_avg/norm", torch.zeros(1), "optimizer state exp_avg of norm is (1,) there and (3,) here"),
        ("optimizer/exp_avg/norm", None, "keeps exp_avg_sq, step of norm, and this one exp_avg, exp_avg_sq, step"),
        ("optimizer/exp_avg/gate", torch.zeros(3), "it holds also optimizer state exp_avg of gate"),
    ],
)
def test_what_the_model_does_not_expect_is_refused_by_name(
    folder: Path, name: str, tensor: torch.Tensor | None, told: str
) -> None:
    put(folder, name, tensor)
    assert told in refused(folder)


def test_a_fresh_optimizer_takes_no_state_of_another_shape(folder: Path) -> None:
    put(folder, "optimizer/exp_avg/norm", torch.zeros(1))
    model, optimizer = tiny()
    with pytest.raises(CheckpointError, match=r"exp_avg of norm is \(1,\) there and \(3,\) here"):
        checkpoint.load(folder, model, optimizer)
    assert not optimizer.state


def test_states_of_bf16_become_fp32(folder: Path) -> None:
    put(folder, "optimizer/exp_avg/norm", torch.full((3,), 0.5).bfloat16())
    model, optimizer = tiny()
    checkpoint.load(folder, model, optimizer)
    assert optimizer.state[model.norm]["exp_avg"].equal(torch.full((3,), 0.5))


def test_the_newest_whole_checkpoint_is_offered(tmp_path: Path) -> None:
    two, four, six = checkpoint_cases.save(tmp_path, 2, 4, 6)
    put(four, "model/norm", torch.full((3,), torch.nan))
    (six / SHARD).write_bytes(b"")
    assert "The checkpoint of step 2 is whole: train on with --resume=last-good or --resume=2." in refused(six)
    shutil.rmtree(two)
    assert "No other checkpoint of the run is whole" in refused(six)


@pytest.mark.fault("the newest checkpoints are damaged or hold NaN", "--resume=last-good passes over them and says why")
def test_last_good_passes_over_what_is_damaged_and_what_is_not_finite(tmp_path: Path) -> None:
    _, four, six, eight = checkpoint_cases.save(tmp_path, 2, 4, 6, 8)
    put(four, "optimizer/exp_avg/norm", torch.full((3,), torch.inf))
    (six / SHARD).write_bytes(b"")
    (eight / "manifest.json").unlink()
    chosen = checkpoint.choose(tmp_path, "last-good")
    assert chosen is not None
    assert chosen.step == 2
    eighth, sixth, fourth = chosen.passed
    assert eighth == f"{eight / 'manifest.json'} is missing."
    assert sixth == f"{six / SHARD} is damaged in its header."
    assert fourth == f"{four}: optimizer state exp_avg of norm is not finite."


def test_without_a_whole_checkpoint_last_good_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    for folder in checkpoint_cases.save(tmp_path, 2, 4):
        (folder / SHARD).unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of .* is whole.*step-4.* is missing.*step-2.* is missing"
    ):
        checkpoint.choose(tmp_path, "last-good")
