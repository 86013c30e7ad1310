"""A shard: one rank's tensors in a safetensors file, checked against the manifest."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open

from moefw.core.errors import os_reason
from moefw.runtime.finite import is_finite
from moefw.system.stamps import stamp
from moefw.training.checkpoint.manifest import Damage, Manifest, SavedShard, SavedTensor, read_manifest, require_file

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes of a checkpoint by their safetensors names."""
_CHUNK: Final = 1 << 24


def words(name: str) -> str:
    """Name of a checkpoint's tensor for messages, such as ``optimizer state exp_avg of norm``."""
    kind, rest = name.split("/", 1)
    if kind == "optimizer":
        key, of = rest.split("/", 1)
        return f"optimizer state {key} of {of}"
    return f"{'parameter' if kind == 'model' else kind} {rest}"


def described(path: Path) -> SavedShard:
    """Manifest entry of a shard that has just been written."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        start = 8 + length
        tensors = {}
        for name, entry in sorted(header.items()):
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                crc = _crc32(file, begin, end)
                tensors[name] = SavedTensor(entry["dtype"], tuple(entry["shape"]), begin, end, crc)
        return SavedShard(path.name, _sha256(path), _crc32(file, 0, start), tensors)


def opened(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Open file that holds each tensor, by the tensor's name. Its bytes are those that were saved.

    Raises Damage unless every file of the checkpoint matches the manifest.
    """
    files: dict[str, Any] = {}
    for shard in manifest.shards:
        path = folder / shard.file
        stamp(f"checking {path.name} of a checkpoint")
        require_file(path)
        try:
            digest = _sha256(path)
            if digest != shard.sha256:
                raise Damage(f"{path} {_difference(path, digest, shard, manifest)}.")
            file = _mapped(path)
            _check_tensors(path, file, shard)
        except OSError as error:
            raise Damage(f"{path} cannot be read: {os_reason(error)}.") from error
        except SafetensorError as error:
            raise Damage(f"{path} is no safetensors file: {error}.") from error
        files |= dict.fromkeys(shard.tensors, file)
    return files


def _mapped(path: Path) -> Any:
    """Map a file of tensors. Raises OSError if it has been removed since it was hashed; torch then raises another."""
    try:
        return safe_open(path, "pt")
    except RuntimeError as error:
        raise OSError(str(error)) from error


def verify(folder: Path) -> None:
    """Raise Damage unless a checkpoint is intact: manifest, hashes and dtypes are valid, and every value is finite."""
    manifest = read_manifest(folder)
    files = opened(folder, manifest)
    for name, saved in manifest.tensors.items():
        if saved.dtype not in DTYPES.values():
            raise Damage(f"{folder}: {words(name)} has dtype {saved.dtype}, which no checkpoint has.")
        if not is_finite(files[name].get_tensor(name)):
            raise Damage(f"{folder}: {words(name)} is not finite.")


def _check_tensors(path: Path, file: Any, shard: SavedShard) -> None:
    """Compare names, dtypes and shapes in a file with those in the manifest."""
    differing = sorted(set(file.keys()) ^ shard.tensors.keys())
    if differing:
        raise Damage(f"{path} and the manifest name other tensors: {differing[0]!r} is in one of them.")
    for name, saved in shard.tensors.items():
        slice_ = file.get_slice(name)
        dtype = slice_.get_dtype()
        shape = tuple(slice_.get_shape())
        if (dtype, shape) != (saved.dtype, saved.shape):
            what = f"{words(name)} is {dtype} {shape}, and {saved.dtype} {saved.shape} in the manifest."
            raise Damage(f"{path}: {what}")


def _difference(path: Path, digest: str, shard: SavedShard, manifest: Manifest) -> str:
    """How a file differs from the shard that was saved."""
    other = next((other.file for other in manifest.shards if other.sha256 == digest), None)
    if other is not None:
        return f"holds what {other} held: files were exchanged"
    with path.open("rb") as file:
        start = min((saved.begin for saved in shard.tensors.values()), default=0)
        if _crc32(file, 0, start) != shard.header_crc32:
            return "is damaged in its header"
        tensors = shard.tensors.items()
        damaged = [name for name, saved in tensors if _crc32(file, saved.begin, saved.end) != saved.crc32]
    if not damaged:
        return "is damaged: it has another length"
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return f"is damaged: {words(damaged[0])}{more}"


def _crc32(file: BinaryIO, begin: int, end: int) -> int:
    file.seek(begin)
    crc = 0
    left = end - begin
    while left > 0 and (data := file.read(min(left, _CHUNK))):
        crc = zlib.crc32(data, crc)
        left = left - len(data)
    return crc


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
