"""Checkpoints of format 2: whole tensors in files that have one hash each, and all of it in the manifest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, frozen

from moefw.training.checkpoint.files import CHUNK_BYTES, DTYPES, SavedFile, whole
from moefw.training.checkpoint.json_data import canonical, count, item
from moefw.training.checkpoint.manifest import (
    Origin,
    SavedTensor,
    origin_from,
    require_files,
    require_names,
    tensor_from,
)

FORMAT: Final = 2


@frozen(kw_only=True)
class OldManifest:
    """What a manifest of format 2 says. ``hashes``: the SHA-256 of each file. ``sealed``: its bytes, as written."""

    step: int
    origin: Origin
    tensors: Mapping[str, SavedTensor]
    hashes: Mapping[str, str]
    files: tuple[SavedFile, ...]
    digest: str
    sealed: bytes


def manifest_from(content: Any) -> OldManifest:
    """Manifest from its JSON data. Raises ValueError."""
    shards = item(content, "shards", list)
    names = Counter(name for shard in shards for name in (item(shard, "file", str), *item(shard, "tensors", dict)))
    twice = [name for name, number in names.items() if number > 1]
    if twice:
        raise ValueError(f"{twice[0]} is there twice")
    hashes = {shard["file"]: item(shard, "sha256", str) for shard in shards}
    tensors = {name: tensor for shard in shards for name, tensor in shard["tensors"].items()}
    require_files(hashes)
    require_names(tensors)
    rest = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(canonical(rest)).hexdigest()
    return OldManifest(
        step=count(content, "step"),
        origin=origin_from(content),
        tensors={name: tensor_from(tensor) for name, tensor in tensors.items()},
        hashes=hashes,
        files=tuple(_file_from(shard) for shard in shards),
        digest=digest,
        sealed=canonical({**rest, "sha256": digest}),
    )


def _file_from(shard: Any) -> SavedFile:
    parts = []
    for name, data in shard["tensors"].items():
        saved = tensor_from(data)
        if saved.dtype not in DTYPES:
            raise ValueError(f"dtype is {saved.dtype!r}, which no checkpoint has")
        parts.append(evolve(whole(name, saved), begin=count(data, "begin")))
    return SavedFile(file=shard["file"], chunk_bytes=CHUNK_BYTES, parts=tuple(parts), same={})
