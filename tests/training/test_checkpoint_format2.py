"""A checkpoint of format 2, which moefw wrote before, loads; damage to it is refused by file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_cases import SHARD, everything, forge, refused, saved, tiny
from format2 import save_format2
from moefw.training import checkpoint
from moefw.training.checkpoint.reading import opened


def shards() -> list[dict[str, Tensor]]:
    """Return the tensors of the tiny model after an update, as two ranks wrote them in turn."""
    model, optimizer = tiny(1.0)
    both = []
    for name, parameter in model.named_parameters():
        states = {f"optimizer/{key}/{name}": value for key, value in optimizer.state[parameter].items()}
        both.append({f"model/{name}": parameter.detach(), **states})
    return both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-4"
    save_format2(folder, 4, shards())
    return folder


def test_a_checkpoint_of_format_2_is_loaded_and_chosen(folder: Path) -> None:
    model, optimizer = tiny()
    manifest = checkpoint.load(folder, model, optimizer, tokenizer="bytes").manifest
    assert (manifest.step, manifest.origin.world, manifest.origin.sequences) == (4, 2, 8)
    wanted, got = everything(*tiny(1.0)), everything(model, optimizer)
    assert got.keys() == wanted.keys()
    assert all(got[name].equal(wanted[name]) for name in wanted)
    written = {name: tensor for shard in shards() for name, tensor in shard.items()}
    read = saved(folder)
    assert read.keys() == written.keys()
    assert all(read[name].equal(tensor) for name, tensor in written.items())
    chosen = checkpoint.choose(folder.parent.parent, "last-good")
    assert chosen is not None
    assert (chosen.step, chosen.digest) == (4, manifest.digest)


def test_its_damage_is_refused_and_last_good_passes_over_it(folder: Path) -> None:
    older = folder.with_name("step-2")
    save_format2(older, 2, shards())
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)
    said = refused(folder)
    assert f"{folder / SHARD} is damaged." in said
    assert "The checkpoint of step 2 is whole" in said
    chosen = checkpoint.choose(folder.parent.parent, "last-good")
    assert chosen is not None
    assert chosen.step == 2


def test_its_values_are_looked_at(folder: Path) -> None:
    bad = folder.with_name("step-6")
    save_format2(bad, 6, [{**shards()[0], "model/embed": torch.full((2, 3), torch.nan)}, shards()[1]])
    chosen = checkpoint.choose(folder.parent.parent, "last-good")
    assert chosen is not None
    assert chosen.passed == (f"{bad}: parameter embed is not finite.",)
    assert opened(chosen.folder).manifest.step == 4


def test_a_tensor_that_two_files_hold_is_refused(folder: Path) -> None:
    forge(folder, lambda content: content["shards"].append(content["shards"][0]))
    assert "is there twice" in refused(folder)
