"""Token files: the ids of a corpus in order, in the smallest type that holds them, little endian."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from moefw.core.data import TokenStream
from moefw.training.data.hashed import HashedFile


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned type for ids below ``vocab_size``: uint8, uint16 or uint32."""
    assert 0 < vocab_size <= 1 << 32
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


@final
class TokenFile(TokenStream):
    """A token file, whose bytes are checked when they are first read."""

    def __init__(self, file: HashedFile, *, dtype: np.dtype[Any]) -> None:
        assert file.size % dtype.itemsize == 0
        self.name = str(file.path)
        self._file, self._dtype = file, dtype

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._file.size // self._dtype.itemsize

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return ``count`` ids from ``start``, int64; the range lies inside the file. Raises DamagedDataError."""
        width = self._dtype.itemsize
        return np.frombuffer(self._file.read(start * width, count * width), dtype=self._dtype).astype(np.int64)


@final
class TokenWriter:
    """Writes a token file from beginning to end; a context manager. Syncs the file to the disk on exit."""

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._file = path.open("wb")
        self.num_tokens = 0

    def write(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append ids, one axis, which may be empty."""
        assert not ids.size or (ids.min() >= 0 and ids.max() < self._vocab_size)
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += ids.size

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
