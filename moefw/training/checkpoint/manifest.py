"""The manifest of a checkpoint: the content of its folder, with a seal that any changed bit breaks.

``manifest.json`` is the canonical serialisation of its content (sorted keys, no spaces, ASCII), with the SHA-256 of the
rest. A reader serialises the content again and compares the bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from attrs import Factory, asdict, frozen

from moefw.compose.spec.source import show
from moefw.core.errors import os_reason
from moefw.training.folder import MANIFEST

FORMAT: Final = 2
MAX_BYTES: Final = 1 << 30
"""Size limit of a manifest, which has about two hundred bytes for each tensor."""
_FILE: Final = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_NAME: Final = re.compile(r"(model|state|optimizer/[^/]+)/.+")

T = TypeVar("T")


class Damage(Exception):  # noqa: N818 -- a finding, which becomes a CheckpointError where the way out is known
    """Damage to a checkpoint, in words for the user. ``fix`` is empty if another checkpoint is the fix."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


@frozen
class SavedTensor:
    """A tensor in a shard: its safetensors dtype and shape, the range of its bytes in the file, their CRC-32."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32: int


@frozen
class SavedShard:
    """A file of a checkpoint, its hash, the CRC-32 of the bytes before its tensors, and its tensors by name."""

    file: str
    sha256: str
    header_crc32: int
    tensors: Mapping[str, SavedTensor]

    def to_data(self) -> dict[str, Any]:
        """Shard as JSON data."""
        return asdict(self, value_serializer=lambda _, __, value: [*value] if isinstance(value, tuple) else value)


@frozen(kw_only=True)
class Base:
    """Folder of frozen weights, which a checkpoint does not hold.

    ``freeze``: the patterns of their names. ``files``: each file of the folder that matters, with its SHA-256.
    """

    folder: str
    freeze: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


@frozen(kw_only=True)
class Origin:
    """The run that saved a checkpoint: its world, ``[hook, name, distribution, version]`` of each of its plugins, the
    fingerprint of its tokenizer (empty: unknown) and how many sequences it has read. ``base``: where its frozen weights
    are; None: all weights are in the checkpoint.
    """

    world: int = 1
    plugins: tuple[tuple[str, ...], ...] = ()
    tokenizer: str = ""
    sequences: int = 0
    base: Base | None = None


@frozen(kw_only=True)
class Manifest:
    """Content of a checkpoint, and the run and step that saved it."""

    step: int
    origin: Origin = Factory(Origin)
    shards: tuple[SavedShard, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of the content: two checkpoints with the same one hold the same bits."""
        return hashlib.sha256(_canonical(self._content())).hexdigest()

    @property
    def tensors(self) -> dict[str, SavedTensor]:
        """Every tensor by name."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

    def sealed(self) -> bytes:
        """Bytes of ``manifest.json``."""
        return _canonical({**self._content(), "sha256": self.digest})

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        if self.origin.base is None:
            del content["origin"]["base"]  # manifests that were written before there was one have other bytes else
        return {"format": FORMAT, **content}


def read_manifest(folder: Path) -> Manifest:
    """Manifest of a checkpoint. Raises Damage unless it is as written for a folder of this name."""
    path = folder / MANIFEST
    data = _read(path)
    try:
        content = json.loads(data.decode("ascii"))
        version = _item(content, "format", int)
        manifest = _structured(content) if version == FORMAT else None
    except RecursionError as error:
        raise Damage(f"{path} is damaged: it is nested too deeply.") from error
    except ValueError as error:
        raise Damage(f"{path} is damaged: {str(error) or 'it is no JSON'}.") from error
    if manifest is None:
        what = f"{path} has checkpoint format {version}; this moefw reads {FORMAT}."
        raise Damage(what, "Use the moefw version that wrote it, or train anew.")
    if manifest.sealed() != data:
        raise Damage(f"{path} is damaged: its content is not what its hash was made of.")
    if folder.name.removesuffix(".replaced") != f"step-{manifest.step}":
        raise Damage(f"{folder} holds the checkpoint of step {manifest.step}: it was renamed.")
    return manifest


def require_file(path: Path) -> None:
    """Raise Damage unless a path is a regular file, not a link to one."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise Damage(f"{path} is missing.") from error
    if stat.S_ISLNK(mode):
        raise Damage(f"{path} is a link: what belongs to a checkpoint lies in its folder.")
    if not stat.S_ISREG(mode):
        raise Damage(f"{path} is no file.")


def shard_from(data: object) -> SavedShard:
    """Shard from its JSON data. Raises ValueError."""
    file = _item(data, "file", str)
    tensors = _item(data, "tensors", dict)
    if not _FILE.fullmatch(file):
        raise ValueError(f"{show(file)} is not the name of a shard")
    for name in tensors:
        if not _NAME.fullmatch(name) or not name.isprintable():
            raise ValueError(f"{show(name)} is not the name of a tensor")
    return SavedShard(
        file=file,
        sha256=_item(data, "sha256", str),
        header_crc32=_count(data, "header_crc32"),
        tensors={name: _tensor_from(tensor) for name, tensor in tensors.items()},
    )


def _tensor_from(data: object) -> SavedTensor:
    shape = _item(data, "shape", list)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape is {show(shape)}")
    begin = _count(data, "begin")
    end = _count(data, "end")
    return SavedTensor(_item(data, "dtype", str), tuple(shape), begin, end, _count(data, "crc32"))


def _structured(content: object) -> Manifest:
    origin = _item(content, "origin", dict)
    plugins = _item(origin, "plugins", list)
    if not all(type(plugin) is list and all(type(word) is str for word in plugin) for plugin in plugins):
        raise ValueError(f"plugins is {show(plugins)}")
    shards = tuple(shard_from(shard) for shard in _item(content, "shards", list))
    times = Counter(name for shard in shards for name in (shard.file, *shard.tensors))
    twice = [name for name, number in times.items() if number > 1]
    if twice:
        raise ValueError(f"{twice[0]} is there twice")
    return Manifest(
        step=_count(content, "step"),
        origin=Origin(
            world=_count(origin, "world"),
            plugins=tuple(tuple(plugin) for plugin in plugins),
            tokenizer=_item(origin, "tokenizer", str),
            sequences=_count(origin, "sequences"),
            base=_base_from(origin["base"]) if "base" in origin else None,
        ),
        shards=shards,
    )


def _base_from(data: object) -> Base:
    freeze = _item(data, "freeze", list)
    files = _item(data, "files", list)
    if not all(type(pattern) is str for pattern in freeze):
        raise ValueError(f"freeze is {show(freeze)}")
    if not all(type(pair) is list and [type(word) for word in pair] == [str, str] for pair in files):
        raise ValueError(f"files is {show(files)}")
    return Base(
        folder=_item(data, "folder", str), freeze=tuple(freeze), files=tuple((name, digest) for name, digest in files)
    )


def _item(data: object, key: str, kind: type[T]) -> T:
    if type(data) is not dict:
        raise ValueError(f"{show(data)} stands where {key} should be")
    if key not in data:
        raise ValueError(f"{key} is missing")
    value = data[key]
    if type(value) is not kind:
        raise ValueError(f"{key} is {show(value)}")
    return value


def _count(data: object, key: str) -> int:
    value = _item(data, key, int)
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{key} is {show(value)}")
    return value


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def _read(path: Path) -> bytes:
    require_file(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise Damage(f"{path} is damaged: it is longer than {MAX_BYTES >> 20} MiB.")
            return file.read()
    except OSError as error:
        raise Damage(f"{path} cannot be read: {os_reason(error)}.") from error
