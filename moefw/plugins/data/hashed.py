"""Files that are hashed chunk by chunk: every chunk that is read is checked, and unread chunks cost nothing."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Final, Protocol, final

from moefw.core.errors import DamagedDataError, os_reason

CHUNK_BYTES: Final = 1 << 18
"""256 KiB: a chunk's first read takes 0.2 ms to hash, and the hashes of a terabyte take 128 MB."""
HASH_BYTES: Final = 32


def chunk_hashes(path: Path) -> bytes:
    """SHA-256 of each chunk of a file, in order: ``HASH_BYTES * num_chunks(size)`` bytes."""
    hashes = bytearray()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hashes += hashlib.sha256(chunk).digest()
    return bytes(hashes)


def num_chunks(size: int) -> int:
    """How many chunks a file of ``size`` bytes has; an empty file has none."""
    return -(-size // CHUNK_BYTES)


class Hashes(Protocol):
    """Hashes of a file's chunks, ``since`` when they are known."""

    since: str

    def fits(self, chunk: int, digest: bytes) -> bool:
        """Whether ``digest`` is the hash of a chunk."""


@final
class KnownHashes(Hashes):
    """The result of :func:`chunk_hashes`."""

    since = "it was written"

    def __init__(self, hashes: bytes) -> None:
        self._hashes = hashes

    def fits(self, chunk: int, digest: bytes) -> bool:
        """Compare."""
        return digest == self._hashes[chunk * HASH_BYTES :][:HASH_BYTES]


@final
class SeenHashes(Hashes):
    """Hashes of chunks as they were first read, by any process: a file at ``path`` that all of them share.

    It is sparse, and made if it is not there. A process that is killed leaves whole hashes. Raises OSError.
    """

    since = "it was first read"

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, self._descriptor)

    def fits(self, chunk: int, digest: bytes) -> bool:
        """Compare, or note the hash of a chunk that nobody has read yet."""
        seen = os.pread(self._descriptor, HASH_BYTES, chunk * HASH_BYTES)
        if not any(seen):  # a hole of the sparse file reads as zeros
            os.pwrite(self._descriptor, digest, chunk * HASH_BYTES)
            return True
        return digest == seen


@final
class HashedFile:
    """A file of ``size`` bytes that is no longer written. ``fix`` is the remedy for damage.

    A chunk is checked at its first read. The file is read, not memory-mapped: a disk error under a mapping kills the
    process without a message. Raises OSError if there is no such file.
    """

    def __init__(self, path: Path, *, size: int, hashes: Hashes, fix: str) -> None:
        self.path = path
        self.size = size
        self._fix = fix
        self._hashes = hashes
        self._checked = bytearray(num_chunks(size))
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> bytes:
        """``count`` bytes from ``start``; the range lies inside the file. Raises DamagedDataError."""
        assert 0 <= start <= start + count <= self.size, f"bytes {start} + {count} of {self.size}"
        for chunk in range(start // CHUNK_BYTES, num_chunks(start + count)):
            if not self._checked[chunk]:
                self._check(chunk)
        return self._read(start, count)

    def _check(self, chunk: int) -> None:
        first = chunk * CHUNK_BYTES
        digest = hashlib.sha256(self._read(first, min(CHUNK_BYTES, self.size - first))).digest()
        if not self._hashes.fits(chunk, digest):
            place = f"(bytes {first:,} to {first + CHUNK_BYTES:,})"
            raise self._damaged(f"has changed since {self._hashes.since} {place}")
        self._checked[chunk] = True

    def _read(self, start: int, count: int) -> bytes:
        parts = []
        end = start + count
        while start < end:
            try:
                part = os.pread(self._descriptor, end - start, start)
            except OSError as error:
                raise self._damaged(f"cannot be read: {os_reason(error)}") from error
            if not part:
                raise self._damaged(f"became shorter than its {self.size:,} bytes")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damaged(self, what: str) -> DamagedDataError:
        return DamagedDataError(f"the prepared data are damaged: {self.path} {what}.", self._fix)
