"""The data of ``sample``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moefw
import numpy as np


class SampleStream(moefw.TokenStream):
    """The bytes of lines, end to end."""

    def __init__(self, name: str, lines: Sequence[bytes]) -> None:
        self.name = name
        self._ids = np.frombuffer(b"".join(lines), np.uint8).astype(np.int64)
        lengths = [0, *(len(line) for line in lines)]
        self._starts = np.cumsum(lengths, dtype=np.int64)[:-1]

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._ids)

    def read(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes from ``start``."""
        return self._ids[start : start + count].copy()

    def document_starts(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where lines start."""
        first, last = np.searchsorted(self._starts, (start, start + count))
        return self._starts[first:last]


class SampleSource(moefw.DataSource):
    """Lines to train on, and those held out. Raises DataError."""

    vocab_size = 256
    fingerprint = "bytes"

    def __init__(self, path: Path, heldout: float) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise moefw.DataError(f"{path} cannot be read: {error.strerror}.", "Name a file of text.") from error
        lines = content.splitlines(keepends=True)
        if len(lines) < 2:
            raise moefw.DataError(f"{path} has less than two lines.", "Write a document a line.")
        cut = min(len(lines) - 1, max(1, round(len(lines) * (1 - heldout))))
        self.train = SampleStream(str(path), lines[:cut])
        self.heldout = SampleStream(str(path), lines[cut:])
        self.heldout_bytes = b"".join(lines[cut:])
        self.digest = hashlib.sha256(content + str(cut).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Bytes of ``text``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes."""
        return bytes(ids).decode(errors="replace")
