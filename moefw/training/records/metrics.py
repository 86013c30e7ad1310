"""Metrics of a run: one JSON object per step in ``metrics.jsonl``, and the same scalars for TensorBoard."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, Final, final

from moefw.core.errors import DataError
from moefw.training.full_disk import written
from moefw.training.records.json_lines import Appended, Closed, Record, keep_lines, line_of, read_lines

METRICS: Final = "metrics.jsonl"
UNPLOTTED: Final = ("step", "time")
"""Numbers of a record that an event of TensorBoard has in fields of its own."""


@final
class MetricsLog(Closed):
    """Writes ``run_dir/metrics.jsonl`` and ``run_dir/tensorboard``; one process may write at a time.

    A record has left the process when ``write`` returns, so a killed run keeps it. ``writing`` surrounds each write of
    a file and decides how a failure is handled. Data that could not be written wait for the next record.
    An existing file is continued, without its last line if that is incomplete. With ``keep_until``, as after a resume
    from that step, later steps are removed, in TensorBoard too; ``lost_steps`` is their number.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_until: int | None = None,
        writing: Callable[[Path], AbstractContextManager[None]] = written,
    ) -> None:
        self._writing = writing
        self._lines = Appended(run_dir / METRICS)
        self.lost_steps = 0
        last = math.inf if keep_until is None else keep_until
        with writing(self._lines.path):
            if self._lines.path.exists():
                self.lost_steps = keep_lines(self._lines.path, lambda record: record["step"] <= last)
        now = time.time()
        self._events = Appended(
            run_dir / "tensorboard" / f"events.out.tfevents.{now}.{socket.gethostname()}.{os.getpid()}"
        )
        self._append(self._events, _first_event(0 if keep_until is None else keep_until + 1))

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record: ``step`` (int), numbers by name, and nested lists or mappings of numbers.

        Non-finite values become null. Only top-level numbers of the record go to TensorBoard, with their names as tags;
        there NaN stays NaN.
        """
        self._append(self._lines, line_of(record))
        self._append(self._events, _event(record))

    def _append(self, file: Appended, data: bytes) -> None:
        with self._writing(file.path):
            file.append(data)

    def close(self) -> None:
        """Write pending data and close both files; closing twice is allowed."""
        with closing(self._events), closing(self._lines):
            self._append(self._lines, b"")
            self._append(self._events, b"")


def _event(record: Mapping[str, object]) -> bytes:
    """Top-level numbers of a record as a TensorBoard event."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = {key: value for key, value in record.items() if key not in UNPLOTTED and not isinstance(value, bool)}
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


def read_metrics(path: Path) -> Iterator[Record]:
    """Records of a ``metrics.jsonl`` in the order of the file; non-finite values are None.

    An incomplete last line, as a killed run leaves it, is skipped. Raises ``DataError`` if the file is missing, or at a
    damaged line before the last.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist.", "Name the metrics.jsonl of a run that has made a step.")
    return (record for record, _ in read_lines(path))
