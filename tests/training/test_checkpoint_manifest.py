"""A manifest equals the written one, to the bit, or its checkpoint is refused with a message."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_cases import INDEX, SHARD, everything, forge, forge_index, refused, save, tiny
from moefw.core.errors import CheckpointError
from moefw.training import checkpoint
from moefw.training.checkpoint.manifest import MAX_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint, the only one of its run."""
    return save(tmp_path / "run", 4)[0]


def test_a_whole_checkpoint_is_loaded(folder: Path) -> None:
    model, optimizer = tiny()
    manifest = checkpoint.load(folder, model, optimizer).manifest
    assert manifest.step == 4
    chosen = checkpoint.choose(folder.parent.parent, "last")
    assert chosen is not None
    assert (chosen.step, chosen.folder, chosen.digest) == (4, folder, manifest.digest)
    wanted, got = everything(*tiny(1.0)), everything(model, optimizer)
    assert len(wanted) == 8
    assert got.keys() == wanted.keys()
    assert all(got[name].equal(wanted[name]) for name in wanted)


@pytest.mark.fault("each byte of a manifest flips", "refused by name")
def test_every_flipped_byte_of_a_manifest_is_found(folder: Path) -> None:
    """The first bit of one byte, the second of the next, and so on."""
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            checkpoint.choose(folder.parent.parent, "last")


@pytest.mark.fault("the step in a manifest is edited", "refused by name")
def test_a_step_edited_by_hand_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step":4', '"step":3'))
    shutil.move(folder, folder.with_name("step-3"))
    assert "its content is not what its hash was made of" in refused(folder.with_name("step-3"))


def test_a_folder_of_another_step_is_refused(folder: Path) -> None:
    moved = Path(shutil.move(folder, folder.with_name("step-6")))
    assert f"{moved} holds the checkpoint of step 4" in refused(moved)


def test_the_same_content_in_other_words_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_text()
    for other in (json.dumps(json.loads(whole)), whole + "\n", whole[:-1] + ',"step":4}', "{" + '"a":1,' + whole[1:]):
        path.write_text(other)
        assert f"{path} is damaged" in refused(folder)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"x",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"format":' + b"9" * 9000 + b"}",
        b'{"format": "3"}',
    ],
    ids=["empty", "list", "object", "letter", "null", "bytes", "nested", "digits", "text"],
)
def test_what_is_no_manifest_is_told(folder: Path, data: bytes) -> None:
    (folder / "manifest.json").write_bytes(data)
    assert f"{folder / 'manifest.json'} is damaged" in refused(folder)


def test_an_oversized_manifest_is_not_read(folder: Path) -> None:
    os.truncate(folder / "manifest.json", MAX_BYTES + 1)
    assert "is damaged: it is longer than" in refused(folder)


def test_a_manifest_that_is_no_file_is_told(folder: Path) -> None:
    path = folder / "manifest.json"
    kept = shutil.move(path, folder.parent / "kept.json")
    assert f"{path} is missing" in refused(folder)
    path.symlink_to(kept)
    assert f"{path} is a link" in refused(folder)
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is no file" in refused(folder)


def test_another_format_is_told(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "step": 4, "shards": []}')
    assert "has checkpoint format 1; this moefw reads 2 and 3. Use the moefw version that wrote it" in refused(folder)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every place of a manifest as a container and a key, with only one tensor."""
    found = []
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        if not str(key).startswith(("optimizer/", "model/norm")):
            found += [(data, key), *(places(value) if isinstance(value, dict | list) else [])]
    return found


def test_a_value_of_a_wrong_type_is_told_wherever_it_stands(folder: Path) -> None:
    """Also if the hash matches the value."""
    whole = (folder / "manifest.json").read_bytes()
    number = len(places({key: value for key, value in json.loads(whole).items() if key != "sha256"}))
    assert number == 15
    for place in range(number):
        for wrong in (None, True, -1, 1.5, 1 << 70, [[1]], {"": {}}):

            def change(content: dict[str, Any], place: int = place, wrong: Any = wrong) -> None:
                content.pop("sha256")
                holder, key = places(content)[place]
                holder[key] = wrong

            forge(folder, change)
            assert str(folder) in refused(folder), (place, wrong)
            (folder / "manifest.json").write_bytes(whole)


def test_a_value_of_a_wrong_type_is_told_wherever_it_stands_in_an_index(folder: Path) -> None:
    """Also if the hash matches the value."""
    kept = {path: path.read_bytes() for path in (folder / "manifest.json", folder / INDEX)}
    number = len(places(json.loads(kept[folder / INDEX])))
    assert number > 25
    for place in range(number):
        for wrong in (None, True, -1, 1.5, 1 << 70, [[1]], {"": {}}):

            def change(content: dict[str, Any], place: int = place, wrong: Any = wrong) -> None:
                holder, key = places(content)[place]
                holder[key] = wrong

            forge_index(folder, change)
            assert str(folder) in refused(folder, filled=True), (place, wrong)
            for path, data in kept.items():
                path.write_bytes(data)


def rename_shard(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(files={name: content["files"][SHARD]})


@pytest.mark.fault("a manifest names a file elsewhere ({id})", "refused by name, and not opened")
@pytest.mark.parametrize(
    "name",
    ["../rank-00000.safetensors", "/rank-00000.safetensors", "x/y", "..", "", "rank-00000.safetensors\0", "\ud800"],
)
def test_a_shard_elsewhere_is_refused(folder: Path, name: str) -> None:
    shutil.copy(folder / SHARD, folder.parent / SHARD)
    forge(folder, rename_shard(name))
    assert "is not the name of a shard" in refused(folder)


@pytest.mark.fault("a shard is a link", "refused by name")
def test_a_shard_that_is_a_link_is_refused(folder: Path) -> None:
    (folder / SHARD).symlink_to(shutil.move(folder / SHARD, folder.parent / "elsewhere"))
    assert f"{folder / SHARD} is a link" in refused(folder)


@pytest.mark.parametrize("name", ["embed", "weights/embed", "optimizer/embed", "model/\x1b[2J", "model/"])
def test_a_name_that_no_tensor_has_is_refused(folder: Path, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        tensors = content["tensors"]
        tensors[name] = tensors.pop("model/embed")

    forge(folder, change)
    assert "is not the name of a tensor" in refused(folder)
