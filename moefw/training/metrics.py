"""Metrics of a run: one JSON object per step in ``metrics.jsonl``, and the same scalars for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from io import BytesIO, FileIO
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from moefw.core.errors import DataError
from moefw.system.files import replaced_file
from moefw.training.full_disk import written


@final
class MetricsLog:
    """Writes ``run_dir/metrics.jsonl`` and ``run_dir/tensorboard``; one process may write at a time.

    A record has left the process when ``write`` returns, so a killed run keeps it. ``writing`` surrounds each write of
    a file and decides how a failure is handled. Data that could not be written wait for the next record.
    An existing file is continued, without its last line if that is incomplete. With ``keep_until``, as after a resume
    from that step, later steps are removed, in TensorBoard too.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_until: int | None = None,
        writing: Callable[[Path], AbstractContextManager[None]] = written,
    ) -> None:
        self._writing = writing
        self._lines = _Appended(run_dir / "metrics.jsonl")
        with writing(self._lines.path):
            if self._lines.path.exists():
                _truncate(self._lines.path, keep_until)
        now = time.time()
        self._events = _Appended(
            run_dir / "tensorboard" / f"events.out.tfevents.{now}.{socket.gethostname()}.{os.getpid()}"
        )
        self._append(self._events, _first_event(0 if keep_until is None else keep_until + 1))

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record: ``step`` (int), numbers by name, and nested lists or mappings of numbers.

        Non-finite values become null. Only top-level numbers of the record go to TensorBoard, with their names as tags;
        there NaN stays NaN.
        """
        self._append(self._lines, json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
        self._append(self._events, _event(record))

    def _append(self, file: _Appended, data: bytes) -> None:
        with self._writing(file.path):
            file.append(data)

    def close(self) -> None:
        """Write pending data and close both files; closing twice is allowed."""
        for file in (self._lines, self._events):
            with closing(file):
                self._append(file, b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@final
class _Appended:
    """File that grows by whole pieces. A piece that fails is removed and written again with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._waiting = b""

    def append(self, data: bytes) -> None:
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
        if self._file is not None:
            self._file.close()
        self._file = None


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _event(record: Mapping[str, object]) -> bytes:
    """Top-level numbers of a record as a TensorBoard event."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = {key: value for key, value in record.items() if key != "step" and not isinstance(value, bool)}
    values = [
        Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items() if isinstance(value, Real)
    ]
    return _framed(Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values)))


def _first_event(step: int) -> bytes:
    """First events of a file, which hide those of other files from ``step`` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    version = Event(wall_time=time.time(), step=step, file_version="brain.Event:2")
    start = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
    return _framed(version) + (_framed(start) if step else b"")


def _framed(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    frame = BytesIO()
    RecordWriter(frame).write(event.SerializeToString())
    return frame.getvalue()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a ``metrics.jsonl`` in the order of the file; non-finite values are None.

    An incomplete last line, as a killed run leaves it, is skipped. Raises ``DataError`` if the file is missing or a
    line before the last is damaged.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist.", "Name the metrics.jsonl of a run that has made a step.")
    return [record for record, _ in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each record with its line, without the newline. A cut-off object never parses: its brace is missing."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line), line
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(f"{path}:{number}: damaged line: {error}.", "Delete the line.") from error


def _truncate(path: Path, keep_until: int | None) -> None:
    """Replace the file by one without steps after ``keep_until`` and without an incomplete last line."""
    last = math.inf if keep_until is None else keep_until
    with replaced_file(path) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for record, line in _whole_lines(path) if record["step"] <= last)
        file.flush()
        os.fsync(file.fileno())


def _plain(value: object) -> object:
    """JSON-serializable data: Python numbers for NumPy numbers, None for non-finite ones."""
    match value:
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bool():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case _:
            return value
