"""The manifest of a checkpoint: the content of its folder, with a seal that any changed bit breaks.

``manifest.json`` is the canonical serialisation of its content (sorted keys, no spaces, ASCII), with the SHA-256 of the
rest. A reader serialises the content again and compares the bytes. It has the hash of the index of each file, and an
index has those of the chunks: with the manifest, every bit of a checkpoint is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import Factory, asdict, frozen

from moefw.compose.spec.source import show
from moefw.core.errors import os_reason
from moefw.runtime.safetensors_dtypes import DTYPES
from moefw.training.checkpoint.json_data import canonical, count, is_tensor_name, item, require_texts, shape_from
from moefw.training.folder import MANIFEST

FORMAT: Final = 3
MAX_BYTES: Final = 1 << 30
"""Size limit of a manifest and of an index, which have about two hundred bytes for each tensor or part."""
_FILE: Final = re.compile(r"rank-[0-9]{5,9}\.safetensors")


class Damage(Exception):  # noqa: N818 -- a finding, which becomes a CheckpointError where the way out is known
    """Damage to a checkpoint, in words for the user. ``fix`` is empty if another checkpoint is the fix."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


@frozen
class SavedTensor:
    """A tensor of a checkpoint: its safetensors dtype, and the shape of the whole."""

    dtype: str
    shape: tuple[int, ...]


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

    def to_data(self) -> dict[str, Any]:
        """Origin as JSON data."""
        data = asdict(self)
        if self.base is None:
            del data["base"]  # manifests that were written before there was one have other bytes else
        return data


@frozen(kw_only=True)
class Manifest:
    """Content of a checkpoint, and the run and step that saved it.

    ``tensors``: those that are written, by name. ``files``: the SHA-256 of the index of each file.
    """

    step: int
    origin: Origin = Factory(Origin)
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The SHA-256 of the content: two checkpoints with the same one hold the same bits."""
        return hashlib.sha256(canonical(self._content())).hexdigest()

    def sealed(self) -> bytes:
        """Bytes of ``manifest.json``."""
        return canonical({**self._content(), "sha256": self.digest})

    def _content(self) -> dict[str, Any]:
        tensors = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        content = {"format": FORMAT, "step": self.step, "origin": self.origin.to_data(), "tensors": tensors}
        return {**content, "files": dict(self.files)}


def manifest_from(content: object) -> Manifest:
    """Manifest of format 3 from its JSON data. Raises ValueError."""
    tensors = item(content, "tensors", dict)
    files = item(content, "files", dict)
    require_names(tensors)
    require_files(files)
    return Manifest(
        step=count(content, "step"),
        origin=origin_from(content),
        tensors={name: tensor_from(tensor) for name, tensor in tensors.items()},
        files={file: item(files, file, str) for file in files},
    )


def tensor_from(data: object) -> SavedTensor:
    """Tensor from its JSON data. Raises ValueError."""
    dtype = item(data, "dtype", str)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {show(dtype)}, which no checkpoint has")
    return SavedTensor(dtype, shape_from(item(data, "shape", list)))


def require_names(tensors: Mapping[str, object]) -> None:
    """Raise ValueError unless all are names of tensors."""
    for name in tensors:
        if not is_tensor_name(name):
            raise ValueError(f"{show(name)} is not the name of a tensor")


def require_files(files: Mapping[str, object]) -> None:
    """Raise ValueError unless all are names of files that we write."""
    for file in files:
        if not _FILE.fullmatch(file):
            raise ValueError(f"{show(file)} is not the name of a shard")


def origin_from(content: object) -> Origin:
    """Origin of a manifest from its JSON data. Raises ValueError."""
    origin = item(content, "origin", dict)
    plugins = item(origin, "plugins", list)
    for plugin in plugins:
        require_texts(plugin)
    return Origin(
        world=count(origin, "world"),
        plugins=tuple(tuple(plugin) for plugin in plugins),
        tokenizer=item(origin, "tokenizer", str),
        sequences=count(origin, "sequences"),
        base=_base_from(origin["base"]) if "base" in origin else None,
    )


def _base_from(data: object) -> Base:
    freeze = item(data, "freeze", list)
    files = item(data, "files", list)
    require_texts(freeze)
    if not all(type(pair) is list and [type(word) for word in pair] == [str, str] for pair in files):
        raise ValueError(f"files is {show(files)}")
    return Base(
        folder=item(data, "folder", str), freeze=tuple(freeze), files=tuple((name, digest) for name, digest in files)
    )


def read_content(folder: Path) -> tuple[bytes, Any, int]:
    """Bytes of a manifest, their JSON data, and the number of its format. Raises Damage."""
    path = folder / MANIFEST
    data = read_file(path)
    try:
        content = json.loads(data.decode("ascii"))
        return data, content, item(content, "format", int)
    except RecursionError as error:
        raise Damage(f"{path} is damaged: it is nested too deeply.") from error
    except ValueError as error:
        raise Damage(f"{path} is damaged: {str(error) or 'it is no JSON'}.") from error


def require_sealed(folder: Path, data: bytes, sealed: bytes, step: int) -> None:
    """Raise Damage unless a manifest is as written, for a folder of this name."""
    if sealed != data:
        raise Damage(f"{folder / MANIFEST} is damaged: its content is not what its hash was made of.")
    if folder.name.removesuffix(".replaced") != f"step-{step}":
        raise Damage(f"{folder} holds the checkpoint of step {step}: it was renamed.")


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


def read_file(path: Path) -> bytes:
    """Bytes of a manifest or an index. Raises Damage."""
    require_file(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise Damage(f"{path} is damaged: it is longer than {MAX_BYTES >> 20} MiB.")
            return file.read()
    except OSError as error:
        raise Damage(f"{path} cannot be read: {os_reason(error)}.") from error


def words(name: str) -> str:
    """Name of a checkpoint's tensor for messages, such as ``optimizer state exp_avg of norm``."""
    kind, rest = name.split("/", 1)
    if kind == "optimizer":
        key, of = rest.split("/", 1)
        return f"optimizer state {key} of {of}"
    return f"{'parameter' if kind == 'model' else kind} {rest}"
