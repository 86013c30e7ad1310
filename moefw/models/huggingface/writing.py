"""Writes safetensors files: headers first, then every value into its place, so that no tensor is held twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from moefw.models.huggingface.folder import INDEX
from moefw.models.huggingface.stored import Description
from moefw.runtime.safetensors_dtypes import DTYPES, NAMES

SHARD_BYTES: Final = 5 * 10**9
"""The most bytes of a file, unless one tensor is larger."""

Mapped = np.memmap[Any, np.dtype[np.uint8]]


@frozen(eq=False)
class Written:
    """Tensors of a folder that is being written, as views of its files. What is copied into them is in the files."""

    tensors: Mapping[str, Tensor]
    maps: tuple[Mapped, ...]

    @classmethod
    def opened(cls, folder: Path) -> Written:
        """Open the files of :func:`lay_out`. Ranks that write different tensors may open the same files."""
        tensors: dict[str, Tensor] = {}
        maps = []
        for path in sorted(folder.glob("*.safetensors")):
            mapped: Mapped = np.memmap(path, mode="r+", dtype=np.uint8)
            length = int.from_bytes(mapped[:8].tobytes(), "little")
            header = json.loads(mapped[8 : 8 + length].tobytes())
            values = torch.from_numpy(mapped[8 + length :])
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    tensors[name] = values[begin:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
            maps.append(mapped)
        return cls(tensors, tuple(maps))

    def flush(self) -> None:
        """Write to the disk what is still in memory."""
        for mapped in self.maps:
            mapped.flush()


def lay_out(folder: Path, tensors: Mapping[str, Description], *, most: int = SHARD_BYTES) -> None:
    """Create the files of ``tensors`` in ``folder``, of at most ``most`` bytes, with an index if there are several."""
    shards = _shards(tensors, most)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = ["model.safetensors"] if len(shards) == 1 else files
    if len(shards) > 1:
        total = sum(map(_size, tensors.values()))
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))
    for file, shard in zip(files, shards, strict=True):
        create(folder / file, {name: tensors[name] for name in shard})


def _shards(tensors: Mapping[str, Description], most: int) -> list[list[str]]:
    shards = [list[str]()]
    held = 0
    for name in sorted(tensors):
        size = _size(tensors[name])
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _size(described: Description) -> int:
    dtype, shape = described
    return math.prod(shape) * dtype.itemsize


def create(path: Path, tensors: Mapping[str, Description]) -> None:
    """Write a file's header, and reserve room for the values. Those of wider dtypes come first: all are aligned."""
    entries: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin = end
        end = end + _size((dtype, shape))
        entries[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(header) + end)
