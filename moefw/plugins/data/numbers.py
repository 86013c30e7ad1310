"""Files of numbers of one type, little endian, read one by one or in runs."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from moefw.plugins.data.hashed import HashedFile


@final
class NumberFile:
    """The numbers of a file, whose bytes are checked when they are first read; ``bisect`` searches it."""

    def __init__(self, file: HashedFile, dtype: np.dtype[Any]) -> None:
        assert file.size % dtype.itemsize == 0
        self.name = str(file.path)
        self._file = file
        self._dtype = dtype

    def __len__(self) -> int:
        return self._file.size // self._dtype.itemsize

    def __getitem__(self, index: int) -> int:
        return int(self.read(index, 1)[0])

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """``count`` numbers from number ``first``, int64; all are in the file. Raises DamagedDataError."""
        width = self._dtype.itemsize
        return np.frombuffer(self._file.read(first * width, count * width), dtype=self._dtype).astype(np.int64)
