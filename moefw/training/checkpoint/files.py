"""A file of a checkpoint: a rank's parts of tensors in safetensors, and an index beside it with a hash of each chunk.

The header is a function of the index. It has the corner of each part under the keys of PyTorch's own distributed
checkpoints, so ``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads a folder of such files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from moefw.training.checkpoint.commit import sync
from moefw.training.checkpoint.json_data import canonical, count, is_tensor_name, item, shape_from
from moefw.training.checkpoint.manifest import SavedTensor
from moefw.training.checkpoint.parts import Part

CHUNK_BYTES = 1 << 24
"""The bytes of a chunk, a multiple of 8. Each part of a tensor begins one, so its last chunk may be shorter."""
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of a checkpoint by their safetensors names."""
NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES: Final = 8


@frozen(kw_only=True)
class SavedPart:
    """A part of a tensor in a file: a box of it, in row-major order from byte ``begin`` of the file.

    ``corner``: the index in the tensor of the first element. ``chunks``: the SHA-256 of each chunk of the part;
    empty where the file has one hash, as in format 2.
    """

    name: str
    dtype: str
    corner: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int = 0
    chunks: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def ranges(self, chunk_bytes: int) -> Sequence[range]:
        """Bytes of each chunk, counted from ``begin``."""
        every = range(self.nbytes)
        return [every[start : start + chunk_bytes] for start in range(0, self.nbytes, chunk_bytes)]


@frozen(kw_only=True)
class SavedFile:
    """A file and its parts, in the order of their bytes. ``chunk_bytes``: the size of a chunk, unless a part ends.

    ``same``: for a part that is a scalar, the names of others that have its value, which are not written.
    """

    file: str
    chunk_bytes: int
    parts: tuple[SavedPart, ...]
    same: Mapping[str, tuple[str, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(header(self.parts)) + sum(part.nbytes for part in self.parts)

    @property
    def index(self) -> bytes:
        """Bytes of the index."""
        parts = [asdict(part) for part in self.parts]
        return canonical({"chunk_bytes": self.chunk_bytes, "parts": parts, "same": dict(self.same)})

    @property
    def digest(self) -> str:
        """The SHA-256 of the index, which the manifest has."""
        return hashlib.sha256(self.index).hexdigest()


def file_of(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def index_of(file: str) -> str:
    """Name of the index of a file."""
    return file.replace(".safetensors", ".index.json")


def described(part: Part) -> SavedPart:
    """Part before it is written. Raises ValueError for a name or a dtype that no checkpoint has."""
    if not is_tensor_name(part.name):
        raise ValueError(f"{part.name!r} is not the name of a tensor")
    if part.values.dtype not in NAMES:
        raise ValueError(f"{part.name} has dtype {part.values.dtype}, which no checkpoint has")
    return SavedPart(name=part.name, dtype=NAMES[part.values.dtype], corner=part.corner, shape=tuple(part.values.shape))


def whole(name: str, tensor: SavedTensor) -> SavedPart:
    """All of a tensor as one part."""
    return SavedPart(name=name, dtype=tensor.dtype, corner=(0,) * len(tensor.shape), shape=tensor.shape)


def laid_out(parts: Iterable[SavedPart]) -> list[SavedPart]:
    """Parts in the order in which a file has them, each with its place. Wider dtypes come first: all are aligned."""
    ordered = sorted(parts, key=lambda part: (-DTYPES[part.dtype].itemsize, part.name))
    begin = len(header(ordered))
    placed = []
    for part in ordered:
        placed.append(evolve(part, begin=begin))
        begin += part.nbytes
    return placed


def header(parts: Sequence[SavedPart]) -> bytes:
    """Bytes of a file before its parts, which are in order. Of the parts, ``begin`` and ``chunks`` do not matter."""
    entries: dict[str, Any] = {}
    end = 0
    for part in parts:
        begin = end
        end += part.nbytes
        entries[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [begin, end]}
    corners = {part.name: {"saved_offsets": part.corner} for part in parts}
    entries["__metadata__"] = {
        "DCP_SHARDING_INFO": canonical(corners).decode(),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    text = canonical(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write(path: Path, parts: Sequence[Part], progress: Callable[[str], None]) -> SavedFile:
    """Write a rank's parts, and their index beside them. Both are on the disk on return.

    No other rank is asked: a thread may call it. At most one part is copied at a time, if it is on a GPU or not
    contiguous. ``progress`` is told what is about to happen. Raises OSError, and ValueError for what no checkpoint has.
    """
    values = {part.name: part.values for part in parts}
    placed = laid_out(map(described, parts))
    if len(values) != len(parts):
        raise ValueError(f"{path.name} would have two parts of one tensor")
    written = []
    with path.open("xb") as file:
        file.write(header(placed))
        for part in placed:
            progress("writing a checkpoint's shard")
            data = memoryview(_bytes(values[part.name]))
            hashes = []
            for chunk in part.ranges(CHUNK_BYTES):
                content = data[chunk.start : chunk.stop]
                hashes.append(hashlib.sha256(content).hexdigest())
                file.write(content)
            written.append(evolve(part, chunks=tuple(hashes)))
        progress("syncing a checkpoint's shard")
        file.flush()
        os.fsync(file.fileno())
    return _indexed(path, written, {part.name: part.same for part in parts if part.same})


def reserve(path: Path, parts: Sequence[SavedPart]) -> None:
    """Write a file's header, and reserve room for its parts. :func:`finish` follows once they are filled."""
    with path.open("xb") as file:
        file.write(header(parts))
        file.flush()
        os.posix_fallocate(file.fileno(), 0, parts[-1].begin + parts[-1].nbytes)


def finish(path: Path, parts: Sequence[SavedPart]) -> SavedFile:
    """Hash the parts of a file that are filled, and write the index. Both are on the disk on return."""
    sync(path)
    hashed = []
    with path.open("rb") as file:
        for part in parts:
            chunks = tuple(
                hashlib.sha256(read_range(file, part, chunk)).hexdigest() for chunk in part.ranges(CHUNK_BYTES)
            )
            hashed.append(evolve(part, chunks=chunks))
    return _indexed(path, hashed, {})


def read_range(file: BufferedReader, part: SavedPart, chunk: range) -> bytearray:
    """Bytes of a chunk; fewer if the file ends before. Raises OSError."""
    data = bytearray(len(chunk))
    file.seek(part.begin + chunk.start)
    length = file.readinto(data)
    return data[:length] if length < len(data) else data


def file_from(name: str, index: bytes) -> SavedFile:
    """File from the bytes of its index. Raises ValueError."""
    content = json.loads(index.decode("ascii"))
    same = item(content, "same", dict)
    if not all(type(names) is list and all(type(other) is str for other in names) for names in same.values()):
        raise ValueError("same is no list of names")
    chunk_bytes = count(content, "chunk_bytes")
    if chunk_bytes == 0 or chunk_bytes % 8:
        raise ValueError(f"chunk_bytes is {chunk_bytes}")
    return SavedFile(
        file=name,
        chunk_bytes=chunk_bytes,
        parts=tuple(_part_from(part, chunk_bytes) for part in item(content, "parts", list)),
        same={first: tuple(names) for first, names in same.items()},
    )


def _part_from(data: object, chunk_bytes: int) -> SavedPart:
    chunks = item(data, "chunks", list)
    if not all(type(digest) is str for digest in chunks):
        raise ValueError("chunks is no list of hashes")
    dtype = item(data, "dtype", str)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, which no checkpoint has")
    part = SavedPart(
        name=item(data, "name", str),
        dtype=dtype,
        corner=shape_from(data, "corner"),
        shape=shape_from(data, "shape"),
        begin=count(data, "begin"),
        chunks=tuple(chunks),
    )
    if len(chunks) != len(part.ranges(chunk_bytes)):
        raise ValueError(f"{part.name} has {len(chunks)} hashes of chunks")
    return part


def _indexed(path: Path, parts: Sequence[SavedPart], same: Mapping[str, tuple[str, ...]]) -> SavedFile:
    saved = SavedFile(file=path.name, chunk_bytes=CHUNK_BYTES, parts=tuple(parts), same=same)
    index = path.with_name(index_of(path.name))
    index.write_bytes(saved.index)
    sync(index)
    return saved


def _bytes(values: Tensor) -> Any:
    """Values in row-major order on the host, as an array of bytes."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def elements(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the corner and shape of boxes that are, one after another, the elements ``begin`` to ``end`` of a tensor.

    The elements are counted in row-major order. Boxes are whole rows, and the ends of rows before and after them.
    """
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, in_first = divmod(begin, row)
    last, in_last = divmod(end, row)
    if first == last:
        yield from _in_row(shape, first, in_first, in_last)
        return
    if in_first:
        yield from _in_row(shape, first, in_first, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if in_last:
        yield from _in_row(shape, last, 0, in_last)


def _in_row(
    shape: Sequence[int], number: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for corner, size in elements(shape[1:], begin, end):
        yield (number, *corner), (1, *size)
