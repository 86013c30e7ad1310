"""What happened in a run: ``events.jsonl``, one JSON object an event, to which every start of the run adds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, final

from moefw.training.full_disk import written
from moefw.training.records.json_lines import Appended, Record, keep_lines, line_of, read_lines

EVENTS: Final = "events.jsonl"
Event = Literal[
    "start",
    "resume",
    "checkpoint",
    "evaluation",
    "skipped_step",
    "rerun_step",
    "loss_spike",
    "full_disk",
    "stop",
    "note",
    "end",
]
"""The kinds of event. Their fields: docs/runs.md."""


@final
class EventLog:
    """Writes ``run_dir/events.jsonl``; one process may write at a time.

    An existing file is continued, without its last line if that is incomplete; nothing else is ever removed.
    ``writing`` surrounds each write and decides how a failure is handled. An event that could not be written waits for
    the next one.
    """

    def __init__(self, run_dir: Path, *, writing: Callable[[Path], AbstractContextManager[None]] = written) -> None:
        self._writing = writing
        self._file = Appended(run_dir / EVENTS)
        with writing(self._file.path):
            if self._file.path.exists():
                keep_lines(self._file.path, lambda record: True)

    def write(self, event: Event, step: int, **fields: object) -> None:
        """Append an event after ``step``, the last one that is done. Values that are not finite become null."""
        line = line_of({"time": round(time.time(), 3), "event": event, "step": step, **fields})
        with self._writing(self._file.path):
            self._file.append(line)

    def close(self) -> None:
        """Write what waits and close the file; closing twice is allowed."""
        with self._writing(self._file.path):
            self._file.append(b"")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[Record]:
    """Yield the events of an ``events.jsonl`` in the order of the file; none if there is no file, as in older runs.

    An incomplete last line is skipped. Raises DataError at a damaged line before the last.
    """
    return (record for record, _ in read_lines(path))
