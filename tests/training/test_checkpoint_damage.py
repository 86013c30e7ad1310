"""Damage of a checkpoint is named by file and tensor, and the newest complete one is offered."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_cases
from checkpoint_cases import INDEX, SHARD, forge, forge_index, put, refused, tiny
from moefw.core.errors import CheckpointError
from moefw.training import checkpoint
from moefw.training.checkpoint.files import HASH_LENGTH, file_of, header, write
from moefw.training.checkpoint.manifest import Damage
from moefw.training.checkpoint.parts import Part
from moefw.training.checkpoint.reading import opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint, the only one of its run."""
    return checkpoint_cases.save(tmp_path / "run", 4)[0]


@pytest.mark.fault("each byte of a shard flips", "refused; the damaged tensor is named")
def test_every_flipped_byte_of_a_shard_is_named(folder: Path) -> None:
    """In header or tensor: the first bit of one byte, the second of the next, and so on."""
    path = folder / SHARD
    whole = path.read_bytes()
    parts = opened(folder).files[0].parts
    start = len(header(parts))
    words = {"model": "parameter {}", "optimizer/step": "optimizer state step of {}"}
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        said = refused(folder, filled=place >= start)
        if place < start:
            assert f"{path} is damaged in its header." in said, place
        else:
            (name,) = (part.name for part in parts if part.begin <= place - start < part.begin + part.nbytes)
            kind, _, of = name.rpartition("/")
            told = words.get(kind, f"optimizer state {kind.split('/')[-1]} of {{}}").format(of)
            assert f"{path} is damaged: {told}." in said, place


@pytest.mark.fault("each byte of an index flips", "refused by name")
def test_every_flipped_byte_of_an_index_is_named(folder: Path) -> None:
    path = folder / INDEX
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        assert f"{path} is damaged." in refused(folder), place


def test_a_file_of_another_length_is_told(folder: Path) -> None:
    path = folder / SHARD
    data = path.read_bytes()
    path.write_bytes(data + b"\0")
    assert f"{path} is damaged: it has another length" in refused(folder)
    path.write_bytes(data[:-4])
    assert f"{path} is damaged: it has another length" in refused(folder)
    path.write_bytes(data[:3])
    assert f"{path} is damaged in its header" in refused(folder)
    path.unlink()
    assert f"{path} is missing" in refused(folder)
    path.mkdir()
    assert f"{path} is no file" in refused(folder)


@pytest.mark.fault("two shards are exchanged", "refused; both are named")
def test_exchanged_shards_are_named(folder: Path) -> None:
    one, other = folder / SHARD, folder / file_of(1)
    more = [Part(name="model/more", values=torch.ones(2), corner=(0,), whole=(2,))]
    added = write(other, more, lambda said: None)

    def add(content: dict[str, Any]) -> None:
        content["files"][other.name] = added.digest
        content["tensors"]["model/more"] = {"dtype": "F32", "shape": [2]}

    forge(folder, add)
    assert "it holds also parameter more" in refused(folder)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    with pytest.raises(Damage, match=re.escape(f"{one} holds what {other.name} held: files were exchanged")):
        opened(folder).verify()


def boxes(index: dict[str, Any]) -> dict[str, Any]:
    """Return the boxes of the parameters and their moments."""
    return next(group["boxes"] for group in index["parts"] if "model" in group["kinds"])


def dropped(index: dict[str, Any]) -> None:
    boxes(index).pop("embed")
    index["hashes"] = index["hashes"][3 * HASH_LENGTH :]


def cut(index: dict[str, Any]) -> None:
    boxes(index)["embed"] = [[0, 0], [1, 3]]


def moved(index: dict[str, Any]) -> None:
    boxes(index)["embed"] = [[1, 0], [2, 3]]


def renamed(index: dict[str, Any]) -> None:
    boxes(index)["other"] = boxes(index).pop("embed")


def unhashed(index: dict[str, Any]) -> None:
    index["hashes"] = index["hashes"][HASH_LENGTH:]


@pytest.mark.fault("an index is changed under a hash that is right ({id})", "refused by name")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dropped, "the parts of parameter embed are not the whole of its shape (2, 3)"),
        (cut, "the parts of parameter embed are not the whole of its shape (2, 3)"),
        (moved, "a part of parameter embed lies outside of its shape (2, 3)"),
        (renamed, "it has 'model/other', which the manifest does not name"),
        (unhashed, "it has hashes of 6 chunks, and 7 chunks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_index_that_says_something_else_is_told_though_the_hash_is_right(
    folder: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    forge_index(folder, change)
    assert told in refused(folder)


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
