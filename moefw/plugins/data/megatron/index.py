"""The index of an indexed dataset of Megatron-LM (``megatron/core/datasets/indexed_dataset.py``), checked completely.

Little endian: 9 bytes of magic, the version (u64), the code of the ids' type (u8), the number of sequences and of
document indices (u64 each); then the length of each sequence in tokens (i32), where it starts in the ``.bin`` in bytes
(i64), and the number of the first sequence of each document, and of all sequences at the end (i64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from moefw.core.errors import DataError
from moefw.plugins.data.tokens import STARTS
from moefw.system.stamps import stamp

MAGIC: Final = b"MMIDIDX\x00\x00"
HEADER: Final = struct.Struct("<9sQBQQ")
TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of ids by their code."""
FLOATS: Final = {6: "float64", 7: "float32"}
BLOCK: Final = 1 << 20
"""Numbers that are read at once."""

_LENGTHS, _POINTERS, _DOCUMENTS = (np.dtype(kind) for kind in ("<i4", "<i8", "<i8"))
_FIX = "Write the pair of files again, or restore them from a copy."


@frozen(kw_only=True)
class Index:
    """What an index says of its ids: their type, and how many tokens and documents there are."""

    dtype: np.dtype[Any]
    num_tokens: int
    num_documents: int


def read_index(path: Path, ids: Path, starts: BinaryIO) -> Index:
    """Check an index against the size of its file of ids, and write where its documents start, in tokens.

    Raises DataError that names the file and the field, and OSError.
    """
    with path.open("rb") as file:
        dtype, num_sequences, num_indices = _header(file, path)
        body = _Body(file, path, num_sequences)
        num_tokens = body.check(_documents(body, num_indices), dtype.itemsize, starts)
    size = ids.stat().st_size
    described = num_tokens * dtype.itemsize
    if size != described:
        what = f"sequence_lengths: they describe {described:,} bytes of {dtype.name}, and {ids} has {size:,}"
        raise _wrong(path, what)
    if not num_tokens:
        raise _wrong(path, "sequence_lengths: there is no token")
    return Index(dtype=dtype, num_tokens=num_tokens, num_documents=num_indices - 1)


def _header(file: BinaryIO, path: Path) -> tuple[np.dtype[Any], int, int]:
    size = os.fstat(file.fileno()).st_size
    raw = file.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        magic = raw[: len(MAGIC)]
        raise _wrong(path, f"magic: {magic!r} instead of {MAGIC!r}", "Name the pair of files that Megatron-LM wrote.")
    if len(raw) < HEADER.size:
        raise _wrong(path, f"header: the file ends after {len(raw)} of {HEADER.size} bytes")
    _, version, code, num_sequences, num_indices = HEADER.unpack(raw)
    if version != 1:
        raise _wrong(path, f"version: {version} instead of 1")
    if code not in TYPES:
        kind = f"{FLOATS[code]}, which holds no token ids" if code in FLOATS else "no known type"
        raise _wrong(path, f"dtype code: {code} is {kind}")
    if num_indices < 2 or not num_sequences:
        raise _wrong(path, f"counts: {num_sequences} sequences and {num_indices} document indices hold no document")
    described = HEADER.size + num_sequences * (_LENGTHS.itemsize + _POINTERS.itemsize) + num_indices * 8
    if size == described + num_sequences:
        raise _wrong(path, "sequence_modes: these are multimodal data", "Write them without modes: only text is read.")
    if size != described:
        what = f"counts: {num_sequences} sequences and {num_indices} document indices make {described:,} bytes"
        raise _wrong(path, f"{what}, and the file has {size:,}")
    return np.dtype(TYPES[code]), num_sequences, num_indices


@frozen
class _Body:
    file: BinaryIO
    path: Path
    num_sequences: int

    def blocks(self, offset: int, dtype: np.dtype[Any], count: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the ``count`` numbers at ``offset``, some at a time, each time with the number of the first."""
        for first in range(0, count, BLOCK):
            stamp(f"checking {self.path.name}")
            num_bytes = min(BLOCK, count - first) * dtype.itemsize
            self.file.seek(offset + first * dtype.itemsize)
            raw = self.file.read(num_bytes)
            if len(raw) != num_bytes:
                raise DataError(f"{self.path} became shorter while it was read.", "Run again.")
            yield first, np.frombuffer(raw, dtype).astype(np.int64)

    def check(self, documents: Iterator[NDArray[np.int64]], width: int, starts: BinaryIO) -> int:
        """Check lengths and pointers, write the start of each document, and return the number of tokens."""
        count = self.num_sequences
        end = 0
        at = HEADER.size + count * _LENGTHS.itemsize
        waiting = next(documents)
        both = zip(self.blocks(HEADER.size, _LENGTHS, count), self.blocks(at, _POINTERS, count), strict=True)
        for (first, lengths), (_, pointers) in both:
            self.expect("sequence_lengths", first, lengths, lengths >= 0, "is negative")
            ends = end + np.cumsum(lengths) * width
            follows = pointers == np.concatenate([[end], ends[:-1]])
            self.expect("sequence_pointers", first, pointers, follows, "is not where the sequence before it ends")
            while True:
                inside = np.searchsorted(waiting, first + len(pointers))
                starts.write((pointers[waiting[:inside] - first] // width).astype(STARTS).tobytes())
                waiting = waiting[inside:]
                if len(waiting) or (following := next(documents, None)) is None:
                    break
                waiting = following
            end = int(ends[-1])
        for _ in documents:
            pass
        return end // width

    def expect(self, field: str, first: int, values: NDArray[np.int64], right: NDArray[np.bool_], what: str) -> None:
        """Raise DataError for the first of the values that is not right."""
        if not right.all():
            at = int(np.argmin(right))
            raise _wrong(self.path, f"{field}[{first + at}]: {values[at]} {what}")


def _documents(body: _Body, count: int) -> Iterator[NDArray[np.int64]]:
    """Yield document indices, checked: from 0 to the number of sequences, ascending."""
    offset = HEADER.size + body.num_sequences * 12
    before = 0
    all_of_them = body.num_sequences
    for first, indices in body.blocks(offset, _DOCUMENTS, count):
        previous = np.concatenate([[before], indices[:-1]])
        body.expect("document_indices", first, indices, indices <= all_of_them, f"is past all {all_of_them} sequences")
        body.expect("document_indices", first, indices, indices >= previous, "is less than the one before it")
        if first == 0:
            body.expect("document_indices", 0, indices[:1], indices[:1] == 0, "is not the first sequence")
        before = int(indices[-1])
        if first + len(indices) == count:
            last = indices[-1:]
            body.expect("document_indices", count - 1, last, last == all_of_them, f"is not all {all_of_them} sequences")
        yield indices


def _wrong(path: Path, what: str, fix: str = _FIX) -> DataError:
    return DataError(f"{path}: {what}.", fix)
