"""Writes checkpoints as format 2 had them: whole tensors, one hash a file, and all of it in the manifest."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from checkpoint_cases import sealed


def save_format2(folder: Path, step: int, shards: Sequence[Mapping[str, Tensor]]) -> None:
    """Write the checkpoint of a step; each rank's tensors are in a file of their own."""
    folder.mkdir(parents=True)
    written = []
    for rank, tensors in enumerate(shards):
        file = f"rank-{rank:05d}.safetensors"
        data = save(dict(tensors))
        (folder / file).write_bytes(data)
        written.append({"file": file, **_described(data)})
    origin = {"world": len(shards), "plugins": [], "tokenizer": "bytes", "sequences": 8}
    (folder / "manifest.json").write_bytes(sealed({"format": 2, "step": step, "origin": origin, "shards": written}))


def _described(data: bytes) -> dict[str, Any]:
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        crc32 = zlib.crc32(data[begin:end])
        tensors[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "begin": begin,
            "end": end,
            "crc32": crc32,
        }
    header_crc32 = zlib.crc32(data[:start])
    return {"sha256": hashlib.sha256(data).hexdigest(), "header_crc32": header_crc32, "tensors": tensors}
