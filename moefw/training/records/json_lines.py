"""Files of one JSON object a line, which grow by whole lines and are read one line at a time."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from moefw.core.errors import DataError
from moefw.system.files import replaced_file

Record = dict[str, Any]


class Closed(ABC):
    """A context manager that closes itself in the end."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits, and close; closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@final
class Appended:
    """File that grows by whole pieces. A piece that fails is removed and written again with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._waiting = b""

    def append(self, data: bytes) -> None:
        """Write what waits, and ``data``. Raises OSError; both wait then."""
        self._waiting += data
        if not self._waiting:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self.path, "a", opener=_open_no_link)
        size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(size)
            self.close()
            raise
        self._waiting = b""

    def close(self) -> None:
        """Close the file, which the next piece opens again."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def line_of(record: Mapping[str, object]) -> bytes:
    """A record as a line of JSON. NumPy numbers are written as numbers, and those that are not finite as null."""
    return json.dumps(_plain(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_lines(path: Path) -> Iterator[tuple[Record, str]]:
    """Yield each record of a file with its line, without the newline; none if there is no file.

    An incomplete last line, as a killed run leaves it, is skipped: a cut-off object never parses, as its brace is
    missing. Raises DataError at a damaged line before the last.
    """
    if not path.is_file():
        return
    damage: DataError | None = None
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if damage is not None:
                raise damage
            text = line.removesuffix("\n")
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                damage = DataError(f"{path}:{number}: damaged line: {error}.", "Delete the line.")
                damage.__cause__ = error
                continue
            yield record, text


def keep_lines(path: Path, stays: Callable[[Record], bool]) -> int:
    """Number of records that are removed from a file: those that do not stay, and an incomplete last line uncounted.

    The file is replaced whole. Raises OSError.
    """
    removed = 0
    with replaced_file(path) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        for record, line in read_lines(path):
            if stays(record):
                file.write(f"{line}\n")
            else:
                removed += 1
        file.flush()
        os.fsync(file.fileno())
    return removed


def _plain(value: object) -> object:
    """JSON-serializable data: Python numbers for NumPy numbers, None for non-finite ones."""
    match value:
        case str() | int() | None:  # a bool is an int
            return value
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case _:
            return value
