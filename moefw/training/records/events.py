"""What happened in a run: ``events.jsonl``, one JSON object an event, to which every start of the run adds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, Literal, final

from moefw.training.full_disk import written
from moefw.training.records.json_lines import Appended, Closed, Record, keep_lines, line_of, read_lines

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
    "end",
]
"""The kinds of event. Their fields: docs/runs.md."""
STARTS: Final[tuple[Event, ...]] = ("start", "resume")
"""Those that begin a start of the run."""


@final
class EventLog(Closed):
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
        with self._writing(self._file.path):
            self._file.append(_line(event, step, fields))

    def attempt(self, event: Event, step: int, **fields: object) -> None:
        """Append an event, and go on if it cannot be written, as on a disk that is full. It waits for the next one."""
        with suppress(OSError):
            self._file.append(_line(event, step, fields))

    def close(self) -> None:
        """Write what waits, if there is room, and close the file; closing twice is allowed."""
        with suppress(OSError):
            self._file.append(b"")
        self._file.close()


def _line(event: Event, step: int, fields: Mapping[str, object]) -> bytes:
    return line_of({"time": round(time.time(), 3), "event": event, "step": step, **fields})


def read_events(path: Path) -> Iterator[Record]:
    """Yield the events of an ``events.jsonl`` in the order of the file; none if there is no file, as in older runs.

    An incomplete last line is skipped. Raises DataError at a damaged line before the last.
    """
    return (record for record, _ in read_lines(path))


def last_layout(path: Path) -> dict[str, int] | None:
    """Layout of the last start of a run: the size of each axis that has more than one rank; None if it is unknown."""
    layout: dict[str, int] | None = None
    for event in read_events(path):
        layout = event.get("layout", layout)
    return layout
