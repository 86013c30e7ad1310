"""Token files: the ids of a corpus in order, in the smallest type that holds them, and where its documents start."""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from moefw.core.data import TokenStream
from moefw.plugins.data.numbers import NumberFile

STARTS: Final = np.dtype("<i8")
"""The type of the files of document starts."""
TRAINED: Final = np.dtype("u1")
"""The type of the files that say whether each token trains."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Smallest unsigned type for ids below ``vocab_size``: uint8, uint16 or uint32."""
    assert 0 < vocab_size <= 1 << 32
    if vocab_size <= 1 << 8:
        return np.dtype("u1")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@final
class TokenFile(TokenStream):
    """The ids ``begin`` to ``end`` of a file. ``starts`` holds where documents start in the file, ascending.

    ``trained`` holds 1 for each id to predict, 0 for others; None: all are.
    """

    def __init__(
        self,
        ids: NumberFile,
        starts: NumberFile,
        *,
        trained: NumberFile | None = None,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        self.name = f"{ids.name} from token {begin:,}" if begin else ids.name
        self._ids = ids
        self._starts = starts
        self._trained = trained
        self._begin = begin
        self._end = len(ids) if end is None else end

    def __len__(self) -> int:
        """Number of tokens."""
        return self._end - self._begin

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """``count`` ids from ``start``, int64; all are in the stream. Raises DamagedDataError."""
        assert 0 <= start <= start + count <= len(self)
        return self._ids.read(self._begin + start, count)

    def document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Where documents start among ``count`` tokens from ``start``. Raises DamagedDataError."""
        first, last = (bisect_left(self._starts, self._begin + place) for place in (start, start + count))
        return self._starts.read(first, last - first) - self._begin

    def trained(self, start: int, count: int) -> NDArray[np.bool_] | None:
        """Whether each of ``count`` tokens from ``start`` is one to predict. Raises DamagedDataError."""
        return None if self._trained is None else self._trained.read(self._begin + start, count) != 0


def starts_file(path: Path) -> Path:
    """File of document starts beside a token file."""
    return path.with_suffix(".starts")


def trained_file(path: Path) -> Path:
    """File beside a token file that says whether each token trains."""
    return path.with_suffix(".trained")


@final
class TokenWriter:
    """Writes a token file and its document starts from beginning to end; a context manager. Syncs them on exit."""

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._file = path.open("wb")
        self._starts = starts_file(path).open("wb")
        self.num_tokens = 0

    def start_document(self) -> None:
        """Note that the next id starts a document."""
        self._starts.write(np.array(self.num_tokens, STARTS).tobytes())

    def write(self, ids: NDArray[np.integer[Any]]) -> None:
        """Append ids, one axis, which may be empty."""
        assert not ids.size or (ids.min() >= 0 and ids.max() < self._vocab_size)
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += ids.size

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:
            for file in (self._file, self._starts):
                stack.enter_context(file)
                if error is None:
                    file.flush()
                    os.fsync(file.fileno())
