"""Reading a checkpoint: the boxes that are asked for, from the chunks that they touch, each verified before it is used.

A checkpoint of format 2 has one hash for a file: a file is then verified whole, before its first tensor is read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import SEEK_END, BufferedReader
from pathlib import Path
from typing import final

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.errors import os_reason
from moefw.runtime.finite import is_finite
from moefw.runtime.safetensors_dtypes import DTYPES
from moefw.system.stamps import stamp
from moefw.training.checkpoint import format2
from moefw.training.checkpoint.files import (
    SavedFile,
    SavedPart,
    elements,
    file_from,
    hash_of,
    header,
    index_of,
    read_range,
)
from moefw.training.checkpoint.manifest import (
    FORMAT,
    Damage,
    Manifest,
    SavedTensor,
    manifest_from,
    read_content,
    read_file,
    require_file,
    require_sealed,
    words,
)
from moefw.training.folder import MANIFEST

AnyManifest = Manifest | format2.OldManifest
Target = tuple[Tensor, tuple[int, ...]]
"""A tensor to fill, and the index in a named tensor of its first value."""


def read_manifest(folder: Path) -> AnyManifest:
    """Manifest of a checkpoint. Raises Damage unless it is as written for a folder of this name."""
    data, content, number = read_content(folder)
    path = folder / MANIFEST
    if number not in (format2.FORMAT, FORMAT):
        what = f"{path} has checkpoint format {number}; this moefw reads {format2.FORMAT} and {FORMAT}."
        raise Damage(what, "Use the moefw version that wrote it, or train anew.")
    manifest: AnyManifest
    try:
        if number == format2.FORMAT:
            manifest = format2.manifest_from(content)
            sealed = manifest.sealed
        else:
            manifest = manifest_from(content)
            sealed = manifest.sealed()
    except RecursionError as error:
        raise Damage(f"{path} is damaged: it is nested too deeply.") from error
    except ValueError as error:
        raise Damage(f"{path} is damaged: {error}.") from error
    require_sealed(folder, data, sealed, manifest.step)
    return manifest


@final
class Reader:
    """A checkpoint that is read. Its manifest and its indexes are verified, and its parts make up its tensors.

    ``tensors``: all tensors by name, those included that have the value of another one.
    """

    def __init__(self, folder: Path, manifest: AnyManifest, files: Sequence[SavedFile]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.files = files
        self._stored_as = {other: name for file in files for name, same in file.same.items() for other in same}
        known = manifest.tensors
        self.tensors: Mapping[str, SavedTensor] = {
            **known,
            **{name: known[stored] for name, stored in self._stored_as.items() if stored in known},
        }
        self._parts: dict[str, list[tuple[SavedFile, SavedPart]]] = {name: [] for name in known}
        self._hashes = manifest.hashes if isinstance(manifest, format2.OldManifest) else {}
        self._starts: dict[str, int] = {}
        """Bytes of the header of each file that has been verified. In format 2, places are counted from its begin."""
        for file in files:
            for part in file.parts:
                self._parts[part.name].append((file, part))
        for name, saved in known.items():
            _require_whole(folder, name, saved, [part for _, part in self._parts[name]])

    def fill(self, fills: Mapping[str, Sequence[Target]]) -> None:
        """Fill tensors with boxes of named ones. Of a part, only the chunks that a box touches are read, each once.

        A chunk is verified before its values are copied. Raises Damage at the first bad one, with the tensors before it
        filled.
        """
        by_part: dict[str, list[Target]] = {}
        for name, targets in fills.items():
            by_part.setdefault(self._stored_as.get(name, name), []).extend(targets)
        for name, targets in by_part.items():
            for file, part in self._parts[name]:
                stamp("reading a checkpoint")
                self._fill(file, part, targets)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the host. Raises Damage.

        One that is a single part is read where its values stay: no chunk of it is held besides.
        """
        saved = self.tensors[name]
        values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        parts = self._parts[self._stored_as.get(name, name)]
        if len(parts) > 1:
            self.fill({name: [(values, (0,) * len(saved.shape))]})
            return values
        ((file, part),) = parts
        stamp("reading a checkpoint")
        data = values.view(-1).view(torch.uint8).numpy().data
        with self._opened(file) as opened:
            for number, chunk in enumerate(part.ranges(file.chunk_bytes)):
                self._bytes(opened, file, part, number, data[chunk.start : chunk.stop])
        return values

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Raise Damage unless every file of share ``index`` of ``count`` is intact, and all its values are finite."""
        for file in self.files[index::count]:
            for part in file.parts:
                stamp(f"checking {file.file} of a checkpoint")
                with self._opened(file) as opened:
                    for number in range(len(part.ranges(file.chunk_bytes))):
                        if not is_finite(self._chunk(opened, file, part, number)):
                            raise Damage(f"{self.folder}: {words(part.name)} is not finite.")

    def _fill(self, file: SavedFile, part: SavedPart, targets: Sequence[Target]) -> None:
        itemsize = DTYPES[part.dtype].itemsize
        of_chunks = [
            list(_copies(part, chunk.start // itemsize, chunk.stop // itemsize, targets))
            for chunk in part.ranges(file.chunk_bytes)
        ]
        if not any(of_chunks):
            return
        with self._opened(file) as opened:
            for number, copies in enumerate(of_chunks):
                if copies:
                    values = self._chunk(opened, file, part, number)
                    for copy in copies:
                        copy.run(values)

    def _chunk(self, opened: BufferedReader, file: SavedFile, part: SavedPart, number: int) -> Tensor:
        """Values of a chunk, ``(elements,)``. Raises Damage."""
        data = self._bytes(opened, file, part, number)
        return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[part.dtype])

    def _bytes(
        self, opened: BufferedReader, file: SavedFile, part: SavedPart, number: int, into: memoryview | None = None
    ) -> memoryview:
        """Bytes of a chunk. ``into``: memory for them; None: it is allocated. Raises Damage."""
        chunk = part.ranges(file.chunk_bytes)[number]
        data = read_range(opened, self._starts[file.file], part, chunk, into)
        # Format 2 has no hashes of chunks: its file is verified already.
        bad = bool(part.chunks) and hash_of(data) != part.chunks[number]
        if bad or len(data) != len(chunk):
            raise Damage(f"{self.folder / file.file} is damaged: {words(part.name)}.")
        return data

    @contextmanager
    def _opened(self, file: SavedFile) -> Iterator[BufferedReader]:
        """Open a file. What is not a part of a tensor is verified the first time. Raises Damage."""
        path = self.folder / file.file
        try:
            if file.file not in self._starts:
                require_file(path)
            with path.open("rb") as opened:
                if file.file not in self._starts:
                    self._starts[file.file] = self._verified_start(path, opened, file)
                yield opened
        except OSError as error:
            raise Damage(f"{path} cannot be read: {os_reason(error)}.") from error

    def _verified_start(self, path: Path, opened: BufferedReader, file: SavedFile) -> int:
        """Place in a file from which those of parts are counted. Raises Damage unless header and length are as written.

        In format 2, all of the file is verified.
        """
        if self._hashes:
            stamp(f"checking {file.file} of a checkpoint")
            if hashlib.file_digest(opened, "sha256").hexdigest() != self._hashes[file.file]:
                raise Damage(f"{path} is damaged.")
            return 0
        own = header(file.parts)
        if not _begins_with(opened, own):
            for other in self.files:
                if _begins_with(opened, header(other.parts)):
                    raise Damage(f"{path} holds what {other.file} held: files were exchanged.")
            raise Damage(f"{path} is damaged in its header.")
        if opened.seek(0, SEEK_END) != len(own) + sum(part.nbytes for part in file.parts):
            raise Damage(f"{path} is damaged: it has another length.")
        return len(own)


def _begins_with(opened: BufferedReader, wanted: bytes) -> bool:
    opened.seek(0)
    return opened.read(len(wanted)) == wanted


def opened(folder: Path) -> Reader:
    """Checkpoint to read. Raises Damage unless the manifest and all indexes are as written."""
    manifest = read_manifest(folder)
    if isinstance(manifest, format2.OldManifest):
        return Reader(folder, manifest, manifest.files)
    files = []
    for name, digest in manifest.files.items():
        path = folder / index_of(name)
        index = read_file(path)
        if hashlib.sha256(index).hexdigest() != digest:
            raise Damage(f"{path} is damaged.")
        try:
            files.append(file_from(name, index, manifest.tensors))
        except (ValueError, RecursionError) as error:
            raise Damage(f"{path} is damaged: {error}.") from error
    return Reader(folder, manifest, files)


def _require_whole(folder: Path, name: str, saved: SavedTensor, parts: Sequence[SavedPart]) -> None:
    """Raise Damage unless the parts of a tensor make it up: inside it, no two at one corner, and as many elements."""
    num_elements = 0
    for part in parts:
        ends = [first + size for first, size in zip(part.corner, part.shape, strict=False)]
        inside = len(ends) == len(saved.shape) and all(end <= size for end, size in zip(ends, saved.shape, strict=True))
        if not inside:
            raise Damage(f"{folder}: a part of {words(name)} lies outside of its shape {saved.shape}.")
        num_elements += math.prod(part.shape)
    corners = {part.corner for part in parts}
    if len(corners) < len(parts) or num_elements != math.prod(saved.shape):
        raise Damage(f"{folder}: the parts of {words(name)} are not the whole of its shape {saved.shape}.")


@frozen(eq=False)
class _Copy:
    """A copy of values of a chunk: of ``inside``, a slice of the box of ``shape`` that begins at value ``first``."""

    target: Tensor
    first: int
    shape: tuple[int, ...]
    inside: tuple[slice, ...]

    def run(self, values: Tensor) -> None:
        """Copy, given all values of the chunk."""
        box = values[self.first :][: math.prod(self.shape)].view(self.shape)
        self.target.copy_(box[self.inside])


def _copies(part: SavedPart, begin: int, end: int, targets: Sequence[Target]) -> Iterator[_Copy]:
    """Yield the copies of the elements ``begin`` to ``end`` of a part, which are a chunk, to targets."""
    first = 0
    for in_part, shape in elements(part.shape, begin, end):
        corner = [own + of_part for own, of_part in zip(in_part, part.corner, strict=True)]
        for target, target_corner in targets:
            common = [
                range(max(box, own), min(box + size, own + own_size))
                for box, size, own, own_size in zip(corner, shape, target_corner, target.shape, strict=True)
            ]
            if all(common):
                in_target = _slices(common, target_corner)
                yield _Copy(target[in_target], first, shape, _slices(common, corner))
        first += math.prod(shape)


def _slices(ranges: Sequence[range], corner: Sequence[int]) -> tuple[slice, ...]:
    """Slices of a box with this corner."""
    return tuple(slice(each.start - first, each.stop - first) for each, first in zip(ranges, corner, strict=True))
