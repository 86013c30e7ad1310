"""A file of a checkpoint: a rank's parts of tensors in safetensors, and an index beside it with a hash of each chunk.

The header is a function of the index. It has the corner of each part under the keys of PyTorch's own distributed
checkpoints, so ``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads a folder of such files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from moefw.compose.spec.source import show
from moefw.runtime.safetensors_dtypes import DTYPES, NAMES
from moefw.training.checkpoint.commit import sync
from moefw.training.checkpoint.json_data import canonical, count, is_tensor_name, item, require_texts, shape_from
from moefw.training.checkpoint.manifest import SavedTensor
from moefw.training.checkpoint.parts import Part

CHUNK_BYTES = 1 << 24
"""The bytes of a chunk, a multiple of 8. Each part of a tensor begins one, so its last chunk may be shorter."""
HASH_LENGTH: Final = 43
"""Characters of a SHA-256 in base64."""
_LENGTH_BYTES: Final = 8
_Corner = tuple[int, ...]
_Shape = tuple[int, ...]


@frozen(kw_only=True)
class SavedPart:
    """A part of a tensor in a file: a box of it, in row-major order.

    ``begin``: its first byte, counted from the end of the file's header. ``corner``: the index in the tensor of the
    first element. ``chunks``: the SHA-256 of each chunk of the part; empty where the file has one hash, as in format 2.
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
    def index(self) -> bytes:
        """Bytes of the index.

        A part is one kind of tensor, such as a moment, of one box. Boxes that have the same kinds stand together.
        ``hashes`` are those of the chunks of all parts, in the order of their bytes, one behind another.
        """
        kinds_of: dict[tuple[str, _Corner, _Shape], list[str]] = {}
        for part in self.parts:
            kind, name = _kind_and_name(part.name)
            kinds_of.setdefault((name, part.corner, part.shape), []).append(kind)
        boxes: dict[tuple[str, ...], dict[str, list[list[int]]]] = {}
        for (name, corner, shape), kinds in kinds_of.items():
            boxes.setdefault(tuple(sorted(kinds)), {})[name] = [[*corner], [*shape]]
        return canonical(
            {
                "chunk_bytes": self.chunk_bytes,
                "hashes": "".join(digest for part in self.parts for digest in part.chunks),
                "parts": [{"kinds": [*kinds], "boxes": of_kinds} for kinds, of_kinds in sorted(boxes.items())],
                "same": {name: [*same] for name, same in self.same.items()},
            }
        )

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
    begin = 0
    placed = []
    for part in sorted(parts, key=lambda part: (-DTYPES[part.dtype].itemsize, part.name)):
        placed.append(evolve(part, begin=begin))
        begin += part.nbytes
    return placed


def header(parts: Sequence[SavedPart]) -> bytes:
    """Bytes of a file before its parts, which are in order."""
    entries: dict[str, Any] = {
        part.name: {
            "dtype": part.dtype,
            "shape": part.shape,
            "data_offsets": [part.begin, part.begin + part.nbytes],
        }
        for part in parts
    }
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
                hashes.append(hash_of(content))
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
        os.posix_fallocate(file.fileno(), 0, file.tell() + parts[-1].begin + parts[-1].nbytes)


def finish(path: Path, parts: Sequence[SavedPart]) -> SavedFile:
    """Hash the parts of a file that are filled, and write the index. Both are on the disk on return."""
    sync(path)
    hashed = []
    start = len(header(parts))
    with path.open("rb") as file:
        for part in parts:
            chunks = tuple(hash_of(read_range(file, start, part, chunk)) for chunk in part.ranges(CHUNK_BYTES))
            hashed.append(evolve(part, chunks=chunks))
    return _indexed(path, hashed, {})


def read_range(
    file: BufferedReader, start: int, part: SavedPart, chunk: range, into: memoryview | None = None
) -> memoryview:
    """Bytes of a chunk; fewer if the file ends before. ``start``: bytes of the header. Raises OSError.

    ``into``: memory for as many bytes; None: it is allocated.
    """
    data = memoryview(bytearray(len(chunk))) if into is None else into
    file.seek(start + part.begin + chunk.start)
    return data[: file.readinto(data)]


def file_from(name: str, index: bytes, tensors: Mapping[str, SavedTensor]) -> SavedFile:
    """File from the bytes of its index. ``tensors``: those of the manifest, with their dtypes. Raises ValueError."""
    content = json.loads(index.decode("ascii"))
    chunk_bytes = count(content, "chunk_bytes")
    if chunk_bytes == 0 or chunk_bytes % 8:
        raise ValueError(f"chunk_bytes is {chunk_bytes}")
    same = item(content, "same", dict)
    for names in same.values():
        require_texts(names)
    hashes = item(content, "hashes", str)
    parts = laid_out(part for group in item(content, "parts", list) for part in _parts_from(group, tensors))
    hashed = []
    taken = 0
    for part in parts:
        end = taken + len(part.ranges(chunk_bytes)) * HASH_LENGTH
        chunks = tuple(hashes[first : first + HASH_LENGTH] for first in range(taken, end, HASH_LENGTH))
        hashed.append(evolve(part, chunks=chunks))
        taken = end
    if taken != len(hashes):
        raise ValueError(f"it has hashes of {len(hashes) // HASH_LENGTH} chunks, and {taken // HASH_LENGTH} chunks")
    same_as = {first: tuple(others) for first, others in same.items()}
    return SavedFile(file=name, chunk_bytes=chunk_bytes, parts=tuple(hashed), same=same_as)


def _parts_from(group: object, tensors: Mapping[str, SavedTensor]) -> Iterator[SavedPart]:
    """Yield the parts that a group of boxes is."""
    kinds = item(group, "kinds", list)
    require_texts(kinds)
    for box_name, box in item(group, "boxes", dict).items():
        if type(box) is not list or len(box) != 2:
            raise ValueError(f"{show(box)} is no corner and shape of {box_name}")
        corner, shape = map(shape_from, box)
        for kind in kinds:
            name = f"{kind}/{box_name}"
            if name not in tensors:
                raise ValueError(f"it has {show(name)}, which the manifest does not name")
            yield SavedPart(name=name, dtype=tensors[name].dtype, corner=corner, shape=shape)


def _kind_and_name(name: str) -> tuple[str, str]:
    """What the name of a tensor begins with, such as ``model`` or ``optimizer/exp_avg``, and the rest."""
    num_words = 2 if name.startswith("optimizer/") else 1
    words = name.split("/", num_words)
    return "/".join(words[:num_words]), words[num_words]


def hash_of(content: bytes | bytearray | memoryview) -> str:
    """SHA-256 in base64, which is a third shorter than hexadecimal."""
    return b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


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
